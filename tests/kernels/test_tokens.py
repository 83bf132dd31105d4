"""Tokens gathered, merged and turned by kernels: the bits of NumPy; and reducers with them: the reference's streams, log-weights included."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu.reducers
import kvtheory
import reference
from gpu.tokens import gather, merge, turn_first
from reference import merging
from reference.rotary import rotary
from tests.kernels.strategies import KINDS, STRIDES, kernel_settings, numbers, often, orders, strided
from tests.reference.strategies import DTYPES

dtypes = st.sampled_from(sorted(DTYPES))
DIMS = (1, 2, 3, 4, 8, 31, 33, 64, 99, 128)


def bits(array):
    return np.ascontiguousarray(array).tobytes()


@st.composite
def arrays(draw, least_tokens=0, most=6000):
    """(heads, tokens, d) of any element type, kind and strides."""
    heads, dim, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(DIMS)), DTYPES[draw(dtypes)]
    tokens = min(
        max(1, most // (heads * dim)), draw(st.one_of(st.integers(least_tokens, 40), st.sampled_from((99, 999))))
    )
    x = numbers(draw(st.sampled_from(KINDS)), (heads, tokens, dim), dtype, draw(st.integers(0, 1 << 32)))
    return strided(x, draw(st.sampled_from(STRIDES)))


@st.composite
def choices(draw, array):
    """Tokens of each head, in any number and order, some of them more than once."""
    heads, tokens, _ = array.shape
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    most = draw(st.integers(0, 70)) if tokens else 0
    return [rng.integers(0, tokens, rng.integers(0, most, endpoint=True)) for _ in range(heads)]


@kernel_settings
@given(data=st.data(), order=orders())
def test_gather(backend, data, order):
    array = data.draw(arrays())
    index = data.draw(choices(array))
    with backend.running(order):
        got = backend.get(gather(backend.put(array), index))
    assert got.dtype == array.dtype and got.shape == (len(array), max(map(len, index)), array.shape[2])
    for own, head, chosen in zip(got, array, index):
        assert bits(own[: len(chosen)]) == bits(head[chosen])
        assert not own[len(chosen) :].any()


@often
@given(data=st.data(), order=orders())
def test_merge_is_the_references(backend, data, order):
    """Groups of any size and order, a token in several; weights over twenty powers of ten; sums of float64 numbers that overflow."""
    array = data.draw(arrays(least_tokens=1))
    heads, tokens, _ = array.shape
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    groups, weights = [], []
    for _ in range(heads):
        sizes = rng.integers(1, 9, rng.integers(0, 6))
        groups.append([rng.integers(0, tokens, size) for size in sizes])
        weights.append([np.exp(rng.normal(0, 8, size)) for size in sizes])
    want = merging.merge(array, groups, weights)
    with backend.running(order):
        got = merge(backend.put(array), groups, weights)
    for one, known in zip(got, want):
        held = backend.get(one)
        assert held.dtype == known.dtype and held.shape == known.shape
        if held.dtype == np.float64:  # inf - inf is a NaN of either sign
            assert np.array_equal(np.isnan(held), np.isnan(known))
            held = np.where(np.isnan(known), known, held)
        assert bits(held) == bits(known)


@often
@given(data=st.data(), order=orders())
def test_turned_keys_are_the_references(backend, data, order):
    array = np.ascontiguousarray(data.draw(arrays(least_tokens=1, most=2000)))
    _, tokens, dim = array.shape
    pairs = data.draw(st.integers(0, dim // 2))
    if not pairs:
        return
    rope = kvtheory.Rope(1000.0 ** (-np.arange(pairs) / pairs), data.draw(st.sampled_from(("half", "interleaved"))))
    first = data.draw(st.integers(0, min(tokens, 9)))
    by = np.random.default_rng(order).integers(-(1 << 20), 1 << 30, first)
    most = gpu.reducers.streaming_llm._most(array.dtype)
    want = array.copy()
    with np.errstate(over="ignore"):
        want[:, :first] = np.clip(rotary(rope).apply(array[:, :first], by), -most, most)
    keys = backend.put(array.copy())
    with backend.running(order):
        turn_first(keys, by, rope, most)
    assert bits(backend.get(keys)) == bits(want)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_turned_keys_stay_within_their_type(backend, dtype):
    """An eighth of a turn makes (most, most) longer than the type allows: limited, as the reference limits it."""
    most = gpu.reducers.streaming_llm._most(np.dtype(DTYPES[dtype]))
    keys, rope, by = np.full((1, 2, 2), most, DTYPES[dtype]), kvtheory.Rope(np.array([np.pi / 4])), np.array([1])
    turned = backend.put(keys.copy())
    with backend.running():
        turn_first(turned, by, rope, most)
    got = backend.get(turned).astype(np.float64)
    assert got[0, 0, 1] == most and abs(got[0, 0, 0]) < most * 1e-6 and (got[0, 1] == most).all()


def test_what_does_not_fit_is_refused(backend):
    x = backend.put(np.zeros((2, 3, 4), np.float32))
    two = [np.array([0]), np.array([2])]
    with pytest.raises(ValueError, match="index: expected one for each of 2 heads, got 1"):
        gather(x, two[:1])
    with pytest.raises(IndexError, match="index: expected tokens from 0 to 2 for head 1, got 3 to 3"):
        gather(x, [two[0], np.array([3])])
    with pytest.raises(IndexError, match="got -1 to 0"):
        gather(x, [np.array([0, -1]), two[1]])
    for weight in (np.array([0.0]), np.array([np.nan]), np.array([1.0, 1.0]), np.array([-1.0])):
        with pytest.raises(ValueError, match="weights: expected 1 finite numbers above 0 for group 0 of head 1"):
            merge(x, [[], [two[1]]], [[], [weight]])
    with pytest.raises(ValueError, match="weights: expected 0 finite"):
        merge(x, [[], [np.zeros(0, int)]], [[], [np.zeros(0)]])
    with pytest.raises(ValueError, match="weights: expected those of 1 groups of head 1, got 0"):
        merge(x, [[], [two[1]]], [[], []])
    with pytest.raises(IndexError, match="groups"):
        merge(x, [[], [np.array([3])]], [[], [np.ones(1)]])


# -- reducers ----------------------------------------------------------------------------------------------------------


@st.composite
def layers(draw, most_tokens=40):
    """Layers with queries and perhaps a rope; positions perhaps with gaps, or with several tokens at one."""
    heads, group, dim, value_dim = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from((2, 5, 8))), 3
    tokens, dtype = draw(st.integers(1, most_tokens)), DTYPES[draw(dtypes)]
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    keys, values = (rng.standard_normal((heads, tokens, d)).astype(dtype) for d in (dim, value_dim))
    positions = np.arange(tokens)
    if (steps := draw(st.sampled_from((None, 3, 1)))) is not None:
        positions = np.cumsum(rng.integers(0, steps, tokens, endpoint=True))
        if steps == 1:  # the same numbers at the same position now and then
            keys[:, 1::2], values[:, 1::2] = keys[:, : 2 * (tokens // 2) : 2], values[:, : 2 * (tokens // 2) : 2]
    rope = draw(st.sampled_from((None, kvtheory.Rope(np.array([1.0]), "interleaved"), kvtheory.Rope(np.array([0.3])))))
    asked = np.sort(rng.choice(positions, min(tokens, 6), replace=False)) if draw(st.booleans()) else None
    queries = rng.standard_normal((heads * group, min(tokens, 6), dim))
    return kvtheory.Layer(
        strided(keys, draw(st.sampled_from(STRIDES))),
        values,
        queries,
        rope=rope,
        positions=positions,
        query_positions=asked,
    )


REDUCERS = {
    "SnapKV": {"window": 3, "kernel": 3},
    "ScissorHands": {"window": 2, "history": 3},
    "StreamingLLM": {},
    "StreamingLLM original": {"positions": "original"},
    **{
        f"MergeReduce {name}": {"reducer": name, "window": 2, "block": 7}
        for name in ("random", "halving", "refit-values")
    },
}


@functools.cache
def pair(name, keep, sinks):
    codec = name.split()[0]
    arguments = {**REDUCERS[name], "keep": keep, "sinks": sinks}
    return getattr(gpu.reducers, codec)(**arguments), getattr(reference, codec)(**arguments)


@kernel_settings
@given(
    name=st.sampled_from(sorted(REDUCERS)),
    keep=st.sampled_from((0, 3, 8, 12, 0.5, 1.0)),
    sinks=st.integers(0, 4),
    layer=layers(),
    order=orders(),
)
def test_reducers_are_the_references(backend, name, keep, sinks, layer, order):
    own, codec = pair(name, keep, sinks)
    want, fields = codec.encode(layer), ("rope", "positions", "queries", "query_positions")
    decoded = codec.reduce(layer)
    with backend.running(order):
        assert own.encode(layer) == want
        keys, values, more = backend.put(layer.keys), backend.put(layer.values), {f: getattr(layer, f) for f in fields}
        assert own.encode_arrays(keys, values, **more) == want
        left = own.reduce_arrays(keys, values, **more)
        held = own.decode_arrays(want, backend.xp)
    for field in ("keys", "values", "log_weights", "positions", "kept"):
        array = getattr(decoded, field)
        for got in (getattr(left, field), getattr(held, field)):
            one = backend.get(got)
            assert one.dtype == array.dtype and one.shape == array.shape and bits(one) == bits(array), field


@settings(max_examples=20)
@given(layer=layers(), order=orders())
def test_log_weights_reach_attention(backend, layer, order):
    """What a summary leaves, log-weights included, attends as the reference's does; a head's weights sum to its tokens."""
    own, codec = pair("MergeReduce random", 8, 1)
    decoded = codec.reduce(layer)
    with backend.running(order):
        left = own.reduce_arrays(backend.put(layer.keys), backend.put(layer.values), queries=layer.queries)
    keys, values, log_weights = (backend.get(one) for one in left[:3])
    summed = [np.exp(one[np.isfinite(one)]).sum() for one in log_weights]
    np.testing.assert_allclose(summed, layer.tokens, rtol=1e-6)
    got = kvtheory.attention.attend(layer.queries, keys, values, log_weights=log_weights)
    want = kvtheory.attention.attend(layer.queries, decoded.keys, decoded.values, log_weights=decoded.log_weights)
    np.testing.assert_array_equal(got, want)


def test_they_are_the_references_codecs(backend):
    rng = np.random.default_rng(3)
    keys, values = (rng.standard_normal((1, 20, 4)).astype(np.float16) for _ in range(2))
    layer = kvtheory.Layer(keys, values, rope=kvtheory.Rope(np.array([0.5])))
    with backend.running():
        codec = gpu.reducers.StreamingLLM(keep=8)
        grown = codec.appender(layer.replace(keys=keys[:, :9], values=values[:, :9], positions=None))
        grown.append(keys[:, 9:], values[:, 9:])
        assert grown.stream() == codec.encode(layer) == reference.StreamingLLM(keep=8).encode(layer)
        with pytest.raises(ValueError, match="queries"):
            gpu.reducers.SnapKV().reduce_arrays(backend.put(keys), backend.put(values))
        keys[0, 7, 2] = np.nan
        with pytest.raises(ValueError, match=r"keys: .* nan at \(head 0, token 7, channel 2\)"):
            codec.encode(layer)
