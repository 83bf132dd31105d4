"""So many bits for each coefficient: codebooks, a scale for each token, dense packing.

    y_c  =  g  s_c  P_b[code]        b = bits_c;  b = 0: y_c = 0.  s_c is inside the basis;  P_b: 2^b ascending numbers, kept as integers
    P        "listed": codebooks in units of 2^-12, part of the state.  "midrise": (2 code + 1) / 2^b - 1;  "midtread": 2 code / 2^b - 1, both
             in units of 2^-16
    g        scale of a token in a unit.  "none": 1.  "log": 4 bits, 1 or 1.5 times 2^{-4 ... 3}, the nearest to the root mean square of
             y_c / s_c.  "max": 16 bits, a norm of reference.vectors (8 bits' mantissa), at least max_c |y_c| / s_c over coded coefficients

    parts    "side"    scales of tokens, token by token, unit by unit
             "codes"   token by token, unit by unit, coefficient by coefficient, bits_c bits each, LSB first, packed densely

Every token takes the same number of bits, so each is read on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from reference import packing
from reference.stream import Part, Reader, varint
from reference.transform_coding.basis import Basis
from reference.vectors import norm_codes, norms, read_norms

__all__ = ["GAINS", "LEVELS", "UNIT", "FixedCoder", "FixedUnit", "Gain", "Levels", "gain_bits", "unit_of"]

Float64 = NDArray[np.float64]
Integers = NDArray[np.int64]
Gain = Literal["none", "log", "max"]
GAINS: tuple[Gain, ...] = ("none", "log", "max")
Levels = Literal["listed", "midrise", "midtread"]
LEVELS: tuple[Levels, ...] = ("listed", "midrise", "midtread")

#: an s_c in the integers that a basis takes, of listed levels and of uniform ones
UNIT, UNIFORM_UNIT = 1 << 12, 1 << 16
#: no scale of a token is larger (or, but for 0, smaller): beyond, coefficients are clipped
MOST_GAIN, LEAST_GAIN = 2.0**133, 2.0**-250
MOST_BITS = 16
#: tokens whose bits are spread out at once
BLOCK = 1 << 12
LOG_GAINS = np.sort(np.concatenate([2.0 ** np.arange(-4, 4), 1.5 * 2.0 ** np.arange(-4, 4)]))


def gain_bits(gain: Gain) -> int:
    """Bits of one token's scale in one unit."""
    return {"none": 0, "log": 4, "max": 16}[gain]


def unit_of(levels: Levels) -> int:
    """An s_c in the integers that a basis takes."""
    return UNIT if levels == "listed" else UNIFORM_UNIT


@lru_cache(maxsize=64)
def uniform_points(levels: Levels, bits: int) -> Integers:
    """(2^bits,) ascending, in units of 2^-16."""
    points = (2 * np.arange(1 << bits) + (levels == "midrise") - (1 << bits)) << (16 - bits)
    points.flags.writeable = False
    return points


