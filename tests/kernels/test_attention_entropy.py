"""gpu.DeviceCache on entropy-coded coefficients: any bases, tables, classes, escapes, shifts and blocks; with RoPE and without; hostile words."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpu.device_cache import DeviceCache, entropy
from reference import stream
from tests.kernels.attention_cases import asked, compared, queries, within
from tests.kernels.strategies import orders
from tests.kernels.test_attention_fixed import cases
from tests.kernels.test_transform_codecs import fitted
from tests.kernels.transforms import entropy_coders
from tests.reference.strategies import text


@settings(max_examples=60)
@given(case=cases(entropy_coders, reference.MetricKLT, (1.0,)), how=asked(), order=orders())
def test_any_coder(backend, case, how, order):
    within(backend, *case, how, order)


@settings(max_examples=10)
@given(
    name=st.sampled_from(("MetricKLT entropy", "MetricKLT few classes")), dtype=st.sampled_from(("float32", "float16", "bfloat16", "float64")),
    tokens=st.sampled_from((1, 31, 33, 99)), how=asked(), order=orders(),
)  # fmt: skip
def test_fitted(backend, name, dtype, tokens, how, order):
    layer, codec = text("B", tokens=tokens, dtype=dtype)[0], fitted(name)[0]
    within(backend, codec, layer, how, order)
    if dtype == "float32" and tokens > 31:
        within(
            backend, reference.Pipeline([reference.MergeReduce(keep=20, sinks=2, window=3), codec]), layer, how, order
        )


@settings(max_examples=12)
@given(
    coding=st.sampled_from(("fixed", "entropy")), joint=st.sampled_from(("none", "head", "layer")), roped=st.booleans(),
    tokens=st.sampled_from((31, 99)), how=asked(), order=orders(),
)  # fmt: skip
def test_heads_of_odd_sizes_in_units_of_their_own(backend, coding, joint, roped, tokens, how, order):
    """Where the coefficients of a head's keys begin at no multiple of 4, and the last head's end where the tile does."""
    codec, layer = odd(coding, joint, roped, tokens)
    within(backend, codec, layer, how, order)


@pytest.mark.parametrize("roped", [False, True])
@pytest.mark.parametrize("room", [4200, 5200, 6200, 7200])
def test_little_shared_memory(backend, monkeypatch, roped, room):
    """Fewer heads at once, two of three among them, and smaller tiles."""
    monkeypatch.setattr(entropy, "GOOD_SHARED", room)
    monkeypatch.setattr(entropy, "MOST_SHARED", room)
    codec, layer = odd("entropy", "none", roped, 99)
    stream = codec.encode(layer)
    decoded = reference.decode(stream, codec.state)
    how = {"group": 2, "count": 1, "dtype": "float32", "kind": "normal", "seed": 1, "causal": True, "split": None}
    q, limits = queries(how, 3, 7, decoded)
    with backend.running():
        cache = DeviceCache(stream, codec.state, backend.xp)
    found, exact, bound = compared(backend, cache, decoded, q, limits, 0)
    assert cache.segments[0].heads_block == 2 or room > 4200
    assert (np.abs(found - exact) <= bound).all()


@functools.cache
def odd(coding, joint, roped, tokens):
    calibration, layer = (text(name, n, heads=3, dim=7, value_dim=5)[0] for name, n in (("A", 96), ("B", tokens)))
    if not roped:
        calibration, layer = (one.replace(rope=None) for one in (calibration, layer))
    return reference.MetricKLT.fit([calibration], 3.0, coding=coding, joint=joint, block=16), layer


@settings(max_examples=40)
@given(part=st.integers(3, 6), at=st.integers(0, 4000), flip=st.integers(1, 255), order=orders())
def test_words_that_lead_nowhere_are_corrupt(backend, part, at, flip, order):
    """One byte altered: what the reference refuses is refused, and what it decodes is read."""
    codec = fitted("MetricKLT entropy")[0]
    header, groups = stream.read(codec.encode(text("B", tokens=40)[0]))
    parts = [bytearray(one.rest()) for one in groups[0]]
    if not parts[part]:
        return
    parts[part][at % len(parts[part])] ^= flip
    altered = stream.write(header, [parts])
    try:
        reference.decode(altered, codec.state)
    except reference.CorruptStream:
        with backend.running(order), pytest.raises(reference.CorruptStream):
            DeviceCache(altered, codec.state, backend.xp)
        return
    with backend.running(order):
        found = DeviceCache(altered, codec.state, backend.xp).attend(backend.put(np.zeros((2, 1, 16), np.float32)))
    assert np.isfinite(backend.get(found)).all()
