"""Stratified sampling by clusters (theory 3.5 (k)): K groups, one random member of each with the mass of its group.

Given the groups, E sum_g P(g) delta_(member of g) = P, and the error is the scatter within the groups:
E || int Gamma dPhat ||^2 = sum_g P(g) sum_{i in g} p_i || Gamma_i - mean_g ||^2 for profiles of barycentre 0.

Groups are those of k-means, for K > 512 within cells of a k-d tree that hold equally many tokens and at most 512 groups each, so
that the cost is linear in n for any K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtheory.balancing.strata import kd_order
from kvtheory.balancing.walks import split

Float = NDArray[np.float64]

_ROUNDS = 8
#: groups found together
_TOGETHER = 512
#: directions by which a k-d tree cuts
_CUTS = 8


def stratify(x: Float, p: Float, K: int, protect: int, rng: np.random.Generator) -> Float:
    """Weights (n,) of sum 1 with at most K < n above 0. protect: leading directions that measure distance, 0 for all."""
    if protect:
        x = split(x, p, protect).leading
    group = _groups(x, p, K, rng)
    mass = np.bincount(group, weights=p, minlength=K)
    # inverse transform within each group: tokens in a random-free order, cumulated p, one uniform number a group
    order = np.argsort(group, kind="stable")
    cumulated = np.cumsum(p[order])
    before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    present = np.flatnonzero(mass > 0)
    first = np.searchsorted(group[order], present)
    last = np.searchsorted(group[order], present, side="right") - 1
    place = np.searchsorted(cumulated, before[present] + rng.random(len(present)) * mass[present], side="right")
    weight = np.zeros(len(p))
    weight[order[np.clip(place, first, last)]] = mass[present]
    return weight


def _groups(x: Float, p: Float, K: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Group (n,) of each token, at most K of them."""
    cells = -(-K // _TOGETHER)
    if cells == 1:
        return lloyd(x, p, x[rng.choice(len(x), K, replace=False)])
    order = kd_order(split(x, p, _CUTS).leading, np.full(len(x), 1 / len(x)), cells)
    group, first = np.empty(len(x), dtype=np.intp), 0
    for cell, share in zip(np.array_split(order, cells), np.array_split(np.arange(K), cells)):
        group[cell] = first + lloyd(x[cell], p[cell], x[rng.choice(cell, len(share), replace=False)])
        first += len(share)
    return group


def lloyd(x: Float, p: Float, centres: Float) -> NDArray[np.intp]:
    """Group (n,) of each row of x (n, size) after a few rounds of k-means from `centres` (K, size); groups may be empty."""
    group = _nearest(x, centres)
    for _ in range(_ROUNDS):
        mass = np.bincount(group, weights=p, minlength=len(centres))
        sums = np.zeros_like(centres)
        np.add.at(sums, group, p[:, None] * x)
        centres = np.where(mass[:, None] > 0, sums / np.where(mass > 0, mass, 1)[:, None], centres)
        moved = _nearest(x, centres)
        if (moved == group).all():
            break
        group = moved
    return group


def _nearest(x: Float, centres: Float, block: int = 1 << 23) -> NDArray[np.intp]:
    """argmin_g ||x_i - centre_g||^2, in blocks of tokens."""
    half = 0.5 * (centres**2).sum(axis=1)
    step = max(1, block // len(centres))
    return np.concatenate(
        [np.argmax(x[start : start + step] @ centres.T - half, axis=1) for start in range(0, len(x), step)]
    )
