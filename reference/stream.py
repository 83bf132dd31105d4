"""The container of every stream: what it is, who wrote it with which parameters and state, its parts, and a checksum.

    stream  =  magic (4)  body  CRC-32 of all before it (4)                    seal, unseal
    body    =  version (1)  kind (1)  codec  parameters  digest  payload       Header, write, read

All integers are little-endian; a varint is unsigned LEB128. docs/stream-format.md has every byte. The checksum is apart from the
content, so that a fuzzer reseals what it mutates and gets behind it: `seal(mutate(unseal(stream)))`.

`Reader` is how a decoder touches bytes: each read is checked against what remains before anything is allocated, and every failure
is CorruptStream with the offset in the whole stream.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtheory.checksums import crc32
from reference.errors import CorruptStream

__all__ = [
    "MAGIC",
    "VERSION",
    "Header",
    "Kind",
    "Reader",
    "digest",
    "join",
    "read",
    "seal",
    "split",
    "unseal",
    "varint",
    "write",
    "zigzag",
]

#: the first byte is no ASCII, so that no text is taken for a stream
MAGIC = b"\x93KVS"
#: of the format, see docs/stream-format.md. A reader reads this version and all before it, down to 1 (0 was the draft).
VERSION = 1
#: more layers in a stream, or parts in a layer, are refused before anything is made of them
MOST_LAYERS, MOST_PARTS = 4096, 64
_CHECKSUM = 4
_DIGEST = 16
_CODEC_ID = re.compile(rb"[A-Za-z][A-Za-z0-9_]{0,62}")

Buffer = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a body holds: one layer; a sequence of layers, each coded alone; layers coded together; the state of a codec; sessions."""

    LAYER = 0
    LAYERS = 1
    CACHE = 2
    STATE = 3
    SESSIONS = 4


@dataclass(frozen=True)
class Header:
    """codec: its registered name. parameters: its constructor's arguments as `reference.parameters` writes them.

    digest: the first 16 bytes of the SHA-256 of the codec's state, or b"" for a codec without one.
    """

    kind: Kind
    codec: str
    parameters: bytes = b""
    digest: bytes = b""


def digest(state: Buffer) -> bytes:
    """The digest of a state: b"" of an empty one, else 16 bytes."""
    return hashlib.sha256(state).digest()[:_DIGEST] if len(state) else b""


def seal(body: Buffer) -> bytes:
    """The stream of a body: magic, body, CRC-32 of both."""
    checksum = crc32(body, crc32(MAGIC))
    return b"".join((MAGIC, body, checksum.to_bytes(_CHECKSUM, "little")))


def unseal(stream: Buffer) -> bytes:
    """The body of a stream. CorruptStream if the magic or the checksum is wrong; TypeError if it is not bytes."""
    return bytes(_body(stream))


def _body(stream: Buffer) -> memoryview:
    if not isinstance(stream, (bytes, bytearray, memoryview)):
        raise TypeError(f"stream: expected bytes, got {type(stream).__name__}")
    view = memoryview(stream).cast("B")
    if len(view) < len(MAGIC) + _CHECKSUM:
        raise CorruptStream(f"stream of {len(view)} bytes, expected at least {len(MAGIC) + _CHECKSUM}", len(view))
    if view[: len(MAGIC)] != MAGIC:
        raise CorruptStream("no kvtheory stream: its first bytes are not the magic", 0)
    end = len(view) - _CHECKSUM
    if crc32(view[:end]) != int.from_bytes(view[end:], "little"):
        raise CorruptStream("checksum does not match: the stream was altered or cut", end)
    return view[len(MAGIC) : end]


def varint(value: int) -> bytes:
    """Unsigned LEB128 of 0 <= value < 2^64: 7 bits a byte, low ones first, high bit set on all bytes but the last."""
    if not 0 <= value < 1 << 64:
        raise ValueError(f"value: expected 0 <= value < 2^64, got {value}")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> bytes:
    """varint of 2 v for v >= 0 and of -2 v - 1 for v < 0, -2^63 <= v < 2^63."""
    return varint(2 * value if value >= 0 else -2 * value - 1)


