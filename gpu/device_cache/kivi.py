"""KIVI's codes and its recent tokens as one segment. Kernel: gpu/kernels/attention_kivi.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

import reference
from gpu.arrays import words
from gpu.device_cache.bound import Magnitudes
from gpu.device_cache.exact import plain_magnitudes, single
from gpu.device_cache.segment import Segment
from gpu.device_cache.where import Where
from gpu.module import ELEMENT, Kernel, Source, element
from gpu.resident import device
from kvtheory.layer import Layer
from reference import packing
from reference.kept import Kept
from reference.kivi import _key_rows, _recent
from reference.minmax import Groups, Stored, read_scales, read_zeros, zero_dtype
from reference.shape import Shape
from reference.stream import Reader
from reference.vectors import largest

__all__ = ["KIVI", "segments"]

_SOURCE = Source("attention_kivi.cu", [f"attend_kivi<{t}>" for t in ELEMENT.values()])


def segments(codec: reference.KIVI, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, list[Segment]]:
    shape = Shape.read(parts[0])
    coded = codec.coded(shape.tokens)
    return shape, [_segment(codec, shape, Where.of(shape, kept).at(slice(0, shape.tokens)), coded, parts[1:], xp)]


def chunk(codec: reference.KIVI, layer: Layer, where: dict[str, Any], xp: Any) -> Segment:
    """All tokens of a layer as codes, a multiple of `group` of them; no window."""
    shape = Shape.of(layer)
    keys = Stored(Groups(codec.group, codec.group, codec.bits, shape.key_dtype))
    values = Stored(Groups(shape.value_dim, codec.group, codec.bits, shape.value_dtype))
    keys.keep(keys.groups.encode(_key_rows(layer.keys, layer.tokens, codec.group)))
    values.keep(values.groups.encode(layer.values.transpose(1, 0, 2)))
    parts = [Reader(bytes(part)) for part in (*keys.parts(), b"", *values.parts(), b"")]
    return _segment(codec, shape, where, (layer.tokens, layer.tokens), parts, xp)


def _segment(
    codec: reference.KIVI, shape: Shape, where: dict[str, Any], coded: tuple[int, int], parts: list[Reader], xp: Any
) -> Segment:
    """parts: zeros, scales, codes and recent tokens of keys, then of values. CorruptStream for sizes and numbers that do not fit."""
    heads = shape.kv_heads
    sides = (
        (shape.head_dim, shape.key_dtype, codec.group, coded[0] // codec.group * heads * shape.head_dim, 1, parts[:4], "key"),
        (shape.value_dim, shape.value_dtype, shape.value_dim, coded[1] * heads, -(-shape.value_dim // codec.group), parts[4:], "value"),
    )  # fmt: skip
    for _, dtype, row, rows, _, own, name in sides:
        Stored.check(Groups(row, codec.group, codec.bits, dtype), rows, own[:3], name)
    # the kernel has one element type: where keys and values differ, float32 holds both
    kind = zero_dtype(shape.key_dtype) if shape.key_dtype == shape.value_dtype else np.dtype(np.float32)
    arrays: list[Any] = []
    for (dim, dtype, row, rows, each, own, name), first in zip(sides, coded):
        recent = _recent(own[3], f"recent {name}s", shape, first, dim, dtype)
        zeros = read_zeros(own[0], rows * each, dtype, f"{name} zeros").astype(kind)
        scales = read_scales(own[1], rows * each, f"{name} scales")
        codes = own[2].array(np.uint8, packing.packed_size(rows * row, codec.bits), f"{name} codes")
        packing.check_padding(codes, rows * row, codec.bits, own[2])
        new = single(f"recent {name}s", recent).transpose(1, 0, 2).astype(kind)
        arrays += [_some(one, xp) for one in (zeros, scales, words(codes), new)]
    return KIVI(
        xp, heads, shape.tokens, (shape.head_dim, shape.value_dim), **where, codec=codec, own=arrays, coded=coded,
        limits=(largest(shape.key_dtype), largest(shape.value_dtype)), kind=kind,
        rounded=None if shape.key_dtype == shape.value_dtype else (shape.key_dtype, shape.value_dtype),
        roundings=(int(shape.key_dtype == np.float64), int(shape.value_dtype == np.float64)),
    )  # fmt: skip


def _some(array: Any, xp: Any) -> Any:
    flat = np.ascontiguousarray(array).reshape(-1)
    return device(flat if flat.size else np.zeros(1, flat.dtype), xp)


class KIVI(Segment):
    """own: zeros, scales, words of codes and recent tokens (tokens, kv_heads, dim), of keys and of values, all flat."""

    def __init__(self, *others: Any, codec: reference.KIVI, own: list[Any], coded: tuple[int, int], limits: tuple[float, float],
                 kind: np.dtype[Any], roundings: tuple[int, int], rounded: Any, **fields: Any) -> None:  # fmt: skip
        super().__init__(*others, **fields)
        self.codec, self._own, self.coded, self._limits, self._kind, self._roundings = (
            codec,
            own,
            coded,
            limits,
            kind,
            roundings,
        )
        self.rounded = rounded
        heads = np.arange(self.kv_heads)
        self._starts = [device((heads * dim).astype(np.int64), self.xp) for dim in self.dims]

    def kernel(self) -> Kernel:
        return _SOURCE[f"attend_kivi<{element(self._kind)}>"]

    def arguments(self) -> tuple[Any, ...]:
        return (
            *self._own,
            *self._starts,
            *map(np.int64, self.coded),
            *map(np.float32, self._limits),
            np.int32(self.codec.group),
            np.int32(self.codec.bits),
        )

    def arrays(self) -> list[Any]:
        return list(self._own)

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """(zeros, bits of codes) of keys and of values."""
        (keys, values), heads, group, bits = self.coded, self.kv_heads, self.codec.group, self.codec.bits
        key_rows, value_rows = keys // group * heads * self.dims[0], values * heads
        return (key_rows, key_rows * group * bits), (
            value_rows * -(-self.dims[1] // group),
            value_rows * self.dims[1] * bits,
        )

    def behind(self, other: Segment) -> bool:
        whole = self.coded == (self.tokens, self.tokens)
        return whole and self._plain(other) and all(bits % 32 == 0 for _, bits in self._sizes())

    def append(self, other: KIVI) -> None:
        for i, (zeros, bits) in zip((0, 4), self._sizes()):
            for k, size in ((i, zeros), (i + 1, zeros), (i + 2, bits // 32)):
                self._own[k] = self.xp.concatenate([self._own[k][:size], other._own[k]])
        super().append(other)
        self.coded = (self.tokens, self.tokens)

    def magnitudes(self, q: Any, scale: float, keys: Any, values: Any) -> Magnitudes:
        """A coded number is the decoder's, to the last bit, where keys and values have one type; a recent one of float64 is rounded once."""
        return plain_magnitudes(q, scale, keys, values, *self._roundings)
