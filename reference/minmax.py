"""Asymmetric min/max quantisation of groups of numbers, as KIVI and QJL's values have it, the same bits on every machine.

For the numbers x_1 ... x_g of one group, in float32, and codes of b bits, L = 2^b - 1 (fl: rounded to float32):

    z     = min_i x_i                                                   stored exactly: the "zero", in 2 or 4 bytes (`zero_dtype`)
    s     = the least stored scale >= (max_i x_i - z) / L               difference and quotient in float64; 0 for equal numbers
    c_i   = rint(fl(fl(x_i - z) fl(1/s)))                               0 ... L; all 0 for s = 0
    x^_i  = fl(z + c_i s)                                               then at most the largest number of the element type

A stored scale has 2 bytes: 256 E + F is (1 + F/256) 2^(E - 126), 1 <= E <= 254, and 0 is 0. Rounded up, so that no number lies
beyond the last code: |x_i - x^_i| <= s/2 (but for roundings of float32). For Gaussian numbers in groups of 32 the mean square is .3 %
above that of an exact scale at 2 bits, .4 % at 4, and 4 % at 8, where the maximum has no exact code. c s has at most 17 significant
bits, so that a fused multiply-add and separate operations give the same x^. The exponents hold every scale of float32 numbers down to
2^-125; smaller ones are rounded up to it.

Nothing overflows: where |z| >= 2^125 or s >= 2^(125-b), all of this is done on x/4, z/4, s/4, and x^ is 4 times the result.

Equal numbers come back exactly, zeros as +0. Groups are taken as the columns of *planes* (g, n): plane i holds number i of all groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import packing
from reference.stream import Part, Reader
from reference.vectors import Float32, Float64, Scratch, blocks

__all__ = ["Groups", "Stored", "decode", "encode", "read_scales", "read_zeros", "scale_codes", "scales", "zero_dtype"]

#: the exponent of a stored scale is biased by this
BIAS = 126
#: z or c s from here on is worked out in units of 4
WIDE = 125
LARGEST_CODE = (254 << 8) + 255
PADDING = 64
#: so few tokens are decoded with all heads at once
FEW_TOKENS = 256

Planes = NDArray[np.uint8]


def zero_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Element type of stored zeros: that of the numbers where it has 2 bytes, else float32. Exact for numbers that float32 holds."""
    return dtype.newbyteorder("=") if dtype.itemsize == 2 else np.dtype(np.float32)


def scale_codes(ranges: Float64, bits: int) -> NDArray[np.uint16]:
    """Codes of the least scales >= ranges / (2^bits - 1), ranges >= 0 float64, at most twice the largest float32 number."""
    f, k = np.frexp(ranges / ((1 << bits) - 1))  # f in [1/2, 1)
    # (1 + F/256) 2^{k-1}, F = ceil(512 f) - 256, carry included
    codes = ((k.astype(np.int64) - 1 + BIAS) << 8) + np.ceil(512 * f).astype(np.int64) - 256
    # only at 1 bit, for ranges above (2 - 2^-8) 2^128, is the largest scale too small: by less than 1/511 of itself
    return np.where(ranges > 0, np.clip(codes, 1 << 8, LARGEST_CODE), 0).astype(np.uint16)


def scales(codes: NDArray[np.uint16]) -> Float64:
    """The scales that these codes stand for, exact in float64."""
    return 2.0 * (codes.astype(np.uint32) << np.uint32(15)).view(np.float32).astype(np.float64)


def _wide(zeros: Float32, scale: Float64, bits: int) -> NDArray[np.bool_] | None:
    """(n,) which groups are worked out in units of 4; None if none is."""
    wide = (np.abs(zeros) >= np.float32(2.0**WIDE)) | (scale >= 2.0 ** (WIDE - bits))
    return wide if wide.any() else None


def encode(planes: Float32, bits: int, scratch: Scratch) -> tuple[Float32, NDArray[np.uint16], Planes]:
    """Groups (g, n) -> zeros (n,), codes of their scales (n,), codes (g, n). `planes` are overwritten; the codes lie in `scratch`.

    FloatingPointError if a number is not finite.
    """
    low, high = planes.min(axis=0), planes.max(axis=0)
    # NaN and inf come out of a minimum or a maximum
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise FloatingPointError
    low += np.float32(0)  # of zeros of both signs, either may have come out
    stored = scale_codes(high.astype(np.float64) - low, bits)
    scale = scales(stored)
    wide = _wide(low, scale, bits)
    shift = low
    if wide is not None:
        quarter = np.where(wide, np.float32(0.25), np.float32(1))
        planes *= quarter
        shift, scale = low * quarter, scale * quarter
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale.astype(np.float32), np.float32(0))
    np.subtract(planes, shift, out=planes)
    np.multiply(planes, inverse, out=planes)
    codes = scratch("group codes", planes.shape, np.uint8)
    np.copyto(codes, np.rint(planes, out=planes), casting="unsafe")
    if wide is not None:  # where the scale was too small
        np.minimum(codes, (1 << bits) - 1, out=codes)
    return low, stored, codes


