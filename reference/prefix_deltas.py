"""The whole stack of arXiv 2604.15356 as one codec: sessions share their prefixes, what is left is predicted, the residual is quantised.

    sessions -> radix tree of tokens -> of each segment: KV - KVhat in closed loop -> inner codec of the residual

Layer 1 is PrefixStore's radix tree: of a common prefix one segment is held. Layer 2 is PredictiveDelta's loop, which goes on behind a prefix: a
segment is predicted from what its parents' segments reconstruct to, so that encoder and decoder first run the model over the path (one pass a
position, for a predictor that runs it). Layer 3 is the inner codec of `delta`, e.g. TurboQuant.

One group, kind SESSIONS:

    "head"       varint layers, kv_heads, head_dim, value_dim; u8 element type; for each layer varint index + 1 (0: none); 4 bytes of the plan's
                 digest; u32 segments, u32 sessions
    "segments"   for each: u32 parent (0: none, else its number plus 1), varint tokens, u32 checksum of tokens (and, where the model runs, of keys
                 and values) from the first of the path on; without a parent: varint length and bytes of the salt
    "tokens"     for each: varint length; coded under the law where there is one, else u8 width and the ids in so many bytes
    "residuals"  for each: varint length; of each layer varint length and the inner codec's parts
    "sessions"   for each, ids ascending: varint length and UTF-8 of the id, u32 number of the segment that it ends in

A codec that a caller makes: it is not among `reference.codecs()`, since a stream cannot be read without the predictor and the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Cache, Decoded
from kvtheory.prediction import SmallerModel, TokenKV
from reference import stream
from reference.codec import Codec
from reference.delta_loop import Loop, Pair, Sizes, Store, alike, at_position, cast, rebuilt, refuse
from reference.entropy_coding import TokenDecoder, TokenEncoder
from reference.errors import CorruptStream
from reference.predictive_delta import PredictiveDelta
from reference.predictors import MOST_SIZE
from reference.prefix_store.layout import MOST_ID, MOST_SALT
from reference.prefix_store.radix import Radix
from reference.prefix_store.segments import KV, Segment, Tokens
from reference.shape import DTYPES, _dtype
from reference.stream import Kind, Part, Reader, varint
from reference.token_replay import MOST_TOKENS

__all__ = ["PrefixDeltas"]


class Written(NamedTuple):
    """What a segment reconstructs to, of each of its positions: token, keys and values of all layers."""

    tokens: list[int]
    kept: list[list[TokenKV]]


@dataclass(frozen=True)
class PrefixDeltas(Codec):
    """PrefixDeltas(PredictiveDelta(predictor, inner, player=...)): sessions id -> Cache, or id -> (Cache, salt), in one stream.

    delta: without adaptive bits, in closed loop. Caches: with tokens, of one model, layers of one shape and element type, positions 0, 1, ....
    Sessions of one salt share what they begin with alike; keys and values of a prefix are taken from the session that came first with it (exact
    sharing of a deterministic map; caches computed in another shape differ in their last bits, and those of the later one are not held).

    encode: bytes. decode: id -> list of Decoded, as the encoder's loop left them; CorruptStream for a stream that a check refuses.
    """

    delta: Codec = field(metadata={"state": True})

    scope = "sessions"
    part_names = ("head", "segments", "tokens", "residuals", "sessions")

    def __post_init__(self) -> None:
        if not isinstance(self.delta, PredictiveDelta):
            raise TypeError(f"delta: expected a PredictiveDelta, got {type(self.delta).__name__}")
        if self.delta.adaptive is not None or self.delta.open_loop:
            raise ValueError(f"delta: expected fixed bits and a closed loop, got {self.delta}")

    @property
    def _own(self) -> PredictiveDelta:
        assert isinstance(self.delta, PredictiveDelta)
        return self.delta

    def state_parts(self) -> list[Part]:
        return self._own.state_parts()

    # -- encode --------------------------------------------------------------------------------------------------------

    def encode(self, data: Mapping[str, Any]) -> bytes:
        """The stream of sessions. ValueError for caches that do not fit together, TypeError for what is no mapping of caches."""
        if not isinstance(data, Mapping):
            raise TypeError(f"sessions: expected a mapping of ids to caches, got {type(data).__name__}")
        return stream.write(self._header(Kind.SESSIONS), [self.encode_parts(data)])

    def encode_parts(self, data: Any) -> list[Part]:
        delta = self._own
        delta._ready()
        tree, ends, like = Radix(), {}, None
        for name, entry in data.items():
            cache, salt = entry if isinstance(entry, tuple) else (entry, b"")
            tokens, layers, kind = self._checked(name, cache, salt)
            if like is not None and kind != like:
                raise ValueError(f"sessions[{name!r}]: expected layers like the sessions before, {like}, got {kind}")
            like = kind
            found = tree.find(tokens, bytes(salt))

            def cut(start: int, end: int, layers: Any = layers) -> list[KV]:
                return [KV(one.keys[:, start:end], one.values[:, start:end]) for one in layers]

            leaf = tree.grow(found, tokens, cut, bytes(salt))
            ends[name] = leaf
        if like is None:
            raise ValueError("sessions: expected at least one, got none")
        sizes, dtype, indices = like
        segments = list(tree.segments())
        number = {id(segment): i for i, segment in enumerate(segments)}
        written: dict[int, Written] = {}
        heads, texts, bodies = [], [], []
        for segment in segments:
            assert segment.parent is not None
            parent = None if segment.parent.is_root else number[id(segment.parent)]
            words, body, checksum, own = self._code(
                segment, [written[number[id(s)]] for s in segment.path()[:-1]], sizes, dtype
            )
            written[number[id(segment)]] = own
            head = (0 if parent is None else parent + 1).to_bytes(4, "little") + varint(len(segment.tokens))
            head += checksum.to_bytes(4, "little")
            heads.append(head + (varint(len(segment.salt)) + segment.salt if parent is None else b""))
            texts += [varint(len(words)), words]
            bodies += [varint(len(body)), body]
        table = b"".join(
            varint(len(raw)) + raw + number[id(ends[name])].to_bytes(4, "little")
            for raw, name in sorted((name.encode(), name) for name in ends)
        )
        first = b"".join(
            [
                *(varint(n) for n in sizes), bytes([DTYPES.index(dtype.name)]),
                *(varint(0 if i is None else i + 1) for i in indices), delta._plan_digest(),
                len(segments).to_bytes(4, "little"), len(ends).to_bytes(4, "little"),
            ]
        )  # fmt: skip
        return [first, b"".join(heads), b"".join(texts), b"".join(bodies), table]

    def _checked(
        self, name: str, cache: Any, salt: bytes
    ) -> tuple[Tokens, list[Any], tuple[Sizes, Any, tuple[Any, ...]]]:
        if not isinstance(name, str) or len(name.encode()) > MOST_ID:
            raise ValueError(f"sessions: expected ids of at most {MOST_ID} bytes, got {name!r}")
        if len(salt) > MOST_SALT:
            raise ValueError(f"salt: expected at most {MOST_SALT} bytes, got {len(salt)}")
        if not isinstance(cache, Cache):
            raise TypeError(f"sessions[{name!r}]: expected a kvtheory.Cache, got {type(cache).__name__}")
        layers = sorted(cache, key=lambda layer: -1 if layer.index is None else layer.index)
        sizes, dtype = alike(layers)
        if cache.tokens is None or not len(cache.tokens) or int(np.min(cache.tokens)) < 0:
            raise ValueError(f"sessions[{name!r}]: expected the ids of at least one token in cache.tokens")
        if self._with_law:
            self._own._tokens(cache)
        self._own._fits(layers, sizes)
        return np.asarray(cache.tokens, np.int64), layers, (sizes, dtype, tuple(one.index for one in layers))

    @property
    def _with_law(self) -> bool:
        """Whether tokens are coded by a predictor's or the model's law; else their ids are written."""
        return self._own._runs("token", "law")

    def _code(
        self, segment: Segment, path: list[Written], sizes: Sizes, dtype: np.dtype[Any]
    ) -> tuple[bytes, bytes, int, Written]:
        """(tokens, residuals, checksum, what it reconstructs to) of a segment behind the path."""
        delta = self._own
        loop, store = self._behind(path, sizes, refuse), Store(delta, sizes)
        coder = TokenEncoder(delta._vocabulary()) if self._with_law else None
        kept_all: list[list[TokenKV]] = []
        for t, token in enumerate(segment.tokens.tolist()):
            if coder is not None:
                coder.encode(token, loop.coding_law)
            given = at_position(segment.layers, t)  # type: ignore[arg-type]
            expected = loop.predict(token)
            kept = delta._code(given, expected, expected, False, store, None, t, dtype)
            loop.took(token, kept)
            kept_all.append(kept)
        words = _ids(segment.tokens) if coder is None else coder.words()
        return words, store.parts(), loop.checksum, Written(segment.tokens.tolist(), kept_all)

    def _behind(self, path: list[Written], sizes: Sizes, fail: Any) -> Loop:
        """A loop that holds what the path reconstructs to."""
        delta = self._own
        loop = Loop(delta, sizes, fail)
        # those whose prediction runs a model over the token must run it here too; the mean over candidates has nothing to remember
        asked = delta._runs("pass") or isinstance(delta.predictor, SmallerModel)
        for written in path:
            for token, kept in zip(*written):
                if asked:
                    loop.predict(token)
                loop.took(token, kept)
        return loop

    # -- decode --------------------------------------------------------------------------------------------------------

    def decode(self, stream_: bytes) -> dict[str, list[Decoded]]:
        """id -> layers, in the order of their indices. CorruptStream, StateMismatch."""
        header, groups = stream.read(stream_)
        self._like(header)
        return self.decode_parts(self._named(groups[0]))

    def decode_parts(self, parts: list[Reader]) -> dict[str, list[Decoded]]:
        delta = self._own
        delta._ready()
        head, segments, tokens, residuals, table = parts
        start = head.offset
        count_layers, heads, d, dv = (
            head.varint(name, most=MOST_SIZE) for name in ("layers", "kv_heads", "head_dim", "value_dim")
        )
        kind = head.u8("element type")
        if kind >= len(DTYPES) or not all((count_layers, heads, d, dv)):
            head.fail("head: expected an element type below 4, and no size of 0", start)
        sizes: Sizes = (count_layers, heads, d, dv)
        for _ in range(count_layers):
            head.varint("layer index", most=1 << 32)
        plan = bytes(head.take(4, "digest of the plan"))
        count, sessions = (int.from_bytes(head.take(4, name), "little") for name in ("segments", "sessions"))
        head.end("head")
        if self._own.player is not None and delta._runs("player") and delta.player.layers != count_layers:  # type: ignore[union-attr]
            head.fail(f"layers: expected the model's {delta.player.layers}, got {count_layers}", start)  # type: ignore[union-attr]
        hint = "the stream is damaged" if plan == delta._plan_digest() else "it was written under another plan"

        def fail(problem: str) -> NoReturn:
            head.fail(f"{problem}: {hint}", start)

        written: list[Written] = []
        parents: list[int] = []
        for i in range(count):
            at = segments.offset
            parent = int.from_bytes(segments.take(4, "parent"), "little") - 1
            if parent >= i:
                segments.fail(f"parent: expected a segment before {i}, got {parent}", at)
            size = segments.varint("tokens", most=MOST_TOKENS)
            if size == 0:
                segments.fail("tokens: expected at least 1", at)
            checksum = int.from_bytes(segments.take(4, "checksum"), "little")
            if parent < 0:
                segments.take(segments.varint("length of the salt", most=MOST_SALT), "salt")
            parents.append(parent)
            path = [written[j] for j in _upwards(parents, i)[:-1]]
            words = tokens.part(tokens.varint("length of tokens", most=tokens.remaining), "tokens")
            body = residuals.part(residuals.varint("length of residuals", most=residuals.remaining), "residuals")
            held = self._residuals(body, size, sizes)
            own, found = self._rebuild(words, held, size, path, sizes, _dtype(kind), fail)
            if found != checksum:
                fail(f"segment {i}: the checksum of what was rebuilt does not match")
            written.append(own)
        for reader, name in ((segments, "segments"), (tokens, "tokens"), (residuals, "residuals")):
            reader.end(name)
        return _sessions(table, sessions, written, parents, sizes, _dtype(kind))

    def _residuals(self, reader: Reader, size: int, sizes: Sizes) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        layers, heads, d, dv = sizes
        inner, out = self._own._inner(self._own._bits), []
        for _ in range(layers):
            start = reader.offset
            group = stream.split(reader.part(reader.varint("length of a layer", most=reader.remaining), "residuals"))
            decoded = inner.decode_parts(inner._named(group))
            if decoded.keys.shape != (heads, size, d) or decoded.values.shape != (heads, size, dv):
                reader.fail(f"residuals: expected keys {(heads, size, d)}, got {decoded.keys.shape}", start)
            keys, values = (np.asarray(a, np.float64) for a in (decoded.keys, decoded.values))
            if not (np.isfinite(keys).all() and np.isfinite(values).all()):
                reader.fail("residuals: expected finite numbers", start)
            out.append((keys, values))
        reader.end("residuals")
        return out

    def _rebuild(
        self, words: Reader, held: list[tuple[NDArray[Any], NDArray[Any]]], size: int, path: list[Written], sizes: Sizes,
        dtype: np.dtype[Any], fail: Any,
    ) -> tuple[Written, int]:  # fmt: skip
        delta, loop = self._own, self._behind(path, sizes, fail)
        coder = TokenDecoder(words, delta._vocabulary()) if self._with_law else None
        ids = None if coder is not None else _read_ids(words, size)
        own = Written([], [])
        for t in range(size):
            token = int(ids[t]) if ids is not None else coder.decode(loop.coding_law)  # type: ignore[union-attr]
            residual: list[Pair] = [(keys[:, t], values[:, t]) for keys, values in held]
            kept = rebuilt(loop.predict(token), residual, dtype)
            loop.took(token, kept)
            own.tokens.append(token)
            own.kept.append([TokenKV(cast(k, dtype), cast(v, dtype)) for k, v in kept])
        if coder is not None:
            coder.end()
        return own, loop.checksum


def _ids(tokens: Tokens) -> bytes:
    width = next(w for w in (1, 2, 4, 8) if int(tokens.max()) < 1 << 8 * w)
    return bytes([width]) + tokens.astype(f"<u{width}").tobytes()


def _read_ids(reader: Reader, count: int) -> NDArray[np.int64]:
    width = reader.u8("width of the tokens")
    if width not in (1, 2, 4, 8):
        reader.fail(f"width of the tokens: expected 1, 2, 4 or 8, got {width}", reader.offset - 1)
    ids = reader.array(f"<u{width}", count, "tokens")
    reader.end("tokens")
    if count and int(ids.max()) >= 1 << 32:
        reader.fail("tokens: expected ids below 2^32")
    return ids.astype(np.int64)


def _upwards(parents: list[int], i: int) -> list[int]:
    out = []
    while i >= 0:
        out.append(i)
        i = parents[i]
    return out[::-1]


def _sessions(
    table: Reader, count: int, written: list[Written], parents: list[int], sizes: Sizes, dtype: np.dtype[Any]
) -> dict[str, list[Decoded]]:
    found: dict[str, list[Decoded]] = {}
    last: bytes | None = None
    for _ in range(count):
        at = table.offset
        raw = bytes(table.take(table.varint("length of a session's id", most=MOST_ID), "session's id"))
        if last is not None and raw <= last:
            table.fail("sessions: expected ids in ascending order", at)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise CorruptStream("session's id: expected UTF-8", at) from None
        number = int.from_bytes(table.take(4, "segment of a session"), "little")
        if number >= len(written):
            table.fail(f"segment of a session: expected a number below {len(written)}, got {number}", at)
        kept = [kv for j in _upwards(parents, number) for kv in written[j].kept]
        found[name] = [
            Decoded.of(
                *(
                    np.stack([np.asarray(getattr(kv[i], side)) for kv in kept], axis=1).astype(dtype)
                    for side in ("keys", "values")
                )
            )
            for i in range(sizes[0])
        ]
        last = raw
    table.end("sessions")
    return found
