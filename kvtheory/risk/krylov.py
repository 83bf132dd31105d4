"""Leading singular directions of a matrix that is only multiplied by: randomised block Krylov with Rayleigh-Ritz.

Musco and Musco, NeurIPS 2015 (arXiv 1504.05477). From a random block Omega the space spanned by X Omega, (X X^T) X Omega, ...
holds the leading left singular vectors far better than X Omega alone. In an orthonormal basis Q of it,

    T = (X^T Q)^T (X^T Q) = S diag(theta) S^T,        U = Q S.

The Ritz values theta_1 >= theta_2 >= ... obey, for every k (A = X X^T, C = its block on the complement of Q):

    sum_{i<=k} theta_i <= sum_{i<=k} lambda_i <= sum_{i<=k} theta_i + tr C,        tr C = ||X||_F^2 - tr T

(Cauchy interlacing; Ky Fan's norm of a positive block matrix is at most the sum of its diagonal blocks'). Residuals bound nothing
here: Kahan's theorem puts an eigenvalue near each theta_i, but does not say which one.

All this needs Q orthonormal. Where the space is exhausted (rank X below the number of columns) a new block, less its part in
span Q, is rounding that lies in span Q again, and normalising it would count directions twice. So every block is rank-revealed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import qr

from kvtheory.namespaces import host, namespace
from kvtheory.randomness import generator

Float = NDArray[np.float64]

_OVERSAMPLING = 8
_STEPS = 3
#: what a block must keep, relative to its norm, when its part in the basis is taken out: less is rounding
_RANK = 1e-12
#: and what the normalised rest must keep when that is done again; a direction that lost more was mostly in the basis
_TWICE = 0.1


class Leading(NamedTuple):
    """eigenvalues (r,) of X X^T, descending; vectors (n, r) orthonormal; captured = tr T. r < rank where rank X is."""

    eigenvalues: Float
    vectors: Float
    captured: float


def columns(rank: int) -> int:
    """Columns of the Krylov basis for `rank` eigenvalues, at most."""
    return (rank + _OVERSAMPLING) * (_STEPS + 1)


def leading(
    forward: Callable[[Float], Float],
    adjoint: Callable[[Float], Float],
    shape: tuple[int, int],
    rank: int,
    trace: float = np.inf,
    xp: Any = np,
) -> Leading:
    """The `rank` leading eigenpairs of X X^T; forward(y) = X y for y (width, b), adjoint(y) = X^T y for y (n, b); shape (n, width).

    xp: the namespace of the arrays that these take and give, and of the vectors; the eigenvalues are NumPy's.

    trace: ||X||_F^2 where it is known. ArithmeticError if the basis captures more than that, as no orthonormal basis can.
    """
    n, width = shape
    smaller = min(n, width)
    start = xp.asarray(generator(0, "risk krylov").standard_normal((width, min(rank + _OVERSAMPLING, smaller))))
    basis, image = _grow(forward(start), smaller, adjoint, forward)
    return _ritz(basis, image.T @ image, rank, trace)


def symmetric(normal: Callable[[Float], Float], size: int, rank: int, trace: float = np.inf, xp: Any = np) -> Leading:
    """The same for A (size, size), symmetric and positive: normal(y) = A y. With A = X^T X nothing as long as X is held.

    The basis starts from A Omega: each product by A is two by X, half a step more than `leading`.
    """
    start = xp.asarray(generator(0, "risk krylov").standard_normal((size, min(rank + _OVERSAMPLING, size))))
    basis, image = _grow(normal(start), size, normal, lambda image: image)
    t = basis.T @ image
    return _ritz(basis, (t + t.T) / 2, rank, trace)


def _grow(
    block: Float, smaller: int, image_of: Callable[[Float], Float], next_of: Callable[[Float], Float]
) -> tuple[Float, Float]:
    """(basis, its images): orthonormal columns of block, then of next_of(image_of(those)), ..., at most 1 + _STEPS times."""
    steps = min(_STEPS, smaller // block.shape[1] - 1)
    xp = namespace(block)
    basis = xp.empty((len(block), block.shape[1] * (steps + 1)), order="F")
    images: list[Float] = []
    filled = 0
    for step in range(steps + 1):
        if step:
            block = next_of(images[-1])
        new = _new_directions(basis[:, :filled], block)
        if step and new.shape[1] == 0:
            break
        basis[:, filled : filled + new.shape[1]] = new
        filled += new.shape[1]
        images.append(image_of(new))
    return basis[:, :filled], xp.hstack(images)


def _ritz(basis: Float, t: Float, rank: int, trace: float) -> Leading:
    xp = namespace(t)
    theta, s = map(host, xp.linalg.eigh(t))
    theta, s = np.maximum(theta[::-1], 0), s[:, ::-1]
    captured = float(theta.sum())
    if captured > trace * (1 + 1e-10):
        raise ArithmeticError(f"krylov: a basis of {len(theta)} columns captured {captured!r} of a trace of {trace!r}")
    return Leading(theta[:rank], basis @ xp.asarray(s[:, :rank]), captured)


def _new_directions(basis: Float, block: Float) -> Float:
    """Orthonormal columns (n, b') that span, with basis (n, c), what block (n, b) adds to it; b' = 0 where it adds nothing."""
    xp = namespace(block)
    for least in (_RANK * float(xp.linalg.norm(block)), _TWICE):
        block = block - basis @ (basis.T @ block)
        if block.shape[1] == 0 or least == 0:
            return block[:, :0]
        q, r, _ = qr(host(block), mode="economic", pivoting=True)  # of few columns; CuPy's does not pivot
        block = xp.asarray(q[:, np.abs(np.diag(r)) > least], dtype=np.float64)
    return block
