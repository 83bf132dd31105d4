"""Coefficients of fixed rate as a segment. Kernel: gpu/kernels/attention_fixed.cu."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import words
from gpu.device_cache.bound import Magnitudes
from gpu.device_cache.segment import Frame, Segment, tile_stride
from gpu.device_cache.transform import Pairs, Stacked
from gpu.module import Kernel, Source
from gpu.resident import device
from reference import packing
from reference.stream import Reader
from reference.transform_coding.codec import LayerCoder
from reference.transform_coding.fixed import GAINS, GROUP, LEVELS, FixedCoder

__all__ = ["Fixed", "segment"]

_SOURCE = Source("attention_fixed.cu", ["attend_fixed"])

Columns = list[list[tuple[int, int]]]


def segment(
    fitted: LayerCoder, coder: FixedCoder, parts: list[Reader], tokens: int, where: dict[str, Any], dtypes: Any, xp: Any
) -> Segment:
    """The coded tokens. CorruptStream for parts that do not fit together."""
    _, stored, offsets, packed = coder.opened(parts, tokens)
    stacked = Stacked(fitted, list(coder.units))
    heads, dim, value_dim = fitted.sizes
    columns, key_counts, value_first = _columns(stacked, coder)
    width = max(1, *map(len, columns))
    key_width = max(1, *key_counts)
    value_width = max(1, *(len(own) - first for own, first in zip(columns, value_first)))
    # a head with fewer columns is padded by some of no bits
    size = max(width, *(first + value_width for first in value_first))
    key_frame = stacked.frame(0, [own[:n] for own, n in zip(columns, key_counts)], key_width)
    value_frame = stacked.frame(1, [own[first:] for own, first in zip(columns, value_first)], value_width)
    scaled = coder.gain in ("max", "range")
    scales = stored.astype(np.uint16).reshape(-1)
    if not scaled:  # choices, as the stream packs them
        scales = np.frombuffer(packing.pack(stored.reshape(-1), 4), np.uint8)
    held = words(packed), scales, offsets.astype(np.uint8).reshape(-1) if coder.gain == "range" else None
    return Fixed(
        xp, heads, tokens, (dim, value_dim), **where, key_frame=None if fitted.rope is not None else key_frame, value_frame=value_frame,
        made=key_frame if fitted.rope is not None else None, coder=coder, fitted=fitted, columns=columns, value_first=value_first, size=size,
        held=held, rounded=dtypes,
    )  # fmt: skip


def _columns(stacked: Stacked, coder: FixedCoder) -> tuple[Columns, list[int], list[int]]:
    """Of each head its columns that have bits, those of keys alone first; how many its keys have; where those of its values begin."""
    columns, key_counts, value_first = [], [], []
    for head in range(stacked.fitted.kv_heads):
        sides = [set(stacked.touched(head, side)) for side in (0, 1)]
        groups = (sides[0] - sides[1], sides[0] & sides[1], sides[1] - sides[0])
        own = [[(u, int(c)) for u in sorted(group) for c in np.flatnonzero(coder.units[u].bits)] for group in groups]
        columns.append(own[0] + own[1] + own[2])
        key_counts.append(len(own[0]) + len(own[1]))
        value_first.append(len(own[0]))
    return columns, key_counts, value_first


class Fixed(Segment):
    """held: words of codes, scales or choices, zeros. made: the frame of keys before RoPE, which are made in it; None: queries go into it."""

    def __init__(self, *others: Any, made: Frame | None, coder: FixedCoder, fitted: LayerCoder, columns: Columns, value_first: list[int], size: int,
                 held: tuple[Any, ...], rounded: Any, **fields: Any) -> None:  # fmt: skip
        super().__init__(*others, **fields)
        xp, heads = self.xp, self.kv_heads
        self.coder, self.fitted, self.made, self.rounded, self._size = coder, fitted, made, rounded, size
        self._held = [None if one is None else device(one if one.size else np.zeros(1, one.dtype), xp) for one in held]
        table = _table(coder, columns, size)
        sizes = [len(coder.codebooks.get(b, ())) for b in range(17)]
        books = np.concatenate([np.zeros(1, np.int32), *(p for _, p in sorted(coder.codebooks.items()))]).astype(
            np.int32
        )
        frame = Frame(np.zeros((heads, 1, 1)), np.zeros((heads, 1))) if made is None else made
        self._pairs = Pairs.of(None if made is None else fitted.rope, xp)
        self._tables = [
            device(one, xp)
            for one in (
                table["bits"].astype(np.uint8), table["at"], table["unit"], table["choice"], books, (1 + np.cumsum(sizes) - sizes).astype(np.int32)
            )
        ]  # fmt: skip
        self._frame = [
            device(one, xp)
            for one in (
                np.array(value_first, np.int32), np.zeros(heads, np.int32), frame.matrices.transpose(0, 2, 1).astype(np.float32), frame.means.astype(np.float32)
            )
        ]  # fmt: skip
        self._choices = int(table["choices"])

    def kernel(self) -> Kernel:
        return _SOURCE["attend_fixed"]

    def arguments(self) -> tuple[Any, ...]:
        xp, coder = self.xp, self.coder
        words_, stored, zeros = self._held
        none16, none8 = xp.zeros(1, np.uint16), xp.zeros(1, np.uint8)
        scaled = coder.gain in ("max", "range")
        numbers = (
            self._pairs.pairs, self._pairs.interleaved, 1 if self.made is None else self.made.columns, self.dims[0] if self.made is not None else 1,
            self.made is not None, self._size, coder.token_bits, len(coder.units), self._choices, GAINS.index(coder.gain), LEVELS.index(coder.levels),
        )  # fmt: skip
        return (
            words_, *self._tables, stored if scaled else none16, stored if coder.gain == "log" else none8, none8 if zeros is None else zeros,
            *self._frame, self._pairs.frequencies, np.float32(self._pairs.scaling), *map(np.int32, numbers),
        )  # fmt: skip

    def tile_floats(self, tile: int) -> int:
        return tile * (tile_stride(self._size) + (tile_stride(self.dims[0]) if self.made is not None else 0))

    def arrays(self) -> list[Any]:
        words_, stored, zeros = self._held
        return [
            words_,
            *([stored] if self.coder.gain != "none" else []),
            *([zeros] if self.coder.gain == "range" else []),
        ]

    @property
    def table_bytes(self) -> int:
        return super().table_bytes + sum(int(one.nbytes) for one in (*self._tables, *self._frame))

    def behind(self, other: Segment) -> bool:
        choices = self._choices if self.coder.gain == "log" else 0
        return self._plain(other) and self.tokens * self.coder.token_bits % 32 == self.tokens * choices % 2 == 0

    def append(self, other: Fixed) -> None:
        units = len(self.coder.units)
        scales = self.tokens * self._choices // 2 if self.coder.gain == "log" else self.tokens * units
        for i, size in enumerate((self.tokens * self.coder.token_bits // 32, scales, self.tokens * units)):
            if (own := self._held[i]) is not None:
                self._held[i] = self.xp.concatenate([own[:size], other._held[i]])
        super().append(other)

    def magnitudes(self, q: Any, scale: float, keys: Any, values: Any) -> Magnitudes:
        positions = self.positions
        where = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
        return Stacked(self.fitted, list(self.coder.units)).magnitudes(q, scale, keys, values, where, self.rounded)


def _table(coder: FixedCoder, columns: Columns, size: int) -> dict[str, NDArray[Any]]:
    """Of each head's columns (heads, size): bits, where they begin among a token's bits, the unit, the scale of kind "log"; and all of these."""
    starts, choice_of, at, scales = {}, {}, 0, 0
    for u, unit in enumerate(coder.units):
        live = np.flatnonzero(unit.bits)
        for rank, column in enumerate(live.tolist()):
            starts[u, column], choice_of[u, column] = at, scales + rank // GROUP
            at += int(unit.bits[column])
        scales += -(-len(live) // GROUP)
    shape = (len(columns), size)
    out: dict[str, NDArray[Any]] = {name: np.zeros(shape, np.int32) for name in ("bits", "at", "unit", "choice")}
    for head, own in enumerate(columns):
        for j, (u, column) in enumerate(own):
            out["bits"][head, j] = coder.units[u].bits[column]
            out["at"][head, j], out["choice"][head, j], out["unit"][head, j] = (
                starts[u, column],
                choice_of[u, column],
                u,
            )
    out["choices"] = np.array(scales)
    return out
