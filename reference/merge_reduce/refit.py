"""Refit: the support by greedy pursuit, weights by non-negative least squares on the response profiles.

None of the papers has it; theory C-L1 asks for it: given a support S, the error to first order is |sum_{i in S} w'_i x_i - t|, a convex problem,

    min over w' >= 0 of  | sum_{i in S} w'_i x_i - t |^2 + ridge sum_{i in S} l_i^2 (w'_i - w_i)^2 ,       t = sum_i w_i x_i

l_i^2 = |x_i|^2 + floor mean |x|^2. Without the floor an atom that the asked queries hardly see costs nothing whatever its weight: on one head of the
sample one of 64 atoms stood for 1,294 tokens where there are 256, and later queries that do see it were answered by it.

The support grows by those atoms whose profiles point most along what is still missing, r = t - sum w'_i x_i, largest r.x_i / l_i, an eighth of the open places at
a time, with a fit between (orthogonal matching pursuit; the ridge pulls an atom towards its own weight, so that what attention looks at stays
as it is). Weights are those that attention asks for, numerator and denominator, so they do *not* sum to the tokens that went in, unless `mass`
says so: forcing their sum costs a quarter to nearly the double of the error (*Emma*, *Hamlet*). The fit is biased, unlike the samples; in a tree its errors may add up
(theory C-T3). Chosen on *Emma* against "half by attention mass, half by the spectral walk", and better in every cell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.merge_reduce.nonnegative import nonnegative

__all__ = ["pursuit", "refit", "weights"]

Float = NDArray[np.float64]
Index = NDArray[np.int64]

#: pull towards an atom's own weight, relative to its own profile
RIDGE = 1e-3
#: of the squared length of a profile, relative to their mean: of 0, .001, .01, .1 the best for new values on Emma, and as good as any for weights alone
FLOOR = 1e-3
#: the same where the mass is kept: what is too much of it goes to atoms that no query sees, and a floor keeps it from there. Of 0, 1e-6, 1e-5, 1e-4,
#: 1e-3 the best on Emma is 0, by .8 % before 1e-6, which still holds where one atom would take all (layer 18 of the sample)
MASS_FLOOR = 1e-6
#: the part of the open places that is filled between two fits
SHARE = 8


def refit(x: Float, w: Float, K: int, mass: bool = False) -> tuple[Index, Float]:
    """(place, weight): at most K of the atoms with features x (s, r) and weights w (s,); ascending; weight > 0.

    mass: weights sum to that of w.
    """
    floor = MASS_FLOOR if mass else FLOOR
    place = pursuit(x, w, K, floor)
    found = weights(x, w, place, mass, floor)
    kept = found > 0
    if not kept.any():  # nothing is seen by any query: all atoms are alike
        return place, w[place] * (w.sum() / w[place].sum())
    return place[kept], found[kept]


def pursuit(x: Float, w: Float, K: int, floor: float = FLOOR) -> Index:
    """K places of atoms, ascending; fits between without the mass."""
    size = lengths(x, floor)
    target = w @ x
    place = np.zeros(0, np.int64)
    while len(place) < K:
        missing = target - (weights(x, w, place, floor=floor) @ x[place] if len(place) else 0.0)
        gain = (x @ missing) / size
        gain[place] = -np.inf
        more = -(-(K - len(place)) // SHARE)
        place = np.sort(np.concatenate([place, np.argsort(-gain, kind="stable")[:more]]))
    return place


def lengths(x: Float, floor: float) -> Float:
    """(|x_i|^2 + floor mean |x|^2)^(1/2), (s,); 1 where all are 0."""
    square = (x**2).sum(axis=1)
    size = np.sqrt(square + floor * square.mean()) if len(x) else square
    return np.where(size > 0, size, 1.0)


def weights(x: Float, w: Float, place: Index, mass: bool = False, floor: float = FLOOR) -> Float:
    """w' >= 0 of the support `place` that solve the problem above; mass: and sum to that of w."""
    if not (x**2).any():
        return np.zeros(len(place))
    # in units of the lengths the ridge is a number
    size = lengths(x, floor)[place]
    own = x[place] / size[:, None]
    G = own @ own.T + RIDGE * np.eye(len(own))
    b = own @ (w @ x) + RIDGE * size * w[place]
    found = (nonnegative(G, b, 1 / size, float(w.sum())) if mass else nonnegative(G, b)) / size
    return found * (w.sum() / found.sum()) if mass else found
