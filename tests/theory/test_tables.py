"""kvtheory.rate's tables and uniform quantisers: against closed forms, known optima, and measured on samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from kvtheory import rate
from kvtheory.quantization import Gaussian, Laplace
from kvtheory.randomness import generator
from kvtheory.rate import Quantizer, best_reach, gaussian_table, law_table, measured_table, uniform, uniform_table
from kvtheory.rate.uniform import KINDS


class TestUniform:
    def test_points(self):
        assert uniform(1, 2.0, "clamp").points.tolist() == [-2, 0]
        assert uniform(2, 2.0, "clamp").points.tolist() == [-2, -1, 0, 1]
        assert uniform(2, 2.0, "midrise").points.tolist() == [-1.5, -0.5, 0.5, 1.5]
        assert uniform(2, 3.0, "midtread").points.tolist() == [-2, 0, 2]
        assert uniform(1, 3.0, "midtread").points.tolist() == [0]
        assert all(uniform(0, 3.0, kind).points.tolist() == [0] for kind in KINDS)

    @given(st.integers(1, 8), st.floats(0.1, 10), st.integers(0, 2**32))
    def test_the_official_arithmetic(self, bits, reach, seed):
        """step = 2 alpha / 2^b, q = clamp(round(z / step), -2^{b-1}, 2^{b-1} - 1), z_hat = step q; and the arithmetic right shift, floor."""
        z = 2 * reach * generator(seed, "coefficients").standard_normal(200)
        step = 2 * reach / 2**bits
        for kind, integer in (("clamp", np.round), ("floor", np.floor)):
            expected = step * np.clip(integer(z / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            code = uniform(bits, reach, kind)
            np.testing.assert_allclose(code.decode(code.encode(z)), expected, rtol=1e-12, atol=1e-12)

    @given(st.integers(1, 8), st.sampled_from(["midrise", "midtread"]), st.floats(0.1, 10))
    def test_symmetric_and_within_reach_off_by_half_a_step(self, bits, kind, reach):
        code = uniform(bits, reach, kind)
        np.testing.assert_allclose(code.points, -code.points[::-1], rtol=1e-12, atol=1e-12)
        x = np.linspace(-reach, reach, 999)
        half = reach / (2**bits - (kind == "midtread"))
        assert np.abs(x - code.decode(code.encode(x))).max() <= half * (1 + 1e-9)
        assert code.size == 2**bits - (kind == "midtread")

    def test_floor_is_four_times_as_bad(self):
        """Fine steps, all values within reach: step^2/3 against step^2/12."""
        law = Gaussian()
        clamp, floor = (uniform(12, 16.0, kind).distortion(law) for kind in ("clamp", "floor"))
        step = 32 / 2**12
        assert clamp == pytest.approx(step**2 / 12, rel=1e-6) and floor == pytest.approx(step**2 / 3, rel=1e-6)

    def test_refusals(self):
        with pytest.raises(ValueError, match="kind: expected one of midrise, midtread, clamp, floor, got 'odd'"):
            uniform(2, 1.0, "odd")
        with pytest.raises(ValueError, match="reach: expected"):
            uniform(2, 0.0)
        with pytest.raises(ValueError, match="bits: expected 0 to 24"):
            uniform(-1, 1.0)
        with pytest.raises(TypeError, match="bits: expected an int"):
            uniform(2.0, 1.0)
        with pytest.raises(ValueError, match="bits: expected at least 1"):
            best_reach(0)
        with pytest.raises(ValueError, match="source's root mean square"):
            best_reach(2, source=np.zeros(4))


class TestBestReach:
    # Max 1960, table II: the best uniform quantiser of N(0, 1) with 2, 4, 8, 16 points has steps 1.596, .9957, .5860, .3352
    @pytest.mark.parametrize(("bits", "step"), [(1, 1.596), (2, 0.9957), (3, 0.5860), (4, 0.3352)])
    def test_max_1960(self, bits, step):
        assert best_reach(bits) * 2 / 2**bits == pytest.approx(
            step, abs=5.1e-4 if bits == 1 else 5.1e-5
        )  # in the digits printed

    @given(st.integers(1, 5), st.sampled_from(["midrise", "clamp"]), st.floats(0.3, 3))
    def test_no_other_reach_is_better(self, bits, kind, factor):
        law = Gaussian()
        reach = best_reach(bits, kind)
        least = uniform(bits, reach, kind).distortion(law)
        assert uniform(bits, factor * reach, kind).distortion(law) >= least * (1 - 1e-12)

    def test_it_scales_with_the_source(self):
        assert best_reach(3, source=Gaussian(0, 5.0)) == pytest.approx(5 * best_reach(3), rel=1e-6)
        x = generator(0, "samples").standard_normal(20_000)
        assert best_reach(3, source=x) == pytest.approx(best_reach(3), rel=0.05)


class TestGaussianTable:
    def test_lloyd_max(self):
        table = gaussian_table(9)
        assert table[:5] == pytest.approx([1, 0.3634, 0.1175, 0.0345, 0.0095], abs=6e-5)
        assert table[1] == pytest.approx(1 - 2 / np.pi, rel=1e-13)
        assert (np.diff(table) < 0).all() and (np.diff(table, 2) > 0).all()
        # Panter-Dite: sqrt(3) pi / 2 times 4^{-b}, from below
        ratio = table * 4.0 ** np.arange(9)
        assert (np.diff(ratio) > 0).all() and 0.98 * np.sqrt(3) * np.pi / 2 < ratio[-1] < np.sqrt(3) * np.pi / 2

    def test_best_uniform(self):
        assert uniform_table(5)[1:] == pytest.approx([0.3634, 0.1188, 0.0374, 0.0115], abs=6e-5)
        assert (uniform_table(5) >= gaussian_table(5) * (1 - 1e-12)).all()

    # theory B5, re-measured here
    @pytest.mark.parametrize(("reach", "one", "two"), [(2.58, 0.760, 0.166), (3.3, 0.864, 0.234), (4.0, 0.932, 0.332)])
    def test_the_official_clamp(self, reach, one, two):
        table = uniform_table(3, "clamp", reach)
        assert table == pytest.approx([1, one, two], abs=6e-4)

        # and by an integral of its own, cell by cell
        def loss(x, point):
            return (x - point) ** 2 * stats.norm.pdf(x)

        points = np.array([-reach, -reach / 2, 0, reach / 2])
        edges = np.concatenate([[-np.inf], (points[1:] + points[:-1]) / 2, [np.inf]])
        cells = zip(edges[:-1], edges[1:], points)
        assert table[2] == pytest.approx(sum(integrate.quad(loss, a, b, (c,))[0] for a, b, c in cells), rel=1e-8)

    def test_what_the_model_hides(self):
        """The official clamp at 1 bit, its reach three sigma or so, leaves 3 to 4 times what 4^{-b} says; so it does at 2 bits."""
        for reach in (2.58, 3.3, 4.0):
            ratio = uniform_table(3, "clamp", reach)[1:] * 4.0 ** np.arange(1, 3)
            assert (ratio > 2.6).all() and (ratio < 5.4).all()
        # even at its best reach it is no match for mid-rise
        assert uniform_table(3, "clamp")[1:] == pytest.approx([0.5951, 0.1494], abs=6e-5)

    def test_one_bit_steps_are_never_chosen_where_the_table_is_not_convex(self):
        """reach 3.3: the second bit gains more than the first, so the optimum gives no component one bit, at any even budget."""
        table = uniform_table(9, "clamp", 3.3)
        assert table[0] - table[1] < table[1] - table[2]
        variances = np.geomspace(1, 1e-3, 32)
        for budget in (16, 40, 64, 80):
            bits = rate.integer_bits(variances[:, None] * table, budget)
            assert (bits == 1).sum() == 0 and (bits == 0).any()

    def test_reaches_and_refusals(self):
        assert uniform_table(3, reach=[1.0, 2.0, 3.0])[2] == uniform(2, 3.0).distortion(Gaussian())
        assert uniform_table(1).tolist() == [1.0]
        with pytest.raises(ValueError, match="reach: expected shape"):
            uniform_table(3, reach=[1.0, 2.0])
        with pytest.raises(ValueError, match="levels: expected 1 to 17"):
            gaussian_table(0)
        with pytest.raises(TypeError, match="levels: expected an int"):
            uniform_table(2.0)


class TestMeasuredTable:
    @given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
    def test_definition(self, n, components, levels, seed):
        rng = generator(seed, "measured")
        x, scale = rng.standard_normal((n, components)), rng.uniform(0.1, 10, components)
        codes = [Quantizer.nearest(rng.standard_normal(2**b)) for b in range(levels)]
        got = measured_table(x, codes, scale)
        assert got.shape == (components, levels) and got.dtype == np.float64
        for c, b in np.ndindex(got.shape):
            nearest = codes[b].points[np.abs(x[:, c, None] / scale[c] - codes[b].points).argmin(axis=1)]
            assert got[c, b] == pytest.approx(((x[:, c] - scale[c] * nearest) ** 2).mean(), rel=1e-9, abs=1e-12)
        # functions do as well as quantisers, and without a scale it is 1
        functions = [lambda y, code=code: code.decode(code.encode(y)) for code in codes]
        np.testing.assert_allclose(measured_table(x, functions, scale), got, rtol=1e-14)
        np.testing.assert_array_equal(measured_table(x, codes), measured_table(x, codes, 1.0))

    @pytest.mark.parametrize(("law", "sigma"), [(Gaussian(0, 2.5), 2.5), (Laplace(0, 3.0), 3 * np.sqrt(2))])
    def test_samples_agree_with_the_integrals(self, law, sigma):
        """Quantisers of N(0, 1) on components of other laws and scales: within 5 standard errors of the exact integral."""
        rng = generator(1, type(law).__name__)
        x = 2.5 * rng.standard_normal((40_000, 2)) if sigma == 2.5 else rng.laplace(0, 3.0, (40_000, 2))
        codes = [rate.lloyd_max(Gaussian(), 2**b) for b in range(4)] + [uniform(2, 3.3, "clamp")]
        got = measured_table(x, codes, sigma)
        exact = sigma**2 * law_table(type(law)(0, law_scale(law) / sigma), codes)
        for b, code in enumerate(codes):
            squares = (x - sigma * code.decode(code.encode(x / sigma))) ** 2
            margin = 5 * squares.std(axis=0) / np.sqrt(len(x))
            assert (np.abs(got[:, b] - exact[b]) < margin).all()
            assert (margin < 0.2 * exact[b]).all()

    def test_a_constant_component_and_a_scale_of_zero(self):
        x = np.column_stack([np.zeros(5), np.arange(5.0)])
        scale = np.sqrt((x**2).mean(axis=0))
        got = measured_table(x, [uniform(b, 3.0) for b in range(3)], scale)
        assert got[0].tolist() == [0, 0, 0] and got[1, 0] == pytest.approx(6) and got[1, 2] < 6
        # decoded to 0 whatever the quantiser: what is there is lost
        assert measured_table(x, [uniform(3, 3.0)], 0.0).ravel().tolist() == [0, 6]

    def test_allocations_by_measured_tables_spend_the_budget(self):
        x = generator(2, "spend").standard_normal((500, 8)) * np.geomspace(1, 0.01, 8)
        table = measured_table(x, [rate.lloyd_max(Gaussian(), 2**b) for b in range(7)], x.std(axis=0))
        bits = rate.integer_bits(table, 20)
        assert bits.sum() == 20 and (np.diff(bits) <= 0).all()

    def test_refusals(self):
        codes = [uniform(0, 1.0), uniform(1, 1.0)]
        with pytest.raises(ValueError, match=r"samples: expected shape \(n, components\)"):
            measured_table([1.0, 2.0], codes)
        with pytest.raises(ValueError, match="samples, quantizers: expected at least one of each, got 0 rows and 2"):
            measured_table(np.ones((0, 2)), codes)
        with pytest.raises(ValueError, match="got 1 rows and 0 levels"):
            measured_table(np.ones((1, 2)), [])
        with pytest.raises(ValueError, match=r"samples: expected finite.*sample 0, component 1"):
            measured_table([[0.0, np.nan]], codes)
        with pytest.raises(ValueError, match=r"scale: expected numbers >= 0, got -1\.0 at component 1"):
            measured_table(np.ones((1, 2)), codes, [1.0, -1.0])
        with pytest.raises(ValueError, match=r"scale: expected shape \(components=2\)"):
            measured_table(np.ones((1, 2)), codes, [1.0])
        with pytest.raises(ValueError, match=r"quantizers\[1\]\(samples\): expected shape \(3, 2\), got \(2,\)"):
            measured_table(np.ones((3, 2)), [codes[0], lambda x: x[0]])
        with pytest.raises(ValueError, match=r"quantizers\[0\]\(samples\): expected finite"):
            measured_table(np.ones((3, 2)), [lambda x: np.inf * x])


def law_scale(law):
    return law.sigma if isinstance(law, Gaussian) else law.scale