@dataclass(frozen=True, eq=False)
class FixedUnit:
    """bits (size,): of each coefficient of `basis`."""

    basis: Basis
    bits: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class FixedCoder:
    """The coder of one layer's stacked vectors. codebooks[b]: (2^b,) ascending int32 in units of 2^-12, for the bits that occur, if listed."""

    units: tuple[FixedUnit, ...]
    gain: Gain
    codebooks: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    levels: Levels = "listed"

    def points(self, bits: int) -> Integers:
        """P_b in units of 1 / unit_of(levels)."""
        return self.codebooks[bits].astype(np.int64) if self.levels == "listed" else uniform_points(self.levels, bits)

    @cached_property
    def token_bits(self) -> int:
        """Of the codes of one token."""
        return sum(int(unit.bits.sum()) for unit in self.units)

    def gains(self, ratio: Float64) -> tuple[Integers, Float64]:
        """Stored form and value of the scales of tokens for y_c / s_c (n, size) of coded coefficients."""
        n = len(ratio)
        if self.gain == "log":
            with np.errstate(over="ignore"):
                rms = np.sqrt((ratio**2).mean(axis=1)) if ratio.shape[1] else np.ones(n)
            # nearest on the logarithmic axis
            codes = np.searchsorted(np.sqrt(LOG_GAINS[1:] * LOG_GAINS[:-1]), rms)
            return codes, LOG_GAINS[codes]
        if self.gain == "max":
            most = np.minimum(np.abs(ratio).max(axis=1, initial=0.0), MOST_GAIN)
            most = np.where(most >= LEAST_GAIN, most, 0.0)
            f, e = np.frexp(np.where(most > 0, most, 1.0))
            up = np.where(most > 0, np.ldexp(np.ceil(f * 256) / 256, e), 0.0)  # rounded up: no coefficient overloads
            f, e = np.frexp(up)
            codes = norm_codes(f * f, e.astype(np.int64), 7)
            return codes, norms(codes, 7)
        return np.zeros(n, np.int64), np.ones(n)

    def encode(self, x: Float64) -> list[Part]:
        """Stacked vectors (n, entries) -> side, codes."""
        sides, columns, widths, one = [], [], [], unit_of(self.levels)
        for unit in self.units:
            live = unit.bits > 0
            ratio = unit.basis.analyse(x)[:, live] / one
            stored, gain = self.gains(ratio)
            sides.append(stored)
            scaled = ratio / np.where(gain > 0, gain, 1.0)[:, None] * one
            for c, b in enumerate(unit.bits[live].tolist()):
                points = self.points(b).astype(np.float64)
                columns.append(np.searchsorted(0.5 * (points[1:] + points[:-1]), scaled[:, c], side="right"))
                widths.append(b)
        side = np.stack(sides, axis=1) if sides else np.zeros((len(x), 0), np.int64)
        return [self._write_side(side), _pack(columns, widths, len(x))]

    def _write_side(self, side: Integers) -> bytes:
        if self.gain == "none":
            return b""
        return packing.pack(side.ravel(), 4) if self.gain == "log" else side.astype("<u2").tobytes()

    def decode(self, parts: list[Reader], tokens: int, out: Float64) -> None:
        """Into out (tokens, entries), from side and codes. CorruptStream for parts that do not fit together."""
        side, codes, *others = parts
        for other in others:
            other.end("part of an entropy coder")
        count = tokens * len(self.units)
        size = 0 if self.gain == "none" else packing.packed_size(count, 4) if self.gain == "log" else 2 * count
        expected = -(-tokens * self.token_bits // 8)
        for reader, length, what in ((side, size, "scales of tokens"), (codes, expected, "codes")):
            if reader.remaining != length:
                reader.fail(f"{what}: expected {length} bytes, got {reader.remaining}")
        if self.gain == "log":
            gain = LOG_GAINS[packing.unpack(side, count, 4)]
        elif self.gain == "max":
            gain = norms(read_norms(side, count, 7, "scales of tokens"), 7)
        else:
            gain = np.ones(count)
        gain = gain.reshape(tokens, len(self.units))
        packed = codes.array(np.uint8, expected, "codes")
        widths = [b for unit in self.units for b in unit.bits.tolist() if b]
        levels = [self.points(b) for b in widths]
        for start in range(0, tokens, BLOCK):
            stop = min(start + BLOCK, tokens)
            read = _unpack(packed, widths, start, stop)
            at = 0
            for i, unit in enumerate(self.units):
                y = np.zeros((stop - start, unit.basis.size), np.int64)
                for c in np.flatnonzero(unit.bits):
                    y[:, c] = levels[at][read[at]]
                    at += 1
                out[start:stop, unit.basis.places] = unit.basis.synthesise(y, None if self.gain == "none" else gain[start:stop, i])

    # -- state ---------------------------------------------------------------------------------------------------------

    def write(self) -> bytes:
        pieces = [bytes([GAINS.index(self.gain) | LEVELS.index(self.levels) << 4]), varint(len(self.units))]
        for unit in self.units:
            pieces += [unit.basis.write(), unit.bits.tobytes()]
        if self.levels != "listed":
            return b"".join(pieces)
        pieces.append(varint(len(self.codebooks)))
        for b, points in sorted(self.codebooks.items()):
            pieces += [bytes([b]), points.astype("<i4").tobytes()]
        return b"".join(pieces)

    @classmethod
    def read(cls, reader: Reader, width: int) -> FixedCoder:
        start = reader.offset
        number = reader.u8("kinds of token scales and levels")
        if number & 15 >= len(GAINS) or number >> 4 >= len(LEVELS):
            reader.fail(f"state: unexpected kind of token scales {number & 15} or of levels {number >> 4}", start)
        gain, levels = GAINS[number & 15], LEVELS[number >> 4]
        units, seen, needed = [], np.zeros(width, bool), set()
        for _ in range(reader.varint("units", width)):
            start = reader.offset
            basis = Basis.read(reader, width)
            bits = reader.array(np.uint8, basis.size, "bits of coefficients")
            if seen[basis.places].any() or int(bits.max(initial=0)) > MOST_BITS:
                reader.fail(f"state: expected places of no other unit, and at most {MOST_BITS} bits", start)
            seen[basis.places] = True
            needed |= set(bits[bits > 0].tolist())
            units.append(FixedUnit(basis, bits))
        start = reader.offset
        if not seen.all():
            reader.fail("state: expected every entry in one unit", start)
        codebooks: dict[int, NDArray[np.int32]] = {}
        if levels != "listed":
            return cls(tuple(units), gain, codebooks, levels)
        for _ in range(reader.varint("codebooks", MOST_BITS)):
            b = reader.u8("bits of a codebook")
            if not 1 <= b <= MOST_BITS or b in codebooks:
                reader.fail(f"codebooks: expected bits from 1 to {MOST_BITS}, each once, got {b}", start)
            points = reader.array("<i4", 1 << b, "codebook").astype(np.int32)
            if (np.diff(points) < 0).any() or (np.abs(points.astype(np.int64)) > 1 << 24).any():
                reader.fail("codebook: expected ascending numbers of at most 2^24", start)
            codebooks[b] = points
        if set(codebooks) != needed:
            reader.fail(f"codebooks: expected those of {sorted(needed)} bits, got {sorted(codebooks)}", start)
        return cls(tuple(units), gain, codebooks)


def _pack(columns: Sequence[Integers], widths: Sequence[int], tokens: int) -> bytes:
    """columns[i] (tokens,) of widths[i] bits: token after token, densely."""
    total = sum(widths)
    step = 8 * BLOCK  # whole bytes
    pieces = []
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        bits = np.zeros((stop - start, total), np.uint8)
        at = 0
        for column, b in zip(columns, widths):
            bits[:, at : at + b] = column[start:stop, None] >> np.arange(b) & 1
            at += b
        pieces.append(np.packbits(bits.ravel(), bitorder="little").tobytes())
    return b"".join(pieces)


def _unpack(packed: NDArray[np.uint8], widths: Sequence[int], start: int, stop: int) -> list[Integers]:
    """Codes of tokens start ... stop - 1, a (tokens,) array for each width; start a multiple of 8."""
    total = sum(widths)
    bits = np.unpackbits(packed[start * total // 8 : -(-stop * total // 8)], count=(stop - start) * total, bitorder="little")
    bits = bits.reshape(stop - start, total)
    out, at = [], 0
    for b in widths:
        out.append(bits[:, at : at + b].astype(np.int64) @ (1 << np.arange(b)))
        at += b
    return out
