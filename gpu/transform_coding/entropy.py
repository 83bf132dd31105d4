"""The entropy coder on the GPU: `reference.transform_coding.entropy`, the same bytes for the same coefficients, the same integers for the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu import rans
from gpu.module import Source, launch, namespace
from gpu.resident import device, host, kept
from gpu.transform_coding.basis import analyse, padded, products, synthesise
from gpu.transform_coding.stacked import warps
from reference import packing
from reference import rans as reference_rans
from reference.stream import Part, Reader
from reference.transform_coding.entropy import (
    _ALPHABETS,
    LANES,
    MOST_CODE,
    NOT_CODED,
    UNIT,
    EntropyCoder,
    Unit,
    block_tokens,
)  # fmt: skip

__all__ = ["coded", "decode", "encode"]

SOURCE = Source("entropy.cu", ["contexts", "symbolise", "residue", "escapes", "levels<int>", "levels<long long>"])


class _Tables:
    """A coder's tables by class and coefficient of all units."""

    def __init__(self, coder: EntropyCoder, xp: Any) -> None:
        self.coder, self.xp = coder, xp
        self.sizes = np.uint32(len(coder.units)), np.uint32(coder.coefficients)

    def _kept(self, name: str, make: Callable[[], NDArray[Any]]) -> Any:
        return kept(self.coder, name, self.xp, lambda: padded(make()))

    @property
    def unit_of(self) -> Any:
        sizes = [unit.basis.size for unit in self.coder.units]
        return self._kept("unit of", lambda: np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes))

    @property
    def tables(self) -> Any:
        return self._kept("tables", lambda: np.concatenate([unit.tables for unit in self.coder.units], axis=1))

    @property
    def shifts(self) -> Any:
        return self._kept("shifts", lambda: np.concatenate([unit.shifts for unit in self.coder.units], axis=1))

    @property
    def deltas(self) -> Any:
        return self._kept("deltas", lambda: self.coder._deltas.astype(np.int8))

    def low_bits(self, classes: Any) -> Any:
        """How many low bits each token has, (n,) int64."""
        total = self.xp.zeros(len(classes), np.int64)
        for i, unit in enumerate(self.coder.units):
            own = self._kept(f"low bits {i}", partial(_low_bits, unit))
            total += own[classes[:, i].astype(np.int64)]
        return total


def _low_bits(unit: Unit) -> NDArray[np.int64]:
    return np.where(unit.tables != NOT_CODED, unit.shifts, 0).sum(axis=1, dtype=np.int64)


def _before(counts: Any, xp: Any) -> tuple[Any, int]:
    """What comes before each of counts (n,), uint64, and their sum."""
    ends = xp.cumsum(counts.astype(np.int64))
    return (ends - counts).astype(np.uint64), int(ends[-1]) if ends.size else 0


def _classes(unit: Unit, y: Any, xp: Any) -> Any:
    """Class of each token, (n,): `unit.classes`, its sums from the first column to the last."""
    weights, thresholds = (kept(unit, name, xp, partial(getattr, unit, name)) for name in ("weights", "thresholds"))
    if not thresholds.size:
        return xp.zeros(len(y), np.int64)
    sums = products(y * y, weights[None])[:, 0]
    return xp.searchsorted(thresholds, sums / max(1, len(weights)), side="right")


def encode(coder: EntropyCoder, x: Any) -> list[Part]:
    """Stacked vectors (n, entries) -> side, codes, escapes, low bits."""
    xp = namespace(x)
    coefficients = [analyse(unit.basis, x) / UNIT for unit in coder.units]
    return coded(coder, coefficients, [_classes(unit, y, xp) for unit, y in zip(coder.units, coefficients)])


