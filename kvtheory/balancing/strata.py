"""Stratified sampling (theory 3.5 (k), groups of equal mass): tokens in an order, cut into K strata of mass 1/K, one draw from each.

With F the cumulated mass of P in that order and U_g uniform on [g/K, (g + 1)/K], token F^-1(U_g) gets 1/K. A token that straddles
strata belongs to each with its share. Draws are independent, so with P_g the law within stratum g

    E || int Gamma dPhat ||^2 = (1/K^2) sum_g var_g Gamma  <=  tr Sigma / K,        var_g Gamma = E_g ||Gamma - E_g Gamma||^2,

the difference being (1/K^2) sum_g ||E_g Gamma||^2: the more the strata differ, the smaller the error.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtheory.balancing.moves import Float
from kvtheory.balancing.walks import leading_directions


def draw(x: Float, p: Float, K: int, protect: int, rng: np.random.Generator) -> Float:
    """Weights (n,) of sum 1 with at most K above 0; protect = 0: strata of the order given, else of `kd_order`."""
    order = kd_order(x @ leading_directions(x, p, protect), p, K) if protect else np.arange(len(p))
    places = np.searchsorted(np.cumsum(p[order]), (np.arange(K) + rng.random(K)) / K, side="right")
    return np.bincount(order[np.minimum(places, len(p) - 1)], minlength=len(p)) / K


def kd_order(leading: Float, p: Float, K: int) -> NDArray[np.intp]:
    """Tokens (n,) in an order of which consecutive runs are cells of a k-d tree: each cut at half its mass, by the directions in turn."""
    n, directions = leading.shape
    cell = np.zeros(n, dtype=np.intp)
    # each direction is sorted once; then cell and place are one integer, sorted without its index
    ascending = np.argsort(leading, axis=0, kind="stable")
    place = np.empty_like(ascending)
    np.put_along_axis(place, ascending, np.arange(n)[:, None], axis=0)
    for level in range(max(K - 1, 0).bit_length() if directions else 0):
        d = level % directions
        order = ascending[np.sort(cell * n + place[:, d]) % n, d]
        mass = np.cumsum(p[order]) - p[order] / 2
        # a cell's half, from the mass at its ends
        starts = np.flatnonzero(np.diff(cell[order], prepend=-1))
        begins = (mass - p[order] / 2)[starts]
        ends = np.append(begins[1:], 1.0)
        size = np.diff(np.append(starts, len(p)))
        upper = mass > np.repeat((begins + ends) / 2, size)
        cell[order] = 2 * cell[order] + upper
    return np.argsort(cell, kind="stable")