def decode(codes: Planes, zeros: Float32, stored: NDArray[np.uint16], bits: int, limit: float, out: Float32) -> Float32:
    """Codes (g, n), zeros (n,), codes of scales (n,) -> out (g, n), numbers of magnitude <= limit."""
    np.copyto(out, codes)
    plain = _plain_scales(zeros, stored, bits, limit)
    if plain is not None:
        np.multiply(out, plain, out=out)
        return np.add(out, zeros, out=out)
    scale = scales(stored)
    wide = _wide(zeros, scale, bits)
    shift = zeros
    if wide is not None:
        quarter = np.where(wide, np.float32(0.25), np.float32(1))
        shift, scale = zeros * quarter, scale * quarter
    with np.errstate(over="ignore"):
        np.multiply(out, scale.astype(np.float32), out=out)
        np.add(out, shift, out=out)
        if wide is not None:
            out *= np.where(wide, np.float32(4), np.float32(1))
    # z <= x^ <= z + L s
    return np.clip(out, -limit, limit, out=out)


def _plain_scales(zeros: Float32, stored: NDArray[np.uint16], bits: int, limit: float) -> Float32 | None:
    """The scales in float32 where no group is worked out in units of 4 and no number is beyond limit, whatever its code; else None."""
    most = stored.max(initial=0)
    if most >= (WIDE - bits + BIAS) << 8:
        return None
    magnitude = max(float(zeros.max(initial=0)), -float(zeros.min(initial=0)))
    if magnitude >= 2.0**WIDE or magnitude + ((1 << bits) - 1) * float(scales(most)) > limit:
        return None
    out = (stored.astype(np.uint32) << np.uint32(15)).view(np.float32)
    out *= np.float32(2)
    return out


def expand(rows: NDArray[np.uint8], bits: int, out: Float32, scratch: Scratch) -> None:
    """Rows of codes of 1, 2, 4 or 8 bits, packed densely in whole bytes -> out (n, d), C-contiguous: each code as a number."""
    if bits == 8:
        np.copyto(out, rows)
    elif bits == 4 and rows.shape[1] % 2 == 0:  # two bytes at a time, as integers first: half the look-ups
        codes = scratch("row codes", out.shape, np.uint8)
        np.take(_nibbles(), rows.view(np.uint16), out=codes.view(np.uint32), mode="clip")
        np.copyto(out, codes)
    else:
        packing.look_up(rows, tuple(range(1 << bits)), out)


@functools.cache
def _nibbles() -> NDArray[np.uint32]:
    """For each two bytes their four codes of 4 bits, one after the other in memory, as one item."""
    each = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return np.stack([each & 15, each >> 4], axis=1).reshape(-1).view(np.uint32)


def read_zeros(reader: Reader, count: int, dtype: np.dtype[Any], what: str) -> Float32:
    """`count` zeros of element type `zero_dtype(dtype)`, as float32. CorruptStream at NaN or inf."""
    start, kind = reader.offset, zero_dtype(dtype)
    words = reader.array(f"<u{kind.itemsize}", count, what)
    native = words.astype(words.dtype.newbyteorder("="), copy=False).view(kind)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        zeros = native.astype(np.float32)
    finite = np.isfinite(zeros)
    if not finite.all():
        at = int(np.argmin(finite))
        reader.fail(f"{what}: expected finite numbers, got {zeros[at]}", start + at * kind.itemsize)
    return zeros + np.float32(0)


def read_scales(reader: Reader, count: int, what: str) -> NDArray[np.uint16]:
    """`count` codes of scales. CorruptStream at one that stands for none."""
    start = reader.offset
    stored = reader.array("<u2", count, what).astype(np.uint16)
    wrong = (stored > LARGEST_CODE) | ((stored != 0) & (stored < 1 << 8))
    if wrong.any():
        at = int(np.argmax(wrong))
        reader.fail(f"{what}: {stored[at]:#06x} is no scale", start + 2 * at)
    return stored


