"""KVQuant's codes and outliers as a segment, its sinks as another. Kernel: gpu/kernels/attention_kvquant.cu."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import reference
from gpu.arrays import words
from gpu.device_cache.bound import Magnitudes
from gpu.device_cache.exact import plain_magnitudes
from gpu.device_cache.segment import Segment
from gpu.device_cache.transform import TURN, Pairs, exact_ends
from gpu.device_cache.where import Where
from gpu.kvquant import _codes_at
from gpu.module import ELEMENT, Kernel, Source, element
from gpu.resident import device, host
from reference import packing
from reference.kept import Kept
from reference.kvquant import LayerTables
from reference.minmax import read_zeros, zero_dtype
from reference.places import read_places
from reference.shape import Shape
from reference.stream import Reader

__all__ = ["KVQuant", "segments"]

_SOURCE = Source("attention_kvquant.cu", [f"attend_kvquant<{t}>" for t in ELEMENT.values()])
#: outliers of a side are counted in 32 bits
MOST_OUTLIERS = 1 << 32


def segments(codec: reference.KVQuant, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, list[Segment]]:
    opened = codec._opened(parts, kept if kept is not None and kept.places is not None else None)
    shape, sinks = opened.shape, opened.sinks
    kind = zero_dtype(shape.key_dtype) if shape.key_dtype == shape.value_dtype else np.dtype(np.float32)
    sides: list[list[NDArray[Any]]] = []
    for name, dim, dtype, own in (
        ("key", shape.head_dim, shape.key_dtype, parts[3:6]), ("value", shape.value_dim, shape.value_dtype, parts[8:11])
    ):  # fmt: skip
        count = opened.rows * dim
        places = read_places(own[1], count, f"{name} places")
        if places.size >= MOST_OUTLIERS:
            raise ValueError(f"stream: expected fewer than 2^32 outliers of {name}s, got {places.size}")
        outliers = read_zeros(own[2], places.size, dtype, f"{name} outliers").astype(kind)
        own[2].end(f"{name} outliers")
        codes = own[0].array(np.uint8, packing.packed_size(count, codec.bits), f"{name} codes")
        packing.check_padding(codes, count, codec.bits, own[0])
        if places.size and (named := _codes_at(codes, places, codec.bits)).any():
            own[0].fail(f"{name} codes: expected 0 at outlier {int(places[int(np.argmax(named != 0))])}")
        starts = np.searchsorted(places, np.arange(opened.rows + 1) * dim).astype(np.uint32)
        sides.append([words(codes), starts, (places % dim).astype(np.uint16), outliers])
    zeros, half = opened.ends
    # a half scale is a float32 whose first 17 bits are the stored code
    scales = (half.astype(np.float32).view(np.uint32) >> np.uint32(15)).astype(np.uint16)
    where = Where.of(shape, kept)
    coded = KVQuant(
        xp, shape.kv_heads, shape.tokens - sinks, (shape.head_dim, shape.value_dim), **where.at(slice(sinks, shape.tokens)),
        codec=codec, table=opened.table, sides=sides, ends=(zeros.astype(kind), scales), rounded=(shape.key_dtype, shape.value_dtype), kind=kind,
    )  # fmt: skip
    return shape, [
        *exact_ends(opened.key_sinks, opened.value_sinks, sinks, shape.tokens, shape.tokens, where, xp),
        coded,
    ]


class KVQuant(Segment):
    """sides: words of codes, where the outliers of each vector start, their channels and numbers, of keys and of values; ends: zeros, scales."""

    def __init__(
        self, *others: Any, codec: reference.KVQuant, table: LayerTables, sides: list[list[NDArray[Any]]], ends: tuple[NDArray[Any], NDArray[Any]],
        rounded: Any, kind: np.dtype[Any], **fields: Any,
    ) -> None:  # fmt: skip
        super().__init__(*others, **fields)
        xp = self.xp
        self.codec, self.table, self.rounded, self._kind = codec, table, rounded, kind
        self._sides = [[device(one if one.size else np.zeros(1, one.dtype), xp) for one in side] for side in sides]
        self._ends = [device(one if one.size else np.zeros(1, one.dtype), xp) for one in ends]
        self._points = [device(levels.points.astype(np.float32), xp) for levels in (table.key_levels, table.value_levels)]  # fmt: skip
        self._channels = [device(one.astype(np.float32), xp) for one in (table.centre, table.half_range)]
        self._pairs = Pairs.of(table.rope, xp)

    def kernel(self) -> Kernel:
        return _SOURCE[f"attend_kvquant<{element(self._kind)}>"]

    def arguments(self) -> tuple[Any, ...]:
        turn = self._pairs
        return (
            *self._sides[0], self._points[0], *self._channels, turn.frequencies, *self._sides[1], self._points[1], *self._ends,
            np.float32(turn.scaling), np.int32(turn.pairs), np.int32(turn.interleaved), np.int32(self.codec.bits),
        )  # fmt: skip

    def arrays(self) -> list[Any]:
        return [*self._sides[0], *self._sides[1], *self._ends]

    @property
    def table_bytes(self) -> int:
        return super().table_bytes + sum(int(one.nbytes) for one in (*self._points, *self._channels))

    def behind(self, other: Segment) -> bool:
        return self._plain(other) and all(
            self.tokens * self.kv_heads * dim * self.codec.bits % 32 == 0 for dim in self.dims
        )

    def append(self, other: KVQuant) -> None:
        join, rows = self.xp.concatenate, self.tokens * self.kv_heads
        for dim, own, more in zip(self.dims, self._sides, other._sides):
            before = int(host(own[1][rows : rows + 1])[0])
            own[0] = join([own[0][: rows * dim * self.codec.bits // 32], more[0]])
            own[1] = join([own[1][:rows], more[1] + np.uint32(before)])
            own[2], own[3] = (join([own[k][:before], more[k]]) for k in (2, 3))
        self._ends = [join([own[:rows], more]) for own, more in zip(self._ends, other._ends)]
        super().append(other)

    def magnitudes(self, q: Any, scale: float, keys: Any, values: Any) -> Magnitudes:
        """Centres and half ranges times the largest point, and numbers apart, which may be larger than these."""
        table, positions = self.table, self.positions
        where = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
        before = keys
        if table.rotary is not None:
            before = table.rotary.undo(keys, np.broadcast_to(where, keys.shape[:2]))
        largest = [float(np.abs(levels.points).max()) for levels in (table.key_levels, table.value_levels)]
        wide = (np.abs(table.centre) + table.half_range * largest[0])[:, None] + np.abs(before)
        if table.rotary is not None:
            turn = table.rotary
            both = (wide[..., turn.first] + wide[..., turn.second]) * turn.scaling
            wide[..., turn.first] = wide[..., turn.second] = both
        zeros, scales = (
            host(one)[: self.kv_heads * self.tokens].reshape(self.tokens, self.kv_heads).T for one in self._ends
        )
        half = (scales.astype(np.uint32) << np.uint32(15)).view(np.float32).astype(np.float64)
        own = np.abs(zeros.astype(np.float64)) + half * (1 + largest[1])
        plain = plain_magnitudes(q, scale, wide, values)
        return Magnitudes(plain.logits, own[..., None] + np.abs(values), TURN + 3, 4)
