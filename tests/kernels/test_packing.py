"""kernels/packing.cu writes the bytes of reference/packing.py and reads them back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import packing as gpu_packing
from reference import CorruptStream, packing
from tests.kernels.strategies import kernel_settings, often, orders, sizes

TYPES = (np.uint8, np.uint16, np.int32, np.uint32, np.int64)
counts = st.one_of(st.just(0), sizes(999))
widths = st.integers(1, 16)


def drawn(seed, count, bits, dtype=None):
    """Codes of all values, the largest among them often."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, count)
    codes[rng.random(count) < 0.2] = (1 << bits) - 1
    return codes.astype(dtype or packing._type(bits))


@kernel_settings
@given(st.integers(0, 2**32 - 1), counts, widths, st.sampled_from(TYPES), orders())
def test_pack(backend, seed, count, bits, dtype, order):
    codes = drawn(seed, count, bits, dtype if (1 << bits) - 1 <= np.iinfo(dtype).max else None)
    with backend.running(order):
        assert gpu_packing.pack(backend.put(codes), bits) == packing.pack(codes, bits)


@kernel_settings
@given(st.integers(0, 2**32 - 1), counts, widths, st.integers(0, 31), orders())
def test_pack_from_any_bit_on(backend, seed, count, bits, phase, order):
    codes = drawn(seed, count, bits)
    with backend.running(order):
        words = backend.get(gpu_packing.pack_words(backend.put(codes), bits, phase))
    assert words.dtype == np.uint32
    assert words.size == -(-(phase + count * bits) // 32)
    expected = int.from_bytes(packing.pack(codes, bits), "little") << phase
    assert int.from_bytes(words.astype("<u4").tobytes(), "little") == expected


@often
@given(st.integers(0, 2**32 - 1), counts, widths, orders())
def test_unpack(backend, seed, count, bits, order):
    codes = drawn(seed, count, bits)
    with backend.running(order):
        back = backend.get(gpu_packing.unpack(packing.pack(codes, bits), count, bits, backend.xp))
    assert back.dtype == packing._type(bits)
    assert np.array_equal(back, codes)


@kernel_settings
@given(st.data(), widths, sizes(300), orders())
def test_first_code_out_of_range_is_named(backend, data, bits, count, order):
    dtype = np.int32 if bits in (8, 16) or data.draw(st.booleans()) else packing._type(bits)
    codes = drawn(data.draw(st.integers(0, 99)), count, bits, dtype)
    for at in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5)):
        codes[at] = 1 << bits
    with pytest.raises(ValueError, match="expected 0 <= code") as expected:
        packing.pack(codes, bits)
    with backend.running(order), pytest.raises(ValueError, match="expected 0 <= code") as got:
        gpu_packing.pack(backend.put(codes), bits)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x02\x03", b"\x01\xf2"])
def test_wrong_bytes_are_refused_as_the_reference_does(backend, data):
    with pytest.raises(CorruptStream) as expected:
        packing.unpack(data, 4, 3)
    with pytest.raises(CorruptStream) as got:
        gpu_packing.unpack(data, 4, 3, backend.xp)
    assert str(got.value) == str(expected.value)


def test_codes_that_are_no_integers_are_refused(backend):
    with pytest.raises(TypeError, match="expected integers, got float64"):
        gpu_packing.pack(backend.put(np.zeros(3)), 2)
    with pytest.raises(ValueError, match="bits: expected an int from 1 to 16"):
        gpu_packing.pack(backend.put(np.zeros(3, np.uint8)), 17)


@kernel_settings
@given(st.lists(st.integers(0, 40), max_size=6), widths, st.integers(0, 99), orders())
def test_appended_bits_are_those_of_all_codes_at_once(backend, counts, bits, seed, order):
    codes = drawn(seed, sum(counts), bits)
    grown, start = gpu_packing.Bits(), 0
    with backend.running(order):
        for count in counts:
            words = gpu_packing.pack_words(backend.put(codes[start : start + count]), bits, grown.phase)
            grown.append(backend.get(words).astype("<u4").tobytes(), count * bits)
            start += count
    assert grown.bytes() == packing.pack(codes, bits)
