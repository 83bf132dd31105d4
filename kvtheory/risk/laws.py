"""Query laws: what is assumed of later queries, and what comes. A law nu is a sample (m, d) of queries, each of probability 1/m.

    held_out          every other block of a head's queries to choose by, the rest to test on: one law, other draws
    recent_window     the latest queries, turned behind the tokens that are to be summarised (a query asked at position m meets a key at i
                      as R_{m-i} q, so a query of the past taken as it is would look at later tokens from before)
    gaussian_fit      N(mean, covariance) of the queries: their first two moments, and nothing else of them
    isotropic         N(0, E||q||^2 / d): their size, and nothing else of them
    mixture           queries of several laws, in given shares

`kvtheory.risk` takes any of them wherever it takes q.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.layer import Rope
from kvtheory.randomness import generator

__all__ = ["gaussian_fit", "held_out", "isotropic", "mixture", "recent_window"]

Float = NDArray[np.float64]


def held_out(q: ArrayLike, block: int = 1) -> tuple[Float, Float]:
    """(to choose by, to test on): blocks of `block` queries in turn. q (m, d) in order of position, m > block; both in their order.

    Neighbouring queries of a text are alike: block = 1 makes the test as near to the choice as it can be, larger blocks keep them apart.
    """
    q = _queries("q", q)
    block = _count("block", block)
    if len(q) <= block:
        raise ValueError(f"q: expected more than block = {block} queries, got {len(q)}")
    odd = (np.arange(len(q)) // block) % 2 == 1
    return q[~odd], q[odd]


def recent_window(q: ArrayLike, positions: ArrayLike, window: int, after: int, rope: Rope | None) -> Float:
    """The `window` latest of the queries at or before position `after`, as they would be asked from after + 1 on; (window, d), or fewer.

    q (m, d), with RoPE applied, at `positions` (m,) integers. rope None: taken as they are. ValueError where none is that early.
    """
    q = _queries("q", q)
    where = np.asarray(positions)
    checks.shape("positions", where, ("m",), {"m": len(q)})
    if where.dtype.kind not in "iu":
        raise TypeError(f"positions: expected integers, got {where.dtype}")
    early = np.flatnonzero(where <= after)
    if len(early) == 0:
        raise ValueError(f"after: expected a query at or before it, got {after}, the first is at {where.min()}")
    used = early[np.argsort(where[early], kind="stable")][-_count("window", window) :]
    if rope is None:
        return q[used]
    return rope.apply(rope.undo(q[used], where[used]), after + 1 + where[used] - where[used[0]])


def gaussian_fit(q: ArrayLike, count: int, seed: int = 0) -> Float:
    """`count` draws of N(mean, covariance) fitted to q (m, d): mean + g (q - mean)/sqrt(m), g standard normal (count, m)."""
    q = _queries("q", q)
    mean = q.mean(axis=0)
    g = generator(seed, "query law gaussian fit").standard_normal((_count("count", count), len(q)))
    return np.asarray(mean + g @ (q - mean) / np.sqrt(len(q)))


def isotropic(q: ArrayLike, count: int, seed: int = 0) -> Float:
    """`count` draws of N(0, s^2 I) with s^2 d = the mean of ||q||^2, q (m, d)."""
    q = _queries("q", q)
    size = np.sqrt((q**2).sum(axis=1).mean() / q.shape[1])
    return np.asarray(
        size * generator(seed, "query law isotropic").standard_normal((_count("count", count), q.shape[1]))
    )


def mixture(laws: Sequence[ArrayLike], shares: ArrayLike, count: int, seed: int = 0) -> Float:
    """`count` queries: each from law l with probability shares[l] (>= 0, of sum 1), drawn evenly among that law's. laws: (m_l, d) each."""
    samples = [_queries(f"laws[{i}]", q) for i, q in enumerate(laws)]
    p = np.asarray(shares, dtype=np.float64)
    checks.shape("shares", p, ("laws",), {"laws": len(samples)})
    checks.finite("shares", p, ("law",))
    if (p < 0).any() or abs(p.sum() - 1) > 1e-9:
        raise ValueError(f"shares: expected numbers >= 0 of sum 1, got a least of {p.min()!r} and a sum of {p.sum()!r}")
    for i, q in enumerate(samples):
        checks.shape(f"laws[{i}]", q, ("m", "d"), {"d": samples[0].shape[1]})
    rng = generator(seed, "query law mixture")
    law = rng.choice(len(samples), _count("count", count), p=p / p.sum())
    return np.stack([samples[i][rng.integers(len(samples[i]))] for i in law])


def _queries(name: str, q: ArrayLike) -> Float:
    array = np.asarray(q, dtype=np.float64)
    checks.shape(name, array, ("m", "d"))
    checks.finite(name, array, ("query", "channel"))
    if array.size == 0:
        raise ValueError(f"{name}: expected at least one query of one channel, got shape {array.shape}")
    return array


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}: expected an int >= 1, got {value!r}")
    return int(value)
