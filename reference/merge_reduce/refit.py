"""Refit: a support of half the atoms that attention looks at most and half of a balanced sample, weights by non-negative least squares.

None of the papers has it; theory C-L1 asks for it: given a support S, the error to first order is |sum_{i in S} w'_i x_i - sum_i w_i x_i|,
a convex problem in w' >= 0,

    min  | sum_{i in S} w'_i x_i - t |^2 + ridge sum_{i in S} |x_i|^2 (w'_i - w0_i)^2 ,     t = sum_i w_i x_i,   sum_{i in S} w'_i = sum_i w_i

w0: the weight an atom had (of the most looked at) or has in the balanced sample. Exact atoms keep weights near their own, the rest stand
for what is gone. The fit is biased, unlike the samples, so in a deep tree its errors may add up with the levels (theory C-T3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvtheory import balancing

__all__ = ["refit"]

Float = NDArray[np.float64]

#: pull towards the weights before the fit, relative to each atom's own profile
RIDGE = 1e-3


def refit(x: Float, mass: Float, w: Float, K: int, protect: int | None, seed: int) -> tuple[NDArray[np.int64], Float]:
    """(place, weight): at most K of the atoms with features x (s, r), attention mass (s,) and weights w (s,); ascending; weight > 0."""
    top = np.argsort(-mass, kind="stable")[: (K + 1) // 2]
    rest = np.setdiff1d(np.arange(len(w)), top)
    half = K - len(top)
    place, start = top, w[top]
    if half:
        p = w[rest] / w[rest].sum()
        m = min(half // 6 if protect is None else protect, (half - 1) // 2)
        sampled, share = balancing.sample(x[rest], half, "spectral", m, seed, weights=p)
        place, start = np.concatenate([top, rest[sampled]]), np.concatenate([start, share * w[rest].sum()])
    order = np.argsort(place)
    place, start = place[order], start[order]
    weight = weights(x, w, place, start)
    kept = weight > 0
    return place[kept].astype(np.int64), weight[kept]


def weights(x: Float, w: Float, place: NDArray[np.integer], start: Float) -> Float:
    """w' of the support `place`, of the same sum as w."""
    own, target = x[place].T, x.T @ w
    norm = np.sqrt((own**2).sum(axis=0))
    # the sum enters as one more row, heavy enough to bind and light enough for the others to count in float64
    heavy = 1e4 * float(np.sqrt((target**2).mean() + (norm**2).mean())) / float(w.sum())
    ridge = np.sqrt(RIDGE) * norm
    matrix = np.concatenate([own, np.diag(ridge), np.full((1, len(place)), heavy)])
    aim = np.concatenate([target, ridge * start, [heavy * w.sum()]])
    found, _ = nnls(matrix, aim, maxiter=30 * len(place))
    return found * (w.sum() / found.sum())
