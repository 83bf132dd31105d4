"""gpu.DeviceCache on TurboQuant's codes, both kinds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpu.device_cache import DeviceCache
from kvtheory.layer import Layer
from tests.kernels.attention_cases import asked, within
from tests.kernels.strategies import kernel_settings, orders
from tests.kernels.test_attention_exact import layers


@kernel_settings
@given(layer=layers(), bits=st.integers(1, 8), how=asked(), order=orders(), seed=st.integers(0, 3))
def test_mse(backend, layer, bits, how, order, seed):
    within(backend, reference.TurboQuant(bits, seed), layer, how, order)


@settings(max_examples=60)
@given(layer=layers(), bits=st.integers(1, 8), how=asked(), order=orders())
def test_prod(backend, layer, bits, how, order):
    within(backend, reference.TurboQuant(bits, kind="prod"), layer, how, order)


def test_a_rotation_in_floating_point_is_refused(backend):
    layer = Layer(np.ones((1, 3, 2), np.float32), np.ones((1, 3, 2), np.float32))
    with pytest.raises(ValueError, match="rotation 'hadamard', got 'haar'"):
        DeviceCache(reference.TurboQuant(rotation="haar").encode(layer), xp=backend.xp)
