"""The stream of sessions stored together, kind SESSIONS: what was cut into segments, and which of them each session goes through.

    "head"       varint layers, u32 segments, u32 sessions
    "segments"   for each: u32 parent (0: none, else its number plus 1), varint start, varint tokens, u8 form (0 as it is, 1 residual);
                 where it has no parent: varint length and bytes of the salt
    "tokens"     for each segment: u8 width 1, 2, 4 or 8, then its token ids in so many bytes
    "payload"    for each segment and layer: varint length, then the parts that the inner codec wrote, as a group
    "sessions"   for each, ids ascending: varint length and UTF-8 of the id, u32 number of the segment that it ends in, varint tokens

A session's tokens are those of its segment behind the first `start` of its parent's. A parent comes before its children. Records have sizes of
their own, whatever else is stored, so that a store knows the bytes of its stream without writing it.

A residual is what is left of keys and values when those that the parent decodes to, at the same positions, are taken away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded
from reference import stream
from reference.codec import Codec
from reference.errors import CorruptStream
from reference.prefix_store.segments import KV, Tokens
from reference.stream import Part, Reader, varint

__all__ = [
    "MOST_ID",
    "MOST_SALT",
    "End",
    "Record",
    "Sessions",
    "decode_layers",
    "groups_of",
    "held_by",
    "parts_of",
    "read",
    "session_bytes",
]

MOST_ID, MOST_SALT, MOST_TOKENS = 1 << 12, 1 << 12, 1 << 40


class End(NamedTuple):
    """Where a session ends: in which record, and how many tokens it has."""

    record: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Record:
    """parent: number of an earlier record, or None; coded: of each layer."""

    parent: int | None
    start: int
    tokens: Tokens
    residual: bool
    salt: bytes
    coded: list[bytes]

    def written(self) -> tuple[bytes, bytes, bytes]:
        """Its bytes in parts "segments", "tokens" and "payload"."""
        parent = 0 if self.parent is None else self.parent + 1
        head = parent.to_bytes(4, "little") + varint(self.start) + varint(len(self.tokens)) + bytes([self.residual])
        if self.parent is None:
            head += varint(len(self.salt)) + self.salt
        width = self._width()
        payload = b"".join(piece for one in self.coded for piece in (varint(len(one)), one))
        return head, bytes([width]) + self.tokens.astype(f"<u{width}").tobytes(), payload

    def sizes(self) -> tuple[int, int, int]:
        """Lengths of `written`."""
        head = 5 + len(varint(self.start)) + len(varint(len(self.tokens)))
        if self.parent is None:
            head += len(varint(len(self.salt))) + len(self.salt)
        return head, 1 + self._width() * len(self.tokens), sum(len(varint(len(one))) + len(one) for one in self.coded)

    def _width(self) -> int:
        most = int(self.tokens.max())
        return next(w for w in (1, 2, 4, 8) if most < 1 << 8 * w)


def session_bytes(session_id: str, end: End) -> bytes:
    raw = session_id.encode()
    return varint(len(raw)) + raw + end.record.to_bytes(4, "little") + varint(end.tokens)


def parts_of(layers: int, records: Sequence[Record], sessions: Mapping[str, End]) -> list[Part]:
    written = [record.written() for record in records]
    head = varint(layers) + len(records).to_bytes(4, "little") + len(sessions).to_bytes(4, "little")
    table = b"".join(session_bytes(name, sessions[name]) for name in sorted(sessions, key=str.encode))
    return [head, *(b"".join(column) for column in zip(*written)), table] if written else [head, b"", b"", b"", table]


def _u32(reader: Reader, what: str) -> int:
    return int.from_bytes(reader.take(4, what), "little")


def decode_layers(inner: Codec, groups: Sequence[Reader], start: int, tokens: int) -> list[KV]:
    """What the inner codec holds of a segment; CorruptStream if that is not `tokens` tokens from position `start` on, with weight 1."""
    out = []
    for group in groups:
        at = group.offset
        decoded = inner.decode_parts(inner._named(stream.split(group)))
        whole = isinstance(decoded, Decoded) and decoded.keys.shape[1] == tokens and (decoded.kept == tokens).all()
        if not whole or decoded.log_weights.any():
            group.fail(f"payload: expected {tokens} tokens, all kept, with weight 1", at)
        if not (decoded.positions == np.arange(start, start + tokens)).all():
            group.fail(f"payload: expected positions from {start} on", at)
        out.append(KV(decoded.keys, decoded.values))
    return out


def added(base: Sequence[KV], residual: Sequence[KV], offset: int) -> list[KV]:
    """residual plus the tokens of `base` from `offset` on, as far as it goes; the sum in float64, rounded to the residual's type.

    ValueError where it is not finite, or the heads and channels differ.
    """
    return [KV(*(_sum(b, r, offset) for b, r in zip(one, own))) for one, own in zip(base, residual, strict=True)]


def _sum(base: NDArray[Any], residual: NDArray[Any], offset: int) -> NDArray[Any]:
    if (base.shape[0], base.shape[2]) != (residual.shape[0], residual.shape[2]):
        raise ValueError(f"residual: expected heads and channels of its parent, {base.shape}, got {residual.shape}")
    both = max(0, min(base.shape[1] - offset, residual.shape[1]))
    out = residual.copy()
    with np.errstate(over="ignore"):
        total = residual[:, :both].astype(np.float64) + base[:, offset : offset + both].astype(np.float64)
        out[:, :both] = total.astype(residual.dtype)
    with np.errstate(invalid="ignore"):
        if not np.isfinite(out.astype(np.float64)).all():
            raise ValueError("residual: expected a finite sum")
    return out


@dataclass(frozen=True, eq=False)
class _Held:
    """A segment as read."""

    parent: int | None
    start: int
    tokens: Tokens
    salt: bytes
    layers: list[KV]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def hold(inner: Codec, record: Record, groups: Sequence[Reader], parent: _Held | None) -> _Held:
    """A record with its keys and values decoded, residuals added to what the parent holds."""
    layers = decode_layers(inner, groups, record.start, len(record.tokens))
    if record.residual and parent is not None:
        layers = added(parent.layers, layers, record.start)
    return _Held(record.parent, record.start, record.tokens, record.salt, layers)


class Sessions(Mapping[str, list[Decoded]]):
    """What a stream of sessions holds: id -> its layers. Each segment is held once; a session is put together when it is asked for."""

    def __init__(self, held: Sequence[_Held], ends: Mapping[str, End]) -> None:
        self._held, self._ends = list(held), dict(ends)

    def __getitem__(self, session_id: str) -> list[Decoded]:
        path = self._path(session_id)
        layers = zip(*([_first(kv, count) for kv in self._held[i].layers] for i, count in path))
        return [Decoded.of(*(np.concatenate(arrays, axis=1) for arrays in zip(*pieces))) for pieces in layers]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def tokens(self, session_id: str) -> Tokens:
        """(n,) int64."""
        return np.concatenate([self._held[i].tokens[:count] for i, count in self._path(session_id)])

    def salt(self, session_id: str) -> bytes:
        """The tenant's."""
        return self._held[self._path(session_id)[0][0]].salt

    def _path(self, session_id: str) -> list[tuple[int, int]]:
        """(segment, how many of its first tokens), in time order."""
        end = self._ends[session_id]
        step: int | None = end.record
        until, out = end.tokens, []
        while step is not None:
            one = self._held[step]
            if until > one.start:
                out.append((step, until - one.start))
            until, step = min(until, one.start), one.parent
        return out[::-1]


