"""Dense packing of codes of 1 to 16 bits on the GPU, the bytes of `reference.packing`. Kernels: kernels/packing.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.arrays import little, words
from gpu.module import Source, launch, namespace
from gpu.resident import device, host
from gpu.vectors import blank
from reference import packing
from reference.packing import WIDTHS, packed_size
from reference.stream import Reader

__all__ = ["Bits", "pack", "pack_words", "unpack"]

THREADS = 256
#: codes that one thread of `unpack` writes
EACH = 4
_TYPES = {1: "unsigned char", 2: "unsigned short"}


def _instance(kernel: str, bits: int) -> str:
    return f"{kernel}<{_TYPES[np.dtype(packing._type(bits)).itemsize]}, {bits}>"


_SOURCE = Source("packing.cu", [_instance(kernel, bits) for kernel in ("pack", "unpack") for bits in WIDTHS])


def pack(codes: Any, bits: int) -> bytes:
    """Codes (NumPy or CuPy) of any shape, in C order, each 0 <= code < 2^bits, as ceil(n bits / 8) bytes.

    TypeError for codes that are no integers, ValueError for one out of range (value and place) or a width outside 1..16.
    """
    bits = packing._width(bits)
    return little(pack_words(codes, bits))[: packed_size(int(codes.size), bits)]


def pack_words(codes: Any, bits: int, phase: int = 0) -> Any:
    """As `pack`, as 32-bit words where the codes are; the first code begins at bit `phase` < 32, all other bits are 0."""
    xp, bits = namespace(codes), packing._width(bits)
    flat = codes.reshape(-1)
    if flat.dtype.kind not in "iu":
        raise TypeError(f"codes: expected integers, got {flat.dtype}")
    own = flat
    if flat.dtype != packing._type(bits):
        # numbers of the codes' own type: CuPy, as NumPy in sums, refuses 1 << 16 next to uint16
        most = min((1 << bits) - 1, np.iinfo(flat.dtype).max)
        bad = (flat < flat.dtype.type(0)) | (flat > flat.dtype.type(most))
        if flat.size and bool(bad.any()):
            _refuse(flat, int(bad.argmax()), bits)
        own = flat.astype(packing._type(bits))
    count = -(-(phase + own.size * bits) // 32)
    out, wrong = blank(count, xp), xp.full(1, np.iinfo(np.uint64).max, np.uint64)
    if own.size:
        args = (
            xp.ascontiguousarray(own),
            np.uint64(own.size),
            np.uint32(phase),
            out,
            np.uint64(count),
            wrong,
        )
        launch(_SOURCE[_instance("pack", bits)], -(-count // THREADS), THREADS, args)
        if (at := int(host(wrong)[0])) < own.size:
            _refuse(flat, at, bits)
    return out[:count]


def _refuse(flat: Any, at: int, bits: int) -> None:
    raise ValueError(f"codes: expected 0 <= code < 2^{bits}, got {int(host(flat[at : at + 1])[0])} at {at}")


def unpack(data: bytes | bytearray | memoryview | Reader, count: int, bits: int, xp: Any = np) -> Any:
    """`count` codes, (count,) uint8 (uint16 above 8 bits) of namespace `xp`, from exactly ceil(count bits / 8) bytes.

    CorruptStream if there are more or fewer bytes or a bit behind the last code is set.
    """
    bits = packing._width(bits)
    stream = read_words(data if isinstance(data, Reader) else Reader(data), count, bits)
    out = xp.empty(count, packing._type(bits))
    if count:
        threads = -(-count // EACH)
        args = (device(stream, xp), np.uint64(count), out)
        launch(_SOURCE[_instance("unpack", bits)], -(-threads // THREADS), THREADS, args)
    return out


def read_words(reader: Reader, count: int, bits: int) -> Any:
    """All of `reader`, `count` codes of `bits` bits, as words on the host. CorruptStream as for `unpack`."""
    flat = reader.array(np.uint8, packed_size(count, bits), "packed codes")
    reader.end("packed codes")
    packing.check_padding(flat, count, bits, reader)
    return words(flat)


class Bits:
    """A stream of bits that grows: kernels write what is appended so that it begins at bit `phase` of a first byte."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._count = 0

    @property
    def phase(self) -> int:
        """Bits of the last byte that are taken, 0 to 7; 0 where all of them are."""
        return self._count % 8

    def append(self, more: bytes, count: int) -> None:
        """`count` bits from bit `phase` of `more` on, the bits around them 0."""
        start = self._count // 8
        more = more[: -(-(self.phase + count) // 8)]
        if self.phase and more:
            self._data[start] |= more[0]
            self._data += more[1:]
        else:
            self._data += more
        self._count += count

    def bytes(self) -> bytes:
        return bytes(self._data)
