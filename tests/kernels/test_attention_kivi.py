"""gpu.DeviceCache on KIVI's codes: any groups, and the recent tokens of keys and of values, which are not the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from tests.kernels.attention_cases import asked, within
from tests.kernels.strategies import kernel_settings, orders
from tests.kernels.test_attention_exact import layers

codecs = st.tuples(st.integers(1, 8), st.sampled_from((1, 2, 3, 4, 5, 8, 16, 31, 32, 33)), st.integers(1, 3)).map(
    lambda c: reference.KIVI(c[0], c[1], c[1] * c[2])
)


@kernel_settings
@given(layer=layers(), codec=codecs, how=asked(), order=orders())
def test_any_groups(backend, layer, codec, how, order):
    within(backend, codec, layer, how, order)


@settings(max_examples=20)
@given(layer=layers(), bits=st.sampled_from((2, 4)), window=st.sampled_from((32, 128)), how=asked(), order=orders())
def test_the_papers_groups(backend, layer, bits, window, how, order):
    within(backend, reference.KIVI(bits, 32, window), layer, how, order)
