"""PredictiveDelta on a toy model: through bytes, one state in encoder and decoder, refusals, bits and passes counted."""

import dataclasses

import numpy as np
import pytest

import reference
from kvtheory import prediction
from kvtheory.accounting import adaptive_bits
from kvtheory.layer import Cache, Layer
from kvtheory.prediction import ToyPlayer
from reference import packing, stream
from reference.delta_loop import Allocation
from reference.predictive_delta import PredictiveDelta

PLAYER = ToyPlayer(vocabulary=16, layers=2, kv_heads=2, head_dim=8, sharpness=0.6)
SMALL = ToyPlayer(vocabulary=16, layers=1, kv_heads=1, head_dim=4, seed=3)


def cache_of(tokens, dtype=np.float32, surprisals=None):
    play = PLAYER.start()
    kv = [play.feed(int(t)) for t in tokens]
    layers = [
        Layer(
            *(
                np.stack([getattr(one[i], name) for one in kv], axis=1).astype(dtype)
                if kv
                else np.zeros((2, 0, 8), dtype)
                for name in ("keys", "values")
            ),
            rope=PLAYER.rope,
            index=i,
        )
        for i in range(2)
    ]
    return Cache(layers, np.asarray(tokens, np.int64), surprisals)


TOKENS = np.random.default_rng(0).integers(0, 16, 70)
CACHE = cache_of(TOKENS)
TEXT = cache_of(np.random.default_rng(1).integers(0, 16, 120))
PREDICTORS = {
    "Nothing": prediction.Nothing.fit(TEXT),
    "PreviousToken": prediction.PreviousToken.of(TEXT),
    "TokenTable token": prediction.TokenTable.fit(TEXT, 16),
    "TokenTable law": prediction.TokenTable.fit(TEXT, 16, "law"),
    "EmbeddingLinear token": prediction.EmbeddingLinear.fit(TEXT, PLAYER, "token"),
    "EmbeddingLinear law": prediction.EmbeddingLinear.fit(TEXT, PLAYER),
    "LayerLinear": prediction.LayerLinear.fit(TEXT),
    "SmallerModel": prediction.SmallerModel.fit(TEXT, SMALL),
    "TopK": prediction.TopK(3),
    "FullVocabulary": prediction.FullVocabulary(16),
    "KnownToken": prediction.KnownToken(),
}
SEVERAL = ("PreviousToken", "LayerLinear", "TopK", "KnownToken", "SmallerModel")


def coder(name, *rest, **more):
    predictor = PREDICTORS[name]
    return PredictiveDelta(predictor, *rest, **more, player=PLAYER if "player" in predictor.needs else None)


def loaded(codec):
    """What a receiver makes of the state, and the models."""
    found = reference.load(codec.state)
    small = SMALL if isinstance(codec.predictor, prediction.SmallerModel) else None
    return found.with_player(codec.player, small)


def same(decoded, other):
    return all(
        a.keys.tobytes() == b.keys.tobytes() and a.values.tobytes() == b.values.tobytes()
        for a, b in zip(decoded, other, strict=True)
    )


def watched(codec, data):
    """(stream, what the encoder's loop holds at each position)."""
    held = []
    true = PredictiveDelta._code

    def noted(self, *args):
        held.append(true(self, *args))
        return held[-1]

    PredictiveDelta._code = noted
    try:
        return codec.encode(data), held
    finally:
        PredictiveDelta._code = true


