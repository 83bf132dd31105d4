"""The mutation engine: hostile streams, states and cache files made of honest ones.

A mutant is one to three changes of a Message (messages.py), joined again with right lengths and, nine times in ten, right checksums:

    bytes        bits, bytes, runs dropped, inserted, doubled, overwritten, cut: of one leaf, or of the whole body without mending
    fields       what a decoder reads as a number gets another one: edges, powers of two, neighbours; elements of arrays alike, with NaN,
                 infinities, extremes, order broken, elements too many or too few
    sizes        tokens, heads or channels changed in every shape, and the other parts stretched to match (with zeros, or repeated): the
                 large claim over little content that a decoder might believe
    certain      a rANS payload of many symbols that take no bits, a DEFLATE stream of many zeros
    parts        swapped, dropped, doubled, taken from another stream of the same or another codec; groups alike
    header       version, kind, codec id, parameters, digest, number of layers
    state        all of the above in the state, whose new digest the stream then names

All randomness is a `random.Random`, so that chunk i of a run is the same mutants wherever and whenever it is made.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import reference
from reference import stream
from reference.stream import Kind, varint
from tests.fuzz.messages import Frame, Leaf, Message, parse
from tests.fuzz.seeds import Seed

#: sizes at which something may go wrong
NUMBERS = sorted({0, 1, 2, 3, 5, 7, *(v for k in (3, 4, 6, 7, 8, 10, 12, 14, 15, 16, 17, 20, 24, 27, 30, 31, 32, 39, 40, 53, 61, 62, 63)
                                     for v in ((1 << k) - 1, 1 << k, (1 << k) + 1)), (1 << 64) - 1})  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 5e-324, 1e-45, 1e-38, 3.4e38, -3.4e38, 1e39, 1.7e308, -1.7e308, 65504.0)  # fmt: skip
#: no mutant is larger: it is the claims that are to be large
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Mutant:
    """What is to be read: by which entry ("decode", "codec", "cache", "load", "inspect", "file"), with which state, made of which seed."""

    seed: int
    entry: str
    data: bytes
    state: bytes = b""


def havoc(rng: random.Random, data: bytes) -> bytes:
    """One local change of a byte string."""
    out = bytearray(data)
    if not out:
        return rng.randbytes(rng.randrange(1, 9))
    at = rng.randrange(len(out) if rng.random() < 0.6 else min(len(out), 48))
    kind = rng.randrange(11)
    if kind <= 1:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        out[at] = rng.randrange(256)
    elif kind == 3:
        out[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF))
    elif kind == 4:
        del out[at : at + rng.choice((1, 1, 2, 3, 4, 8, 16))]
    elif kind == 5:
        out[at:at] = rng.randbytes(rng.choice((1, 1, 2, 3, 4, 8, 16)))
    elif kind == 6:
        del out[at:]
    elif kind == 7:
        run = out[at : at + rng.choice((1, 2, 4, 8, 64))]
        out[at:at] = run * rng.choice((1, 1, 2, 16))
    elif kind == 8:
        size = rng.choice((1, 2, 4, 8))
        out[at : at + size] = struct.pack("<Q", rng.choice(NUMBERS))[:size]
    elif kind == 9:
        out[at:at] = varint(rng.choice(NUMBERS))
    else:
        out += bytes(rng.choice((1, 2, 4, 8, 64, 4096)))
    return bytes(out[:MOST_BYTES])


def number(rng: random.Random, old: int) -> int:
    """Another number where `old` stood, below 2^64."""
    kind = rng.randrange(8)
    new = (
        old + 1, old - 1, 2 * old, old // 2, old << rng.randrange(1, 24), old ^ 1 << rng.randrange(64),
        rng.choice(NUMBERS), rng.choice(NUMBERS[:24]),
    )[kind]  # fmt: skip
    return min(max(new, 0), (1 << 64) - 1)


def _varint_at(data: bytes, at: int) -> int:
    value = shift = 0
    for byte in data[at : at + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value & ((1 << 64) - 1)


def field(rng: random.Random, leaf: Leaf) -> None:
    """One field of a leaf changed; what follows it stays what it is."""
    if not leaf.fields:
        leaf.data = havoc(rng, leaf.data)
        return
    at, size, kind = rng.choice(leaf.fields)
    raw = leaf.data[at : at + size]
    if kind in "vz":
        new = varint(number(rng, _varint_at(leaf.data, at)))
        if rng.random() < 0.03:  # longer than need be, or without an end
            new = rng.choice((new[:-1] + bytes([new[-1] | 0x80, 0]), b"\xff" * rng.randrange(1, 12)))
    elif size == 1:
        new = bytes([number(rng, raw[0] if raw else 0) & 0xFF])
    else:
        new = elements(rng, raw, kind)
    leaf.data = leaf.data[:at] + new + leaf.data[at + size :]
    if len(new) != size:  # offsets behind it are off; what is before it still stands
        leaf.fields = tuple(f for f in leaf.fields if f[0] + f[1] <= at)


def elements(rng: random.Random, raw: bytes, kind: str) -> bytes:
    """Elements of an array changed."""
    size = np.dtype(kind).itemsize
    items = [raw[i : i + size] for i in range(0, len(raw), size)] or [bytes(size)]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(items)) if items else 0
        what = rng.randrange(10)
        if what <= 4:
            items[at : at + 1] = [_element(rng, items[at] if items else b"", kind, size)]
        elif what == 5:
            items = [items[at]] * len(items)
        elif what == 6:
            other = rng.randrange(len(items))
            items[at], items[other] = items[other], items[at]
        elif what == 7:
            items.reverse()
        elif what == 8:
            items = items[:at]
        else:
            items[at:at] = items[at : at + rng.choice((1, 2, 8))]
        if not items:
            break
    return b"".join(items)


def _element(rng: random.Random, old: bytes, kind: str, size: int) -> bytes:
    if rng.random() < 0.3 and old:
        return havoc(rng, old)[:size].ljust(size, b"\0")
    # what is read as integers may be floating-point numbers
    as_float = kind[1] == "f" or (size in (2, 4, 8) and rng.random() < 0.5)
    if as_float and size in (2, 4, 8):
        with np.errstate(over="ignore"):
            return np.array(rng.choice(FLOATS)).astype(f"<f{size}").tobytes()
    return struct.pack("<Q", rng.choice(NUMBERS))[:size].ljust(size, b"\0")


def _most(rng: random.Random) -> int:
    """Bytes that a part may grow to: seldom many, as they take their time."""
    return 1 << rng.choice((10, 12, 12, 14, 14, 18) if rng.random() < 0.3 else (10, 12))


def _stretched(rng: random.Random, data: bytes, factor: float) -> bytes:
    size = min(round(len(data) * factor), _most(rng))
    if size <= len(data):
        return data[:size]
    return data.ljust(size, b"\0") if rng.random() < 0.5 or not data else (data * (size // len(data) + 1))[:size]


def _shapes(message: Message) -> list[Leaf]:
    return [leaf for leaf in message.leaves() if leaf.name == "shape" and len(leaf.data) > 4]


def _sizes(leaf: Leaf) -> tuple[list[int], int]:
    """kv_heads, tokens, head_dim, value_dim of a shape, and where they end."""
    sizes, at = [], 0
    for _ in range(4):
        value = _varint_at(leaf.data, at)
        at += len(varint(value))
        sizes.append(value)
    return sizes, at


def sizes(rng: random.Random, message: Message) -> None:
    """A size changed in every shape alike, the other leaves stretched to match."""
    shapes = _shapes(message)
    if not shapes:
        return
    which = rng.choice((0, 1, 1, 1, 2, 3))
    first = _sizes(shapes[0])[0][which]
    new = (
        rng.choice((2, 3, 8, 64, 100, 1000, 4096, 65536, 65537, 1 << 20, 0, 1))
        if rng.random() < 0.7
        else number(rng, first)
    )
    for leaf in shapes:
        own, end = _sizes(leaf)
        own[which] = new
        leaf.data = b"".join(map(varint, own)) + leaf.data[end:]
        leaf.fields = ()
        if rng.random() < 0.2:  # positions without steps
            leaf.data = leaf.data[: len(b"".join(map(varint, own))) + 2] + b"\0\0"
    factor = new / max(first, 1)
    tidy = rng.random() < 0.7
    for leaf in message.leaves():
        if leaf.name not in ("shape", "parameters", "kept") and (tidy or rng.random() < 0.8):
            leaf.data, leaf.fields = _stretched(rng, leaf.data, factor), ()
        elif leaf.name == "kept" and leaf.data and not leaf.data[0] & 1 and rng.random() < 0.5:
            leaf.data = leaf.data.replace(varint(first), varint(min(new, 1 << 40)), rng.choice((1, -1)))
    if which == 1 and rng.random() < 0.7:
        certain(rng, message, new, max(first, 1))


def certain(rng: random.Random, message: Message, tokens: int = 0, before: int = 0) -> None:
    """Payloads of rANS in which nothing takes a bit: for so many tokens where there were others before, or any number."""
    for leaf in message.leaves():
        if leaf.name in ("side", "codes") and leaf.data[:1] in (b"\x08", b"\x20") and len(leaf.data) > 4:
            lanes, count = leaf.data[0], _varint_at(leaf.data, 1)
            block = max(1, _varint_at(leaf.data, 1 + len(varint(count))))
            n = min(
                count * tokens // before if before else number(rng, count), 1 << 21 if rng.random() < 0.8 else 1 << 40
            )
            blocks = min(-(-n // block), _most(rng) // 36)
            payload = bytes([lanes]) + varint(n) + varint(block) + bytes(4 * blocks) + b"\0\0\1\0" * (blocks * lanes)
            leaf.data, leaf.fields = payload, ()
            for other in message.leaves():
                if other.name == "escapes":  # of blocks of tokens: where no coefficient is coded, the payload has none
                    counted = blocks if count else min(-(-tokens // block), 1 << 12)
                    other.data, other.fields = bytes(4 * counted), ()


def bomb(rng: random.Random, message: Message) -> None:
    """DEFLATE streams of other lengths than their place has."""
    for frame in [frame for group in message.groups for frame in _compressed(group)]:
        if rng.random() < 0.6:
            data = frame.children[0].join()
            data = rng.choice((b"", bytes(1 << rng.randrange(2, 20)), data * 2, data[:-1], data + b"\0"))
            frame.children = [Leaf(data, frame.children[0].name if isinstance(frame.children[0], Leaf) else "")]


def _compressed(frame: Frame) -> list[Frame]:
    inner = [child for child in frame.children if isinstance(child, Frame)]
    return [frame] * (frame.kind == "zlib" and bool(frame.children)) + [
        f for child in inner for f in _compressed(child)
    ]


class Mutator:
    """Makes mutants of seeds. files: of caches."""

    def __init__(self, seeds: Sequence[Seed], files: Sequence[bytes] = ()) -> None:
        self.seeds, self.files = list(seeds), list(files)
        self.ids = [*(name.encode() for name in reference.codecs()), b"Nothing", b"", b"x" * 63, b"x" * 64, b"\xff\xfe"]

    def mutant(self, rng: random.Random) -> Mutant:
        if self.files and rng.random() < 0.02:
            place = rng.randrange(len(self.files))
            return Mutant(-1 - place, "file", cache_file(rng, self.files[place]))
        place = rng.randrange(len(self.seeds))
        seed = self.seeds[place]
        message, state = seed.message.copy(), seed.state
        sealed = rng.random() < 0.9
        if seed.state_message is not None and rng.random() < 0.4:
            state = self._state(rng, seed, sealed)
            message.digest = stream.digest(state)
            if rng.random() < 0.25:
                return Mutant(place, "load", state)
            if rng.random() < 0.6:  # the state's change is all, or the stream grows with it
                if rng.random() < 0.5:
                    rng.choice((sizes, certain, bomb))(rng, message)
                return Mutant(place, "decode", message.join(), state)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            self._change(rng, message, seed)
        data = self._joined(rng, message, sealed)
        if state is not seed.state:
            return Mutant(place, "decode", data, state)
        entry = rng.choices(("codec", "decode", "cache", "inspect"), (70, 14, 8, 8))[0]
        return Mutant(place, entry, data, state)

    def of(self, rng: random.Random, data: bytes) -> bytes:
        """One mutant of any bytes, sealed: of what `parse` makes of a stream, or of its body."""
        try:
            message = parse(data)
            self._change(rng, message, rng.choice(self.seeds))
            return self._joined(rng, message, True)
        except (ValueError, zlib.error):
            return stream.seal(havoc(rng, data[4:-4]))

    def _joined(self, rng: random.Random, message: Message, sealed: bool) -> bytes:
        body = message.body()
        if rng.random() < 0.25:
            body = havoc(rng, body)
        if sealed:
            return stream.seal(body)
        data = stream.seal(body)
        return havoc(rng, data) if rng.random() < 0.7 else data[: rng.randrange(len(data) + 1)]

    def _state(self, rng: random.Random, seed: Seed, sealed: bool) -> bytes:
        assert seed.state_message is not None
        message = seed.state_message.copy()
        target = message
        while True:  # into the states of a pipeline's stages
            inner = [child for child in target.groups[0].children if isinstance(child, Message)]
            if not inner or rng.random() < 0.15:
                break
            target = rng.choice(inner)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.9:
                leaf = rng.choice(
                    list(target.leaves()) if rng.random() < 0.2 else [*target.groups[0].leaves()] or [target.parameters]
                )
                field(rng, leaf) if rng.random() < 0.75 else setattr(leaf, "data", havoc(rng, leaf.data))
            else:
                self._header(rng, target)
        return self._joined(rng, message, sealed)

    def _change(self, rng: random.Random, message: Message, seed: Seed) -> None:
        kind = rng.random()
        leaves = list(message.leaves())
        if kind < 0.40:
            # shapes and short leaves are where sizes are
            field(rng, rng.choice([leaf for leaf in leaves if leaf.fields] or leaves))
        elif kind < 0.60:
            leaf = rng.choice(leaves)
            leaf.data, leaf.fields = havoc(rng, leaf.data), ()
        elif kind < 0.75:
            sizes(rng, message)
        elif kind < 0.79:
            rng.choice((certain, bomb))(rng, message)
        elif kind < 0.91:
            self._parts(rng, message, seed)
        else:
            self._header(rng, message)

    def _parts(self, rng: random.Random, message: Message, seed: Seed) -> None:
        if not message.groups:
            message.groups = [Frame("group", [])]
        group = rng.choice(message.groups)
        frames = [group, *(child for child in group.children if isinstance(child, Frame) and child.children)]
        frame = rng.choice(frames)
        own = frame.children
        kind = rng.randrange(6)
        if not own or kind == 0:
            own.append(Leaf(rng.randbytes(rng.randrange(9))))
        elif kind == 1:
            a, b = rng.randrange(len(own)), rng.randrange(len(own))
            own[a], own[b] = own[b], own[a]
        elif kind == 2:
            if rng.random() < 0.5:
                del own[rng.randrange(len(own))]
            else:
                own.insert(rng.randrange(len(own) + 1), rng.choice(own).copy())
        elif kind == 3:
            if rng.random() < 0.5 and len(message.groups) < 8:
                message.groups.append(group.copy())
            else:
                message.groups.remove(group)
        else:
            same = [other for other in self.seeds if other.message.codec == seed.message.codec]
            other = rng.choice(same if rng.random() < 0.5 else self.seeds)
            theirs = rng.choice(other.message.groups).copy()
            at = rng.randrange(len(own))
            if kind == 4 and theirs.children:
                own[at] = (
                    theirs.children[min(at, len(theirs.children) - 1)]
                    if rng.random() < 0.7
                    else rng.choice(theirs.children)
                )
            else:
                message.groups[message.groups.index(group)] = theirs

    def _header(self, rng: random.Random, message: Message) -> None:
        kind = rng.randrange(6)
        if kind == 0:
            message.version = rng.choice((0, 1, 2, 255))
        elif kind == 1:
            message.kind = rng.choice((*map(int, Kind), 4, 255))
            message.count = rng.choice((None, 0, 1, 2, 4096, 4097, 1 << 40))
        elif kind == 2:
            other = rng.choice(self.seeds).message
            message.codec = rng.choice(self.ids) if rng.random() < 0.5 else other.codec
            if rng.random() < 0.5:
                message.parameters = other.parameters.copy()
        elif kind == 3:
            message.digest = rng.choice(
                (b"", bytes(16), rng.randbytes(16), rng.choice(self.seeds).message.digest, b"\0" * 15)
            )
        else:
            field(rng, message.parameters)


def cache_file(rng: random.Random, data: bytes) -> bytes:
    """A mutant of a cache file: of its bytes, or of the JSON in its header, nine in ten with the checksums that its tensors have."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = rng.random()
    if kind < 0.15:
        return havoc(rng, data)
    if kind < 0.3:
        return struct.pack("<Q", number(rng, length)) + data[8:]
    about = json.loads(header["__metadata__"]["kvtheory"])
    if kind < 0.5:
        body = havoc(rng, body)
    elif kind < 0.8:
        _json_change(rng, about)
    else:
        _json_change(rng, header)
    if rng.random() < 0.9:
        for name in about.get("crc32", {}) if isinstance(about, dict) and isinstance(about.get("crc32"), dict) else ():
            entry = header.get(name)
            offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
            if (
                isinstance(offsets, list)
                and len(offsets) == 2
                and all(isinstance(v, int) and 0 <= v <= len(body) for v in offsets)
            ):
                about["crc32"][name] = zlib.crc32(body[offsets[0] : offsets[1]])
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["kvtheory"] = "[" * 100000 if rng.random() < 0.003 else json.dumps(about)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _json_change(rng: random.Random, tree: Any) -> None:
    """One value somewhere in a tree of JSON replaced, removed, doubled or renamed."""
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            spots.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    walk(tree)
    if not spots:
        return
    node, key = rng.choice(spots)
    kind = rng.randrange(5)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node[key], int):
        node[key] = number(rng, abs(node[key]))
    elif kind == 2 and isinstance(node, dict):
        node[rng.choice(("keys", "0.keys", "x", ""))] = node.pop(key)
    else:
        node[key] = rng.choice((None, True, 0, -1, 1.5, 1e308, float("nan"), 1 << 40, 1 << 70, "", "F32", [], {}, [0, 0], [1 << 60], "é", [[]]))  # fmt: skip


def chunk_rng(seed: int, chunk: int) -> random.Random:
    """The randomness of one chunk: of nothing but these numbers."""
    return random.Random(f"kvtheory fuzz {seed} {chunk}")
