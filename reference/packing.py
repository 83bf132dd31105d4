"""Dense packing of codes of 1 to 16 bits, least significant bit first.

Code number i of width b fills the bits i b ... i b + b - 1 of the stream; bit n of the stream is bit n mod 8 of byte n // 8. No
code is padded: n codes take ceil(n b / 8) bytes, and the unused high bits of the last byte are 0.

With g = 8 / gcd(b, 8), each g codes fill exactly g b / 8 bytes. NumPy runs over all such groups at once, whatever the width:

    planes    one array for each place in the group: a byte of the group is the OR of at most a few shifted planes
    rows      a byte for each code, one after the other (b <= 8): g of them are one integer, in which neighbours are pushed together,
              then pairs of them, then fours
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.stream import Reader

__all__ = [
    "Packer",
    "group",
    "look_up",
    "pack",
    "pack_planes",
    "pack_rows",
    "packed_size",
    "unpack",
    "unpack_planes",
    "unpack_rows",
]

WIDTHS = range(1, 17)
#: groups taken at once, so that all planes of a step stay in the cache
_STEP = 1 << 13

Codes = NDArray[Any]


def _width(bits: int) -> int:
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or int(bits) not in WIDTHS:
        raise ValueError(f"bits: expected an int from 1 to 16, got {bits!r}")
    return int(bits)


def group(bits: int) -> int:
    """The fewest codes of that width that fill whole bytes: 8 / gcd(bits, 8)."""
    return 8 // math.gcd(_width(bits), 8)


def packed_size(count: int, bits: int) -> int:
    """ceil(count bits / 8): bytes of `count` codes."""
    return -(-count * _width(bits) // 8)


def _type(bits: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if bits <= 8 else np.uint16


def _shift(source: Codes, left: int, out: Codes) -> None:
    """out = source 2^left, in the wider of their types, its low bits. A product: NumPy's left shift is slower."""
    if left > 0 and out.dtype.itemsize >= source.dtype.itemsize:
        np.multiply(source, 1 << left, out=out, dtype=out.dtype)
    elif left > 0:
        np.multiply(source, 1 << left, out=out, dtype=source.dtype, casting="unsafe")
    elif left < 0:
        np.right_shift(source, -left, out=out, dtype=source.dtype, casting="unsafe")
    else:
        np.copyto(out, source, casting="unsafe")


def pack_planes(planes: Codes, bits: int, out: NDArray[np.uint8]) -> None:
    """planes (k g, ...) uint8 (uint16 above 8 bits), all below 2^bits -> out (k g bits / 8, ...) uint8, for whole groups of g.

    Plane i of a group holds its code number i; byte j of the group holds the bits 8j ... 8j + 7 of the group.
    """
    g = group(bits)
    size = g * bits // 8
    source = planes.reshape(-1, g, *planes.shape[1:])
    target = out.reshape(-1, size, *out.shape[1:])
    if size == 1:
        np.copyto(target[:, 0], source[:, -1], casting="unsafe")
        for i in reversed(range(g - 1)):
            np.multiply(target[:, 0], 1 << bits, out=target[:, 0])
            np.bitwise_or(target[:, 0], source[:, i], out=target[:, 0])
        return
    scratch = np.empty_like(target[:, 0])
    for j in range(size):
        first, last = 8 * j // bits, (8 * j + 7) // bits
        _shift(source[:, first], first * bits - 8 * j, target[:, j])
        for i in range(first + 1, last + 1):
            _shift(source[:, i], i * bits - 8 * j, scratch)
            np.bitwise_or(target[:, j], scratch, out=target[:, j])


def unpack_planes(packed: NDArray[np.uint8], bits: int, out: Codes) -> None:
    """The inverse of `pack_planes`: packed (k g bits / 8, ...) uint8 -> out (k g, ...) uint8 (uint16 above 8 bits)."""
    g = group(bits)
    size = g * bits // 8
    source = packed.reshape(-1, size, *packed.shape[1:])
    target = out.reshape(-1, g, *out.shape[1:])
    mask = (1 << bits) - 1
    if size == 1:
        places = np.arange(0, 8, bits, dtype=np.uint8)
        np.right_shift(source, places.reshape(-1, *[1] * (source.ndim - 2)), out=target)
        np.bitwise_and(target, mask, out=target)
        return
    scratch = np.empty_like(target[:, 0])
    for i in range(g):
        first, last = i * bits // 8, (i * bits + bits - 1) // 8
        for j in range(first, last + 1):
            into = target[:, i] if j == first else scratch
            _shift(source[:, j], 8 * j - i * bits, into)
            if j > first:
                np.bitwise_or(target[:, i], scratch, out=target[:, i])
        if (i + 1) * bits % 8 or first != last:
            np.bitwise_and(target[:, i], mask, out=target[:, i])


