"""PolarQuant by kernels, the bytes of `reference.PolarQuant`: kernels/polarquant.cu.

The tree of norms is worked out in float32 with one rounding an operation, in the reference's order: the kernels are compiled without fused
multiply-add.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import ArrayCodec, little, words
from gpu.casts import cast
from gpu.module import Source, launch, namespace
from gpu.packing import Bits
from gpu.resident import device, host, kept
from gpu.vectors import THREADS, Vectors, blank, flips, instances, refusals, stored_norms, within
from kvtheory.layer import Layer
from reference import hadamard, packing
from reference import polarquant as numpy_polarquant
from reference.codec import Appender
from reference.polarquant import MANTISSA_BITS, cosines, thresholds, tree
from reference.shape import Shape
from reference.stream import Part, Reader
from reference.vectors import largest, read_norms

__all__ = ["PolarQuant"]

_SOURCE = Source("polarquant.cu", instances("encode", "decode"))
#: entries that a level has room for in the kernels' tables
_TABLE = 256


class _Plan:
    """Everything about one side (keys or values) that no data decides, and what its kernels are given."""

    def __init__(self, codec: PolarQuant, side: str, dim: int) -> None:
        self.dim, self.level_bits, self.side = dim, codec.level_bits, side
        self.codes_each, self.radii_each = tree(dim, len(codec.level_bits))
        self.rotation = hadamard.rotation(dim)
        self._flips = flips(hadamard.signs(codec.seed, f"reference.PolarQuant {side} signs", dim))

    def _tree(self, starts: Sequence[int], xp: Any) -> tuple[Any, ...]:
        """flips, levels, level_bits, start: as both kernels have them one after the other."""
        levels = np.int32(len(self.level_bits))
        level_bits = kept(self, "bits", xp, lambda: np.array(self.level_bits, np.int32))
        start = device(np.array(starts, np.uint64), xp)
        return kept(self, "flips", xp, lambda: self._flips), levels, level_bits, start

    def _starts(self, rows: int, phases: Sequence[int]) -> tuple[list[int], int]:
        """The first bit of each level's codes where each level has whole words, and how many words that are."""
        starts, at = [], 0
        for each, bits, phase in zip(self.codes_each, self.level_bits, phases, strict=True):
            starts.append(32 * at + phase)
            at += -(-(phase + rows * each * bits) // 32)
        return starts, at

    def _tangents(self) -> NDArray[np.float32]:
        out = np.zeros((len(self.level_bits), _TABLE), np.float32)
        for level, bits in enumerate(self.level_bits, 1):
            own = thresholds(cosines(level, bits))
            out[level - 1, : own.size] = own
        return out

    def encode(self, name: str, array: Any, phases: Sequence[int]) -> tuple[bytes, list[bytes]]:
        """Radii of array (heads, tokens, d), and the codes of each level from bit `phase` on. ValueError: not finite."""
        xp, vectors = namespace(array), Vectors.of(array)
        if not vectors.rows:
            return b"", [b""] * len(self.level_bits)
        starts, many = self._starts(vectors.rows, phases)
        radii, refused = xp.empty(vectors.rows * self.radii_each, np.uint16), blank(1, xp)
        angles = blank(many, xp)
        tangents = kept(self, "tangents", xp, self._tangents)
        rotation = (np.int32(self.rotation.bits), np.float64(self.rotation.gain2))
        args = (*vectors.source, *self._tree(starts, xp), tangents, *rotation, radii, angles, refused)
        launch(_SOURCE[vectors.instance("encode")], vectors.grid, THREADS, args)
        refusals(refused, name, array, "PolarQuant")
        coded, ends = little(angles), [*(start // 32 for start in starts[1:]), many]
        return little(radii), [coded[start // 32 * 4 : end * 4] for start, end in zip(starts, ends)]

    def decode(
        self,
        shape: Shape,
        dtype: np.dtype[Any],
        factors: NDArray[np.float32],
        radii: NDArray[np.uint16],
        angles: Sequence[NDArray[np.uint32]],
        xp: Any,
    ) -> tuple[Any, bool]:
        """Keys or values, and whether a lone coordinate had a code with more than a sign."""
        out = Vectors.empty((shape.kv_heads, shape.tokens, self.dim), dtype, xp)
        starts, many = self._starts(out.rows, [0] * len(self.level_bits))
        damaged, stream = blank(1, xp), np.concatenate([*angles, np.zeros(0 if many else 1, np.uint32)])
        gain = np.float64(1 / np.sqrt(float(self.rotation.gain2)))
        given = (device(radii, xp), device(stream, xp), *out.sizes, *self._tree(starts, xp), device(factors, xp))
        args = (*given, np.int32(self.rotation.bits), gain, np.float32(largest(dtype)), *out.target, damaged)
        launch(_SOURCE[out.instance("decode")], out.grid, THREADS, args)
        return cast(out.memory, dtype), bool(host(damaged)[0])


@functools.lru_cache(maxsize=64)
def _plan(codec: PolarQuant, side: str, dim: int) -> _Plan:
    return _Plan(codec, side, dim)


class PolarQuant(ArrayCodec, numpy_polarquant.PolarQuant):
    __doc__ = numpy_polarquant.PolarQuant.__doc__

    def start(self, layer: Layer) -> Appender:
        shape = Shape.of(layer)
        within(shape, "PolarQuant")
        appender = _Appender(self, shape)
        appender.take(layer.keys, layer.values)
        return appender

    def _encoded(self, shape: Shape, keys: Any, values: Any) -> list[Part]:
        within(shape, "PolarQuant")
        appender = _Appender(self, shape)
        appender.take(keys, values)
        return appender.parts()

    def _decoded(self, parts: list[Reader], xp: Any) -> tuple[Shape, Any, Any]:
        shape, tables, sides = self._read_sides(parts)
        factors = np.zeros((len(tables), 2, _TABLE), np.float32)
        for level, table in enumerate(tables, 1):
            for place, own in enumerate(numpy_polarquant.factors(table, level, self.level_bits[level - 1])):
                factors[level - 1, place, : own.size] = own
        out = []
        for side in sides:
            if not shape.rows:
                out.append(xp.empty((shape.kv_heads, 0, side.dim), side.dtype))
                continue
            plan = _plan(self, side.name, side.dim)
            stored = read_norms(side.radii, shape.rows * plan.radii_each, MANTISSA_BITS, f"{side.name} radii")
            start, angles = side.angles[0].offset, []
            for section, each, bits in zip(side.angles, plan.codes_each, self.level_bits, strict=True):
                flat = section.array(np.uint8, section.remaining, f"{side.name} angles")
                packing.check_padding(flat, shape.rows * each, bits, section)
                angles.append(words(flat))
            decoded, damaged = plan.decode(shape, side.dtype, factors, stored_norms(stored, MANTISSA_BITS), angles, xp)
            if damaged:
                numpy_polarquant.fail_lone(side.angles[0], side.name, start)
            out.append(decoded)
        return shape, *out


class _Appender(Appender):
    def __init__(self, codec: PolarQuant, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._plans = [_plan(codec, "key", shape.head_dim), _plan(codec, "value", shape.value_dim)]
        self._radii: tuple[list[bytes], ...] = ([], [])
        self._angles = [[Bits() for _ in codec.level_bits] for _ in self._plans]

    def take(self, keys: Any, values: Any) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        given = list(zip(self._plans, ("keys", "values"), (keys, values), self._angles))
        coded = [plan.encode(name, array, [b.phase for b in angles]) for plan, name, array, angles in given]
        for (plan, _, array, angles), held, (radii, levels) in zip(given, self._radii, coded):
            held.append(radii)
            rows = array.shape[0] * array.shape[1]
            for own, more, each, bits in zip(angles, levels, plan.codes_each, plan.level_bits, strict=True):
                own.append(more, rows * each * bits)

    def parts(self) -> list[Part]:
        codec = self.codec
        assert isinstance(codec, PolarQuant)
        table = b"".join(cosines(level, bits).astype("<u2").tobytes() for level, bits in enumerate(codec.level_bits, 1))
        out: list[Part] = [self.shape.write(), table]
        for radii, angles in zip(self._radii, self._angles):
            out += [b"".join(radii), b"".join(own.bytes() for own in angles)]
        return out
