"""Pipeline: reducers, then a quantiser, in one stream; what was kept is said, and counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory
import reference
from kvtheory.layer import Decoded
from reference import CorruptStream, StateMismatch, stream
from reference.codec import Codec, register
from reference.kept import Kept
from reference.stream import Reader
from tests.reference.alterations import mutant
from tests.reference.cases import OBLIVIOUS
from tests.reference.strategies import DTYPES, layer, text
from tests.reference.test_codec import same
from tests.reference.test_fitted import attempt

Pipeline = reference.Pipeline


@register
@dataclass(frozen=True)
class Strided(Codec):
    """Toy reducer: head h keeps the tokens h, h + stride, ..., each for the ones up to the next, with log-weights; `alike`: as head 0 does."""

    stride: int = 3
    alike: bool = False
    weigh: bool = True

    def encode_parts(self, data):
        raise NotImplementedError

    def decode_parts(self, parts):
        raise NotImplementedError

    def reduce(self, layer):
        own = [np.arange(0 if self.alike else h, layer.tokens, self.stride) for h in range(layer.kv_heads)]
        width = max(map(len, own)) + 1  # a padding that no head needs
        keys = np.zeros((layer.kv_heads, width, layer.head_dim))
        values = np.zeros((layer.kv_heads, width, layer.value_dim))
        positions, weights = np.full(keys.shape[:2], -1), np.full(keys.shape[:2], -np.inf)
        for h, at in enumerate(own):
            keys[h, : len(at)], values[h, : len(at)] = layer.keys[h, at], layer.values[h, at]
            positions[h, : len(at)] = layer.positions[at]
            stands = np.diff(np.append(at, layer.tokens))
            weights[h, : len(at)] = np.log(stands) if self.weigh else 0
        return Decoded(keys, values, weights, positions, np.array(list(map(len, own))))


@register
@dataclass(frozen=True)
class Together(Codec):
    """Toy of scope "cache": all layers as float16, with a state that is one number."""

    offset: float = field(default=0.0, metadata={"state": True})

    scope = "cache"
    part_names = ("numbers", "shapes")

    def encode_parts(self, data):
        layers = list(reference.codec.layers_of(data))
        numbers = [np.concatenate([(one.keys - self.offset).ravel(), one.values.ravel()]) for one in layers]
        shapes = [reference.shape.Shape.of(one).write() for one in layers]
        lengths = b"".join(stream.varint(len(shape)) + shape for shape in shapes)
        return [np.concatenate(numbers).astype("<f2").tobytes() if layers else b"", lengths]

    @classmethod
    def shapes_in(cls, parts):
        out = []
        while parts[1].remaining:
            out.append(reference.shape.Shape.read(parts[1].part(parts[1].varint("length"))))
        return out

    def decode_parts(self, parts):
        out = []
        for shape in self.shapes_in(parts):
            keys = parts[0].array("<f2", shape.rows * shape.head_dim).astype(np.float32) + np.float32(self.offset)
            values = parts[0].array("<f2", shape.rows * shape.value_dim).astype(np.float32)
            out.append(
                shape.decoded(
                    keys.reshape(shape.kv_heads, shape.tokens, -1), values.reshape(shape.kv_heads, shape.tokens, -1)
                )
            )
        return out

    def state_parts(self):
        return [np.array([self.offset], "<f8").tobytes()]

    @classmethod
    def from_state(cls, arguments, parts):
        return cls(**arguments, offset=float(parts[0].array("<f8", 1)[0]))


def expected(reducer, own):
    """What a lossless last stage should give."""
    left = reducer.reduce(own)
    width = int(left.kept.max())
    keys, values = (
        array[:, :width].astype(like.dtype) for array, like in ((left.keys, own.keys), (left.values, own.values))
    )
    weights = left.log_weights[:, :width].astype(np.float32).astype(np.float64)
    return Decoded(keys, values, weights, left.positions[:, :width], left.kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 160])
def test_a_lossless_end_keeps_what_the_reducer_keeps(dtype, tokens):
    own = layer(1, heads=3, tokens=tokens, dim=8, value_dim=5, dtype=dtype, index=4, positions=np.arange(tokens) ** 2)
    for reducer in (Strided(), Strided(alike=True), Strided(weigh=False), Strided(5, True, False), Strided(500)):
        codec = Pipeline([reducer, reference.Full()])
        data = codec.encode(own)
        decoded = reference.decode(data)
        assert same(decoded, expected(reducer, own)) and same(decoded, codec.decode(data))
        found = reference.inspect(data)
        assert found.shapes[0].index == 4 and found.shapes[0].tokens == tokens and found.parameters == codec.parameters
        if tokens:
            assert found.held_bits == reference.held_bits(data, own)


def test_stages_that_are_no_reducers_pass_on_what_they_decode_to():
    own = layer(2, heads=2, tokens=9, dim=16)
    first, last = reference.TurboQuant(4), reference.KIVI(8, group=1, window=1)
    left = first.decode(first.encode(own))
    assert same(
        reference.decode(Pipeline([first, last]).encode(own)),
        reference.decode(last.encode(own.replace(keys=left.keys, values=left.values))),
    )


@pytest.mark.parametrize("name", [n for n in OBLIVIOUS if not n.startswith("Pipeline")])
def test_one_stage_is_that_codec(name):
    """At a price of a few bytes: names, two flags and lengths, the shape of the layer as it came."""
    codec, own = OBLIVIOUS[name], layer(3, heads=2, tokens=7, dim=8, value_dim=6, positions=np.arange(7) * 2)
    alone, piped = codec.encode(own), Pipeline([codec]).encode(own)
    assert same(reference.decode(piped), reference.decode(alone))
    assert 0 < len(piped) - len(alone) < 50
    assert Pipeline([codec]).decode_flops(piped) == codec.decode_flops(alone)


def test_reduced_tokens_cost_what_they_cost():
    own = kvtheory.synthetic.make("gaussian", tokens=256, head_dim=64)
    whole, third = (Pipeline([*first, reference.TurboQuant(4)]) for first in ([], [Strided()]))
    rates = [reference.roundtrip(codec, own)[1] for codec in (whole, third)]
    assert rates[1] < 0.36 * rates[0]
    parts = {part.name: part.bytes for part in reference.inspect(third.encode(own)).parts}
    # a length; flags; for both heads a count, width, first position and steps, a byte each; 2 weights (ln 3, 0) and an index of 1 bit
    kept = third.stages[0].reduce(own).kept.tolist()
    assert kept == [86, 85]
    assert parts["kept"] == 2 + 1 + sum(3 + n - 1 for n in kept) + (1 + 4 * 2) + -(-sum(kept) // 8)
    error = [kvtheory.distortion.attention_error(own, reference.decode(codec.encode(own))) for codec in (whole, third)]
    assert error[0] < error[1] < 10


@pytest.mark.parametrize("pre_rope", [True, False])
def test_rope_is_undone_at_the_positions_of_each_head(pre_rope):
    """KVQuant behind a reducer codes each kept key exactly as it would among all tokens: thresholds are static."""
    calibration, own = text("A"), text("B")[1].replace(positions=np.arange(96) * 7 + 3)
    own = own.replace(keys=own.rope.apply(own.rope.undo(own.keys, np.arange(96)), own.positions).astype(np.float32))
    quantiser = reference.KVQuant.fit(calibration, 3, sinks=0, pre_rope=pre_rope)
    codec = Pipeline([Strided(), quantiser])
    data = codec.encode(own)
    decoded, plain = reference.decode(data, codec.state), reference.decode(quantiser.encode(own), quantiser.state)
    for h in range(2):
        at = np.arange(h, 96, 3)
        assert np.array_equal(decoded.keys[h, : len(at)], plain.keys[h, at])
        assert np.array_equal(decoded.values[h, : len(at)], plain.values[h, at])
        assert np.array_equal(decoded.positions[h, : len(at)], own.positions[at])
    assert decoded.kept.tolist() == [32, 32]


def test_states_are_those_of_the_stages():
    fitted = [reference.KVQuant.fit(text(name), 2) for name in "AB"]
    own = text("C")[0]
    codec = Pipeline([Strided(), fitted[0]])
    assert Pipeline([Strided(), reference.Full()]).state == b""
    assert codec.state_bytes > fitted[0].state_bytes
    loaded = reference.load(codec.state)
    assert loaded == codec and loaded.state == codec.state and loaded.encode(own) == codec.encode(own)
    with pytest.raises(StateMismatch):
        reference.decode(codec.encode(own), Pipeline([Strided(), fitted[1]]).state)
    with pytest.raises(StateMismatch):
        reference.decode(codec.encode(own), fitted[0].state)
    with pytest.raises(StateMismatch):
        reference.decode(codec.encode(own))
    # as a middle stage too
    both = Pipeline([fitted[0], fitted[1]])
    assert reference.load(both.state).encode(own) == both.encode(own)
    # a state of another class, of other parameters, or of too few stages
    header, [parts] = stream.read(codec.state)
    raw = [bytes(part.rest()) for part in parts]
    other = reference.KVQuant.fit(text("A"), 3).state
    for wrong in ([raw[1], raw[1]], [b"", other], [b""], [b"", b""], [b"", raw[1][:-1]], [b"", fitted[0].encode(own)]):
        state = stream.write(header, [wrong])
        with pytest.raises(CorruptStream) as raised:
            reference.load(state)
        assert raised.value.offset <= len(state)


def test_pipelines_have_the_scope_and_needs_of_their_stages():
    assert Pipeline([Strided(), reference.Full()]).scope == "layer"
    codec = Pipeline([Strided(), Together(0.25)])
    assert codec.scope == "cache" and "Pipeline" in reference.codecs("layer")
    layers = [layer(i, heads=2, tokens=4 + i, dim=4, index=i) for i in range(3)]
    data = codec.encode(layers)
    assert data == reference.encode_cache(codec, kvtheory.Cache(layers))
    decoded = reference.decode_cache(reference.load(codec.state), data)
    for one, own in zip(decoded, layers, strict=True):
        exact = expected(Strided(), own)
        assert np.array_equal(one.positions, exact.positions) and np.array_equal(one.log_weights, exact.log_weights)
        assert np.abs(one.keys - exact.keys).max() < 2e-3 and not one.keys[one.positions < 0].any()
    found = reference.inspect(data)
    assert [shape.tokens for shape in found.shapes] == [4, 5, 6] and found.held_bits == reference.held_bits(
        data, layers
    )
    assert reference.decode(codec.encode([]), codec.state) == []
    with pytest.raises(TypeError, match="cache: expected"):
        codec.encode(layers[0])

    @dataclass(frozen=True)
    class Asking(Strided):
        needs = frozenset({"queries"})

    asking = Pipeline([Asking(), reference.Full()])
    assert asking.needs == {"queries"}
    with pytest.raises(ValueError, match="queries: Pipeline needs it"):
        asking.encode(layers[0])
    with pytest.raises(TypeError, match="Pipeline cannot append"):
        asking.appender(kvtheory.synthetic.make("gaussian"))


def test_stages_compose_or_are_refused():
    for stages, problem, match in (
        ([], ValueError, "expected 1 to 8 codecs, got 0"),
        ([reference.Full()] * 9, ValueError, "got 9"),
        (["Full"], TypeError, r"stages\[0\]: expected a codec, got str"),
        ([Together(), reference.Full()], ValueError, r'stages\[0\]: expected scope "layer"'),
    ):
        with pytest.raises(problem, match=match):
            Pipeline(stages)
    inner = Pipeline([Strided(), reference.Full()])
    assert Pipeline([reference.Full(), inner]).stages == (reference.Full(), Strided(), reference.Full())
    own = layer(4, heads=2, tokens=30, dim=4)
    twice = Pipeline([Strided(2, True, False), Strided(5, True), reference.Full()])
    assert reference.decode(twice.encode(own)).positions[0].tolist() == [0, 10, 20]
    for first in (Strided(2), Strided(2, True)):
        with pytest.raises(ValueError, match=r"stages\[1\]: expected the same tokens in all heads, without weights"):
            Pipeline([first, Strided(5), reference.Full()]).encode(own)
    # extras by token end with the tokens, others go on
    seen = []

    @dataclass(frozen=True)
    class Looking(reference.Full):
        def encode_parts(self, data):
            seen.append(data)
            return super().encode_parts(data)

    rich = text("A", tokens=12)[0]
    Pipeline([Strided(), Looking()]).encode(rich)
    assert "inputs" not in seen[-1].extras and "key_weight" in seen[-1].extras and seen[-1].queries is rich.queries
    assert seen[-1].rope == rich.rope and seen[-1].index == rich.index
    Pipeline([Looking()]).encode(rich)
    assert "inputs" in seen[-1].extras


# -- what was kept -----------------------------------------------------------------------------------------------------


@given(st.data())
def test_what_was_kept_comes_back(data):
    heads = data.draw(st.integers(1, 3))
    counts = np.array(data.draw(st.lists(st.integers(0, 6), min_size=heads, max_size=heads)))
    width = int(counts.max())
    steps = data.draw(
        st.lists(st.lists(st.integers(0, 300), min_size=width, max_size=width), min_size=heads, max_size=heads)
    )
    positions = np.cumsum(np.array(steps, np.int64).reshape(heads, width), axis=1)
    pool = data.draw(st.sampled_from([[0.0], [1.5], [0.0, 0.25, -3.0], list(np.arange(40) / 7)]))
    weights = np.array([[data.draw(st.sampled_from(pool)) for _ in range(width)] for _ in range(heads)]).reshape(
        heads, width
    )
    padding = np.arange(width) >= counts[:, None]
    keys = np.where(padding[..., None], 0.0, 1.0) * np.ones((heads, width, 2))
    given_ = Decoded(keys, keys, np.where(padding, -np.inf, weights), np.where(padding, -1, positions), counts)
    kept = Kept.of(given_)
    written = kept.write()
    again = Kept.read(Reader(written), heads, width)
    assert again.counts(heads, width) == counts.tolist()
    own = positions if kept.places is not None else given_.positions
    restored = again.restore(Decoded.of(np.ones((heads, width, 2)), np.ones((heads, width, 2)), own[0]))
    assert np.array_equal(restored.positions, given_.positions) and np.array_equal(restored.keys, given_.keys)
    assert np.array_equal(restored.log_weights, given_.log_weights.astype(np.float32))
    if counts.sum() and len(pool) == 1:
        assert len(written) - len(Kept(kept.places, None).write()) == (min(5, 4 * counts.sum()) if pool[0] else 0)


def test_many_weights_take_the_shorter_form():
    for count, different, size in ((1000, 3, 1 + 12 + 250), (1000, 1000, 4000), (1000, 250, 2 + 1000 + 1000)):
        weights = np.resize(np.linspace(-2, 2, different), count)
        decoded = Decoded(
            np.ones((1, count, 1)), np.ones((1, count, 1)), weights[None], np.arange(count)[None], np.array([count])
        )
        assert len(Kept.of(decoded).write()) == 1 + size
    with pytest.raises(ValueError, match="that float32 can hold"):
        Kept.of(
            Decoded(np.ones((1, 1, 1)), np.ones((1, 1, 1)), np.array([[1e300]]), np.zeros((1, 1), int), np.array([1]))
        )


def test_hostile_pipelines_raise_only_what_is_promised():
    rng = np.random.default_rng(11)
    quantiser = reference.KVQuant.fit(text("A"), 2)
    codecs = [
        Pipeline([Strided(2), reference.Full()]),
        Pipeline([Strided(2), reference.TurboQuant(2)]),
        Pipeline([Strided(2, True), Pipeline([reference.KIVI(2, group=2, window=2)])]),
        Pipeline([Strided(2), quantiser]),
    ]
    for codec in codecs:
        streams = [
            codec.encode(text("B", tokens=tokens, dtype=d)[0])
            for tokens, d in ((9, "float32"), (4, "float16"), (0, "float32"))
        ]
        decoded = 0
        for _ in range(400):
            data = mutant(rng, streams)
            attempt(lambda data=data: reference.inspect(data), data)
            decoded += attempt(lambda data=data, codec=codec: reference.decode(data, codec.state), data) is not None
        assert decoded > 4
