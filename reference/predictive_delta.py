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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtheory.accounting import adaptive_bits
from kvtheory.layer import Cache, Decoded, Layer
from kvtheory.prediction import Player, Prediction, Predictor, SmallerModel, TokenKV, TokenTable
from kvtheory.prediction.fitted import Fitted
from kvtheory.rate import water_level
from reference import packing, stream
from reference.codec import Codec, layers_of
from reference.delta_loop import (
    Allocation,
    Head,
    Loop,
    Pair,
    Sizes,
    Store,
    alike,
    ascending,
    at_position,
    cast,
    decoded_layers,
    read_shapes,
    rebuilt,
    refuse,
    surprisal,
)
from reference.entropy_coding import TokenDecoder, TokenEncoder
from reference.errors import CorruptStream, StateMismatch
from reference.predictors import known, read_predictor, write_predictor
from reference.shape import Shape
from reference.stream import Kind, Part, Reader, varint
from reference.token_replay import CHECK_BITS, CHECK_EVERY, plan_digest

__all__ = ["MOST_BITS", "PredictiveDelta"]

#: of a component of the residual, where bits adapt; and at most so many above the inner codec's own
MOST_BITS, MOST_ABOVE = 8, 3
CODE_BITS = 4

Progress = Callable[[int, int], None]


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
    part_names = ("shapes", "head", "tokens", "bits", "residuals")

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
        self._ready()
        given_layers = list(layers_of(data))
        shapes = [Shape.of(layer) for layer in given_layers]
        layers = [given_layers[i] for i in ascending(shapes)]
        sizes, dtype = alike(layers)
        self._fits(layers, sizes)
        tokens = self._tokens(data) if self._runs("token", "law") else None
        surprisals = getattr(data, "surprisal_bits", None)
        plan = self._allocate(layers, sizes, tokens, surprisals) if self.adaptive else None
        mirror = Loop(self, sizes, refuse)
        exact = Loop(self, sizes, refuse) if self.open_loop else None
        coder = TokenEncoder(self._vocabulary()) if tokens is not None else None
        store = Store(self, sizes)
        count = layers[0].tokens
        for t in range(count):
            token = None if tokens is None else int(tokens[t])
            if coder is not None and token is not None:
                coder.encode(token, mirror.coding_law)
                if (t + 1) % CHECK_EVERY == 0:
                    coder.check(CHECK_BITS)
            given = at_position(layers, t)
            expected = mirror.predict(token)
            source = expected if exact is None else exact.predict(token)
            kept = self._code(given, expected, source, exact is not None, store, plan, t, dtype)
            mirror.took(token, kept)
            if exact is not None:
                exact.took(token, given)
            if progress is not None:
                progress(t + 1, count)
        bits = packing.pack(np.array(store.codes, np.int64), CODE_BITS) if self.adaptive else b""
        written = [shape.write() for shape in shapes]
        return [
            b"".join([varint(len(written)), *(piece for shape in written for piece in (varint(len(shape)), shape))]),
            self._plan_digest() + mirror.checksum.to_bytes(4, "little"),
            coder.words() if coder is not None else b"",
            bits,
            store.parts(),
        ]

    def _fits(self, layers: list[Layer], sizes: Sizes) -> None:
        if not isinstance(self.predictor, Fitted):
            return
        own = self.predictor
        held = ", ".join("none" if i is None else str(i) for i in own.indices)
        for layer in layers:
            if layer.index not in own.indices:
                raise StateMismatch(
                    f"cache: {own.name} was fitted to layers of index {held}, got one of index {layer.index}"
                )
        if sizes != own.sizes:
            raise StateMismatch(
                f"cache: {own.name} was fitted to layers, kv_heads, head_dim, value_dim {own.sizes}, got {sizes}"
            )

    def _code(
        self, given: list[TokenKV], expected: Prediction, source: Prediction, exact: bool, store: Store, plan: Allocation | None,
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
                own_keys = cast(key_hat + coded[0], dtype)
                value_hat = expected.values(i, kept, own_keys)
                residual = (key_residual, values - value_hat)
                coded = store.keep(position, [i], [residual], bits)[0]
                kept.append(TokenKV(own_keys, cast(value_hat + coded[1], dtype)))
            return kept
        residuals = [
            (keys - source.keys(i, given[:i]), values - source.values(i, given[:i], keys))
            for i, (keys, values) in enumerate(given)
        ]
        levels = [self._level(plan, position, i, *residual) for i, residual in enumerate(residuals)]
        coded_all: dict[int, Pair] = {}
        for bits in sorted(set(levels)):
            chosen = [i for i, level in enumerate(levels) if level == bits]
            coded_all.update(zip(chosen, store.keep(position, chosen, [residuals[i] for i in chosen], bits)))
        return rebuilt(expected, [coded_all[i] for i in range(len(given))], dtype)

    def _level(
        self, plan: Allocation | None, position: int, layer: int, keys: NDArray[Any], values: NDArray[Any]
    ) -> int:
        if plan is None:
            return self._bits
        if self.adaptive == "paper":
            return int(plan.bits[position])
        # b = 1/2 log2(E / theta)
        energy = plan.relative(layer, keys, values)
        if energy <= plan.level:
            return 0
        return int(np.clip(round(0.5 * math.log2(energy / plan.level)), 0, self._most)) if plan.level else self._most

    def _allocate(
        self, layers: list[Layer], sizes: Sizes, tokens: NDArray[np.int64] | None, surprisals: Any
    ) -> Allocation:
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
        plan = Allocation(np.zeros(count, np.int64), 0.0, np.where(scale > 0, scale, 1.0))
        if not count or (self.adaptive == "paper" and surprisals is not None):
            bits = adaptive_bits(np.asarray(surprisals, np.float64).tolist(), self._bits) if count else []
            return replace(plan, bits=np.minimum(np.array(bits, np.int64), self._most))
        if self.adaptive == "paper" and tokens is None:
            assert self.predictor is not None
            raise ValueError(
                f"cache: {self.predictor.name} has no law; the paper's rule needs cache.surprisal_bits, got none"
            )
        loop, seen, energies = Loop(self, sizes, refuse), [], []
        for t in range(count):
            token = None if tokens is None else int(tokens[t])
            if self.adaptive == "paper":
                assert token is not None
                seen.append(surprisal(loop.coding_law, token, self._vocabulary()))
            given = at_position(layers, t)
            expected = loop.predict(token)
            if self.adaptive == "corrected":
                energies += [
                    plan.relative(i, keys - expected.keys(i, given[:i]), values - expected.values(i, given[:i], keys))
                    for i, (keys, values) in enumerate(given)
                ]
            loop.took(token, given)
        if self.adaptive == "paper":
            return replace(plan, bits=np.minimum(np.array(adaptive_bits(seen, self._bits), np.int64), self._most))
        # no level below what the most bits reach: what could not be spent there would be spent on the quantiser's own errors
        return replace(plan, level=max(water_level(energies, self._bits), max(energies) * 4.0**-self._most))

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
        head, start = Head.read(parts), parts[0].offset
        own: Any = predictor if isinstance(predictor, Fitted) else None
        if own is not None and (own.sizes != head.sizes or own.indices != head.indices):
            parts[0].fail(
                f"shapes: expected {own.sizes} and indices {own.indices} of the predictor, got {head.sizes} and {head.indices}",
                start,
            )
        if self.player is not None and self._runs("player") and self.player.layers != head.sizes[0]:
            parts[0].fail(f"shapes: expected the model's {self.player.layers} layers, got {head.sizes[0]}", start)
        codes = self._read_codes(parts[3], head)
        residuals = self._read_residuals(parts[4], head, codes)
        with_tokens = self._runs("token", "law")
        if with_tokens and head.tokens // CHECK_EVERY * CHECK_BITS > 8 * parts[2].remaining + 64:
            parts[2].fail(f"tokens: {parts[2].remaining} bytes cannot hold {head.tokens}")
        if not with_tokens:
            parts[2].end("tokens, of a predictor without")
        hint = self._hint(head)

        def fail(problem: str) -> NoReturn:
            parts[0].fail(f"{problem}: {hint}", start)

        coder = TokenDecoder(parts[2], self._vocabulary()) if with_tokens else None
        loop = Loop(self, head.sizes, fail)
        tokens = np.zeros(head.tokens if with_tokens else 0, np.int64)
        held: list[list[TokenKV]] = []
        for t in range(head.tokens):
            token = None
            if coder is not None:
                token = coder.decode(loop.coding_law)
                tokens[t] = token
                if (t + 1) % CHECK_EVERY == 0:
                    coder.check(CHECK_BITS, f"the check symbol behind token {t}: {hint}")
            kept = rebuilt(loop.predict(token), [layer(t) for layer in residuals], head.dtype)
            loop.took(token, kept)
            held.append(kept)
            if progress is not None:
                progress(t + 1, head.tokens)
        if coder is not None:
            coder.end()
        if loop.checksum != head.checksum:
            fail("tokens, keys, values: the checksum of what was rebuilt does not match")
        return tokens, decoded_layers(held, head)

    def _hint(self, head: Head) -> str:
        if head.plan == self._plan_digest():
            return "the stream is damaged, or the player does not repeat itself"
        plan = json.dumps(dict(self.player.plan)) if self.player is not None else "none"
        return f"the stream was written under the plan {head.plan.hex()}, this is {self._plan_digest().hex()}: {plan}"

    def _read_codes(self, reader: Reader, head: Head) -> NDArray[np.int64]:
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

    def _read_residuals(self, reader: Reader, head: Head, codes: NDArray[np.int64]) -> list[Callable[[int], Any]]:
        """Of each layer a function of the position that gives its residual (keys, values)."""
        assert self.inner is not None
        layers, heads, d, dv = head.sizes
        nothing = (np.zeros((heads, d)), np.zeros((heads, dv)))
        out: list[Callable[[int], Any]] = []
        for i in range(layers):
            place: dict[int, Pair] = {}
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
        if not parts:
            raise CorruptStream("PredictiveDelta: expected parts, got none", 0)
        return read_shapes(parts[0])

    def decode_flops(self, stream_: bytes) -> int:
        """Of the model's passes (attention included), the predictor's own, the inner codec's, and adding the two."""
        predictor = self._ready()
        _, groups = stream.read(stream_)
        parts = self._named(groups[0])
        head = Head.read(parts)
        layers, heads, d, dv = head.sizes
        total = head.tokens * (predictor.flops + layers * heads * (d + dv))
        if self._runs("law", "pass"):
            assert self.player is not None
            for t in range(head.tokens):
                # the first position has no law, and no candidates
                passes = 1 + (predictor.candidates if t else 0)
                total += passes * (self.player.flops + self.player.attention_flops(t + 1))
        codes = self._read_codes(parts[3], head)
        for i in range(layers):
            for bits in sorted(set(codes[:, i].tolist()) - ({0} if self.adaptive else set())):
                inner = self._inner(bits)
                body = parts[4].part(parts[4].varint("length of residuals", most=parts[4].remaining))
                total += inner.decode_flops(
                    stream.write(inner._header(Kind.LAYER), [[bytes(p.rest()) for p in stream.split(body)]])
                )
        return total