def coded(coder: EntropyCoder, coefficients: Sequence[Any], classes: Sequence[Any]) -> list[Part]:
    """`encode`, from the coefficients (n, columns) binary64 of each unit, in steps, and the classes (n,) of tokens in it.

    The reference's bytes on every machine. ValueError for a symbol without a frequency in its table.
    """
    xp, n = namespace(*coefficients), len(coefficients[0])
    tables, units, size = _Tables(coder, xp), len(coder.units), coder.coefficients
    y = xp.ascontiguousarray(xp.concatenate(coefficients, axis=1))
    own_classes = xp.ascontiguousarray(xp.stack(classes, axis=1).astype(np.uint16))
    tokens = block_tokens(coder.block, size)
    block = tokens * max(1, size)
    codes, symbols, used = xp.empty((n, size), np.int32), xp.empty((n, size), np.uint16), xp.empty((n, size), np.uint16)
    escaped = xp.zeros(n, np.uint32)
    alphabets = kept(coder, "alphabets", xp, lambda: _ALPHABETS.astype(np.int32))
    if n:
        launch(
            SOURCE["symbolise"], *warps(n),
            (y, own_classes, tables.unit_of, tables.tables, tables.shifts, alphabets, codes, symbols, used, escaped, np.uint64(n), *tables.sizes),
        )  # fmt: skip
    counts = np.add.reduceat(host(escaped).astype(np.int64), np.arange(0, n, tokens)) if n else np.zeros(0, np.int64)
    escape_at, escapes = _before(escaped, xp)
    bit_at, bits = _before(tables.low_bits(own_classes), xp)
    values, words = xp.zeros(max(1, escapes), np.int32), xp.zeros(-(-bits // 32) + 1, np.uint32)
    if escapes or bits:
        launch(
            SOURCE["residue"], *warps(n),
            (codes, symbols, used, own_classes, tables.unit_of, tables.tables, tables.shifts, escape_at, bit_at, values, words,
             np.uint64(n), *tables.sizes),
        )  # fmt: skip
    side = b""
    if coder.classes > 1:
        side = rans.encode(own_classes.ravel(), coder._rans[0], np.arange(units), block=tokens * units, lanes=LANES)
    reference_rans._check(block, LANES)
    payload = rans.encode_checked(
        symbols.ravel(), coder._with_certain, used.ravel(), block=block, lanes=LANES, own=True
    )
    escapes_part = counts.astype("<u4").tobytes() + host(values)[:escapes].astype("<i4").tobytes()
    return [side, payload, escapes_part, host(words).astype("<u4").tobytes()[: -(-bits // 8)]]


def decode(coder: EntropyCoder, parts: list[Reader], tokens: int, width: int, xp: Any) -> Any:
    """Stacked vectors (tokens, width) from side, codes, escapes and low bits, in namespace `xp`.

    CorruptStream for parts that do not fit together, in the reference's order.
    """
    side, codes, escapes, low = parts
    tables, units, size = _Tables(coder, xp), len(coder.units), coder.coefficients
    step = block_tokens(coder.block, size)
    counts = escapes.array("<u4", -(-tokens // step), "numbers of escapes").astype(np.int64)
    if 4 * int(counts.sum()) != escapes.remaining:
        escapes.fail(f"escapes: expected {int(counts.sum())} of 4 bytes, got {escapes.remaining} bytes")
    # the states of each block are in the payload, so a claim of many tokens needs many bytes
    coded = rans.parse(codes, tokens * size, step * max(1, size))
    if coder.classes > 1:
        flat = rans.decode(side, tokens * units, coder._rans[0], np.arange(units), block=step * units, xp=xp)
        classes = flat.reshape(tokens, units)
    else:
        side.end("side")
        classes = xp.zeros((tokens, units), np.uint16)
    symbols, used = [], []
    for first, last in coded.growing():
        own = xp.ascontiguousarray(classes[first * step : last * step])
        used.append(xp.empty((len(own), size), np.uint16))
        launch(
            SOURCE["contexts"], *warps(len(own)), (own, tables.unit_of, tables.tables, used[-1], np.uint64(len(own)), *tables.sizes)
        )  # fmt: skip
        symbols.append(rans.decode_blocks(coded, coder._with_certain, used[-1].ravel(), first, last, own=True, xp=xp))
    bit_at, bits = _before(tables.low_bits(classes), xp)
    if low.remaining != -(-bits // 8):
        low.fail(f"low bits: expected {-(-bits // 8)} bytes, got {low.remaining}")
    packed = np.frombuffer(low.rest(), np.uint8)
    packing.check_padding(packed, bits, 1, low)
    x = xp.empty((tokens, width), np.float64)
    if not tokens:
        return x
    every, tables_used = xp.concatenate(symbols), xp.concatenate(used)
    escaped = xp.empty(tokens, np.uint32)
    launch(SOURCE["escapes"], *warps(tokens), (every, tables_used, escaped, np.uint64(tokens), np.uint32(size)))
    found = np.add.reduceat(host(escaped).astype(np.int64), np.arange(0, tokens, step))
    if not np.array_equal(found, counts):
        escapes.fail("escapes: the symbols hold other numbers of them")
    start = escapes.offset
    values = escapes.array("<i4", int(counts.sum()), "escapes").astype(np.int32)
    if values.size and int(np.abs(values.astype(np.int64)).max()) > MOST_CODE:
        escapes.fail(f"escapes: expected at most {MOST_CODE}, got {int(np.abs(values.astype(np.int64)).max())}", start)
    words = np.zeros(-(-bits // 32) + 1, "<u4")
    words.view(np.uint8)[: -(-bits // 8)] = packed
    inputs = (
        every, tables_used, classes, tables.unit_of, tables.tables, tables.shifts, tables.deltas, device(padded(values), xp),
        device(words.astype(np.uint32), xp), _before(escaped, xp)[0], bit_at,
    )  # fmt: skip
    wide = xp.zeros(1, np.uint32)
    y = xp.empty((tokens, size), np.int32)
    launch(SOURCE["levels<int>"], *warps(tokens), (*inputs, y, wide, np.uint64(tokens), *tables.sizes))
    if int(host(wide)[0]):  # none but far escapes: no y is as large in a cache of the calibration's scale
        y = xp.empty((tokens, size), np.int64)
        launch(SOURCE["levels<long long>"], *warps(tokens), (*inputs, y, wide, np.uint64(tokens), *tables.sizes))
    at = 0
    for unit in coder.units:
        synthesise(unit.basis, y, x, first=at)
        at += unit.basis.size
    return x
