"""Entropy-coded uniform quantisers: closed forms at the ends, invariances, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory.quantization import Gaussian, Laplace, SphereCoordinate
from kvtheory.rate import entropy_coded, entropy_coded_bits


@given(
    step=st.floats(0.05, 4), sigma=st.floats(1e-3, 1e3), mean=st.floats(-5, 5), offset=st.sampled_from([0.0, 0.25, 0.5])
)
def test_scale_and_shift(step, sigma, mean, offset):
    """The cells go with the law's centre: bits stay, errors scale."""
    bits, error = entropy_coded(Gaussian(), step, offset)
    moved = entropy_coded(Gaussian(mean * sigma, sigma), step * sigma, offset)
    assert moved == pytest.approx((bits, error * sigma**2), rel=1e-9, abs=1e-12)


def test_one_cell_and_two():
    bits, error = entropy_coded(Gaussian(), 200.0)
    assert (bits, error) == pytest.approx((0.0, 1.0))
    assert entropy_coded(Gaussian(), 200.0, 0.5) == pytest.approx(
        (1.0, 1 - 2 / np.pi)
    )  # the two-point Lloyd-Max quantiser
    assert entropy_coded(Laplace(), 2000.0, 0.5) == pytest.approx((1.0, 1.0))  # variance 2, E|x|^2 = 1


def test_a_uniform_law_in_whole_cells():
    # 5 cells of .4 cut [-1, 1] evenly: log2 5 bits, .4^2/12
    assert entropy_coded(SphereCoordinate(3), 0.4) == pytest.approx((np.log2(5), 0.4**2 / 12))


@pytest.mark.parametrize(
    "law, entropy", [(Gaussian(), 0.5 * np.log2(2 * np.pi * np.e)), (Laplace(), np.log2(2 * np.e))]
)
def test_small_steps(law, entropy):
    bits, error = entropy_coded(law, 0.01)
    assert bits == pytest.approx(entropy - np.log2(0.01), abs=1e-4) and error == pytest.approx(0.01**2 / 12, rel=1e-4)


@given(error=st.floats(1e-4, 0.9))
def test_bits_at_an_error(error):
    bits = entropy_coded_bits(Gaussian(), error)
    assert 0 < bits - 0.5 * np.log2(1 / error) <= 0.5 * np.log2(np.pi * np.e / 6) + 1e-9


def test_refusals():
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="step"):
            entropy_coded(Gaussian(), bad)
    with pytest.raises(ValueError, match="step: expected at most 4194304 cells"):
        entropy_coded(Gaussian(), 1e-6)
    with pytest.raises(ValueError, match="less than the law's variance"):
        entropy_coded_bits(Gaussian(), 1.5)
