"""Layer 1 of arXiv 2604.15356: sessions grouped by d_T, one of a group kept whole, the others from where they part from it.

    d_T(s, t) = -log2 P(s^t), the surprisal of the longest common prefix
    centroid    the most probable session of a group, P(s) largest; as P falls with every token, short sessions win

rule "<=" is the paper's {d_T <= delta}; ">=" its other direction, that of its retrieval by the largest d_T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.prefix_store.segments import Tokens, common_prefix

__all__ = ["Group", "Ranked", "group", "shared_bits"]


class Ranked(NamedTuple):
    """tokens (n,); surprisal_bits (n,): -log2 P(token | before), as a model gave it."""

    tokens: Tokens
    surprisal_bits: NDArray[np.float64]


class Group(NamedTuple):
    """Numbers of the centroid and of the other members, most probable first; the fork of each member: tokens shared with the centroid."""

    centroid: int
    members: list[int]
    forks: list[int]


def shared_bits(s: Ranked, t: Ranked) -> float:
    """d_T(s, t) in bits."""
    return math.fsum(s.surprisal_bits[: common_prefix(s.tokens, t.tokens)].tolist())


def group(sessions: Sequence[Ranked], delta: float, rule: str = "<=") -> list[Group]:
    """Greedily: the most probable session without a group becomes a centroid, and takes all without one that the rule gives it."""
    left = sorted(range(len(sessions)), key=lambda i: (math.fsum(sessions[i].surprisal_bits.tolist()), i))
    groups = []
    while left:
        centre, *others = left
        bits = {i: shared_bits(sessions[centre], sessions[i]) for i in others}
        members = [i for i in others if (bits[i] <= delta if rule == "<=" else bits[i] >= delta)]
        forks = [common_prefix(sessions[centre].tokens, sessions[i].tokens) for i in members]
        groups.append(Group(centre, members, forks))
        left = [i for i in others if i not in set(members)]
    return groups
