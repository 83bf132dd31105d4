"""Entropy-coded coefficients as a segment. Kernel: gpu/kernels/attention_entropy.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu.arrays import words
from gpu.device_cache.bound import Magnitudes
from gpu.device_cache.segment import GOOD_SHARED, MOST_ROWS, MOST_SHARED, Frame, Segment, shared_floats, tile_stride
from gpu.device_cache.transform import Pairs, Stacked
from gpu.module import Kernel, Source
from gpu.resident import device, host
from reference import packing, rans
from reference.errors import CorruptStream
from reference.stream import Reader
from reference.transform_coding.codec import LayerCoder
from reference.transform_coding.entropy import MOST_CODE, NOT_CODED, EntropyCoder, block_tokens

__all__ = ["Entropy", "segment"]

_SOURCE = Source("attention_entropy.cu", ["attend_entropy"])
THREADS = 128


def segment(
    fitted: LayerCoder,
    coder: EntropyCoder,
    parts: list[Reader],
    tokens: int,
    where: dict[str, Any],
    dtypes: Any,
    xp: Any,
) -> Segment:
    """The coded tokens. CorruptStream for parts that do not fit together: the sizes here, the words by a first run of the kernel."""
    side, codes, escapes, low = parts
    size = coder.coefficients
    step = block_tokens(coder.block, size)
    blocks = -(-tokens // step)
    counts = escapes.array("<u4", blocks, "numbers of escapes").astype(np.int64)
    if 4 * int(counts.sum()) != escapes.remaining:
        escapes.fail(f"escapes: expected {int(counts.sum())} of 4 bytes, got {escapes.remaining} bytes")
    coded = rans.parse(codes, tokens * size, step * max(1, size))
    units = len(coder.units)
    if coder.classes > 1:
        flat = rans.decode(side, tokens * units, coder._rans[0], np.arange(units), block=step * units)
        classes = flat.reshape(tokens, units).astype(np.uint8)
    else:
        side.end("side")
        classes = np.zeros((tokens, units), np.uint8)
    each = np.zeros(tokens, np.int64)
    for i, unit in enumerate(coder.units):
        each += np.where(unit.tables != NOT_CODED, unit.shifts, 0).sum(axis=1, dtype=np.int64)[classes[:, i]]
    ends = np.concatenate([[0], np.cumsum(each)])
    bits = int(ends[-1])
    if low.remaining != -(-bits // 8):
        low.fail(f"low bits: expected {-(-bits // 8)} bytes, got {low.remaining}")
    packed = np.frombuffer(low.rest(), np.uint8)
    packing.check_padding(packed, bits, 1, low)
    start = escapes.offset
    values = escapes.array("<i4", int(counts.sum()), "escapes").astype(np.int32)
    if values.size and int(np.abs(values.astype(np.int64)).max()) > MOST_CODE:
        escapes.fail(f"escapes: expected at most {MOST_CODE}, got {int(np.abs(values.astype(np.int64)).max())}", start)
    escape_at = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    bit_at = ends[np.minimum(np.arange(blocks + 1) * step, tokens)].astype(np.int64)
    held = {
        "ends": np.concatenate([[0], coded.ends]).astype(np.uint32), "states": coded.states.astype(np.uint32).ravel(),
        "words": coded.words.astype(np.uint16), "classes": classes, "escapes": values, "escape_at": escape_at, "bit_at": bit_at,
        "low": np.concatenate([words(packed), np.zeros(1, np.uint32)]),
    }  # fmt: skip
    own = Entropy(xp, fitted, coder, tokens, where, held, coded.lanes, step, dtypes)
    if tokens:
        own.check(codes, coded.offsets[2])
    return own


class Entropy(Segment):
    """held: what a stream holds, block by block; its classes decoded, a byte each."""

    def __init__(
        self, xp: Any, fitted: LayerCoder, coder: EntropyCoder, tokens: int, where: dict[str, Any], held: dict[str, Any], lanes: int, step: int, rounded: Any
    ) -> None:  # fmt: skip
        heads, dim, value_dim = fitted.sizes
        stacked, size = Stacked(fitted, list(coder.units)), coder.coefficients
        columns = [(u, c) for u, unit in enumerate(coder.units) for c in range(unit.basis.size)]
        spans = [[_span(stacked, coder, head, side) for head in range(heads)] for side in (0, 1)]
        # keys are read in whole quads that begin at multiples of 4, none beyond what a tile has
        quads = max(1, *(_up(stop) - start // 4 for start, stop in spans[0]))
        widths = [4 * quads, max(1, *(stop - start for start, stop in spans[1]))]
        firsts = [
            [4 * min(start // 4, _up(size) - quads) for start, _ in spans[0]],
            [min(start, max(0, size - widths[1])) for start, _ in spans[1]],
        ]
        frames = [
            stacked.frame(side, [columns[first : first + widths[side]] for first in firsts[side]], widths[side])
            for side in (0, 1)
        ]
        made = frames[0] if fitted.rope is not None else None
        super().__init__(
            xp, heads, tokens, (dim, value_dim), **where, key_frame=None if made is not None else frames[0], value_frame=frames[1]
        )  # fmt: skip
        self.coder, self.fitted, self.made, self.rounded = coder, fitted, made, rounded
        self._size, self._lanes, self._step = size, lanes, step
        #: tokens of a block that are decoded at once: a multiple of what makes whole steps
        self._each = lanes // math.gcd(size, lanes)
        self._held = {
            name: device(one if one.size else np.zeros(1, one.dtype), xp)
            for name, one in ((name, np.ascontiguousarray(one).reshape(-1)) for name, one in held.items())
        }
        frame = Frame(np.zeros((heads, 1, 1)), np.zeros((heads, 1))) if made is None else made
        self._pairs = Pairs.of(None if made is None else fitted.rope, xp)
        sizes = [unit.basis.size for unit in coder.units]
        self._tables = [
            device(one, xp)
            for one in (
                np.stack(coder._with_certain.slots, axis=1).astype(np.uint32).ravel(),
                np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes),
                np.concatenate([unit.tables for unit in coder.units], axis=1).ravel(),
                np.concatenate([unit.shifts for unit in coder.units], axis=1).ravel(),
                coder._deltas.astype(np.int8).ravel(),
            )
        ]
        self._frame = [
            device(one, xp)
            for one in (
                np.array(firsts[1], np.int32), np.array(firsts[0], np.int32), frame.matrices.transpose(0, 2, 1).astype(np.float32), frame.means.astype(np.float32)
            )
        ]  # fmt: skip
        self._wrong = xp.zeros(1, np.uint32)
        self._together = 1

    def check(self, reader: Reader, offset: int) -> None:
        """CorruptStream unless the words of all blocks lead back to their first states: one query is asked, and its answer dropped."""
        self.attend(self.xp.zeros((self.kv_heads, 1, self.dims[0]), np.float32), None, 1.0)
        if int(host(self._wrong)[0]):
            raise CorruptStream(
                "codes: the words of a rANS block do not lead back to its first state, or it has other escapes", offset
            )

    def kernel(self) -> Kernel:
        return _SOURCE["attend_entropy"]

    def arguments(self) -> tuple[Any, ...]:
        held = self._held
        slots, unit_of, tables, shifts, deltas = self._tables
        numbers = (
            self._pairs.pairs, self._pairs.interleaved, 1 if self.made is None else self.made.columns, 1 if self.made is None else self.dims[0],
            self.made is not None, self._size, len(self.coder.units), self._lanes, self._step, self._together, self._each,
        )  # fmt: skip
        return (
            held["ends"], held["states"], held["words"], slots, held["classes"], unit_of, tables, shifts, deltas, held["escapes"],
            held["escape_at"], held["bit_at"], held["low"], self._wrong, *self._frame, self._pairs.frequencies, np.float32(self._pairs.scaling),
            *map(np.int32, numbers),
        )  # fmt: skip

    def tile_floats(self, tile: int) -> int:
        width = -(-self.dims[0] // 4) * 4
        made = tile_stride(self.heads_block * width) if self.made is not None else 0
        return tile * (tile_stride(self._size) + made)

    def plan(self, group_rows: int) -> tuple[int, int]:
        """As many heads as there is room for, since each decoding serves them all; then rows, then tokens."""
        blocks = -(-self.tokens // self._step)
        for most in (GOOD_SHARED, MOST_SHARED):
            for heads in sorted({-(-self.kv_heads // n) for n in (1, 2, 4, 8, 16, 32, self.kv_heads)}, reverse=True):
                for rows in (min(MOST_ROWS, group_rows), min(4, group_rows)):
                    for together in (16, 8, 4, 2, 1):
                        tile = together * self._each
                        if tile > 32 or together * self._lanes > THREADS or (together > blocks and together > 1):
                            continue
                        if most == GOOD_SHARED and tile < 8 and together < blocks:
                            continue
                        self.heads_block, self._together = heads, together
                        own = shared_floats(heads * -(-rows // 4), self.key_width, self.value_width, tile)
                        if 4 * (own + self.tile_floats(tile)) <= most:
                            return rows, tile
        self.heads_block = 1
        raise ValueError(
            f"stream: {self._size} coefficients a token, {self._each} tokens at once, do not fit into {MOST_SHARED} bytes of shared memory"
        )

    def splits(self, tile: int, others: int, least: int | None) -> tuple[int, tuple[np.generic, ...]]:
        del tile, others, least  # a split is what is decoded together
        blocks = -(-self.tokens // self._step)
        return -(-blocks // self._together), ()

    def arrays(self) -> list[Any]:
        return list(self._held.values())

    @property
    def table_bytes(self) -> int:
        return super().table_bytes + sum(int(one.nbytes) for one in (*self._tables, *self._frame))

    def behind(self, other: Segment) -> bool:
        return (
            self._plain(other)
            and self.tokens % self._step == 0
            and isinstance(other, Entropy)
            and self._lanes == other._lanes
        )

    def append(self, other: Entropy) -> None:
        """Block by block; low bits begin at a word again."""
        join, own, more = self.xp.concatenate, self._held, other._held
        blocks, ends = (
            self.tokens // self._step,
            {name: int(host(own[name][-1:])[0]) for name in ("ends", "escape_at", "bit_at")},
        )
        words_ = -(-ends["bit_at"] // 32)
        starts = {"ends": ends["ends"], "escape_at": ends["escape_at"], "bit_at": 32 * words_}
        if ends["ends"] + int(host(more["ends"][-1:])[0]) >= 1 << 32:
            raise ValueError("keys, values: expected fewer than 2^32 words of codes in one cache")
        sizes = {
            "words": ends["ends"],
            "escapes": ends["escape_at"],
            "low": words_,
            "states": blocks * self._lanes,
            "classes": self.tokens * len(self.coder.units),
        }
        for name, size in sizes.items():
            own[name] = join([own[name][:size], more[name]])
        for name, start in starts.items():
            own[name] = join([own[name][:blocks], more[name] + own[name].dtype.type(start)])
        super().append(other)

    def magnitudes(self, q: Any, scale: float, keys: Any, values: Any) -> Magnitudes:
        positions = self.positions
        where = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
        return Stacked(self.fitted, list(self.coder.units)).magnitudes(q, scale, keys, values, where, self.rounded)

    def work(self, each: int, least: int | None) -> tuple[int, int, int]:
        _, tile = self.plan(each)
        splits, _ = self.splits(tile, 1, least)
        tiles = -(-self._step // self._each)
        return tiles * tile, tiles, splits


def _up(columns: int) -> int:
    """Quads."""
    return -(-columns // 4)


def _span(stacked: Stacked, coder: EntropyCoder, head: int, side: int) -> tuple[int, int]:
    """First and last of the coefficients that make keys or values of a head, in the order of the stream."""
    ends = np.cumsum([0, *(unit.basis.size for unit in coder.units)])
    own = [u for u in stacked.touched(head, side) if coder.units[u].basis.size]
    return (int(ends[own[0]]), int(ends[own[-1] + 1])) if own else (0, 0)
