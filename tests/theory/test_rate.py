"""kvtheory.rate: water-filling against the KKT conditions, integer allocation against enumeration, Lloyd-Max against closed forms."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvtheory import rate
from kvtheory.quantization import Gaussian, Laplace, SphereCoordinate
from kvtheory.rate import (
    Quantizer,
    cell_integrals,
    density_of,
    greedy_bits,
    integer_bits,
    lloyd_max,
    reverse_waterfill,
    water_level,
)

variances = hnp.arrays(np.float64, st.integers(1, 12), elements=st.one_of(st.just(0.0), st.floats(1e-12, 1e12)))


class TestReverseWaterfill:
    @given(variances, st.floats(0.0, 12.0))
    def test_kkt(self, s, mean_rate):
        bits = reverse_waterfill(s, mean_rate)
        assert (bits >= 0).all() and (bits[s == 0] == 0).all()
        if not (s > 0).any():
            assert (bits == 0).all()
            return
        assert bits.mean() == pytest.approx(mean_rate, abs=1e-10)
        # stationarity: s_c 4^{-b_c} is one level theta where bits are spent, and at most theta where none are
        theta = water_level(s, mean_rate)
        left = s * 4.0**-bits
        assert left[bits > 0] == pytest.approx(theta, rel=1e-9)
        assert (left[bits == 0] <= theta * (1 + 1e-9)).all()
        assert left.sum() == pytest.approx(np.minimum(s, theta).sum(), rel=1e-9)

    @given(variances, st.floats(0.1, 6.0), st.integers(0, 2**32 - 1))
    def test_no_exchange_of_bits_helps(self, s, mean_rate, seed):
        assume((s > 0).sum() >= 2)
        bits = reverse_waterfill(s, mean_rate)
        rng = np.random.default_rng(seed)
        for _ in range(20):
            give, take = rng.choice(s.size, 2, replace=False)
            moved = bits.copy()
            step = rng.uniform(0, bits[give])
            moved[give] -= step
            moved[take] += step
            assert (s * 4.0**-moved).sum() >= (s * 4.0**-bits).sum() * (1 - 1e-12)

    def test_known(self):
        # all above the water: half a log ratio to the geometric mean; one below it gets nothing
        assert reverse_waterfill([16.0, 1.0], 2.0) == pytest.approx([3.0, 1.0])
        assert reverse_waterfill([16.0, 1.0, 1e-9], 2.0 / 3) == pytest.approx([2.0, 0.0, 0.0])
        assert reverse_waterfill([5.0], 3.0) == pytest.approx([3.0])
        assert reverse_waterfill([0.0, 0.0], 3.0).tolist() == [0.0, 0.0]
        assert reverse_waterfill([0.0, 7.0], 1.5) == pytest.approx([0.0, 3.0])
        assert reverse_waterfill([1e300, 1e-300], 0.0).tolist() == [0.0, 0.0]
        assert water_level([2.0, 1.0], 0.0) == 2.0 and water_level([0.0], 1.0) == 0.0

    def test_extreme_spread(self):
        bits = reverse_waterfill([1e300, 5e-324], 1.0)
        assert bits == pytest.approx([2.0, 0.0])

    @given(variances, st.floats(0.1, 6.0), st.floats(1e-3, 1e3))
    def test_scale_and_order_do_not_matter(self, s, mean_rate, scale):
        bits = reverse_waterfill(s, mean_rate)
        assert reverse_waterfill(s * scale, mean_rate) == pytest.approx(bits, abs=1e-9)
        assert reverse_waterfill(s[::-1], mean_rate) == pytest.approx(bits[::-1], abs=1e-12)

    @pytest.mark.parametrize(
        "s, r, message",
        [
            ([1.0, np.nan], 1, "variances.*component 1"), ([1.0, -2.0], 1, "variances.*component 1"), ([], 1, "variances"),
            ([[1.0]], 1, "variances.*shape"), ([1.0], -1, "rate"), ([1.0], np.inf, "rate"),
        ],
    )  # fmt: skip
    def test_refusals(self, s, r, message):
        with pytest.raises(ValueError, match=message):
            reverse_waterfill(s, r)


def enumerate_best(tables, budget):
    choices = itertools.product(range(tables.shape[1]), repeat=tables.shape[0])
    return min(sum(tables[c, b] for c, b in enumerate(bits)) for bits in choices if sum(bits) == budget)


def cost(tables, bits):
    return tables[np.arange(len(bits)), bits].sum()


small_tables = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.floats(0, 100, allow_nan=False, width=32)
)


class TestIntegerBits:
    @given(small_tables, st.data())
    def test_equals_enumeration_convex_or_not(self, tables, data):
        budget = data.draw(st.integers(0, tables.shape[0] * (tables.shape[1] - 1)))
        bits = integer_bits(tables, budget)
        assert bits.dtype == np.int64 and bits.sum() == budget and (bits >= 0).all() and (bits < tables.shape[1]).all()
        assert cost(tables, bits) == pytest.approx(enumerate_best(tables, budget), rel=1e-12, abs=1e-12)

    @given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 2**32 - 1), st.data())
    def test_greedy_is_optimal_for_convex_tables(self, components, levels, seed, data):
        rng = np.random.default_rng(seed)
        gains = np.sort(rng.exponential(size=(components, levels - 1)), axis=1)[:, ::-1]
        tables = np.concatenate(
            [gains.sum(axis=1, keepdims=True), gains.sum(axis=1, keepdims=True) - np.cumsum(gains, axis=1)], axis=1
        )
        budget = data.draw(st.integers(0, components * (levels - 1)))
        assert cost(tables, greedy_bits(tables, budget)) == pytest.approx(
            cost(tables, integer_bits(tables, budget)), abs=1e-12
        )

    def test_greedy_fails_where_tables_are_not_convex(self):
        # theory.md B4: the tables on which neither greedy nor the convex hull is right
        tables = np.array([[1, 0.95, 0.2, 0.05], [1, 0.93, 0.2, 0.05]])
        assert cost(tables, integer_bits(tables, 1)) == pytest.approx(1.93)
        assert cost(tables, integer_bits(tables, 4)) == pytest.approx(0.40)
        assert cost(tables, greedy_bits(tables, 4)) == pytest.approx(1.00)

    def test_levels_not_to_be_had(self):
        tables = np.array([[1.0, np.inf, 0.1], [1.0, np.inf, 0.3]])
        assert integer_bits(tables, 2).tolist() == [2, 0]
        with pytest.raises(ValueError, match="no allocation"):
            integer_bits(tables, 3)
        with pytest.raises(ValueError, match="tables"):
            greedy_bits(tables, 2)

    def test_follows_waterfilling_at_high_rate(self):
        s = 4.0 ** np.array([0, 1, 2, 5])
        tables = s[:, None] * 4.0 ** -np.arange(12)
        assert integer_bits(tables, 16).tolist() == reverse_waterfill(s, 4.0).tolist() == [2, 3, 4, 7]

    def test_large(self):
        rng = np.random.default_rng(0)
        tables = rng.exponential(size=(512, 1)) * 4.0 ** -np.arange(9.0)
        bits = integer_bits(tables, 1024)
        assert bits.sum() == 1024
        assert cost(tables, bits) == pytest.approx(cost(tables, greedy_bits(tables, 1024)))

    @pytest.mark.parametrize("budget", [-1, 7])
    def test_infeasible(self, budget):
        with pytest.raises(ValueError, match="budget"):
            integer_bits(np.zeros((2, 4)), budget)

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"tables.*nan"):
            integer_bits([[1.0, np.nan]], 1)
        with pytest.raises(ValueError, match=r"tables.*shape"):
            integer_bits([1.0, 0.5], 1)
        with pytest.raises(TypeError, match="budget"):
            integer_bits([[1.0, 0.5]], 0.5)
        with pytest.raises(ValueError, match="tables"):
            integer_bits(np.zeros((0, 3)), 0)


class TestLloydMax:
    def test_gaussian_closed_forms(self):
        q = lloyd_max(Gaussian(), 2)
        assert q.points == pytest.approx(np.array([-1, 1]) * np.sqrt(2 / np.pi), rel=1e-14)
        assert q.distortion(Gaussian()) == pytest.approx(1 - 2 / np.pi, rel=1e-13)
        assert lloyd_max(Gaussian(3.0, 2.0), 1).points.tolist() == [3.0]
        # Max (1960) and the paper: +-.453, +-1.51
        assert lloyd_max(Gaussian(), 4).points == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)

    def test_laplace_closed_form(self):
        # two points at +-scale; D = 2 - 1
        q = lloyd_max(Laplace(), 2)
        assert q.points == pytest.approx([-1, 1], rel=1e-14)
        assert q.distortion(Laplace()) == pytest.approx(1.0, rel=1e-13)

    @pytest.mark.parametrize("size", [1, 2, 5, 16])
    def test_uniform(self, size):
        law = SphereCoordinate(3)
        q = lloyd_max(law, size)
        assert q.points == pytest.approx((2 * np.arange(size) + 1) / size - 1, abs=1e-15)
        assert q.distortion(law) == pytest.approx(1 / (3 * size**2), rel=1e-13)
        by_newton = lloyd_max(callable_density(lambda x: np.full(x.shape, 0.5), (-1.0, 1.0)), size)
        assert by_newton.points == pytest.approx(q.points, abs=1e-13)

    @given(st.sampled_from([Gaussian, Laplace]), st.integers(1, 24), st.floats(-5, 5), st.floats(0.01, 100))
    def test_shift_and_scale(self, family, size, shift, scale):
        q, moved = lloyd_max(family(), size), lloyd_max(family(shift, scale), size)
        assert moved.points == pytest.approx(shift + scale * q.points, abs=1e-11 * (scale + abs(shift)))
        assert moved.distortion(family(shift, scale)) == pytest.approx(scale**2 * q.distortion(family()), rel=1e-10)

    @given(st.sampled_from([Gaussian(), Laplace(), SphereCoordinate(4), SphereCoordinate(64)]), st.integers(1, 40))
    def test_certificate_symmetry_and_order(self, law, size):
        q = lloyd_max(law, size)
        c = q.certificate(law)
        assert c.centroid < 1e-13 and c.neighbour == 0.0
        assert (q.points == -q.points[::-1]).all()
        assert (np.diff(q.points) > 0).all()

    @pytest.mark.parametrize("law", [Gaussian(), Laplace(), SphereCoordinate(2), SphereCoordinate(128)])
    def test_distortion_falls_with_size(self, law):
        d = [lloyd_max(law, n).distortion(law) for n in range(1, 20)]
        assert (np.diff(d) < 0).all()

    @given(st.sampled_from([Gaussian(), Laplace(), SphereCoordinate(16)]), st.integers(2, 9), st.integers(0, 2**32 - 1))
    def test_no_other_quantiser_is_better(self, law, size, seed):
        rng = np.random.default_rng(seed)
        q = lloyd_max(law, size)
        spread = np.sqrt(lloyd_max(law, 1).distortion(law))
        other = Quantizer.nearest(q.points + spread * rng.standard_normal(size) * 10.0 ** rng.uniform(-4, 0))
        assert other.distortion(law) >= q.distortion(law) * (1 - 1e-12)

    def test_best_uniform_quantiser(self):
        # theory.md B5: the best uniform (mid-rise) quantisers of the normal law, against Lloyd-Max .3634/.1175/.0345/.0095
        def best_step(bits):
            codes = np.arange(2**bits) - (2**bits - 1) / 2
            return min(Quantizer.nearest(step * codes).distortion(Gaussian()) for step in np.geomspace(0.1, 2, 1500))

        assert [round(best_step(b), 4) for b in (1, 2, 3, 4)] == [0.3634, 0.1188, 0.0374, 0.0115]

    def test_arcsine_is_no_trap(self):
        # d = 2, where the density is not log-concave: +-2/pi, D = 1/2 - 4/pi^2
        law = SphereCoordinate(2)
        q = lloyd_max(law, 2)
        assert q.points == pytest.approx([-2 / np.pi, 2 / np.pi], rel=1e-13)
        assert q.distortion(law) == pytest.approx(0.5 - 4 / np.pi**2, rel=1e-12)

    def test_stationary_is_not_optimal_without_log_concavity(self):
        # a narrow and a broad bump. Two points on the narrow one are stationary, and three times as bad as two on the broad one.
        def f(x):
            return (0.5 * np.exp(-((x - 3) ** 2) / 2) + 5 * np.exp(-((x + 3) ** 2) * 50)) / np.sqrt(2 * np.pi)

        law = density_of(callable_density(f, (-np.inf, np.inf)))
        best = lloyd_max(law, 3)
        assert (best.points > 0).sum() == 2 and best.certificate(law).centroid < 1e-11
        points = np.array([-3.08, -2.92, 3.0])
        for _ in range(300):
            t = 0.5 * (points[:-1] + points[1:])
            mass, first, _ = cell_integrals(law, np.concatenate([[-np.inf], t, [np.inf]]), points)
            points = points + first / mass
        trapped = Quantizer.nearest(points)
        assert trapped.certificate(law).centroid < 1e-11
        assert trapped.distortion(law) > 1.5 * best.distortion(law)

    def test_exponential_by_callable(self):
        # one-sided, infinite support: c_1 = 1 - s e^{-s}/(1 - e^{-s}), c_2 = s + 1, s = (c_1 + c_2)/2
        law = callable_density(lambda x: np.exp(-x), (0.0, np.inf))
        q = lloyd_max(law, 2)
        s = q.thresholds[0]
        assert q.points == pytest.approx([1 - s / np.expm1(s), s + 1], rel=1e-12)

    @given(hnp.arrays(np.float64, st.integers(1, 9), elements=st.integers(-6, 6).map(float)), st.integers(1, 5))
    def test_samples_against_enumeration(self, samples, size):
        q = lloyd_max(samples, size)
        assert q.size == size
        x = np.sort(samples)
        cuts = itertools.combinations_with_replacement(range(x.size + 1), size - 1)
        best = min(
            sum(((part - part.mean()) ** 2).sum() for part in np.split(x, list(cut)) if part.size) / x.size
            for cut in cuts
        )
        assert q.distortion(samples) == pytest.approx(best, abs=1e-12)

    @given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
    def test_weights_are_multiplicities(self, n, size, seed):
        rng = np.random.default_rng(seed)
        x, times = rng.standard_normal(n), rng.integers(1, 4, n)
        weighted, repeated = lloyd_max(x, size, weights=times), lloyd_max(np.repeat(x, times), size)
        assert weighted.points == pytest.approx(repeated.points, abs=1e-12)
        assert weighted.distortion(x, times) == pytest.approx(repeated.distortion(np.repeat(x, times)), abs=1e-13)

    def test_many_samples(self):
        rng = np.random.default_rng(1)
        x = rng.standard_normal(30_000)
        q = lloyd_max(x, 8)
        c = q.certificate(x)
        assert c.centroid < 1e-12 and c.neighbour == 0.0
        assert q.distortion(x) <= lloyd_max(Gaussian(), 8).distortion(x)
        assert q.distortion(x) == pytest.approx(0.03454776, rel=0.03)

    def test_fewer_values_than_points(self):
        q = lloyd_max([2.0, 5.0, 2.0], 4)
        assert q.points.tolist() == [2.0, 5.0, 5.0, 5.0]
        assert q.distortion([2.0, 5.0, 2.0]) == 0.0
        one = lloyd_max(SphereCoordinate(1), 2)
        assert one.points.tolist() == [-1.0, 1.0] and one.distortion(SphereCoordinate(1)) == 0.0
        assert lloyd_max(SphereCoordinate(1), 1).distortion(SphereCoordinate(1)) == 1.0

    @pytest.mark.parametrize(
        "source, size, error, message",
        [
            (Gaussian(), 0, ValueError, "size"), (Gaussian(), 2.0, TypeError, "size"), (Gaussian(), True, TypeError, "size"),
            ([], 2, ValueError, "source"), ([1.0, np.nan], 2, ValueError, "source.*sample 1"), ([[1.0]], 1, ValueError, "source.*shape"),
            ("gauss", 2, TypeError, "source"), (np.exp, 2, TypeError, "support"),
        ],
    )  # fmt: skip
    def test_refusals(self, source, size, error, message):
        with pytest.raises(error, match=message):
            lloyd_max(source, size)

    def test_callables_that_are_no_density(self):
        with pytest.raises(ValueError, match="mass 1"):
            lloyd_max(callable_density(lambda x: np.ones(x.shape), (-1.0, 1.0)), 2)
        with pytest.raises(ValueError, match="negative"):
            lloyd_max(callable_density(lambda x: x, (-1.0, 1.0)), 2)
        with pytest.raises(ValueError, match="low < high"):
            lloyd_max(callable_density(lambda x: x, (1.0, 1.0)), 2)
        with pytest.raises(TypeError, match="weights"):
            lloyd_max(Gaussian(), 2, weights=[1.0])


def callable_density(function, support):
    def f(x):
        return function(x)

    f.support = support
    return f


class TestQuantizer:
    @given(
        hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(-10, 10)),
        hnp.arrays(np.float64, (3, 7), elements=st.floats(-20, 20)),
    )
    def test_nearest_encodes_to_a_nearest_point(self, points, x):
        q = Quantizer.nearest(points)
        codes = q.encode(x)
        assert codes.shape == x.shape and codes.dtype == np.int64
        error = np.abs(x - q.decode(codes))
        assert error == pytest.approx(np.abs(x[..., None] - points).min(axis=-1), abs=1e-12)

    def test_cells_are_closed_below(self):
        q = Quantizer([0.0, 1.0, 2.0], [0.5, 1.5])
        assert q.encode([0.4, 0.5, 1.5, -9, 9]).tolist() == [0, 1, 2, 0, 2]

    def test_distortion_of_any_thresholds(self):
        # thresholds need not be midpoints: uniform on [-1, 1], all to the first point: E (x + 1)^2 = 4/3
        q = Quantizer([-1.0, 1.0], [1.0])
        assert q.distortion(SphereCoordinate(3)) == pytest.approx(4 / 3, rel=1e-13)
        assert q.certificate(SphereCoordinate(3)).neighbour == 1.0

    def test_integral_agrees_with_samples(self):
        x = np.random.default_rng(0).laplace(size=200_000)
        q = Quantizer.nearest([-2.0, 0.3, 1.0])
        assert q.distortion(Laplace()) == pytest.approx(q.distortion(x), rel=0.02)

    def test_frozen(self):
        q = Quantizer.nearest([0.0, 1.0])
        with pytest.raises(ValueError):
            q.points[0] = 5.0
        with pytest.raises(AttributeError):
            q.points = np.zeros(2)  # type: ignore[misc]

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"points.*ascending"):
            Quantizer([1.0, 0.0], [0.5])
        with pytest.raises(ValueError, match=r"thresholds.*shape"):
            Quantizer([0.0, 1.0], [0.5, 0.6])
        with pytest.raises(ValueError, match="points"):
            Quantizer([], [])
        q = Quantizer.nearest([0.0, 1.0])
        with pytest.raises(ValueError, match="codes"):
            q.decode([2])
        with pytest.raises(ValueError, match="codes"):
            q.decode([-1])
        with pytest.raises(TypeError, match="codes"):
            q.decode([0.5])
        with pytest.raises(ValueError, match="x: expected finite"):
            q.encode([np.nan])


def test_no_scipy_stats_at_import():
    import subprocess
    import sys

    code = "import kvtheory.rate, kvtheory.quantization, sys; assert 'scipy.stats' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names():
    for name in rate.__all__:
        assert hasattr(rate, name)