@pytest.mark.parametrize("adaptive", [None, "paper", "corrected"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_the_decoder_holds_what_the_encoders_loop_holds_bit_for_bit(name, adaptive):
    cache = cache_of(TOKENS[:40], surprisals=np.linspace(0.5, 8, 40))
    codec = coder(name, reference.TurboQuant(2), adaptive)
    data, held = watched(codec, cache)
    assert data == codec.encode(cache)
    decoded = loaded(codec).decode(data)
    for i, layer in enumerate(decoded):
        for part in ("keys", "values"):
            mine = np.stack([getattr(kv[i], part) for kv in held], axis=1)
            theirs = getattr(layer, part)
            assert theirs.dtype == np.float32 and theirs.tobytes() == mine.tobytes()
        assert layer.positions.tolist() == [list(range(40))] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["LayerLinear", "TopK"])
def test_element_types(name, dtype):
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    cache = cache_of(TOKENS[:20], kind)
    codec = coder(name, reference.TurboQuant(4))
    decoded = loaded(codec).decode(codec.encode(cache))
    assert decoded[0].keys.dtype == kind and decoded[0].values.dtype == kind
    for layer, its in zip(cache, decoded):
        error = np.linalg.norm(its.keys.astype(float) - layer.keys.astype(float)) / np.linalg.norm(
            layer.keys.astype(float)
        )
        assert error < 0.2


@pytest.mark.parametrize(
    "inner", [reference.Full(), reference.QJL(4), reference.PolarQuant(), reference.TurboQuant(2, kind="prod")]
)
@pytest.mark.parametrize("name", SEVERAL)
def test_any_quantiser_inside(name, inner):
    cache = cache_of(TOKENS[:16])
    codec = coder(name, inner)
    decoded = loaded(codec).decode(codec.encode(cache))
    if isinstance(inner, reference.Full):
        assert all(
            np.abs(a.keys - b.keys).max() < 1e-5 and np.abs(a.values - b.values).max() < 1e-5
            for a, b in zip(decoded, cache)
        )


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65])
@pytest.mark.parametrize("name", ["Nothing", "KnownToken"])
@pytest.mark.parametrize("adaptive", [None, "corrected"])
def test_lengths(name, count, adaptive):
    cache = cache_of(TOKENS[:count])
    codec = coder(name, reference.TurboQuant(3), adaptive)
    data = codec.encode(cache)
    assert loaded(codec).decode(data)[1].keys.shape == (2, count, 8)
    assert [s.tokens for s in reference.inspect(data).shapes] == [count] * 2


class TestLoop:
    def test_closed_loop_error_does_not_grow_and_open_loop_error_does(self):
        """PreviousToken: closed, a position's own error; open, the sum of all (as an identity in prediction/closed-loop-error)."""
        errors = {}
        for open_loop in (False, True):
            codec = coder("PreviousToken", reference.TurboQuant(4), open_loop=open_loop)
            decoded = loaded(codec).decode(codec.encode(CACHE))
            errors[open_loop] = ((decoded[1].values - CACHE[1].values) ** 2).sum(axis=(0, 2))
        closed, opened = errors[False], errors[True]
        assert 0.5 < closed[-20:].mean() / closed[1:21].mean() < 2
        assert opened[-20:].mean() > 2 * opened[1:21].mean() and opened[-20:].mean() > 5 * closed[-20:].mean()
        assert errors[True][:1] == pytest.approx(errors[False][:1])

    @pytest.mark.parametrize("name", SEVERAL)
    def test_open_loop_streams_decode_as_the_encoder_says(self, name):
        codec = coder(name, reference.TurboQuant(3), open_loop=True)
        data, held = watched(codec, CACHE)
        decoded = loaded(codec).decode(data)
        assert all(np.array_equal(decoded[1].keys[:, t], kv[1].keys) for t, kv in enumerate(held))

    def test_known_token_leaves_rounding_alone(self):
        decoded = (codec := coder("KnownToken", reference.TurboQuant(1))).decode(codec.encode(CACHE))
        assert max(np.abs(a.keys - b.keys).max() for a, b in zip(decoded, CACHE)) < 1e-5