@functools.cache
def _pushes(bits: int) -> tuple[str, list[tuple[int, int, int, int]]]:
    """The integer of g bytes, a code in each; for h = 1, 2, 4 < g, how far the upper h of 2 h codes are pushed, and three masks.

    Of the lower h, of the upper h beside them, and of the upper h where they are before: 8 h bits from the lower.
    """
    g = group(bits)
    pushes = []
    for h in (1, 2, 4)[: g.bit_length() - 1]:
        lower = sum(((1 << h * bits) - 1) << 8 * first for first in range(0, g, 2 * h))
        pushes.append((h * (8 - bits), lower, lower << h * bits, lower << 8 * h))
    return f"<u{g}", pushes


def _byte_planes(words: NDArray[Any], size: int) -> NDArray[np.uint8]:
    """(size, n): the lowest bytes of n integers; no copy."""
    return words.view(np.uint8).reshape(words.size, words.itemsize)[:, :size].T


def pack_rows(codes: NDArray[np.uint8], bits: int, out: NDArray[np.uint8]) -> None:
    """codes (n,) uint8, all below 2^bits, bits <= 8, -> out (n bits / 8,) uint8, contiguous, for whole groups of g. codes are overwritten."""
    if bits in (1, 8):
        np.copyto(out, np.packbits(codes, bitorder="little") if bits == 1 else codes)
        return
    kind, pushes = _pushes(bits)
    words = codes.view(kind)
    moved, size = np.empty_like(words), words.itemsize * bits // 8
    for far, lower, beside, _ in pushes:
        np.right_shift(words, far, out=moved)
        if bits > 4:  # what is left of the lower ones would fall on the upper ones, and these where they were on both
            np.bitwise_and(moved, beside, out=moved)
            np.bitwise_and(words, lower, out=words)
        np.bitwise_or(words, moved, out=words)
        if bits <= 4:
            np.bitwise_and(words, lower | beside, out=words)
    if size <= 2:
        np.copyto(out.view(f"<u{size}"), words, casting="unsafe")
    else:
        for target, source in zip(out.reshape(-1, size).T, _byte_planes(words, size), strict=True):
            np.copyto(target, source)


def unpack_rows(packed: NDArray[np.uint8], bits: int, out: NDArray[np.uint8]) -> None:
    """The inverse of `pack_rows`: packed (n bits / 8,) uint8 -> out (n,) uint8, both contiguous."""
    if bits in (1, 8):
        np.copyto(out, np.unpackbits(packed, bitorder="little") if bits == 1 else packed)
        return
    kind, pushes = _pushes(bits)
    words = out.view(kind)
    moved, size = np.empty_like(words), words.itemsize * bits // 8
    if size <= 2:
        np.copyto(words, packed.view(f"<u{size}"))
    else:
        words.fill(0)
        for target, source in zip(_byte_planes(words, size), packed.reshape(-1, size).T, strict=True):
            np.copyto(target, source)
    for far, lower, _, apart in reversed(pushes):
        np.multiply(words, 1 << far, out=moved)  # NumPy's left shift is slower
        if bits > 4:
            np.bitwise_and(moved, apart, out=moved)
            np.bitwise_and(words, lower, out=words)
        np.bitwise_or(words, moved, out=words)
        if bits <= 4:
            np.bitwise_and(words, lower | apart, out=words)


