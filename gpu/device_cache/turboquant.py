"""TurboQuant's codes as a segment. Kernel: gpu/kernels/attention_turboquant.cu."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import reference
from gpu.arrays import words
from gpu.device_cache.bound import Magnitudes
from gpu.device_cache.segment import Frame, Segment
from gpu.device_cache.where import Where
from gpu.module import Kernel, Source
from gpu.resident import device, host
from reference import hadamard, packing
from reference.kept import Kept
from reference.shape import Shape
from reference.sketch import SIGMA, sketch
from reference.stream import Reader
from reference.turboquant import fraction_bits
from reference.vectors import norms as norms_of
from reference.vectors import read_norms

__all__ = ["TurboQuant", "segments"]

_SOURCE = Source("attention_turboquant.cu", [f"attend_turboquant<{prod}>" for prod in ("false", "true")])


def segments(
    codec: reference.TurboQuant, parts: list[Reader], kept: Kept | None, xp: Any
) -> tuple[Shape, list[Segment]]:
    """One segment of all tokens. ValueError for rotation="haar", which has no integers."""
    if codec.rotation != "hadamard":
        raise ValueError(f"stream: expected TurboQuant of rotation 'hadamard', got {codec.rotation!r}")
    shape, sides = codec._read_sides(parts)
    where = Where.of(shape, kept)
    mantissa_bits = 7 if codec.bits <= 6 else 23
    arrays: list[Any] = []
    for side in sides:
        stored = read_norms(side.norms, shape.rows * codec.norms_each, mantissa_bits, f"{side.name} norms")
        packed = side.codes.array(
            np.uint8, packing.packed_size(shape.rows * side.dim, codec.bits), f"{side.name} codes"
        )
        packing.check_padding(packed, shape.rows * side.dim, codec.bits, side.codes)
        norms = stored.astype("<u2" if mantissa_bits <= 7 else "<u4").view("<u2").astype(np.uint16, copy=False)
        arrays += [_some(norms), _some(words(packed)), _points(side.points, side.dim)]
    frames = [_frame(codec, side.name, side.dim) for side in sides]
    return shape, [
        TurboQuant(
            xp, shape.kv_heads, shape.tokens, (shape.head_dim, shape.value_dim), **where.at(slice(0, shape.tokens)),
            key_frame=frames[0], value_frame=frames[1], codec=codec, own=[device(one, xp) for one in arrays], rounded=(sides[0].dtype, sides[1].dtype),
        )
    ]  # fmt: skip


def _some(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.size else np.zeros(1, array.dtype)


def _points(points: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
    """The point of each code, its highest bit the sign, in units of a unit vector's coordinates times sqrt(d)."""
    both = np.concatenate([points, -points]) * 2.0 ** -fraction_bits(dim)
    return _some(both.astype(np.float32))


def _frame(codec: reference.TurboQuant, side: str, dim: int) -> Frame:
    """R, and for "prod" behind it R S^T times what its norms are multiplied by; each from a multiple of 4 on."""
    rotation = hadamard.rotation(dim)
    turn = (
        hadamard.signs(codec.seed, f"reference.TurboQuant {side} signs", dim)[:, None]
        * rotation.matrix()
        / np.sqrt(float(rotation.gain2))
    )
    columns = turn
    if codec.kind == "prod":
        own = sketch(codec.seed, f"reference.TurboQuant {side} sketch", dim, dim).matrix.astype(np.float64)
        gap = np.zeros((dim, -dim % 4))
        columns = np.concatenate([turn, gap, turn @ own.T * (np.sqrt(np.pi / 2) / SIGMA / dim), gap], axis=1)
    return Frame(columns[None], np.zeros((1, dim)))


class TurboQuant(Segment):
    """own: norms, words of codes and points, of keys and of values. rounded: the element types that a decoder rounds to."""

    def __init__(
        self,
        *others: Any,
        codec: reference.TurboQuant,
        own: list[Any],
        rounded: tuple[np.dtype[Any], np.dtype[Any]],
        **fields: Any,
    ) -> None:
        super().__init__(*others, **fields)
        self.codec, self._own, self.rounded = codec, own, rounded

    def kernel(self) -> Kernel:
        return _SOURCE[f"attend_turboquant<{str(self.codec.kind == 'prod').lower()}>"]

    def arguments(self) -> tuple[Any, ...]:
        units = (np.float64(np.sqrt(float(dim))) for dim in self.dims)
        sizes = (*self.dims, self.codec.bits, 7 if self.codec.bits <= 6 else 23)
        return *self._own, *units, *map(np.int32, sizes)

    def arrays(self) -> list[Any]:
        return [self._own[i] for i in (0, 1, 3, 4)]

    def behind(self, other: Segment) -> bool:
        return self._plain(other) and all(
            self.tokens * self.kv_heads * dim * self.codec.bits % 32 == 0 for dim in self.dims
        )

    def append(self, other: TurboQuant) -> None:
        rows = self.tokens * self.kv_heads
        norms = rows * self.codec.norms_each * (1 if self.codec.bits <= 6 else 2)
        for i, dim in ((0, self.dims[0]), (3, self.dims[1])):
            self._own[i] = self.xp.concatenate([self._own[i][:norms], other._own[i]])
            self._own[i + 1] = self.xp.concatenate(
                [self._own[i + 1][: rows * dim * self.codec.bits // 32], other._own[i + 1]]
            )
        super().append(other)

    def magnitudes(self, q: Any, scale: float, keys: Any, values: Any) -> Magnitudes:
        """In the frame, of the codes."""
        frames = self.key_frame, self.value_frame
        owner = np.arange(len(q)) // (len(q) // self.kv_heads)
        key, value = (self._coded(side) for side in (0, 1))
        assert frames[0] is not None and frames[1] is not None
        turned = np.abs(q @ frames[0].matrices[0])
        logits = scale * np.einsum("hqc,htc->hqt", turned, np.abs(key)[owner])
        return Magnitudes(logits, np.abs(value) @ np.abs(frames[1].matrices[0]).T, 3, 3)

    def _coded(self, side: int) -> NDArray[np.float64]:
        """k' or v' (kv_heads, tokens, columns), from what is on the device."""
        norms, packed, points = (host(one) for one in self._own[3 * side : 3 * side + 3])
        codec, dim, rows = self.codec, self.dims[side], self.kv_heads * self.tokens
        mantissa_bits = 7 if codec.bits <= 6 else 23
        stored = norms.view("<u2" if mantissa_bits <= 7 else "<u4").astype(np.int64)
        every = norms_of(stored, mantissa_bits).reshape(rows, codec.norms_each)
        data = packed.astype("<u4").tobytes()[: packing.packed_size(rows * dim, codec.bits)]
        codes = packing.unpack(data, rows * dim, codec.bits).reshape(rows, dim).astype(np.int64)
        own = points.astype(np.float64)[codes & ((1 << codec.mse_bits) - 1)] * every[:, :1] / np.sqrt(dim)
        if codec.kind == "prod":
            gap = np.zeros((rows, -dim % 4))
            signs = np.where(codes >> codec.mse_bits, -1.0, 1.0) * every[:, -1:]
            own = np.concatenate([own * (codec.mse_bits > 0), gap, signs, gap], axis=1)
        return own.reshape(self.tokens, self.kv_heads, -1).transpose(1, 0, 2)
