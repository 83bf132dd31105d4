"""Claims about predictive delta coding (arXiv 2604.15356, layer 2): what its loop loses, what its predictor costs, what it gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import reference
from kvtheory import prediction
from kvtheory.distortion import attention_error
from kvtheory.layer import Cache, Layer
from kvtheory.prediction import Known, Play, TokenKV, ToyPlayer, law_weights
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical
from proofs_checks.sequential.toy_texts import player_of, text, write

PAPER = "2604.15356"
Result = Iterator[Evidence]

LABEL = "a toy transformer of 3 layers, 64 tokens, one KV head of 32 channels, its own text"

# -- what a predictor costs --------------------------------------------------------------------------------------------


class Counting:
    """A player whose forward passes are counted."""

    def __init__(self, player: ToyPlayer) -> None:
        self._player, self.passes = player, 0
        self.vocabulary, self.layers, self.digest = player.vocabulary, player.layers, player.digest
        self.plan, self.flops = player.plan, player.flops

    def attention_flops(self, tokens: int) -> int:
        return self._player.attention_flops(tokens)

    def start(self) -> Play:
        return _CountingPlay(self, self._player.start())  # type: ignore[return-value]


class _CountingPlay:
    def __init__(self, counter: Counting, play: Any) -> None:
        self._counter, self._play = counter, play

    def __getattr__(self, name: str) -> Any:
        return getattr(self._play, name)

    def feed(self, token: int) -> list[TokenKV]:
        self._counter.passes += 1
        return list(self._play.feed(token))

    def candidates(self, tokens: Any) -> list[TokenKV]:
        self._counter.passes += len(tokens)
        return list(self._play.candidates(tokens))


def passes_of(predictor: Any, player: ToyPlayer, tokens: NDArray[np.int64]) -> tuple[int, int]:
    """Target passes while a text is generated, the predictor beside it: in all, and without it."""
    counter = Counting(player)
    play, running = counter.start(), predictor.start(counter)
    sizes = (player.layers, player.kv_heads, player.head_dim, player.head_dim)
    alone, previous = 0, None
    for position, token in enumerate(tokens.tolist()):
        law = None if play.logits is None else law_weights(play.logits)
        prediction = running.predict(Known(position, sizes, previous, play=play, law=law))
        for layer in range(player.layers):
            prediction.keys(layer, [])
        previous = play.feed(token)
        alone += 1
        running.took(token)
    return counter.passes, alone


class _ByDraft:
    """The mean over the law, but F(past, v) is the draft model's: no pass of the target."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.candidates, self.forwards = 0, 1

    def start(self, player: Any) -> Any:
        draft = Counting(player_of(1))
        play, inner = draft.start(), prediction.TopK(self._k).start(draft)

        class Running:
            law = None

            def predict(self, known: Known) -> Any:
                found = inner.predict(Known(known.position, known.sizes, play=play, law=known.law))
                return found if known.law is None else prediction.Fixed(list(found.kv) * known.sizes[0])  # type: ignore[attr-defined]

            def took(self, token: int) -> None:
                play.feed(token)

        return Running()


class _Free:
    """Expects nothing."""

    def __init__(self, k: int) -> None:
        self.candidates, self.forwards = 0, 1

    def start(self, player: Any) -> Any:
        return self

    def predict(self, known: Known) -> Any:
        return prediction.Fixed.zero(known.sizes)

    def took(self, token: int) -> None:
        pass


def _declares(change: int) -> Any:
    def wrong(true: Function) -> Function:
        def make(k: int) -> Any:
            class Told(true):  # type: ignore[misc, valid-type]
                candidates = property(lambda self: self.k + change)
                forwards = property(lambda self: self.k + 1 + change)

            return Told(k)

        return make

    return wrong


@claim(
    id="prediction/speculative-predictor-free", paper=PAPER, section="speculative decoding: the predictor at zero additional cost",
    statement="Speculative decoding has the top-k distribution at hand, so that the predicted KV over it comes at no additional cost.",
    formula="forward passes of the target model beyond generation: 0",
    expected=Verdict.FAILS,
    functions={"predictor": "kvtheory.prediction.TopK"},
    mutants=[
        Mutant("the draft model's KV for the target's", "predictor", lambda true: _ByDraft),
        Mutant("no candidate is run", "predictor", lambda true: _Free),
    ],
    correction="prediction/speculative-predictor-cost",
)  # fmt: skip
def speculative_free(context: Context, *, predictor: Function) -> Result:
    """The distribution is there; F(past, v) is not: it is a pass of the target for each candidate v, and one candidate at most is the token."""
    player, length = player_of(), context.size(10, 40)
    tokens = text(player, length, context.rng("text")).tokens
    assert tokens is not None
    for k in (2, 8):
        passes, alone = passes_of(predictor(k), player, tokens)
        where = f"{LABEL}, {length} positions, top {k}"
        yield exact(what="passes of generation itself", ran_on=where, observed=alone, predicted=length, role="control")
        yield exact(
            what="target passes beyond generation, to have F(past, v) of the candidates", ran_on=where, observed=passes - alone, predicted=0,
            note="a draft tree verified by the target contains some of them; the path that is accepted has one a position",
        )  # fmt: skip