def held_by(inner: Codec, records: Sequence[Record], end: End) -> list[Decoded]:
    """The layers of one session, of records that were not read but made."""
    chain, step = [end.record], records[end.record].parent
    while step is not None:
        chain.append(step)
        step = records[step].parent
    held: list[_Held] = []
    for i in reversed(chain):
        own = replace(records[i], parent=len(held) - 1 if held else None)
        groups = [Reader(part) for part in own.coded]
        held.append(hold(inner, own, groups, held[-1] if held else None))
    return Sessions(held, {"": End(len(held) - 1, end.tokens)})[""]


def _first(kv: KV, count: int) -> KV:
    return KV(kv.keys[:, :count], kv.values[:, :count])


def read(inner: Codec, parts: list[Reader], most: int | None, forks: bool) -> Sessions:
    """most: tokens of a segment, or None. forks: whether a segment may start before its parent ends, and may be a residual."""
    head, segments, tokens, payload, table = parts
    layers = head.varint("layers", most=stream.MOST_LAYERS)
    if layers == 0:
        head.fail("layers: expected at least 1", head.offset - 1)
    count, sessions = _u32(head, "segments"), _u32(head, "sessions")
    head.end("head")
    # every record takes its bytes: nothing is allocated by the counts alone
    held: list[_Held] = []
    kinds: list[Any] | None = None
    for i in range(count):
        at = segments.offset
        number = _u32(segments, "parent")
        if number > i:
            segments.fail(f"parent: expected a segment before {i}, got {number - 1}", at)
        parent = held[number - 1] if number else None
        at = segments.offset
        start = segments.varint("start", most=MOST_TOKENS)
        if start > (parent.end if parent else 0) or (not forks and parent is not None and start != parent.end):
            segments.fail(
                f"start: expected {'at most ' if forks else ''}{parent.end if parent else 0}, got {start}", at
            )
        at = segments.offset
        size = segments.varint("tokens", most=most or MOST_TOKENS)
        if size == 0:
            segments.fail("tokens: expected at least 1", at)
        form = segments.u8("form")
        if form > 1 or (form and not (forks and parent is not None and parent.parent is None)):
            segments.fail("form: expected 0, or 1 for a residual of a segment without parent", segments.offset - 1)
        if parent is None:
            salt = bytes(segments.part(segments.varint("length of the salt", most=MOST_SALT), "salt").rest())
        else:
            salt = parent.salt
        own = _tokens(tokens, size)
        base = payload.offset
        groups = [payload.part(payload.varint("length of a layer", most=payload.remaining)) for _ in range(layers)]
        record = Record(number - 1 if number else None, start, own, bool(form), salt, [])
        try:
            held.append(hold(inner, record, groups, parent))
        except CorruptStream:
            raise
        except ValueError as problem:
            raise CorruptStream(str(problem), base) from None
        layers_held = held[-1].layers
        found = [(*kv.keys.shape[::2], *kv.values.shape[::2], kv.keys.dtype, kv.values.dtype) for kv in layers_held]
        if kinds is not None and found != kinds:
            payload.fail("payload: expected the heads, channels and element types of the segments before", base)
        kinds = found
    for reader, name in ((segments, "segments"), (tokens, "tokens"), (payload, "payload")):
        reader.end(name)
    return Sessions(held, _table(table, sessions, held, forks))


