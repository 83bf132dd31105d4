"""Interleaved rANS: the entropy coder for what attention reads. Blocks are independent, and so are the lanes inside a block.

One lane (Duda 2013, arXiv 1311.2540; 32-bit state, 16-bit words, frequencies of 12 bits). State x in [2^16, 2^32); a symbol s has an
integer frequency f_s >= 1, sum_s f_s = 2^12, and c_s = sum_{r<s} f_r:

    encode s:  if x >= f_s 2^20:  write the low 16 bits of x;  x <- floor(x / 2^16)
               x <- 2^12 floor(x / f_s) + (x mod f_s) + c_s
    decode:    u <- x mod 2^12;   s: c_s <= u < c_s + f_s
               x <- f_s floor(x / 2^12) + u - c_s
               if x < 2^16:  x <- 2^16 x + next word

Each step undoes the other, the last symbol encoded is the first decoded; so the encoder runs backwards. It starts every lane at
x = 2^16, and a decoder that does not end there was given altered words.

Symbol i of a block belongs to lane i mod L. All lanes share one stream of words: at each step the lanes that need a word take the
next ones in the order of lanes, so that a warp knows its words by a prefix sum over one ballot.

    payload  =  lanes (1)  varint n  varint block  ends  states  words
    ends        uint32 for each block: words of all blocks up to and including it
    states      uint32 x L for each block: the encoder's last states, the decoder's first
    words       uint16 x ends[-1], block after block, each in the order of reading

Code length. With Phi = 16 words + log2 x, coding s raises Phi by log2(2^12 / f_s) + e with -.181 < e <= log2(17/16) = .0875 (x is at
least 16 f_s when s is put in, which bounds what the floors do), and e averages to near 0. So a block of n symbols takes

    bits = sum_i log2(2^12 / f_i) + sum_i e_i + sum_lanes (48 - log2 x_last),        16 < 48 - log2 x_last <= 32 for each lane

and 32 for its end: about 24 L + 32 bits a block are the price of random access.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference import packing
from reference.stream import Buffer, Reader, varint

__all__ = ["LANES", "TOTAL", "Coded", "Tables", "decode", "encode", "frequencies", "parse"]

LANES = (8, 32)
TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
LOW = 1 << 16
#: a longer block is refused: where all symbols are certain its length costs no bits, and only this bounds what is allocated
MOST_BLOCK = 1 << 16
MOST_FREQUENCIES = 1 << 24
_FREQUENCY_BITS = 13  # 0 ... 4096

Integers = NDArray[Any]


def frequencies(counts: ArrayLike) -> NDArray[np.int64]:
    """Integer frequencies of sum 2^12 for symbols that occur `counts` times, (symbols,): the code length of exactly those is least.

    A symbol that occurs gets at least 1, one that does not gets 0. ValueError for negative counts, none at all, or more than
    2^12 symbols that occur.
    """
    n = np.asarray(counts)
    if n.ndim != 1 or n.dtype.kind not in "iu":
        raise TypeError(f"counts: expected integers of shape (symbols,), got {n.dtype} of shape {n.shape}")
    if n.size and int(n.min()) < 0:
        raise ValueError(f"counts: expected numbers >= 0, got {int(n.min())}")
    seen = np.flatnonzero(n)
    if not 0 < seen.size <= TOTAL:
        raise ValueError(f"counts: expected 1 to {TOTAL} symbols that occur, got {seen.size}")
    weight = n[seen].astype(np.float64)
    f = np.maximum(1, np.floor(weight * (TOTAL / weight.sum()))).astype(np.int64)
    # sum_i n_i log2 f_i is concave in each f_i: the best single moves lead to the optimum
    gain = [(-w * np.log2((k + 1) / k), i) for i, (w, k) in enumerate(zip(weight, f))]
    loss = [(w * np.log2(k / (k - 1)) if k > 1 else np.inf, i) for i, (w, k) in enumerate(zip(weight, f))]
    heapq.heapify(gain)
    heapq.heapify(loss)

    def move(i: int, by: int) -> None:
        f[i] += by
        heapq.heappush(gain, (-weight[i] * np.log2((f[i] + 1) / f[i]), i))
        heapq.heappush(loss, (weight[i] * np.log2(f[i] / (f[i] - 1)) if f[i] > 1 else np.inf, i))

    def best(heap: list[Any], value: Any) -> tuple[float, int]:
        while heap[0][0] != value(heap[0][1]):  # outdated by a later move
            heapq.heappop(heap)
        return heap[0]

    def up() -> tuple[float, int]:
        return best(gain, lambda i: -weight[i] * np.log2((f[i] + 1) / f[i]))

    def down() -> tuple[float, int]:
        return best(loss, lambda i: weight[i] * np.log2(f[i] / (f[i] - 1)) if f[i] > 1 else np.inf)

    while f.sum() < TOTAL:
        move(up()[1], 1)
    while f.sum() > TOTAL:
        move(down()[1], -1)
    while seen.size > 1:
        more, fewer = up(), down()
        if more[1] == fewer[1] or -more[0] <= fewer[0] * (1 + 1e-12):
            break
        move(more[1], 1)
        move(fewer[1], -1)
    out = np.zeros(n.size, np.int64)
    out[seen] = f
    return out


@dataclass(frozen=True, eq=False)
class Tables:
    """Frequency tables (tables, symbols), integers of sum 2^12 in each; one of them codes each symbol. Read-only."""

    frequencies: NDArray[np.int64]

    def __post_init__(self) -> None:
        f = np.atleast_2d(np.asarray(self.frequencies))
        if f.ndim != 2 or f.dtype.kind not in "iu":
            raise TypeError(
                f"frequencies: expected integers of shape (tables, symbols), got {f.dtype} of shape {f.shape}"
            )
        f = f.astype(np.int64)
        wrong = np.flatnonzero((f.sum(axis=1) != TOTAL) | (f < 0).any(axis=1)) if f.size else np.zeros(1, np.int64)
        if wrong.size:
            raise ValueError(
                f"frequencies: expected numbers >= 0 of sum {TOTAL} in each table, not so in table {wrong[0]}"
            )
        if max(f.shape) > LOW or f.size > MOST_FREQUENCIES:
            raise ValueError(
                f"frequencies: expected at most {LOW} tables or symbols, {MOST_FREQUENCIES} in all, got {f.shape}"
            )
        f.flags.writeable = False
        object.__setattr__(self, "frequencies", f)

    @property
    def count(self) -> int:
        return int(self.frequencies.shape[0])

    @property
    def symbols(self) -> int:
        return int(self.frequencies.shape[1])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """c_s, (tables, symbols)."""
        return np.cumsum(self.frequencies, axis=1) - self.frequencies

    @cached_property
    def slots(self) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        """For each table and u in 0 ... 2^12 - 1, flat: the symbol s with c_s <= u < c_s + f_s; and 2^12 f_s + u - c_s."""
        every, f = np.tile(np.arange(self.symbols), self.count), self.frequencies.ravel()
        rest = np.tile(np.arange(TOTAL), self.count) - np.repeat(self.starts.ravel(), f)
        return np.repeat(every, f).astype(np.uint16), (np.repeat(f, f) * TOTAL + rest).astype(np.uint32)

    def write(self) -> bytes:
        """varint tables, varint symbols, then all frequencies in 13 bits each."""
        return varint(self.count) + varint(self.symbols) + packing.pack(self.frequencies, _FREQUENCY_BITS)

    @classmethod
    def read(cls, reader: Reader, count: int) -> Tables:
        """The inverse of `write`, of exactly `count` tables: 2^12 slots each are allocated where they are used, so let a codec say."""
        start = reader.offset
        if (found := reader.varint("number of tables")) != count:
            reader.fail(f"number of tables: expected {count}, got {found}", start)
        symbols = reader.varint("number of symbols", LOW)
        size = packing.packed_size(count * symbols, _FREQUENCY_BITS)
        f = packing.unpack(reader.part(size, "frequency tables"), count * symbols, _FREQUENCY_BITS).reshape(
            count, symbols
        )
        try:
            return cls(f)
        except ValueError as problem:
            reader.fail(str(problem), start)

    def ideal_bits(self, symbols: ArrayLike, contexts: ArrayLike | None = None) -> float:
        """sum_i log2(2^12 / f_i): the code length of `symbols` (n,) under their tables; inf if one has frequency 0."""
        s = np.asarray(symbols).reshape(-1)
        f = self.frequencies[np.resize(_contexts(contexts, self), s.size), s].astype(np.float64)
        with np.errstate(divide="ignore"):
            return float(np.sum(TOTAL_BITS - np.log2(f)))


def _contexts(contexts: ArrayLike | None, tables: Tables) -> NDArray[np.int64]:
    c = np.zeros(1, np.int64) if contexts is None else np.asarray(contexts)
    if c.ndim != 1 or c.size == 0 or c.dtype.kind not in "iu":
        raise TypeError(f"contexts: expected integers of shape (period,), got {c.dtype} of shape {c.shape}")
    if not (int(c.min()) >= 0 and int(c.max()) < tables.count):
        raise ValueError(
            f"contexts: expected numbers of tables, 0 to {tables.count - 1}, got {int(c.min())} to {int(c.max())}"
        )
    return c.astype(np.int64)


def _check(block: int, lanes: int) -> None:
    if lanes not in LANES:
        raise ValueError(f"lanes: expected {LANES[0]} or {LANES[1]}, got {lanes!r}")
    if not 1 <= block <= MOST_BLOCK:
        raise ValueError(f"block: expected 1 to {MOST_BLOCK} symbols, got {block!r}")


def encode(
    symbols: ArrayLike,
    tables: Tables,
    contexts: ArrayLike | None = None,
    *,
    block: int = 8192,
    lanes: int = 32,
    own: bool = False,
) -> bytes:
    """The payload of `symbols` (n,), 0 <= symbol < tables.symbols.

    contexts (period,): symbol i of each block is coded by table contexts[i mod period]; None: all by table 0; own=True: (n,), each
    symbol's own table, which the decoder must know from elsewhere. Symbols of one
    block are decoded together, blocks apart. ValueError names a symbol without a frequency in its table, and its place.
    """
    _check(block, lanes)
    s = np.asarray(symbols).reshape(-1)
    if s.size and s.dtype.kind not in "iu":
        raise TypeError(f"symbols: expected integers, got {s.dtype}")
    if s.size and not (int(s.min()) >= 0 and int(s.max()) < tables.symbols):
        raise ValueError(f"symbols: expected 0 to {tables.symbols - 1}, got {int(s.min())} to {int(s.max())}")
    n = s.size
    blocks, steps = -(-n // block), -(-min(block, max(n, 1)) // lanes)
    c = _contexts(contexts, tables) if n or not own else np.zeros(1, np.int64)
    if own and c.size != max(n, 1):
        raise ValueError(f"contexts: expected one for each of {n} symbols, got {c.size}")
    # where nothing is left to code stands a certain symbol (f = 2^12, c = 0), which changes no state
    f_of = np.append(tables.frequencies.ravel(), TOTAL).astype(np.uint32)
    c_of = np.append(tables.starts.ravel(), 0).astype(np.uint32)
    if own:
        s_of, base = s + c[:n] * tables.symbols, np.zeros(block, np.int64)
    else:
        s_of, base = s, np.resize(c, block) * tables.symbols
    entries = _by_step(s_of, base, blocks, steps, lanes, nothing=f_of.size - 1)
    if entries.size and int(np.take(f_of, entries).min()) == 0:
        table = c if own else np.resize(np.resize(c, block), n)
        at = int(np.argmax(f_of[table * tables.symbols + s] == 0))
        raise ValueError(f"symbols: symbol {s[at]} at {at} has frequency 0 in table {table[at]}")
    x = np.full((blocks, lanes), LOW, np.uint32)
    room = steps * lanes
    buffer: NDArray[np.uint16] = np.empty(blocks * room, "<u2")
    begin = np.arange(blocks) * room  # of each block in the buffer
    left = np.full(blocks, room)  # words fill a block's room from its end
    for t in range(steps - 1, -1, -1):
        f, c = np.take(f_of, entries[t]), np.take(c_of, entries[t])
        full = (x >> np.uint32(20)) >= f
        rank = np.cumsum(full, axis=1)
        left -= rank[:, -1]
        buffer[((begin + left)[:, None] + rank - 1)[full]] = x[full].astype(np.uint16)  # the low 16 bits
        x = np.where(full, x >> np.uint32(16), x)
        q = x // f
        x = (q << np.uint32(TOTAL_BITS)) + (x - q * f) + c
    words = buffer.reshape(blocks, room)[np.arange(room) >= left[:, None]]
    ends = np.cumsum(room - left)
    if blocks and int(ends[-1]) >= 1 << 32:
        raise ValueError(
            f"symbols: expected fewer than 2^32 words in one payload, got {int(ends[-1])}; code fewer at once"
        )
    head = bytes([lanes]) + varint(n) + varint(block)
    return b"".join((head, ends.astype("<u4").tobytes(), x.astype("<u4").tobytes(), words.tobytes()))


def _by_step(
    symbols: Integers, base: NDArray[np.int64], blocks: int, steps: int, lanes: int, nothing: int
) -> NDArray[np.int32]:
    """symbols (n,) + base (block,) -> (steps, blocks, lanes): what each lane of each block takes at each step, else `nothing`."""
    block = base.size
    rows = np.full((blocks, steps * lanes), nothing, np.int32)
    whole = symbols.size // block
    if whole:
        rows[:whole, :block] = symbols[: whole * block].reshape(whole, block)
        rows[:whole, :block] += base.astype(np.int32)
    rest = symbols[whole * block :]
    rows[whole : whole + 1, : rest.size] = rest + base[: rest.size]
    return np.ascontiguousarray(rows.reshape(blocks, steps, lanes).transpose(1, 0, 2))


@dataclass(frozen=True, eq=False)
class Coded:
    """A payload, taken apart but not decoded. offsets: of ends, states and words in the whole stream."""

    count: int
    block: int
    lanes: int
    ends: NDArray[np.int64]
    states: NDArray[np.uint32]
    words: NDArray[np.uint16]
    reader: Reader
    offsets: tuple[int, int, int]

    @property
    def blocks(self) -> int:
        return len(self.ends)

    def growing(self) -> Iterator[tuple[int, int]]:
        """(first, last) of runs of blocks: a wrong one is found before much is made of those behind it.

        A run has up to 8 symbols for each of its bytes, as those of a bit each have, or up to 7 times the blocks before it.
        """
        first = 0
        paid = 8 * (2 * self.ends + 4 * (1 + self.lanes) * np.arange(1, self.blocks + 1))
        while first < self.blocks:
            own = paid[first:] - (paid[first - 1] if first else 0)
            enough = np.flatnonzero(self.block * np.arange(1, len(own) + 1) <= own)
            last = min(self.blocks, max(1, 8 * first, first + 1 + int(enough.max(initial=-1))))
            yield first, last
            first = last

    def decode(
        self,
        tables: Tables,
        contexts: ArrayLike | None = None,
        first: int = 0,
        last: int | None = None,
        *,
        own: bool = False,
    ) -> NDArray[np.uint16]:
        """The symbols of blocks first ... last - 1 (default all), (n,) uint16; `tables`, `contexts` and `own` as for `encode`.

        own=True: contexts of the symbols of these blocks.

        CorruptStream if a block runs out of words, leaves some, or does not end in the state in which its encoder began.
        """
        last = self.blocks if last is None else last
        if not 0 <= first <= last <= self.blocks:
            raise ValueError(f"first, last: expected 0 <= first <= last <= {self.blocks}, got {first}, {last}")
        blocks, lanes = last - first, self.lanes
        length = min(self.block, self.count)
        steps = -(-length // lanes)
        symbol_of, step_of = tables.slots
        x = self.states[first:last].astype(np.uint32)
        at = self.ends[first:last] - np.diff(self.ends, prepend=0)[first:last]
        limit = self.ends[first:last]
        sizes = np.minimum(self.block, self.count - self.block * np.arange(first, last))
        words = np.append(self.words, np.uint16(0)).astype(
            np.uint32
        )  # a block that has run out reads the 0, and is found out below
        slots = np.zeros((steps, blocks, lanes), np.uint32)
        count = int(sizes.sum()) if blocks else 0
        c = _contexts(contexts, tables) if count or not own else np.zeros(1, np.int64)
        if own and c.size != max(count, 1):
            raise ValueError(f"contexts: expected one for each of {count} symbols, got {c.size}")
        # (steps, blocks or 1, lanes): where each symbol's table begins
        if own:
            base = _by_step(c[:count] * TOTAL, np.zeros(max(self.block, 1), np.int64), blocks, steps, lanes, 0).astype(
                np.uint32
            )
        else:
            base = np.zeros((steps * lanes), np.uint32)
            base[:length] = np.resize(c, max(self.block, 1))[:length] * TOTAL
            base = base.reshape(steps, 1, lanes)
        least = int(sizes.min(initial=length))
        for t in range(steps):
            slot = np.bitwise_and(x, TOTAL - 1, out=slots[t])
            slot += base[t]
            step = np.take(step_of, slot)
            new = (step >> np.uint32(TOTAL_BITS)) * (x >> np.uint32(TOTAL_BITS)) + (step & np.uint32(TOTAL - 1))
            # lanes behind the end of a block rest
            x = new if (t + 1) * lanes <= least else np.where(t * lanes + np.arange(lanes) < sizes[:, None], new, x)
            hungry = x < LOW
            rank = np.cumsum(hungry, axis=1)
            taken = np.take(words, at[:, None] + rank - 1, mode="clip")
            x = np.where(hungry, (x << np.uint32(16)) | taken, x)
            at = at + rank[:, -1]
        wrong = (at != limit) | (x != LOW).any(axis=1)
        if wrong.any():
            bad = first + int(np.argmax(wrong))
            start = int(self.ends[bad - 1]) if bad else 0
            self.reader.fail(
                f"rANS block {bad}: its words do not lead back to the first state", self.offsets[2] + 2 * start
            )
        rows = np.take(symbol_of, slots).transpose(1, 0, 2).reshape(blocks, steps * lanes)
        return rows[:, :length].reshape(-1) if least == length else rows[np.arange(steps * lanes) < sizes[:, None]]


def parse(data: Buffer | Reader, count: int, block: int | None = None) -> Coded:
    """The payload of exactly `count` symbols, in blocks of `block` (None: whatever it says), taken apart.

    CorruptStream if its sizes contradict each other, the bytes, or what is expected.
    """
    reader = data if isinstance(data, Reader) else Reader(data)
    start = reader.offset
    lanes = reader.u8("lanes")
    if lanes not in LANES:
        reader.fail(f"lanes: expected {LANES[0]} or {LANES[1]}, got {lanes}", start)
    start = reader.offset
    if (n := reader.varint("number of symbols")) != count:
        reader.fail(f"number of symbols: expected {count}, got {n}", start)
    start = reader.offset
    size = reader.varint("symbols a block", MOST_BLOCK)
    if size == 0 or (block is not None and size != block):
        reader.fail(f"symbols a block: expected {block or 'at least 1'}, got {size}", start)
    blocks = -(-n // size)
    at_ends = reader.offset
    ends = reader.array("<u4", blocks, "ends of the blocks").astype(np.int64)
    at_states = reader.offset
    states = reader.array("<u4", blocks * lanes, "states").reshape(blocks, lanes)
    at_words = reader.offset
    if (np.diff(ends, prepend=0) < 0).any() or 2 * int(ends[-1] if blocks else 0) != reader.remaining:
        reader.fail(f"ends of the blocks: expected them to ascend to {reader.remaining / 2:g} words", at_ends)
    if (states < LOW).any():
        reader.fail(
            f"states: expected at least {LOW}, got {int(states.min())}", at_states + 4 * int(np.argmax(states < LOW))
        )
    words = reader.array("<u2", reader.remaining // 2, "words")
    return Coded(n, size, lanes, ends, states, words, reader, (at_ends, at_states, at_words))


def decode(
    data: Buffer | Reader,
    count: int,
    tables: Tables,
    contexts: ArrayLike | None = None,
    *,
    block: int | None = None,
    own: bool = False,
) -> NDArray[np.uint16]:
    """All `count` symbols of a payload of `encode`, (count,) uint16; CorruptStream for one that is none."""
    coded = parse(data, count, block)
    if own or coded.blocks < 2:
        return coded.decode(tables, contexts, own=own)
    return np.concatenate([coded.decode(tables, contexts, *run) for run in coded.growing()])
