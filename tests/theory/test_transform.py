"""kvtheory.transform: the metric KLT's identities on random, ill-conditioned and singular pairs; what other bases cost; whitening is PCA."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from kvtheory import rate, transform
from kvtheory.randomness import generator
from kvtheory.transform import basis_loss_bits, coded_distortion, metric_klt, pca, pca_loss_bits, shrink, whitened_svd

EPS = np.finfo(np.float64).eps


def rotation(rng, d):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def spd(rng, d, decades=1.0, rank=None):
    """A random symmetric matrix with eigenvalues over so many decades, all but `rank` of them 0."""
    root = rotation(rng, d) * 10 ** (0.5 * rng.uniform(-decades, 0, d))
    if rank is not None:
        root[:, rank:] = 0
    return root @ root.T


@st.composite
def pairs(draw, decades=12.0, singular=True, units_differ=True):
    """(covariance, metric): eigenvalues over up to 12 decades each, channels in units up to 1e12 apart, the covariance of any rank."""
    d = draw(st.integers(1, 12))
    rng = generator(draw(st.integers(0, 2**32)), "pairs")
    rank = draw(st.integers(0, d)) if singular and draw(st.booleans()) else None
    sigma = spd(rng, d, draw(st.floats(0, decades)), rank)
    m = spd(rng, d, draw(st.floats(0, decades)))
    units = 10 ** rng.uniform(-6, 6, d) if units_differ and draw(st.booleans()) else np.ones(d)
    size = draw(st.sampled_from([1e-20, 1.0, 1e20]))
    return sigma * units[:, None] * units, size * m / units[:, None] / units


def condition(m):
    """Of the matrix in the units that make its diagonal 1: what the rounding of its inverse grows with."""
    s = np.sqrt(np.diagonal(m))
    return np.linalg.cond(m / s[:, None] / s)


class TestMetricKlt:
    @given(pairs())
    def test_it_diagonalises_both(self, pair):
        sigma, m = pair
        d = len(m)
        t = metric_klt(sigma, m)
        assert (t.variances >= 0).all() and (np.diff(t.variances) <= 0).all()
        # rounding: d^2 eps of the sizes that the products go through, sum_c M_cc Sigma_cc for the one, cond(M) for the inverse
        size = float(np.diagonal(m) @ np.diagonal(sigma))
        got = t.analysis @ sigma @ t.analysis.T
        np.testing.assert_allclose(got, np.diag(t.variances), rtol=0, atol=100 * d**2 * EPS * size)
        assert t.variances.sum() == pytest.approx(np.trace(m @ sigma), rel=0, abs=100 * d**2 * EPS * size)
        inverse = 100 * d**2 * EPS * condition(m)
        np.testing.assert_allclose(t.synthesis.T @ m @ t.synthesis, np.eye(d), rtol=0, atol=inverse)
        np.testing.assert_allclose(t.analysis @ t.synthesis, np.eye(d), rtol=0, atol=inverse)
        np.testing.assert_allclose(t.weights(m), 1, rtol=0, atol=inverse)

    @given(pairs(), st.integers(0, 2**32))
    def test_generalised_parseval(self, pair, seed):
        """e^T M e = ||analysis e||^2; no inverse is in it, so that it holds for ill-conditioned metrics as well."""
        sigma, m = pair
        t = metric_klt(sigma, m)
        e = generator(seed, "errors").standard_normal((5, len(m))) / np.sqrt(np.diagonal(m))
        tolerance = 100 * len(m) ** 2 * EPS * np.sum(np.abs(e) * np.sqrt(np.diagonal(m)), axis=1) ** 2
        assert (np.abs((t.forward(e) ** 2).sum(axis=1) - np.einsum("ni,ij,nj->n", e, m, e)) <= tolerance).all()

    @given(pairs(decades=3.0, units_differ=False), st.integers(0, 2**32))
    def test_coordinates_do_not_matter(self, pair, seed):
        """x -> G x: the variances are the eigenvalues of Sigma M, which only the pair determines."""
        sigma, m = pair
        d = len(m)
        rng = generator(seed, "coordinates")
        g = rotation(rng, d) * 2.0 ** rng.integers(-3, 4, d)
        inverse = np.linalg.inv(g)
        there, here = metric_klt(g @ sigma @ g.T, inverse.T @ m @ inverse), metric_klt(sigma, m)
        size = float(np.diagonal(m) @ np.diagonal(sigma))
        rounding = 1e3 * d**2 * EPS * (size + np.trace(g @ sigma @ g.T) * np.trace(inverse.T @ m @ inverse))
        np.testing.assert_allclose(there.variances, here.variances, rtol=0, atol=rounding)

    @given(st.integers(1, 10), st.integers(0, 2**32))
    def test_variances_are_generalised_eigenvalues(self, d, seed):
        rng = generator(seed, "eigen")
        sigma, m = spd(rng, d), spd(rng, d)
        expected = scipy.linalg.eigh(sigma, np.linalg.inv(m), eigvals_only=True)[::-1]
        np.testing.assert_allclose(metric_klt(sigma, m).variances, expected, rtol=1e-9)

    @given(st.integers(1, 10), st.data(), st.integers(0, 2**32))
    def test_rank(self, d, data, seed):
        """A covariance of rank r has exactly r variances above 0, whatever the metric."""
        rng = generator(seed, "rank")
        rank = data.draw(st.integers(0, d))
        t = metric_klt(spd(rng, d, 2, rank), spd(rng, d, 2))
        assert (t.variances > 0).tolist() == [c < rank for c in range(d)]

    def test_fewer_samples_than_dimensions_and_duplicated_channels(self):
        rng = generator(0, "samples")
        x = rng.standard_normal((3, 8))
        x[:, 5] = x[:, 2]
        assert (metric_klt(x.T @ x / 3, spd(rng, 8)).variances > 0).sum() == 3

    def test_by_hand(self):
        """Sigma = diag(1, 4), M = diag(9, 1): the first channel counts 9, the second 4."""
        t = metric_klt(np.diag([1.0, 4.0]), np.diag([9.0, 1.0]))
        np.testing.assert_allclose(t.variances, [9, 4], rtol=1e-15)
        np.testing.assert_allclose(t.analysis, [[3, 0], [0, 1]], rtol=1e-15)
        np.testing.assert_allclose(t.synthesis, [[1 / 3, 0], [0, 1]], rtol=1e-15)
        # and a pair whose bases differ: L = [[1, 0], [1, 1]], L^T I L = [[2, 1], [1, 1]]
        golden = (1 + np.sqrt(5)) / 2
        t = metric_klt(np.eye(2), [[1.0, 1.0], [1.0, 2.0]])
        np.testing.assert_allclose(t.variances, [golden**2, golden**-2], rtol=1e-14)

    def test_rows_forward_and_back(self):
        rng = generator(1, "rows")
        t = metric_klt(spd(rng, 5), spd(rng, 5))
        x = rng.standard_normal((2, 3, 5))
        np.testing.assert_allclose(t.forward(x)[1, 2], t.analysis @ x[1, 2], rtol=1e-12)
        np.testing.assert_allclose(t.inverse(t.forward(x)), x, rtol=1e-10)
        with pytest.raises(ValueError, match="read-only"):
            t.analysis[0, 0] = 0

    @given(pairs())
    def test_pca(self, pair):
        t = pca(pair[0])
        d = len(t.variances)
        np.testing.assert_allclose(t.analysis @ t.analysis.T, np.eye(d), rtol=0, atol=100 * d * EPS)
        np.testing.assert_array_equal(t.synthesis, t.analysis.T)
        np.testing.assert_allclose(
            (t.synthesis * t.variances) @ t.analysis, pair[0], rtol=0, atol=100 * d**2 * EPS * np.abs(pair[0]).max()
        )


class TestShrink:
    @given(pairs(), st.floats(1e-6, 10))
    def test_definition(self, pair, amount):
        m = pair[1]
        d = len(m)
        got = shrink(m, amount)
        np.testing.assert_allclose(got, m + amount * np.trace(m) / d * np.eye(d), rtol=1e-14)
        spread = np.linalg.eigvalsh(got)
        assert spread[-1] / spread[0] <= (d + amount) / amount * (1 + 1e-6)

    def test_stacks_and_singular_metrics(self):
        m = np.stack([np.ones((3, 3)), np.eye(3)])
        np.testing.assert_allclose(shrink(m, 0.5), m + 0.5 * np.eye(3))
        with pytest.raises(ValueError, match=r"metric: expected a positive definite.*shrink\(metric, amount\)"):
            metric_klt(np.eye(3), m[0])
        assert metric_klt(np.eye(3), shrink(m[0], 1e-9)).variances == pytest.approx([3, 0, 0], abs=1e-8)

    @pytest.mark.parametrize("amount", [-0.1, np.nan, np.inf])
    def test_amount(self, amount):
        with pytest.raises(ValueError, match="amount: expected"):
            shrink(np.eye(2), amount)
        with pytest.raises(ValueError, match=r"metric: expected shape \(..., d, d\)"):
            shrink(np.ones((2, 3)), 0.1)
        with pytest.raises(ValueError, match="metric: expected a trace >= 0"):
            shrink(-np.eye(2), 0.1)


def loss_by_definition(sigma, m, t):
    inverse = np.linalg.inv(t)
    product = np.log2(np.diagonal(t @ sigma @ t.T)).sum() + np.log2(np.diagonal(inverse.T @ m @ inverse)).sum()
    return (product - (np.linalg.slogdet(sigma)[1] + np.linalg.slogdet(m)[1]) / np.log(2)) / (2 * len(m))


class TestLoss:
    @given(pairs(decades=2.0, singular=False), st.integers(0, 2**32))
    def test_definition_sign_and_invariances(self, pair, seed):
        sigma, m = pair
        d = len(m)
        rng = generator(seed, "basis")
        # in the units of the channels, which may be 1e12 apart
        units = np.sqrt(np.diagonal(m))
        t = rng.standard_normal((d, d)) * units
        loss = basis_loss_bits(sigma, m, t)
        rounding = 1e3 * d**2 * EPS * np.linalg.cond(t / units) ** 2 * condition(sigma) * condition(m)
        assert loss == pytest.approx(loss_by_definition(sigma, m, t), abs=rounding)
        assert loss >= -1e-13
        scaled = (rng.uniform(0.1, 10, d)[:, None] * t)[rng.permutation(d)]
        assert basis_loss_bits(sigma, m, scaled) == pytest.approx(loss, abs=rounding)
        # Schur: the best transform has none, and no basis undercuts it
        assert 0 <= basis_loss_bits(sigma, m, metric_klt(sigma, m)) + 1e-13 <= 1e-13 + rounding

    @given(pairs(decades=3.0, singular=False))
    def test_pca_with_weights_in_closed_form(self, pair):
        sigma, m = pair
        u = pca(sigma)
        loss = pca_loss_bits(sigma, m)
        assert loss >= -1e-13
        product = np.log2(u.weights(m)).sum() - np.linalg.slogdet(m)[1] / np.log(2)
        rounding = 1e3 * len(m) ** 2 * EPS * condition(m) * np.linalg.cond(sigma)
        if rounding < 1e-3:
            assert loss == pytest.approx(product / (2 * len(m)), abs=rounding)
            assert loss == pytest.approx(basis_loss_bits(sigma, m, u), abs=rounding)

    @given(st.integers(1, 8), st.integers(0, 2**32))
    def test_no_loss_if_and_only_if_the_metric_is_diagonal_there(self, d, seed):
        rng = generator(seed, "commuting")
        u, variances = rotation(rng, d), np.cumsum(rng.uniform(0.5, 1.5, d))
        sigma, m = (u * variances) @ u.T, (u * rng.uniform(0.1, 10, d)) @ u.T
        assert pca_loss_bits(sigma, m) == pytest.approx(0, abs=1e-12)
        if d > 1:
            tilt = m + 0.5 * np.sqrt((u[:, 0] @ m @ u[:, 0]) * (u[:, 1] @ m @ u[:, 1])) * (
                np.outer(u[:, 0], u[:, 1]) + np.outer(u[:, 1], u[:, 0])
            )
            # a correlation of 1/2 between two channels: pivots 1 and 3/4
            assert pca_loss_bits(sigma, tilt) == pytest.approx(-np.log2(0.75) / (2 * d), abs=1e-12)

    def test_equal_eigenvalues_leave_the_basis_free(self):
        """Sigma M = I: T = I need not be optimal though every T diagonalises Sigma M (theory B3, corrected)."""
        m = np.array([[1.0, 0.9], [0.9, 1.0]])
        sigma = np.linalg.inv(m)
        np.testing.assert_allclose(sigma @ m, np.eye(2), atol=1e-15)
        # both Hadamard ratios are those of a correlation of .9: prod = 1/(1 - .81), twice; over 2d = 4
        assert basis_loss_bits(sigma, m, np.eye(2)) == pytest.approx(-2 * np.log2(1 - 0.81) / 4, rel=1e-12)
        assert basis_loss_bits(sigma, m, metric_klt(sigma, m)) == pytest.approx(0, abs=1e-13)

    @given(st.integers(2, 8), st.integers(0, 2**32))
    def test_the_loss_is_a_rate(self, d, seed):
        """At high rate, PCA + weights with `loss` more bits per component has the distortion of the metric KLT."""
        rng = generator(seed, "rate")
        sigma, m = spd(rng, d), spd(rng, d)
        best, u = metric_klt(sigma, m), pca(sigma)
        b = 12.0
        scores = u.variances * u.weights(m)
        klt = coded_distortion(best, sigma, m, rate.reverse_waterfill(best.variances, b))
        more = rate.reverse_waterfill(scores, b + pca_loss_bits(sigma, m))
        assert coded_distortion(u, sigma, m, more) == pytest.approx(klt, rel=1e-9)
        assert klt == pytest.approx(d * 4.0**-b * (np.linalg.det(sigma) * np.linalg.det(m)) ** (1 / d), rel=1e-9)


class TestCodedDistortion:
    @given(pairs())
    def test_no_bits_lose_everything(self, pair):
        sigma, m = pair
        got = coded_distortion(metric_klt(sigma, m), sigma, m, np.zeros(len(m)))
        rounding = 1e3 * len(m) ** 2 * EPS * condition(m) * float(np.diagonal(m) @ np.diagonal(sigma))
        assert got == pytest.approx(np.trace(m @ sigma), rel=0, abs=rounding)

    def test_laws(self):
        sigma, m = np.diag([4.0, 1.0]), np.diag([1.0, 2.0])
        assert coded_distortion(np.eye(2), sigma, m, [2, 0]) == 4 / 16 + 2
        assert coded_distortion(np.eye(2), sigma, m, [2, 0], law=[1.0, 0.5, 0.25]) == 1 + 2
        assert coded_distortion(np.eye(2), sigma, m, [2.5, 0], law=lambda b: 1 / (1 + b)) == pytest.approx(4 / 3.5 + 2)

    @given(st.integers(2, 6), st.integers(0, 3), st.integers(0, 2**32))
    def test_among_orthogonal_transforms_of_the_metric_domain_no_other_wins(self, d, mean_bits, seed):
        """T = Q L^T, integer bits, the Lloyd-Max table of N(0, 1): min_b sum s_c g(b_c) is symmetric and concave in s (Schur)."""
        rng = generator(seed, "schur")
        sigma, m = spd(rng, d, 2), spd(rng, d, 2)
        table = rate.gaussian_table(6)

        def best(variances):
            return coded_distortion(t, sigma, m, rate.integer_bits(variances[:, None] * table, mean_bits * d), table)

        t = metric_klt(sigma, m)
        least = best(t.variances)
        factor = np.linalg.cholesky(m)
        for _ in range(5):
            t = rotation(rng, d) @ factor.T
            assert best(np.diagonal(t @ sigma @ t.T)) >= least * (1 - 1e-10)

    def test_other_bases_may_claim_less_than_rate_distortion_allows(self):
        """x_1 and x_2 all but opposite, M their sum's square or so: coding x_1 alone errs by x_2 as well, with which its own error is
        correlated. The sum over coefficients leaves that out, and falls below R(D), which no code does (theory B3, corrected)."""
        sigma, m = np.array([[2.33, -1.28], [-1.28, 1.01]]), np.array([[1.62, -2.92], [-2.92, 6.28]])
        level = 0.05
        klt = metric_klt(sigma, m)
        bound = coded_distortion(klt, sigma, m, rate.reverse_waterfill(klt.variances, level))
        scores = np.diagonal(sigma) * np.diagonal(m)
        claimed = coded_distortion(np.eye(2), sigma, m, rate.reverse_waterfill(scores, level))
        assert claimed < 0.8 * bound
        # at a rate that leaves no coefficient without bits it does not
        bits = rate.reverse_waterfill(scores, 3.0)
        assert bits.min() > 0
        assert coded_distortion(np.eye(2), sigma, m, bits) > coded_distortion(
            klt, sigma, m, rate.reverse_waterfill(klt.variances, 3.0)
        )


class TestWhitening:
    @given(st.integers(1, 6), st.integers(1, 9), st.sampled_from(["even", "uneven"]), st.integers(0, 2**32))
    def test_it_is_pca_of_the_outputs(self, d, model_dim, split, seed):
        rng = generator(seed, "whitening")
        w, c = rng.standard_normal((d, model_dim)), spd(rng, model_dim, 2)
        got = whitened_svd(w, c, split)
        r = min(d, model_dim)
        np.testing.assert_allclose(got.reconstruct @ got.latent, w, rtol=0, atol=1e-10)
        np.testing.assert_allclose(got.latent @ c @ got.latent.T, np.diag(got.variances), rtol=0, atol=1e-10)
        assert got.jitter == 0 and got.latent.shape == (r, model_dim) and got.reconstruct.shape == (d, r)
        expected = pca(w @ c @ w.T)
        np.testing.assert_allclose(
            got.singular_values**2, expected.variances[:r], rtol=0, atol=1e-12 * d * model_dim * 10
        )
        # the same directions, up to nothing at all: signs have one convention
        gaps = np.abs(np.diff(expected.variances[: r + 1])) if d > 1 else np.ones(1)
        if (gaps > 1e-4).all() and expected.variances[r - 1] > 1e-4:
            length = np.linalg.norm(got.reconstruct, axis=0)
            np.testing.assert_allclose(got.reconstruct / length, expected.synthesis[:, :r], rtol=0, atol=1e-6)
            # z of the paper are PCA's scores, scaled
            x = rng.standard_normal((4, model_dim))
            scores = expected.forward(x @ w.T)[:, :r]
            np.testing.assert_allclose(x @ got.latent.T * length, scores, rtol=0, atol=1e-5)

    @given(st.integers(1, 6), st.integers(0, 2**32))
    def test_the_split_does_not_change_the_scores(self, d, seed):
        """w_c s_c = (u_c^T C_q u_c) sigma_c^2 under both splits, and under PCA itself."""
        rng = generator(seed, "split")
        w, c, metric = rng.standard_normal((d, d + 2)), spd(rng, d + 2), spd(rng, d)
        scores = []
        for split in ("even", "uneven"):
            got = whitened_svd(w, c, split)
            scores.append(got.variances * np.einsum("ic,ij,jc->c", got.reconstruct, metric, got.reconstruct))
        u = pca(w @ c @ w.T)
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-9)
        np.testing.assert_allclose(np.sort(scores[0]), np.sort(u.variances * u.weights(metric)), rtol=1e-6, atol=1e-9)

    def test_a_singular_moment_is_lifted_as_the_authors_do(self):
        rng = generator(2, "jitter")
        w, x = rng.standard_normal((3, 6)), rng.standard_normal((2, 6))
        c = x.T @ x - 1e-8 * np.eye(6)
        got = whitened_svd(w, c)
        assert got.jitter == pytest.approx(1e-3 - np.linalg.eigvalsh(c)[0], rel=1e-12)
        lifted = c + got.jitter * np.eye(6)
        np.testing.assert_allclose(got.reconstruct @ got.latent, w, atol=1e-10)
        np.testing.assert_allclose(got.singular_values**2, pca(w @ lifted @ w.T).variances, rtol=1e-10)

    def test_refusals(self):
        with pytest.raises(ValueError, match="split"):
            whitened_svd(np.eye(2), np.eye(2), "odd")
        with pytest.raises(ValueError, match=r"input_moment: expected shape \(d=3, d=3\)"):
            whitened_svd(np.ones((2, 3)), np.eye(2))
        with pytest.raises(ValueError, match=r"weight: expected finite numbers.*row 0, column 1"):
            whitened_svd([[1.0, np.nan]], np.eye(2))
        with pytest.raises(ValueError, match="weight: expected d >= 1"):
            whitened_svd(np.ones((0, 2)), np.eye(2))


EYE = np.eye(2)
BAD = {
    "asymmetric": (
        EYE,
        [[1, 0.5], [0, 1]],
        r"metric: expected a symmetric matrix, got 0.5 at \(0, 1\) and 0.0 at \(1, 0\)",
    ),
    "off a zero diagonal": ([[0.0, 0.1], [0.0, 1.0]], EYE, "covariance: expected a symmetric matrix"),
    "negative": (np.diag([1, -1.0]), EYE, r"covariance: expected a diagonal >= 0, got -1.0 at 1"),
    "indefinite covariance": ([[1, 2.0], [2, 1]], EYE, "covariance: expected a positive semi-definite matrix"),
    "indefinite metric": (EYE, [[1, 2.0], [2, 1]], "metric: expected a positive definite matrix"),
    "zero metric": (EYE, np.zeros((2, 2)), "metric: expected a positive definite matrix"),
    "dead channel": (EYE, np.diag([1.0, 0.0]), r"shrink\(metric, amount\)"),
    "rank one": (EYE, np.outer([1, 1 / 3], [1, 1 / 3]), r"shrink\(metric, amount\)"),
    "shapes": (np.eye(3), EYE, r"covariance: expected shape \(d=2, d=2\), got \(3, 3\)"),
    "not square": (EYE, np.ones((2, 3)), r"metric: expected shape \(d, d\)"),
    "empty": (np.ones((0, 0)), np.ones((0, 0)), "metric: expected d >= 1"),
    "nan": (EYE, [[1, np.nan], [0, 1]], r"metric: expected finite numbers.*row 0, column 1"),
}


@pytest.mark.parametrize(("covariance", "metric", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said(covariance, metric, message):
    with pytest.raises(ValueError, match=message):
        metric_klt(covariance, metric)


def test_refusals_of_the_losses():
    with pytest.raises(ValueError, match=r"covariance: expected a positive definite matrix.*high-rate"):
        basis_loss_bits(np.diag([1.0, 0.0]), EYE, EYE)
    with pytest.raises(ValueError, match="metric: expected a positive definite"):
        pca_loss_bits(EYE, np.ones((2, 2)))
    with pytest.raises(ValueError, match="basis: expected an invertible matrix"):
        basis_loss_bits(EYE, EYE, np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"bits: expected shape \(d=2\)"):
        coded_distortion(EYE, EYE, EYE, [1])
    with pytest.raises(ValueError, match="bits: expected numbers >= 0"):
        coded_distortion(EYE, EYE, EYE, [1, -1])
    with pytest.raises(ValueError, match="bits: expected at most 1, the table's last level"):
        coded_distortion(EYE, EYE, EYE, [1, 2], law=[1.0, 0.4])
    with pytest.raises(TypeError, match="bits: expected integers for a table"):
        coded_distortion(EYE, EYE, EYE, [0.5, 1], law=[1.0, 0.4])
    with pytest.raises(ValueError, match=r"variances: expected shape \(d=2\)"):
        transform.Transform(EYE, EYE, np.ones(3))
