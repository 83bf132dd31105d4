"""KVQuant on the GPU: the streams of `reference.KVQuant`, byte for byte, and what it decodes, bit for bit. Kernels: gpu/kernels/kvquant.cu.

Arithmetic is in float64, as in the reference, RoPE included (reference/rotary.py made it so that every machine has the same bits). Fitting
stays on the host. Outliers are compacted in the order of their places by prefix sums; what a hostile stream may hold is read and refused on
the host, as the reference does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import ArrayCodec, little, words
from gpu.casts import cast
from gpu.module import ELEMENT, Source, element, launch, namespace
from gpu.resident import device, host, kept
from kvtheory.layer import Decoded, Layer
from reference import kvquant, packing
from reference.errors import StateMismatch
from reference.kept import Kept
from reference.kvquant import LayerTables
from reference.minmax import read_zeros, zero_dtype
from reference.places import read_places
from reference.shape import Shape, _array
from reference.stream import Part, Reader
from reference.vectors import largest, refuse

__all__ = ["KVQuant"]

THREADS, WARPS, SUM_THREADS = 256, 8, 1024
_SOURCE = Source(
    "kvquant.cu",
    [f"{do}_{side}<{t}>" for do in ("encode", "place", "decode") for side in ("keys", "values") for t in ELEMENT.values()]
    + [f"value_ends<{t}>" for t in ELEMENT.values()]
    + ["turns", "exclusive_sums", "gap_sizes", "gap_bytes"],
)  # fmt: skip


class KVQuant(ArrayCodec, kvquant.KVQuant):
    """`reference.KVQuant` with its numbers in kernels; `KVQuant.of(codec)` takes one over that was fitted. An appender is the reference's.

    Layers hold NumPy arrays and run on the simulator; `encode_arrays` and `decode_arrays` take and give CuPy arrays as well. Bare arrays have
    positions 0, 1, 2, ..., and the rope that the layer of that index was fitted with.
    """

    @classmethod
    def of(cls, fitted: kvquant.KVQuant) -> Self:
        """This codec with the parameters and the state of the reference's `fitted`."""
        return cls(**{one.name: getattr(fitted, one.name) for one in dataclasses.fields(fitted)})

    def encode_parts(self, data: Layer) -> list[Part]:
        return self._coded(self.fitted_to(data), Shape.of(data), data.keys, data.values, data.positions)

    def encode_at(self, data: Layer, kept: Kept) -> list[Part]:
        own = data.positions if kept.places is None else kept.positions(data.tokens)
        return self._coded(self.fitted_to(data), Shape.of(data), data.keys, data.values, own)

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape, keys, values = self._arrays(parts, None, np)
        return shape.decoded(keys, values)

    def decode_at(self, parts: list[Reader], kept: Kept) -> Decoded:
        shape, keys, values = self._arrays(parts, None if kept.places is None else kept, np)
        return shape.decoded(keys, values)

    def _encoded(self, shape: Shape, keys: Any, values: Any) -> list[Part]:
        table = next((one for one in self.tables if one.index == shape.index), None)
        own = shape.kv_heads, shape.head_dim, shape.value_dim
        if table is None:
            held = (
                ", ".join("none" if one.index is None else str(one.index) for one in self.tables) or "no layer at all"
            )
            raise StateMismatch(f"layer: KVQuant was fitted to layers of index {held}, got one of index {shape.index}")
        if own != (table.kv_heads, table.head_dim, table.value_dim):
            raise StateMismatch(
                f"layer: KVQuant was fitted to {table.kv_heads} heads of {table.head_dim} and {table.value_dim} channels "
                f"in layer {shape.index}, got {own[0]} of {own[1]} and {own[2]}"
            )
        return self._coded(table, shape, keys, values, _array(shape.positions))

    def _coded(
        self, table: LayerTables, shape: Shape, keys: Any, values: Any, positions: NDArray[np.int64]
    ) -> list[Part]:
        """The parts of keys and values in one namespace. positions: (tokens,) or by head (kv_heads, tokens)."""
        sinks, xp = min(self.sinks, shape.tokens), namespace(keys, values)
        turn = _Turn(table, positions[..., sinks:], xp)
        key = _Side("key", self, table, shape, sinks)
        exact_keys = key.exact(keys)
        coded_keys = key.encode(keys, (turn.array, *key.ends(xp)), (*turn.sizes, np.int32(self.outliers > 0)), turn)
        value = _Side("value", self, table, shape, sinks)
        exact_values = value.exact(values)
        zeros, scales, ends = value.find_ends(values, math.floor(self.outliers * shape.value_dim + 0.5))
        coded_values = value.encode(values, (ends, scales), (), None)
        return [shape.write(), exact_keys, exact_values, *coded_keys, little(zeros), little(scales), *coded_values]

    def _decoded(self, parts: list[Reader], xp: Any) -> tuple[Shape, Any, Any]:
        return self._arrays(parts, None, xp)

    def _arrays(self, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, Any, Any]:
        """Shape, keys and values in namespace `xp`."""
        opened = self._opened(parts, kept)
        shape, table = opened.shape, opened.table
        sides = [_Side(name, self, table, shape, opened.sinks) for name in ("key", "value")]
        keys, values = sides
        read = keys.read(parts[3:6]), values.read(parts[8:11])
        turn = _Turn(table, opened.positions, xp)
        zeros, half = opened.ends
        # a half scale is a float32 whose first 17 bits are the stored code
        scales = (half.astype(np.float32).view(np.uint32) >> np.uint32(15)).astype(np.uint16)
        out = [
            keys.decode(read[0], opened.key_sinks, (turn.array, *keys.ends(xp)), turn.sizes, xp),
            values.decode(
                read[1], opened.value_sinks, (device(zeros.astype(values.kind), xp), device(scales, xp)), (), xp
            ),
        ]
        return shape, out[0], out[1]