class TestBits:
    def test_the_papers_rule_is_accountings(self):
        h = np.random.default_rng(2).exponential(size=70) * 4
        codec = coder("Nothing", reference.TurboQuant(3), "paper")
        data = codec.encode(cache_of(TOKENS, surprisals=h))
        _, groups = stream.read(data)
        bits = packing.unpack(bytes(groups[0][3].rest()), 70, 4)
        assert bits.tolist() == [min(b, 6) for b in adaptive_bits(h.tolist(), 3)]
        assert bits.min() >= 1

    def test_the_papers_rule_takes_the_models_own_surprisals_where_there_are_none(self):
        codec = coder("TopK", reference.TurboQuant(3), "paper")
        _, groups = stream.read(codec.encode(CACHE))
        play, h = PLAYER.start(), []
        for token in TOKENS.tolist():
            law = None if play.logits is None else prediction.law_weights(play.logits)
            h.append(4.0 if law is None else float(np.log2(law.sum() / law[token])))
            play.feed(token)
        assert packing.unpack(bytes(groups[0][3].rest()), 70, 4).tolist() == [min(b, 6) for b in adaptive_bits(h, 3)]
        with pytest.raises(ValueError, match="surprisal_bits"):
            coder("Nothing", reference.TurboQuant(3), "paper").encode(CACHE)

    def test_corrected_gives_nothing_to_what_is_expected(self):
        """A text of one token but for its middle: the positions that repeat the previous one cost no bits."""
        flat = [layer.replace(rope=None) for layer in cache_of(np.full(40, 3))]
        for layer in flat:
            layer.keys[:, :] = layer.keys[:, :1]
            layer.values[:, :] = layer.values[:, :1]
        flat[0].keys[:, 20:] += 1
        codec = PredictiveDelta(prediction.PreviousToken.of(flat), reference.TurboQuant(3), "corrected")
        _, groups = stream.read(codec.encode(flat))
        codes = packing.unpack(bytes(groups[0][3].rest()), 80, 4).reshape(40, 2)
        assert codes[0].min() == 6 and codes[20, 0] >= 4
        # the quantiser's own errors are worth a bit or so for a few positions, then nothing is
        assert (codes[5:20] == 0).all() and (codes[20:, 1] == 0).all() and (codes[25:] == 0).all()

    def test_every_bit_is_somewhere(self):
        codec = coder("TopK", reference.TurboQuant(3), "corrected")
        data = codec.encode(CACHE)
        inspection = reference.inspect(data)
        assert sum(p.bytes for p in inspection.parts) == len(data)
        sizes = {p.name: p.bytes for p in inspection.parts}
        assert sizes["bits"] == 70 and sizes["tokens"] % 4 == 0 and sizes["head"] == 8
        assert reference.held_bits(data, CACHE) == inspection.held_bits

    @pytest.mark.parametrize("name", ["TokenTable token", "TopK", "SmallerModel"])
    def test_tokens_are_in_the_stream_where_the_predictor_needs_them(self, name):
        codec = coder(name)
        data = codec.encode(CACHE)
        _, groups = stream.read(data)
        assert loaded(codec).rebuild(codec._named(groups[0]))[0].tolist() == TOKENS.tolist()
        # 4 bits a token under a uniform code; the models here know nothing of random tokens
        tokens = next(p.bytes for p in reference.inspect(data).parts if p.name == "tokens")
        assert 8 * tokens >= 70 * 3
        if name == "TokenTable token":
            assert 8 * tokens <= 70 * 4 + 64


def test_decode_flops_counts_passes():
    one = [PLAYER.flops + PLAYER.attention_flops(t + 1) for t in range(70)]
    numbers = 70 * 2 * 2 * 16
    streams = {name: (codec := coder(name, reference.TurboQuant(3)), codec.encode(CACHE)) for name in PREDICTORS}
    flops = {name: codec.decode_flops(data) for name, (codec, data) in streams.items()}
    inner = flops["Nothing"] - numbers
    layer = CACHE[0]
    alone = reference.TurboQuant(3)
    assert inner == 2 * alone.decode_flops(alone.encode(layer))
    assert flops["PreviousToken"] == flops["Nothing"] == flops["TokenTable token"]
    assert flops["KnownToken"] == flops["Nothing"] + sum(one)
    assert flops["TopK"] == flops["KnownToken"] + 3 * sum(one[1:])
    assert flops["FullVocabulary"] == flops["KnownToken"] + 16 * sum(one[1:])
    assert flops["LayerLinear"] == flops["Nothing"] + 70 * 2 * PREDICTORS["LayerLinear"].maps.size
    assert flops["SmallerModel"] == flops["Nothing"] + 70 * (2 * PREDICTORS["SmallerModel"].maps.size + SMALL.flops)


