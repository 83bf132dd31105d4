"""kvtheory.prediction.mixture: identities, bounds where they hold and where they are attained, rate against distortion."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory import entropy
from kvtheory.prediction import mixture
from kvtheory.randomness import generator
from kvtheory.rate import reverse_waterfill


@st.composite
def mixtures(draw):
    rng = generator(draw(st.integers(0, 2**32)), "mixtures")
    size, dim = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    p = rng.dirichlet(np.full(size, draw(st.sampled_from([0.1, 1.0, 10.0]))))
    return p / p.sum(), rng.normal(size=(size, dim))


@given(mixtures())
def test_energy_by_two_routes_and_below_every_bound(case):
    p, f = case
    energy, far, h = mixture.residual_energy(p, f), mixture.diameter(f), mixture.token_entropy(p)
    # sums of products of numbers of size far^2
    room = 1e-12 * (1 + far**2)
    assert energy == pytest.approx(float(np.trace((f - p @ f).T * p @ (f - p @ f))), abs=room)
    assert mixture.pair_energy(p, f) == pytest.approx(energy, abs=room)
    assert energy <= mixture.collision_bound(p, far) + room
    assert mixture.collision_bound(p, far) <= mixture.entropy_bound(h, far) + room
    assert energy <= mixture.linear_bound(h, far) + room
    for x, v in zip(p, f):
        assert np.linalg.norm(v - p @ f) <= mixture.error_bound(x, far) + room


def test_fractions_stay_exact():
    p = np.array([Fraction(1, 3), Fraction(2, 3)], object)
    f = np.array([[Fraction(0)], [Fraction(6)]], object)
    assert mixture.residual_energy(p, f) == 8 == mixture.pair_energy(p, f) == mixture.collision_bound(p, 6)
    assert isinstance(mixture.residual_energy(p, f), Fraction)


def test_entropy_of_coins():
    assert mixture.token_entropy([0.5, 0.5]) == 1 and mixture.token_entropy([1.0, 0.0]) == 0
    assert mixture.token_entropy(np.full(8, 1 / 8)) == pytest.approx(3, abs=1e-14)


def test_crossing_of_the_two_bounds_is_at_one_bit():
    """H/2 against 1 - 2^-H: equal at 0 and 1."""
    assert mixture.linear_bound(1, 2.0) == pytest.approx(mixture.entropy_bound(1, 2.0))
    assert mixture.linear_bound(0.5, 2.0) < mixture.entropy_bound(0.5, 2.0)
    assert mixture.linear_bound(2, 2.0) > mixture.entropy_bound(2, 2.0)


def test_entropy_alone_bounds_no_energy_from_below():
    """The converse must not be claimed: 10 bits of entropy, and next to nothing left, where candidates are alike."""
    p, f = np.full(1024, 1 / 1024), np.zeros((1024, 2))
    f[0] = 1
    assert mixture.token_entropy(p) == pytest.approx(10) and mixture.residual_energy(
        p, f
    ) < 0.01 * mixture.entropy_bound(10, mixture.diameter(f))


@pytest.mark.parametrize(
    ("p", "f"),
    [([0.5, 0.6], [[1], [2]]), ([-0.5, 1.5], [[1], [2]]), ([0.5, 0.5], [[1], [2], [3]]), ([], []), ([[1.0]], [[1.0]])],
)
def test_refusals(p, f):
    with pytest.raises(ValueError, match=r"^[pf]: expected"):
        mixture.residual_energy(p, f)


class TestResidualMap:
    law = entropy.FiniteLanguage({("a", "x"): Fraction(1, 2), ("a", "y"): Fraction(1, 4), ("b", "x"): Fraction(1, 4)})

    def test_by_hand(self):
        value = {"a": 1, "b": 5, "x": 0, "y": 3}
        residual = mixture.residual_map(self.law, lambda s: (value[s[-1]],))
        assert residual(("a",)) == (1 - (Fraction(3, 4) + Fraction(5, 4)),) == (-1,)
        assert residual(("a", "y")) == (2,) and residual(("a", "x")) == (-1,) and residual(("b", "x")) == (0,)

    def test_it_has_mean_zero_after_every_past(self):
        rng = generator(0, "values")
        table = {}
        residual = mixture.residual_map(
            self.law, lambda s: table.setdefault(s, tuple(Fraction(int(x)) for x in rng.integers(0, 9, 3)))
        )
        for past in [(), ("a",), ("b",)]:
            following = self.law.next(past)
            assert [sum(p * residual((*past, v))[c] for v, p in following.items()) for c in range(3)] == [0, 0, 0]


class TestGaussianRate:
    @given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 4.0]), min_size=1, max_size=6), st.floats(0.05, 4))
    def test_inverse_of_reverse_waterfilling(self, variances, rate):
        bits = reverse_waterfill(variances, rate)
        distortion = float((np.asarray(variances) * 4.0**-bits).sum())
        assert mixture.gaussian_rate(variances, distortion) == pytest.approx(bits.sum(), rel=1e-6, abs=1e-6)

    def test_ends(self):
        assert mixture.gaussian_rate([1.0, 2.0], 3.0) == 0 == mixture.gaussian_rate([0.0], 0.0)
        assert mixture.gaussian_rate([1.0, 2.0], 0.0) == math.inf
        for wrong in (-1.0, math.nan):
            with pytest.raises(ValueError, match="distortion"):
                mixture.gaussian_rate([1.0], wrong)


class TestRateDistortion:
    @pytest.mark.parametrize("slope", [1.0, 1.5, 3.0])
    def test_fair_coin_in_closed_form(self, slope):
        rate, distortion = mixture.rate_distortion([0.5, 0.5], [[1.0], [-1.0]], slope)
        e = (1 - math.sqrt(1 - distortion)) / 2
        assert rate == pytest.approx(1 + e * math.log2(e) + (1 - e) * math.log2(1 - e), rel=1e-6)

    def test_the_tangent_has_the_slope(self):
        p, f = [0.2, 0.3, 0.5], [[0.0, 1.0], [2.0, 0.0], [-1.0, -1.0]]
        a, b = (mixture.rate_distortion(p, f, s, 3000) for s in (1.999, 2.001))
        assert (b.rate - a.rate) / (b.distortion - a.distortion) == pytest.approx(-2.0, rel=0.01)

    def test_every_point_is_a_channel_above_the_curve_of_another_slope(self):
        """R is convex: a point lies above each tangent."""
        p, f = np.full(4, 0.25), np.array(list(itertools.product((0.0, 1.0), repeat=2)))
        points = {s: mixture.rate_distortion(p, f, s, 3000) for s in (3.0, 5.0, 9.0)}
        for s, on in points.items():
            for other in points.values():
                assert other.rate >= on.rate - s * (other.distortion - on.distortion) - 1e-6

    def test_given_reproductions(self):
        rate, distortion = mixture.rate_distortion([0.5, 0.5], [[1.0], [-1.0]], 5.0, reproductions=[[0.3]])
        assert rate == 0 and distortion == pytest.approx(1.0)  # one reproduction: the mean

    def test_rank_is_below_the_vocabulary(self):
        """Two atoms in R^5: one variance, whose rate is that of the line."""
        f = np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
        energy = mixture.residual_energy([0.5, 0.5], f)
        assert mixture.rate_bound([0.5, 0.5], f, energy / 2) == pytest.approx(0.5)
        assert mixture.rate_bound([0.5, 0.5], f, energy / 1e9) == pytest.approx(1.0)