class _Turn:
    """Cosines and sines of the positions of a layer's tokens, for its rope; nothing where it has none."""

    def __init__(self, table: LayerTables, positions: NDArray[np.int64], xp: Any) -> None:
        rotary = table.rotary
        pairs = 0 if table.rope is None else table.rope.rotated // 2
        apart = positions.ndim == 2
        count = positions.size
        self.array = xp.empty((max(1, count * pairs), 2), np.float64)
        interleaved = table.rope is not None and table.rope.layout == "interleaved"
        scaling = 1.0 if rotary is None else rotary.scaling
        #: rotated channels, layout, whether heads have positions of their own, scaling
        self.sizes = np.int32(2 * pairs), np.int32(interleaved), np.int32(apart), np.float64(scaling)
        if rotary is not None and count * pairs:
            own = device(positions.T.astype(np.int64), xp)
            frequencies = kept(rotary, "turns", xp, lambda: rotary.turns)
            arguments = own, frequencies, self.array, np.int64(count), np.int32(pairs)
            launch(_SOURCE["turns"], (-(-count * pairs // THREADS),), (THREADS,), arguments)


class _Side:
    """Keys or values of a layer, of which all tokens behind the first `sinks` are coded."""

    def __init__(self, name: str, codec: KVQuant, table: LayerTables, shape: Shape, sinks: int) -> None:
        self.name, self.table, self.sinks, self.bits = name, table, sinks, codec.bits
        self.heads, self.tokens = shape.kv_heads, shape.tokens
        if name == "key":
            self.dim, self.dtype, self.levels = shape.head_dim, shape.key_dtype, table.key_levels
        else:
            self.dim, self.dtype, self.levels = shape.value_dim, shape.value_dtype, table.value_levels
        #: vectors; numbers of the type that is computed with, and that zeros and outliers have
        self.rows, self.kind = self.heads * (shape.tokens - sinks), zero_dtype(self.dtype)
        self.size = packing.packed_size(self.rows * self.dim, self.bits)

    def ends(self, xp: Any) -> tuple[Any, Any]:
        """low, high of the channels."""
        return kept(self.table, "low", xp, lambda: self.table.low), kept(
            self.table, "high", xp, lambda: self.table.high
        )

    def _launch(self, do: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        launch(_SOURCE[f"{do}_{self.name}s<{element(self.kind)}>"], (blocks,), (THREADS,), arguments)

    @property
    def _sizes(self) -> tuple[np.generic, ...]:
        """rows, tokens, first, heads, dim."""
        return *map(np.int64, (self.rows, self.tokens, self.sinks)), np.int32(self.heads), np.int32(self.dim)

    def exact(self, array: Any) -> Part:
        """The sinks, token by token. ValueError, with its place, for a number that float32 cannot hold."""
        xp = namespace(array)
        first = array[:, : self.sinks]
        if not bool(xp.isfinite(cast(first, self.kind)).all()):
            self._refuse(array)
        return little(xp.ascontiguousarray(first.transpose(1, 0, 2)))

    def _taken(self, array: Any) -> Any:
        """As kernels take it; inf what float32 cannot hold."""
        return namespace(array).ascontiguousarray(cast(array, self.kind))

    def find_ends(self, array: Any, most: int) -> tuple[Any, Any, Any]:
        """Of each vector the zero, the code of the scale, and both ends, with `most` numbers beyond them."""
        xp = namespace(array)
        zeros, scales = xp.empty(self.rows, self.kind), xp.empty(self.rows, np.uint16)
        ends = xp.empty((self.rows, 2), np.float32)
        if self.rows:
            arguments = self._taken(array), zeros, scales, ends, *self._sizes, np.int32(most)
            launch(_SOURCE[f"value_ends<{element(self.kind)}>"], (-(-self.rows // WARPS),), (THREADS,), arguments)
        return zeros, scales, ends

    def encode(
        self, array: Any, arrays: tuple[Any, ...], more: tuple[np.generic, ...], turn: _Turn | None
    ) -> list[Part]:
        """Codes, places and outliers. arrays, more: what the kernel of this side takes beside what both do."""
        if not self.rows:
            return [b"", b"", b""]
        xp, x = namespace(array), self._taken(array)
        thresholds = kept(self.levels, "thresholds", xp, lambda: self.levels.thresholds)
        together = 32 // math.gcd(self.dim, 32)
        warps = -(-self.rows // together)
        blocks = -(-warps // WARPS)
        codes, masks = xp.empty(-(-self.size // 4), np.uint32), xp.empty(-(-self.rows * self.dim // 32), np.uint32)
        counts, bad = xp.empty(warps, np.uint32), xp.zeros(1, np.uint32)
        sizes = *self._sizes, np.int32(self.bits), np.int32(together)
        self._launch("encode", blocks, (x, *arrays, thresholds, codes, masks, counts, bad, *sizes, *more))
        if int(host(bad)[0]):
            self._refuse(array)
        starts, total = _sums(counts)
        places, outliers = xp.empty(total, np.int64), xp.empty(total, self.kind)
        if total:
            own = () if turn is None else turn.sizes
            given = (x,) if turn is None else (x, turn.array)
            sizes = *self._sizes, np.int32(together), *own, np.float32(largest(self.kind))
            self._launch("place", blocks, (*given, masks, starts, places, outliers, *sizes))
        return [little(codes)[: self.size], little(_gaps(places)), little(outliers)]

    def _refuse(self, array: Any) -> None:
        refuse(f"{self.name}s", host(array), "KVQuant")
        raise AssertionError(f"{self.name}s: the kernel met NaN or inf, the host does not")

    def read(self, readers: list[Reader]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Words of codes, places, outliers: on the host; CorruptStream unless they fit together. The codes have their size."""
        count = self.rows * self.dim
        places = read_places(readers[1], count, f"{self.name} places")
        outliers = read_zeros(readers[2], places.size, self.dtype, f"{self.name} outliers").astype(self.kind)
        readers[2].end(f"{self.name} outliers")
        start = readers[0].offset
        codes = readers[0].array(np.uint8, self.size, f"{self.name} codes")
        packing.check_padding(codes, count, self.bits, readers[0])
        named = _codes_at(codes, places, self.bits)
        if named.any():
            k = int(np.argmax(named != 0))
            at = int(places[k])
            readers[0].fail(
                f"{self.name} codes: expected 0 at outlier {at}, got {named[k]}", start + at * self.bits // 8
            )
        return words(codes), places, outliers

    def decode(
        self, read: tuple[NDArray[Any], ...], exact: NDArray[Any], arrays: tuple[Any, ...], more: tuple[np.generic, ...], xp: Any
    ) -> Any:  # fmt: skip
        """(heads, tokens, dim) in the layer's element type, of what `read` gave. exact: the sinks."""
        numbers = xp.empty((self.heads, self.tokens, self.dim), self.kind)
        if self.rows:
            points = kept(self.levels, "points", xp, lambda: self.levels.points)
            given = *(device(one, xp) for one in read), *arrays, points, numbers
            sizes = np.int64(read[1].size), *self._sizes, np.int32(self.bits), *more, np.float64(largest(self.dtype))
            self._launch("decode", -(-self.rows // WARPS), (*given, *sizes))
        out = cast(numbers, self.dtype)
        out[:, : self.sinks] = device(exact, xp)
        return out


def _sums(counts: Any) -> tuple[Any, int]:
    """(starts (n + 1,) int64, their last): the sums of counts (n,) before each."""
    xp = namespace(counts)
    starts = xp.empty(counts.size + 1, np.int64)
    launch(_SOURCE["exclusive_sums"], (1,), (SUM_THREADS,), (counts, starts, np.int64(counts.size)))
    return starts, int(host(starts[-1:])[0])


def _gaps(places: Any) -> Any:
    """Places (n,), ascending, as bytes of gaps (reference.places)."""
    xp, count = namespace(places), int(places.size)
    if not count:
        return xp.empty(0, np.uint8)
    sizes = xp.empty(count, np.uint32)
    blocks = -(-count // THREADS)
    launch(_SOURCE["gap_sizes"], (blocks,), (THREADS,), (places, sizes, np.int64(count)))
    starts, total = _sums(sizes)
    out = xp.empty(total, np.uint8)
    launch(_SOURCE["gap_bytes"], (blocks,), (THREADS,), (places, starts, out, np.int64(count)))
    return out


def _codes_at(packed: NDArray[np.uint8], places: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """The codes at `places`, of at most 8 bits: in one byte or in two."""
    bit = places * bits
    first = bit >> 3
    second = np.minimum(first + 1, packed.size - 1)
    both = packed[first].astype(np.int64) | packed[second].astype(np.int64) << 8
    return (both >> (bit & 7)) & ((1 << bits) - 1)