class TestState:
    @pytest.mark.parametrize("name", PREDICTORS)
    def test_comes_back(self, name):
        codec = coder(name, reference.TurboQuant(3), "corrected")
        again = reference.load(codec.state)
        assert again.state == codec.state and again.inner == codec.inner and again.adaptive == "corrected"
        assert type(again.predictor) is type(codec.predictor) and again.predictor.arguments == codec.predictor.arguments
        for key, array in codec.predictor.arrays().items():
            np.testing.assert_array_equal(again.predictor.arrays()[key], array)
        assert codec.state_bytes >= codec.predictor.state_bytes

    @pytest.mark.parametrize("name", PREDICTORS)
    def test_hostile_states_are_refused(self, name):
        codec = coder(name)
        body = bytearray(stream.unseal(codec.state))
        rng = np.random.default_rng(4)
        refused = 0
        for cut in rng.integers(0, len(body), 25):
            with pytest.raises(reference.CorruptStream):
                reference.load(stream.seal(bytes(body[:cut])))
        for at, value in zip(rng.integers(0, len(body), 150), rng.integers(0, 256, 150)):
            mutant = body.copy()
            mutant[at] = value
            try:
                found = reference.load(stream.seal(bytes(mutant)))
            except reference.CorruptStream:
                refused += 1
            else:
                assert isinstance(found, reference.codec.Codec)
        assert refused or name in (
            "EmbeddingLinear token",
            "EmbeddingLinear law",
            "TokenTable token",
            "TokenTable law",
            "LayerLinear",
            "SmallerModel",
        )

    def test_the_model_is_asked_for_and_compared(self):
        codec = coder("TopK")
        data = codec.encode(CACHE)
        other = ToyPlayer(vocabulary=16, layers=2, kv_heads=2, head_dim=8, seed=1)
        again = reference.load(codec.state)
        with pytest.raises(reference.StateMismatch, match="runs the model"):
            again.decode(data)
        with pytest.raises(reference.StateMismatch, match="given is"):
            again.with_player(other)
        with pytest.raises(reference.StateMismatch, match="written with"):
            PredictiveDelta(prediction.TopK(3), player=other).decode(data)
        with pytest.raises(reference.StateMismatch, match="needs a predictor"):
            PredictiveDelta().encode(CACHE)
        with pytest.raises(reference.StateMismatch, match="smaller model"):
            reference.load(coder("SmallerModel").state).decode(coder("SmallerModel").encode(CACHE))
        with pytest.raises(reference.StateMismatch, match="not fitted with"):
            reference.load(coder("SmallerModel").state).with_player(smaller=PLAYER)
        with pytest.raises(ValueError, match="give it as player"):
            PredictiveDelta(prediction.TopK(3)).encode(CACHE)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"inner": reference.KIVI(2, group=8, window=8)}, "codes each vector alone"),
        ({"inner": reference.Pipeline([reference.TurboQuant(3)]), "adaptive": "paper"}, "a codec with bits"),
        ({"inner": reference.Full(), "adaptive": "corrected"}, "a codec with bits"),
        ({"inner": reference.SnapKV()}, "data-oblivious"),
        ({"adaptive": "mine"}, "adaptive"),
    ],
)
def test_refused_parameters(more, what):
    with pytest.raises(ValueError, match=what):
        PredictiveDelta(PREDICTORS["Nothing"], **more).encode(CACHE)


