"""gpu.KIVI against reference.KIVI: the same bytes, the same numbers, the same refusals, whatever the data and the order of the threads."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from gpu.kivi import KIVI
from tests.kernels.codecs import altered, check_refused, check_same_outcome, decoded, encoded, of_decoded
from tests.kernels.strategies import KINDS, STRIDES, kernel_settings, numbers, often, orders, strided
from tests.reference.strategies import DTYPES, layer, layers

dtypes = st.sampled_from(sorted(DTYPES))
#: bits, group, window
codecs = st.tuples(st.integers(1, 8), st.sampled_from((1, 2, 3, 4, 5, 8, 16, 31, 32, 33)), st.integers(1, 3)).map(
    lambda c: (c[0], c[1], c[1] * c[2])
)


def same(backend, codec, data, order):
    """Both encode and both decode the same: layers, and bare arrays."""
    bare = data if backend.with_layers(order) else kvtheory.Layer(data.keys, data.values, index=data.index)
    want, own = reference.KIVI(*codec).encode(bare), KIVI(*codec)
    with backend.running(order):
        assert encoded(backend, own, bare, order) == want
        assert decoded(backend, own, want, order) == of_decoded(reference.decode(want))
        if backend.with_layers(order):
            assert np.array_equal(own.decode(want).positions, reference.decode(want).positions)


@kernel_settings
@given(data=layers(most_numbers=1024), codec=codecs, order=orders())
def test_numbers_that_break_codecs(backend, data, codec, order):
    same(backend, codec, data, order)


@st.composite
def odd(draw):
    """Layers of odd sizes, strides and kinds, up to 999 tokens of few channels."""
    dims = [draw(st.sampled_from((1, 31, 33, 64, 99, 128))) for _ in range(2)]
    heads, dtype = draw(st.integers(1, 3)), DTYPES[draw(dtypes)]
    most = max(1, 9000 // (heads * sum(dims)))
    tokens = min(most, draw(st.sampled_from((0, 1, 31, 32, 33, 64, 99, 128, 999))))
    sides = []
    for dim in dims:
        x = numbers(draw(st.sampled_from(KINDS)), (heads, tokens, dim), dtype, draw(st.integers(0, 1 << 32)))
        if dtype == np.float64:  # what float32 holds
            x = np.clip(x, -3.4e38, 3.4e38)
        sides.append(strided(x, draw(st.sampled_from(STRIDES))))
    return kvtheory.Layer(*sides)


@often
@given(data=odd(), codec=codecs, order=orders())
def test_odd_sizes(backend, data, codec, order):
    same(backend, codec, data, order)


@settings(max_examples=20)
@given(data=odd(), bits=st.sampled_from((2, 4)), order=orders())
def test_the_papers_groups(backend, data, bits, order):
    same(backend, (bits, 32, 32), data, order)


@settings(max_examples=20)
@given(bits=st.integers(1, 8), group=st.sampled_from((1, 7, 32)), how=st.sampled_from(STRIDES), order=orders())
def test_arrays(backend, bits, group, how, order):
    data = layer(order, heads=2, tokens=70, dim=12, value_dim=33, dtype="float16")
    want = reference.KIVI(bits, group, group).encode(data)
    keys, values = (strided(array, how) for array in (data.keys, data.values))
    with backend.running(order):
        codec = KIVI(bits, group, group)
        assert codec.encode_arrays(backend.put(keys), backend.put(values)) == want
        got = codec.decode_arrays(want, backend.xp)
    decoded = reference.decode(want)
    np.testing.assert_array_equal(backend.get(got[0]), decoded.keys)
    np.testing.assert_array_equal(backend.get(got[1]), decoded.values)


# -- refusals ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data(), dtype=dtypes, order=orders())
def test_what_is_no_number_is_refused_in_the_references_words(backend, data, dtype, order):
    clean = layer(3, heads=2, tokens=12, dim=5, value_dim=3, dtype=dtype)
    keys, values = clean.keys.copy(), clean.values.copy()
    own = kvtheory.Layer(keys, values)
    wrong = [np.nan, np.inf, -np.inf] + ([1e39] if dtype == "float64" else [])
    for _ in range(data.draw(st.integers(1, 3))):
        array = data.draw(st.sampled_from((keys, values)))
        place = tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)
        array[place] = data.draw(st.sampled_from(wrong))
    check_refused(backend, KIVI(2, 4, 4), reference.KIVI(2, 4, 4), own, order)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("wrong", [np.nan, -np.inf, 1e39])
def test_recent_tokens_are_looked_at_too(backend, side, wrong):
    clean = layer(3, heads=2, tokens=14, dim=5, value_dim=3, dtype="float64")
    own = kvtheory.Layer(clean.keys.copy(), clean.values.copy())
    getattr(own, side)[1, 13, 2] = wrong
    for order in (0, 1):
        with pytest.raises(ValueError, match=rf"{side}: .*head 1, token 13, channel 2"):
            reference.KIVI(2, 4, 4).encode(own)
        check_refused(backend, KIVI(2, 4, 4), reference.KIVI(2, 4, 4), own, order)


@kernel_settings
@example(part=3, at=-1, flip=0x80, dtype="float16", group=3, order=0)  # behind the last code
@example(part=7, at=-1, flip=0x80, dtype="float16", group=4, order=0)
@given(
    part=st.integers(1, 8),
    at=st.one_of(st.integers(0, 60), st.integers(-6, -1), st.none()),
    flip=st.integers(1, 255),
    dtype=dtypes,
    group=st.sampled_from((1, 3, 4)),
    order=orders(),
)
def test_altered_streams(backend, part, at, flip, dtype, group, order):
    """One byte of one part altered, or (None) the part cut: the same numbers, or the same refusal at the same byte."""
    data = layer(5, heads=3, tokens=11, dim=4, value_dim=7, dtype=dtype)
    known = reference.KIVI(3, group, group)
    check_same_outcome(backend, KIVI(), known, altered(known.encode(data), part, at, flip), order)


def test_bare_arrays_that_do_not_fit_are_refused():
    keys, values = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"values: expected shape .*got \(2, 2, 4\)"):
        KIVI().encode_arrays(keys, values[:, :2])
    with pytest.raises(TypeError, match="keys: expected elements of"):
        KIVI().encode_arrays(keys.astype(int), values)
    with pytest.raises(ValueError, match="heads"):
        KIVI().encode_arrays(keys[:0], values[:0])
    streams = reference.encode_cache(reference.KIVI(), [layer(1), layer(2)])
    with pytest.raises(reference.CorruptStream, match="kind"):
        KIVI().decode_arrays(streams, np)
    assert [one.positions.shape for one in KIVI().decode(streams)] == [(2, 7)] * 2


def test_it_is_the_references_codec():
    """An appender is the reference's, on the host."""
    assert KIVI.codec_id == "KIVI" and KIVI(3, 8, 16).parameters == reference.KIVI(3, 8, 16).parameters
    with pytest.raises(ValueError, match="multiple of group"):
        KIVI(2, 32, 33)
    data = layer(1, tokens=40)
    grown = KIVI(2, 8, 16).appender(data.replace(keys=data.keys[:, :9], values=data.values[:, :9], positions=None))
    grown.append(data.keys[:, 9:], data.values[:, 9:])
    assert grown.stream() == KIVI(2, 8, 16).encode(data)
