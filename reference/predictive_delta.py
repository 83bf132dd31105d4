"""PredictiveDelta: layer 2 of arXiv 2604.15356: what a predictor expects is subtracted, the residual quantised by any data-oblivious codec.

Closed loop (theory 1.4): for each position t, and in it layer by layer

    KVhat_t = predictor(what the decoder has)         from the reconstructed past, the law or the token, the layers below
    R_t     = KV_t - KVhat_t,   stored: Q_b(R_t)      Q the inner codec, b its bits
    past   <- KVhat_t + Q_b(R_t)                      so that KV_t - past_t = R_t - Q_b(R_t): the quantiser's own error and no more

open_loop=True: the encoder subtracts what it expects from the *exact* past; the decoder, which has no such thing, adds what it expects from
its own. The two drift apart. For the claim that they do, not for use.

What a decoder needs is in the stream or counted: tokens, arithmetic-coded under the law where there is one (as in TokenReplay, with its check
symbols); bits of each position; the model's forward passes in `decode_flops`. A checksum of tokens and, where the model is run, of keys and
values finds a decoder that went another way (another plan: floats differ, theory A10).

adaptive="paper": b_t = max(1, floor(b_0 h_t / hbar)) bits a component, b_0 = inner.bits, h_t the surprisal of t's token. "corrected": bits of
each position and layer by reverse water-filling on the residual's energy, 0 allowed: b = 1/2 log2(E / theta), rounded. Both at most
b_0 + 3 and 8, and sent as codes of 4 bits: a decoder of "paper" that had h_t would have the token, and with it the exact prediction.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.accounting import adaptive_bits
from kvtheory.layer import Cache, Decoded, Layer
from kvtheory.prediction import Known, Player, Prediction, Predictor, SmallerModel, TokenKV, TokenTable, law_weights
from kvtheory.rate import water_level
from reference import packing, stream
from reference.codec import Codec, layers_of
from reference.entropy_coding import TokenDecoder, TokenEncoder
from reference.errors import CorruptStream, StateMismatch
from reference.predictors import MOST_SIZE, known, read_predictor, write_predictor
from reference.shape import DTYPES, Shape, _dtype
from reference.stream import Kind, Part, Reader, varint
from reference.token_replay import CHECK_BITS, CHECK_EVERY, MOST_TOKENS, plan_digest
from reference.vectors import largest

__all__ = ["MOST_BITS", "PredictiveDelta"]

#: of a component of the residual, where bits adapt; and at most so many above the inner codec's own
MOST_BITS, MOST_ABOVE = 8, 3
CODE_BITS = 4
#: the smallest probability of a token that the coder knows, in bits
LEAST_LIKELY = 24.0

Progress = Callable[[int, int], None]
Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class PredictiveDelta(Codec):
    """PredictiveDelta(predictor, inner, adaptive=None | "paper" | "corrected", player=...).

    predictor: of `kvtheory.prediction`; state, with what was fitted. player: the model that it runs ("player" in predictor.needs), no part of
    the state, which has its digest; `with_player` gives it back after `reference.load`. inner: default TurboQuant(3); a codec of single layers
    that codes each vector alone (TurboQuant, QJL, PolarQuant, Full); with `adaptive` one with `bits`.

    encode(cache): layers of one shape and element type, positions 0, 1, ...; `cache.tokens` where the predictor needs tokens or the law.
    decode: CorruptStream where a check fails; keys and values exactly as the encoder's loop left them.
    """

    predictor: Predictor | None = field(default=None, metadata={"state": True})
    inner: Codec | None = None
    adaptive: Literal["paper", "corrected"] | None = None
    open_loop: bool = False
    digest: bytes = field(default=b"", repr=False, compare=False, metadata={"state": True})
    player: Player | None = field(default=None, repr=False, compare=False, metadata={"state": True})

    scope = "cache"
    part_names = ("head", "tokens", "bits", "residuals")

    def __post_init__(self) -> None:
        if self.inner is None:
            from reference.turboquant import TurboQuant

            object.__setattr__(self, "inner", TurboQuant(3))
        if self.inner.scope != "layer" or self.inner.needs or self.inner.state_bytes:  # type: ignore[union-attr]
            raise ValueError(f"inner: expected a data-oblivious codec of single layers, got {self.inner}")
        if self.adaptive not in (None, "paper", "corrected"):
            raise ValueError(f"adaptive: expected paper, corrected or None, got {self.adaptive!r}")
        if self.adaptive is not None and not 1 <= getattr(self.inner, "bits", 0) <= MOST_BITS:
            raise ValueError(
                f"inner: expected a codec with bits from 1 to {MOST_BITS} where they adapt, got {self.inner}"
            )
        if self.predictor is not None and not known(self.predictor):
            raise TypeError(f"predictor: expected one of kvtheory.prediction, got {type(self.predictor).__name__}")
        if self.player is not None and not self.digest:
            object.__setattr__(self, "digest", self.player.digest if self._runs("player") else b"")

    def _runs(self, *needs: str) -> bool:
        return self.predictor is not None and not self.predictor.needs.isdisjoint(needs)

    @property
    def _bits(self) -> int:
        """b_0; 0 for an inner codec without bits, whose level is one and only."""
        return int(getattr(self.inner, "bits", 0))

    @property
    def _most(self) -> int:
        return min(MOST_BITS, self._bits + MOST_ABOVE)

    # -- state: predictor, and which model -----------------------------------------------------------------------------

    def state_parts(self) -> list[Part]:
        if self.predictor is None:
            return []
        if self._runs("player") and not self.digest:
            raise ValueError(f"player: {self.predictor.name} runs a model; give it as player=")
        return write_predictor(self.predictor, self.digest)

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> PredictiveDelta:
        if len(parts) != 2:
            raise CorruptStream(f"state: expected 2 parts, got {len(parts)}", parts[0].offset if parts else 0)
        start = parts[0].offset
        predictor, digest = read_predictor(parts)
        try:
            return cls(predictor, **arguments, digest=digest)
        except (TypeError, ValueError) as problem:
            raise CorruptStream(f"parameters of PredictiveDelta: {problem}", start) from None

    def with_player(self, player: Player | None = None, smaller: Player | None = None) -> PredictiveDelta:
        """This codec, loaded from its state, with the model that it runs, or SmallerModel's. StateMismatch if it is another one."""
        predictor = self.predictor
        if player is not None and player.digest != self.digest:
            raise StateMismatch(
                f"PredictiveDelta: fitted with the model {self.digest.hex()}, given is {player.digest.hex()}"
            )
        if smaller is not None:
            if not isinstance(predictor, SmallerModel) or predictor.digest != smaller.digest:
                raise StateMismatch(
                    f"PredictiveDelta: {predictor} was not fitted with the smaller model {smaller.digest.hex()}"
                )
            predictor = predictor.with_player(smaller)
        return replace(self, predictor=predictor, player=self.player if player is None else player)

    def _ready(self) -> Predictor:
        if self.predictor is None:
            raise StateMismatch(
                "PredictiveDelta: needs a predictor: PredictiveDelta(predictor, ...) or reference.load(state)"
            )
        if self._runs("player") and self.player is None:
            raise StateMismatch(
                f"PredictiveDelta: {self.predictor.name} runs the model; give it with with_player(player)"
            )
        if isinstance(self.predictor, SmallerModel) and self.predictor.player is None:
            raise StateMismatch("PredictiveDelta: needs the smaller model; give it with with_player(smaller=player)")
        return self.predictor

    # -- encode --------------------------------------------------------------------------------------------------------

    def encode_parts(self, data: Any, progress: Progress | None = None) -> list[Part]:
        predictor = self._ready()
        layers = list(layers_of(data))
        sizes, dtype = _alike(layers)
        own = getattr(predictor, "sizes", sizes)
        if own != sizes:
            raise ValueError(
                f"cache: expected layers, kv_heads, head_dim, value_dim {own} of the predictor, got {sizes}"
            )
        tokens = self._tokens(data) if self._runs("token", "law") else None
        surprisals = getattr(data, "surprisal_bits", None)
        plan = self._allocate(layers, sizes, tokens, surprisals) if self.adaptive else None
        mirror = _Loop(self, sizes, _refuse)
        exact = _Loop(self, sizes, _refuse) if self.open_loop else None
        coder = TokenEncoder(self._vocabulary()) if tokens is not None else None
        store = _Store(self, sizes)
        held: list[list[TokenKV]] = []
        count = layers[0].tokens
        for t in range(count):
            token = None if tokens is None else int(tokens[t])
            if coder is not None and token is not None:
                coder.encode(token, mirror.coding_law)
                if (t + 1) % CHECK_EVERY == 0:
                    coder.check(CHECK_BITS)
            given = _at(layers, t)
            expected = mirror.predict(token)
            source = expected if exact is None else exact.predict(token)
            kept = self._code(given, expected, source, exact is not None, store, plan, t, dtype)
            mirror.took(token, kept)
            if exact is not None:
                exact.took(token, given)
            held.append(kept)
            if progress is not None:
                progress(t + 1, count)
        head = [varint(count), *(varint(n) for n in sizes), bytes([DTYPES.index(dtype.name)]), self._plan_digest()]
        bits = packing.pack(np.array(store.codes, np.int64), CODE_BITS) if self.adaptive else b""
        return [
            b"".join([*head, mirror.checksum.to_bytes(4, "little")]),
            coder.words() if coder is not None else b"",
            bits,
            store.parts(),
        ]

    def _code(
        self, given: list[TokenKV], expected: Prediction, source: Prediction, exact: bool, store: _Store, plan: _Allocation | None,
        position: int, dtype: np.dtype[Any],
    ) -> list[TokenKV]:  # fmt: skip
        """The reconstructed position. expected: the decoder's prediction; source: what the residual is taken of; exact: from the exact past."""
        assert self.predictor is not None
        if self.predictor.ahead and not exact:
            # residuals of values are known once the keys are reconstructed, and those of a layer once the one below is
            kept: list[TokenKV] = []
            for i, (keys, values) in enumerate(given):
                key_hat = expected.keys(i, kept)
                key_residual = keys - key_hat
                bits = self._level(plan, position, i, key_residual, values - expected.values(i, kept, keys))
                coded = store.quantise([(key_residual, np.zeros_like(values))], bits)[0]
                rebuilt = _cast(key_hat + coded[0], dtype)
                value_hat = expected.values(i, kept, rebuilt)
                residual = (key_residual, values - value_hat)
                coded = store.keep(position, [i], [residual], bits)[0]
                kept.append(TokenKV(rebuilt, _cast(value_hat + coded[1], dtype)))
            return kept
        residuals = [
            (keys - source.keys(i, given[:i]), values - source.values(i, given[:i], keys))
            for i, (keys, values) in enumerate(given)
        ]
        levels = [self._level(plan, position, i, *residual) for i, residual in enumerate(residuals)]
        coded_all: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
        for bits in sorted(set(levels)):
            chosen = [i for i, level in enumerate(levels) if level == bits]
            coded_all.update(zip(chosen, store.keep(position, chosen, [residuals[i] for i in chosen], bits)))
        return _rebuilt(expected, [coded_all[i] for i in range(len(given))], dtype)

    def _level(
        self, plan: _Allocation | None, position: int, layer: int, keys: NDArray[Any], values: NDArray[Any]
    ) -> int:
        if plan is None:
            return self._bits
        if self.adaptive == "paper":
            return int(plan.bits[position])
        # b = 1/2 log2(E / theta)
        energy = plan.relative(layer, keys, values)
        return (
            0
            if energy <= plan.level
            else int(np.clip(round(0.5 * math.log2(energy / plan.level)), 0, self._most))
            if plan.level
            else self._most
        )

    def _allocate(
        self, layers: list[Layer], sizes: Sizes, tokens: NDArray[np.int64] | None, surprisals: Any
    ) -> _Allocation:
        """From the exact past: surprisals for "paper", the level theta at which `corrected` spends b_0 bits in the mean."""
        count = layers[0].tokens
        scale = np.array(
            [
                [
                    float((np.asarray(a, np.float64)[:, 1:] ** 2).mean()) if a.shape[1] > 1 else 1.0
                    for a in (one.keys, one.values)
                ]
                for one in layers
            ]
        )
        plan = _Allocation(np.zeros(count, np.int64), 0.0, np.where(scale > 0, scale, 1.0))
        if not count or (self.adaptive == "paper" and surprisals is not None):
            bits = adaptive_bits(np.asarray(surprisals, np.float64).tolist(), self._bits) if count else []
            return replace(plan, bits=np.minimum(np.array(bits, np.int64), self._most))
        if self.adaptive == "paper" and tokens is None:
            assert self.predictor is not None
            raise ValueError(
                f"cache: {self.predictor.name} has no law; the paper's rule needs cache.surprisal_bits, got none"
            )
        loop, seen, energies = _Loop(self, sizes, _refuse), [], []
        for t in range(count):
            token = None if tokens is None else int(tokens[t])
            if self.adaptive == "paper":
                assert token is not None
                seen.append(_surprisal(loop.coding_law, token, self._vocabulary()))
            given = _at(layers, t)
            expected = loop.predict(token)
            if self.adaptive == "corrected":
                energies += [
                    plan.relative(i, keys - expected.keys(i, given[:i]), values - expected.values(i, given[:i], keys))
                    for i, (keys, values) in enumerate(given)
                ]
            loop.took(token, given)
        if self.adaptive == "paper":
            return replace(plan, bits=np.minimum(np.array(adaptive_bits(seen, self._bits), np.int64), self._most))
        return replace(plan, level=water_level(energies, self._bits))

    def _vocabulary(self) -> int:
        predictor = self.predictor
        if isinstance(predictor, TokenTable):
            return predictor.vocabulary
        its = predictor.player if isinstance(predictor, SmallerModel) else self.player
        assert its is not None
        return its.vocabulary

    def _tokens(self, data: Any) -> NDArray[np.int64]:
        assert self.predictor is not None
        tokens = data.tokens if isinstance(data, Cache) else None
        if tokens is None:
            raise ValueError(f"cache: {self.predictor.name} needs cache.tokens, of a kvtheory.Cache; got none")
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < self._vocabulary()):
            raise ValueError(
                f"tokens: expected 0 to {self._vocabulary() - 1}, got {int(tokens.min())} to {int(tokens.max())}"
            )
        return np.asarray(tokens, np.int64)

    def _plan_digest(self) -> bytes:
        return plan_digest(self.player) if self._runs("player") and self.player is not None else bytes(4)

    # -- decode --------------------------------------------------------------------------------------------------------

    def decode_parts(self, parts: list[Reader]) -> list[Decoded]:
        return self.rebuild(parts)[1]

    def rebuild(self, parts: list[Reader], progress: Progress | None = None) -> tuple[NDArray[np.int64], list[Decoded]]:
        """(tokens, the layers) of the parts of a stream; no tokens where the stream has none."""
        predictor = self._ready()
        head = _Head.read(parts[0])
        start = parts[0].offset
        own = getattr(predictor, "sizes", head.sizes)
        if own != head.sizes or (
            self.player is not None and self._runs("player") and self.player.layers != head.sizes[0]
        ):
            parts[0].fail(f"sizes: expected {own} of the predictor and the model's layers, got {head.sizes}", start)
        codes = self._read_codes(parts[2], head)
        residuals = self._read_residuals(parts[3], head, codes)
        with_tokens = self._runs("token", "law")
        if with_tokens and head.tokens // CHECK_EVERY * CHECK_BITS > 8 * parts[1].remaining + 64:
            parts[1].fail(f"tokens: {parts[1].remaining} bytes cannot hold {head.tokens}")
        if not with_tokens:
            parts[1].end("tokens, of a predictor without")
        hint = self._hint(head)

        def fail(problem: str) -> NoReturn:
            parts[0].fail(f"{problem}: {hint}", start)

        coder = TokenDecoder(parts[1], self._vocabulary()) if with_tokens else None
        loop = _Loop(self, head.sizes, fail)
        tokens = np.zeros(head.tokens if with_tokens else 0, np.int64)
        held: list[list[TokenKV]] = []
        for t in range(head.tokens):
            token = None
            if coder is not None:
                token = coder.decode(loop.coding_law)
                tokens[t] = token
                if (t + 1) % CHECK_EVERY == 0:
                    coder.check(CHECK_BITS, f"the check symbol behind token {t}: {hint}")
            kept = _rebuilt(loop.predict(token), [layer(t) for layer in residuals], head.dtype)
            loop.took(token, kept)
            held.append(kept)
            if progress is not None:
                progress(t + 1, head.tokens)
        if coder is not None:
            coder.end()
        if loop.checksum != head.checksum:
            fail("tokens, keys, values: the checksum of what was rebuilt does not match")
        return tokens, _decoded(held, head.sizes, head.dtype)

    def _hint(self, head: _Head) -> str:
        if head.plan == self._plan_digest():
            return "the stream is damaged, or the player does not repeat itself"
        plan = json.dumps(dict(self.player.plan)) if self.player is not None else "none"
        return f"the stream was written under the plan {head.plan.hex()}, this is {self._plan_digest().hex()}: {plan}"

    def _read_codes(self, reader: Reader, head: _Head) -> NDArray[np.int64]:
        """Bits (tokens, layers)."""
        layers = head.sizes[0]
        if self.adaptive is None:
            reader.end("bits, of a codec whose bits do not adapt")
            # nothing is allocated for it
            return np.broadcast_to(np.int64(self._bits), (head.tokens, layers))
        start, each = reader.offset, layers if self.adaptive == "corrected" else 1
        codes = packing.unpack(reader, head.tokens * each, CODE_BITS).astype(np.int64).reshape(head.tokens, each)
        least = 0 if self.adaptive == "corrected" else 1
        if codes.size and not (least <= int(codes.min()) and int(codes.max()) <= self._most):
            reader.fail(f"bits: expected {least} to {self._most}, got {int(codes.min())} to {int(codes.max())}", start)
        return np.broadcast_to(codes, (head.tokens, layers))

    def _read_residuals(self, reader: Reader, head: _Head, codes: NDArray[np.int64]) -> list[Callable[[int], Any]]:
        """Of each layer a function of the position that gives its residual (keys, values)."""
        assert self.inner is not None
        layers, heads, d, dv = head.sizes
        nothing = (np.zeros((heads, d)), np.zeros((heads, dv)))
        out: list[Callable[[int], Any]] = []
        for i in range(layers):
            place: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
            levels = [self._bits] if self.adaptive is None else range(1, self._most + 1)
            for bits in levels:
                where = range(head.tokens) if self.adaptive is None else np.flatnonzero(codes[:, i] == bits).tolist()
                if not len(where):
                    continue
                start = reader.offset
                group = stream.split(
                    reader.part(reader.varint("length of residuals", most=reader.remaining), "residuals")
                )
                inner = self._inner(bits)
                decoded = inner.decode_parts(inner._named(group))
                if decoded.keys.shape != (heads, len(where), d) or decoded.values.shape != (heads, len(where), dv):
                    reader.fail(f"residuals: expected keys {(heads, len(where), d)}, got {decoded.keys.shape}", start)
                # a float array of any type; what is not finite would travel on
                keys, values = (np.asarray(a, np.float64) for a in (decoded.keys, decoded.values))
                if not (np.isfinite(keys).all() and np.isfinite(values).all()):
                    reader.fail("residuals: expected finite numbers", start)
                place.update({t: (keys[:, j], values[:, j]) for j, t in enumerate(where)})
            out.append(lambda t, place=place: place.get(t, nothing))  # type: ignore[misc]
        reader.end("residuals")
        return out

    def _inner(self, bits: int) -> Codec:
        assert self.inner is not None
        return self.inner if bits == self._bits else replace(self.inner, bits=bits)  # type: ignore[type-var]

    @classmethod
    def shapes_in(cls, parts: list[Reader]) -> list[Shape]:
        head = _Head.read(parts[0])
        layers, heads, d, dv = head.sizes
        kind = DTYPES.index(head.dtype.name)
        return [Shape(heads, head.tokens, d, dv, kind, kind, i, range(head.tokens)) for i in range(layers)]

    def decode_flops(self, stream_: bytes) -> int:
        """Of the model's passes (attention included), the predictor's own, the inner codec's, and adding the two."""
        predictor = self._ready()
        _, groups = stream.read(stream_)
        parts = self._named(groups[0])
        head = _Head.read(parts[0])
        layers, heads, d, dv = head.sizes
        total = head.tokens * (predictor.flops + layers * heads * (d + dv))
        if self._runs("law", "pass"):
            assert self.player is not None
            for t in range(head.tokens):
                # the first position has no law, and no candidates
                passes = 1 + (predictor.candidates if t else 0)
                total += passes * (self.player.flops + self.player.attention_flops(t + 1))
        codes = self._read_codes(parts[2], head)
        for i in range(layers):
            for bits in sorted(set(codes[:, i].tolist()) - ({0} if self.adaptive else set())):
                inner = self._inner(bits)
                body = parts[3].part(parts[3].varint("length of residuals", most=parts[3].remaining))
                total += inner.decode_flops(
                    stream.write(inner._header(Kind.LAYER), [[bytes(p.rest()) for p in stream.split(body)]])
                )
        return total


