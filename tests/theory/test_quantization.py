"""kvtheory.quantization: the sphere's coordinate law, TurboQuant's exact distortion and its bounds, each by a second route."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from scipy.integrate import quad

from kvtheory import quantization as Q
from kvtheory.rate import cell_integrals, lloyd_max

DIMS = [2, 3, 4, 5, 16, 64, 128, 257, 1536]


class TestLaws:
    @pytest.mark.parametrize("dim", DIMS)
    def test_sphere_moments(self, dim):
        mass, first, second = cell_integrals(Q.SphereCoordinate(dim), np.array([-np.inf, np.inf]), np.zeros(1))
        assert mass[0] == pytest.approx(1, rel=1e-13)
        assert first[0] == pytest.approx(0, abs=1e-14)
        assert second[0] == pytest.approx(1 / dim, rel=1e-13)

    @pytest.mark.parametrize("dim", [3, 4, 16, 128])
    def test_sphere_density_is_the_papers(self, dim):
        x = np.linspace(-0.95, 0.95, 9)
        paper = special.gamma(dim / 2) / (np.sqrt(np.pi) * special.gamma((dim - 1) / 2)) * (1 - x**2) ** ((dim - 3) / 2)
        assert Q.SphereCoordinate(dim)(x) == pytest.approx(paper, rel=1e-12)
        assert Q.SphereCoordinate(dim)([-1.5, 2.0]).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("dim", [1, 2, 3, 7])
    def test_sphere_density_is_that_of_a_unit_vector(self, dim):
        g = np.random.default_rng(dim).standard_normal((100_000, dim))
        x = g[:, 0] / np.linalg.norm(g, axis=1)
        law = Q.SphereCoordinate(dim)
        if dim == 1:
            values, mass = law.atoms
            assert set(np.round(x, 12)) == set(values) and mass.tolist() == [0.5, 0.5]
            with pytest.raises(ValueError, match="two atoms"):
                law(0.0)
            return
        edges = np.linspace(-1, 1, 11)
        mass, _, _ = cell_integrals(law, edges, np.zeros(10))
        assert np.histogram(x, edges)[0] / x.size == pytest.approx(mass, abs=0.008)  # 5 deviations of .0016

    @given(
        st.sampled_from([Q.Gaussian(), Q.Laplace(), Q.SphereCoordinate(2), Q.SphereCoordinate(9)]),
        st.floats(-0.9, 0.5),
        st.floats(0.01, 0.4),
    )
    def test_cells_against_quad(self, law, low, width):
        point = low + 0.3 * width
        got = cell_integrals(law, np.array([low, low + width]), np.array([point]))
        for power in range(3):
            kink = [0.0] if low < 0 < low + width else None
            true, _ = quad(
                lambda x, p=power: (x - point) ** p * float(law(x)), low, low + width, epsrel=1e-12, points=kink
            )
            assert got[power][0] == pytest.approx(true, rel=1e-8, abs=1e-13)

    @pytest.mark.parametrize("law", [Q.Gaussian(1.5, 2.0), Q.Laplace(-1.0, 0.5)])
    def test_tails(self, law):
        # far cells keep relative accuracy: mass and centroid of the cell beyond 8 scales
        z = 8.0
        scale = law.sigma if isinstance(law, Q.Gaussian) else law.scale
        edge = law.mean + z * scale
        mass, first, _ = (v[0] for v in cell_integrals(law, np.array([edge, np.inf]), np.array([edge])))
        if isinstance(law, Q.Gaussian):
            tail = 0.5 * special.erfc(z / np.sqrt(2))
            assert mass == pytest.approx(tail, rel=1e-12)
            assert first / mass == pytest.approx(
                scale * (np.exp(-z * z / 2) / np.sqrt(2 * np.pi) / tail - z), rel=1e-10
            )
        else:
            assert mass == pytest.approx(0.5 * np.exp(-z), rel=1e-12) and first / mass == pytest.approx(
                scale, rel=1e-12
            )

    @pytest.mark.parametrize(
        "bad, error", [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError), ("8", TypeError)]
    )
    def test_dimension(self, bad, error):
        with pytest.raises(error, match="dim"):
            Q.SphereCoordinate(bad)

    def test_scales(self):
        for law in (lambda s: Q.Gaussian(sigma=s), lambda s: Q.Laplace(scale=s)):
            for s in (0.0, -1.0, np.nan, np.inf):
                with pytest.raises(ValueError):
                    law(s)


class TestMse:
    def test_theory_md(self):
        assert [round(Q.mse_distortion(128, b), 4) for b in (1, 2, 3, 4)] == [0.3609, 0.1160, 0.0340, 0.0093]
        assert [round(Q.gaussian_distortion(b), 6) for b in (1, 2, 3, 4)] == [0.363380, 0.117482, 0.034548, 0.009501]

    @pytest.mark.parametrize("dim", DIMS)
    def test_one_bit(self, dim):
        # 1 - d (E|x|)^2
        mean = np.exp(special.gammaln(dim / 2) - special.gammaln((dim + 1) / 2)) / np.sqrt(np.pi)
        assert Q.mse_distortion(dim, 1) == pytest.approx(1 - dim * mean**2, rel=1e-11)

    def test_small_dimensions(self):
        assert [Q.mse_distortion(1, b) for b in (0, 1, 2)] == [1.0, 0.0, 0.0]
        assert [Q.mse_distortion(3, b) for b in range(5)] == pytest.approx([4.0**-b for b in range(5)], rel=1e-12)

    @pytest.mark.parametrize("dim", [2, 4, 16, 128])
    def test_no_bits(self, dim):
        assert Q.mse_distortion(dim, 0) == pytest.approx(1.0, rel=1e-13)

    @given(st.integers(3, 300), st.integers(1, 5))
    def test_rises_with_dimension_and_stays_under_the_bound(self, dim, bits):
        here, above = Q.mse_distortion(dim, bits), Q.mse_distortion(dim + 1, bits)
        assert here < above < Q.gaussian_distortion(bits) < Q.mse_bound(bits)

    def test_the_bound_is_tight(self):
        ratio = [Q.gaussian_distortion(b) / float(Q.mse_bound(b)) for b in range(0, 13, 2)]
        assert (np.diff(ratio) > 0).all() and 0.999 < ratio[-1] < 1

    def test_the_printed_table_is_no_bound(self):
        above = {b for b in (1, 2, 3, 4) if Q.mse_distortion(128, b) > Q.PRINTED_MSE[b]}
        assert above == {1, 3, 4}
        assert all(Q.gaussian_distortion(b) > Q.PRINTED_MSE[b] for b in (1, 2, 3, 4))
        assert all(Q.gaussian_distortion(b) <= Q.ROUNDED_UP_MSE[b] for b in (1, 2, 3, 4))
        assert all(np.pi / 2 * Q.gaussian_distortion(b - 1) <= Q.ROUNDED_UP_PROD[b] for b in (1, 2, 3, 4))

    def test_refusals(self):
        with pytest.raises(TypeError, match="bits"):
            Q.mse_distortion(8, 1.5)
        with pytest.raises(ValueError, match="bits"):
            Q.mse_distortion(8, -1)
        for bound in (Q.mse_bound, Q.mse_lower_bound, Q.prod_bound):
            with pytest.raises(ValueError, match="bits"):
                bound(-1.0)
            with pytest.raises(ValueError, match="bits"):
                bound([1.0, np.nan])


class TestConstants:
    def test_gaussian(self):
        assert Q.panter_dite(Q.Gaussian()) == pytest.approx(np.sqrt(3) * np.pi / 2, rel=1e-13)
        assert Q.panter_dite(Q.Gaussian(1.0, 3.0)) == pytest.approx(9 * np.sqrt(3) * np.pi / 2, rel=1e-13)
        assert Q.panter_dite(Q.Laplace()) == pytest.approx(216 / 2 / 12, rel=1e-12)  # int f^{1/3} = 6 / 2^{1/3}

    @pytest.mark.parametrize("dim", [3, 4, 8, 64, 128, 1536])
    def test_sphere_closed_form(self, dim):
        assert Q.sphere_panter_dite(dim) == pytest.approx(dim * Q.panter_dite(Q.SphereCoordinate(dim)), rel=1e-5)

    def test_sphere_limits(self):
        c = [Q.sphere_panter_dite(d) for d in (2, 3, 4, 16, 256, 10**6)]
        assert (np.diff(c) > 0).all()
        assert c[1] == pytest.approx(1, rel=1e-12)
        assert c[-1] == pytest.approx(np.sqrt(3) * np.pi / 2, rel=1e-5)
        assert Q.mse_distortion(2, 8) * 4.0**8 == pytest.approx(c[0], rel=0.01)
        with pytest.raises(ValueError, match="dim"):
            Q.sphere_panter_dite(1)


class TestLowerBounds:
    @pytest.mark.parametrize(
        "dim, k", [(2, 0.5), (2, 40.0), (3, 5.0), (8, 1e-3), (64, 100.0), (64, 3000.0), (200, 500.0)]
    )
    def test_von_mises_fisher_by_bessel(self, dim, k):
        nu = dim / 2 - 1
        below, at = special.ive([nu, nu + 1], k)
        nats = k * at / below - (special.gammaln(dim / 2) + nu * np.log(2 / k) + np.log(below) + k)
        bits, distortion = Q.von_mises_fisher(dim, k)
        assert bits == pytest.approx(nats / dim / np.log(2), rel=1e-9, abs=1e-13)
        assert distortion == pytest.approx(1 - (at / below) ** 2, rel=1e-10)

    def test_von_mises_fisher_on_the_line(self):
        bits, distortion = Q.von_mises_fisher(1, 1.0)
        p = 1 / (1 + np.exp(-2.0))  # a binary symmetric channel
        assert bits == pytest.approx(1 + p * np.log2(p) + (1 - p) * np.log2(1 - p), rel=1e-12)
        assert distortion == pytest.approx(4 * p * (1 - p), rel=1e-12)

    @given(st.integers(2, 400), st.floats(0.01, 10))
    def test_sandwich(self, dim, bits):
        d = Q.sphere_distortion_rate(dim, bits)
        assert 4.0 ** (-bits * dim / (dim - 1)) * (1 - 1e-9) <= d <= 4.0**-bits
        if dim * bits >= 1:
            assert d <= Q.sphere_code_bound(dim, bits) * (1 + 1e-9)

    @pytest.mark.parametrize("bits", [1, 2, 3, 5])
    def test_code_bound_closed_forms(self, bits):
        n = 4.0**bits
        assert Q.sphere_code_bound(2, bits) == pytest.approx(1 - (np.sin(np.pi / n) / (np.pi / n)) ** 2, rel=1e-9)
        n = 8.0**bits
        assert Q.sphere_code_bound(3, bits) == pytest.approx(2 / n - 1 / n**2, rel=1e-9)
        assert Q.sphere_code_bound(1, bits) == 0.0 == Q.sphere_distortion_rate(1, bits)

    def test_two_codewords(self):
        # half spheres: m = 2 E[x; x > 0] = E|x|
        for dim in (2, 5, 64):
            mean = np.exp(special.gammaln(dim / 2) - special.gammaln((dim + 1) / 2)) / np.sqrt(np.pi)
            assert Q.sphere_code_bound(dim, 1 / dim) == pytest.approx(1 - mean**2, rel=1e-10)

    @pytest.mark.parametrize("dim, bits", [(4, 1), (16, 2), (64, 4), (128, 1)])
    def test_cap_by_incomplete_beta(self, dim, bits):
        a = (dim - 1) / 2
        p = 2.0 ** (-dim * bits)
        x = special.betaincinv(a, a, p)
        c = np.exp(special.gammaln(dim / 2) - special.gammaln(a)) / np.sqrt(np.pi)
        m = c / (dim - 1) * (4 * x * (1 - x)) ** a / p
        assert Q.sphere_code_bound(dim, bits) == pytest.approx(1 - m * m, rel=1e-8)

    @pytest.mark.parametrize("dim", [2, 3, 4, 9, 64, 256])
    def test_steps_of_the_proof(self, dim):
        """p m^2 is concave up to p = 1/2 and below its tangent at 1/2 beyond, by incomplete beta functions."""
        n, a = dim - 1, (dim - 1) / 2
        p = np.concatenate([np.geomspace(1e-12, 0.4, 200), np.linspace(0.401, 0.5, 50)])
        x = special.betaincinv(a, a, p)
        edge, sine = 1 - 2 * x, np.sqrt(4 * x * (1 - x))
        c = np.exp(special.gammaln(dim / 2) - special.gammaln(a)) / np.sqrt(np.pi)
        m = c / n * sine**n / p
        assert (m - edge <= sine / np.sqrt(n) * (1 + 1e-9) + 1e-12).all()
        g = p * m * m
        slope = np.diff(g) / np.diff(p)
        assert (np.diff(slope) <= 1e-9 * np.abs(slope[1:]) + 1e-9).all()  # what step 2 says of it
        assert (sine ** (2 * n) <= 4 * p * (1 - p) * (1 + 1e-9)).all()
        # beyond 1/2 it is not concave, and step 3 is needed: it falls to 0 at 1 with slope 0
        q = 1 - np.geomspace(1e-4, 1e-2, 30)[::-1]
        beyond = (c / n * np.sqrt(4 * special.betaincinv(a, a, q) * (1 - special.betaincinv(a, a, q))) ** n) ** 2 / q
        assert (np.diff(np.diff(beyond) / np.diff(q)) > 0).all()
        assert (beyond <= (2 * c / n) ** 2 * (1 - q)).all()

    @given(st.integers(2, 40), st.integers(2, 12), st.integers(0, 2**32 - 1))
    def test_no_unequal_cells_are_better(self, dim, cells, seed):
        """Caps of any probabilities that sum to 1 leave at least what N equal ones would (they need not fit on a sphere)."""
        p = np.random.default_rng(seed).dirichlet(np.full(cells, 0.7))
        a = (dim - 1) / 2
        p = p[p > 1e-9]
        x = special.betaincinv(a, a, p)
        c = np.exp(special.gammaln(dim / 2) - special.gammaln(a)) / np.sqrt(np.pi) / (dim - 1)
        reach = c * (4 * x * (1 - x)) ** a
        assert 1 - (reach**2 / p).sum() >= Q.sphere_code_bound(dim, np.log2(cells) / dim) * (1 - 1e-6)

    def test_large_dimension_does_not_underflow(self):
        assert Q.sphere_code_bound(1536, 8) * 4.0**8 == pytest.approx(0.99745, abs=1e-4)

    @given(st.integers(2, 64), st.integers(1, 4))
    def test_turboquant_is_above(self, dim, bits):
        assert Q.mse_distortion(dim, bits) >= Q.sphere_code_bound(dim, bits) * (1 - 1e-9)

    def test_the_papers_lower_bound_is_broken_in_the_plane(self):
        assert Q.mse_distortion(2, 1) == pytest.approx(1 - 8 / np.pi**2)
        assert Q.mse_distortion(2, 1) < Q.mse_lower_bound(1)
        # TurboQuant attains the true bound there
        assert Q.mse_distortion(2, 1) == pytest.approx(Q.sphere_code_bound(2, 1), rel=1e-12)

    def test_refusals(self):
        with pytest.raises(ValueError, match="bits"):
            Q.sphere_distortion_rate(4, 0.0)
        with pytest.raises(ValueError, match="codewords"):
            Q.sphere_code_bound(4, 0.2)
        with pytest.raises(TypeError, match="dim"):
            Q.sphere_code_bound(4.0, 1)


class TestProd:
    def test_values(self):
        assert [round(Q.prod_distortion(128, b), 4) for b in (1, 2, 3, 4)] == [1.5630, 0.5641, 0.1813, 0.0531]
        with pytest.raises(ValueError, match="bits"):
            Q.prod_distortion(128, 0)

    @given(st.integers(2, 200), st.integers(1, 6))
    def test_bound(self, dim, bits):
        assert Q.prod_distortion(dim, bits) <= Q.prod_bound(bits)
        assert Q.prod_bound(bits) == pytest.approx(np.pi / 2 * Q.mse_bound(bits - 1))

    @given(st.integers(2, 200), st.integers(1, 6))
    def test_worst_direction(self, dim, bits):
        worst = Q.prod_worst(dim, bits)
        assert worst == pytest.approx(np.pi / 2 * Q.mse_distortion(dim, bits - 1))
        assert Q.prod_distortion(dim, bits) < worst <= Q.prod_bound(bits)
        assert worst - Q.prod_distortion(dim, bits) == pytest.approx(Q.mse_distortion(dim, bits - 1) / dim, rel=1e-9)
        if bits <= 4:
            assert worst <= Q.ROUNDED_UP_PROD[bits]

    def test_worst_direction_refuses(self):
        with pytest.raises(ValueError, match="bits"):
            Q.prod_worst(8, 0)

    def test_pure_sketch(self):
        # b = 1: no mse bits, x_hat = sqrt(pi/2)/d S^T sign(S x): variance (pi/2 - <x,y>^2)/d
        rng = np.random.default_rng(3)
        d, n = 3, 200_000
        s = rng.standard_normal((n, d, d))
        y = rng.standard_normal((n, d))
        y /= np.linalg.norm(y, axis=1, keepdims=True)
        estimate = np.sqrt(np.pi / 2) / d * np.einsum("nij,nj,ni->n", s, y, np.sign(s[:, :, 0]))  # x = e_1
        assert d * np.mean((estimate - y[:, 0]) ** 2) == pytest.approx(Q.prod_distortion(d, 1), rel=0.02)


def test_haar_rotated_vector_has_the_exact_distortion():
    # the whole of TurboQuant_mse on one fixed vector, rotation by QR with its signs fixed
    rng = np.random.default_rng(0)
    d, n = 16, 4000
    q, r = np.linalg.qr(rng.standard_normal((n, d, d)))
    q *= np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    x = np.zeros(d)
    x[:2] = 0.6, -0.8
    code = lloyd_max(Q.SphereCoordinate(d), 4)
    y = q @ x
    back = np.einsum("nij,ni->nj", q, code.decode(code.encode(y)))
    errors = ((back - x) ** 2).sum(axis=1)
    assert errors.mean() == pytest.approx(Q.mse_distortion(d, 2), abs=4.5 * errors.std() / np.sqrt(n))


class TestPolarAngles:
    @pytest.mark.parametrize("level", [1, 2, 3, 4, 7, 10, 16])
    def test_they_are_densities_symmetric_about_their_centre(self, level):
        law = Q.PolarAngle(level)
        mass, first, second = cell_integrals(law, np.array([-np.inf, np.inf]), np.array([law.centre]))
        assert mass[0] == pytest.approx(1, rel=1e-9) and first[0] == pytest.approx(0, abs=1e-12)
        if level > 1:  # of a Beta law: sin^2 psi has the variance 1/(4 (n + 1))
            n, psi = 2.0 ** (level - 1), np.linspace(*law.support, 200001)
            assert np.trapezoid((np.sin(psi) ** 2 - 0.5) ** 2 * law(psi), psi) == pytest.approx(
                1 / (4 * (n + 1)), rel=1e-6
            )
        else:
            assert second[0] == pytest.approx(np.pi**2 / 3)
        assert law([-0.1, law.support[1] + 0.1]).tolist() == [0, 0]

    @pytest.mark.parametrize("level", [2, 3, 5])
    def test_they_are_the_angles_of_norms(self, level):
        n = 2 ** (level - 1)
        g = np.random.default_rng(level).standard_normal((100_000, 2, n))
        norms = np.linalg.norm(g, axis=-1)
        edges = np.linspace(0, np.pi / 2, 9)
        found = np.histogram(np.arctan2(norms[:, 1], norms[:, 0]), edges)[0] / 100_000
        assert found == pytest.approx(cell_integrals(Q.PolarAngle(level), edges, np.zeros(8))[0], abs=0.008)

    @pytest.mark.parametrize("level, bits", [(1, 0), (1, 1), (1, 4), (2, 0), (2, 2), (3, 2), (4, 3), (9, 2)])
    def test_cosines_of_errors_against_quad(self, level, bits):
        law = Q.PolarAngle(level)
        code = lloyd_max(law, 2**bits)
        edges = [law.support[0], *code.thresholds, law.support[1]]
        expected = sum(
            quad(
                lambda x, p=p: np.cos(x - p) * law(x),
                a,
                b,
                epsabs=1e-13,
                points=[law.centre] if a < law.centre < b else None,
            )[0]
            for a, b, p in zip(edges, edges[1:], code.points)
        )
        assert Q.polar_cosine(level, bits) == pytest.approx(expected, abs=1e-9)
        if level == 1:  # a uniform error of width 2 pi / 2^b
            assert expected == pytest.approx(np.sinc(2.0**-bits), abs=1e-9)

    def test_distortion(self):
        assert Q.polar_distortion((4, 2, 2, 2)) == pytest.approx(0.0320765, abs=1e-7)
        assert Q.polar_distortion(()) == 0 and Q.polar_distortion((0,)) == pytest.approx(2)
        deep = [Q.polar_distortion((bits,) * 4) for bits in range(1, 9)]
        assert all(3 < a / b < 4.3 for a, b in itertools.pairwise(deep))

    def test_refusals(self):
        for bad, problem in ((0, ValueError), (17, ValueError), (2.0, TypeError), (True, TypeError)):
            with pytest.raises(problem, match="level"):
                Q.PolarAngle(bad)
        with pytest.raises(ValueError, match="bits"):
            Q.polar_cosine(2, -1)


class TestSignSketch:
    def test_variance_by_simulation(self):
        rng = np.random.default_rng(3)
        q, k, m = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.1, -2.0]), 4
        s = rng.standard_normal((200_000, m, 3))
        estimates = np.sqrt(np.pi / 2) / m * np.linalg.norm(k) * ((s @ q) * np.sign(s @ k)).sum(axis=1)
        assert estimates.mean() == pytest.approx(q @ k, abs=0.03)
        assert estimates.var() == pytest.approx(float(Q.qjl_variance(q, k, m)), rel=0.02)

    def test_shapes_and_sum_over_axes(self):
        keys = np.random.default_rng(0).standard_normal((5, 8))
        every = Q.qjl_variance(np.eye(8)[:, None], keys, 3)
        assert every.shape == (8, 5)
        assert every.sum(axis=0) == pytest.approx((keys**2).sum(axis=1) * Q.qjl_distortion(8, 3))
        assert Q.qjl_variance(np.zeros(8), keys[0], 1) == 0 and Q.qjl_distortion(1, 1) == pytest.approx(np.pi / 2 - 1)

    def test_refusals(self):
        for bad, problem in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(problem, match="signs"):
                Q.qjl_distortion(8, bad)
        with pytest.raises(ValueError, match="key"):
            Q.qjl_variance([1.0, 2.0], [np.nan, 1.0], 4)


def test_q_norm_distortion():
    # two points at +-c widened to +-1: E (|x| - 1)^2 = 2 - 2 sqrt(2/pi)
    assert Q.q_norm_distortion(1 - 2 / np.pi) == pytest.approx(2 - 2 * np.sqrt(2 / np.pi))
    assert Q.q_norm_distortion(0) == 0 and Q.q_norm_distortion(1e-9) == pytest.approx(1e-9)
    for bad in (-0.1, 1.0, np.nan):
        with pytest.raises(ValueError, match="distortion"):
            Q.q_norm_distortion(bad)
