"""`PrefixStore`: many sessions, each a cache with its tokens, stored so that what they begin with alike is held once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from kvtheory import checks
from kvtheory.layer import Cache, Decoded, Layer
from reference import arguments, stream
from reference.codec import Codec, encode_cache
from reference.full import Full
from reference.pipeline import Pipeline
from reference.prefix_store.batch import Batch, Member
from reference.prefix_store.blocks import Blocks
from reference.prefix_store.groups import Ranked
from reference.prefix_store.layout import (
    MOST_ID,
    MOST_SALT,
    End,
    Record,
    Sessions,
    decode_layers,
    groups_of,
    held_by,
    parts_of,
    read,
    session_bytes,
)  # fmt: skip
from reference.prefix_store.radix import Radix
from reference.prefix_store.segments import KV, LayerKind, Segment, Tokens, coded, cut
from reference.prefix_store.tree import Found, Tree
from reference.reducer import Reducer
from reference.stream import Kind, Part, Reader

__all__ = ["Lease", "PrefixStore", "Stats"]


#: how a store is run, and so in no stream: no parameter that parameters.py writes
HERE = {"state": True}


@dataclass(frozen=True)
class Stats:
    """What is held, and what came of the `put`s since the store was made.

    bytes_stored: of the stream, tables and tokens included; table_bytes: of it what the inner codec did not write. bytes_unshared: of one stream of the inner codec for each session (no tokens, no tables). tokens: of all sessions held; stored_tokens: of all segments.
    hit_tokens: of put_tokens those found stored; lost_tokens: those that lay there, in a common prefix, but could not be shared (blocks: fewer than a
    block each time). Of policy "plt" these are of the groups as they are now.
    """

    sessions: int
    segments: int
    tokens: int
    stored_tokens: int
    bytes_stored: int
    table_bytes: int
    bytes_unshared: int
    put_tokens: int
    hit_tokens: int
    lost_tokens: int
    evicted_tokens: int

    @property
    def hit_rate(self) -> float:
        """hit_tokens / put_tokens; 0 before the first."""
        return self.hit_tokens / self.put_tokens if self.put_tokens else 0.0


class Lease:
    """The longest stored prefix of some tokens, held against eviction until `release()`, or until the end of a `with` block."""

    def __init__(self, store: PrefixStore, found: Found) -> None:
        self.length = found.length
        """tokens found"""
        self._store, self._segment = store, found.segment
        self._open = True
        store._tree.hold(found.segment)

    def decoded(self) -> list[Decoded]:
        """The layers of the prefix; [] where nothing was found. ValueError once released."""
        if not self._open:
            raise ValueError("decoded: this lease was released before")
        return self._store._decoded(self._segment, self.length)

    def release(self) -> None:
        """Give the hold back. ValueError the second time."""
        if not self._open:
            raise ValueError("release: this lease was released before")
        self._open = False
        self._store._tree.let_go(self._segment)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._open:
            self.release()


@dataclass
class _State:
    """What a store holds: no parameter, and in no stream as such."""

    tree: Tree
    batch: Batch
    kinds: list[LayerKind] = field(default_factory=list)
    ends: dict[str, Segment] = field(default_factory=dict)
    put_tokens: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    evicted_tokens: int = 0


@dataclass(frozen=True, eq=False)
class PrefixStore(Codec):
    """Sessions stored together.

        store = reference.PrefixStore("radix")
        store.put("a/1", cache, salt=b"a");  store.get("a/1")          # list[Decoded]
        with store.match(tokens, salt=b"a") as lease: lease.length, lease.decoded()
        data = store.stream();  reference.decode(data)["a/1"]          # bytes and back, all sessions

    policy "blocks": full blocks of `block` tokens behind shared blocks (vLLM); "radix": every common prefix (SGLang); both exact, so with an inner
    codec that is lossless bit for bit. "plt": the paper's groups, by the caches' `surprisal_bits`: {d_T `rule` `delta`}, in each the most probable session whole (the centroid),
    the others from their divergence from it on, as residuals against what it decodes to at the same positions (residual=True) or as they are (False).

    inner: data-oblivious codec of single layers that keeps every token; codes each segment of each layer alone. Default Full.
    capacity: bytes that `nbytes` does not exceed; None: no limit; not for "plt". Sessions are never evicted, only what `drop` has left behind.
    verify: compare tokens, tenants and the bits of keys and values before anything is shared. Without it, blocks are taken by their hash, as servers do:
    a collision of `hash_bytes` bytes gives a session another's keys and values.

    Sessions of different salts share nothing. Positions must be 0, 1, 2, ...; all sessions alike in layers, heads, channels and element types. One thread.
    """

    policy: Literal["blocks", "radix", "plt"] = "radix"
    block: int = 16
    capacity: int | None = field(default=None, metadata=HERE)
    delta: float = 8.0
    rule: Literal["<=", ">="] = "<="
    residual: bool = True
    inner: Codec | None = None
    verify: bool = field(default=True, metadata=HERE)
    hash_bytes: int = field(default=32, metadata=HERE)
    _held: _State = field(init=False, repr=False)

    scope = "sessions"
    part_names = ("head", "segments", "tokens", "payload", "sessions")

    def __post_init__(self) -> None:
        arguments.word("policy", self.policy, ("blocks", "radix", "plt"))
        arguments.word("rule", self.rule, ("<=", ">="))
        arguments.whole("block", self.block, 1, 1 << 20)
        arguments.whole("hash_bytes", self.hash_bytes, 1, 32)
        if self.capacity is not None:
            arguments.whole("capacity", self.capacity, 0, 1 << 62)
            if self.policy == "plt":
                raise ValueError("capacity: expected None for policy 'plt', whose groups are made of all sessions")
        if not 0 <= self.delta < float("inf"):
            raise ValueError(f"delta: expected a finite number of bits >= 0, got {self.delta}")
        if self.inner is not None and (
            self.inner.scope != "layer" or self.inner.needs or self.inner.state_bytes or _drops_tokens(self.inner)
        ):
            raise ValueError(
                f"inner: expected a data-oblivious codec of single layers that keeps every token, got {self.inner}"
            )
        object.__setattr__(self, "delta", float(self.delta))
        tree = Blocks(self.block, self.hash_bytes, self.verify) if self.policy == "blocks" else Radix()
        object.__setattr__(self, "_held", _State(tree, Batch()))

    @property
    def _codec(self) -> Codec:
        return self.inner if self.inner is not None else Full()

    @property
    def _tree(self) -> Tree:
        return self._held.tree

    # -- sessions ------------------------------------------------------------------------------------------------------

    def put(self, session_id: str, cache: Cache, salt: bytes = b"") -> int:
        """Store a session; gives the tokens found stored. An id that is there is replaced: a session grows by being put again.

        cache: with `tokens` (policy "plt": and `surprisal_bits`); one layer at a time is read. ValueError, and nothing changed, for a cache that does
        not fit to the others, keys or values that are not those stored for the same tokens (another model, or another plan), or no room.
        """
        tokens, salt = self._checked(session_id, cache, salt)
        held = self._held
        if self.policy == "plt":
            whole = self._kv(cache, len(tokens), None, [(0, len(tokens))])[0]
            self._take_kinds(cache)
            assert cache.surprisal_bits is not None
            held.batch.put(session_id, Member(Ranked(tokens, np.array(cache.surprisal_bits)), whole, salt))
            return 0
        tree = held.tree
        found = tree.find(tokens, salt)
        pieces, at = [], found.length
        for size in tree.pieces(len(tokens) - at):
            pieces.append((at, at + size))
            at += size
        layers = dict(zip(pieces, self._kv(cache, len(tokens), found if self.verify else None, pieces)))
        lost = tree.literal(found, tokens) - found.length
        first = not held.kinds
        self._take_kinds(cache)
        if self.capacity is not None:
            own = [
                Record(None if start == 0 else 0, start, tokens[start:end], False, salt, coded(self._codec, kv, held.kinds, start))
                for (start, end), kv in layers.items()
            ]  # fmt: skip
            try:
                found = self._make_room(session_id, found, tokens, own)
            except ValueError:
                held.kinds = [] if first else held.kinds
                raise
        leaf = tree.grow(found, tokens, lambda start, end: layers[start, end], salt)
        before = held.ends.get(session_id)
        tree.hold(leaf)
        if before is not None:
            tree.let_go(before)
        held.ends[session_id] = leaf
        held.put_tokens += len(tokens)
        held.hit_tokens += found.length
        held.lost_tokens += lost
        return found.length

    def get(self, session_id: str) -> list[Decoded]:
        """The layers of a session as a reader of the stream would hold them. KeyError for an id that is not there."""
        if self.policy == "plt":
            records, ends = self._records()
            return held_by(self._codec, records, ends[session_id])
        leaf = self._held.ends[session_id]
        self._tree.hold(leaf)  # counts as a use
        self._tree.let_go(leaf)
        return self._decoded(leaf, leaf.end)

    def drop(self, session_id: str) -> None:
        """Forget a session. What it alone held stays, to be found by others, until its room is needed (policy "plt": goes). KeyError."""
        if self.policy == "plt":
            self._held.batch.drop(session_id)
        else:
            self._tree.let_go(self._held.ends.pop(session_id))

    def match(self, tokens: Any, salt: bytes = b"") -> Lease:
        """The longest stored prefix that sessions of this salt may share, held until released. ValueError for policy "plt"."""
        if self.policy == "plt":
            raise ValueError(
                "match: policy 'plt' groups whole sessions and looks up none; expected 'blocks' or 'radix'"
            )
        ids = Cache([], tokens=tokens).tokens
        assert ids is not None
        return Lease(self, self._tree.find(ids, salt))

    def evict(self, tokens: int) -> int:
        """Drop at least so many tokens that nothing refers to, least recently used leaves first; gives their number."""
        freed, leaves = 0, self._tree.evict()
        while freed < tokens and (segment := next(leaves, None)) is not None:
            freed += len(segment.tokens)
        self._held.evicted_tokens += freed
        return freed

    def __contains__(self, session_id: object) -> bool:
        return session_id in (self._held.batch.members if self.policy == "plt" else self._held.ends)

    def __len__(self) -> int:
        return len(self._held.batch.members if self.policy == "plt" else self._held.ends)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def stream(self) -> bytes:
        """All sessions, sealed. Also holds what dropped sessions left behind."""
        return stream.write(self._header(Kind.SESSIONS), [self._parts()])

    @property
    def nbytes(self) -> int:
        """len(self.stream()), added up."""
        return self._size(*self._records())

    def stats(self) -> Stats:
        """Bytes and tokens; codes every session once more, alone."""
        held = self._held
        records, ends = self._records()
        total = self._size(records, ends)
        stored, tokens = sum(len(record.tokens) for record in records), sum(end.tokens for end in ends.values())
        plt = self.policy == "plt"
        return Stats(
            sessions=len(ends),
            segments=len(records),
            tokens=tokens,
            stored_tokens=stored,
            bytes_stored=total,
            table_bytes=total - sum(len(one) for record in records for one in record.coded),
            bytes_unshared=sum(len(encode_cache(self._codec, self._layers(name))) for name in ends),
            put_tokens=tokens if plt else held.put_tokens,
            hit_tokens=tokens - stored if plt else held.hit_tokens,
            lost_tokens=held.batch.lost() if plt else held.lost_tokens,
            evicted_tokens=held.evicted_tokens,
        )

    def encode(self, data: Mapping[str, Any]) -> bytes:
        """The stream of sessions id -> Cache, or id -> (Cache, salt), in a store of its own."""
        if not isinstance(data, Mapping):
            raise TypeError(f"sessions: expected a mapping of ids to caches, got {type(data).__name__}")
        store = replace(self)
        for name, entry in data.items():
            cache, salt = entry if isinstance(entry, tuple) else (entry, b"")
            store.put(name, cache, salt)
        return store.stream()

    def encode_parts(self, data: Any) -> list[Part]:
        raise TypeError("encode_parts: PrefixStore codes sessions, not layers")

    def decode_parts(self, parts: list[Reader]) -> Sessions:
        plt = self.policy == "plt"
        most = self.block if self.policy == "blocks" else None
        return read(self._codec, parts, most, forks=plt)

    def decode_flops(self, data: bytes) -> int:
        """Those of the inner codec, once for every segment, and an addition for each number of a residual."""
        header, groups = stream.read(data)
        codec: PrefixStore = self._like(header)  # type: ignore[assignment]
        inner, total = codec._codec, 0
        for residual, group in groups_of(codec._named(groups[0])):
            parts = [bytes(part.rest()) for part in stream.split(group)]
            total += inner.decode_flops(stream.write(inner._header(Kind.LAYER), [parts]))
            if residual:
                total += sum(shape.numbers for shape in inner.shapes_in([Reader(part) for part in parts]))
        return total

    # -- inside --------------------------------------------------------------------------------------------------------

    def _checked(self, session_id: str, cache: Cache, salt: bytes) -> tuple[Tokens, bytes]:
        if not isinstance(session_id, str):
            raise TypeError(f"session_id: expected a str, got {type(session_id).__name__}")
        if len(session_id.encode()) > MOST_ID:
            raise ValueError(f"session_id: expected at most {MOST_ID} bytes, got {len(session_id.encode())}")
        if not isinstance(salt, (bytes, bytearray)):
            raise TypeError(f"salt: expected bytes, got {type(salt).__name__}")
        if len(salt) > MOST_SALT:
            raise ValueError(f"salt: expected at most {MOST_SALT} bytes, got {len(salt)}")
        if not isinstance(cache, Cache):
            raise TypeError(f"cache: expected a kvtheory.Cache, got {type(cache).__name__}")
        tokens = cache.tokens
        if tokens is None or not len(tokens) or not len(cache):
            raise ValueError("cache: expected at least one layer, and the ids of at least one token in cache.tokens")
        if tokens.min() < 0:
            raise ValueError(f"tokens: expected ids >= 0, got {tokens.min()}")
        if self.policy == "plt":
            bits = cache.surprisal_bits
            if bits is None or (bits < 0).any():
                raise ValueError("cache: policy 'plt' needs cache.surprisal_bits, none below 0")
        return np.array(tokens, np.int64), bytes(salt)

    def _take_kinds(self, cache: Cache) -> None:
        if not self._held.kinds:
            self._held.kinds = [LayerKind.of(layer) for layer in cache]

    def _kv(self, cache: Cache, tokens: int, shared: Found | None, pieces: Sequence[tuple[int, int]]) -> list[list[KV]]:
        """Keys and values of each piece, layer by layer; what is shared must be what is stored."""
        kinds = self._held.kinds
        if kinds and len(kinds) != len(cache):
            raise ValueError(f"cache: expected {len(kinds)} layers like the sessions before, got {len(cache)}")
        out: list[list[KV]] = [[] for _ in pieces]
        for i, layer in enumerate(cache):
            if layer.tokens != tokens or not np.array_equal(layer.positions, np.arange(tokens)):
                raise ValueError(f"layers[{i}]: expected {tokens} tokens at positions 0, 1, 2, ..., got {layer}")
            if kinds and LayerKind.of(layer) != kinds[i]:
                raise ValueError(
                    f"layers[{i}]: expected {kinds[i]} like the sessions before, got {LayerKind.of(layer)}"
                )
            kv = KV(layer.keys, layer.values)
            _check_finite(layer)
            for segment in self._path(shared) if shared else []:
                own, held = cut(kv, segment.start, min(segment.end, shared.length)), segment.layers[i]  # type: ignore[union-attr]
                at = _first_other(own, held)
                if at is not None:
                    raise ValueError(
                        f"layers[{i}]: expected the keys and values stored for the same {segment.start + at + 1} tokens, got others at "
                        f"position {segment.start + at}: another model, or run in another way; give it another salt"
                    )
            for piece, layers in zip(pieces, out):
                layers.append(cut(kv, *piece))
        return out

    def _path(self, found: Found) -> list[Segment]:
        """The segments of what was found; of the last one maybe only its first tokens."""
        return found.segment.path() if found.length else []

    def _decoded(self, segment: Segment, length: int) -> list[Decoded]:
        if not length:
            return []
        pieces = []
        for one in segment.path():
            groups = [Reader(part) for part in self._coded(one)]
            pieces.append(decode_layers(self._codec, groups, one.start, len(one.tokens)))
        layers = [[np.concatenate(arrays, axis=1)[:, :length] for arrays in zip(*layer)] for layer in zip(*pieces)]
        return [Decoded.of(keys, values) for keys, values in layers]

    def _coded(self, segment: Segment) -> list[bytes]:
        if segment.coded is None:
            segment.coded = coded(self._codec, segment.layers, self._held.kinds, segment.start)
        return segment.coded

    def _records(self) -> tuple[list[Record], dict[str, End]]:
        """What a stream holds, and the number of the record that each session ends in."""
        held = self._held
        if self.policy == "plt":
            return held.batch.records(self._codec, held.kinds, self.delta, self.rule, self.residual)
        segments = list(held.tree.segments())
        number = {id(segment): i for i, segment in enumerate(segments)}
        records = [
            Record(None if s.parent is None or s.parent.is_root else number[id(s.parent)], s.start, s.tokens, False, s.salt, self._coded(s))
            for s in segments
        ]  # fmt: skip
        return records, {name: End(number[id(leaf)], leaf.end) for name, leaf in held.ends.items()}

    def _parts(self) -> list[Part]:
        records, ends = self._records()
        return parts_of(max(1, len(self._held.kinds)), records, ends)

    def _layers(self, session_id: str) -> list[Layer]:
        """A session's layers, as they were put."""
        held = self._held
        if self.policy == "plt":
            pieces = [held.batch.members[session_id].layers]
        else:
            pieces = [segment.layers for segment in held.ends[session_id].path()]
        joined = ([np.concatenate(arrays, axis=1) for arrays in zip(*layer)] for layer in zip(*pieces))
        return [Layer(keys, values, index=kind.index) for (keys, values), kind in zip(joined, held.kinds)]

    def _size(self, records: Sequence[Record], ends: Mapping[str, End]) -> int:
        """Bytes of a stream of these records."""
        columns = [sum(column) for column in zip(*(record.sizes() for record in records))] or [0, 0, 0]
        return self._sealed(columns, sum(len(session_bytes(*item)) for item in ends.items()))

    def _sealed(self, columns: Sequence[int], table: int) -> int:
        """Bytes of a stream, from those of its parts "segments", "tokens" and "payload", and of "sessions"."""
        sizes = [len(stream.varint(max(1, len(self._held.kinds)))) + 8, *columns, table]
        empty = len(stream.write(self._header(Kind.SESSIONS), [[b""] * len(sizes)]))
        return empty + sum(size + len(stream.varint(size)) - 1 for size in sizes)

    def _make_room(self, session_id: str, found: Found, tokens: Tokens, own: Sequence[Record]) -> Found:
        """Evict until the new records fit beside what is referred to and what was found; ValueError, before anything goes, if they cannot."""
        tree, capacity = self._tree, self.capacity
        assert capacity is not None
        path = {id(segment) for segment in self._path(found)}
        records, ends = self._records()
        segments = list(tree.segments())
        after = dict(ends) | {session_id: End(0, len(tokens))}
        table = sum(len(session_bytes(*item)) for item in after.items())
        kept = [record for segment, record in zip(segments, records) if segment.refs or id(segment) in path]
        inside = found.length - found.segment.start
        if 0 < inside < len(found.segment.tokens):
            whole = next(record for segment, record in zip(segments, records) if segment is found.segment)
            kept.remove(whole)
            kept += self._halves(found.segment, whole, inside)[: 2 if found.segment.refs else 1]
        least = self._columns([*kept, *own])
        if self._sealed(least, table) > capacity:
            raise ValueError(
                f"capacity: expected room for {self._sealed(least, table)} bytes of sessions held, the new one included, got {capacity}; "
                "drop sessions, or release leases"
            )
        segment = tree.ends_at(found)
        tree.hold(segment)
        now = self._columns([*self._records()[0], *own])
        if self._sealed(now, table) > capacity:
            for dropped in tree.evict():
                gone = Record(
                    None if dropped.start == 0 else 0,
                    dropped.start,
                    dropped.tokens,
                    False,
                    dropped.salt,
                    self._coded(dropped),
                )
                now = [a - b for a, b in zip(now, gone.sizes())]
                self._held.evicted_tokens += len(dropped.tokens)
                if self._sealed(now, table) <= capacity:
                    break
        tree.let_go(segment)
        return Found(segment, found.length)

    @staticmethod
    def _columns(records: Sequence[Record]) -> list[int]:
        return [sum(column) for column in zip(*(record.sizes() for record in records))] or [0, 0, 0]

    def _halves(self, segment: Segment, whole: Record, at: int) -> list[Record]:
        """The records that a segment's would become, were it cut at its token `at`."""
        kinds, size, fork = self._held.kinds, len(segment.tokens), segment.start + at
        upper, lower = ([cut(kv, *ends) for kv in segment.layers] for ends in ((0, at), (at, size)))
        return [
            replace(whole, tokens=segment.tokens[:at], coded=coded(self._codec, upper, kinds, segment.start)),
            replace(
                whole, parent=0, start=fork, tokens=segment.tokens[at:], coded=coded(self._codec, lower, kinds, fork)
            ),
        ]


def _drops_tokens(codec: Codec) -> bool:
    return isinstance(codec, Reducer) or (isinstance(codec, Pipeline) and any(map(_drops_tokens, codec.stages)))


def _check_finite(layer: Layer) -> None:
    for name in ("keys", "values"):
        checks.finite(name, getattr(layer, name), ("head", "token", "channel"))


def _first_other(own: KV, held: KV) -> int | None:
    """The first token whose bits differ, of those that both have."""
    worst: int | None = None
    for a, b in zip(own, held):
        n = min(a.shape[1], b.shape[1])
        x, y = (np.ascontiguousarray(one[:, :n]).view(np.uint8) for one in (a, b))
        differ = np.flatnonzero((x != y).any(axis=(0, 2)))
        if differ.size:
            worst = int(differ[0]) if worst is None else min(worst, int(differ[0]))
    return worst