@claim(
    id="prediction/speculative-predictor-cost", paper=PAPER, section="speculative decoding, corrected; cost O(k d_model) of the top-k mean",
    statement="The mean over the k likeliest tokens costs k forward passes of the target a position, the first apart; of them at most one (that "
    "of the token that comes) is needed for anything else.",
    formula="passes = n + k (n − 1)",
    expected=Verdict.HOLDS,
    functions={"predictor": "kvtheory.prediction.TopK", "codec": "reference.PredictiveDelta"},
    mutants=[
        Mutant("one candidate less declared", "predictor", _declares(-1)),
        Mutant("one candidate more declared", "predictor", _declares(1)),
        Mutant("no candidate is run", "predictor", lambda true: _Free),
        Mutant("one candidate only", "predictor", lambda true: lambda k: true(1)),
        Mutant("decoding counted without candidates", "codec", lambda true: _uncounted),
    ],
)  # fmt: skip
def speculative_cost(context: Context, *, predictor: Function, codec: Function) -> Result:
    player, length = player_of(), context.size(10, 40)
    cache = text(player, length, context.rng("text"))
    assert cache.tokens is not None
    for k in (2, 8):
        its = predictor(k)
        where = f"{LABEL}, {length} positions, top {k}"
        passes, _ = passes_of(its, player, cache.tokens)
        yield exact(what="passes, counted", ran_on=where, observed=passes, predicted=length + k * (length - 1))
        yield exact(
            what="passes a position that the predictor declares", ran_on=where, observed=its.forwards, predicted=k + 1
        )
        yield exact(what="candidates that it declares", ran_on=where, observed=its.candidates, predicted=k)
    counter = Counting(player)
    coder = codec(prediction.TopK(4), reference.TurboQuant(2), player=counter)
    data = coder.encode(cache)
    counter.passes = 0
    coder.decode(data)
    where = f"{LABEL}, {length} positions, top 4: decoding a stream"
    yield exact(
        what="passes of the decoder, counted",
        ran_on=where,
        observed=counter.passes,
        predicted=length + 4 * (length - 1),
    )
    one = [player.flops + player.attention_flops(t + 1) for t in range(length)]
    plain = codec(prediction.KnownToken(), reference.TurboQuant(2), player=player)
    yield exact(
        what="operations that decode_flops counts beyond one pass a position: four passes at all but the first", ran_on=where,
        observed=coder.decode_flops(data) - plain.decode_flops(plain.encode(cache)), predicted=4 * sum(one[1:]),
    )  # fmt: skip


def _uncounted(*args: Any, **more: Any) -> Any:
    true = reference.PredictiveDelta(*args, **more)

    class Told:
        encode, decode = true.encode, true.decode

        def decode_flops(self, data: bytes) -> int:
            plain = reference.PredictiveDelta(prediction.KnownToken(), true.inner, player=true.player)
            return plain.decode_flops(data)

    return Told()


# -- what the loop loses -----------------------------------------------------------------------------------------------


