"""KIVI on the GPU: the streams of `reference.KIVI`, byte for byte, and what it decodes, bit for bit. Kernels: gpu/kernels/kivi.cu.

Coded tokens are quantised, packed and restored by kernels; recent tokens are copied. What a hostile stream may hold (sizes, zeros, scales,
padding) is read and refused on the host, as the reference does, before anything is allocated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import ArrayCodec, little, words
from gpu.casts import cast
from gpu.module import Source, element, launch, namespace
from gpu.resident import device, host
from reference import kivi, packing
from reference.full import flat_numbers
from reference.minmax import read_scales, read_zeros, zero_dtype
from reference.shape import Shape
from reference.stream import Part, Reader
from reference.vectors import largest, refuse

__all__ = ["KIVI"]

THREADS, WARPS = 256, 8
ELEMENTS = ("float", "__half", "__nv_bfloat16")
_SOURCE = Source(
    "kivi.cu", [f"{do}_{side}<{t}>" for do in ("encode", "decode") for side in ("keys", "values") for t in ELEMENTS]
)


class KIVI(ArrayCodec, kivi.KIVI):
    """`reference.KIVI` with its numbers in kernels: same constructor, same streams. An appender is the reference's, on the host.

    Layers hold NumPy arrays and run on the simulator; `encode_arrays` and `decode_arrays` take and give CuPy arrays as well.
    """

    def _encoded(self, shape: Shape, keys: Any, values: Any) -> list[Part]:
        """The parts of keys and values (kv_heads, tokens, d), any strides, in one namespace."""
        coded = self.coded(shape.tokens)
        sides = [_Side("key", self, shape, coded[0]), _Side("value", self, shape, coded[1])]
        parts: list[Part] = [shape.write()]
        for side, array in zip(sides, (keys, values)):
            parts += [*side.encode(array), side.recent(array)]
        return parts

    def _decoded(self, parts: list[Reader], xp: Any) -> tuple[Shape, Any, Any]:
        """Shape, keys and values in namespace `xp`."""
        shape = Shape.read(parts[0])
        coded = self.coded(shape.tokens)
        sides = [_Side("key", self, shape, coded[0]), _Side("value", self, shape, coded[1])]
        own = parts[1:5], parts[5:9]
        # all sizes before anything is allocated
        for side, readers in zip(sides, own):
            side.check(readers)
        recent = [side.read_recent(readers[3]) for side, readers in zip(sides, own)]
        keys, values = (side.decode(readers, new, xp) for side, readers, new in zip(sides, own, recent))
        return shape, keys, values


class _Side:
    """Keys or values of a layer: how its numbers are cut into rows (gpu/kernels/kivi.cu) and groups, of which the first `coded` tokens are."""

    def __init__(self, name: str, codec: KIVI, shape: Shape, coded: int) -> None:
        self.name, self.shape, self.coded = name, shape, coded
        self.group, self.bits = codec.group, codec.bits
        self.heads, self.tokens = shape.kv_heads, shape.tokens
        if name == "key":
            self.dim, self.dtype = shape.head_dim, shape.key_dtype
            #: rows, numbers of a row, groups of a row
            self.rows, self.row, self.each = coded // self.group * self.heads * self.dim, self.group, 1
        else:
            self.dim, self.dtype = shape.value_dim, shape.value_dtype
            self.rows, self.row, self.each = coded * self.heads, self.dim, -(-self.dim // self.group)
        #: of the numbers that are computed with, and of zeros
        self.kind = zero_dtype(self.dtype)
        self.size = packing.packed_size(self.rows * self.row, self.bits)

    def _launch(self, do: str, together: int, arrays: tuple[Any, ...], *more: np.generic) -> None:
        """`together`: rows of one thread (keys) or of one warp (values)."""
        each = together * (THREADS if self.name == "key" else WARPS)
        sizes = (
            np.int64(self.rows),
            np.int64(self.tokens),
            *map(np.int32, (self.heads, self.dim, self.group, self.bits)),
        )
        kernel = _SOURCE[f"{do}_{self.name}s<{element(self.kind)}>"]
        launch(kernel, (-(-self.rows // each),), (THREADS,), (*arrays, *sizes, *more))

    def encode(self, array: Any) -> list[Part]:
        """Zeros, scales and codes of the coded tokens. ValueError, with its place, for a number that no float32 is."""
        if not self.rows:
            return [b"", b"", b""]
        xp = namespace(array)
        x = xp.ascontiguousarray(cast(array, self.kind))  # what float32 cannot hold is inf to the kernel
        zeros, scales = xp.empty(self.rows * self.each, self.kind), xp.empty(self.rows * self.each, np.uint16)
        packed, bad = xp.empty(-(-self.size // 4), np.uint32), xp.zeros(1, np.uint32)
        together = 32 // math.gcd(self.row * self.bits, 32)
        more = [np.int32(together)]
        if self.name == "value":
            longest = min(self.group, self.dim)
            more.append(np.int32(min(32, 1 << (longest - 1).bit_length())))
        self._launch("encode", together, (x, zeros, scales, packed, bad), *more)
        if int(host(bad)[0]):
            self._refuse(array)
        return [little(zeros), little(scales), little(packed)[: self.size]]

    def recent(self, array: Any) -> Part:
        """The other tokens, token by token as they are. ValueError for what no later coding could take."""
        xp = namespace(array)
        new = array[:, self.coded :]
        if not bool(xp.isfinite(cast(new, self.kind)).all()):
            self._refuse(array)
        return little(xp.ascontiguousarray(new.transpose(1, 0, 2)))

    def _refuse(self, array: Any) -> None:
        refuse(f"{self.name}s", host(array), "KIVI")
        raise AssertionError(f"{self.name}s: the kernel met NaN or inf, the host does not")

    def check(self, readers: list[Reader]) -> None:
        """CorruptStream unless zeros, scales and codes have their sizes."""
        number = self.rows * self.each
        sizes = number * self.kind.itemsize, 2 * number, self.size
        for reader, size, what in zip(readers, sizes, ("zeros", "scales", "codes")):
            if reader.remaining != size:
                reader.fail(f"{self.name} {what}: expected {size} bytes, got {reader.remaining}")

    def read_recent(self, reader: Reader) -> NDArray[Any]:
        """The recent tokens, (recent, heads, dim)."""
        new = self.tokens - self.coded
        numbers = flat_numbers(reader, f"recent {self.name}s", new * self.heads * self.dim, self.dtype)
        return numbers.reshape(new, self.heads, self.dim)

    def decode(self, readers: list[Reader], recent: NDArray[Any], xp: Any) -> Any:
        """(heads, tokens, dim) in the layer's element type, of checked parts. CorruptStream for what no encoder writes."""
        number = self.rows * self.each
        zeros = read_zeros(readers[0], number, self.dtype, f"{self.name} zeros").astype(self.kind)
        scales = read_scales(readers[1], number, f"{self.name} scales")
        codes = readers[2].array(np.uint8, self.size, f"{self.name} codes")
        packing.check_padding(codes, self.rows * self.row, self.bits, readers[2])
        numbers = xp.empty((self.heads, self.tokens, self.dim), self.kind)
        if self.rows:
            arrays = *(device(a, xp) for a in (zeros, scales, words(codes))), numbers
            self._launch("decode", 1, arrays, np.float32(largest(self.dtype)))
        out = cast(numbers, self.dtype)
        out[:, self.coded :] = device(recent, xp).transpose(1, 0, 2)
        return out
