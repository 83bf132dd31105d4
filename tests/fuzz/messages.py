"""A stream taken apart so that a mutant of one piece is framed rightly again: lengths, nested groups, DEFLATE, checksums.

`parse` makes a Message of a stream or a state; `Message.join` gives its bytes back. Leaves are the byte strings that decoders read as
fields. Which fields they are is not written down here a second time: `recorded` watches a Reader while the honest bytes are decoded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference import stream
from reference.codec import arguments_of, class_of
from reference.stream import Kind, Reader, varint

#: (offset in the leaf, size, kind): "v" varint, "z" zigzag, or the element type of an array, "|u1" for a byte
Field = tuple[int, int, str]


class Leaf:
    """Bytes that a decoder reads field by field. start: where the honest stream had them, None where it held them compressed."""

    __slots__ = ("data", "fields", "name", "start")

    def __init__(self, data: bytes, name: str = "", start: int | None = None, fields: tuple[Field, ...] = ()) -> None:
        self.data, self.name, self.start, self.fields = data, name, start, fields

    def copy(self) -> Leaf:
        return Leaf(self.data, self.name, self.start, self.fields)

    def join(self) -> bytes:
        return self.data

    def leaves(self) -> Iterator[Leaf]:
        yield self


class Frame:
    """Nodes inside "group" (number of parts, lengths, parts), "lengths" (each behind its length) or "zlib" (one, compressed)."""

    __slots__ = ("children", "kind")

    def __init__(self, kind: str, children: list[Any]) -> None:
        self.kind, self.children = kind, children

    def copy(self) -> Frame:
        return Frame(self.kind, [child.copy() for child in self.children])

    def join(self) -> bytes:
        parts = [child.join() for child in self.children]
        if self.kind == "group":
            return stream.join(parts)
        if self.kind == "lengths":
            return b"".join(piece for part in parts for piece in (varint(len(part)), part))
        return zlib.compress(b"".join(parts), 1)

    def leaves(self) -> Iterator[Leaf]:
        for child in self.children:
            yield from child.leaves()


@dataclass
class Message:
    """A sealed stream or state. Unlike `stream.write`, `body` writes whatever the fields say, sense or not."""

    version: int
    kind: int
    codec: bytes
    parameters: Leaf
    digest: bytes
    groups: list[Frame]
    #: of layers; None: as many as there are groups
    count: int | None = None

    def copy(self) -> Message:
        groups = [group.copy() for group in self.groups]
        return Message(self.version, self.kind, self.codec, self.parameters.copy(), self.digest, groups, self.count)

    def body(self) -> bytes:
        head = bytes([self.version, self.kind, len(self.codec)]) + self.codec
        parameters = self.parameters.join()
        head += varint(len(parameters)) + parameters + bytes([len(self.digest)]) + self.digest
        if self.kind == Kind.LAYERS:
            head += varint(len(self.groups) if self.count is None else self.count)
        return head + b"".join(group.join() for group in self.groups)

    def join(self) -> bytes:
        return stream.seal(self.body())

    def leaves(self) -> Iterator[Leaf]:
        yield self.parameters
        for group in self.groups:
            yield from group.leaves()


def parse(data: bytes) -> Message:
    """CorruptStream for bytes that are no stream; parts of unknown codecs are leaves."""
    header, groups = stream.read(data)
    try:
        codec: Any = class_of(header)
    except ValueError:
        codec = None
    name = header.codec.encode()
    at = len(stream.MAGIC) + 3 + len(name) + len(varint(len(header.parameters)))
    parameters = Leaf(header.parameters, "parameters", at)
    if header.kind is Kind.STATE:
        nested = codec is not None and header.codec == "Pipeline"
        frames = [Frame("group", [_state(reader, nested) for reader in group]) for group in groups]
    else:
        frames = [_group(group, codec, header) for group in groups]
    return Message(data[len(stream.MAGIC)], int(header.kind), name, parameters, header.digest, frames)


def _state(reader: Reader, nested: bool) -> Any:
    leaf = _leaf(reader, "state")
    return parse(leaf.data) if nested and leaf.data else leaf


def _leaf(reader: Reader, name: str) -> Leaf:
    start = reader.offset
    return Leaf(bytes(reader.rest()), name, start)


def _group(readers: list[Reader], codec: Any, header: Any) -> Frame:
    names = codec.part_names if codec is not None and len(codec.part_names) == len(readers) else ("",) * len(readers)
    nodes: list[Any] = []
    for name, reader in zip(names, readers):
        stages = arguments_of(codec, header)["stages"] if header.codec == "Pipeline" and name == "last" else ()
        if stages:
            last = stages[-1]
            inner = stream.Header(header.kind, last.codec_id)
            nodes.append(_group(stream.split(reader), type(last), inner))
        elif header.codec in ("Pipeline", "KVTC") and name in ("shapes", "kept"):
            pieces = []
            while reader.remaining:
                pieces.append(_leaf(reader.part(reader.varint()), "shape" if name == "shapes" else name))
            nodes.append(Frame("lengths", pieces))
        elif header.codec == "KVTC" and name.endswith(("scales", "codes")):
            nodes.append(Frame("zlib", [Leaf(zlib.decompress(bytes(reader.rest())), name)]))
        else:
            nodes.append(_leaf(reader, name))
    return Frame("group", nodes)


# -- fields ------------------------------------------------------------------------------------------------------------


@contextmanager
def _watched() -> Iterator[list[tuple[int, bytes, str]]]:
    """Collects (offset, bytes, kind) of what is read from Readers."""
    found: list[tuple[int, bytes, str]] = []
    names = ("varint", "zigzag", "u8", "array", "take", "part", "rest")
    originals = {name: getattr(Reader, name) for name in names}
    busy = False

    def watch(name: str) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal busy
            outer, start, at = not busy, self.offset, self._at
            busy = True
            try:
                return originals[name](self, *arguments, **options)
            finally:
                if outer:
                    busy = False
                    kind = (
                        np.dtype(arguments[0]).str
                        if name == "array"
                        else {"varint": "v", "zigzag": "z", "u8": "|u1", "take": "raw"}.get(name, "")
                    )
                    if kind and self._at > at:
                        found.append((start, bytes(self._data[at : self._at]), kind))

        return method  # fmt: skip

    try:
        for name in names:
            setattr(Reader, name, watch(name))
        yield found
    finally:
        for name in names:
            setattr(Reader, name, originals[name])


def recorded(message: Message, data: bytes, decode: Callable[[], Any]) -> None:
    """Give the leaves of `message`, parsed from `data`, the fields that `decode` reads of them."""
    with _watched() as found:
        decode()
    # of what was inflated, or is a state's inside a state, offsets mean something else: the bytes there are not these
    fields = {
        (at, len(raw), "<f8" if kind == "raw" and len(raw) == 8 else "|u1" if kind == "raw" else kind)
        for at, raw, kind in found
        if data[at : at + len(raw)] == raw
    }
    for leaf in message.leaves():
        if leaf.start is not None and data[leaf.start : leaf.start + len(leaf.data)] == leaf.data:
            own = [(at - leaf.start, size, kind) for at, size, kind in fields]
            leaf.fields = tuple(sorted(f for f in own if f[0] >= 0 and f[0] + f[1] <= len(leaf.data)))
