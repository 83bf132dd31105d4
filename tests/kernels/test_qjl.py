"""kernels/qjl.cu writes the bytes of reference/qjl.py and decodes to the same bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from gpu import qjl
from gpu.qjl import QJL
from reference import hadamard
from tests.kernels import vector_codecs as shared
from tests.kernels.strategies import kernel_settings, orders

bits = st.integers(1, 8)
few_bits = st.sampled_from((1, 1, 2, 3))
seeds = st.sampled_from((0, 1, 2**63 - 1))
SMALL = (1, 2, 3, 5, 8, 31, 32, 33, 48, 96)


def both(*args):
    return QJL(*args), reference.QJL(*args)


@kernel_settings
@given(shared.layers(SMALL, 40), bits, seeds, orders())
def test_small_vectors(backend, layer, bits, seed, order):
    shared.check(backend, *both(bits, seed), layer, order)


@kernel_settings
@given(shared.layers(most_tokens=5), few_bits, orders())
def test_vectors(backend, layer, bits, order):
    shared.check(backend, *both(bits), layer, order)


@pytest.mark.parametrize(("dim", "dtype"), [(257, "float16"), (1000, "bfloat16"), (1024, "float32")])
def test_large_vectors(backend, dim, dtype):
    shared.check(backend, *both(1, 5), shared.example(dtype, 1, 2, dim, dim), dim)


@kernel_settings
@given(shared.layers((1, 3, 33, 96), 5, (np.dtype(np.float64),), 1), shared.refusals(), orders())
def test_numbers_that_float32_cannot_hold(backend, layer, places, order):
    shared.check_refusal(backend, *both(1), layer, places, order)


@kernel_settings
@given(shared.layers((1, 5, 16, 33), 3), bits, st.data(), orders())
def test_hostile_streams(backend, layer, bits, data, order):
    shared.check_hostile(backend, *both(bits), layer, data, order)


@kernel_settings
@given(shared.layers((1, 3, 16, 33), 7), bits, st.lists(st.integers(0, 99), min_size=1, max_size=3), orders())
def test_appended_tokens(backend, layer, bits, cuts, order):
    shared.check_appender(backend, *both(bits), layer, cuts, order)


def test_bits_behind_the_last_code_are_refused(backend):
    shared.check_padding(backend, *both(1))


def test_kernels_do_the_work(backend, monkeypatch):
    codec, layer = QJL(1), shared.example()
    with backend.running(), shared.launches(monkeypatch, qjl) as names:
        stream = codec.encode(layer)
        assert names == ["rounded", "signs", "encode_values"]
        names.clear()
        codec.decode(stream)
        assert names == ["decode", "decode_values"]


def test_too_many_channels(backend):
    layer = shared.example(value_dim=hadamard.LARGEST + 1)
    for encode in (QJL().encode, QJL().appender):
        with pytest.raises(ValueError, match="values: QJL takes up to 1024 channels, got 1025"):
            encode(layer)
