"""`gpu.DeviceCache`: attention on a cache as it is coded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device_cache.appending import chunk_of, coded_chunk
from gpu.device_cache.exact import Exact
from gpu.device_cache.opening import opened, refused
from gpu.device_cache.segment import Partial, Segment, combined
from gpu.module import namespace, require_gpu
from gpu.resident import device, host
from kvtheory import checks
from reference import arguments
from reference import codec as codecs
from reference import stream as streams
from reference.errors import CorruptStream, StateMismatch
from reference.shape import in_order
from reference.stream import Kind

__all__ = ["DeviceCache"]


class DeviceCache:
    """The cache of one layer on a device, coded as its stream has it; attention reads codes and scales, and decodes in registers and shared memory.

    Args:
        stream: of one layer, by Full, TurboQuant, KIVI, KVQuant, AATC, PALU, MetricKLT, a reducer (SnapKV, ScissorHands, StreamingLLM,
            MergeReduce), or a Pipeline that ends in one of these.
        state: of the codec that wrote it, b"" if it has none.
        xp: numpy (the simulator) or cupy; default cupy.
        scale: of logits; default 1/sqrt(head_dim).
        split: tokens that a block takes; None: as many as give a GPU enough blocks.
        fold: how many appended tokens are coded at once (`append`); 0: they stay exact.

    Raises:
        CorruptStream, StateMismatch: as for `reference.decode`.
        NotImplementedError: a codec whose codes attention cannot read, by its name.
        ValueError: more numbers a token than shared memory has room for (when attention is asked), float64 numbers beyond float32.
        gpu.Unavailable: xp is not given, and there is no CuPy or no GPU.
    """

    def __init__(
        self, stream: bytes, state: bytes = b"", xp: Any = None, *, scale: float | None = None, split: int | None = None,
        fold: int = 128,
    ) -> None:  # fmt: skip
        self.xp = require_gpu() if xp is None else xp
        header, groups = codecs._read(stream)
        if header.kind is not Kind.LAYER:
            if header.kind in (Kind.CACHE, Kind.SESSIONS):
                raise refused(header.codec)
            raise CorruptStream(
                f"kind: expected the stream of one layer, got {header.kind.name}", len(streams.MAGIC) + 1
            )
        given = streams.digest(state)
        if given != header.digest:
            raise StateMismatch(
                f"{header.codec}: the stream was written with {codecs._state_name(header.digest)}, given is {codecs._state_name(given)}"
            )
        self.codec = (
            codecs.load(state) if len(state) else codecs.from_parameters(codecs.class_of(header), header)
        )._like(header)
        shape, own = opened(self.codec, self.codec._named(groups[0]), None, self.xp)
        self.kv_heads, self.head_dim, self.value_dim = shape.kv_heads, shape.head_dim, shape.value_dim
        self.key_dtype, self.value_dtype, self.index = shape.key_dtype, shape.value_dtype, shape.index
        self.scale = shape.head_dim**-0.5 if scale is None else checks.positive("scale", scale)
        if split is not None:
            arguments.whole("split", split, 1, 1 << 40)
        arguments.whole("fold", fold, 0, 1 << 40)
        self.split, self.fold = split, chunk_of(self.codec, fold)
        self.segments = [one for one in own if one.tokens]
        self._end = 1 + max((_last(one.positions) for one in self.segments), default=-1)
        #: codes that the next chunk may be held behind
        self._coded: Segment | None = None
        for one in self.segments:
            if not isinstance(one, Exact) and isinstance(one.index, slice) and one.index.stop == self.tokens:
                self._coded = one
        self._tail: Exact | None = None

    @property
    def tokens(self) -> int:
        """Of the fullest head."""
        return sum(one.tokens for one in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes on the device of codes, scales, exact tokens, and, where they are no plain sequence, positions, weights and counts. Tables
        and frames, which belong to the codec, are `table_bytes`.
        """
        return sum(one.nbytes for one in self.segments)

    @property
    def table_bytes(self) -> int:
        return sum(one.table_bytes for one in self.segments)

    def attend(self, queries: Any, query_positions: Any = None) -> Any:
        """Outputs (query_heads, queries, value_dim) float32, in namespace `xp`.

        queries (query_heads, queries, head_dim), in `xp`, of floating type (float64: rounded to float32), after RoPE; query head h reads KV head
        h // (query_heads // kv_heads). query_positions (queries,) integers: query j sees the tokens at positions <= query_positions[j]; None:
        every token. Numbers are finite, and so are logits in float32: these are not looked at.

        ValueError, TypeError for shapes and types that do not fit, and for a query that sees no token.
        """
        xp = self.xp
        if namespace(queries) is not xp:
            raise TypeError(
                f"queries: expected an array of {xp.__name__}, as the cache, got one of {namespace(queries).__name__}"
            )
        checks.floating("queries", queries)
        sizes = {"head_dim": self.head_dim}
        sizes = checks.shape("queries", queries, ("query_heads", "queries", "head_dim"), sizes)
        heads, count = sizes["query_heads"], sizes["queries"]
        if heads == 0 or heads % self.kv_heads:
            raise ValueError(
                f"queries: expected query_heads to be a positive multiple of kv_heads = {self.kv_heads}, got {heads}"
            )
        limits = None if query_positions is None else self._limits(query_positions, count)
        if not count:
            return xp.zeros((heads, 0, self.value_dim), np.float32)
        own = xp.ascontiguousarray(queries if queries.dtype != np.float64 else queries.astype(np.float32))
        self._sees(limits)
        seen = None if limits is None else device(limits, xp)
        results = [one.attend(own, seen, self.scale, self.split) for one in self.segments]
        slots = Partial(
            *(xp.concatenate([getattr(one, name) for one in results]) for name in ("maxima", "sums", "out"))
        )
        return combined(slots, xp, divide=True).out.reshape(heads, count, self.value_dim)

    def append(self, keys: Any, values: Any, positions: Any = None) -> None:
        """More tokens: keys (kv_heads, n, head_dim) after RoPE, values (kv_heads, n, value_dim), in `xp`, of the layer's element types.

        positions (n,) ascending integers, default right behind the last one. Tokens are kept as they are (float64 as float32) until
        2 `self.fold` of them are; then the oldest `fold` are coded by TurboQuant, KIVI, KVQuant, AATC, PALU or MetricKLT, as that codec codes a layer
        of these tokens alone, without sinks and window, and their exact numbers are dropped. So the newest `fold` are always exact. Full, reducers
        and pipelines keep all exact. What the stream held stays as it is. `self.fold`: the argument `fold`, rounded up to whole groups (KIVI), blocks
        (MetricKLT) and 32 tokens.

        ValueError, TypeError for shapes, types and positions that do not fit and for NaN or inf; nothing changes then.
        """
        xp = self.xp
        for name, array in (("keys", keys), ("values", values)):
            if namespace(array) is not xp:
                raise TypeError(f"{name}: expected an array of {xp.__name__}, as the cache, got one of {namespace(array).__name__}")  # fmt: skip
        sizes = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.value_dim}
        sizes = checks.shape("keys", keys, ("kv_heads", "n", "head_dim"), sizes)
        checks.shape("values", values, ("kv_heads", "n", "value_dim"), sizes)
        for name, array, dtype in (("keys", keys, self.key_dtype), ("values", values, self.value_dtype)):
            if array.dtype != dtype:
                raise TypeError(f"{name}: expected elements of {dtype} like the tokens before, got {array.dtype}")
            with np.errstate(over="ignore"):
                fits = bool(xp.isfinite(array.astype(np.float32)).all())
            if not fits:
                checks.finite(name, host(array), ("head", "token", "channel"))
                raise ValueError(f"{name}: expected numbers that float32 can hold")
        own = np.arange(self._end, self._end + sizes["n"]) if positions is None else host(np.asarray(positions))
        if own.dtype.kind not in "iu" or own.shape != (sizes["n"],):
            raise ValueError(
                f"positions: expected integers of shape (n={sizes['n']},), got {own.dtype} of shape {own.shape}"
            )
        own = own.astype(np.int64)
        if own.size and (int(own[0]) < self._end - 1 or (np.diff(own) < 0).any()):
            raise ValueError(f"positions: expected ascending ones from {self._end - 1} on, got {own.tolist()[:4]} ...")
        if not own.size:
            return
        kind = np.float32 if self.key_dtype != self.value_dtype or self.key_dtype == np.float64 else self.key_dtype
        new = [xp.ascontiguousarray(array.astype(kind, copy=False).transpose(1, 0, 2)) for array in (keys, values)]
        if self._tail is None:
            first = sum(one.tokens for one in self.segments)
            starts = np.arange(self.kv_heads) * np.array([[self.head_dim], [self.value_dim]])
            steps = self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
            self._tail = Exact(
                xp, new[0].reshape(-1), new[1].reshape(-1), starts, steps, self.kv_heads, len(own), (self.head_dim, self.value_dim), in_order(own),
                index=slice(first, first + len(own)), roundings=(self.key_dtype == np.float64, self.value_dtype == np.float64),
            )  # fmt: skip
            self.segments.append(self._tail)
        else:
            self._tail.grow(new[0], new[1], own)
        self._end = int(own[-1]) + 1
        while self.fold and self._tail.tokens >= 2 * self.fold:
            self._fold(self._tail)

    def _fold(self, tail: Exact) -> None:
        """The oldest `fold` exact tokens become codes, in the arrays of those that were appended before them where these end at whole words."""
        count, where = self.fold, np.asarray(tail.positions, np.int64)
        keys, values = tail.taken(count)
        if self.key_dtype != keys.dtype:
            keys, values = keys.astype(self.key_dtype), values.astype(self.value_dtype)
        own = coded_chunk(self.codec, keys, values, where[:count], self.index, tail.start, self.xp)
        if self._coded is not None and self._coded.behind(own):
            self._coded.append(own)
        else:
            self._coded = own
            self.segments.insert(len(self.segments) - 1, own)
        tail.cut(count)

    def _limits(self, query_positions: Any, count: int) -> NDArray[np.int64]:
        own = host(query_positions) if hasattr(query_positions, "dtype") else np.asarray(query_positions)
        if own.dtype.kind not in "iu":
            raise TypeError(f"query_positions: expected integers, got {own.dtype}")
        checks.shape("query_positions", own, ("queries",), {"queries": count})
        return own.astype(np.int64)

    def _sees(self, limits: NDArray[np.int64] | None) -> None:
        none = np.iinfo(np.int64).max
        first = np.full(self.kv_heads, none)
        for one in self.segments:
            first = np.minimum(first, one.visible_from())
        least = none - 1 if limits is None else int(limits.min())
        if (first > least).any():
            head = int(np.argmax(first > least))
            query = 0 if limits is None else int(np.argmin(limits))
            raise ValueError(
                f"query_positions: query {query} sees no token of KV head {head}; its softmax is undefined"
            )

    def __repr__(self) -> str:
        return f"DeviceCache({self.codec.codec_id}, {self.tokens} tokens, {self.nbytes} bytes)"


def _last(positions: Any) -> int:
    if isinstance(positions, range):
        return positions.stop - 1
    return int(positions.max(initial=-1))