def alone(inner: Any, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """What a codec leaves of one position's keys and values (kv_heads, d), by a stream of its own."""
    decoded = inner.decode(inner.encode(Layer(*(np.asarray(a, np.float32)[:, None] for a in (keys, values)))))
    return decoded.keys[:, 0].astype(np.float64), decoded.values[:, 0].astype(np.float64)


def _positions(layers: Sequence[Any], t: int) -> list[TokenKV]:
    return [TokenKV(one.keys[:, t].astype(np.float64), one.values[:, t].astype(np.float64)) for one in layers]


def errors_and_residuals(
    predictor: Any, inner: Any, player: ToyPlayer, cache: Cache, decoded: Sequence[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of each position: squared error of what was decoded, and of quantising the residual that the decoded past leaves, by itself."""
    assert cache.tokens is not None
    running, play = predictor.start(player), player.start()
    sizes = (player.layers, player.kv_heads, player.head_dim, player.head_dim)
    own, expected = [], []
    for t, token in enumerate(cache.tokens.tolist()):
        law = None if play.logits is None else law_weights(play.logits)
        previous = _positions(decoded, t - 1) if t else None
        guess = running.predict(Known(t, sizes, previous, play=play, law=law))
        here, kept = _positions(list(cache), t), _positions(decoded, t)
        squares = [0.0, 0.0]
        for i, (true, found) in enumerate(zip(here, kept)):
            keys, values = guess.keys(i, kept[:i]), guess.values(i, kept[:i], found.keys)
            left = alone(inner, true.keys - keys, true.values - values)
            squares[0] += sum(float(((a - b) ** 2).sum()) for a, b in zip(true, found))
            squares[1] += sum(float(((a - b - c) ** 2).sum()) for a, b, c in zip(true, (keys, values), left))
        own.append(squares[0])
        expected.append(squares[1])
        play.feed(token)
        play.revise(kept)
        running.took(token)
    return np.array(own), np.array(expected)


def _inner_made(change: Any) -> Any:
    return lambda true: lambda predictor, inner, **more: true(predictor, change(inner), **more)


@claim(
    id="prediction/closed-loop-error", paper=PAPER, section="additivity of the two layers: composition with any quantiser",
    statement="The error of what is stored is the residual quantiser's own, at every position, whatever the predictor and the quantiser. "
    "Predicting from the exact past instead adds errors up along the text.",
    formula="KV_t − KVhat'_t = R_t − Q(R_t);   open loop, previous position: = Σ_{s≤t} (R_s − Q(R_s))",
    assumptions=("closed loop: the encoder predicts from what the decoder has",),
    expected=Verdict.HOLDS_UNDER,
    functions={"codec": "reference.PredictiveDelta"},
    mutants=[
        Mutant("open loop", "codec", lambda true: lambda predictor, inner, **more: true(predictor, inner, **{**more, "open_loop": True})),
        Mutant("a bit less", "codec", _inner_made(lambda inner: reference.TurboQuant(inner.bits - 1))),
        Mutant("another rotation", "codec", _inner_made(lambda inner: reference.TurboQuant(inner.bits, seed=7))),
    ],
)  # fmt: skip
def closed_loop_error(context: Context, *, codec: Function) -> Result:
    player, length = player_of(), context.size(24, 96)
    cache = text(player, length, context.rng("text"))
    inner = reference.TurboQuant(2)
    predictors: dict[str, Any] = {
        "previous position": prediction.PreviousToken.of(cache),
        "layer below": prediction.LayerLinear.fit(text(player, 100, context.rng("calibration"))),
        "mean of the 4 likeliest": prediction.TopK(4),
    }
    drift = {}
    for name, predictor in predictors.items():
        where = f"{LABEL}, {length} positions, {name}, 2-bit TurboQuant"
        its = codec(predictor, inner, player=player)
        own, expected = errors_and_residuals(predictor, inner, player, cache, its.decode(its.encode(cache)))
        at = int(np.argmax(np.abs(own / expected - 1)))
        yield numerical(
            what="‖KV_t − KVhat'_t‖² = ‖R_t − Q(R_t)‖² at every position, the furthest", ran_on=where, observed=float(own[at]), predicted=float(expected[at]),
            tolerance=1e-4, because="what is stored is float32, its residual a difference of numbers of size 1", note=f"at position {at}",
        )  # fmt: skip
        drift[name] = float(own[length // 2 :].mean())
    # the last three lines are the open loop's, whatever `codec` is
    for name, predictor in predictors.items():
        where = f"{LABEL}, {length} positions, {name}, 2-bit TurboQuant"
        opened = reference.PredictiveDelta(predictor, inner, open_loop=True, player=player)
        decoded = opened.decode(opened.encode(cache))
        if name == "previous position":
            error, total = _added_up(inner, predictor, player, cache, decoded)
            yield numerical(
                what="error of the last position in open loop = sum of all quantisation errors, turned on", ran_on=where, observed=error, predicted=total,
                tolerance=1e-4, because="float32 sums", role="control",
            )  # fmt: skip
        half = [_positions(list(cache), t) for t in range(length // 2, length)]
        kept = [_positions(decoded, t) for t in range(length // 2, length)]
        squares = np.mean(
            [
                sum(float(((a - b) ** 2).sum()) for one, two in zip(x, y) for a, b in zip(one, two))
                for x, y in zip(half, kept)
            ]
        )
        yield numerical(
            what="squared error in open loop over that in closed loop, second half of the text, is above 1", ran_on=where, observed=float(squares) / drift[name],
            predicted=1.0, relation=">", tolerance=0.0, because="reported", role="assumption",
        )  # fmt: skip


def _added_up(
    inner: Any, predictor: Any, player: ToyPlayer, cache: Cache, decoded: Sequence[Any]
) -> tuple[float, float]:
    """Squared error of the last position, and squared length of the sum of all positions' quantisation errors, keys turned to the last."""
    layers, last = list(cache), layers_tokens(cache) - 1
    sums = [TokenKV(np.zeros_like(kv.keys), np.zeros_like(kv.values)) for kv in _positions(layers, 0)]
    turned: list[TokenKV] | None = None
    for t in range(last + 1):
        before = None if t == 0 else _positions(layers, t - 1)
        sizes = (player.layers, player.kv_heads, player.head_dim, player.head_dim)
        guess = predictor.predict(Known(t, sizes, before))
        turned = []
        for i, true in enumerate(_positions(layers, t)):
            residual = (true.keys - guess.keys(i, []), true.values - guess.values(i, [], true.keys))
            left = alone(inner, *residual)
            carried = player.rope.apply(sums[i].keys[:, None], np.array([1]))[:, 0] if t else sums[i].keys
            turned.append(TokenKV(carried + residual[0] - left[0], sums[i].values + residual[1] - left[1]))
        sums = turned
    observed = sum(
        float(((a - b) ** 2).sum())
        for one, two in zip(_positions(layers, last), _positions(decoded, last))
        for a, b in zip(one, two)
    )
    return observed, sum(float((a**2).sum()) for one in sums for a in one)


def layers_tokens(cache: Cache) -> int:
    return int(cache[0].tokens)


# -- what it gains -----------------------------------------------------------------------------------------------------


def above_the_lowest(codec: Any, cache: Cache) -> tuple[float, float]:
    """(held bits a number, of all layers; attention error, geometric mean over all layers but the lowest).

    The lowest layer's keys and values are functions of the token alone: where the token is known it is exact, and alone would pull a geometric
    mean to nothing.
    """
    data = reference.encode_cache(codec, cache)
    decoded = reference.decode_cache(codec, data)
    errors = [attention_error(layer, its) for layer, its in list(zip(cache, decoded))[1:]]
    return reference.held_bits(data, cache), float(np.exp(np.mean(np.log(errors))))


def saved(plain: Sequence[tuple[float, float]], bits: float, error: float) -> tuple[float, bool]:
    """Bits a number that plain codes of (bits, error) would spend more for this error: log2 of the error between the two nearest; and
    whether it lies between two."""
    points = sorted((float(np.log2(e)), r) for r, e in plain)
    x = float(np.log2(max(error, 1e-300)))
    return float(np.interp(x, [p[0] for p in points], [p[1] for p in points])) - bits, points[0][0] <= x <= points[-1][
        0
    ]


def _gains(
    context: Context, player: ToyPlayer, caches: list[Cache], k: int
) -> list[tuple[str, str, int, list[tuple[float, bool]]]]:
    """Of each predictor: name, what it needs, passes of the target a position, gain on each text."""
    calibration = [text(player, context.size(120, 600), context.rng(f"calibration {i}")) for i in range(2)]
    quantiser = reference.TurboQuant
    plain = [[above_the_lowest(quantiser(b), cache) for b in range(1, 9)] for cache in caches]
    first = player_of(1)
    its = prediction
    predictors: list[tuple[str, Any, Any]] = [
        ("mean of the calibration", its.Nothing.fit(calibration), None),
        ("previous position", its.PreviousToken.of(calibration), None),
        ("linear map from the layer below", its.LayerLinear.fit(calibration), None),
        ("token's own mean, token known", its.TokenTable.fit(calibration, player.vocabulary), None),
        ("token's own mean over the law", its.TokenTable.fit(calibration, player.vocabulary, "law"), None),
        ("linear map of the embedding, token known", its.EmbeddingLinear.fit(calibration, player, "token"), None),
        ("linear map of the expected embedding (the paper's)", its.EmbeddingLinear.fit(calibration, player), None),
        ("linear map from the first layer as a model of its own", its.SmallerModel.fit(calibration, first), None),
        (f"mean of the {k} likeliest (the paper's)", its.TopK(k), None),
        (f"mean of the {k} likeliest, the paper's adaptive bits", its.TopK(k), "paper"),
        (f"mean of the {k} likeliest, bits by water-filling, 0 allowed", its.TopK(k), "corrected"),
        ("the token that came, run through the model", its.KnownToken(), None),
    ]
    found = []
    for name, predictor, adaptive in predictors:
        gains = []
        for cache, points in zip(caches, plain):
            codec = reference.PredictiveDelta(
                predictor, quantiser(3), adaptive, player=player if "player" in predictor.needs else None
            )
            gains.append(saved(points, *above_the_lowest(codec, cache)))
        needs = ", ".join(sorted(predictor.needs - {"player", "pass"})) or "nothing"
        found.append((name, f"needs {needs}; state {predictor.state_bytes} bytes", predictor.forwards, gains))
    return found


@claim(
    id="prediction/known-token-beats-mean", paper=PAPER, section="predictive delta coding, against its own decoder",
    statement="A decoder that has the law of each token has the tokens; one forward pass of the token itself then predicts the position better, "
    "with fewer passes and in fewer bits, than the mean over the k likeliest tokens does with k + 1.",
    formula="err(F(past, t_t), 1 bit) ≤ err(Σ p_v F(past, v), 3 bits), bits 1 < 3, passes 1 < k + 1",
    assumptions=("the decoder's forward pass repeats the encoder's (same weights, same plan)",),
    expected=Verdict.HOLDS_UNDER,
    functions={"known": "kvtheory.prediction.KnownToken", "mean": "kvtheory.prediction.TopK"},
    mutants=[
        Mutant("the likeliest token for the one that came", "known", lambda true: lambda: prediction.TopK(1)),
        Mutant("the mean of the k likeliest for the token that came", "known", lambda true: lambda: prediction.TopK(4)),
        Mutant("the token that came for the mean", "mean", lambda true: lambda k: prediction.KnownToken()),
    ],
)  # fmt: skip
def known_token(context: Context, *, known: Function, mean: Function) -> Result:
    player, length, k = player_of(), context.size(32, 96), context.size(4, 16)
    caches = [text(player, length, context.rng(f"text {i}")) for i in range(context.size(1, 4))]
    # a text that the model does not expect: half of its tokens uniform
    rng = context.rng("foreign")
    tokens = np.where(
        rng.random(length) < 0.5, rng.integers(0, player.vocabulary, length), np.asarray(caches[0].tokens)
    )
    quantiser = reference.TurboQuant
    for name, cache in [
        *((f"text {i}", c) for i, c in enumerate(caches)),
        ("half of the tokens uniform", write(player, tokens, length)),
    ]:
        assert cache.surprisal_bits is not None
        where = f"{LABEL}, {name}, {length} positions, {cache.surprisal_bits[1:].mean():.2f} bits a token; top {k}"
        codecs = [
            reference.PredictiveDelta(known(), quantiser(1), player=player),
            reference.PredictiveDelta(mean(k), quantiser(3), player=player),
        ]
        (_, low, near), (_, high, far) = (reference.roundtrip(codec, cache) for codec in codecs)
        yield numerical(
            what="attention error: token known, 1 bit, at most that of the mean, 3 bits", ran_on=where, observed=near, predicted=far, relation="<=",
            tolerance=0.0, because="eleven orders of magnitude apart",
        )  # fmt: skip
        yield numerical(
            what="held bits a number: token known, below those of the mean", ran_on=where, observed=low, predicted=high, relation="<", tolerance=0.0,
            because="lengths of streams",
        )  # fmt: skip
        flops = [codec.decode_flops(codec.encode(cache)) for codec in codecs]
        yield exact(
            what="operations of the decoder: token known, below those of the mean",
            ran_on=where,
            observed=flops[0],
            predicted=flops[1],
            relation="<",
        )
    for name, needs, passes, gains in context.memo("gains", lambda: _gains(context, player, caches, k)):
        bits = [g for g, _ in gains]
        beyond = (
            "" if all(inside for _, inside in gains) else "at least: below the error of the plain quantiser at 8 bits; "
        )
        nil = "nil; " if np.mean(bits) <= 0 else ""
        yield numerical(
            what=f"bits a number saved at equal attention error above the lowest layer, {name}: above 0", role="assumption", observed=float(np.mean(bits)), predicted=0.0,
            relation=">", tolerance=0.0, because="reported, not judged", ran_on=f"{LABEL}, {len(caches)} of {length} positions; 3-bit TurboQuant on the residual",
            note=f"{nil}{beyond}{passes} target passes a position; {needs}; from {min(bits):.3f} to {max(bits):.3f} over texts",
        )  # fmt: skip
