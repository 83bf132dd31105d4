"""gpu.DeviceCache on KVQuant's codes: tables of any kind, ropes, outliers, sinks; and heads with positions of their own."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from tests.kernels.attention_cases import KINDS, TOKENS, asked, within
from tests.kernels.strategies import STRIDES, kernel_settings, numbers, orders, strided
from tests.kernels.test_kvquant import DIMS, dtypes, ropes, table
from tests.reference.strategies import DTYPES, text


@st.composite
def cases(draw):
    """A codec with tables that were not fitted to anything, and a layer for it."""
    bits, sinks = draw(st.integers(1, 8)), draw(st.sampled_from((0, 1, 2, 5)))
    outliers = draw(st.sampled_from((0.0, 0.01, 0.02, 0.1, 0.3, 0.49)))
    heads, dims, dtype = draw(st.integers(1, 3)), [draw(st.sampled_from(DIMS)) for _ in range(2)], DTYPES[draw(dtypes)]
    count = min(draw(st.sampled_from(TOKENS)), max(1, 9000 // (heads * sum(dims))))
    rope, seed = draw(ropes(dims[0])), draw(st.integers(0, 1 << 32))
    sides = []
    for dim in dims:
        x = numbers(draw(st.sampled_from(KINDS)), (heads, count, dim), dtype, draw(st.integers(0, 1 << 32)))
        sides.append(strided(x, draw(st.sampled_from(STRIDES))))
    positions = np.cumsum(np.random.default_rng(seed).integers(0, 90000, count)) if draw(st.booleans()) else None
    own = table(seed, heads, *dims, rope, bits, draw(st.sampled_from((1.0, 1.5, 0.1))), 7)
    layer = kvtheory.Layer(*sides, rope=rope, index=7, positions=positions)
    return reference.KVQuant(bits, outliers, sinks, tables=(own,)), layer


@kernel_settings
@given(case=cases(), how=asked(), order=orders())
def test_any_tables(backend, case, how, order):
    within(backend, *case, how, order)


@settings(max_examples=15)
@given(
    bits=st.sampled_from((2, 3, 4)),
    outliers=st.sampled_from((0.01, 0.1)),
    pre_rope=st.booleans(),
    how=asked(),
    order=orders(),
)
def test_fitted_and_behind_a_reducer(backend, bits, outliers, pre_rope, how, order):
    """Behind a reducer in a Pipeline each head has its own tokens, hence its own angles, weights and number."""
    codec = reference.KVQuant.fit(text("A", tokens=48), bits, outliers, 2, pre_rope=pre_rope)
    layer = text("B", tokens=61)[0]
    within(backend, codec, layer, how, order)
    assume(layer.queries is not None)
    for reducer in (reference.MergeReduce(keep=20, sinks=2, window=3), reference.SnapKV(keep=20, sinks=2, window=3)):
        within(backend, reference.Pipeline([reducer, codec]), layer, how, order)