# -- encoder and decoder do the same -----------------------------------------------------------------------------------


class _Loop:
    """A predictor at work on a past: the reconstructed one, or (the encoder's, in open loop) the exact one."""

    def __init__(self, codec: PredictiveDelta, sizes: Sizes, fail: Callable[[str], NoReturn]) -> None:
        assert codec.predictor is not None
        self._codec, self._sizes, self._fail = codec, sizes, fail
        self._needs = codec.predictor.needs
        self._running = codec.predictor.start(codec.player)
        self._play = codec.player.start() if codec._runs("law", "pass") and codec.player is not None else None
        self._law: NDArray[np.int64] | None = None
        self._previous: Sequence[TokenKV] | None = None
        self._passed: list[TokenKV] | None = None
        self._position = 0
        self.checksum = 0

    @property
    def coding_law(self) -> NDArray[np.int64] | None:
        """Of the next token, for its code; None: uniform."""
        return self._law if self._play is not None else self._running.law

    def predict(self, token: int | None) -> Prediction:
        if "pass" in self._needs:
            self._passed = self._feed(token)
        return self._running.predict(
            Known(
                self._position, self._sizes, self._previous,
                play=self._play if "law" in self._needs else None,
                law=self._law if "law" in self._needs else None,
                token=token if "token" in self._needs else None,
                passed=self._passed if "pass" in self._needs else None,
            )
        )  # fmt: skip

    def took(self, token: int | None, kept: Sequence[TokenKV]) -> None:
        """What the position holds from now on."""
        if self._play is not None:
            if "pass" not in self._needs:
                self._feed(token)
            self._play.revise([TokenKV(*(np.asarray(a, np.float64) for a in one)) for one in kept])
            self._law = None if self._play.logits is None else law_weights(self._play.logits)
        self._running.took(token)
        self._previous, self._passed = kept, None
        self._position += 1
        if token is not None:
            self.checksum = zlib.crc32(token.to_bytes(4, "little"), self.checksum)
        if self._play is not None:
            for one in kept:
                for array in one:
                    self.checksum = zlib.crc32(np.ascontiguousarray(array, "<f8").tobytes(), self.checksum)

    def _feed(self, token: int | None) -> list[TokenKV]:
        assert self._play is not None and token is not None
        kv = self._play.feed(token)
        found = (len(kv), *kv[0].keys.shape, kv[0].values.shape[-1])
        if found != self._sizes:
            self._fail(f"sizes: expected layers, kv_heads, head_dim, value_dim {found} of the model, got {self._sizes}")
        return kv


