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
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import packing
from reference.stream import Part, Reader
from reference.vectors import Float32, Float64, Scratch

__all__ = ["Groups", "Stored", "decode", "read_scales", "read_zeros", "scale_codes", "scales", "zero_dtype"]

#: the exponent of a stored scale is biased by this
BIAS = 126
#: z or c s from here on is worked out in units of 4
WIDE = 125
LARGEST_CODE = (254 << 8) + 255
#: numbers worked out at once, so that they stay in the cache
NUMBERS = 3 << 16
#: planes that are a power of two apart would share few lines of the processor's cache
PADDING = 64

#: what so many bytes are moved as
ITEMS = {1: np.uint8, 2: np.uint16, 4: np.float32, 8: np.float64, 16: np.complex128}

Planes = NDArray[np.uint8]


def zero_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Element type of stored zeros: that of the numbers where it has 2 bytes, else float32. Exact for numbers that float32 holds."""
    return dtype.newbyteorder("=") if dtype.itemsize == 2 else np.dtype(np.float32)


def scale_codes(ranges: Float64, bits: int) -> NDArray[np.uint16]:
    """Codes of the least scales >= ranges / (2^bits - 1), ranges >= 0 float64, at most twice the largest float32 number."""
    return _least_scales(ranges, bits)[0]


def _least_scales(ranges: Float64, bits: int) -> tuple[NDArray[np.uint16], Float64]:
    """`scale_codes`, and the scales."""
    # float64's exponent and the first 8 bits of its fraction; what is behind them is rounded up, carry included
    words = (ranges / ((1 << bits) - 1)).view(np.int64)
    words += (1 << 44) - 1
    words &= -1 << 44
    codes = words >> 44
    codes -= (1023 - BIAS) << 8
    if codes.min(initial=1 << 8) < 1 << 8 or codes.max(initial=0) > LARGEST_CODE:
        # only at 1 bit, for ranges above (2 - 2^-8) 2^128, is the largest scale too small: by less than 1/511 of itself
        stored = np.where(ranges > 0, np.clip(codes, 1 << 8, LARGEST_CODE), 0).astype(np.uint16)
        return stored, scales(stored)
    return codes.astype(np.uint16), words.view(np.float64)


def scales(codes: NDArray[np.uint16]) -> Float64:
    """The scales that these codes stand for, exact in float64."""
    return 2.0 * (codes.astype(np.uint32) << np.uint32(15)).view(np.float32).astype(np.float64)


def _plain_scales(zeros: Float32, stored: NDArray[np.uint16], bits: int, limit: float) -> Float32 | None:
    """The scales in float32 where no group is worked out in units of 4 and no number is beyond limit, whatever its code; else None."""
    most = int(stored.max(initial=0))
    if most >= (WIDE - bits + BIAS) << 8:
        return None
    magnitude = max(float(zeros.max(initial=0)), -float(zeros.min(initial=0)))
    largest = math.ldexp(256 + (most & 255), (most >> 8) - BIAS - 8)
    if magnitude >= 2.0**WIDE or magnitude + ((1 << bits) - 1) * largest > limit:
        return None
    return _float32(stored)


def _float32(stored: NDArray[np.uint16]) -> Float32:
    """Scales below 2^128."""
    out = stored.astype(np.uint32)
    out <<= np.uint32(15)
    return np.multiply(out.view(np.float32), np.float32(2), out=out.view(np.float32))


def _wide_units(zeros: Float32, scale: Float64, bits: int) -> Float32:
    """For each group 1/4 where it is worked out in units of 4, else 1."""
    wide = (np.abs(zeros) >= np.float32(2.0**WIDE)) | (scale >= 2.0 ** (WIDE - bits))
    return np.where(wide, np.float32(0.25), np.float32(1))


@dataclass(frozen=True)
class _Steps:
    """What the numbers of groups (..., n) are coded with: codes of their scales, z, 1/s; units of z and 1/s if not all of them are 1."""

    stored: NDArray[np.uint16]
    zero: Float32
    inverse: Float32
    units: Float32 | None

    @staticmethod
    def of(low: Float32, high: Float32, bits: int) -> _Steps:
        """Groups with these minima and maxima; a minimum -0 becomes 0. FloatingPointError if one is NaN or inf, as that of a group with one is."""
        least, most = float(low.min(initial=0)), float(high.max(initial=0))
        if not (math.isfinite(least) and math.isfinite(most)):
            raise FloatingPointError
        low += np.float32(0)  # of zeros of both signs, either may have come out
        stored, scale = _least_scales(np.subtract(high, low, dtype=np.float64), bits)
        zero, units = low, None
        if max(-least, most) >= 2.0 ** (WIDE - 9):  # else no scale is 2^(125 - bits)
            units = _wide_units(low, scale, bits)
            zero, scale = low * units, scale * units
        with np.errstate(divide="ignore"):
            # the quotient of two float32 numbers, rounded to float32, is the same with float64 in between
            inverse = (1 / scale).astype(np.float32)
        inverse[stored == 0] = 0
        return _Steps(stored, zero, inverse, units)

    def each(self, times: int) -> _Steps:
        """Groups (n,), every one that many times, one after the other."""
        units = None if self.units is None else _each(self.units, times)
        return _Steps(self.stored, _each(self.zero, times), _each(self.inverse, times), units)

    def quantise(self, x: Float32, bits: int, numbers: Float32, out: Planes) -> None:
        """Groups x (..., g, n) -> codes out (..., g, n); worked out in `numbers`, which may be x."""
        if self.units is not None:
            x = np.multiply(x, self.units[..., None, :], out=numbers)
        np.subtract(x, self.zero[..., None, :], out=numbers)
        np.multiply(numbers, self.inverse[..., None, :], out=numbers)
        np.add(numbers, np.float32(1 << 23), out=numbers)  # rounded to integers, the lowest bits of what holds them
        np.copyto(out, numbers.view(np.uint32), casting="unsafe")
        if self.units is not None:  # where the scale was too small
            np.minimum(out, (1 << bits) - 1, out=out)


def _each(array: Float32, times: int) -> Float32:
    """np.repeat, which is slower."""
    out = np.empty((array.size, times), np.float32)
    for column in out.T:
        column[...] = array
    return out.reshape(-1)


def decode(codes: Planes, zeros: Float32, stored: NDArray[np.uint16], bits: int, limit: float, out: Float32) -> Float32:
    """Codes (..., g, n), zeros (..., n), codes of scales (..., n) -> out (..., g, n), numbers of magnitude <= limit."""
    np.copyto(out, codes)
    scale = _plain_scales(zeros, stored, bits, limit)
    if scale is not None:
        np.multiply(out, scale[..., None, :], out=out)
        return np.add(out, zeros[..., None, :], out=out)
    wide_scale = scales(stored)
    units = _wide_units(zeros, wide_scale, bits)
    with np.errstate(over="ignore"):
        np.multiply(out, (wide_scale * units).astype(np.float32)[..., None, :], out=out)
        np.add(out, (zeros * units)[..., None, :], out=out)
        np.divide(out, units[..., None, :], out=out)
    # z <= x^ <= z + L s
    return np.clip(out, -limit, limit, out=out)


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


class _Axes:
    """Rows (..., k) of an array of any strides, axes in the order of its memory: (..., k, n), n rows lying side by side, else n = 1."""

    def __init__(self, array: NDArray[Any]) -> None:
        *strides, last = map(abs, array.strides)
        self._order = sorted(range(array.ndim - 1), key=lambda axis: (array.shape[axis] > 1, -strides[axis]))
        self.side_by_side = bool(strides) and array.shape[-1] > 1 and strides[self._order[-1]] < last

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """An array with rows of any length in these axes; no copy."""
        turned = array.transpose(*self._order, -1)
        return turned.swapaxes(-1, -2) if self.side_by_side else turned[..., None]


@dataclass(frozen=True)
class _Span:
    """Groups of one size: their numbers in a row, their places among the row's groups."""

    numbers: slice
    groups: slice
    size: int

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Rows (..., dim, n) of numbers or codes -> groups (..., groups, size, n); no copy."""
        own = array[..., self.numbers, :]
        *outer, numbers, beside = own.shape
        return own.reshape(*outer, numbers // self.size, self.size, beside)

    def bytes_of(self, array: Planes, bits: int) -> Planes:
        """Rows (..., bytes, n) of codes packed in whole bytes -> (..., groups, bytes of a group, n); no copy."""
        own, size = array[..., self.numbers.start * bits // 8 : self.numbers.stop * bits // 8, :], self.size * bits // 8
        *outer, width, beside = own.shape
        return own.reshape(*outer, width // size, size, beside)


class Groups:
    """How rows of `dim` numbers are cut into groups of `group`, the last one shorter where need be, and what a block of them costs.

    In streams: row by row its zeros, its scales, its codes; codes packed densely.

    Numbers are worked out where they lie, in the order of their memory, which is not that of the stream: keys have their groups side
    by side, one channel each; those of values lie in one piece each, and for their minima are laid side by side too.
    """

    def __init__(self, dim: int, group: int, bits: int, dtype: np.dtype[Any]) -> None:
        self.dim, self.bits, self.dtype = dim, bits, dtype
        count, rest = divmod(dim, group)
        self.each = count + (rest > 0)
        self._spans = [_Span(slice(0, dim - rest), slice(0, count), group)] if count else []
        if rest:
            self._spans.append(_Span(slice(dim - rest, dim), slice(count, count + 1), rest))
        self.bytewise = all(span.size * bits % 8 == 0 for span in self._spans)
        #: bytes of the codes of a row, or its codes where they fill no whole bytes
        self.width = dim * bits // 8 if self.bytewise else dim
        #: so do the codes of as many numbers as are laid side by side in one piece, and one item holds those bytes
        self._laid_bytewise = all(math.gcd(span.size, 4) * bits in (8, 16, 32) for span in self._spans)
        self._scratch = Scratch()

    def _blocks(self, shape: tuple[int, ...]) -> Iterator[slice]:
        """Slices of the first axis of rows (..., dim)."""
        step = max(1, NUMBERS // max(1, math.prod(shape[1:])))
        return (slice(start, start + step) for start in range(0, shape[0], step))

    def _codes(self, axes: _Axes, shape: tuple[int, ...], width: int, name: str) -> tuple[Planes, Planes]:
        """A scratch array for rows of `width` bytes, numbers (..., dim, n), as codes are packed: (width, count) or flat; and (..., width, n)."""
        *outer, _, beside = shape
        if not axes.side_by_side:
            rows = self._scratch(name, (*outer, width, 1), np.uint8)
            return rows.reshape(-1), rows
        count = math.prod(outer) * beside
        flat = self._scratch(name, (width, count + PADDING), np.uint8)[:, :count]
        planes = flat.reshape(width, *outer, beside)
        return flat, planes.transpose(*range(1, planes.ndim - 1), 0, -1)

    def encode(self, view: NDArray[Any]) -> Piece:
        """Rows (..., dim) of any strides and floating type. FloatingPointError: one is no finite float32 number."""
        axes, rows = _Axes(view), view.shape[:-1]
        zeros = np.empty((*rows, self.each), zero_dtype(self.dtype).newbyteorder("<"))
        stored = np.empty((*rows, self.each), "<u2")
        codes = np.empty((*rows, self.width), np.uint8)
        encode = self._encode_side_by_side if axes.side_by_side else self._encode_pieces
        for block in self._blocks(view.shape):
            encode(axes, *(axes.of(array[block]) for array in (view, zeros, stored, codes)))
        return Piece(zeros.tobytes(), stored.tobytes(), codes)

    def _taken(self, x: NDArray[Any]) -> Float32:
        """A copy in float32."""
        taken = self._scratch("taken", x.shape, np.float32)
        with np.errstate(over="ignore"):  # float64 beyond float32: found as inf
            np.copyto(taken, x, casting="same_kind")
        return taken

    def _encode_side_by_side(
        self, axes: _Axes, x: NDArray[Any], zeros: NDArray[Any], stored: NDArray[np.uint16], rows: Planes
    ) -> None:
        """x (..., dim, n) -> zeros, stored (..., each, n), rows (..., width, n)."""
        if x.dtype != np.float32:
            x = self._taken(x)
        flat, codes = self._codes(axes, x.shape, self.dim, "codes")
        for span in self._spans:
            own = span.of(x)
            # as long pieces of memory at once as can be: g / 8 of them, then 8
            *outer, size, beside = own.shape
            pieces = own.reshape(*outer, size // math.gcd(size, 8), math.gcd(size, 8), beside)
            low, high = (op.reduce(op.reduce(pieces, axis=-3), axis=-2) for op in (np.minimum, np.maximum))
            steps = _Steps.of(low, high, self.bits)
            zeros[..., span.groups, :], stored[..., span.groups, :] = low, steps.stored
            steps.quantise(own, self.bits, self._scratch("numbers", own.shape, np.float32), span.of(codes))
        if self.bytewise:
            packed, codes = self._codes(axes, x.shape, self.width, "packed")
            packing.pack_planes(flat, self.bits, packed)
        rows[...] = codes

    def _encode_pieces(
        self, axes: _Axes, x: NDArray[Any], zeros: NDArray[Any], stored: NDArray[np.uint16], rows: Planes
    ) -> None:
        """The same with n = 1."""
        x = self._taken(x)
        packed, codes = self._laid_bytewise, rows
        if not packed:
            flat, codes = self._codes(axes, x.shape, self.dim, "codes")
        for span in self._spans:
            target = span.bytes_of(codes, self.bits) if packed else span.of(codes)
            low, own_stored = self._encode_laid(span.of(x)[..., 0], target[..., 0])
            zeros[..., span.groups, 0], stored[..., span.groups, 0] = low, own_stored
        if packed:
            return
        if self.bytewise:
            bytes_, codes = self._codes(axes, x.shape, self.width, "packed")
            packing.pack_rows(flat, self.bits, bytes_)
        rows[...] = codes

    def _encode_laid(self, x: Float32, out: Planes) -> tuple[Float32, NDArray[np.uint16]]:
        """Groups x (..., g), g numbers in one piece -> zeros and codes of scales (...,); codes out (..., g), or packed."""
        outer = x.shape[:-1]
        pieces, unit = _laid(x, self._scratch, "laid")
        low, high = (_extremes(op, pieces, unit) for op in (np.minimum, np.maximum))
        steps = _Steps.of(low, high, self.bits)
        codes = self._scratch("laid codes", pieces.shape, np.uint8)
        steps.each(unit).quantise(pieces, self.bits, pieces, codes)
        if self._laid_bytewise:
            unit = unit * self.bits // 8
            packed = self._scratch("laid packed", (codes.size * self.bits // 8,), np.uint8)
            packing.pack_rows(codes.reshape(-1), self.bits, packed)
            codes = packed
        moved = _items(codes.reshape(len(pieces), *outer, unit), unit)[..., 0]
        np.copyto(_items(out, unit), moved.transpose(*range(1, moved.ndim), 0))
        return low.reshape(outer), steps.stored.reshape(outer)

    def decode(
        self, zeros: Float32, stored: NDArray[np.uint16], rows: NDArray[np.uint8], limit: float, out: NDArray[Any]
    ) -> None:
        """zeros, stored (n, each) and rows of codes, as `Stored.read` gives them -> out (..., dim), n rows of any strides."""
        lead, axes = out.shape[:-1], _Axes(out)
        zeros, stored = zeros.reshape(*lead, self.each), stored.reshape(*lead, self.each)
        rows = rows.reshape(*lead, self.width)
        plain = _plain_scales(zeros, stored, self.bits, limit)
        for block in self._blocks(out.shape):
            target, low = axes.of(out[block]), axes.of(zeros[block])
            x = target if out.dtype == np.float32 else self._scratch("numbers", target.shape, np.float32)
            codes = self._unpacked(axes, axes.of(rows[block]), target.shape)
            if plain is None:
                scale = axes.of(stored[block])
                for span in self._spans:
                    zero, step = low[..., span.groups, :], scale[..., span.groups, :]
                    decode(span.of(codes), zero, step, self.bits, limit, span.of(x))
            else:
                np.copyto(x, codes)
                scale = axes.of(plain[block])
                for span in self._spans:
                    numbers = span.of(x)
                    np.multiply(numbers, scale[..., span.groups, None, :], out=numbers)
                    np.add(numbers, low[..., span.groups, None, :], out=numbers)
            if x is not target:
                target[...] = x

    def _unpacked(self, axes: _Axes, rows: Planes, shape: tuple[int, ...]) -> Planes:
        """Rows (..., width, n) -> codes of the shape (..., dim, n)."""
        if not self.bytewise:
            return rows
        packed, bytes_ = self._codes(axes, shape, self.width, "packed")
        np.copyto(bytes_, rows)
        flat, codes = self._codes(axes, shape, self.dim, "codes")
        (packing.unpack_planes if axes.side_by_side else packing.unpack_rows)(packed, self.bits, flat)
        return codes

    def decode_tokens(
        self, zeros: Float32, stored: NDArray[np.uint16], rows: NDArray[np.uint8], limit: float, out: NDArray[Any]
    ) -> None:
        """`decode` of token-major rows, tokens x heads of them -> out (heads, tokens, dim)."""
        self.decode(zeros, stored, rows, limit, out.transpose(1, 0, 2))


def _items(array: NDArray[Any], count: int) -> NDArray[Any]:
    """(..., k count), its last axis in one piece -> (..., k), `count` elements at a time as one; no copy."""
    return array.view(ITEMS[count * array.itemsize])


def _laid(x: Float32, scratch: Scratch, name: str) -> tuple[Float32, int]:
    """Rows x (..., d), each in one piece, laid side by side: (d / u, rows u) in `scratch`, u <= 4 numbers of a row beside each other; and u.

    NumPy takes minima and maxima over the first axis several times as fast as over the last one, and moves 4 numbers as fast as one.
    """
    *outer, size = x.shape
    unit = math.gcd(size, 4)
    pieces = scratch(name, (size // unit, *outer, unit), np.float32)
    np.copyto(_items(pieces, unit)[..., 0], _items(x, unit).transpose(-1, *range(len(outer))))
    return pieces.reshape(size // unit, -1), unit


def _extremes(operation: np.ufunc, pieces: Float32, unit: int) -> Float32:
    """Minima or maxima (rows,) of rows that are `_laid`."""
    return functools.reduce(operation, operation.reduce(pieces, axis=0).reshape(-1, unit).T)  # type: ignore[no-any-return]


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
            self._codes.append_packed(piece.codes.reshape(-1).data)
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
            rows.reshape(count, groups.width),
        )
