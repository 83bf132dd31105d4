"""How the errors of REDUCEs add up in a balanced tree (theory C-T3): geometrically if they are unbiased, with the depth if they are not.

n tokens, K to a leaf, L = log2(n/K) levels of REDUCE: 2K -> K. Level l = 1..L has 2^(L-l) nodes, each with the share 2^(l-L) of P, so a
node's error e enters the root's as 2^(l-L) e. V_l: the mean square of e at level l.

    unbiased given its input     cross terms vanish:    E ||total||^2 = sum_l 2^(L-l) 4^(l-L) V_l = sum_l 2^(l-L) V_l <= 2 max V
    anything                     the triangle inequality within and between levels:    <= (sum_l sqrt(V_l))^2 <= L^2 max V

Both are attained: the first always, the second where every REDUCE errs by the same vector (`staircase`, the greater atom kept).
Unbiasedness of each REDUCE by itself is not enough: with one coin for all of them the second is attained, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["accumulated_bias", "accumulated_risk", "staircase"]


def accumulated_risk(V: Sequence[Any]) -> Any:
    """sum_l 2^(l-L) V_l: the root's mean squared error where every REDUCE is unbiased given its input. V: V_1, ..., V_L, leaves first.

    At most 2 max V whatever L, and V_L (1 + 1/2 + ...) where levels are alike: the root dominates. Fractions give a Fraction.
    ValueError for no level and for a negative V.
    """
    levels = _levels(V)
    total = levels[-1]
    for above, own in enumerate(reversed(levels[:-1]), 1):
        total = total + own / 2**above
    return total


def accumulated_bias(V: Sequence[Any]) -> float:
    """(sum_l sqrt(V_l))^2: what the root's mean squared error cannot exceed, however the REDUCEs err and depend on each other."""
    return float(sum(float(v) ** 0.5 for v in _levels(V)) ** 2)


def staircase(L: int) -> NDArray[np.int64]:
    """Values (2^L,) of a leaf token each, -2 times the ones among the binary digits of its number: the greatest values of any two
    neighbouring subtrees of one size differ by 2, so a REDUCE 2 -> 1 that keeps the greater errs by exactly 1, at every level. L <= 20."""
    if isinstance(L, bool) or not isinstance(L, (int, np.integer)) or not 0 <= L <= 20:
        raise ValueError(f"L: expected an int from 0 to 20, got {L!r}")
    return np.array([-2 * i.bit_count() for i in range(1 << int(L))], np.int64)


def _levels(V: Sequence[Any]) -> list[Any]:
    levels = list(V)
    if not levels:
        raise ValueError("V: expected a mean square for each of at least one level, got none")
    for value in levels:
        if not value >= 0:
            raise ValueError(f"V: expected numbers >= 0, got {value!r}")
    return levels
