"""`MergeReduce`: a summary of weighted tokens, kept up in a tree of REDUCEs (arXiv 2607.01520, section 5; theory C-T3).

Algorithm, for each KV head. The first `sinks` tokens and the last `window` stay exact. Those between them, n' of them, are summarised by
K = keep - sinks - window atoms: tokens of the cache with weights, which attention takes as log-weights

    z_i = scale q.k_i + ln w_i .

Blocks of tokens are reduced to K atoms each, and these two by two (reference.merge_reduce.tree); how, says `reducer`:

    random     K atoms by their weight; needs no queries
    halving    pairs merged, signs balanced against the error so far
    cube       a walk that keeps the mass and `protect` leading directions of the response profile exact
    spectral   the walk whose error is at most 2 tail_m / (K - 2 m), m = protect (theory C-T2')
    cluster    K groups in the space of the `protect` leading directions, one random token of each
    refit      support by greedy pursuit, weights by non-negative least squares on the profiles (reference.merge_reduce.refit)
    refit-mass    the same with weights that sum to n'
    refit-values  refit, then new values for the atoms by least squares on the outputs (reference.merge_reduce.revalue)

All but these three are unbiased; weights sum to n' but for refit and refit-values. Profiles are those of the latest queries, turned behind the tokens in question (reference.merge_reduce.law).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Decoded, Layer
from kvtheory.randomness import raw_words
from reference import arguments
from reference.arguments import whole, word
from reference.codec import Appender
from reference.kept import MOST_TOKENS
from reference.merge_reduce.law import QueryLaw
from reference.merge_reduce.nodes import REDUCERS, Atoms, reduce_atoms
from reference.merge_reduce.tree import Buckets
from reference.reducer import Reducer, budget, check_finite, check_keep, chosen, parts_of, split_budget
from reference.shape import Shape
from reference.stream import Part

__all__ = ["LARGEST_BLOCK", "MergeReduce"]

#: a REDUCE forms the Gram matrix of the profiles of this many atoms at most
LARGEST_BLOCK = 8192


@dataclass(frozen=True)
class MergeReduce(Reducer):
    """keep: tokens left of each head (int), or their share of the prompt (float; then it cannot append). Default: the paper's 95 % removed.

    reducer: above. protect: directions without error, None for K/4 (cube), K/6 (spectral), 64 (cluster, as in the paper).
    sinks, window: exact tokens at both ends, paid for by `keep`. block: tokens of a leaf, None for K, at most 8,192; a leaf that takes all
    tokens between sinks and window is a single REDUCE without a tree. queries: latest query positions that are asked. seed: of the walks.

    needs queries, but for "random". Streams: as for all reducers (reference.reducer), with log-weights. streaming: an appender holds sinks,
    window, buckets and less than a block of tokens, and its stream is that of all tokens at once, where both know the same queries.
    Pitfalls: log-weights must reach attention; a summary is as good as its guess of later queries; a lookup of one token among many is what
    no summary keeps (theory C-T4, C-T6).
    """

    keep: int | float = 0.05
    reducer: Literal["random", "halving", "cube", "spectral", "cluster", "refit", "refit-mass", "refit-values"] = (
        "spectral"
    )
    protect: int | None = None
    sinks: int = 4
    window: int = 32
    block: int | None = None
    queries: int = 256
    seed: int = 0

    streaming = True  # not where keep is a share

    def __post_init__(self) -> None:
        check_keep(self.keep)
        word("reducer", self.reducer, REDUCERS)
        for name, value, least, most in (
            ("protect", self.protect, 0, MOST_TOKENS),
            ("sinks", self.sinks, 0, MOST_TOKENS),
            ("window", self.window, 0, MOST_TOKENS),
            ("block", self.block, 1, LARGEST_BLOCK),
            ("queries", self.queries, 1, MOST_TOKENS),
        ):
            if value is not None:
                whole(name, value, least, most)
        arguments.seed(self.seed)
        object.__setattr__(self, "streaming", not isinstance(self.keep, float))
        object.__setattr__(self, "needs", frozenset() if self.reducer == "random" else frozenset({"queries"}))

    def reduce(self, layer: Layer) -> Decoded:
        check_finite(layer)
        if budget(self.keep, layer.tokens) == layer.tokens:
            return chosen(layer, [np.arange(layer.tokens)] * layer.kv_heads)
        heads = [self._head(layer, kv, budget(self.keep, layer.tokens)) for kv in range(layer.kv_heads)]
        for kv, head in enumerate(heads):
            head.push(_atoms(layer.keys[kv], layer.values[kv], layer.positions))
        return _decoded([head.summary() for head in heads], layer.keys.dtype, layer.values.dtype)

    def _head(self, layer: Layer, kv: int, total: int) -> _Head:
        law = QueryLaw.of(layer, kv, self.queries) if self.needs else None
        return _Head(self, total, law, layer.head_dim, layer.value_dim)

    def start(self, layer: Layer) -> Appender:
        if isinstance(self.keep, float):
            raise TypeError(f"appender: expected keep to be a number of tokens, got the share {self.keep}")
        return _Growing(self, layer)


class _Head:
    """What one head holds while its tokens come: sinks, buckets, tokens of the block that is not whole, window."""

    def __init__(self, codec: MergeReduce, total: int, law: QueryLaw | None, head_dim: int, value_dim: int) -> None:
        self.codec, self.law = codec, law
        self.first, self.K, self.last = split_budget(total, codec.sinks, codec.window)
        self.block = codec.block or min(max(self.K, 1), LARGEST_BLOCK)
        self.none = Atoms.none(head_dim, value_dim)
        self.sinks = self.waiting = self.none
        self.buckets = Buckets(self.reduce)
        self.seen = 0

    def reduce(self, atoms: Atoms, place: str) -> Atoms:
        codec = self.codec
        seed = int(raw_words(codec.seed, f"merge-reduce {place}", 1)[0] >> np.uint64(1))
        q = None if self.law is None or not len(atoms) else self.law.after(int(atoms.position[-1]))
        scale = 1.0 if self.law is None else self.law.scale
        return reduce_atoms(atoms, self.K, codec.reducer, codec.protect, q, scale, self.sinks, seed)

    def push(self, tokens: Atoms) -> None:
        """More tokens, of weight 1."""
        self.seen += len(tokens)
        room = max(0, self.first - len(self.sinks))
        self.sinks = self.sinks.with_behind(tokens[:room])
        waiting = self.waiting.with_behind(tokens[room:])
        # what the window has passed goes into the tree, a whole block at a time
        whole_blocks = max(0, len(waiting) - self.last) // self.block if self.K else 0
        for i in range(whole_blocks):
            self.buckets.push(waiting[i * self.block : (i + 1) * self.block])
        self.waiting = waiting[whole_blocks * self.block :]
        if not self.K:  # nothing but sinks and window: the rest is gone
            self.waiting = self.waiting[max(0, len(self.waiting) - self.last) :]

    def held(self) -> Atoms:
        """All that is held, what decoding attends to between two streams."""
        out = self.sinks
        for bucket in self.buckets.oldest_first():
            out = out.with_behind(bucket)
        return out.with_behind(self.waiting)

    def summary(self) -> Atoms:
        """At most K atoms beside sinks and window."""
        cut = max(0, len(self.waiting) - self.last)
        tail, window = self.waiting[:cut], self.waiting[cut:]
        middle = self.reduce(self.buckets.prefix(self.none).with_behind(tail), f"tail {self.seen}")
        return self.sinks.with_behind(middle).with_behind(window)


class _Growing(Appender):
    codec: MergeReduce

    def __init__(self, codec: MergeReduce, layer: Layer) -> None:
        super().__init__(codec, Shape.of(layer))
        for name, array in (("keys", layer.keys), ("values", layer.values)):
            checks.finite(name, array, ("head", "token", "channel"))
        self._heads = [codec._head(layer, kv, int(codec.keep)) for kv in range(layer.kv_heads)]
        self._push(layer.keys, layer.values, layer.positions)

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        raise NotImplementedError  # take_at is what is called

    def take_at(self, keys: NDArray[Any], values: NDArray[Any], positions: NDArray[np.int64]) -> None:
        self._push(keys, values, positions)

    def _push(self, keys: NDArray[Any], values: NDArray[Any], positions: NDArray[np.int64]) -> None:
        for kv, head in enumerate(self._heads):
            head.push(_atoms(keys[kv], values[kv], positions))

    def held(self) -> Decoded:
        """What decoding attends to meanwhile: sinks, all buckets, tokens that no bucket holds yet. Up to K log2(n / block) + block tokens."""
        return self._decoded([head.held() for head in self._heads])

    def parts(self) -> list[Part]:
        return parts_of(self.shape, self._decoded([head.summary() for head in self._heads]))

    def _decoded(self, atoms: list[Atoms]) -> Decoded:
        return _decoded(atoms, self.shape.key_dtype, self.shape.value_dtype)


def _atoms(keys: NDArray[Any], values: NDArray[Any], positions: NDArray[np.int64]) -> Atoms:
    n = len(positions)
    return Atoms(positions.copy(), np.ones(n), keys.astype(np.float64), values.astype(np.float64))


def _decoded(heads: list[Atoms], key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]) -> Decoded:
    kept = np.array([len(atoms) for atoms in heads], np.int64)
    width, first = int(kept.max(initial=0)), heads[0]
    keys = np.zeros((len(heads), width, first.keys.shape[1]), key_dtype.newbyteorder("="))
    values = np.zeros((len(heads), width, first.values.shape[1]), value_dtype.newbyteorder("="))
    log_weights = np.full((len(heads), width), -np.inf)
    positions = np.full((len(heads), width), -1, np.int64)
    for h, atoms in enumerate(heads):
        n = len(atoms)
        keys[h, :n], values[h, :n] = atoms.keys, atoms.values
        # as the stream will hold them
        log_weights[h, :n] = np.log(atoms.weight).astype(np.float32)
        positions[h, :n] = atoms.position
    return Decoded(keys, values, log_weights, positions, kept)
