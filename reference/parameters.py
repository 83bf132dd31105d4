"""A codec's parameters as bytes: the constructor's arguments in order, each as its annotation says.

    int            zigzag varint            float          8 bytes
    bool           1 byte, 0 or 1           Literal[...]   1 byte, index of the choice
    T | None       1 byte, 0 or 1, then T   int | float    1 byte, 0: int, 1: float, then it
    tuple[T, ...]  varint count, then each T
    Codec          length byte and codec id, varint length and parameters of its own

The names are not written: the codec id stands for them, and docs/stream-format.md lists them. A codec is a frozen dataclass; its
init fields are its parameters, but those whose metadata has "state" are what `fit` found, and go into the state instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from reference.stream import Reader, varint, zigzag

__all__ = ["names", "read", "write"]

#: longer tuples and deeper nesting are refused by the reader
MOST_ITEMS = 1 << 16
MOST_NESTED = 4


@functools.cache
def _fields(codec: Any) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(codec)
    return tuple((f.name, hints[f.name]) for f in dataclasses.fields(codec) if f.init and "state" not in f.metadata)


def names(codec: type) -> tuple[str, ...]:
    """Names of a codec class's parameters, in the order in which they are written."""
    return tuple(name for name, _ in _fields(codec))


def write(codec: Any) -> bytes:
    """The parameters of a codec instance."""
    kind: Any = type(codec)
    return b"".join(_write(hint, getattr(codec, name), name) for name, hint in _fields(kind))


def read(codec: type, reader: Reader, lookup: Callable[[str], type], depth: int = 0) -> dict[str, Any]:
    """The parameters of a codec class, checked by type only; `lookup` turns the id of an inner codec into its class."""
    if depth > MOST_NESTED:
        reader.fail(f"parameters: codecs nested more than {MOST_NESTED} deep")
    return {name: _read(hint, reader, name, lookup, depth) for name, hint in _fields(codec)}


def _is_codec(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "encode_parts")


def _shape(hint: Any) -> tuple[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, bool):
        return hint.__name__, None
    if origin is Literal:
        return "choice", arguments
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return "tuple", arguments[0]
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments:
            rest = tuple(a for a in arguments if a is not type(None))
            inner: Any = rest[0]
            for other in rest[1:]:
                inner = inner | other
            return "optional", inner
        if set(arguments) == {int, float}:
            return "number", None
    if _is_codec(hint):
        return "codec", None
    raise TypeError(f"a codec's parameter cannot be written: {hint!r}")


def _write(hint: Any, value: Any, name: str) -> bytes:
    shape, inner = _shape(hint)
    if shape == "int":
        return zigzag(int(value))
    if shape == "bool":
        return bytes([bool(value)])
    if shape == "float":
        return struct.pack("<d", value)
    if shape == "choice":
        return bytes([inner.index(value)])
    if shape == "optional":
        return b"\x00" if value is None else b"\x01" + _write(inner, value, name)
    if shape == "number":
        return b"\x01" + struct.pack("<d", value) if isinstance(value, float) else b"\x00" + zigzag(int(value))
    if shape == "tuple":
        return varint(len(value)) + b"".join(_write(inner, item, name) for item in value)
    own = write(value)
    return bytes([len(value.codec_id)]) + value.codec_id.encode() + varint(len(own)) + own


def _read(hint: Any, reader: Reader, name: str, lookup: Callable[[str], type], depth: int) -> Any:
    shape, inner = _shape(hint)
    if shape == "int":
        return reader.zigzag(name)
    if shape == "bool":
        return bool(_choice(reader, name, 2))
    if shape == "float":
        return _float(reader, name)
    if shape == "choice":
        return inner[_choice(reader, name, len(inner))]
    if shape == "optional":
        return _read(inner, reader, name, lookup, depth) if _choice(reader, name, 2) else None
    if shape == "number":
        return _float(reader, name) if _choice(reader, name, 2) else reader.zigzag(name)
    if shape == "tuple":
        count = reader.varint(f"length of {name}", most=min(MOST_ITEMS, reader.remaining))
        return tuple(_read(inner, reader, name, lookup, depth) for _ in range(count))
    start = reader.offset
    raw = bytes(reader.take(reader.u8(f"length of the codec id of {name}"), f"codec id of {name}"))
    own = reader.part(reader.varint(f"length of the parameters of {name}"), f"parameters of {name}")
    try:
        codec = lookup(raw.decode("ascii"))
        arguments = read(codec, own, lookup, depth + 1)
        own.end(f"parameters of {name}")
        return codec(**arguments)
    except (UnicodeDecodeError, LookupError, TypeError, ValueError) as problem:
        if hasattr(problem, "offset"):
            raise
        reader.fail(f"{name}: {problem}", start)


def _choice(reader: Reader, name: str, count: int) -> int:
    start = reader.offset
    index = reader.u8(name)
    if index >= count:
        reader.fail(f"{name}: expected a choice below {count}, got {index}", start)
    return index


def _float(reader: Reader, name: str) -> float:
    start = reader.offset
    value: float = struct.unpack("<d", reader.take(8, name))[0]
    if not math.isfinite(value):
        reader.fail(f"{name}: expected a finite number, got {value}", start)
    return value
