"""kernels/turboquant.cu and turboquant_prod.cu write the bytes of reference/turboquant.py and decode to the same bits."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from gpu import turboquant
from gpu.turboquant import TurboQuant
from reference import hadamard
from tests.kernels import vector_codecs as shared
from tests.kernels.strategies import kernel_settings, often, orders

bits = st.integers(1, 8)
seeds = st.sampled_from((0, 1, 2**63 - 1))
kinds = st.sampled_from(("mse", "prod"))


def both(*args):
    return TurboQuant(*args), reference.TurboQuant(*args)


@often
@given(shared.layers(), bits, seeds, orders())
def test_mse(backend, layer, bits, seed, order):
    shared.check(backend, *both(bits, seed, "mse"), layer, order)


@often
@given(shared.layers(most_tokens=6), bits, seeds, orders())
def test_prod(backend, layer, bits, seed, order):
    shared.check(backend, *both(bits, seed, "prod"), layer, order)


@pytest.mark.parametrize("dim", shared.LARGE)
@pytest.mark.parametrize(("bits", "dtype"), [(1, "float16"), (4, "bfloat16"), (8, "float32")])
def test_large_vectors(backend, dim, bits, dtype):
    layer = shared.example(dtype, heads=3, tokens=2, dim=dim, value_dim=dim - 1)
    shared.check(backend, *both(bits, 5, "mse"), layer, dim)


@pytest.mark.parametrize("dim", [257, 1024])
def test_large_vectors_of_prod(backend, dim):
    shared.check(backend, *both(3, 5, "prod"), shared.example("float32", 1, 2, dim, 8), dim)


@kernel_settings
@given(shared.layers((1, 3, 33, 96, 130), 5, (np.dtype(np.float64),), 1), kinds, shared.refusals(), orders())
def test_numbers_that_float32_cannot_hold(backend, layer, kind, places, order):
    shared.check_refusal(backend, *both(3, 0, kind), layer, places, order)


@kernel_settings
@given(shared.layers((1, 5, 33, 64, 96), 3), bits, kinds, st.data(), orders())
def test_hostile_streams(backend, layer, bits, kind, data, order):
    shared.check_hostile(backend, *both(bits, 0, kind), layer, data, order)


@kernel_settings
@given(
    shared.layers((1, 3, 33, 64, 99), 7), bits, kinds, st.lists(st.integers(0, 99), min_size=1, max_size=3), orders()
)
def test_appended_tokens(backend, layer, bits, kind, cuts, order):
    shared.check_appender(backend, *both(bits, 0, kind), layer, cuts, order)


def test_bits_behind_the_last_code_are_refused(backend):
    shared.check_padding(backend, *both(3))


@pytest.mark.parametrize(
    ("kind", "encode", "decode"),
    [("mse", ["encode"] * 2, ["decode"] * 2), ("prod", ["residuals", "add_signs"] * 2, ["sketched", "decode"] * 2)],
)
def test_kernels_do_the_work(backend, monkeypatch, kind, encode, decode):
    codec, layer = TurboQuant(4, kind=kind), shared.example()
    with backend.running(), shared.launches(monkeypatch, turboquant) as names:
        stream = codec.encode(layer)
        assert names == encode
        names.clear()
        codec.decode(stream)
        assert names == decode


@pytest.mark.parametrize("kind", ["mse", "prod"])
def test_haar_is_the_references_own(backend, monkeypatch, kind):
    codecs, layer = both(3, 0, kind, "haar"), shared.example()
    with shared.launches(monkeypatch, turboquant) as names:
        shared.check(backend, *codecs, layer, 0) if backend.name == "simulator" else None
        assert names == []
        stream = codecs[1].encode(layer)
        with pytest.raises(ValueError, match="rotation: expected 'hadamard' for arrays on a GPU"):
            codecs[0].decode_arrays(stream, types.ModuleType("cupy"))


def test_too_many_channels(backend):
    layer = shared.example(dim=hadamard.LARGEST + 1)
    for encode in (TurboQuant().encode, TurboQuant().appender):
        with pytest.raises(ValueError, match="keys: TurboQuant takes up to 1024 channels, got 1025"):
            encode(layer)