class _Store:
    """Residuals as the inner codec takes them: one by one while the loop runs, in the end together, with the same result."""

    def __init__(self, codec: PredictiveDelta, sizes: Sizes) -> None:
        self._codec, self._sizes = codec, sizes
        self.codes: list[int] = []
        self._kept: dict[tuple[int, int], list[Any]] = {}

    def quantise(
        self, residuals: Sequence[tuple[NDArray[Any], NDArray[Any]]], bits: int
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """What `bits` bits a component leave of each (keys, values)."""
        if bits == 0 and self._codec.adaptive is not None:
            return [(np.zeros_like(keys), np.zeros_like(values)) for keys, values in residuals]
        inner = self._codec._inner(bits)
        parts = inner.encode_parts(_as_layer(residuals))
        decoded = inner.decode_parts([Reader(part) for part in parts])
        keys, values = (np.asarray(a, np.float64) for a in (decoded.keys, decoded.values))
        return [(keys[:, j], values[:, j]) for j in range(len(residuals))]

    def keep(
        self, position: int, layers: Sequence[int], residuals: Sequence[tuple[NDArray[Any], NDArray[Any]]], bits: int
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        coded = self.quantise(residuals, bits)
        adaptive, count = self._codec.adaptive, self._sizes[0]
        if adaptive == "corrected":
            self.codes += [0] * ((position + 1) * count - len(self.codes))
            for i in layers:
                self.codes[position * count + i] = bits
        elif adaptive == "paper" and len(self.codes) == position:
            self.codes.append(bits)
        if bits or adaptive is None:
            for i, residual, its in zip(layers, residuals, coded):
                self._kept.setdefault((i, bits), []).append((residual, its))
        return coded

    def parts(self) -> bytes:
        """Layer by layer, of each the levels in ascending order: varint length, the inner codec's parts. Positions: by `codes`."""
        pieces: list[Part] = []
        for (_, bits), kept in sorted(self._kept.items()):
            inner = self._codec._inner(bits)
            body = stream.join(inner.encode_parts(_as_layer([residual for residual, _ in kept])))
            decoded = inner.decode_parts(inner._named(stream.split(Reader(body))))
            alone = [np.stack([its[side] for _, its in kept], axis=1) for side in (0, 1)]
            if not (np.array_equal(decoded.keys, alone[0]) and np.array_equal(decoded.values, alone[1])):
                raise ValueError(f"inner: expected a codec that codes each vector alone, got {inner}")
            pieces += [varint(len(body)), body]
        return b"".join(pieces)


@dataclass(frozen=True)
class _Allocation:
    """bits (tokens,) of "paper"; level theta of "corrected"; scale (layers, 2): mean square of a key's and a value's number."""

    bits: NDArray[np.int64]
    level: float
    scale: NDArray[np.float64]

    def relative(self, layer: int, keys: NDArray[Any], values: NDArray[Any]) -> float:
        """Mean square of a residual's number over that of the layer's, mean of keys and values."""
        energies = [float((np.asarray(a, np.float64) ** 2).mean()) for a in (keys, values)]
        return float(np.mean(energies / self.scale[layer]))


@dataclass(frozen=True)
class _Head:
    tokens: int
    sizes: Sizes
    dtype: np.dtype[Any]
    plan: bytes
    checksum: int

    @classmethod
    def read(cls, reader: Reader) -> _Head:
        tokens = reader.varint("tokens", most=MOST_TOKENS)
        sizes = tuple(reader.varint(name, most=MOST_SIZE) for name in ("layers", "kv_heads", "head_dim", "value_dim"))
        start = reader.offset
        kind = reader.u8("element type")
        if kind >= len(DTYPES) or not all(sizes):
            reader.fail("head: expected an element type below 4, and no size of 0", start)
        plan = bytes(reader.take(4, "digest of the plan"))
        checksum = int.from_bytes(reader.take(4, "checksum of what is rebuilt"), "little")
        reader.end("head")
        return cls(tokens, sizes, _dtype(kind), plan, checksum)  # type: ignore[arg-type]


def _refuse(problem: str) -> NoReturn:
    raise ValueError(f"cache: {problem}")


def _alike(layers: list[Layer]) -> tuple[Sizes, np.dtype[Any]]:
    if not layers:
        raise ValueError("cache: expected at least one layer, got none")
    kinds = {
        (
            one.kv_heads,
            one.head_dim,
            one.value_dim,
            one.keys.dtype.newbyteorder("="),
            one.values.dtype.newbyteorder("="),
            one.tokens,
        )
        for one in layers
    }
    if len(kinds) > 1:
        raise ValueError(f"cache: expected layers of one shape and element type, got {len(kinds)}")
    heads, d, dv, key_type, value_type, tokens = kinds.pop()
    if key_type != value_type:
        raise ValueError(f"cache: expected keys and values of one element type, got {key_type} and {value_type}")
    if tokens > MOST_TOKENS or max(len(layers), heads, d, dv) > MOST_SIZE:
        raise ValueError(f"cache: expected at most {MOST_TOKENS} tokens and sizes of {MOST_SIZE}")
    for one in layers:
        if not np.array_equal(one.positions, np.arange(tokens)):
            raise ValueError("positions: PredictiveDelta expects 0, 1, ..., got others")
        for name, array in (("keys", one.keys), ("values", one.values)):
            checks.finite(name, array, ("head", "token", "channel"))
    return (len(layers), heads, d, dv), np.dtype(key_type)


def _at(layers: list[Layer], position: int) -> list[TokenKV]:
    return [TokenKV(*(np.asarray(a[:, position], np.float64) for a in (one.keys, one.values))) for one in layers]


def _rebuilt(
    expected: Prediction, residuals: Sequence[tuple[NDArray[Any], NDArray[Any]]], dtype: np.dtype[Any]
) -> list[TokenKV]:
    kept: list[TokenKV] = []
    for i, (key_residual, value_residual) in enumerate(residuals):
        keys = _cast(expected.keys(i, kept) + key_residual, dtype)
        kept.append(TokenKV(keys, _cast(expected.values(i, kept, keys) + value_residual, dtype)))
    return kept


def _cast(x: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    most = largest(dtype)
    return np.clip(np.asarray(x, np.float64), -most, most).astype(dtype)


def _surprisal(law: NDArray[np.int64] | None, token: int, vocabulary: int) -> float:
    if law is None:
        return math.log2(vocabulary)
    weight = int(law[token])
    return min(LEAST_LIKELY, math.log2(int(law.sum()) / weight)) if weight else LEAST_LIKELY


def _as_layer(residuals: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Layer:
    return Layer(*(np.stack([np.asarray(pair[side], np.float32) for pair in residuals], axis=1) for side in (0, 1)))


def _decoded(held: list[list[TokenKV]], sizes: Sizes, dtype: np.dtype[Any]) -> list[Decoded]:
    layers, heads, d, dv = sizes
    out = []
    for i in range(layers):
        keys, values = (
            np.stack([getattr(kv[i], name) for kv in held], axis=1) if held else np.zeros((heads, 0, dim), dtype)
            for name, dim in (("keys", d), ("values", dv))
        )
        out.append(Decoded.of(keys, values))
    return out
