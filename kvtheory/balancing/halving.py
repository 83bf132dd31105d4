"""Self-balancing halving (theory 3.5 (h)): pairs of equal weight are merged into one of the two until K tokens are left.

A level pairs the tokens at random and keeps x (doubling its weight) with probability

    P(+) = clip(1/2 - <acc, Gamma_x - Gamma_x'> / c, 0, 1),        acc += +-(Gamma_x - Gamma_x'),

c the largest ||Gamma_x - Gamma_x'||^2 of the level so far. acc starts at 0 at every level, so flipping all signs of a level leaves
its law unchanged: each token's weight has its mean, given the level's pairs, though not given the signs before it.
Only equal weights are merged that way. Where no two are equal (an odd one out of a level, or an uneven P) the two lightest merge,
and x is kept with probability w_x / (w_x + w_x'), unbiased by itself; so until half are left, when equal ones are looked for again.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def halve(x: Float, p: Float, K: int, rng: np.random.Generator) -> Float:
    """Weights (n,) of sum 1 with exactly K < n above 0; x (n, size), p (n,) positive of sum 1."""
    weight = p.copy()
    alive = len(p)
    while alive > K:
        pairs = _equal_pairs(weight, rng)
        if len(pairs) == 0:
            alive = _merge_lightest(weight, max(K, (alive + 1) // 2), rng)
            continue
        pairs = pairs[: alive - K]
        acc, largest = np.zeros(x.shape[1]), 0.0
        for (a, b), toss in zip(pairs, rng.random(len(pairs))):
            difference = x[a] - x[b]
            largest = max(largest, float(difference @ difference))
            plus = 0.5 if largest == 0 else min(max(0.5 - float(acc @ difference) / largest, 0.0), 1.0)
            keep, drop, sign = (a, b, 1.0) if toss < plus else (b, a, -1.0)
            acc += sign * difference
            weight[keep], weight[drop] = 2 * weight[a], 0.0
        alive -= len(pairs)
    return weight


def _equal_pairs(weight: Float, rng: np.random.Generator) -> NDArray[np.intp]:
    """Random pairs (pairs, 2) of the lightest weight that two tokens share; none if all weights differ."""
    values, counts = np.unique(weight[weight > 0], return_counts=True)
    shared = values[counts >= 2]
    if len(shared) == 0:
        return np.zeros((0, 2), dtype=np.intp)
    members = rng.permutation(np.flatnonzero(weight == shared[0]))
    return members[: len(members) // 2 * 2].reshape(-1, 2)


def _merge_lightest(weight: Float, K: int, rng: np.random.Generator) -> int:
    """Merge the two lightest, in place, until K tokens have a weight; K."""
    heap = [(float(weight[i]), int(i)) for i in np.flatnonzero(weight)]
    heapify(heap)
    for toss in rng.random(len(heap) - K):
        (light, a), (heavy, b) = heappop(heap), heappop(heap)
        both = light + heavy
        keep, drop = (a, b) if toss < light / both else (b, a)
        weight[keep], weight[drop] = both, 0.0
        heappush(heap, (both, keep))
    return K
