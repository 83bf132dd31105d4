"""A segment of a cache: tokens coded alike, and how a kernel attends to them (gpu/kernels/attention.cuh).

A codec's keys may be held in a *frame*: numbers k' with k = A k' + mean, whatever codes give them. Then q . k = (A^T q) . k' + q . mean, so a query is
brought into the frame once, and sum_t p_t v_t = S sum_t p_t v'_t + mean sum_t p_t is brought out of it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device_cache.bound import Magnitudes
from gpu.module import Kernel, Source, element, launch
from gpu.resident import device
from reference.shape import Positions

__all__ = ["Frame", "Partial", "Segment", "combined", "shared_floats", "tile_stride"]

THREADS, WARPS, MOST_TILE, MOST_ROWS = 128, 4, 32, 16
#: bytes of shared memory that a block may have (sm_120), and that it should have, so that several blocks fit
MOST_SHARED, GOOD_SHARED = 99 << 10, 48 << 10
#: tokens of a split at least, and blocks that a GPU should be given at least: a few for each multiprocessor
LEAST_SPLIT, MOST_SPLITS, BLOCKS = 256, 4096, 1024
CAUSAL, POSITIONS, WEIGHTS, COUNTS = 1, 2, 4, 8

SOURCE = Source(
    "attention.cu", [*(f"project<{t}>" for t in ("float", "__half", "__nv_bfloat16")), "restore", "combine", "places"]
)


def tile_stride(width: int) -> int:
    """Floats from token to token in a tile."""
    return 4 * (-(-width // 4) | 1)


def shared_floats(row_blocks: int, key_width: int, value_width: int, tile: int) -> int:
    """Floats of shared memory ahead of the tiles: `Room` of attention.cuh."""
    width = -(-key_width // 4) * 4
    each = 4 * width + 4 * tile + 4 * value_width + 4 * WARPS * tile + 16
    return 2 * MOST_TILE + row_blocks * each + 2 * MOST_TILE


@dataclass(frozen=True)
class Frame:
    """matrices (heads or 1, channels, columns) float64 and means (heads or 1, channels) float64: x = matrix x' + mean."""

    matrices: NDArray[np.float64]
    means: NDArray[np.float64]

    @property
    def columns(self) -> int:
        return int(self.matrices.shape[2])


@dataclass(frozen=True)
class Partial:
    """Results of slots, for the rows of all KV heads: maxima, sums (slots, rows) and out (slots, rows, width), float32."""

    maxima: Any
    sums: Any
    out: Any


