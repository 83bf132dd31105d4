"""gpu.DeviceCache of tokens as they are: full caches, and what reducers left, with log-weights, padding and positions of their own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpu.device_cache import DeviceCache
from kvtheory.layer import Decoded, Layer
from reference.reducer import parts_of
from reference.shape import Shape
from reference.stream import Kind, write
from tests.kernels.attention_cases import KINDS, TOKENS, asked, compared, queries, within
from tests.kernels.strategies import ELEMENTS, STRIDES, kernel_settings, numbers, orders, strided

EVERY = (*ELEMENTS, np.dtype(np.float64))
DIMS = (1, 2, 3, 8, 31, 33, 64, 99, 128)


@st.composite
def layers(draw, tokens=TOKENS, dtypes=EVERY, least=1):
    heads, dims = draw(st.integers(1, 3)), [draw(st.sampled_from(DIMS)) for _ in range(2)]
    count = max(least, min(draw(st.sampled_from(tokens)), 12000 // (heads * sum(dims))))
    sides = []
    for dim in dims:
        x = numbers(
            draw(st.sampled_from(KINDS)),
            (heads, count, dim),
            draw(st.sampled_from(dtypes)),
            draw(st.integers(0, 1 << 30)),
        )
        sides.append(strided(x, draw(st.sampled_from(STRIDES))))
    steps = np.random.default_rng(count).integers(0, 3, count)
    return Layer(*sides, positions=np.cumsum(steps) if draw(st.booleans()) else None)


@kernel_settings
@given(layer=layers(), how=asked(), order=orders())
def test_full(backend, layer, how, order):
    within(backend, reference.Full(), layer, how, order)


@settings(max_examples=40)
@given(layer=layers(least=4), how=asked(), order=orders(), keep=st.sampled_from((3, 0.3, 1.0)), which=st.integers(0, 3))
def test_kept_tokens(backend, layer, how, order, keep, which):
    """Of each head its own tokens; MergeReduce weighs them."""
    rng = np.random.default_rng(how["seed"])
    layer = layer.replace(
        queries=rng.standard_normal((2 * layer.kv_heads, 5, layer.head_dim)).astype(np.float32), positions=None
    )
    codec = (
        reference.SnapKV(keep=keep, sinks=1, window=1), reference.ScissorHands(keep=keep, sinks=1, window=1), reference.StreamingLLM(keep=keep, sinks=1),
        reference.MergeReduce(keep=keep, sinks=1, window=1),
    )[which]  # fmt: skip
    if layer.keys.dtype == np.float64 or not np.isfinite(layer.keys.astype(np.float64)).all():
        layer = layer.replace(keys=layer.keys.astype(np.float32), values=layer.values.astype(np.float32))
    within(backend, codec, layer, how, order)


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    dtype=st.sampled_from(EVERY),
    how=asked(),
    order=orders(),
)
def test_heads_that_keep_different_numbers(backend, counts, dtype, how, order):
    """With log-weights and positions by head; alone, and ahead of KIVI, whose padding repeats a head's last token."""
    counts = [max(1, n) for n in counts]
    rng, heads, width = np.random.default_rng(order), len(counts), max(counts)
    there = np.arange(width) < np.array(counts)[:, None]
    keys, values = (np.where(there[..., None], rng.standard_normal((heads, width, d)), 0).astype(dtype) for d in (6, 5))
    positions = np.where(there, np.cumsum(rng.integers(1, 4, (heads, width)), axis=1), -1)
    weights = np.where(there, rng.standard_normal((heads, width)).astype(np.float32).astype(np.float64), -np.inf)
    left = Decoded(keys, values, weights, positions, np.array(counts))
    layer = Layer(*(np.zeros((heads, 4 * width, d), dtype) for d in (6, 5)))
    alone, pipeline = reference.MergeReduce(), reference.Pipeline([reference.MergeReduce(), reference.KIVI(3, 4, 8)])
    for codec, parts in ((alone, parts_of(Shape.of(layer), left)), (pipeline, pipeline._parts([layer], [left]))):
        stream = write(codec._header(Kind.LAYER), [parts])
        decoded = reference.decode(stream)
        q, limits = queries(how, heads, 6, decoded)
        with backend.running(order):
            cache = DeviceCache(stream, xp=backend.xp, split=how["split"])
        found, exact, bound = compared(backend, cache, decoded, q, limits, order)
        assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize("limit", [0, 31, 32, 33, 63, 64, 69])
def test_tiles_that_begin_at_the_last_position_seen(backend, limit):
    """Of 70 tokens those up to `limit` are seen, with values that tell one token from none."""
    keys = np.zeros((1, 70, 4), np.float32)
    values = np.eye(70, dtype=np.float32)[None]
    with backend.running():
        cache = DeviceCache(reference.Full().encode(Layer(keys, values)), xp=backend.xp, split=64)
        found = backend.get(cache.attend(backend.put(np.zeros((1, 1, 4), np.float32)), np.array([limit])))
    np.testing.assert_allclose(found[0, 0], np.where(np.arange(70) <= limit, 1 / (limit + 1), 0), rtol=1e-6)


def test_float64_numbers_that_float32_cannot_hold_are_refused(backend):
    keys = np.ones((1, 3, 2))
    keys[0, 1, 1] = 1e39
    with pytest.raises(ValueError, match=r"keys: expected numbers that float32 can hold, got 1e\+39"):
        DeviceCache(reference.Full().encode(Layer(keys, keys * 0)), xp=backend.xp)
