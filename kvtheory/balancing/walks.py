"""Balanced walks: the cube method (`cube`) and the spectral walk (`spectral`), on the inclusion weights of a cache's tokens.

Inclusion weights w start at pi_i, sum pi = K' whole, and move, unbiased, until all but a few are 0 or 1, always inside

    { w : sum_i (w_i - pi_i) = 0,  sum_i (w_i - pi_i) Pi Gamma'_i = 0 },    Gamma'_i = (p_i / pi_i) Gamma_i,

Pi the projection on the m leading directions; token i gets weight (p_i / pi_i) w_i. pi_i = K' p_i makes Gamma' = Gamma / K'. With
other probabilities the weights' total is a constraint of its own, and K' one less.

One step takes a null vector u of the constraints on some fractional coordinates, and goes to w + t+ u with probability
t- / (t+ + t-), else to w - t- u, where t+ and t- are how far [0, 1] lets it go: one coordinate at least is settled.

Floating point: the coordinate that ends a step is set exactly; others within 1e-9 of 0 or 1 are snapped, since a fraction of 1e-16
would be kept as a token, and what the snap takes from the constraints is put back by the least move of coordinates still free.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from kvtheory.balancing.cube import cube_walk
from kvtheory.balancing.moves import Coin, Float
from kvtheory.balancing.spectral import spectral_walk
from kvtheory.risk import krylov, spectra

_ROWS = 1 << 22


class Split(NamedTuple):
    """Profiles x (n, size) in their leading directions: coordinates (n, m) in an orthonormal basis, and what these leave, (n, size)."""

    leading: Float
    tail: Float


def split(x: Float, p: Float, m: int) -> Split:
    """Coordinates in the m leading eigendirections of sum_i p_i x_i x_i^T, and what they leave of x. Fewer where the rank is.

    Where min(n, size) > spectra.LARGEST_GRAM the directions are Ritz vectors (`krylov`): a walk still makes no error in them, but
    they may leave more than tail_m, the excess being at most what the Krylov space misses of the trace.
    """
    if m == 0:
        return Split(np.zeros((len(x), 0)), x)
    directions = leading_directions(x, p, m)
    leading = x @ directions
    return Split(leading, x - leading @ directions.T)


def leading_directions(x: Float, p: Float, m: int) -> Float:
    """The m > 0 directions of `split` as orthonormal columns, (size, m or fewer)."""
    n, size = x.shape
    root = np.sqrt(p)[:, None]
    if min(n, size) > spectra.LARGEST_GRAM:
        weighted = root * x
        trace = float((weighted**2).sum())
        found = krylov.leading(lambda y: weighted @ y, lambda y: weighted.T @ y, x.shape, m, trace)
        values, directions = found.eigenvalues, weighted.T @ found.vectors
    else:
        gram = _gram(x, root)
        low = max(len(gram) - m, 0)
        values, vectors = eigh(gram, subset_by_index=[low, len(gram) - 1])
        values, vectors = values[::-1], vectors[:, ::-1]
        directions = x.T @ (root * vectors) if n <= size else vectors
    # directions beyond the rank are rounding, and would spend budget on constraining nothing
    alive = values > 1e-14 * len(x) * max(values.max(initial=0), np.finfo(float).tiny)
    return np.asarray(np.linalg.qr(directions[:, alive])[0])


def _gram(x: Float, root: Float) -> Float:
    """The smaller of the Gram matrices of root x, without a copy of x where it is long."""
    n, size = x.shape
    if n <= size:
        weighted = root * x
        return np.asarray(weighted @ weighted.T)
    gram, step = np.zeros((size, size)), max(_ROWS // size, 1)
    for start in range(0, n, step):
        weighted = root[start : start + step] * x[start : start + step]
        gram += weighted.T @ weighted
    return gram


def balance(
    x: Float,
    p: Float,
    K: int,
    m: int,
    method: str,
    coin: Coin,
    derandomise: bool = False,
    *,
    inclusion: Float | None = None,
    window: int | None = None,
    missing: Float | None = None,
) -> Float:
    """Weights (n,) of sum 1 with at most K < n above 0; x (n, size), p (n,) positive of sum 1; method "cube" or "spectral".

    inclusion (n,), of sum 1: what pi is proportional to, default p. window, missing: see `spectral_walk`; missing is of x.
    ValueError if K is too small for the window.
    """
    leading, tail = split(x, p, m)
    c = 1 + leading.shape[1] + (inclusion is not None)
    s = c + 1 if method == "cube" else 2 * c if window is None else int(window)
    whole = K - s + 2
    if whole < 1 or s <= c:
        raise ValueError(f"window: expected {c} < window <= K + 1 = {K + 1}, got {s}")
    pi, kept = _probabilities(p if inclusion is None else inclusion, whole)
    if not (pi > 0).all():
        raise ValueError(f"probability: too uneven for K = {K}: none is left for the less likely tokens")
    free = np.flatnonzero(~kept)
    ratio = p[free] / pi[free]
    leading, tail = leading[free], tail[free]
    if inclusion is not None:
        leading, tail = np.column_stack([ratio, ratio[:, None] * leading]), ratio[:, None] * tail
    w = np.ones(len(p))
    if method == "cube":
        w[free] = cube_walk(pi[free], leading, coin)
    else:
        if missing is not None:
            missing = missing[free] * (1 if inclusion is None else ratio**2)
        more = () if window is None and missing is None else (missing, s)
        w[free] = spectral_walk(pi[free], leading, tail, coin, derandomise, *more)
    weight = p.copy()
    weight[free] = ratio * w[free]
    if abs(weight.sum() - 1) > 1e-6:
        raise ArithmeticError(f"{method} walk: the kept tokens' weights sum to {weight.sum()!r}")
    return weight


def _probabilities(q: Float, whole: int) -> tuple[Float, NDArray[np.bool_]]:
    """pi (n,) proportional to q, of sum `whole`; kept: where it would be 1 or more it is 1, and the rest shares what is left."""
    pi, kept = whole * q, np.zeros(len(q), dtype=bool)
    while True:
        over = ~kept & (pi >= 1)
        if not over.any():
            return pi, kept
        kept |= over
        rest = whole - int(kept.sum())
        pi = np.where(kept, 1.0, rest * q / q[~kept].sum() if rest > 0 else 0.0)
