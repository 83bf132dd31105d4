"""Paired bootstrap of geometric means of ratios of sums: what it estimates, that it is paired, and how often it covers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvtheory.statistics import bootstrap_ratios, expanded_percentiles

LEVEL = 0.95


def draw(rng, points, units, segments, spread=0.3, noise=0.3):
    """Segments of common difficulty; point p has expected ratio 2^-p."""
    under = np.exp(0.3 * rng.standard_normal((units, segments)))
    hard = np.exp(spread * rng.standard_normal(segments))
    own = np.exp(noise * rng.standard_normal((points, units, segments)))
    return 2.0 ** -np.arange(points)[:, None, None] * under * hard * own, under


@given(
    arrays(np.float64, (2, 3, 4), elements=st.floats(1e-3, 1e3)),
    arrays(np.float64, (3, 4), elements=st.floats(1e-3, 1e3)),
)
def test_estimate_is_the_geometric_mean_of_ratios_of_sums(over, under):
    found = bootstrap_ratios(over, under, LEVEL, draws=50)
    for p in range(2):
        ratios = [sum(over[p, u]) / sum(under[u]) for u in range(3)]
        assert math.isclose(math.exp(found.log_estimates[p]), math.prod(ratios) ** (1 / 3), rel_tol=1e-12)
    # the mean of the segments' own ratios is another number in general
    assert found.log_replicates.shape == (2, 50)


def test_one_draw_takes_the_same_segments_for_all_points_and_units():
    rng = np.random.default_rng(0)
    over, under = draw(rng, 1, 3, 8)
    # twice the error on every segment: the contrast has no width, though each interval has
    found = bootstrap_ratios(np.concatenate([over, 2 * over]), under, LEVEL)
    contrast = found.contrast(1, 0)
    assert contrast.high / contrast.low < 1 + 1e-12 and math.isclose(contrast.estimate, 2, rel_tol=1e-12)
    assert found.interval(0).high / found.interval(0).low > 1.1
    # a unit and its inverse: their logarithms cancel in each draw exactly if both took the same segments
    mirrored = bootstrap_ratios(np.stack([np.concatenate([over[0], under])]), np.concatenate([under, over[0]]), LEVEL)
    assert np.abs(mirrored.log_replicates).max() < 1e-12


def test_same_seed_same_interval_and_scale_goes_through():
    rng = np.random.default_rng(1)
    over, under = draw(rng, 2, 2, 8)
    a, b, c = (bootstrap_ratios(over, under, LEVEL, seed=s) for s in (5, 5, 6))
    assert a.interval(0) == b.interval(0) != c.interval(0)
    scaled = bootstrap_ratios(3 * over, under, LEVEL, seed=5).interval(0)
    assert np.allclose(scaled[:3], np.array(a.interval(0)[:3]) * 3, rtol=1e-12)


def test_an_error_of_zero_is_a_geometric_mean_of_zero():
    over, under = draw(np.random.default_rng(2), 2, 2, 8)
    over[0, 1] = 0
    found = bootstrap_ratios(over, under, LEVEL)
    assert found.interval(0)[:3] == (0.0, 0.0, 0.0) and found.interval(1).low > 0
    with pytest.raises(ValueError, match="ratios are above 0"):
        found.contrast(1, 0)
    # 0 on some segments only: draws of these alone are 0, and in order
    over[0, 1] = [1, 0, 0, 0, 0, 0, 0, 0]
    assert bootstrap_ratios(over, under, LEVEL).interval(0).low == 0.0


@pytest.mark.parametrize(("segments", "spread"), [(8, 0.3), (16, 0.3)])
def test_it_covers_and_the_plain_percentiles_cover_less(segments, spread):
    """600 experiments: at .95 the binomial sd is .009. The paired contrast keeps its level; a single mean of skewed segments loses some."""
    rng = np.random.default_rng(3)
    truth = math.exp((spread**2 + 0.3**2) / 2)
    single = paired = plain = 0
    for i in range(600):
        found = bootstrap_ratios(*draw(rng, 2, 3, segments, spread), LEVEL, seed=i, draws=1000)
        low, high = found.interval(0)[1:3]
        single += low <= truth <= high
        low, high = np.exp(np.quantile(found.log_replicates[0], [0.025, 0.975]))
        plain += low <= truth <= high
        low, high = found.contrast(0, 1)[1:3]
        paired += low <= 2 <= high
    assert 0.92 <= paired / 600 <= 0.98
    assert plain < single and single / 600 >= 0.89


def test_expanded_percentiles_give_students_t_for_normal_replicates():
    """For the replicates of a mean, normal with variance s^2 (n-1)/n^2, they are mean +- t_{n-1} s / sqrt(n)."""
    from scipy.special import ndtri, stdtrit

    n = 8
    u = (np.arange(200_000) + 0.5) / 200_000
    low, high = expanded_percentiles(ndtri(u) * np.sqrt((n - 1) / n**2), n, LEVEL)
    expected = stdtrit(n - 1, 0.975) / np.sqrt(n)
    assert math.isclose(high, expected, rel_tol=2e-3) and math.isclose(low, -expected, rel_tol=2e-3)


@pytest.mark.parametrize(
    ("over", "under", "said"),
    [
        (np.ones((2, 3)), np.ones(3), r"numerators: expected shape \(points, units, segments\)"),
        (np.ones((1, 1, 1)), np.ones((1, 1)), "at least 2 segments"),
        (-np.ones((1, 1, 2)), np.ones((1, 2)), "numerators: expected finite numbers >= 0"),
        (np.full((1, 1, 2), np.nan), np.ones((1, 2)), "numerators: expected finite"),
        (np.ones((1, 1, 2)), np.zeros((1, 2)), "denominators: expected finite numbers above 0"),
        (np.ones((1, 2, 2)), np.ones((3, 2)), "denominators: expected a shape that broadcasts"),
    ],
)
def test_bad_input_is_refused(over, under, said):
    with pytest.raises(ValueError, match=said):
        bootstrap_ratios(over, under, LEVEL)
    with pytest.raises(ValueError, match="level"):
        bootstrap_ratios(np.ones((1, 1, 2)), np.ones((1, 2)), 1.0)
