"""So many bits for each coefficient: codebooks, a scale for each token, dense packing.

    y_c  =  g  s_c  P_b[code]        b = bits_c;  b = 0: y_c = 0.  s_c is inside the basis;  P_b: 2^b ascending numbers, kept as integers
    P        "listed": codebooks in units of 2^-12, part of the state.  "midrise": (2 code + 1) / 2^b - 1;  "midtread": 2 code / 2^b - 1, both
             in units of 2^-16.  "offset": code - z, in units of 1
    g        scale of a token in a unit.  "none": 1.  "log": one for each 64 coded coefficients (the last ones: the rest), 4 bits, 1 or 1.5 times
             2^{-4 ... 3}, an encoder's choice: ours leaves the least squared error of x.  "max": 16 bits, a norm of reference.vectors (8 bits' mantissa), at least max_c |y_c| / s_c over coded coefficients.
             "range": with "offset" alone, all coded coefficients of a unit having the same b <= 8: 24 bits, a norm of at least
             (max(0, max_c y_c) - min(0, min_c y_c)) / (2^b - 1) and z = round(-min / g), 0 ... 2^b - 1, in 8 bits

    parts    "side"    scales of tokens, token by token, unit by unit, group by group; of "range" all norms, then all z
             "codes"   token by token, unit by unit, coefficient by coefficient, bits_c bits each, LSB first, packed densely

Every token takes the same number of bits, so each is read on its own: at least one, 0, so that a claim of many tokens needs many bytes.
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
Gain = Literal["none", "log", "max", "range"]
GAINS: tuple[Gain, ...] = ("none", "log", "max", "range")
Levels = Literal["listed", "midrise", "midtread", "offset"]
LEVELS: tuple[Levels, ...] = ("listed", "midrise", "midtread", "offset")

#: an s_c in the integers that a basis takes, of listed levels and of uniform ones
UNIT, UNIFORM_UNIT = 1 << 12, 1 << 16
#: of levels with an offset
MOST_OFFSET_BITS = 8
#: no scale of a token is larger (or, but for 0, smaller): beyond, coefficients are clipped
MOST_GAIN, LEAST_GAIN = 2.0**133, 2.0**-250
MOST_BITS = 16
#: tokens whose bits are spread out at once
BLOCK = 1 << 12
#: scales of tokens in units of 1/32, and coefficients that share one
LOG_GAINS = np.sort(np.concatenate([2 << np.arange(8), 3 << np.arange(8)]))
GAIN_UNIT, GROUP = 32, 64


def gain_bits(gain: Gain) -> int:
    """Bits of one token's scale in one unit (of "log": in one group)."""
    return {"none": 0, "log": 4, "max": 16, "range": 24}[gain]


