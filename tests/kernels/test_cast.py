"""cast.cu: element types as NumPy converts them, to the last bit, subnormal numbers included."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.casts import PAIRS, cast
from tests.kernels.strategies import KINDS, STRIDES, kernel_settings, numbers, orders, sizes, strided

TYPES = {"float": np.float32, "double": np.float64, "__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}


def same(found, wanted):
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    )


def exponents(x, seed):
    """Of all magnitudes that float64 numbers of this kind have: the other types' largest and least, and what lies between their numbers."""
    rng = np.random.default_rng(seed)
    return np.ldexp(x.astype(np.float64), rng.integers(-1200, 900, x.shape))


@kernel_settings
@given(
    st.sampled_from(PAIRS),
    sizes(),
    sizes(33),
    st.sampled_from(KINDS),
    st.sampled_from(STRIDES),
    orders(),
    st.integers(0, 1 << 30),
)
def test_as_numpy_converts(backend, pair, tokens, dim, kind, how, order, seed):
    to, of = (np.dtype(TYPES[name]) for name in pair)
    x = numbers(kind, (tokens, dim), np.float32 if of == np.float64 else of, seed)
    if of == np.float64 and seed % 2:
        x = exponents(np.clip(x, -1e9, 1e9), seed)
    x = strided(x.astype(of), how)
    with np.errstate(over="ignore", under="ignore"):
        wanted = x.astype(to)
    with backend.running(order):
        found = backend.get(cast(backend.put(x), to))
    assert same(found, wanted)


@pytest.mark.parametrize("to", ("__half", "__nv_bfloat16"))
def test_every_number_of_two_bytes_and_its_neighbours(backend, to):
    """There; and back from the middles between neighbours and what is next to these, up to what rounds to inf."""
    dtype = np.dtype(TYPES[to])
    own = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        own = own[np.isfinite(own)]
        every = np.sort(own.astype(np.float32))
    middles = ((every[1:].astype(np.float64) + every[:-1]) / 2).astype(np.float32)
    x = np.concatenate(
        [every, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))]
    )
    x = np.concatenate([x, np.float32([np.inf, -np.inf, 3.4e38, -3.4e38])])
    with np.errstate(over="ignore"):
        wanted = x.astype(dtype)
    with backend.running(build="fast"):
        assert same(backend.get(cast(backend.put(x), dtype)), wanted)
        assert same(backend.get(cast(backend.put(own), np.float32)), own.astype(np.float32))


def test_what_has_the_type_already_is_not_touched(backend):
    x = backend.put(np.ones((3, 4), np.float16)).T
    with backend.running():
        assert cast(x, np.float16) is x
        assert same(
            backend.get(cast(backend.put(np.zeros((0, 3), np.float64)), np.float32)), np.zeros((0, 3), np.float32)
        )
    swapped = np.array([1.5, -2.0], ">f4")  # never on a GPU
    with backend.running():
        assert same(cast(swapped, np.float32), np.array([1.5, -2.0], np.float32))
        assert same(cast(swapped, np.float64), np.array([1.5, -2.0]))


def test_other_pairs_are_refused(backend):
    with pytest.raises(TypeError, match="dtype: expected float32 on one side, got float64 to float16"):
        cast(backend.put(np.zeros(3)), np.float16)
    with pytest.raises(TypeError, match="got int32"):
        cast(backend.put(np.zeros(3, np.int32)), np.float32)