@functools.lru_cache(maxsize=16)
def _words(values: tuple[float, ...]) -> NDArray[Any]:
    """For each byte the values its codes stand for, one after the other in memory, as one item; codes of 1, 2 or 4 bits."""
    bits = len(values).bit_length() - 1
    codes = np.empty((8 // bits, 256), np.uint8)
    unpack_planes(np.arange(256, dtype=np.uint8)[None], bits, codes)
    table = np.array(values, np.float32)[np.ascontiguousarray(codes.T)]
    return table.view(np.dtype((np.void, table.itemsize * table.shape[1])))[:, 0]


def look_up(packed: NDArray[np.uint8], values: tuple[float, ...], out: NDArray[np.float32]) -> None:
    """packed (n, k), codes of 1, 2 or 4 bits, -> out (n, 8 k / bits), C-contiguous: values[code], a whole byte at a time.

    values: one float32 number for each code, 2, 4 or 16 of them.
    """
    words = _words(values)
    np.take(words, packed, out=out.view(words.dtype), mode="clip")


def pack(codes: Codes, bits: int) -> bytes:
    """Codes of any shape, taken in C order, each 0 <= code < 2^bits, as ceil(n bits / 8) bytes.

    TypeError for codes that are no integers, ValueError for one out of range (value and place) or a width outside 1..16.
    """
    bits = _width(bits)
    flat = np.asarray(codes).reshape(-1)
    if flat.dtype.kind not in "iu":
        raise TypeError(f"codes: expected integers, got {flat.dtype}")
    if flat.size and not (int(flat.min()) >= 0 and int(flat.max()) < 1 << bits):
        wrong = int(np.argmax((flat < 0) | (flat >= 1 << bits)))
        raise ValueError(f"codes: expected 0 <= code < 2^{bits}, got {flat[wrong]} at {wrong}")
    g, size = 8, bits  # eight codes fill `bits` bytes
    groups = -(-flat.size // g)
    out = np.empty((groups, size), np.uint8)
    for start in range(0, groups, _STEP):
        part = flat[start * g : (start + _STEP) * g]
        count = -(-part.size // g)
        if part.size < count * g:
            part = np.concatenate([part, np.zeros(count * g - part.size, flat.dtype)])
        planes = np.ascontiguousarray(part.reshape(count, g).T, dtype=_type(bits))
        packed = np.empty((size, count), np.uint8)
        pack_planes(planes, bits, packed)
        out[start : start + count] = packed.T
    return out.tobytes()[: packed_size(flat.size, bits)]


def unpack(data: bytes | bytearray | memoryview | Reader, count: int, bits: int) -> Codes:
    """`count` codes, (count,) uint8 (uint16 above 8 bits), from exactly ceil(count bits / 8) bytes.

    CorruptStream if there are more or fewer bytes or a bit behind the last code is set.
    """
    bits = _width(bits)
    reader = data if isinstance(data, Reader) else Reader(data)
    flat = reader.array(np.uint8, packed_size(count, bits), "packed codes")
    reader.end("packed codes")
    check_padding(flat, count, bits, reader)
    g, size = 8, bits
    groups = -(-count // g)
    out = np.empty(groups * g, _type(bits))
    for start in range(0, groups, _STEP):
        part = flat[start * size : (start + _STEP) * size]
        many = -(-part.size // size)
        if part.size < many * size:
            part = np.concatenate([part, np.zeros(many * size - part.size, np.uint8)])
        planes = np.empty((g, many), _type(bits))
        unpack_planes(np.ascontiguousarray(part.reshape(many, size).T), bits, planes)
        out[start * g : (start + many) * g] = planes.T.reshape(-1)
    return out[:count]


def check_padding(packed: NDArray[np.uint8], count: int, bits: int, reader: Reader) -> None:
    """CorruptStream if a bit behind code number `count` is set: one array of codes has one packing."""
    spare = 8 * packed.size - count * bits
    if spare and int(packed[-1]) >> (8 - spare):
        reader.fail(f"packed codes: the {spare} bits behind the last code are not 0", reader.offset - 1)


class Packer:
    """Packing that grows: the bytes of all codes appended so far are those of `pack` on all of them at once."""

    def __init__(self, bits: int) -> None:
        self.bits = _width(bits)
        self._whole: list[bytes | memoryview] = []
        self._tail = np.empty(0, _type(self.bits))

    def append(self, codes: Codes) -> None:
        """More codes, in C order, each below 2^bits."""
        flat = np.concatenate([self._tail, np.asarray(codes, _type(self.bits)).reshape(-1)])
        whole = flat.size - flat.size % group(self.bits)
        self._whole.append(pack(flat[:whole], self.bits))
        self._tail = flat[whole:].copy()

    def append_packed(self, packed: Sequence[int] | NDArray[np.uint8] | bytes | memoryview) -> None:
        """More codes that are packed already; only where the codes so far fill whole bytes. A memoryview is kept, not copied."""
        if self._tail.size:
            raise ValueError("packed: expected whole bytes so far, but a code is split")
        self._whole.append(packed if isinstance(packed, memoryview) else bytes(packed))

    def bytes(self) -> bytes:
        return b"".join(self._whole) + pack(self._tail, self.bits)
