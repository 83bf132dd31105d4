"""kernels/polarquant.cu writes the bytes of reference/polarquant.py and decodes to the same bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from gpu import polarquant
from gpu.polarquant import PolarQuant
from reference import CorruptStream, hadamard, packing
from reference import stream as container
from tests.kernels import vector_codecs as shared
from tests.kernels.strategies import kernel_settings, orders

#: the default, and trees of any depth; codebooks are made once for a level and its bits, of which few are drawn
levels = st.one_of(
    st.just((4, 2, 2, 2)), st.lists(st.sampled_from((1, 2, 3, 5, 8)), min_size=1, max_size=10).map(tuple)
)
seeds = st.sampled_from((0, 1, 2**63 - 1))


def both(*args):
    return PolarQuant(*args), reference.PolarQuant(*args)


@kernel_settings
@given(shared.layers(), levels, seeds, orders())
def test_same_bytes_and_bits(backend, layer, levels, seed, order):
    shared.check(backend, *both(levels, seed), layer, order)


@pytest.mark.parametrize("dim", shared.LARGE)
@pytest.mark.parametrize(
    ("levels", "dtype"), [((4, 2, 2, 2), "float16"), ((3,) * 10, "bfloat16"), ((2,) * 8, "float32"), ((8,), "float32")]
)
def test_large_vectors(backend, dim, levels, dtype):
    layer = shared.example(dtype, heads=3, tokens=2, dim=dim, value_dim=dim - 1)
    shared.check(backend, *both(levels, 5), layer, dim)


@kernel_settings
@given(shared.layers((1, 3, 33, 96, 130), 5, (np.dtype(np.float64),), 1), shared.refusals(), orders())
def test_numbers_that_float32_cannot_hold(backend, layer, places, order):
    shared.check_refusal(backend, *both(), layer, places, order)


@kernel_settings
@given(shared.layers((1, 5, 33, 64, 96), 3), levels, st.data(), orders())
def test_hostile_streams(backend, layer, levels, data, order):
    shared.check_hostile(backend, *both(levels), layer, data, order)


@kernel_settings
@given(shared.layers((1, 3, 33, 64, 99), 7), levels, st.lists(st.integers(0, 99), min_size=1, max_size=3), orders())
def test_appended_tokens(backend, layer, levels, cuts, order):
    shared.check_appender(backend, *both(levels), layer, cuts, order)


@pytest.mark.parametrize("dim", [1, 3, 33, 65])
def test_a_lone_coordinate_has_a_sign_and_nothing_else(backend, dim):
    # of several vectors: several threads find it, and must not race to say so
    rows = 10
    codecs, layer = both((4, 2)), shared.example(heads=1, tokens=rows, dim=dim, value_dim=2)
    header, (parts,) = container.read(codecs[1].encode(layer))
    parts = [bytearray(part.rest()) for part in parts]
    each = (dim + 1) // 2
    first = slice(rows * each * 4 // 8)  # of all vectors the codes of level 1, then those of level 2
    codes = packing.unpack(bytes(parts[3][first]), rows * each, 4)
    codes[each - 1 :: each] |= 1
    parts[3][first] = packing.pack(codes, 4)
    damaged = container.write(header, [parts])
    with pytest.raises(CorruptStream, match="more than a sign") as expected:
        codecs[1].decode(damaged)
    with backend.running(dim), pytest.raises(CorruptStream, match="more than a sign") as got:
        codecs[0].decode(damaged)
    assert str(got.value) == str(expected.value)


def test_bits_behind_the_last_code_are_refused(backend):
    shared.check_padding(backend, *both((3, 2, 2)))


def test_kernels_do_the_work(backend, monkeypatch):
    codec, layer = PolarQuant(), shared.example()
    with backend.running(), shared.launches(monkeypatch, polarquant) as names:
        stream = codec.encode(layer)
        assert names == ["encode"] * 2
        names.clear()
        codec.decode(stream)
        assert names == ["decode"] * 2


def test_too_many_channels(backend):
    layer = shared.example(dim=hadamard.LARGEST + 1)
    for encode in (PolarQuant().encode, PolarQuant().appender):
        with pytest.raises(ValueError, match="keys: PolarQuant takes up to 1024 channels, got 1025"):
            encode(layer)
