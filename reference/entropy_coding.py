"""Entropy coders for what only a CPU reads: constriction's range coder, and DEFLATE.

constriction takes floats for probabilities, decodes truncated or foreign words without an error, and panics on some. So it is
wrapped: probabilities are integer frequencies over 2^12 (exact as floats, whatever the platform), the number of symbols is known to
the reader, a CRC-32 of the symbols is kept, and whatever it raises is CorruptStream.

DEFLATE is zlib's (RFC 1950); its length is checked while it runs, so that no input blows up. The *compressed* bytes may differ between
builds of zlib; what they decompress to does not.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.rans import TOTAL, Tables
from reference.stream import Buffer, Reader

__all__ = ["TokenDecoder", "TokenEncoder", "deflate", "inflate", "range_decode", "range_encode"]


def _constriction() -> Any:
    try:
        import constriction
    except ImportError:
        raise ImportError("range coding needs the package constriction: pip install kvtheory") from None
    return constriction


def _models(tables: Tables) -> list[Any]:
    # exact: multiples of 2^-12 that sum to 1; perfect=False is plain fixed-point rounding of the cumulative sums
    model = _constriction().stream.model.Categorical
    return [model(row / TOTAL, perfect=False) for row in tables.frequencies]


def _used(contexts: ArrayLike | None, count: int, tables: Tables) -> NDArray[np.int64]:
    if contexts is None:
        return np.zeros(count, np.int64)
    return np.resize(np.asarray(contexts), count).astype(np.int64)


def range_encode(symbols: ArrayLike, tables: Tables, contexts: ArrayLike | None = None) -> bytes:
    """CRC-32 of the symbols as uint16, then constriction's range-coded words, uint32 each.

    symbols (n,), each below tables.symbols and of positive frequency; contexts (period,) as in `rans.encode`. Tables of one symbol
    take no words.
    """
    s = np.asarray(symbols).reshape(-1).astype(np.int64)
    if s.size and not (int(s.min()) >= 0 and int(s.max()) < tables.symbols):
        raise ValueError(f"symbols: expected 0 to {tables.symbols - 1}, got {int(s.min())} to {int(s.max())}")
    if tables.ideal_bits(s, contexts) == np.inf:
        raise ValueError("symbols: one has frequency 0 in its table")
    checksum = zlib.crc32(s.astype("<u2").tobytes()).to_bytes(4, "little")
    encoder = _constriction().stream.queue.RangeEncoder()
    if tables.symbols > 1:
        models = _models(tables)
        for start, stop, table in _runs(_used(contexts, s.size, tables)):
            encoder.encode(s[start:stop].astype(np.int32), models[table])
    return checksum + encoder.get_compressed().astype("<u4").tobytes()


def range_decode(
    data: Buffer | Reader, count: int, tables: Tables, contexts: ArrayLike | None = None
) -> NDArray[np.uint16]:
    """The `count` symbols of `range_encode`, (count,) uint16. CorruptStream if the words are not theirs, or the checksum is not."""
    reader = data if isinstance(data, Reader) else Reader(data)
    start = reader.offset
    checksum = int.from_bytes(reader.take(4, "checksum of the symbols"), "little")
    if reader.remaining % 4:
        reader.fail(f"range-coded words: expected a multiple of 4 bytes, got {reader.remaining}")
    words = reader.array("<u4", reader.remaining // 4, "range-coded words").astype(np.uint32)
    out = np.zeros(count, np.uint16)
    if tables.symbols > 1:
        # BaseException: a panic of the Rust code is no Exception; what the caller pressed or ended passes through
        try:
            decoder = _constriction().stream.queue.RangeDecoder(words)
            models = _models(tables)
            for first, last, table in _runs(_used(contexts, count, tables)):
                out[first:last] = decoder.decode(models[table], last - first)
            exhausted = decoder.maybe_exhausted()
        except (ImportError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as problem:
            reader.fail(f"range-coded words: {type(problem).__name__} in constriction", start + 4)
        if not exhausted:
            reader.fail("range-coded words: some are left over", start + 4)
    elif words.size:
        reader.fail("range-coded words: expected none for one symbol", start + 4)
    if zlib.crc32(out.astype("<u2").tobytes()) != checksum:
        reader.fail("checksum of the range-coded symbols does not match", start)
    return out


class TokenEncoder:
    """Tokens one by one, each under a law of its own: integer weights (vocabulary,), or None for a uniform one.

    A weight of 0 costs 24 bits: constriction's smallest probability is 2^-24, and every token has at least that.
    """

    def __init__(self, vocabulary: int) -> None:
        self._uniform = _constriction().stream.model.Uniform(vocabulary)
        self._encoder = _constriction().stream.queue.RangeEncoder()

    def encode(self, token: int, weights: NDArray[np.int64] | None) -> None:
        self._encoder.encode(int(token), _law(weights, self._uniform))

    def check(self, bits: int) -> None:
        """A symbol of `bits` bits that is always 0."""
        self._encoder.encode(0, _constriction().stream.model.Uniform(1 << bits))

    def words(self) -> bytes:
        return bytes(self._encoder.get_compressed().astype("<u4").tobytes())


class TokenDecoder:
    """What `TokenEncoder` wrote, from all of a Reader; CorruptStream for anything else.

    constriction's `maybe_exhausted` passes over a surplus word, so what was decoded is encoded again beside: the words must be those.
    """

    def __init__(self, reader: Reader, vocabulary: int) -> None:
        self._reader, self._start = reader, reader.offset
        if reader.remaining % 4:
            reader.fail(f"range-coded words: expected a multiple of 4 bytes, got {reader.remaining}")
        words = reader.array("<u4", reader.remaining // 4, "range-coded words").astype(np.uint32)
        self._uniform = _constriction().stream.model.Uniform(vocabulary)
        self._words, self._again = words.astype("<u4").tobytes(), TokenEncoder(vocabulary)
        self._decoder = self._guarded(lambda: _constriction().stream.queue.RangeDecoder(words))

    def _guarded(self, what: Any) -> Any:
        try:
            return what()
        except (ImportError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as problem:  # a panic of the Rust code is no Exception
            self._reader.fail(f"range-coded words: {type(problem).__name__} in constriction", self._start)

    def decode(self, weights: NDArray[np.int64] | None) -> int:
        token = int(self._guarded(lambda: self._decoder.decode(_law(weights, self._uniform))))
        self._again.encode(token, weights)
        return token

    def check(self, bits: int, what: str) -> None:
        """CorruptStream unless the check symbol is 0."""
        found = self._guarded(lambda: self._decoder.decode(_constriction().stream.model.Uniform(1 << bits)))
        if found != 0:
            self._reader.fail(f"{what}: expected 0, got {found}", self._start)
        self._again.check(bits)

    def end(self) -> None:
        """CorruptStream unless these tokens and checks are written in these words."""
        if self._again.words() != self._words:
            self._reader.fail("range-coded words: these are not an encoder's, or some are left over", self._start)


def _law(weights: NDArray[np.int64] | None, uniform: Any) -> Any:
    if weights is None:
        return uniform
    # a quotient of two integers below 2^53 is rounded once, the same everywhere
    return _constriction().stream.model.Categorical(weights / int(weights.sum()), perfect=False)


def _runs(tables: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(start, stop, table) of each run of one table."""
    if tables.size == 0:
        return []
    edges = np.concatenate([[0], np.flatnonzero(np.diff(tables)) + 1, [tables.size]])
    return [(int(a), int(b), int(tables[a])) for a, b in itertools.pairwise(edges)]


def deflate(data: Buffer, level: int = 9) -> bytes:
    """zlib-compressed bytes; the reader must know len(data)."""
    return zlib.compress(data, level)


def inflate(data: Buffer | Reader, size: int) -> bytes:
    """Exactly `size` bytes from all of a zlib stream; CorruptStream for anything else. Allocates about `size` bytes at most."""
    reader = data if isinstance(data, Reader) else Reader(data)
    start = reader.offset
    # DEFLATE shrinks by 1032 at most: a larger size is refused before it is allocated
    if size > 1032 * reader.remaining:
        reader.fail(f"DEFLATE data: {reader.remaining} bytes cannot hold {size}", start)
    machine = zlib.decompressobj()
    try:
        out = machine.decompress(reader.rest(), size + 1)
    except zlib.error as problem:
        reader.fail(f"DEFLATE data: {problem}", start)
    if len(out) != size or not machine.eof or machine.unused_data:
        reader.fail(f"DEFLATE data: expected exactly {size} bytes and its end", start)
    return out