@dataclass(frozen=True)
class Piece:
    """Zeros and scales of some rows as bytes, and their codes: packed where they fill whole bytes."""

    zeros: bytes
    scales: bytes
    codes: Any


class Groups:
    """How rows of `dim` numbers are cut into groups of `group`, the last one shorter where need be, and what a block of them costs.

    In streams: row by row its zeros, its scales, its codes; codes packed densely.
    """

    def __init__(self, dim: int, group: int, bits: int, dtype: np.dtype[Any]) -> None:
        whole = dim // group * group
        self.dim, self.bits, self.dtype = dim, bits, dtype
        #: of groups of one size: the first number, the end, the size
        self._spans = [(a, b, size) for a, b, size in ((0, whole, group), (whole, dim, dim - whole)) if a < b]
        self.each = -(-dim // group)
        self.bytewise = all(size * bits % 8 == 0 for _, _, size in self._spans)
        self._scratch = Scratch()

    def _planes(self, view: NDArray[Any], span: tuple[int, int, int]) -> NDArray[Any]:
        """The groups of one span of view (..., dim), as (size, ..., groups); no copy."""
        start, end, size = span
        part = view[..., start:end]
        return np.moveaxis(part.reshape(*part.shape[:-1], (end - start) // size, size), -1, 0)

    def _padded(self, name: str, rows: int, columns: int, dtype: Any) -> NDArray[Any]:
        """A scratch array whose rows are not a power of two apart: columns of it would share few lines of the processor's cache."""
        padding = PADDING // np.dtype(dtype).itemsize
        return self._scratch(name, (rows, columns + padding), dtype)[:, :columns]

    def _bytes(self, span: tuple[int, int, int]) -> tuple[int, int, int]:
        """A span among the codes of a row: in bytes where they are packed."""
        start, end, size = (n * self.bits // 8 if self.bytewise else n for n in span)
        return start, end, size

    def encode(self, view: NDArray[Any]) -> Piece:
        """Rows (..., dim) of any strides and floating type. FloatingPointError: one is no finite float32 number."""
        count = int(np.prod(view.shape[:-1]))
        zeros = np.empty((count, self.each), np.float32)
        stored = np.empty((count, self.each), "<u2")
        width = self.dim * self.bits // 8
        rows = np.empty((count, width if self.bytewise else self.dim), np.uint8)
        at = 0
        for start, end, size in self._spans:
            source = self._planes(view, (start, end, size))
            planes = self._scratch("planes", source.shape, np.float32)
            with np.errstate(over="ignore"):  # float64 beyond float32: found as inf
                np.copyto(planes, source, casting="same_kind")
            low, scale, codes = encode(planes.reshape(size, -1), self.bits, self._scratch)
            groups = (end - start) // size
            zeros[:, at : at + groups], stored[:, at : at + groups] = low.reshape(-1, groups), scale.reshape(-1, groups)
            at += groups
            if self.bytewise:
                packed = self._scratch("packed", (size * self.bits // 8, codes.shape[1]), np.uint8)
                packing.pack_planes(codes, self.bits, packed)
                codes = packed
            own = self._bytes((start, end, size))
            own_rows = rows[:, own[0] : own[1]].reshape(count, groups, own[2])
            own_rows[...] = np.moveaxis(codes.reshape(own[2], count, groups), 0, -1)
        kind = zero_dtype(self.dtype)
        return Piece(zeros.astype(kind).astype(kind.newbyteorder("<")).tobytes(), stored.tobytes(), rows)

    def decode(
        self, zeros: Float32, stored: NDArray[np.uint16], rows: NDArray[np.uint8], limit: float, out: NDArray[Any]
    ) -> None:
        """zeros, stored (n, each) and rows of codes, as `Stored.read` gives them -> out (..., dim), n rows of any strides."""
        at, count = 0, len(rows)
        if self._rowwise(out) and self._decode_rows(zeros, stored, rows, limit, out.reshape(count, self.dim)):
            return
        for start, end, size in self._spans:
            groups = (end - start) // size
            codes = self._padded("group codes", size, count * groups, np.uint8)
            low, high, width = self._bytes((start, end, size))
            source = np.moveaxis(rows[:, low:high].reshape(count, groups, width), -1, 0)
            if self.bytewise:
                packed = self._padded("packed", width, count * groups, np.uint8)
                np.copyto(packed.reshape(source.shape), source)
                packing.unpack_planes(packed, self.bits, codes)
            else:
                np.copyto(codes.reshape(source.shape), source)
            planes = self._padded("planes", size, count * groups, np.float32)
            own = slice(at, at + groups)
            decode(codes, zeros[:, own].reshape(-1), stored[:, own].reshape(-1), self.bits, limit, planes)
            target = self._planes(out, (start, end, size))
            target[...] = planes.reshape(target.shape)
            at += groups

    def _rowwise(self, out: NDArray[Any]) -> bool:
        """Whether rows can be decoded where they are to stand, with no planes."""
        return self.bits in (1, 2, 4, 8) and self.bytewise and out.dtype == np.float32 and out.flags.c_contiguous

    def _decode_rows(
        self, zeros: Float32, stored: NDArray[np.uint16], rows: NDArray[np.uint8], limit: float, out: Float32
    ) -> bool:
        """`decode` in place, in the order of the rows; False, and nothing done, where a group needs more care than that."""
        plain = _plain_scales(zeros, stored, self.bits, limit)
        if plain is None:
            return False
        expand(rows, self.bits, out, self._scratch)
        at = 0
        for start, end, size in self._spans:
            groups = (end - start) // size
            own, numbers = slice(at, at + groups), out[:, start:end].reshape(len(out), groups, size)
            np.multiply(numbers, plain[:, own, None], out=numbers)
            np.add(numbers, zeros[:, own, None], out=numbers)
            at += groups
        return True

    def decode_tokens(
        self, zeros: Float32, stored: NDArray[np.uint16], rows: NDArray[np.uint8], limit: float, out: NDArray[Any]
    ) -> None:
        """`decode` of token-major rows, tokens x heads of them -> out (heads, tokens, dim)."""
        heads, tokens, _ = out.shape
        if tokens < FEW_TOKENS or not self._rowwise(out[0]):
            for block in blocks(tokens, heads):
                own = slice(block.start * heads, block.stop * heads)
                self.decode(zeros[own], stored[own], rows[own], limit, out[:, block].transpose(1, 0, 2))
            return
        for head, target in enumerate(out):
            # token-major: those of a head are every heads-th
            own_zeros, own_stored, own_rows = (
                zeros[head::heads].copy(),
                stored[head::heads].copy(),
                rows[head::heads].copy(),
            )
            for block in blocks(tokens, 1):
                self.decode(own_zeros[block], own_stored[block], own_rows[block], limit, target[block])


class Stored:
    """Zeros, scales and codes of all rows so far."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._zeros: list[bytes] = []
        self._scales: list[bytes] = []
        self._codes = packing.Packer(groups.bits)

    def keep(self, piece: Piece) -> None:
        self._zeros.append(piece.zeros)
        self._scales.append(piece.scales)
        if self.groups.bytewise:
            self._codes.append_packed(piece.codes.tobytes())
        else:
            self._codes.append(piece.codes)

    def parts(self) -> list[Part]:
        return [b"".join(self._zeros), b"".join(self._scales), self._codes.bytes()]

    @staticmethod
    def check(groups: Groups, count: int, parts: list[Reader], side: str) -> None:
        """CorruptStream unless the three parts have the sizes of `count` rows."""
        number = count * groups.each
        sizes = (
            number * zero_dtype(groups.dtype).itemsize,
            2 * number,
            packing.packed_size(count * groups.dim, groups.bits),
        )
        for reader, size, what in zip(parts, sizes, ("zeros", "scales", "codes"), strict=True):
            if reader.remaining != size:
                reader.fail(f"{side} {what}: expected {size} bytes, got {reader.remaining}")

    @staticmethod
    def read(
        groups: Groups, count: int, parts: list[Reader], side: str
    ) -> tuple[Float32, NDArray[np.uint16], NDArray[np.uint8]]:
        """zeros (count, each), codes of scales (count, each), rows of codes; of checked parts. CorruptStream for what no encoder writes."""
        zeros = read_zeros(parts[0], count * groups.each, groups.dtype, f"{side} zeros")
        stored = read_scales(parts[1], count * groups.each, f"{side} scales")
        if groups.bytewise:
            rows = parts[2].array(np.uint8, parts[2].remaining, f"{side} codes")
        else:
            rows = packing.unpack(parts[2], count * groups.dim, groups.bits)
        return (
            zeros.reshape(count, groups.each),
            stored.reshape(count, groups.each),
            rows.reshape(count, groups._bytes((0, groups.dim, 0))[1]),
        )
