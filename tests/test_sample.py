"""The embedded cache: real, whole, small, and what its documentation says."""

import hashlib
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory
from kvtheory import attention
from kvtheory.sample import SAMPLE, sample_text, ulps


@pytest.fixture(scope="module")
def cache():
    return kvtheory.sample_cache()


def test_it_is_small_and_has_the_promised_shape(cache):
    assert len((resources.files("kvtheory") / "data" / SAMPLE).read_bytes()) <= 3_000_000
    assert [layer.index for layer in cache] == [2, 18]
    for layer in cache:
        assert layer.keys.shape == layer.values.shape == (3, 384, 64)
        assert layer.queries.shape == (9, 192, 64) and layer.output_proj.shape == (9, 64, 576)
        for array in (layer.keys, layer.values, layer.queries, layer.output_proj):
            assert array.dtype == np.float16
        assert layer.scale == 1 / 8 and layer.rope.rotated == 64 and layer.rope.layout == "half"
        assert (np.diff(layer.query_positions) > 0).all() and layer.query_positions[-1] == 383
        assert (layer.query_positions >= 192).sum() == 128


def test_tokens_and_surprisal(cache):
    assert cache.tokens.shape == cache.surprisal_bits.shape == (384,)
    assert cache.surprisal_bits[0] == np.log2(49_152) and (cache.surprisal_bits >= 0).all()
    assert 4 < cache.surprisal_bits[1:].mean() < 7


def test_meta_names_source_plan_and_licence(cache):
    meta = cache.meta
    assert meta["source"]["sha256"] == hashlib.sha256(sample_text().encode()).hexdigest()
    assert meta["plan"]["threads"] == 1 and meta["plan"]["compute"] == "float32"
    assert {"torch", "transformers", "tokenizers"} <= set(meta["plan"]["versions"]) and "gguf" in meta["converted_by"]
    assert "Apache-2.0" in meta["licence"] and "dequantised" in meta["weights"] and "float16" in meta["stored"]


def sharpness(layer):
    """Mean largest weight, and mean weight of token 0, over heads and late queries."""
    late = layer.query_positions >= 192
    weights = [
        attention.weights(layer.queries[h, late], layer.keys[h // 3], layer.scale, visible=layer.visible()[late])
        for h in range(9)
    ]
    return np.mean([a.max(1) for a in weights]), np.mean([a[:, 0] for a in weights])


def test_its_layers_differ_in_character(cache):
    (diffuse, no_sink), (sharp, sink) = map(sharpness, cache)
    assert sharp > 3 * diffuse and sink > 0.5 and no_sink < 0.05
    for layer, largest in zip(cache, (diffuse, sharp), strict=True):
        assert cache.meta["character"][str(layer.index)]["a_max"] == pytest.approx(largest, rel=0.01)


def test_attention_runs_on_it(cache):
    for layer in cache:
        out = attention.layer_outputs(layer)
        assert out.shape == (192, 576) and np.isfinite(out).all()


def test_each_call_gives_a_cache_of_its_own(cache):
    other = kvtheory.sample_cache()
    other[0].keys[:] = 0
    assert kvtheory.sample_cache()[0].keys.any() and cache[0].keys.any()


half = st.floats(width=16, allow_nan=False, allow_infinity=False)


@given(half, half)
def test_ulps_counts_float16_steps(a, b):
    """Against nextafter, walked at most ten steps."""
    a, b = np.float16(a), np.float16(b)
    steps, x = 0, a
    while x != b and steps <= 10:
        x = np.nextafter(x, b)
        steps += 1
    if steps <= 10:
        # from -0 the walk to the first positive number is one step, and +0 equals -0
        assert ulps(a, b) == steps
    else:
        assert ulps(a, b) > 10
    assert ulps(a, b) == ulps(b, a) == ulps(-a, -b)