def test_refused_data():
    codec = coder("TopK")
    with pytest.raises(ValueError, match=r"needs cache\.tokens"):
        codec.encode(list(CACHE))
    with pytest.raises(ValueError, match="tokens: expected 0 to 15"):
        codec.encode(Cache(list(CACHE), np.full(70, 16)))
    with pytest.raises(ValueError, match="positions"):
        coder("Nothing").encode([layer.replace(positions=np.arange(70) + 1) for layer in CACHE])
    with pytest.raises(reference.StateMismatch, match="was fitted to layers, kv_heads"):
        coder("Nothing").encode(list(CACHE)[:1])
    with pytest.raises(reference.StateMismatch, match="index 0, 1, got one of index 5"):
        coder("Nothing").encode([CACHE[0], CACHE[1].replace(index=5)])
    with pytest.raises(ValueError, match="of the model"):
        codec.encode(Cache(list(CACHE)[:1], TOKENS))
    with pytest.raises(ValueError, match="one shape"):
        coder("Nothing").encode([CACHE[0], CACHE[1].replace(keys=CACHE[1].keys.astype(np.float16))])
    with pytest.raises(TypeError, match=r"kvtheory\.prediction"):
        PredictiveDelta(object())
    keys = CACHE[0].keys.copy()
    with pytest.raises(ValueError, match="at least one layer"):
        coder("Nothing").encode([])
    keys[0, 3, 2] = 1e30
    huge = [CACHE[0].replace(keys=keys), CACHE[1]]
    decoded = (c := coder("Nothing")).decode(c.encode(huge))
    assert np.isfinite(decoded[0].keys).all()


