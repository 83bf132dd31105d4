"""gpu.KVQuant against reference.KVQuant: the same bytes, numbers and refusals, whatever the tables, the data and the order of the threads."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from gpu.kvquant import _SOURCE, SUM_THREADS, KVQuant, _gaps
from gpu.module import launch
from reference import nuq, stream
from reference.errors import StateMismatch
from reference.kept import Kept
from reference.kvquant import LayerTables
from reference.places import Places
from reference.shape import Shape
from tests.kernels.codecs import altered, check_refused, check_same_outcome, decoded, encoded, of_decoded
from tests.kernels.strategies import KINDS, STRIDES, kernel_settings, numbers, often, orders, strided
from tests.reference.strategies import DTYPES, text

DIMS = (1, 2, 3, 8, 16, 31, 33, 64, 99)
dtypes = st.sampled_from(sorted(DTYPES))


@st.composite
def ropes(draw, dim):
    """None, or a rope of some or all channels, of either layout and some scaling."""
    pairs = draw(st.integers(0, dim // 2))
    if not pairs:
        return None
    layout, scaling = draw(st.sampled_from(("half", "interleaved"))), draw(st.sampled_from((1.0, 0.75, 3.0)))
    return kvtheory.Rope(1000.0 ** (-np.arange(pairs) / pairs), layout, scaling)


def levels(bits, seed):
    """Ascending levels: uniform, or any, some of them alike and beyond [-1, 1]."""
    if seed % 3 == 0:
        return nuq.uniform(bits)
    rng = np.random.default_rng(seed)
    points = np.sort(np.round(rng.normal(0, 0.7, 1 << bits), 1 + seed % 2)).astype(np.float32)
    return nuq.Levels(((points[1:] + points[:-1]) / 2).astype(np.float32), points)


def table(seed, heads, dim, value_dim, rope, bits, spread=1.0, index=None):
    """Thresholds at about two standard deviations; some channels have a single point between theirs."""
    rng = np.random.default_rng(seed)
    low = (-spread * rng.uniform(1, 3, (heads, dim))).astype(np.float32)
    high = (spread * rng.uniform(1, 3, (heads, dim))).astype(np.float32)
    high = np.where(rng.random((heads, dim)) < 0.05, low, high)
    return LayerTables(
        index, value_dim, rope, low, high, levels(bits, seed), levels(bits, seed + 1), (False, False)
    )  # fmt: skip


@st.composite
def cases(draw, tokens=40):
    """A codec with tables that were not fitted to anything, and a layer for it."""
    bits, sinks = draw(st.integers(1, 8)), draw(st.sampled_from((0, 1, 2, 5)))
    outliers = draw(st.sampled_from((0.0, 0.01, 0.02, 0.1, 0.3, 0.49)))
    heads, dims, dtype = draw(st.integers(1, 3)), [draw(st.sampled_from(DIMS)) for _ in range(2)], DTYPES[draw(dtypes)]
    most = max(1, 6000 // (heads * sum(dims)))
    count = min(most, draw(st.integers(0, tokens)))
    rope, seed = draw(ropes(dims[0])), draw(st.integers(0, 1 << 32))
    sides = []
    for dim in dims:
        x = numbers(draw(st.sampled_from(KINDS)), (heads, count, dim), dtype, draw(st.integers(0, 1 << 32)))
        if dtype == np.float64:  # what float32 holds
            x = np.clip(x, -3.4e38, 3.4e38)
        sides.append(strided(x, draw(st.sampled_from(STRIDES))))
    positions = np.cumsum(np.random.default_rng(seed).integers(0, 90000, count)) if draw(st.booleans()) else None
    index = draw(st.sampled_from((None, 7)))
    spread = draw(st.sampled_from((1.0, 1.5, 0.1, 1e30)))
    own = table(seed, heads, *dims, rope, bits, spread, index)
    if count and draw(st.booleans()):  # thresholds that some keys are equal to
        keys, at = sides[0].astype(np.float32), [draw(st.integers(0, count - 1)) for _ in range(2)]
        low, high = keys[:, at].min(axis=1) + np.float32(0), keys[:, at].max(axis=1) + np.float32(0)
        own = dataclasses.replace(own, low=low, high=high)
    layer = kvtheory.Layer(*sides, rope=rope, index=index, positions=positions)
    return reference.KVQuant(bits, outliers, sinks, tables=(own,)), layer


def same(backend, codec, layer, order):
    bare, own = layer if backend.with_layers(order) else layer.replace(positions=None), KVQuant.of(codec)
    want = codec.encode(bare)
    with backend.running(order):
        assert encoded(backend, own, bare, order) == want
        assert decoded(backend, own, want, order) == of_decoded(codec.decode(want))
        if backend.with_layers(order):
            assert np.array_equal(own.decode(want).positions, codec.decode(want).positions)


@often
@given(case=cases(), order=orders())
def test_same_bytes(backend, case, order):
    same(backend, *case, order)


@functools.cache
def fitted(bits, dtype, outliers, levels, pre_rope):
    return reference.KVQuant.fit(
        text("A", tokens=48, dtype=dtype), bits, outliers, 2, levels=levels, pre_rope=pre_rope
    )  # fmt: skip


@settings(max_examples=12)
@given(
    bits=st.sampled_from((2, 3, 4)),
    dtype=dtypes,
    outliers=st.sampled_from((0.01, 0.1)),
    levels=st.sampled_from(("nuq", "uniform")),
    pre_rope=st.booleans(),
    order=orders(),
)
def test_fitted(backend, bits, dtype, outliers, levels, pre_rope, order):
    codec = fitted(bits, dtype, outliers, levels, pre_rope)
    for layer in text("B", tokens=21, dtype=dtype):
        same(backend, codec, layer, order)


@kernel_settings
@given(case=cases(tokens=12), data=st.data(), order=orders())
def test_heads_with_positions_of_their_own(backend, case, data, order):
    """Behind a reducer in a Pipeline each head has its own tokens, hence its own angles."""
    codec, layer = case
    counts = [data.draw(st.integers(0, layer.tokens)) for _ in range(layer.kv_heads - 1)] + [layer.tokens]
    places = tuple(np.sort(np.random.default_rng(order + h).integers(0, 1 << 20, n)) for h, n in enumerate(counts))
    kept = Kept(places, None)
    want = [bytes(part) for part in codec.encode_at(layer, kept)]
    own, readers = KVQuant.of(codec), [stream.Reader(part) for part in want]
    if not backend.with_layers(order):  # on a GPU other stages would leave arrays
        decoded_ = codec.decode_at([stream.Reader(part) for part in want], kept)
        with backend.running(order):
            pair = backend.put(layer.keys), backend.put(layer.values)
            parts = own._coded(own.fitted_to(layer), Shape.of(layer), *pair, kept.positions(layer.tokens))
            assert [bytes(part) for part in parts] == want
            _, keys, values = own._arrays(readers, kept, backend.xp)
        assert backend.get(keys).tobytes() == decoded_.keys.tobytes()
        assert backend.get(values).tobytes() == decoded_.values.tobytes()
        return
    with backend.running(order):
        assert [bytes(part) for part in own.encode_at(layer, kept)] == want
        got = own.decode_at([stream.Reader(part) for part in want], kept)
        everywhere = own.encode_at(layer, Kept(None, None)) == own.encode_parts(layer)
    decoded = codec.decode_at([stream.Reader(part) for part in want], kept)
    assert everywhere and got.keys.tobytes() == decoded.keys.tobytes()
    assert got.values.tobytes() == decoded.values.tobytes()


# -- prefix sums and gaps ----------------------------------------------------------------------------------------------


@kernel_settings
@given(
    count=st.one_of(st.integers(0, 70), st.sampled_from((1023, 1024, 1025, 2048, 2100))),
    most=st.sampled_from((1, 40, 2**32 - 1)),
    order=orders(),
)
def test_exclusive_sums(backend, count, most, order):
    counts = np.random.default_rng(order).integers(0, most, count, dtype=np.uint32, endpoint=True)
    starts = backend.put(np.full(count + 1, -1))
    with backend.running(order):
        launch(_SOURCE["exclusive_sums"], (1,), (SUM_THREADS,), (backend.put(counts), starts, np.int64(count)))
    np.testing.assert_array_equal(backend.get(starts), np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))


@kernel_settings
@given(
    gaps=st.lists(st.one_of(st.integers(0, 3), st.sampled_from((253, 254, 255, 256, 509, 510, 511, 5000))), max_size=300),
    order=orders(),
)  # fmt: skip
def test_gaps_are_the_references(backend, gaps, order):
    at = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    named = np.zeros(int(at[-1]) + 1 if at.size else 0, np.bool_)
    named[at] = True
    want = Places()
    want.append(named)
    with backend.running(order):
        assert backend.get(_gaps(backend.put(at))).tobytes() == want.bytes()


# -- refusals ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data(), dtype=dtypes, order=orders())
def test_what_is_no_number_is_refused_in_the_references_words(backend, data, dtype, order):
    rng = np.random.default_rng(1)
    keys, values = (rng.standard_normal((2, 6, d)).astype(DTYPES[dtype]) for d in (4, 5))
    rope = data.draw(ropes(4))
    layer = kvtheory.Layer(keys, values, rope=rope)
    wrong = [np.nan, np.inf, -np.inf] + ([1e39] if dtype == "float64" else [])
    for _ in range(data.draw(st.integers(1, 4))):
        array = data.draw(st.sampled_from((keys, values)))
        array[tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)] = data.draw(st.sampled_from(wrong))
    codec = reference.KVQuant(2, 0.2, 2, tables=(table(3, 2, 4, 5, rope, 2),))
    check_refused(backend, KVQuant.of(codec), codec, layer, order)


@pytest.mark.parametrize("side", ("keys", "values"))
def test_every_warp_meets_what_is_no_number(backend, side):
    """All of them say so at once, in one word."""
    sides = {name: np.ones((2, 12, 32), np.float32) for name in ("keys", "values")}
    layer = kvtheory.Layer(**sides)
    sides[side][:, 2:] = np.nan  # behind the sinks; a layer refuses them
    codec = reference.KVQuant(2, 0.2, 2, tables=(table(3, 2, 32, 32, None, 2),))
    for order in (0, 1):
        check_refused(backend, KVQuant.of(codec), codec, layer, order)


@kernel_settings
@example(part=3, at=-1, flip=0x80, dtype="float16", bits=3, order=0)  # behind the last code
@example(part=8, at=-1, flip=0x80, dtype="float16", bits=3, order=0)
@given(
    part=st.integers(1, 10),
    at=st.one_of(st.integers(0, 120), st.integers(-6, -1), st.none()),
    flip=st.integers(1, 255),
    dtype=dtypes,
    bits=st.integers(1, 8),
    order=orders(),
)
def test_altered_streams(backend, part, at, flip, dtype, bits, order):
    """One byte of one part altered, or (None) the part cut: the same numbers, or the same refusal at the same byte."""
    rng = np.random.default_rng(2)
    keys, values = (rng.standard_normal((3, 10, d)).astype(DTYPES[dtype]) for d in (7, 5))
    rope = kvtheory.Rope(np.array([1.0, 0.1]))
    codec = reference.KVQuant(bits, 0.2, 1, tables=(table(4, 3, 7, 5, rope, bits),))
    data = altered(codec.encode(kvtheory.Layer(keys, values, rope=rope)), part, at, flip)
    check_same_outcome(backend, KVQuant.of(codec), codec, data, order)


def test_codecs_and_layers_that_do_not_match(backend):
    rope = kvtheory.Rope(np.array([1.0, 0.1]))
    codec = reference.KVQuant(3, 0.1, 1, tables=(table(4, 2, 6, 5, rope, 3, index=4),))
    own = KVQuant.of(codec)
    assert own.codec_id == "KVQuant" and own.state == codec.state and own == codec
    keys, values = np.ones((2, 9, 6), np.float32), np.ones((2, 9, 5), np.float32)
    with backend.running():
        for data in (
            kvtheory.Layer(keys, values, rope=rope),
            kvtheory.Layer(keys, values, index=4),
            kvtheory.Layer(keys[:1], values[:1], rope=rope, index=4),
        ):
            with pytest.raises(StateMismatch) as want:
                codec.encode(data)
            with pytest.raises(StateMismatch) as got:
                own.encode(data)
            assert str(got.value) == str(want.value)
        with pytest.raises(StateMismatch, match="fitted to layers of index 4, got one of index None"):
            own.encode_arrays(backend.put(keys), backend.put(values))
        with pytest.raises(StateMismatch, match="2 heads of 6 and 5 channels in layer 4, got 2 of 5 and 6"):
            own.encode_arrays(backend.put(values), backend.put(keys), 4)
        assert own.encode_arrays(backend.put(keys), backend.put(values), 4) == codec.encode(
            kvtheory.Layer(keys, values, rope=rope, index=4)
        )
        with pytest.raises(StateMismatch):
            KVQuant.of(reference.KVQuant(3)).decode(codec.encode(kvtheory.Layer(keys, values, rope=rope, index=4)))