class Segment:
    """Tokens of a cache. A subclass has `kernel`, `arguments`, `tile_floats`; its arrays are on the device.

    index: which tokens of a decoded cache they are. positions: of the tokens, (tokens,), or by head (kv_heads, tokens). log_weights: None, or float32 (kv_heads, tokens or 1). counts: None, or how
    many tokens each head has, the first ones. key_frame, value_frame: None: channels as they are.
    """

    #: KV heads that one block takes; only codecs whose heads cannot be read apart have more than 1
    heads_block = 1
    #: element types of keys and values that a decoder rounds to and the kernel does not; None: it has the decoder's numbers
    rounded: tuple[np.dtype[Any], np.dtype[Any]] | None = None

    def __init__(
        self,
        xp: Any,
        kv_heads: int,
        tokens: int,
        dims: tuple[int, int],
        positions: Positions,
        log_weights: NDArray[np.float32] | None = None,
        counts: NDArray[np.int64] | None = None,
        key_frame: Frame | None = None,
        value_frame: Frame | None = None,
        index: slice | NDArray[np.int64] = slice(None),
    ) -> None:
        self.xp, self.kv_heads, self.tokens, self.dims = xp, kv_heads, tokens, dims
        self.key_frame, self.value_frame = key_frame, value_frame
        self.key_width = dims[0] if key_frame is None else key_frame.columns
        self.value_width = dims[1] if value_frame is None else value_frame.columns
        self.positions, self.log_weights, self.counts, self.index = positions, log_weights, counts, index
        self._flags = 0
        self._first = positions.start if isinstance(positions, range) else 0
        self._positions = self._weights = self._counts = self._nothing = xp.zeros(1, np.int64)
        if not isinstance(positions, range):
            self._positions, self._flags = device(positions.astype(np.int64), xp), self._flags | POSITIONS
        self._weights = xp.zeros(1, np.float32)
        if log_weights is not None:
            self._weights, self._flags = device(log_weights.astype(np.float32), xp), self._flags | WEIGHTS
        if counts is not None:
            self._counts, self._flags = device(counts.astype(np.int64), xp), self._flags | COUNTS
        self._frames = tuple(
            None if frame is None else (device(matrices, xp), device(frame.means.astype(np.float64), xp))
            for frame, matrices in ((key_frame, _analysis(key_frame)), (value_frame, _synthesis(value_frame)))
        )

    # -- what a codec says ---------------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        raise NotImplementedError

    def arguments(self) -> tuple[Any, ...]:
        """Arrays and numbers that the kernel takes first."""
        raise NotImplementedError

    def tile_floats(self, tile: int) -> int:
        """Floats of shared memory for a tile of so many tokens."""
        return tile * (tile_stride(self.key_width) + tile_stride(self.value_width))

    def arrays(self) -> list[Any]:
        """What is held of keys and values, in any element types."""
        raise NotImplementedError

    def magnitudes(
        self, q: NDArray[np.float64], scale: float, keys: NDArray[np.float64], values: NDArray[np.float64]
    ) -> Magnitudes:
        """For `error_bound`: of queries (query_heads, queries, head_dim), and what these tokens decode to, (kv_heads, tokens, dim)."""
        raise NotImplementedError

    def work(self, each: int, least: int | None) -> tuple[int, int, int]:
        """(tokens of a split, tiles of one, splits): how many times a number is rounded, for `each` rows of a head."""
        rows, tile = self.plan(each)
        splits, own = self.splits(tile, -(-self.kv_heads // self.heads_block) * -(-each // rows), least)
        longest = min(int(own[0]), self.tokens)
        return longest, -(-longest // tile), splits

    def splits(self, tile: int, others: int, least: int | None) -> tuple[int, tuple[np.generic, ...]]:
        """Number of splits, and what the kernel is told of them. others: blocks of the grid for one split. least: tokens of one, None: as is best."""
        if least is None:
            wanted = max(1, min(MOST_SPLITS, -(-BLOCKS // others)))
            least = max(LEAST_SPLIT, -(-self.tokens // wanted))
        own = -(-least // tile) * tile
        return -(-self.tokens // own), (np.int64(own),)

    def behind(self, other: Segment) -> bool:
        """Whether `other`, of the same codec and later tokens, can be held in the same arrays; then `append` does it."""
        del other
        return False

    def append(self, other: Any) -> None:
        """Its tokens behind these. Called where `behind` is true."""
        own, more = self.positions, other.positions
        if not (isinstance(own, range) and isinstance(more, range) and own.stop == more.start):
            self.positions = np.concatenate([np.asarray(own), np.asarray(more)]).astype(np.int64)
            self._positions, self._flags = device(self.positions, self.xp), self._flags | POSITIONS
        else:
            self.positions = range(own.start, more.stop)
        self.tokens += other.tokens
        self.index = slice(self.index.start, other.index.stop)  # type: ignore[union-attr]

    def _plain(self, other: Segment) -> bool:
        """Whether neither has weights or counts, or positions by head: those that were appended have none."""
        weighed = (self._flags | other._flags) & COUNTS
        by_head = not isinstance(self.positions, range) and self.positions.ndim == 2
        same = self.log_weights is other.log_weights is None or (
            self.log_weights is not None and other.log_weights is not None and self.log_weights.shape[1] == other.log_weights.shape[1] == 1
            and bool((self.log_weights == other.log_weights).all())
        )  # fmt: skip
        return not weighed and not by_head and same

    # -- what follows --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Of codes, scales and exact numbers, positions, weights and counts; frames and tables, which no token adds to, are apart."""
        own = [*self.arrays()]
        for flag, array in ((POSITIONS, self._positions), (WEIGHTS, self._weights), (COUNTS, self._counts)):
            if self._flags & flag:
                own.append(array)
        return sum(int(array.nbytes) for array in own)

    @property
    def table_bytes(self) -> int:
        return sum(int(array.nbytes) for pair in self._frames if pair is not None for array in pair)

    def visible_from(self) -> NDArray[np.int64]:
        """(kv_heads,): the position of each head's first token that has weight; 2^63 - 1 where it has none."""
        own = self.positions
        where = np.arange(own.start, own.stop) if isinstance(own, range) else own
        where = np.broadcast_to(where, (self.kv_heads, self.tokens))
        there = np.ones(where.shape, bool)
        if self.counts is not None:
            there &= np.arange(self.tokens) < self.counts[:, None]
        if self.log_weights is not None:
            there &= self.log_weights > -np.inf
        return np.where(there, where, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)

    def plan(self, group_rows: int) -> tuple[int, int]:
        """(rows of a block, tokens of a tile): as many as shared memory has room for. ValueError where it has none for any."""
        for most in (GOOD_SHARED, MOST_SHARED):
            for rows in (min(MOST_ROWS, group_rows), min(8, group_rows), min(4, group_rows)):
                for tile in self.tiles():
                    blocks = self.heads_block * -(-rows // 4)
                    floats = shared_floats(blocks, self.key_width, self.value_width, tile) + self.tile_floats(tile)
                    if 4 * floats <= most and (tile >= 8 or most == MOST_SHARED):
                        return rows, tile
        raise ValueError(
            f"stream: {type(self).__name__} of {self.key_width} and {self.value_width} numbers a token does not fit into {MOST_SHARED} bytes of shared memory"
        )

    def tiles(self) -> tuple[int, ...]:
        """Tokens that a tile may have, the best first."""
        return (32, 16, 8, 4, 2, 1)

    def attend(self, queries: Any, limits: Any, scale: float, least: int | None = None) -> Partial:
        """One slot, out of the frame. queries (query_heads, count, head_dim), contiguous; limits (count,) int64 or None, on the device."""
        xp, (query_heads, count, _) = self.xp, queries.shape
        each = query_heads // self.kv_heads * count
        rows, tile = self.plan(each)
        others = -(-self.kv_heads // self.heads_block) * -(-each // rows)
        splits, own = self.splits(tile, others, least)
        slots = Partial(*(xp.empty(shape, np.float32) for shape in (
            (splits, self.kv_heads * each), (splits, self.kv_heads * each), (splits, self.kv_heads * each, self.value_width)
        )))  # fmt: skip
        flags = self._flags | (0 if limits is None else CAUSAL)
        weights = (
            (0, 0) if self.log_weights is None else (self.log_weights.shape[1], int(self.log_weights.shape[1] > 1))
        )
        apart = not isinstance(self.positions, range) and self.positions.ndim == 2
        common = (
            self._in_frame(queries, scale, each), self._nothing if limits is None else limits, self._positions, self._weights, self._counts,
            slots.maxima, slots.sums, slots.out,
            *map(np.int64, (self.tokens, self._first, self.tokens if apart else 0, *weights)),
            *map(np.int32, (self.kv_heads, self.heads_block, each, count, rows, self.key_width, self.value_width, tile, flags, 0)),
        )  # fmt: skip
        blocks = self.heads_block * -(-rows // 4)
        floats = shared_floats(blocks, self.key_width, self.value_width, tile) + self.tile_floats(tile)
        grid = (splits, -(-self.kv_heads // self.heads_block), -(-each // rows))
        launch(self.kernel(), grid, (THREADS,), (*self.arguments(), *own, *common), shared_mem=4 * floats)
        return self._out_of_frame(combined(slots, xp), each)

    def _in_frame(self, queries: Any, scale: float, each: int) -> Any:
        """(rows, key width + 1), the last one q . mean; scaled."""
        xp, dim = self.xp, queries.shape[2]
        rows = queries.reshape(-1, dim)
        pair = self._frames[0]
        if pair is None:
            wide = rows.astype(np.float64) * scale
            return xp.ascontiguousarray(xp.concatenate([wide, xp.zeros((len(rows), 1))], axis=1).astype(np.float32))
        matrices, _ = pair
        out = xp.empty((len(rows), self.key_width + 1), np.float32)
        if out.size:
            launch(
                SOURCE[f"project<{element(rows.dtype)}>"], (-(-out.size // 256),), (256,),
                (rows, matrices, out, np.float64(scale), np.int64(len(rows)), np.int64(each), np.int32(dim), np.int32(self.key_width + 1),
                 np.int32(len(matrices) > 1)),
            )  # fmt: skip
        return out

    def _out_of_frame(self, one: Partial, each: int) -> Partial:
        pair = self._frames[1]
        if pair is None:
            return one
        matrices, means = pair
        rows, dim = one.out.shape[1], self.dims[1]
        out = self.xp.empty((1, rows, dim), np.float32)
        source = one.out if self.value_width else self.xp.zeros(1, np.float32)
        launch(
            SOURCE["restore"], (-(-out.size // 256),), (256,),
            (one.sums, source, matrices, means, out, np.int64(rows), np.int64(each), np.int32(self.value_width), np.int32(dim), np.int32(len(matrices) > 1)),
        )  # fmt: skip
        return Partial(one.maxima, one.sums, out)


def _analysis(frame: Frame | None) -> Any:
    """(heads, channels, columns + 1): the matrix, and the mean as one column more."""
    return None if frame is None else np.concatenate([frame.matrices, frame.means[..., None]], axis=2)


def _synthesis(frame: Frame | None) -> Any:
    """(heads, columns, channels), at least one number."""
    if frame is None:
        return None
    turned = np.ascontiguousarray(frame.matrices.transpose(0, 2, 1))
    return turned if turned.size else np.zeros((1, 1, 1))


def combined(slots: Partial, xp: Any, divide: bool = False) -> Partial:
    """All slots as one; divide: `out` by its sum, which makes it the output."""
    number, rows, width = slots.out.shape
    if number == 1 and not divide:
        return slots
    one = Partial(*(xp.empty(shape, np.float32) for shape in ((1, rows), (1, rows), (1, rows, max(1, width)))))
    source = slots.out if slots.out.size else xp.zeros(1, np.float32)
    launch(
        SOURCE["combine"], (rows,), (THREADS,),
        (slots.maxima, slots.sums, source, one.maxima, one.sums, one.out, np.int32(number), np.int64(rows), np.int32(width), np.int32(divide)),
    )  # fmt: skip
    return Partial(one.maxima, one.sums, one.out[..., :width])