def groups_of(parts: list[Reader]) -> Iterator[tuple[bool, Reader]]:
    """Of each segment and layer: whether it is a residual, and the inner codec's parts as a group."""
    head, segments, _, payload, _ = parts
    layers, count = head.varint("layers", most=stream.MOST_LAYERS), _u32(head, "segments")
    for _ in range(count):
        parent, _, _, form = (
            _u32(segments, "parent"),
            segments.varint("start"),
            segments.varint("tokens"),
            segments.u8("form"),
        )
        if not parent:
            segments.take(segments.varint("length of the salt", most=MOST_SALT), "salt")
        for _ in range(layers):
            yield bool(form), payload.part(payload.varint("length of a layer", most=payload.remaining))


def _tokens(reader: Reader, count: int) -> Tokens:
    at = reader.offset
    width = reader.u8("width of the tokens")
    if width not in (1, 2, 4, 8):
        reader.fail(f"width of the tokens: expected 1, 2, 4 or 8, got {width}", at)
    words = reader.array(f"<u{width}", count, "tokens")
    if int(words.max()) >= 1 << 63:
        reader.fail("tokens: expected ids below 2^63", at)
    return words.astype(np.int64)


def _table(reader: Reader, sessions: int, held: Sequence[_Held], forks: bool) -> dict[str, End]:
    ends: dict[str, End] = {}
    last = b""
    for i in range(sessions):
        at = reader.offset
        raw = bytes(reader.take(reader.varint("length of a session's id", most=MOST_ID), "session's id"))
        if i and raw <= last:
            reader.fail("sessions: expected ids in ascending order", at)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            reader.fail("session's id: expected UTF-8", at)
        at = reader.offset
        number = _u32(reader, "segment of a session")
        if number >= len(held):
            reader.fail(f"segment of a session: expected a number below {len(held)}, got {number}", at)
        at = reader.offset
        tokens, end = reader.varint("tokens of a session"), held[number].end
        if not 1 <= tokens <= end or (not forks and tokens != end):
            reader.fail(f"tokens of a session: expected {'1 to ' if forks else ''}{end}, got {tokens}", at)
        ends[name], last = End(number, tokens), raw
    reader.end("sessions")
    return ends