class Reader:
    """A cursor over `data`; `base` is the offset of data[0] in the whole stream, so that errors name the right byte."""

    def __init__(self, data: Buffer, base: int = 0) -> None:
        self._data = memoryview(data).cast("B")
        self._base = base
        self._at = 0

    @property
    def offset(self) -> int:
        """Of the next byte, in the whole stream."""
        return self._base + self._at

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        """CorruptStream at byte `at` of the whole stream, default the next one."""
        raise CorruptStream(problem, self.offset if at is None else at)

    def take(self, count: int, what: str = "data") -> memoryview:
        """The next `count` bytes, not copied."""
        if count > self.remaining:
            self.fail(f"{what}: expected {count} bytes, {self.remaining} remain")
        self._at += count
        return self._data[self._at - count : self._at]

    def part(self, count: int, what: str = "part") -> Reader:
        """A Reader of the next `count` bytes."""
        start = self.offset
        return Reader(self.take(count, what), start)

    def rest(self) -> memoryview:
        return self.take(self.remaining)

    def u8(self, what: str = "byte") -> int:
        return self.take(1, what)[0]

    def varint(self, what: str = "number", most: int = (1 << 64) - 1) -> int:
        """An unsigned LEB128 number of at most `most`, in its shortest form."""
        start, value, shift = self.offset, 0, 0
        while True:
            byte = self.u8(what)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 63:
                raise CorruptStream(f"{what}: varint longer than 10 bytes", start)
        if value > most:
            raise CorruptStream(f"{what}: expected at most {most}, got {value}", start)
        if byte == 0 and shift > 7:
            raise CorruptStream(f"{what}: varint not in its shortest form", start)
        return value

    def zigzag(self, what: str = "number") -> int:
        value = self.varint(what)
        return -((value + 1) >> 1) if value & 1 else value >> 1

    def array(self, dtype: Any, count: int, what: str = "array") -> NDArray[Any]:
        """The next `count` elements as a read-only array on the stream's own memory."""
        element = np.dtype(dtype)
        return np.frombuffer(self.take(count * element.itemsize, what), dtype=element)

    def end(self, what: str = "part") -> None:
        """Nothing may remain."""
        if self.remaining:
            self.fail(f"{what}: {self.remaining} bytes too many")


Part = bytes | bytearray | memoryview
Group = Sequence[Part]


def write(header: Header, groups: Sequence[Group]) -> bytes:
    """The sealed stream of a header and its groups of parts: one group for each layer of kind LAYERS, else exactly one."""
    name = header.codec.encode()
    if not _CODEC_ID.fullmatch(name):
        raise ValueError(f"codec: expected a letter and up to 62 letters, digits and _, got {header.codec!r}")
    if header.kind is not Kind.LAYERS and len(groups) != 1:
        raise ValueError(f"groups: expected one for kind {header.kind.name}, got {len(groups)}")
    if len(groups) > MOST_LAYERS or any(len(group) > MOST_PARTS for group in groups):
        raise ValueError(f"groups: expected at most {MOST_LAYERS} layers of at most {MOST_PARTS} parts")
    pieces: list[Part] = [bytes([VERSION, header.kind, len(name)]), name]
    pieces += [varint(len(header.parameters)), header.parameters, bytes([len(header.digest)]), header.digest]
    if header.kind is Kind.LAYERS:
        pieces.append(varint(len(groups)))
    for group in groups:
        pieces += _joined(group)
    # as `seal` of all pieces in a row, which would be one more copy
    checksum = crc32(MAGIC)
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return b"".join((MAGIC, *pieces, checksum.to_bytes(_CHECKSUM, "little")))


def join(group: Group) -> bytes:
    """The bytes of a group: number of parts, their lengths, the parts."""
    return b"".join(_joined(group))


def _joined(group: Group) -> list[Part]:
    return [varint(len(group)), *(varint(memoryview(part).nbytes) for part in group), *group]


def read(stream: Buffer) -> tuple[Header, list[list[Reader]]]:
    """Header and groups of parts of a sealed stream; nothing of the parts is copied. CorruptStream says what is wrong, and where."""
    reader = Reader(_body(stream), len(MAGIC))
    start = reader.offset
    version = reader.u8("format version")
    if version > VERSION:
        raise CorruptStream(f"format version {version}, this kvtheory reads up to {VERSION}; upgrade it", start)
    if version < 1:
        raise CorruptStream(f"format version {version}, expected 1 to {VERSION}", start)
    start = reader.offset
    if (number := reader.u8("kind of stream")) >= len(Kind):
        reader.fail(f"kind of stream: expected 0 to {len(Kind) - 1}, got {number}", start)
    kind = Kind(number)
    start = reader.offset
    name = bytes(reader.take(reader.u8("length of the codec id"), "codec id"))
    if not _CODEC_ID.fullmatch(name):
        raise CorruptStream(f"codec id: expected letters, digits and _, got {name!r}", start)
    parameters = bytes(reader.take(reader.varint("length of the parameters"), "parameters"))
    start = reader.offset
    length = reader.u8("length of the state digest")
    if length not in (0, _DIGEST):
        raise CorruptStream(f"length of the state digest: expected 0 or {_DIGEST}, got {length}", start)
    header = Header(kind, name.decode(), parameters, bytes(reader.take(length, "state digest")))
    count = 1
    if kind is Kind.LAYERS:
        count = reader.varint("number of layers", most=MOST_LAYERS)
    groups = [_group(reader) for _ in range(count)]
    reader.end("stream")
    return header, groups


def split(reader: Reader) -> list[Reader]:
    """The parts of a group, from all of `reader`."""
    parts = _group(reader)
    reader.end("group")
    return parts


def _group(reader: Reader) -> list[Reader]:
    count = reader.varint("number of parts", most=MOST_PARTS)
    sizes = [reader.varint("length of a part", most=reader.remaining) for _ in range(count)]
    return [reader.part(size) for size in sizes]