def groups_of(coded: int) -> int:
    """How many scales of kind "log" so many coded coefficients of a unit share."""
    return -(-coded // GROUP)


def unit_of(levels: Levels, gain: Gain = "none") -> int:
    """An s_c in the integers that a basis takes."""
    return (GAIN_UNIT if gain == "log" else 1) * {
        "listed": UNIT,
        "midrise": UNIFORM_UNIT,
        "midtread": UNIFORM_UNIT,
        "offset": 1,
    }[levels]


@lru_cache(maxsize=64)
def uniform_points(levels: Levels, bits: int) -> Integers:
    """(2^bits,) ascending, in units of 1 / unit_of(levels); of "offset" with z = 0."""
    if levels == "offset":
        return np.arange(1 << bits)
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
        bits = sum(int(unit.bits.sum()) for unit in self.units)
        return bits or int(self.gain in ("none", "log") or not self.units)

    def gains(self, ratio: Float64) -> tuple[Integers, Float64]:
        """Stored form and value of the scales of tokens for y_c / s_c (n, size) of coded coefficients."""
        n = len(ratio)
        if self.gain == "max":
            return rounded_up(np.abs(ratio).max(axis=1, initial=0.0))
        return np.zeros(n, np.int64), np.ones(n)

    def encode(self, x: Float64) -> list[Part]:
        """Stacked vectors (n, entries) -> side, codes."""
        sides: list[Integers] = []
        columns, widths, one = [], [], unit_of(self.levels)
        for unit in self.units:
            live = unit.bits > 0
            ratio = unit.basis.analyse(x)[:, live] / unit_of(self.levels, self.gain)
            if self.gain == "log":
                levels = [self.points(b) / one for b in unit.bits[live].tolist()]
                chosen, codes = least_error(ratio, levels, unit.basis.energies[live])
                sides += list(chosen)
                columns += list(codes)
                widths += unit.bits[live].tolist()
                continue
            stored, gain = self.gains(ratio) if self.gain != "range" else _ranges(ratio, int(unit.bits.max(initial=0)))
            sides.append(stored)
            scaled = ratio / np.where(gain > 0, gain, 1.0)[:, None] * one
            if self.gain == "range":
                scaled += (stored >> 16)[:, None]
            for c, b in enumerate(unit.bits[live].tolist()):
                points = self.points(b).astype(np.float64)
                columns.append(np.searchsorted(0.5 * (points[1:] + points[:-1]), scaled[:, c], side="right"))
                widths.append(b)
        side = np.stack(sides, axis=1) if sides else np.zeros((len(x), 0), np.int64)
        return [self._write_side(side), _pack(columns, widths, len(x), self.token_bits)]

    def _write_side(self, side: Integers) -> bytes:
        if self.gain == "none":
            return b""
        if self.gain == "log":
            return packing.pack(side.ravel(), 4)
        offsets = (side >> 16).astype(np.uint8).tobytes() if self.gain == "range" else b""
        return (side & 0xFFFF).astype("<u2").tobytes() + offsets

    def opened(self, parts: list[Reader], tokens: int) -> tuple[list[int], Integers, Integers, NDArray[np.uint8]]:
        """Scales of a token in each unit; what is stored of them (tokens, all scales); z (tokens, units); packed codes. All are checked.

        CorruptStream for parts that do not fit together.
        """
        side, codes, *others = parts
        for other in others:
            other.end("part of an entropy coder")
        scales = [groups_of(int((unit.bits > 0).sum())) if self.gain == "log" else 1 for unit in self.units]
        count = tokens * sum(scales)
        size = -(-count * gain_bits(self.gain) // 8)
        expected = -(-tokens * self.token_bits // 8)
        for reader, length, what in ((side, size, "scales of tokens"), (codes, expected, "codes")):
            if reader.remaining != length:
                reader.fail(f"{what}: expected {length} bytes, got {reader.remaining}")
        if self.gain == "log":
            stored = packing.unpack(side, count, 4).astype(np.int64)
        elif self.gain in ("max", "range"):
            stored = read_norms(side, count, 7, "scales of tokens")
        else:
            stored = np.zeros(count, np.int64)
        offsets = self._offsets(side, tokens * len(self.units)).reshape(tokens, len(self.units))
        start = codes.offset
        packed = codes.array(np.uint8, expected, "codes")
        if tokens * self.token_bits % 8 and packed[-1] >> tokens * self.token_bits % 8:
            codes.fail("codes: expected spare bits to be 0", start + expected - 1)
        return scales, stored.reshape(tokens, sum(scales)), offsets, packed

    def decode(self, parts: list[Reader], tokens: int, out: Float64) -> None:
        """Into out (tokens, entries), from side and codes. CorruptStream for parts that do not fit together."""
        scales, stored, offsets, packed = self.opened(parts, tokens)
        if self.gain == "log":
            gain = LOG_GAINS[stored].astype(np.float64)
        else:
            gain = norms(stored, 7) if self.gain in ("max", "range") else np.ones(stored.shape)
        widths = [b for unit in self.units for b in unit.bits.tolist() if b]
        levels = [self.points(b) for b in widths]
        for start in range(0, tokens, BLOCK):
            stop = min(start + BLOCK, tokens)
            read = _unpack(packed, widths, self.token_bits, start, stop)
            at = first = 0
            for i, unit in enumerate(self.units):
                y = np.zeros((stop - start, unit.basis.size), np.int64)
                for rank, c in enumerate(np.flatnonzero(unit.bits)):
                    y[:, c] = levels[at][read[at]] - offsets[start:stop, i]
                    if self.gain == "log":
                        y[:, c] *= gain[start:stop, first + rank // GROUP].astype(np.int64)
                    at += 1
                whole = gain[start:stop, first] if self.gain in ("max", "range") else None
                out[start:stop, unit.basis.places] = unit.basis.synthesise(y, whole)
                first += scales[i]

    def _offsets(self, side: Reader, count: int) -> Integers:
        """z of each token and unit, (count,)."""
        if self.gain != "range":
            return np.zeros(count, np.int64)
        start = side.offset
        offsets = side.array(np.uint8, count, "offsets").astype(np.int64)
        most = np.resize([(1 << int(unit.bits.max(initial=0))) - 1 for unit in self.units], count)
        if (offsets > most).any():
            at = int(np.argmax(offsets > most))
            side.fail(f"offsets: expected at most {most[at]}, got {offsets[at]}", start + at)
        return offsets

    def flops(self, tokens: int) -> int:
        """A product and a sum for each coded coefficient and row, the mean among the sums; scales and offsets; of each row one by 2^e."""
        each = 0
        for unit in self.units:
            coded, rows = int((unit.bits > 0).sum()), unit.basis.rows
            scales = {"none": 0, "log": coded, "max": rows, "range": rows + coded}[self.gain]
            each += rows * (2 * coded + 1) + scales if coded else 0
        return tokens * each

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
        if (gain == "range") != (levels == "offset"):
            reader.fail("state: expected scales and offsets of tokens together", start)
        units, seen, needed = [], np.zeros(width, bool), set()
        for _ in range(reader.varint("units", width)):
            start = reader.offset
            basis = Basis.read(reader, width)
            bits = reader.array(np.uint8, basis.size, "bits of coefficients")
            if seen[basis.places].any() or int(bits.max(initial=0)) > MOST_BITS:
                reader.fail(f"state: expected places of no other unit, and at most {MOST_BITS} bits", start)
            if levels == "offset" and (
                len(set(bits[bits > 0].tolist())) > 1 or int(bits.max(initial=0)) > MOST_OFFSET_BITS
            ):
                reader.fail(f"state: expected one number of bits in a unit, of at most {MOST_OFFSET_BITS}", start)
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


def least_error(ratio: Float64, points: Sequence[Float64], weights: Float64) -> tuple[list[Integers], list[Integers]]:
    """For coefficients y_c / s_c (n, size): of each group the choice among LOG_GAINS (n,) of least sum_c w_c error_c^2, and all codes."""
    chosen, columns = [], []
    for start in range(0, len(points), GROUP):
        own = range(start, min(start + GROUP, len(points)))
        cost = np.zeros((len(LOG_GAINS), len(ratio)))
        for c in own:
            bounds = 0.5 * (points[c][1:] + points[c][:-1])
            for i, gain in enumerate(LOG_GAINS / GAIN_UNIT):
                decoded = gain * points[c][np.searchsorted(bounds, ratio[:, c] / gain, side="right")]
                cost[i] += weights[c] * (ratio[:, c] - decoded) ** 2
        best = cost.argmin(axis=0)
        chosen.append(best)
        gains = LOG_GAINS[best] / GAIN_UNIT
        columns += [
            np.searchsorted(0.5 * (points[c][1:] + points[c][:-1]), ratio[:, c] / gains, side="right") for c in own
        ]
    return chosen, columns


def rounded_up(most: Float64) -> tuple[Integers, Float64]:
    """Stored form and value of the least norms >= most (n,): no coefficient overloads."""
    most = np.minimum(most, MOST_GAIN)
    most = np.where(most >= LEAST_GAIN, most, 0.0)
    f, e = np.frexp(np.where(most > 0, most, 1.0))
    up = np.where(most > 0, np.ldexp(np.ceil(f * 256) / 256, e), 0.0)
    f, e = np.frexp(up)
    codes = norm_codes(f * f, e.astype(np.int64), 7)
    return codes, norms(codes, 7)


def _ranges(ratio: Float64, bits: int) -> tuple[Integers, Float64]:
    """Norm codes with z above their 16 bits, and g, of coefficients (n, size) of one number of bits."""
    least, most = np.minimum(ratio.min(axis=1, initial=0.0), 0.0), np.maximum(ratio.max(axis=1, initial=0.0), 0.0)
    levels = max(1, (1 << bits) - 1)
    codes, gain = rounded_up((most - least) / levels)
    z = np.clip(np.rint(-least / np.where(gain > 0, gain, 1.0)), 0, levels if bits else 0).astype(np.int64)
    return codes | z << 16, gain


def _pack(columns: Sequence[Integers], widths: Sequence[int], tokens: int, total: int) -> bytes:
    """columns[i] (tokens,) of widths[i] bits: token after token, of `total` bits each, densely."""
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


def _unpack(packed: NDArray[np.uint8], widths: Sequence[int], total: int, start: int, stop: int) -> list[Integers]:
    """Codes of tokens start ... stop - 1 of `total` bits, a (tokens,) array for each width; start a multiple of 8."""
    flat = np.unpackbits(
        packed[start * total // 8 : -(-stop * total // 8)], count=(stop - start) * total, bitorder="little"
    )
    bits = flat.reshape(stop - start, total)
    out, at = [], 0
    for b in widths:
        out.append(bits[:, at : at + b].astype(np.int64) @ (1 << np.arange(b)))
        at += b
    return out
