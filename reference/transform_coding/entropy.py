"""One uniform step for all coefficients, and rANS: in a basis where errors cost alike, that is reverse water-filling without bits to allot.

A coefficient y_c of spread sigma is coded as n = round(y_c / step). The step is inside the basis (y is counted in steps), so here:

    class      of a token: k with  t_{k-1} <= mean_c y_c^2 / sigma_c^2 < t_k:  tokens differ in scale, and a table fitted to all of them pays for it
    table      of a coefficient and class: j = round(4 log2 sigma_kc) from J0 up; below it is not coded (0).  Above J1: shift
               s = ceil((j - J1) / 4), table j - 4 s codes n >> s, and the low s bits follow as they are
    symbol     m = n >> s as 2 |m| - [m < 0], escape where |m| > A_j = ceil(8 2^{j/4}) (at least 2): n itself follows, in 32 bits
    decoded    y = n + delta(j, symbol) / 256, the centroid of what was coded so in calibration; 256 y is an integer

    parts      "side"      rANS of the classes, token by token, unit by unit; empty for one class
               "codes"     rANS of the symbols, token by token, unit by unit, coefficient by coefficient; blocks of `block` tokens
               "escapes"   uint32 for each block: how many; then int32 each
               "low bits"  packed densely, in the order of the symbols

Blocks of tokens are decoded apart. Tables are fitted to calibration data and part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import packing, rans
from reference.stream import Part, Reader, varint
from reference.transform_coding.basis import Basis

__all__ = ["EntropyCoder", "fit_entropy"]

Float64 = NDArray[np.float64]
Integers = NDArray[np.int64]

#: quarter octaves of spread over step that have a table: 1/8 ... 16 steps
J0, J1 = -12, 16
NOT_CODED = 255
TABLES = J1 - J0 + 1
MOST_SHIFT = 20
MOST_CLASSES = 16
MOST_CODE = 1 << 27
LANES = 8
#: a step in the integers that a basis takes
UNIT = 256
#: prior of a table, in coefficients: what calibration has not seen may still come
PRIOR = 24.0
#: tokens whose codes are made into numbers at once, or as many as have NUMBERS coefficients: a basis takes its time for each call
BLOCK, NUMBERS = 1 << 10, 1 << 15
#: tokens that the step is searched on
SEARCH_TOKENS = 2048


def alphabet(j: int) -> int:
    """A_j."""
    return max(2, int(np.ceil(8.0 * 2.0 ** (j / 4))))


SYMBOLS = 2 * alphabet(J1) + 2
ESCAPE = SYMBOLS - 1


@dataclass(frozen=True, eq=False)
class Unit:
    """Coefficients that one basis makes. weights (size,): 1 / sigma_c^2; thresholds (classes - 1,); tables, shifts (classes, size)."""

    basis: Basis
    weights: Float64
    thresholds: Float64
    tables: NDArray[np.uint8]
    shifts: NDArray[np.uint8]

    def classes(self, y: Float64) -> Integers:
        """Class of each token, (n,)."""
        with np.errstate(over="ignore"):
            return np.searchsorted(self.thresholds, (y**2 @ self.weights) / max(1, len(self.weights)), side="right")


def block_tokens(block: int, coefficients: int) -> int:
    """Tokens of one block: `block`, or as many as rANS blocks have room for."""
    return max(1, min(block, rans.MOST_BLOCK // max(1, coefficients)))


@dataclass(frozen=True, eq=False)
class EntropyCoder:
    """The coder of one layer's stacked vectors. classes (units, K): frequencies; frequencies (TABLES, SYMBOLS); deltas alike, int8."""

    units: tuple[Unit, ...]
    class_frequencies: NDArray[np.int64]
    frequencies: NDArray[np.int64]
    deltas: NDArray[np.int8]
    block: int

    @property
    def coefficients(self) -> int:
        return sum(unit.basis.size for unit in self.units)

    @property
    def classes(self) -> int:
        return int(self.class_frequencies.shape[1])

    @cached_property
    def _rans(self) -> tuple[rans.Tables, rans.Tables]:
        return rans.Tables(self.class_frequencies), rans.Tables(self.frequencies)

    # -- streams -------------------------------------------------------------------------------------------------------

    def encode(self, x: Float64) -> list[Part]:
        """Stacked vectors (n, entries) -> side, codes, escapes, low bits."""
        coefficients = [unit.basis.analyse(x) / UNIT for unit in self.units]
        classes = np.stack([unit.classes(y) for unit, y in zip(self.units, coefficients)], axis=1)  # (n, units)
        n = np.concatenate([codes_of(y) for y in coefficients], axis=1)
        tables, shifts = self._contexts(classes)
        symbols = symbols_of(n, tables, shifts)
        coded = tables != NOT_CODED
        size = block_tokens(self.block, self.coefficients)
        escaped = (symbols == ESCAPE) & coded
        starts = np.arange(0, len(x), size)
        counts = np.add.reduceat(escaped.sum(axis=1), starts) if len(x) else np.zeros(0, np.int64)
        escapes = counts.astype("<u4").tobytes() + n[escaped].astype("<i4").tobytes()
        widths = shifts[coded].astype(np.int64)
        low = _pack(n[coded] & ((1 << widths) - 1), widths)
        side = b""
        if self.classes > 1:
            side = rans.encode(
                classes.ravel(), self._rans[0], np.arange(len(self.units)), block=size * len(self.units), lanes=LANES
            )
        # what is not coded is a certain symbol: it takes no bits, and blocks keep their length
        every = np.where(coded, tables, TABLES)
        codes = rans.encode(
            np.where(coded, symbols, 0).ravel(), self._with_certain, every.ravel(), block=size * max(1, self.coefficients),
            lanes=LANES, own=True,
        )  # fmt: skip
        return [side, codes, escapes, low]

    @cached_property
    def _with_certain(self) -> rans.Tables:
        certain = np.zeros((1, SYMBOLS), np.int64)
        certain[0, 0] = rans.TOTAL
        return rans.Tables(np.concatenate([self.frequencies, certain]))

    def decode(self, parts: list[Reader], tokens: int, out: Float64) -> None:
        """Into out (tokens, entries), from side, codes, escapes and low bits. CorruptStream for parts that do not fit together."""
        side, codes, escapes, low = parts
        size = block_tokens(self.block, self.coefficients)
        blocks = -(-tokens // size)
        counts = escapes.array("<u4", blocks, "numbers of escapes").astype(np.int64)
        if 4 * int(counts.sum()) != escapes.remaining:
            escapes.fail(f"escapes: expected {int(counts.sum())} of 4 bytes, got {escapes.remaining} bytes")
        # the states of each block are in the payload, so a claim of many tokens needs many bytes
        coded_symbols = rans.parse(codes, tokens * self.coefficients, size * max(1, self.coefficients))
        if self.classes > 1:
            length = size * len(self.units)
            flat = rans.decode(side, tokens * len(self.units), self._rans[0], np.arange(len(self.units)), block=length)
            classes = flat.reshape(tokens, len(self.units))
        else:
            side.end("side")
            classes = np.broadcast_to(np.uint16(0), (tokens, len(self.units)))
        runs = []
        for first, last in coded_symbols.growing():
            run = self._contexts(classes[first * size : last * size])[0]
            run = np.where(run != NOT_CODED, run, np.uint8(TABLES))
            runs.append(coded_symbols.decode(self._with_certain, run.ravel(), first, last, own=True))
        tables, shifts = self._contexts(classes)
        coded = tables != NOT_CODED
        every = np.where(coded, tables, np.uint8(TABLES))
        symbols = np.concatenate([np.zeros(0, np.uint16), *runs]).reshape(every.shape)
        packed = _read_low_bits(low, int(shifts[coded].sum(dtype=np.int64)))
        escaped = (symbols == ESCAPE) & coded
        starts = np.arange(0, tokens, size)
        found = np.add.reduceat(escaped.sum(axis=1), starts) if tokens else counts
        if not np.array_equal(found, counts):
            escapes.fail("escapes: the symbols hold other numbers of them")
        start = escapes.offset
        values = escapes.array("<i4", int(counts.sum()), "escapes").astype(np.int64)
        if values.size and int(np.abs(values).max()) > MOST_CODE:
            escapes.fail(f"escapes: expected at most {MOST_CODE}, got {int(np.abs(values).max())}", start)
        bit = escape = 0
        step = max(BLOCK, NUMBERS // max(1, self.coefficients))
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            own, s, shift = coded[rows], symbols[rows].astype(np.int64), shifts[rows].astype(np.int64)
            y = np.where(s & 1, -((s + 1) >> 1), s >> 1) << shift
            widths = shift[own]
            y[own] |= _unpack(packed, bit, widths)
            bit += int(widths.sum())
            y = UNIT * y + np.where(own & (shift == 0), self._deltas[every[rows], s], 0)
            count = int(escaped[rows].sum())
            y[escaped[rows]] = UNIT * values[escape : escape + count]
            escape += count
            at = 0
            for unit in self.units:
                out[rows, unit.basis.places] = unit.basis.synthesise(y[:, at : at + unit.basis.size])
                at += unit.basis.size

    def flops(self, tokens: int) -> int:
        """For each coefficient that some class codes 4 of rANS and the centroid, and with each row a product and a sum; of each row one by 2^e."""
        each = 0
        for unit in self.units:
            coded = int((unit.tables != NOT_CODED).any(axis=0).sum())
            each += 4 * coded + unit.basis.rows * (2 * coded + 1)
        return tokens * each

    @cached_property
    def _deltas(self) -> NDArray[np.int64]:
        return np.concatenate([self.deltas, np.zeros((1, SYMBOLS), np.int8)]).astype(np.int64)

    def _contexts(self, classes: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Table and shift of each coefficient, (n, coefficients), from the classes (n, units)."""
        pairs = [(unit.tables[k], unit.shifts[k]) for unit, k in zip(self.units, classes.T)]
        return np.concatenate([t for t, _ in pairs], axis=1), np.concatenate([s for _, s in pairs], axis=1)

    # -- state ---------------------------------------------------------------------------------------------------------

    def write(self) -> bytes:
        pieces = [varint(self.block), varint(len(self.units)), varint(self.classes)]
        for unit in self.units:
            pieces += [
                unit.basis.write(), unit.weights.astype("<f8").tobytes(), unit.thresholds.astype("<f8").tobytes(),
                unit.tables.tobytes(), unit.shifts.tobytes(),
            ]  # fmt: skip
        pieces += [self._rans[0].write(), self._rans[1].write(), self.deltas.tobytes()]
        return b"".join(pieces)

    @classmethod
    def read(cls, reader: Reader, width: int) -> EntropyCoder:
        start = reader.offset
        block = reader.varint("tokens of a block", rans.MOST_BLOCK)
        count, classes = reader.varint("units", width), reader.varint("classes", MOST_CLASSES)
        if not (block and count and classes):
            reader.fail("state: expected a block length, units and classes", start)
        units, seen = [], np.zeros(width, bool)
        for _ in range(count):
            start = reader.offset
            basis = Basis.read(reader, width)
            if seen[basis.places].any():
                reader.fail("basis: expected places that no other unit has", start)
            seen[basis.places] = True
            weights = reader.array("<f8", basis.size, "weights").astype(np.float64)
            thresholds = reader.array("<f8", classes - 1, "thresholds").astype(np.float64)
            start = reader.offset
            tables, shifts = (
                reader.array(np.uint8, classes * basis.size, what).reshape(classes, basis.size)
                for what in ("tables", "shifts")
            )
            if ((tables != NOT_CODED) & (tables >= TABLES)).any() or (shifts > MOST_SHIFT).any():
                reader.fail("state: expected tables and shifts within their ranges", start)
            if (
                not np.isfinite(weights).all()
                or (weights < 0).any()
                or not np.isfinite(thresholds).all()
                or (np.diff(thresholds) < 0).any()
            ):
                reader.fail("state: expected finite weights >= 0 and ascending thresholds", start)
            units.append(Unit(basis, weights, thresholds, tables, shifts))
        if not seen.all():
            reader.fail("state: expected every entry in one unit")
        # tokens without coefficients would cost next to nothing
        if not any(unit.basis.size for unit in units):
            reader.fail("state: expected a coefficient", start)
        class_tables = rans.Tables.read(reader, count)
        start = reader.offset
        symbol_tables = rans.Tables.read(reader, TABLES)
        if class_tables.symbols != classes or symbol_tables.symbols != SYMBOLS:
            reader.fail("state: expected tables of as many symbols as there are classes and codes", start)
        deltas = reader.array(np.int8, TABLES * SYMBOLS, "centroids").reshape(TABLES, SYMBOLS)
        return cls(tuple(units), class_tables.frequencies, symbol_tables.frequencies, deltas, block)


def codes_of(y: Float64) -> Integers:
    """n, (n, size) int64; codes beyond 2^27 are cut off."""
    return np.clip(np.rint(y), -MOST_CODE, MOST_CODE).astype(np.int64)


def symbols_of(n: Integers, tables: NDArray[np.uint8], shifts: NDArray[np.uint8]) -> Integers:
    m = n >> shifts.astype(np.int64)
    return np.where(np.abs(m) > _ALPHABETS[tables], ESCAPE, 2 * np.abs(m) - (m < 0))


_ALPHABETS = np.zeros(256, np.int64)
_ALPHABETS[:TABLES] = [alphabet(j) for j in range(J0, J1 + 1)]


def _pack(values: Integers, widths: Integers) -> bytes:
    """values of `widths` bits each, one after the other, LSB first."""
    owner = np.repeat(np.arange(widths.size), widths)
    place = np.arange(owner.size) - np.repeat(np.cumsum(widths) - widths, widths)
    return np.packbits((values[owner] >> place & 1).astype(np.uint8), bitorder="little").tobytes()


def _read_low_bits(reader: Reader, total: int) -> NDArray[np.uint8]:
    if reader.remaining != -(-total // 8):
        reader.fail(f"low bits: expected {-(-total // 8)} bytes, got {reader.remaining}")
    packed = np.frombuffer(reader.rest(), np.uint8)
    packing.check_padding(packed, total, 1, reader)
    return packed


def _unpack(packed: NDArray[np.uint8], first: int, widths: Integers) -> Integers:
    """Numbers of `widths` bits each from bit `first` on."""
    total = int(widths.sum())
    own = packed[first // 8 : -(-(first + total) // 8)]
    bits = np.unpackbits(own, bitorder="little")[first % 8 : first % 8 + total].astype(np.int64)
    owner = np.repeat(np.arange(widths.size), widths)
    place = np.arange(total) - np.repeat(np.cumsum(widths) - widths, widths)
    out = np.zeros(widths.size, np.int64)
    np.add.at(out, owner, bits << place)
    return out


# -- fitting -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Spread:
    """What a search for the step needs of one unit: y (n, size), class of each token, spread of each class and coefficient."""

    y: Float64
    weights: Float64
    thresholds: Float64
    classes: Integers
    sigma: Float64


def _spread(y: Float64, classes: int) -> _Spread:
    variance = (y**2).mean(axis=0)
    floor = max(float(variance.max(initial=0.0)) * 2.0**-60, np.finfo(np.float64).tiny)
    weights = np.where(variance > floor, 1.0 / np.maximum(variance, floor), 0.0)
    energy = (y**2 @ weights) / max(1, y.shape[1])
    thresholds = np.quantile(energy, np.arange(1, classes) / classes) if classes > 1 else np.zeros(0)
    k = np.searchsorted(thresholds, energy, side="right")
    sigma = np.zeros((classes, y.shape[1]))
    for i in range(classes):
        own = y[k == i]
        # a class of few tokens leans on all of them
        sigma[i] = np.sqrt(((own**2).sum(axis=0) + 4 * variance) / (len(own) + 4))
    return _Spread(y, weights, thresholds, k, sigma)


def _tables_at(sigma: Float64) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Table and shift for a spread in steps."""
    with np.errstate(divide="ignore"):
        j = np.rint(4 * np.log2(sigma))
    coded = j >= J0
    j = np.where(coded, np.minimum(j, J1 + 4 * MOST_SHIFT), J0).astype(np.int64)
    shifts = np.maximum(0, -(-(j - J1) // 4))
    tables = np.where(coded, j - 4 * shifts - J0, NOT_CODED)
    return tables.astype(np.uint8), np.where(coded, shifts, 0).astype(np.uint8)


def _prior() -> Float64:
    """Laplacian cells of each table's spread, (TABLES, SYMBOLS), summing to 1; a thousandth escapes."""
    out = np.zeros((TABLES, SYMBOLS))
    for i in range(TABLES):
        sigma, most = 2.0 ** ((i + J0) / 4), alphabet(i + J0)
        edges = np.arange(-most, most + 2) - 0.5
        law = np.where(
            edges < 0,
            0.5 * np.exp(np.sqrt(2) * np.minimum(edges, 0) / sigma),
            1 - 0.5 * np.exp(-np.sqrt(2) * np.maximum(edges, 0) / sigma),
        )
        m = np.arange(-most, most + 1)
        out[i, 2 * np.abs(m) - (m < 0)] = np.maximum(np.diff(law), 1e-6)
        out[i, ESCAPE] = 1e-3
    return out / out.sum(axis=1, keepdims=True)


def _count(
    spreads: Sequence[_Spread], step: float
) -> tuple[Float64, Float64, float, list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]]:
    """Symbols seen (TABLES, SYMBOLS), sums of y - n alike, raw bits, tables and shifts of each unit, with this step."""
    counts, sums = np.zeros(TABLES * SYMBOLS), np.zeros(TABLES * SYMBOLS)
    raw, contexts = 0.0, []
    for spread in spreads:
        tables, shifts = _tables_at(spread.sigma / step)
        contexts.append((tables, shifts))
        own, shift = tables[spread.classes], shifts[spread.classes]
        y = spread.y / step
        n = codes_of(y)
        symbols = symbols_of(n, own, shift)
        coded = own != NOT_CODED
        at = own[coded].astype(np.int64) * SYMBOLS + symbols[coded]
        counts += np.bincount(at, minlength=counts.size)
        plain = coded & (shift == 0)
        at = own[plain].astype(np.int64) * SYMBOLS + symbols[plain]
        sums += np.bincount(at, weights=np.clip(y[plain] - n[plain], -0.5, 0.5), minlength=counts.size)
        raw += float(shift[coded].sum()) + 32.0 * float((symbols[coded] == ESCAPE).sum())
    return counts.reshape(TABLES, SYMBOLS), sums.reshape(TABLES, SYMBOLS), raw, contexts


def _step(rate: Callable[[float], float], bits: float, spread: float) -> float:
    """The step of that rate, to a thousandth of a bit: rates fall by at most one bit an octave, so secants home in on it."""
    if spread == 0:
        return 1.0
    low, high = (
        float(np.log2(spread)) - 20,
        float(np.log2(spread)) + 6,
    )  # of rates above and below, as far as steps can reach
    at = low + 14
    for _ in range(30):
        found = rate(2.0**at)
        if abs(found - bits) < 1e-3:
            break
        low, high = (at, high) if found > bits else (low, at)
        guess = at + 1.5 * (found - bits)
        at = guess if low < guess < high else 0.5 * (low + high)
    return float(2.0**at)


def fit_entropy(
    bases: Sequence[tuple[NDArray[np.int64], Float64, Float64]], x: Float64, bits: float, classes: int, block: int
) -> EntropyCoder:
    """The coder whose ideal code length for stacked vectors x (n, entries) is `bits` a number, blocks' overhead included.

    bases: for each unit places (rows,), synthesis (rows, size) and mean (rows,), in which errors of all coefficients cost alike.
    """
    prior = _prior()
    spreads = [
        _spread((x[:, places] - mean) @ np.linalg.pinv(synthesis).T, classes) for places, synthesis, mean in bases
    ]
    tokens, coefficients = len(x), sum(s.y.shape[1] for s in spreads)
    class_counts = np.stack([np.bincount(s.classes, minlength=classes) for s in spreads])
    with np.errstate(divide="ignore", invalid="ignore"):
        p = class_counts / tokens
        class_bits = float(-np.nansum(class_counts * np.log2(p)))
    # theory of rans.py: about 24 L + 32 bits a block
    payloads = 2 if classes > 1 else 1
    overhead = (payloads * (24 * LANES + 32) + 32) / block_tokens(block, coefficients) * tokens

    rows = np.linspace(0, tokens - 1, min(tokens, SEARCH_TOKENS)).astype(int)
    some = [_Spread(s.y[rows], s.weights, s.thresholds, s.classes[rows], s.sigma) for s in spreads]

    def rate(step: float) -> float:
        counts, _, raw, _ = _count(some, step)
        law = counts + PRIOR * prior
        law /= law.sum(axis=1, keepdims=True)
        ideal = -float(np.sum(counts * np.log2(np.where(law > 0, law, 1.0))))
        return (ideal + raw) / (len(rows) * x.shape[1]) + (class_bits + overhead) / (tokens * x.shape[1])

    step = _step(rate, bits, max(float(s.sigma.max(initial=0.0)) for s in spreads))
    counts, sums, _, contexts = _count(spreads, step)
    weighted = np.rint(64 * (counts + PRIOR * prior)).astype(np.int64)
    weighted[(prior > 0) & (weighted == 0)] = 1
    frequencies = np.stack([rans.frequencies(row) for row in weighted])
    deltas = np.clip(np.rint(UNIT * sums / (counts + 8)), -127, 127).astype(np.int8)
    deltas[:, ESCAPE] = 0
    units = []
    for (places, synthesis, mean), one, (tables, shifts) in zip(bases, spreads, contexts):
        basis = Basis.of(places, synthesis * (step / UNIT), mean)
        units.append(Unit(basis, one.weights * step**2, one.thresholds, tables, shifts))
    class_frequencies = np.stack([rans.frequencies(row + 1) for row in class_counts])
    return EntropyCoder(tuple(units), class_frequencies, frequencies, deltas, block)
