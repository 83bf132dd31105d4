"""Tokens merged by weight: one token in place of a group, and the log-weight that attention gives it.

For a group of tokens x_1 ... x_n of one head with weights w_1 ... w_n > 0,

    mass   m = (...(w_1 + w_2) + ...) + w_n
    token  t = ((...(w_1 x_1 + w_2 x_2) + ...) + w_n x_n) / m,     channel by channel
    log-weight  ln m: a softmax that adds it to the token's logit counts the token m times

Every operation is rounded to binary64 in the order written, nothing is fused; t is then rounded to the element type (bfloat16 by way of
binary32, as NumPy rounds it). So m and t have the same bits on every machine; ln is the C library's, good to its last bit or two. Where the
keys of a group are equal and the w are the tokens' own weights (1, where nothing was merged before), attention gives the same output as
before, whatever the query; else it is an approximation, and which groups to merge is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Groups", "Merged", "merge"]

Index = NDArray[np.int64]
Float64 = NDArray[np.float64]


class Merged(NamedTuple):
    """tokens (kv_heads, width, d) in the element type that came, zeros behind a head's last; log_weights (kv_heads, width), -inf behind it."""

    tokens: Any
    log_weights: Any


class Groups(NamedTuple):
    """Groups of all heads one behind the other: group k of head h has the number h width + k, and no member where there is none.

    starts (kv_heads width + 1,): where each one's members begin. members: numbers of rows of an array (kv_heads tokens, d). weights: theirs.
    """

    width: int
    starts: Index
    members: Index
    weights: Float64

    @classmethod
    def of(
        cls, heads: int, tokens: int, groups: Sequence[Sequence[Any]], weights: Sequence[Sequence[Any]]
    ) -> Groups:  # fmt: skip
        """ValueError for weights that are not finite, not above 0 or not one a token, and for an empty group; IndexError for a token not there."""
        for name, given in (("groups", groups), ("weights", weights)):
            if len(given) != heads:
                raise ValueError(f"{name}: expected one for each of {heads} heads, got {len(given)}")
        width = max((len(own) for own in groups), default=0)
        counts = np.zeros((heads, width), np.int64)
        members: list[Index] = [np.zeros(0, np.int64)]
        flat: list[Float64] = [np.zeros(0)]
        for h, (own, own_weights) in enumerate(zip(groups, weights)):
            if len(own) != len(own_weights):
                raise ValueError(f"weights: expected those of {len(own)} groups of head {h}, got {len(own_weights)}")
            for k, (group, weight) in enumerate(zip(own, own_weights)):
                index, w = np.asarray(group), np.asarray(weight, np.float64)
                if w.shape != (len(index),) or not len(index) or not (np.isfinite(w).all() and (w > 0).all()):
                    raise ValueError(
                        f"weights: expected {len(index)} finite numbers above 0 for group {k} of head {h}, at least one, got {weight}"
                    )
                counts[h, k] = len(index)
                members.append(rows("groups", index, h, tokens))
                flat.append(w)
        starts = np.concatenate([[0], np.cumsum(counts.reshape(-1))]).astype(np.int64)
        return cls(width, starts, np.concatenate(members), np.concatenate(flat))


def rows(name: str, index: NDArray[Any], head: int, tokens: int) -> Index:
    """Numbers of these tokens of one head among those of all heads. IndexError, naming `name`, for a token that is not there."""
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < tokens):
        raise IndexError(
            f"{name}: expected tokens from 0 to {tokens - 1} for head {head}, got {int(index.min())} to {int(index.max())}"
        )
    return np.asarray(head * tokens + index, np.int64)


def log_masses(masses: Float64) -> Float64:
    """ln of masses, -inf for 0: where there is no group."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(masses))


def merge(array: NDArray[Any], groups: Sequence[Sequence[Any]], weights: Sequence[Sequence[Any]]) -> Merged:
    """One token for each group: groups[h][k] (n,) are numbers of tokens of head h, weights[h][k] (n,) theirs, in the order of summation.

    array: (kv_heads, tokens, d) of any element type and strides. Errors as for `Groups.of`. A sum of binary64 numbers near the largest
    may overflow, and is then inf or NaN; those of the other element types cannot while weights stay below 2^800.
    """
    heads, tokens, dim = array.shape
    own = Groups.of(heads, tokens, groups, weights)
    x = array.reshape(heads * tokens, dim)
    counts = np.diff(own.starts)
    sums, masses = np.zeros((len(counts), dim)), np.zeros(len(counts))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for step in range(int(counts.max(initial=0))):
            open_ = np.flatnonzero(counts > step)
            at = own.starts[open_] + step
            sums[open_] += own.weights[at, None] * x[own.members[at]].astype(np.float64)
            masses[open_] += own.weights[at]
        means = np.where(counts[:, None] > 0, sums / masses[:, None], 0.0).astype(array.dtype.newbyteorder("="))
    return Merged(means.reshape(heads, own.width, dim), log_masses(masses.reshape(heads, own.width)))
