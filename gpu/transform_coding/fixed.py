"""The fixed coder on the GPU: `reference.transform_coding.fixed`, the same bytes for the same coefficients, the same integers for the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.module import Source, launch, namespace
from gpu.resident import device, host, kept
from gpu.transform_coding.basis import analyse, padded, synthesise
from gpu.transform_coding.stacked import warps
from reference.stream import Part, Reader
from reference.transform_coding.fixed import (
    GAINS,
    LEVELS,
    LOG_GAINS,
    FixedCoder,
    FixedUnit,
    gain_bits,
    groups_of,
    unit_of,
)

__all__ = ["decode", "encode", "quantised"]

SOURCE = Source(
    "fixed.cu",
    [
        "quantise<NONE>",
        "quantise<MAX>",
        "quantise<RANGE>",
        "quantise_log",
        "pack",
        "dequantise<int>",
        "dequantise<long long>",
    ],
)
#: 16 lanes for each token and group
LOG_LANES = 16


class _Plan:
    """Where each unit's coefficients stand among all that have bits, and among a token's bits; tables of the kernels."""

    def __init__(self, coder: FixedCoder, xp: Any) -> None:
        self.coder, self.xp = coder, xp
        self.widths = np.concatenate([unit.bits[unit.bits > 0] for unit in coder.units]).astype(np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.widths)])
        live = [int((unit.bits > 0).sum()) for unit in coder.units]
        self.first = np.concatenate([[0], np.cumsum(live)]).tolist()
        self.live = live
        self.scales = [groups_of(n) if coder.gain == "log" else 1 for n in live]
        self.scale_at = np.concatenate([[0], np.cumsum(self.scales)]).tolist()

    def table(self, name: str, make: Callable[[], NDArray[Any]]) -> Any:
        return kept(self.coder, name, self.xp, lambda: padded(make()))

    def books(self) -> tuple[Any, Any]:
        """All codebooks, one after the other, and where that of b bits begins."""
        sizes = [len(self.coder.codebooks.get(b, ())) for b in range(17)]
        return (
            self.table("books", lambda: np.concatenate([np.zeros(0, np.int32), *(p for _, p in sorted(self.coder.codebooks.items()))])),
            self.table("book starts", lambda: (np.cumsum(sizes) - sizes).astype(np.int32)),
        )  # fmt: skip

    @property
    def wide(self) -> bool:
        """Whether a decoded integer may have 2^31 or more, as wild codebooks do."""
        coder = self.coder
        most = max((int(np.abs(p.astype(np.int64)).max()) for p in coder.codebooks.values()), default=0)
        return max(most, 1 << 16) * (int(LOG_GAINS[-1]) if coder.gain == "log" else 1) >= 1 << 31


def _live(unit: FixedUnit) -> NDArray[np.int32]:
    return np.flatnonzero(unit.bits).astype(np.int32)


def _energies(unit: FixedUnit) -> NDArray[np.float64]:
    return np.asarray(unit.basis.energies[unit.bits > 0])


def encode(coder: FixedCoder, x: Any) -> list[Part]:
    """Stacked vectors (n, entries) -> side, codes."""
    return quantised(coder, [analyse(unit.basis, x) for unit in coder.units])


def quantised(coder: FixedCoder, coefficients: Sequence[Any]) -> list[Part]:
    """`encode`, from the coefficients y (n, columns) binary64 of each unit: the reference's bytes on every machine."""
    xp, n = namespace(*coefficients), len(coefficients[0])
    plan = _Plan(coder, xp)
    all_coded, units = plan.first[-1], len(coder.units)
    codes = xp.empty((n, max(1, all_coded)), np.uint16)
    norms, zeros = xp.zeros((n, units), np.uint16), xp.zeros((n, units), np.uint8)
    choices = xp.empty((n, max(1, plan.scale_at[-1])), np.uint8)
    unit_, one = np.float64(unit_of(coder.levels, coder.gain)), np.float64(unit_of(coder.levels))
    kind = np.int32(LEVELS.index(coder.levels))
    for i, (unit, own) in enumerate(zip(coder.units, coefficients)):
        if not n or (coder.gain == "log" and not plan.live[i]):
            continue
        columns = plan.table(f"live {i}", partial(_live, unit))
        bits = plan.table(f"live bits {i}", partial(np.compress, unit.bits > 0, unit.bits))
        sizes = (
            np.uint64(n),
            np.uint32(unit.basis.size),
            np.uint32(plan.live[i]),
            np.uint32(max(1, all_coded)),
            np.uint32(plan.first[i]),
        )
        y = xp.ascontiguousarray(own) if own.size else xp.zeros(1, np.float64)
        if coder.gain == "log":
            weights = plan.table(f"weights {i}", partial(_energies, unit))
            scales = plan.scales[i]
            launch(
                SOURCE["quantise_log"], *_halves(n * scales),
                (y, columns, bits, weights, *plan.books(), codes, choices, unit_, one, *sizes, np.uint32(scales),
                 np.uint32(plan.scale_at[-1]), np.uint32(plan.scale_at[i]), kind),
            )  # fmt: skip
        else:
            launch(
                SOURCE[f"quantise<{coder.gain.upper()}>"], *warps(n),
                (y, columns, bits, *plan.books(), codes, norms, zeros, unit_, one, *sizes, np.uint32(units), np.uint32(i),
                 np.int32(unit.bits.max(initial=0)), kind),
            )  # fmt: skip
    if not all_coded:
        return [_side(plan, norms, zeros, choices), bytes(-(-n * coder.token_bits // 8))]
    return [_side(plan, norms, zeros, choices), _packed(plan, "codes", codes, lambda: plan.widths)]


def _halves(jobs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid and block of LOG_LANES lanes a job."""
    block = warps(1)[1]
    return (-(-jobs * LOG_LANES // block[0]),), block


def _side(plan: _Plan, norms: Any, zeros: Any, choices: Any) -> bytes:
    gain, scales = plan.coder.gain, plan.scale_at[-1]
    if gain == "none":
        return b""
    if gain == "log":
        every = lambda: np.full(scales, gain_bits("log"), np.int64)  # noqa: E731
        return _packed(plan, "choices", choices.astype(np.uint16), every) if scales else b""
    offsets = host(zeros).tobytes() if gain == "range" else b""
    return host(norms).astype("<u2").tobytes() + offsets


def _packed(plan: _Plan, name: str, codes: Any, widths: Callable[[], NDArray[np.int64]]) -> bytes:
    """codes (n, k), the c-th of widths[c] bits, token after token, packed densely."""
    xp, (n, coded) = plan.xp, codes.shape
    ends = plan.table(f"ends of {name}", lambda: np.concatenate([[0], np.cumsum(widths())]).astype(np.int32))
    owners = plan.table(f"owners of {name}", lambda: np.repeat(np.arange(coded, dtype=np.int32), widths()))
    bits = n * int(widths().sum())
    words = xp.empty(-(-bits // 32), np.uint32)
    if bits:
        launch(
            SOURCE["pack"], (-(-words.size // 256),), (256,),
            (codes, owners, ends, words, np.uint64(n), np.uint64(words.size), np.uint32(coded)),
        )  # fmt: skip
    return host(words).astype("<u4").tobytes()[: -(-bits // 8)]


def decode(coder: FixedCoder, parts: list[Reader], tokens: int, width: int, xp: Any) -> Any:
    """Stacked vectors (tokens, width) from side and codes, in namespace `xp`. CorruptStream for parts that do not fit together."""
    _, stored, offsets, packed = coder.opened(parts, tokens)
    x = xp.empty((tokens, width), np.float64)
    if not tokens:
        return x
    plan = _Plan(coder, xp)
    scaled = coder.gain in ("max", "range")
    norms = device(stored.astype(np.uint16), xp) if scaled else None
    choices = device(padded(stored.astype(np.uint8)), xp) if coder.gain == "log" else xp.zeros(1, np.uint8)
    zeros = device(offsets.astype(np.uint8), xp)
    words = np.zeros(-(-packed.size // 4) + 1, "<u4")
    words.view(np.uint8)[: packed.size] = packed
    words = device(words.astype(np.uint32), xp)
    number = np.int64 if plan.wide else np.int32
    kernel = SOURCE["dequantise<long long>" if plan.wide else "dequantise<int>"]
    for i, unit in enumerate(coder.units):
        y = xp.empty((tokens, max(1, unit.basis.size)), number)
        live = unit.bits > 0
        ranks = np.where(live, np.cumsum(live) - 1, 0)
        at = np.where(live, plan.starts[plan.first[i] + ranks], 0) if live.any() else ranks
        if unit.basis.size:
            launch(
                kernel, *warps(tokens),
                (words, plan.table(f"bits {i}", partial(np.asarray, unit.bits)), plan.table(f"bit at {i}", partial(np.asarray, at, np.int32)),
                 plan.table(f"ranks {i}", partial(np.asarray, ranks, np.int32)), *plan.books(), choices, zeros, y, np.uint64(tokens),
                 np.uint32(unit.basis.size), np.uint32(coder.token_bits), np.uint32(plan.scale_at[-1]), np.uint32(plan.scale_at[i]),
                 np.uint32(len(coder.units)), np.uint32(i), np.int32(GAINS.index(coder.gain)), np.int32(LEVELS.index(coder.levels))),
            )  # fmt: skip
        synthesise(unit.basis, y, x, norms, i)
    return x
