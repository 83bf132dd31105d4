"""gpu.DeviceCache on transform coders of fixed rate: any bases, scales, levels and bits; with RoPE and without; fitted ones."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from kvtheory.layer import Layer, Rope
from reference.transform_coding.codec import LayerCoder
from tests.kernels.attention_cases import KINDS, TOKENS, asked, within
from tests.kernels.strategies import ELEMENTS, kernel_settings, numbers, orders
from tests.kernels.test_transform_codecs import fitted
from tests.kernels.transforms import fixed_coders
from tests.reference.strategies import text

EVERY = (*ELEMENTS, np.dtype(np.float64))


@st.composite
def shapes(draw, most=40):
    """heads, head_dim, value_dim, tokens of layers whose stacked vectors have at most `most` entries."""
    heads = draw(st.integers(1, 3))
    dim, value_dim = (draw(st.integers(1, most // (2 * heads))) for _ in range(2))
    return heads, dim, value_dim, draw(st.sampled_from(TOKENS if heads * (dim + value_dim) < 16 else TOKENS[:-1]))


@st.composite
def cases(draw, coders, codec, scales):
    """A codec around a coder that no fit would make, and a layer of about its scale."""
    heads, dim, value_dim, count = draw(shapes())
    width = heads * (dim + value_dim)
    made = draw(coders(st.just(width)))
    coder, scale = made[0], (made[2] if len(made) == 3 else draw(st.sampled_from(scales)))
    pairs = draw(st.integers(0, dim // 2))
    rope = None
    if pairs and draw(st.booleans()):
        rope = Rope(
            1000.0 ** (-np.arange(pairs) / pairs),
            draw(st.sampled_from(("half", "interleaved"))),
            draw(st.sampled_from((1.0, 0.75))),
        )
    log_weights = (np.arange(heads) * draw(st.sampled_from((0.0, 0.25)))).astype(np.float32)
    layer_coder = LayerCoder(3, heads, dim, value_dim, rope, log_weights, coder)
    sinks, window = draw(st.sampled_from(((0, 0), (2, 0), (0, 5), (3, 40))))
    own = codec(sinks=sinks, window=window, layers=(layer_coder,))
    dtype = draw(st.sampled_from(EVERY))
    sides = [
        (numbers(draw(st.sampled_from(KINDS)), (heads, count, d), np.float32, draw(st.integers(0, 1 << 30))).astype(np.float64) * min(scale, 64)).astype(dtype)
        for d in (dim, value_dim)
    ]  # fmt: skip
    steps = np.random.default_rng(count).integers(0, 5000, count)
    return own, Layer(*sides, rope=rope, index=3, positions=np.cumsum(steps) if draw(st.booleans()) else None)


@kernel_settings
@given(
    case=cases(fixed_coders, lambda **own: reference.MetricKLT(coding="fixed", **own), (1.0,)),
    how=asked(),
    order=orders(),
)
def test_any_coder(backend, case, how, order):
    within(backend, *case, how, order)


@settings(max_examples=25)
@given(
    name=st.sampled_from(("AATC tokenwise", "AATC channelwise", "AATC factored", "PALU minmax", "PALU max", "MetricKLT fixed", "MetricKLT channelwise")),
    dtype=st.sampled_from(("float32", "float16", "bfloat16", "float64")), tokens=st.sampled_from((0, 1, 31, 33, 99)), plain=st.booleans(),
    how=asked(), order=orders(),
)  # fmt: skip
def test_fitted(backend, name, dtype, tokens, plain, how, order):
    """plain: behind a reducer."""
    layer, codec = text("B", tokens=max(tokens, 1), dtype=dtype)[0], fitted(name)[0]
    within(backend, codec, layer, how, order)
    if plain and tokens > 31 and dtype != "float64":
        within(
            backend, reference.Pipeline([reference.MergeReduce(keep=20, sinks=2, window=3), codec]), layer, how, order
        )
