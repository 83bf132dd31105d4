"""Read character vectors out of an R package's data, with the standard library only: novels live in such files on Debian.

A lazy-load database is two files: `X.rdx`, a compressed serialised list that gives each object's offset and length in `X.rdb`, and
there each object, compressed and serialised. Serialised R ("XDR" form): a big-endian int of flags whose low byte is the type, then
the payload. Only the few types that such files hold are read; anything else is a ValueError.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from typing import Any

__all__ = ["load"]

_SYMBOL, _PAIRLIST, _CHAR, _LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST = 1, 2, 9, 10, 13, 14, 16, 19
_NAMESPACE, _REFERENCE = 249, 255
_EMPTY = (241, 242, 251, 252, 253, 254)  # NULL, the global environment and other constants
_HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400


def load(index: bytes, data: bytes) -> dict[str, list[str | None]]:
    """The character vectors of a lazy-load database: `index` is the content of X.rdx, `data` that of X.rdb."""
    variables = _unserialise(zlib.decompress(index, 47))["variables"]  # 47: zlib or gzip, either
    out = {}
    for name, (offset, length) in variables.items():
        out[name] = _unserialise(_inflate(data[offset : offset + length]))
    return out


def _inflate(chunk: bytes) -> bytes:
    """Four bytes of length, then zlib; or a letter that names the method, then its data."""
    kind = chunk[4:5]
    if kind == b"2":
        return bz2.decompress(chunk[5:])
    if kind == b"Z":
        return lzma.decompress(chunk[5:], format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    return zlib.decompress(chunk[4:])


def _unserialise(data: bytes) -> Any:
    reader = _Reader(data)
    if reader.take(2) != b"X\n":
        raise ValueError("R data: expected XDR serialisation")
    version = reader.integer()
    reader.take(8)  # versions of the writer, and the least that may read
    if version == 3:
        reader.take(reader.integer())  # name of the native encoding
    return reader.item()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.references = data, 0, []  # type: ignore[var-annotated]

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise ValueError(f"R data: cut short at byte {self.at}")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def integer(self) -> int:
        return int(struct.unpack(">i", self.take(4))[0])

    def numbers(self, letter: str, size: int) -> list[Any]:
        count = self.integer()
        return list(struct.unpack(f">{count}{letter}", self.take(count * size)))

    def item(self) -> Any:
        flags = self.integer()
        kind = flags & 0xFF
        value: Any
        if kind in _EMPTY:
            return None
        if kind == _REFERENCE:
            return self.references[(flags >> 8 or self.integer()) - 1]
        if kind == _SYMBOL:
            value = self.item()
            self.references.append(value)
            return value
        if kind == _NAMESPACE:
            self.integer()
            value = [self.item() for _ in range(self.integer())]
            self.references.append(value)
            return value
        if kind == _CHAR:
            length = self.integer()
            return None if length < 0 else self.take(length).decode("utf-8", "replace")
        if kind == _PAIRLIST:
            return self.pairs(flags)
        if kind in (_LOGICAL, _INTEGER):
            value = self.numbers("i", 4)
        elif kind == _REAL:
            value = self.numbers("d", 8)
        elif kind in (_STRINGS, _LIST):
            value = [self.item() for _ in range(self.integer())]
        else:
            raise ValueError(f"R data: type {kind} at byte {self.at} is not read here")
        if flags & _HAS_ATTRIBUTES:
            names = dict(self.item() or []).get("names")
            if names:
                return dict(zip(names, value, strict=True))
        return value

    def pairs(self, flags: int) -> list[tuple[Any, Any]]:
        if flags & _HAS_ATTRIBUTES:
            self.item()
        tag = self.item() if flags & _HAS_TAG else None
        return [(tag, self.item()), *(self.item() or [])]