class TestHostile:
    @pytest.mark.parametrize("noise", [1e-7, 1e-3])
    def test_a_player_that_does_not_repeat_itself_is_found_out(self, noise):
        codec = coder("KnownToken", reference.TurboQuant(2))
        data = codec.encode(CACHE)
        noisy = ToyPlayer(vocabulary=16, layers=2, kv_heads=2, head_dim=8, sharpness=0.6, noise=noise)
        refused = 0
        for _ in range(6):
            try:
                decoded = codec.with_player(noisy).decode(data)
            except reference.CorruptStream as problem:
                refused += 1
                assert "plan" in str(problem) or "range-coded" in str(problem)
            else:
                assert same(decoded, codec.decode(data))
        assert refused if noise > 1e-4 else refused >= 0

    @pytest.mark.parametrize("adaptive", [None, "corrected"])
    @pytest.mark.parametrize("name", ["LayerLinear", "TopK", "TokenTable token"])
    def test_mutants_are_refused_or_decoded(self, name, adaptive):
        cache = cache_of(TOKENS[:12])
        codec = coder(name, reference.TurboQuant(3), adaptive)
        body = bytearray(stream.unseal(codec.encode(cache)))
        rng = np.random.default_rng(5)
        refused = 0
        for at, value in zip(rng.integers(0, len(body), 120), rng.integers(0, 256, 120)):
            mutant = body.copy()
            mutant[at] = value
            refused += _refused(codec, bytes(mutant))
        for cut in rng.integers(0, len(body), 20):
            assert _refused(codec, bytes(body[:cut]))
        assert refused > 10

    def test_named_problems(self):
        codec = coder("TopK", reference.TurboQuant(3), "corrected")
        header, groups = stream.read(codec.encode(cache_of(TOKENS[:12])))
        parts = [bytes(p.rest()) for p in groups[0]]

        def refuse(index, part, what):
            changed = [*parts[:index], part, *parts[index + 1 :]]
            with pytest.raises(reference.CorruptStream, match=what):
                codec.decode(stream.write(header, [changed]))

        shape = next(iter(reference.inspect(codec.encode(cache_of(TOKENS[:12]))).shapes))

        def shapes(*several):
            written = [one.write() for one in several]
            return stream.varint(len(written)) + b"".join(stream.varint(len(one)) + one for one in written)

        other = dataclasses.replace(shape, index=1)
        assert parts[0] == shapes(shape, other)
        refuse(0, shapes(shape, dataclasses.replace(other, tokens=13, positions=range(13))), "one shape")
        many = [dataclasses.replace(one, tokens=1 << 30, positions=range(1 << 30)) for one in (shape, other)]
        refuse(0, shapes(*many), "at most 16777216 tokens")
        refuse(0, shapes(shape), "the model's 2 layers")
        refuse(0, shapes(), "at least one")
        refuse(0, shapes(*(dataclasses.replace(one, kv_heads=1) for one in (shape, other))), "residuals: expected keys")
        refuse(
            0, shapes(*(dataclasses.replace(one, positions=range(1, 13)) for one in (shape, other))), "positions 0, 1"
        )
        refuse(0, shapes(shape, dataclasses.replace(other, value_type=0)), "element type")
        refuse(1, parts[1][:-1] + bytes([parts[1][-1] ^ 1]), "checksum")
        refuse(1, bytes([parts[1][0] ^ 1]) + parts[1][1:-1] + bytes([parts[1][-1] ^ 1]), "written under the plan")
        refuse(2, parts[2][:-1], "multiple of 4")
        refuse(3, b"\xff" + parts[3][1:], "bits: expected 0 to 6, got")
        refuse(3, parts[3][:-1], "packed codes")
        refuse(4, parts[4] + b"\x00", "residuals")
        refuse(4, parts[4][:-1], "remain|expected at most")
        plain = coder("Nothing", reference.TurboQuant(3))
        header, groups = stream.read(plain.encode(cache_of(TOKENS[:12])))
        parts = [bytes(p.rest()) for p in groups[0]]
        for index in (2, 3):
            with pytest.raises(reference.CorruptStream, match="too many"):
                plain.decode(stream.write(header, [[*parts[:index], b"\x00", *parts[index + 1 :]]]))
        foreign = dataclasses.replace(other, index=7)
        with pytest.raises(reference.CorruptStream, match="of the predictor"):
            plain.decode(stream.write(header, [[shapes(shape, foreign), *parts[1:]]]))


def test_layers_in_another_order_are_the_same_cache():
    codec = coder("LayerLinear", reference.TurboQuant(3))
    forth, back = list(CACHE), list(CACHE)[::-1]
    decoded, turned = (codec.decode(codec.encode(layers)) for layers in (forth, back))
    assert same(decoded, turned[::-1]) and not same(decoded, turned)
    assert [s.index for s in reference.inspect(codec.encode(back)).shapes] == [1, 0]


def _refused(codec, body):
    try:
        codec.decode(stream.seal(body))
    except (reference.CorruptStream, reference.StateMismatch):
        return True
    return False


def test_corrected_bits_are_half_the_logarithm_of_the_energy():
    """b = 1/2 log2(E / theta), E the mean over keys and values of a residual's mean square over the layer's: written out."""
    codec = PredictiveDelta(PREDICTORS["Nothing"], reference.TurboQuant(3), adaptive="corrected")
    plan = Allocation(np.zeros(0, np.int64), 1 / 32, np.array([[1.0, 1.0], [4.0, 1.0]]))
    keys, values = np.full((2, 8), 2.0), np.zeros((2, 8))
    # layer 0: E = (4 / 1 + 0) / 2 = 2, 64 theta; layer 1: E = (4 / 4 + 0) / 2 = 1/2, 16 theta
    assert [codec._level(plan, 0, layer, keys, values) for layer in (0, 1)] == [3, 2]
    assert [codec._level(plan, 0, 1, keys * 2.0**-e, values) for e in (1, 2, 3)] == [1, 0, 0]
    assert codec._level(plan, 0, 0, keys * 2.0**20, values) == codec._most == 6
