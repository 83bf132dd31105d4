"""TokenReplay: the entropy bound's own codec (arXiv 2604.15356): the tokens, coded under the model's law, and the model replayed.

The bound H(KV) <= H(tokens) is reached by a decoder that *is* the model: it decodes t_1, runs it, decodes t_2 under P(. | t_1), and so on. So

    payload    constriction's range coder under P(t | t_<t) as integer weights (kvtheory.prediction.law_weights); the first token, and one
               behind a checkpoint, uniform over the vocabulary. After every 64 tokens a check symbol of 2 bits, always 0
    replay     token by token, the same way in encoder and decoder (`player.plan`); the cache that the decoder holds is the replayed one
    checks     one CRC-32 of the tokens and of the replayed keys and values; a digest of the plan, one of the weights

checkpoint_every = B: every B-th position (B - 1, 2 B - 1, ...) is not run but stored, its keys and values quantised by `inner`; later tokens
read what was stored. Fewer forward passes, more bits: B = None and B = 1 are the ends of the frontier. Tokens at such positions are still
coded, under the law of the position before.

Under another plan than the one recorded, floats differ, and with them sooner or later the integers: what comes out is then either the same
tokens, keys and values or CorruptStream. Source of the check: a desynchronised range decoder gives plausible tokens for ever.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Cache, Decoded, Layer
from kvtheory.prediction import Play, Player, TokenKV, law_weights
from reference import arguments, stream
from reference.codec import Codec, layers_of
from reference.entropy_coding import TokenDecoder, TokenEncoder
from reference.errors import CorruptStream, StateMismatch
from reference.shape import DTYPES, Shape, _dtype
from reference.stream import Kind, Part, Reader, varint

__all__ = ["CHECK_EVERY", "TokenReplay"]

CHECK_EVERY = 64
CHECK_BITS = 2
#: refused before a model runs
MOST_TOKENS, MOST_LAYERS = 1 << 24, 1 << 12

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TokenReplay(Codec):
    """Made by `TokenReplay.of(player)`; a bare one encodes and decodes nothing.

    checkpoint_every: B, or None. inner: data-oblivious codec of checkpoints, one that codes each vector alone (TurboQuant(4), QJL, Full, ...).
    player: the model (`kvtheory.prediction.Player`; `kvtheory.models.player.ModelPlayer` for real ones), no part of the stream. State: its digest
    and sizes, a few bytes; but what a decoder needs is the model itself, `player.flops` a token, and the same plan.

    encode(cache): needs `cache.tokens`; keys and values are not looked at, as they are replayed. decode: CorruptStream where a check fails.
    """

    checkpoint_every: int | None = None
    inner: Codec | None = None
    digest: bytes = field(default=b"", repr=False, compare=False, metadata={"state": True})
    player: Player | None = field(default=None, repr=False, compare=False, metadata={"state": True})

    scope = "cache"
    part_names = ("head", "tokens", "checkpoints")

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            arguments.whole("checkpoint_every", self.checkpoint_every, 1, MOST_TOKENS)
        if (self.checkpoint_every is None) != (self.inner is None):
            raise ValueError("inner: expected a codec where checkpoint_every is a number, and none where it is None")
        if self.inner is not None and (self.inner.scope != "layer" or self.inner.needs or self.inner.state_bytes):
            raise ValueError(f"inner: expected a data-oblivious codec of single layers, got {self.inner}")

    @classmethod
    def of(cls, player: Player, checkpoint_every: int | None = None, inner: Codec | None = None) -> TokenReplay:
        """The codec of one model. inner: default TurboQuant(4) where there are checkpoints."""
        if checkpoint_every is not None and inner is None:
            from reference.turboquant import TurboQuant

            inner = TurboQuant(4)
        return cls(checkpoint_every, inner, player.digest, player)

    # -- state: which model --------------------------------------------------------------------------------------------

    def state_parts(self) -> list[Part]:
        return [self.digest] if self.digest else []

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> TokenReplay:
        if len(parts) != 1 or parts[0].remaining != 16:
            raise CorruptStream("state: expected the 16 bytes of a model's digest", parts[0].offset if parts else 0)
        return cls(**arguments, digest=bytes(parts[0].rest()))

    def with_player(self, player: Player) -> TokenReplay:
        """This codec, loaded from its state, with the model. StateMismatch if it is another one."""
        if player.digest != self.digest:
            raise StateMismatch(
                f"TokenReplay: written with the model {self.digest.hex()}, given is {player.digest.hex()}"
            )
        return type(self)(self.checkpoint_every, self.inner, self.digest, player)

    def _needed(self) -> Player:
        if self.player is None:
            raise StateMismatch(
                "TokenReplay: needs the model itself: reference.load(state).with_player(player), or TokenReplay.of(player)"
            )
        return self.player

    # -- encode --------------------------------------------------------------------------------------------------------

    def encode_parts(self, data: Any, progress: Progress | None = None) -> list[Part]:
        player = self._needed()
        layers = list(layers_of(data))
        tokens = self._tokens(data, player)
        like = _likes(layers, player)
        coder, run = TokenEncoder(player.vocabulary), _Run(self, player, like)
        for t, token in enumerate(tokens.tolist()):
            coder.encode(token, run.law)
            if (t + 1) % CHECK_EVERY == 0:
                coder.check(CHECK_BITS)
            run.take(token)
            if progress is not None:
                progress(t + 1, len(tokens))
        checkpoints = run.checkpoints()
        head = b"".join(
            [
                varint(len(tokens)),
                *(varint(n) for n in like.sizes),
                bytes([DTYPES.index(like.dtype.name)]),
                plan_digest(player),
                run.checksum.to_bytes(4, "little"),
            ]
        )
        return [head, coder.words(), checkpoints]

    @staticmethod
    def _tokens(data: Any, player: Player) -> NDArray[np.int64]:
        tokens = data.tokens if isinstance(data, Cache) else None
        if tokens is None:
            raise ValueError("cache: TokenReplay needs cache.tokens, of a kvtheory.Cache; got none")
        if len(tokens) > MOST_TOKENS:
            raise ValueError(f"tokens: expected at most {MOST_TOKENS}, got {len(tokens)}")
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < player.vocabulary):
            raise ValueError(
                f"tokens: expected 0 to {player.vocabulary - 1}, got {int(tokens.min())} to {int(tokens.max())}"
            )
        return np.asarray(tokens, np.int64)

    # -- decode --------------------------------------------------------------------------------------------------------

    def decode_parts(self, parts: list[Reader]) -> list[Decoded]:
        return self.replay(parts)[1]

    def replay(self, parts: list[Reader], progress: Progress | None = None) -> tuple[NDArray[np.int64], list[Decoded]]:
        """(tokens, the layers) of the parts of a stream."""
        player = self._needed()
        head = _Head.read(parts[0])
        if head.like.sizes[0] != player.layers:
            parts[0].fail(f"layers: expected the model's {player.layers}, got {head.like.sizes[0]}", parts[0].offset)
        start = parts[1].offset
        # every 64 tokens cost a check symbol at least: more tokens than that would be no encoder's
        if head.tokens // CHECK_EVERY * CHECK_BITS > 8 * parts[1].remaining + 64:
            parts[0].fail(f"tokens: {parts[1].remaining} bytes cannot hold {head.tokens}", parts[0].offset)
        coder, run = TokenDecoder(parts[1], player.vocabulary), _Run(self, player, head.like, head.tokens, parts[2])
        tokens = np.zeros(head.tokens, np.int64)
        for t in range(head.tokens):
            tokens[t] = coder.decode(run.law)
            if (t + 1) % CHECK_EVERY == 0:
                coder.check(CHECK_BITS, f"the check symbol behind token {t}: {self._hint(head, player)}")
            run.take(int(tokens[t]))
            if progress is not None:
                progress(t + 1, head.tokens)
        coder.end()
        hint = self._hint(head, player)
        if run.checksum != head.checksum:
            raise CorruptStream(
                f"tokens, keys, values: the checksum of what was replayed does not match: {hint}", start
            )
        return tokens, run.decoded()

    @staticmethod
    def _hint(head: _Head, player: Player) -> str:
        if head.plan == plan_digest(player):
            return "the stream is damaged, or the player does not repeat itself"
        return f"the stream was written under the plan {head.plan.hex()}, this is {plan_digest(player).hex()}: {json.dumps(dict(player.plan))}"

    def decode_tokens(self, data: bytes) -> NDArray[np.int64]:
        """The tokens of a stream, (n,) int64."""
        header, groups = stream.read(data)
        self._like(header)  # the same model, or StateMismatch
        return self.replay(self._named(groups[0]))[0]

    @classmethod
    def shapes_in(cls, parts: list[Reader]) -> list[Shape]:
        if not parts:
            raise CorruptStream("TokenReplay: expected 3 parts, got 0", 0)
        head = _Head.read(parts[0])
        layers, heads, d, dv = head.like.sizes
        kind = DTYPES.index(head.like.dtype.name)
        return [Shape(heads, head.tokens, d, dv, kind, kind, i, range(head.tokens)) for i in range(layers)]

    def decode_flops(self, stream_: bytes) -> int:
        """Of the forward passes (attention included) and of the inner codec: what "decoding" costs here."""
        player = self._needed()
        _, groups = stream.read(stream_)
        parts = self._named(groups[0])
        head = _Head.read(parts[0])
        total = 0
        for t in range(head.tokens):
            if not self.stored(t):
                total += player.flops + player.attention_flops(t + 1)
        if self.inner is not None:
            for part in _split(parts[2], head.like.sizes[0]):
                data = stream.write(self.inner._header(Kind.LAYER), [[bytes(p.rest()) for p in stream.split(part)]])
                total += self.inner.decode_flops(data)
        return total

    def stored(self, position: int) -> bool:
        return self.checkpoint_every is not None and (position + 1) % self.checkpoint_every == 0


@dataclass(frozen=True)
class _Like:
    """sizes: layers, kv_heads, head_dim, value_dim; element type that the decoded cache has."""

    sizes: tuple[int, int, int, int]
    dtype: np.dtype[Any]


def _likes(layers: list[Layer], player: Player) -> _Like:
    if len(layers) != player.layers:
        raise ValueError(f"cache: expected the {player.layers} layers of the model, got {len(layers)}")
    kinds = {
        (
            one.kv_heads,
            one.head_dim,
            one.value_dim,
            one.keys.dtype.newbyteorder("="),
            one.values.dtype.newbyteorder("="),
        )
        for one in layers
    }
    if len(kinds) > 1:
        raise ValueError(f"cache: expected layers of one shape and element type, got {len(kinds)}")
    heads, d, dv, key_type, value_type = kinds.pop()
    if key_type != value_type:
        raise ValueError(f"cache: expected keys and values of one element type, got {key_type} and {value_type}")
    return _Like((len(layers), heads, d, dv), key_type)


@dataclass(frozen=True)
class _Head:
    tokens: int
    like: _Like
    plan: bytes
    checksum: int

    @classmethod
    def read(cls, reader: Reader) -> _Head:
        tokens = reader.varint("tokens", most=MOST_TOKENS)
        sizes = tuple(reader.varint(name, most=MOST_LAYERS) for name in ("layers", "kv_heads", "head_dim", "value_dim"))
        start = reader.offset
        kind = reader.u8("element type")
        if kind >= len(DTYPES) or not all(sizes):
            reader.fail("head: expected an element type below 4, and no size of 0", start)
        plan = bytes(reader.take(4, "digest of the plan"))
        checksum = int.from_bytes(reader.take(4, "checksum of tokens, keys and values"), "little")
        reader.end("head")
        return cls(tokens, _Like(sizes, _dtype(kind)), plan, checksum)  # type: ignore[arg-type]


def plan_digest(player: Player) -> bytes:
    """4 bytes of the SHA-256 of the plan as JSON, keys sorted."""
    return hashlib.sha256(json.dumps(dict(player.plan), sort_keys=True).encode()).digest()[:4]


class _Run:
    """Encoder and decoder do the same: run or store each position, and sum up what is held."""

    def __init__(
        self, codec: TokenReplay, player: Player, like: _Like, tokens: int = 0, given: Reader | None = None
    ) -> None:
        self.codec, self.like = codec, like
        self.play: Play = player.start()
        #: integer weights of the next token's law; None: uniform
        self.law: NDArray[np.int64] | None = None
        self.checksum = 0
        self._held: list[list[TokenKV]] = []
        self._stored: list[list[TokenKV]] = []
        self._given: list[list[TokenKV]] | None = None
        if given is not None:
            self._given = self._read(given, tokens)

    def take(self, token: int) -> None:
        t = len(self._held)
        if self.codec.stored(t):
            if self._given is None:
                # the encoder alone knows what stands here; what later tokens read is what the quantiser leaves of it
                exact = self.play.feed(token)
                kept = self._quantised(exact)
                self.play.revise(kept)
                self._stored.append([TokenKV(*(np.asarray(a) for a in one)) for one in exact])
            else:
                kept = self._given[len(self._stored)]
                self.play.put(kept)
                self._stored.append(kept)
            self.law = None
        else:
            kept = self.play.feed(token)
            assert self.play.logits is not None
            self.law = law_weights(self.play.logits)
        self.checksum = zlib.crc32(token.to_bytes(4, "little"), self.checksum)
        for keys, values in kept:
            for array in (keys, values):
                self.checksum = zlib.crc32(np.ascontiguousarray(array, "<f8").tobytes(), self.checksum)
        self._held.append(list(kept))

    def _quantised(self, kv: list[TokenKV]) -> list[TokenKV]:
        inner = self.codec.inner
        assert inner is not None
        out = []
        for one in kv:
            decoded = inner.decode(inner.encode(_as_layer([one])))
            out.append(TokenKV(decoded.keys[:, 0], decoded.values[:, 0]))
        return out

    def checkpoints(self) -> bytes:
        inner = self.codec.inner
        if inner is None:
            return b""
        pieces = []
        for i in range(self.like.sizes[0]):
            if self._stored:
                layer = _as_layer([kv[i] for kv in self._stored])
                body = stream.join(inner.encode_parts(layer))
            else:
                body = b""
            pieces += [varint(len(body)), body]
        data = b"".join(pieces)
        if self._stored:
            read = self._read(Reader(data), len(self._held))
            again = [self._quantised(kv) for kv in self._stored]
            for a, b in zip(read, again):
                if not all(np.array_equal(x, y) for one, two in zip(a, b) for x, y in zip(one, two)):
                    raise ValueError(f"inner: expected a codec that codes each token alone, got {inner}")
        return data

    def _read(self, reader: Reader, tokens: int) -> list[list[TokenKV]]:
        inner, every = self.codec.inner, self.codec.checkpoint_every
        if inner is None or every is None:
            reader.end("checkpoints")
            return []
        count = tokens // every
        layers, heads, d, dv = self.like.sizes
        found = []
        for part in _split(reader, layers):
            start = part.offset
            if not count:
                part.end("checkpoints")
                continue
            decoded = inner.decode_parts(inner._named(stream.split(part)))
            if decoded.keys.shape != (heads, count, d) or decoded.values.shape != (heads, count, dv):
                part.fail(f"checkpoints: expected keys {(heads, count, d)}, got {decoded.keys.shape}", start)
            found.append(decoded)
        return [[TokenKV(one.keys[:, j], one.values[:, j]) for one in found] for j in range(count)]

    def decoded(self) -> list[Decoded]:
        layers, heads, d, dv = self.like.sizes
        out = []
        for i in range(layers):
            keys, values = (
                np.stack([getattr(kv[i], name) for kv in self._held], axis=1)
                if self._held
                else np.zeros((heads, 0, dim))
                for name, dim in (("keys", d), ("values", dv))
            )
            out.append(Decoded.of(keys.astype(self.like.dtype), values.astype(self.like.dtype)))
        return out


def _as_layer(kv: list[TokenKV]) -> Layer:
    return Layer(
        *(np.stack([np.asarray(getattr(one, name), np.float32) for one in kv], axis=1) for name in ("keys", "values"))
    )


def _split(reader: Reader, layers: int) -> list[Reader]:
    out = [
        reader.part(reader.varint("length of a layer's checkpoints", most=reader.remaining), "checkpoints")
        for _ in range(layers)
    ]
    reader.end("checkpoints")
    return out
