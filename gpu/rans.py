"""Interleaved rANS on the GPU: the payloads of `reference.rans`, byte for byte, a group of lanes of a warp for each block.

Kernels: gpu/kernels/rans.cu. Sizes, states and ends of a payload are read and checked on the host, by `reference.rans.parse`; words that do
not lead back to the first state are found by the kernel, block by block, and are the reference's CorruptStream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gpu.module import Source, launch, namespace
from gpu.resident import device, host, kept
from reference import rans
from reference.rans import LANES, Coded, Tables, parse
from reference.stream import Buffer, Reader, varint

__all__ = ["decode", "decode_blocks", "encode"]

THREADS = 128
GATHER_THREADS = 128

_SOURCE = Source(
    "rans.cu",
    [f"{kernel}<{lanes}, {own}>" for kernel in ("encode", "decode") for lanes in LANES for own in ("false", "true")]
    + ["gather"],
)


def encode(
    symbols: Any,
    tables: Tables,
    contexts: Any = None,
    *,
    block: int = 8192,
    lanes: int = 32,
    own: bool = False,
) -> bytes:
    """The payload of `symbols` (n,), integers in a NumPy or a CuPy array: as `reference.rans.encode`, errors included.

    contexts: (period,) on the host, or with own=True (n,), each symbol's own table, where the symbols are.
    """
    rans._check(block, lanes)
    xp = namespace(symbols) if hasattr(symbols, "dtype") else np
    s = xp.asarray(symbols).reshape(-1)
    if s.size and s.dtype.kind not in "iu":
        raise TypeError(f"symbols: expected integers, got {s.dtype}")
    n = int(s.size)
    if n:
        _within(s, tables)
    c = _contexts(contexts, tables, xp, own) if n or not own else xp.zeros(1, np.uint16)
    if own and int(c.size) != max(n, 1):
        raise ValueError(f"contexts: expected one for each of {n} symbols, got {c.size}")
    return encode_checked(s.astype(np.uint16), tables, c, block=block, lanes=lanes, own=own)


def _within(symbols: Any, tables: Tables) -> None:
    least, most = int(symbols.min()), int(symbols.max())
    if not (least >= 0 and most < tables.symbols):
        raise ValueError(f"symbols: expected 0 to {tables.symbols - 1}, got {least} to {most}")


def _contexts(contexts: Any, tables: Tables, xp: Any, own: bool) -> Any:
    """Contexts as the kernels take them, uint16 in namespace `xp`; errors as the reference's."""
    if xp is np or not own:
        return device(rans._contexts(contexts, tables).astype(np.uint16), xp)
    c = xp.asarray(contexts)
    if c.ndim != 1 or c.size == 0 or c.dtype.kind not in "iu":
        raise TypeError(f"contexts: expected integers of shape (period,), got {c.dtype} of shape {c.shape}")
    least, most = int(c.min()), int(c.max())
    if not (least >= 0 and most < tables.count):
        raise ValueError(f"contexts: expected numbers of tables, 0 to {tables.count - 1}, got {least} to {most}")
    return xp.ascontiguousarray(c.astype(np.uint16))


