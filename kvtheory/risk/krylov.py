"""Leading singular directions of a matrix that is only multiplied by: randomised block Krylov with Rayleigh-Ritz.

Musco and Musco, NeurIPS 2015 (arXiv 1504.05477). From a random block Omega the space spanned by X Omega, (X X^T) X Omega, ...
holds the leading left singular vectors far better than X Omega alone. In an orthonormal basis Q of it,

    T = (X^T Q)^T (X^T Q) = S diag(theta) S^T,        U = Q S.

The Ritz values theta_1 >= theta_2 >= ... obey, for every k (A = X X^T, C = its block on the complement of Q):

    sum_{i<=k} theta_i <= sum_{i<=k} lambda_i <= sum_{i<=k} theta_i + tr C,        tr C = ||X||_F^2 - tr T

(Cauchy interlacing; Ky Fan's norm of a positive block matrix is at most the sum of its diagonal blocks'). And to each theta_i
belongs an eigenvalue of A, theirs apart, no further than || A U - U diag(theta) ||_2 (Kahan; Parlett, theorem 11.5.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory.randomness import generator

Float = NDArray[np.float64]

_OVERSAMPLING = 8
_STEPS = 3


class Leading(NamedTuple):
    """eigenvalues (r,) of X X^T, descending; vectors (n, r) orthonormal; captured = tr T; residual = ||A U - U theta||_2."""

    eigenvalues: Float
    vectors: Float
    captured: float
    residual: float


def columns(rank: int) -> int:
    """Columns of the Krylov basis for `rank` eigenvalues."""
    return (rank + _OVERSAMPLING) * (_STEPS + 1)


def leading(
    forward: Callable[[Float], Float], adjoint: Callable[[Float], Float], shape: tuple[int, int], rank: int
) -> Leading:
    """The `rank` leading eigenpairs of X X^T; forward(y) = X y for y (width, b), adjoint(y) = X^T y for y (n, b); shape (n, width)."""
    n, width = shape
    smaller = min(n, width)
    size = min(rank + _OVERSAMPLING, smaller)
    steps = min(_STEPS, smaller // size - 1)
    start = generator(0, "risk krylov").standard_normal((width, size))
    basis = np.linalg.qr(forward(start))[0]
    images = [adjoint(basis)]
    for _ in range(steps):
        block = forward(images[-1])
        # twice: the second pass removes what cancellation in the first has left, also where the space is exhausted
        for _ in range(2):
            block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
        basis = np.hstack([basis, block])
        images.append(adjoint(block))
    image = np.hstack(images)
    theta, s = np.linalg.eigh(image.T @ image)
    theta, s = np.maximum(theta[::-1], 0), s[:, ::-1]
    s_r, theta_r = s[:, :rank], theta[:rank]
    vectors = basis @ s_r
    residual = float(np.linalg.norm(forward(image @ s_r) - vectors * theta_r, 2))
    return Leading(theta_r, vectors, float(theta.sum()), residual)
