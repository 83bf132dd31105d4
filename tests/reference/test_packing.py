"""Dense packing against one big integer, for all sixteen widths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import CorruptStream, packing

widths = st.integers(1, 16)


@st.composite
def coded(draw, most=400):
    bits = draw(widths)
    count = draw(st.integers(0, most))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    codes = rng.integers(0, 1 << bits, count)
    return bits, codes.astype(
        draw(st.sampled_from([np.uint8, np.int16, np.uint16, np.int64])) if bits < 8 else np.int64
    )


def one_number(codes, bits):
    whole = sum(int(c) << (i * bits) for i, c in enumerate(codes))
    return whole.to_bytes(-(-len(codes) * bits // 8), "little")


@given(coded())
def test_packing_is_one_number_little_endian(case):
    bits, codes = case
    packed = packing.pack(codes, bits)
    assert packed == one_number(codes, bits)
    assert len(packed) == packing.packed_size(codes.size, bits)
    assert np.array_equal(packing.unpack(packed, codes.size, bits), codes)


@pytest.mark.parametrize("bits", packing.WIDTHS)
def test_long_arrays_cross_the_steps(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, 3 * 8 * packing._STEP + 5)
    packed = packing.pack(codes, bits)
    assert np.array_equal(packing.unpack(packed, codes.size, bits), codes)
    # a cut at a multiple of eight codes is a cut of the bytes
    assert packed[: 1000 * bits] == packing.pack(codes[:8000], bits)


@given(coded(), st.data())
def test_a_growing_packer_writes_the_same(case, data):
    bits, codes = case
    packer = packing.Packer(bits)
    at = 0
    while at < codes.size:
        step = data.draw(st.integers(0, 50))
        packer.append(codes[at : at + step])
        at += step
    assert packer.bytes() == packing.pack(codes, bits)
    assert packer.bytes() == packing.pack(codes, bits)  # asking changes nothing


@given(widths, st.integers(1, 3), st.integers(1, 9), st.integers(0, 1 << 30))
def test_planes_are_the_same_bytes_as_rows(bits, groups, rows, seed):
    g = packing.group(bits)
    planes = (
        np.random.default_rng(seed)
        .integers(0, 1 << bits, (groups * g, rows))
        .astype(np.uint8 if bits <= 8 else np.uint16)
    )
    out = np.empty((groups * g * bits // 8, rows), np.uint8)
    packing.pack_planes(planes, bits, out)
    assert out.T.tobytes() == packing.pack(planes.T, bits)
    back = np.empty_like(planes)
    packing.unpack_planes(out, bits, back)
    assert np.array_equal(back, planes)


@given(st.integers(1, 8), st.integers(0, 70), st.integers(0, 1 << 30))
def test_rows_are_packed_like_anything_else(bits, groups, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, groups * packing.group(bits)).astype(np.uint8)
    out = np.empty(codes.size * bits // 8, np.uint8)
    packing.pack_rows(codes.copy(), bits, out)
    assert out.tobytes() == one_number(codes, bits)
    back = np.full_like(codes, 255)
    packing.unpack_rows(out, bits, back)
    assert np.array_equal(back, codes)


@given(widths, st.binary(max_size=40), st.integers(0, 400))
def test_any_bytes_are_codes_or_corrupt(bits, data, count):
    try:
        codes = packing.unpack(data, count, bits)
    except CorruptStream:
        return
    assert packing.pack(codes, bits) == data


def test_set_bits_behind_the_last_code_are_refused():
    packed = bytearray(packing.pack(np.array([1, 2, 3]), 3))
    packed[1] |= 0x80
    with pytest.raises(CorruptStream, match="not 0"):
        packing.unpack(bytes(packed), 3, 3)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="bits: expected an int from 1 to 16, got 17"):
        packing.pack(np.array([1]), 17)
    with pytest.raises(ValueError, match="got 8 at 1"):
        packing.pack(np.array([7, 8]), 3)
    with pytest.raises(ValueError, match="got -1 at 0"):
        packing.pack(np.array([-1]), 3)
    with pytest.raises(TypeError, match="expected integers"):
        packing.pack(np.array([0.5]), 3)
    with pytest.raises(CorruptStream, match="expected 2 bytes"):
        packing.unpack(b"\0", 3, 4)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_looked_up_are_codes_unpacked(bits):
    rng = np.random.default_rng(bits)
    packed = rng.integers(0, 256, (37, 3), np.uint8)
    values = rng.standard_normal(1 << bits).astype(np.float32)
    out = np.full((37, 24 // bits), np.nan, np.float32)
    packing.look_up(packed, tuple(values.tolist()), out)
    codes = packing.unpack(packed.tobytes(), out.size, bits).reshape(out.shape)
    assert np.array_equal(out, values[codes])
