"""DeviceCache on CuPy arrays, without a GPU: on a stand-in as strict as CuPy, whose kernels run in the simulator (fake_cupy.py)."""

import ml_dtypes
import numpy as np
import pytest

import gpu
import reference
from gpu.device_cache import DeviceCache, error_bound
from gpu.module import simulator, sources
from kvtheory import attention
from tests.kernels import fake_cupy
from tests.kernels.attention_cases import EXAMPLES
from tests.reference.strategies import text


@pytest.fixture
def cupy(monkeypatch):
    gpu.codecs()
    for name in EXAMPLES:  # what imports modules, and so sources, comes first
        codec, data = EXAMPLES[name]()
        DeviceCache(codec.encode(data), codec.state, np)
    fake = fake_cupy.install(monkeypatch)
    yield fake
    for source in sources():
        source._modules.clear()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_cupy_arrays_stay_on_the_device(cupy, name):
    """Asked, appended to, asked again: within the bound, and the numbers of NumPy arrays."""
    codec, data = EXAMPLES[name]()
    stream = codec.encode(data)
    decoded = reference.decode(stream, codec.state)
    q = np.random.default_rng(3).standard_normal((4, 2, data.head_dim)).astype(np.float32)
    limits = np.array([data.tokens + 200, data.tokens - 1])
    more = text("C", 80)[0]
    with simulator("fast"):
        caches = [DeviceCache(stream, codec.state, xp, fold=32, split=64) for xp in (cupy, np)]
        found = caches[0].attend(cupy.asarray(q), cupy.asarray(limits))
        assert type(found) is cupy.ndarray
        exact = attention.attend(
            q,
            decoded.keys,
            decoded.values,
            log_weights=decoded.log_weights,
            positions=decoded.positions,
            query_positions=limits,
        )
        assert (np.abs(found.get() - exact) <= error_bound(caches[0], decoded, q, limits)).all()
        caches[0].append(cupy.asarray(more.keys), cupy.asarray(more.values))
        caches[1].append(more.keys, more.values)
        again = [caches[0].attend(cupy.asarray(q)).get(), caches[1].attend(q)]
    np.testing.assert_array_equal(*again)
    assert caches[0].nbytes == caches[1].nbytes


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_queries_of_every_element_type(cupy, dtype):
    codec, data = EXAMPLES["TurboQuant"]()
    stream = codec.encode(data)
    q = np.random.default_rng(3).standard_normal((4, 2, 16)).astype(dtype)
    with simulator("fast"):
        found = [
            DeviceCache(stream, xp=cupy).attend(cupy.asarray(q)).get(),
            DeviceCache(stream, xp=np).attend(q),
            DeviceCache(reference.Full().encode(data), xp=cupy).attend(cupy.asarray(q)).get(),
            DeviceCache(reference.Full().encode(data), xp=np).attend(q),
        ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])