def encode_checked(symbols: Any, tables: Tables, contexts: Any, *, block: int, lanes: int, own: bool) -> bytes:
    """`encode` of symbols (n,) and contexts that are known to be in range, both uint16 and contiguous in one namespace.

    ValueError for a symbol without a frequency in its table, and for 2^32 words or more.
    """
    xp = namespace(symbols)
    n = int(symbols.size)
    blocks, steps = -(-n // block), -(-min(block, max(n, 1)) // lanes)
    head = bytes([lanes]) + varint(n) + varint(block)
    if n == 0:
        return head
    entries = kept(tables, "entries", xp, lambda: (tables.frequencies | tables.starts << 16).astype(np.uint32).ravel())
    room = steps * lanes
    buffer = xp.empty(blocks * room, np.uint16)
    used, states = xp.empty(blocks, np.uint32), xp.empty(blocks * lanes, np.uint32)
    wrong = xp.full(1, n, np.uint64)
    launch(
        _SOURCE[f"encode<{lanes}, {str(own).lower()}>"], (-(-blocks * lanes // THREADS),), (THREADS,),
        (symbols, contexts, entries, buffer, used, states, wrong,
         np.uint64(n), np.uint32(contexts.size), np.uint32(tables.symbols), np.uint32(block), np.uint32(blocks), np.uint32(room)),
    )  # fmt: skip
    if (at := int(host(wrong)[0])) < n:
        table = int(host(contexts[at : at + 1])[0]) if own else int(host(contexts)[at % block % contexts.size])
        symbol = int(host(symbols[at : at + 1])[0])
        raise ValueError(f"symbols: symbol {symbol} at {at} has frequency 0 in table {table}")
    ends = np.cumsum(host(used), dtype=np.int64)
    if int(ends[-1]) >= 1 << 32:
        raise ValueError(
            f"symbols: expected fewer than 2^32 words in one payload, got {int(ends[-1])}; code fewer at once"
        )
    words = xp.empty(int(ends[-1]), np.uint16)
    if words.size:
        starts = device((ends - host(used)).astype(np.uint32), xp)
        launch(_SOURCE["gather"], (blocks,), (GATHER_THREADS,), (buffer, used, starts, words, np.uint32(room)))
    coded = (ends.astype("<u4"), host(states).astype("<u4"), host(words).astype("<u2"))
    return b"".join([head, *(array.tobytes() for array in coded)])


def decode_blocks(
    coded: Coded,
    tables: Tables,
    contexts: Any = None,
    first: int = 0,
    last: int | None = None,
    *,
    own: bool = False,
    xp: Any = np,
) -> Any:
    """The symbols of blocks first ... last - 1 of a payload that was taken apart, (n,) uint16 in namespace `xp`.

    As `reference.rans.Coded.decode`: own=True has contexts of the symbols of these blocks, in namespace `xp`; CorruptStream names the
    first block that runs out of words, leaves some, or does not end in the state in which its encoder began.
    """
    last = coded.blocks if last is None else last
    if not 0 <= first <= last <= coded.blocks:
        raise ValueError(f"first, last: expected 0 <= first <= last <= {coded.blocks}, got {first}, {last}")
    blocks = last - first
    count = min(coded.count, last * coded.block) - first * coded.block if blocks else 0
    c = _contexts(contexts, tables, xp, own) if count or not own else xp.zeros(1, np.uint16)
    if own and int(c.size) != max(count, 1):
        raise ValueError(f"contexts: expected one for each of {count} symbols, got {c.size}")
    symbols = xp.empty(count, np.uint16)
    if not count:
        return symbols
    bounds = np.concatenate([coded.ends[first - 1 : first] if first else [0], coded.ends[first:last]]).astype(np.int64)
    # at least one word, so that there is memory to point at
    words = coded.words[bounds[0] : bounds[-1]].astype(np.uint16) if bounds[-1] > bounds[0] else np.zeros(1, np.uint16)
    states = coded.states[first:last].astype(np.uint32).ravel()
    wrong = xp.full(1, blocks, np.uint32)
    launch(
        _SOURCE[f"decode<{coded.lanes}, {str(own).lower()}>"], (-(-blocks * coded.lanes // THREADS),), (THREADS,),
        (device((bounds - bounds[0]).astype(np.uint32), xp), device(states, xp), device(words, xp), c,
         kept(tables, "slots", xp, lambda: np.stack(tables.slots, axis=1).astype(np.uint32)), symbols, wrong,
         np.uint64(count), np.uint32(c.size), np.uint32(coded.block), np.uint32(blocks)),
    )  # fmt: skip
    if (at := int(host(wrong)[0])) < blocks:
        start = int(coded.ends[first + at - 1]) if first + at else 0
        coded.reader.fail(
            f"rANS block {first + at}: its words do not lead back to the first state", coded.offsets[2] + 2 * start
        )
    return symbols


def decode(
    data: Buffer | Reader,
    count: int,
    tables: Tables,
    contexts: ArrayLike | None = None,
    *,
    block: int | None = None,
    own: bool = False,
    xp: Any = np,
) -> Any:
    """All `count` symbols of a payload, (count,) uint16 in namespace `xp`; CorruptStream for one that is none.

    contexts: (period,) on the host; with own=True each symbol's own table, (count,) in namespace `xp`.
    """
    coded = parse(data, count, block)
    if own or coded.blocks < 2:
        return decode_blocks(coded, tables, contexts, own=own, xp=xp)
    runs = [decode_blocks(coded, tables, contexts, *run, xp=xp) for run in coded.growing()]
    return runs[0] if len(runs) == 1 else xp.concatenate(runs)
