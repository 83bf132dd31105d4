"""kvtheory.distortion.jensen: the mass of exact tokens beside noisy ones, and the sign of its correction, by Monte Carlo.

Means over independent draws; a difference counts where it exceeds 5 standard errors (one side, 3e-7 if normal), and equality is
claimed only within a stated margin.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory import rate
from kvtheory.distortion import exact_mass, logit_correction, logit_variance
from kvtheory.quantization import Gaussian
from kvtheory.randomness import generator

masses, variances = st.floats(1e-12, 1 - 1e-12), st.floats(0, 60)


def mean(x):
    """(mean, 5 standard errors) of independent draws."""
    return float(x.mean()), 5 * float(x.std(ddof=1)) / np.sqrt(len(x))


class TestFormulas:
    @given(masses, variances)
    def test_definition(self, m, s2):
        assert exact_mass(m, s2) == pytest.approx(m / (m + (1 - m) * np.exp(s2 / 2)), rel=1e-9)
        assert exact_mass(m, s2, "centroid") == pytest.approx(m / (m + (1 - m) * np.exp(-s2 / 2)), rel=1e-9)

    @given(masses, variances, variances)
    def test_variances_add_and_the_two_kinds_are_inverse(self, m, s2, t2):
        for noise in ("dither", "centroid"):
            once, between = exact_mass(m, s2 + t2, noise), exact_mass(m, s2, noise)
            if 0 < between < 1:
                # rounding the mass in between moves its logit by eps / (mass (1 - mass)), and so the result
                moved = 4 * np.finfo(np.float64).eps * (1 + once * (1 - once) / (between * (1 - between)))
                assert exact_mass(between, t2, noise) == pytest.approx(once, abs=moved, rel=1e-13)
        if (there := exact_mass(m, s2)) > 1e-300:
            assert exact_mass(there, s2, "centroid") == pytest.approx(m, rel=1e-9)

    @given(masses, variances, st.sampled_from(["dither", "centroid"]))
    def test_the_correction_undoes_the_bias(self, m, s2, noise):
        """Noisy tokens of one logit: e^{correction} on their weight restores m."""
        biased = exact_mass(m, s2, noise)
        # odds of noisy to exact
        odds = (1 - m) / m * np.exp(0.5 * s2 * (1 if noise == "dither" else -1))
        assert biased == pytest.approx(1 / (1 + odds), rel=1e-9)
        assert 1 / (1 + odds * np.exp(logit_correction(s2, noise))) == pytest.approx(m, rel=1e-9)

    def test_limits(self):
        for noise in ("dither", "centroid"):
            assert exact_mass([0.0, 1.0], 3.0, noise).tolist() == [0.0, 1.0]
            assert exact_mass(0.3, 0.0, noise) == pytest.approx(0.3, rel=1e-15)
        assert exact_mass(0.5, 4000.0) == 0 and exact_mass(0.5, 4000.0, "centroid") == 1
        assert logit_correction([0.0, 2.0]).tolist() == [0.0, -1.0] and logit_correction(2.0, "centroid") == 1

    def test_refusals(self):
        with pytest.raises(ValueError, match="mass: expected numbers in"):
            exact_mass(1.5, 1.0)
        with pytest.raises(ValueError, match="logit_variance: expected numbers >= 0, got -1"):
            logit_correction(-1.0)
        with pytest.raises(ValueError, match="logit_variance: expected finite"):
            exact_mass(0.5, np.inf)
        with pytest.raises(ValueError, match='noise: expected "dither" or "centroid", got \'rounding\''):
            logit_correction(1.0, "rounding")


class TestLogitVariance:
    @given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([None, 0.3]), st.integers(0, 2**32))
    def test_definition(self, m, n, d, scale, seed):
        rng = generator(seed, "logit variance")
        q, roots = rng.standard_normal((m, d)), rng.standard_normal((n, d, d))
        sigma = roots @ roots.transpose(0, 2, 1)
        got = logit_variance(q, sigma, scale)
        used = d**-0.5 if scale is None else scale
        assert got.shape == (m, n)
        for j, i in np.ndindex(m, n):
            # the variance of scale q.e for e = root z, z white
            assert got[j, i] == pytest.approx(used**2 * ((q[j] @ roots[i]) ** 2).sum(), rel=1e-9)
        np.testing.assert_allclose(logit_variance(q, sigma[0], scale), got[:, 0], rtol=1e-12)

    def test_singular_covariance_is_no_negative_variance(self):
        q = np.array([[1.0, -1.0], [1.0, 1.0]])
        root = np.array([[1 / 3], [1 / 3]])
        got = logit_variance(q, root @ root.T, 1.0)
        assert got[0] >= 0 and got == pytest.approx([0, 4 / 9], abs=1e-16)

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"covariance: expected shape \(d=2, d=2\), got \(3, 3\)"):
            logit_variance(np.ones((1, 2)), np.eye(3))
        with pytest.raises(ValueError, match=r"covariance: expected shape \(n, d=2, d=2\)"):
            logit_variance(np.ones((1, 2)), np.ones((4, 2, 3)))
        with pytest.raises(ValueError, match="covariance: expected positive semi-definite matrices"):
            logit_variance(np.ones((1, 2)), -np.eye(2))
        with pytest.raises(ValueError, match="covariance: expected finite"):
            logit_variance(np.ones((1, 2)), np.diag([1.0, np.nan]))
        with pytest.raises(ValueError, match="d >= 1"):
            logit_variance(np.ones((1, 0)), np.ones((0, 0)))


def mass_of_exact(exact, noisy):
    """(draws,) mass of the exact logits (n,) beside noisy ones (draws, n')."""
    held = np.exp(exact).sum()
    return held / (held + np.exp(noisy).sum(axis=-1))


@pytest.mark.parametrize("s", [0.3, 0.6, 1.0, 1.5])
def test_independent_gaussian_noise(s):
    """Dither: the mean mass is at least the formula's and near it; -s^2/2 leaves a small rest above the true mass."""
    rng = generator(0, "independent noise")
    z, exact = rng.standard_normal(300), 1.5 + rng.standard_normal(24)
    noisy = z + s * rng.standard_normal((4000, 300))
    m = mass_of_exact(exact, z)
    predicted = exact_mass(m, s**2)
    seen, error = mean(mass_of_exact(exact, noisy))
    assert seen > predicted - error
    corrected, rest_error = mean(mass_of_exact(exact, noisy + logit_correction(s**2)))
    # the rest of Jensen's inequality: 1/(M + N) to second order in N, for both
    sizes = np.exp(z - np.log(np.exp(z).sum()))
    spread = np.expm1(s**2) * (sizes**2).sum()
    for found, expected, margin in ((seen, predicted, error), (corrected, m, rest_error)):
        rest = expected * (1 - expected) ** 2 * spread
        assert -margin < found - expected < 1.5 * rest + margin
    assert corrected > m - rest_error
    # the bias is there, and the wrong sign doubles it
    assert m - seen > error + 0.5 * (m - predicted)
    wrong, wrong_error = mean(mass_of_exact(exact, noisy + logit_correction(s**2, "centroid")))
    assert wrong < seen - error - wrong_error


def test_jensen_holds_whatever_the_joint_law():
    """The same noise on all noisy tokens: still no less than the formula, and far above it."""
    rng = generator(1, "shared noise")
    z, exact = rng.standard_normal(50), np.array([3.0, 2.0])
    m = mass_of_exact(exact, z)
    seen, error = mean(mass_of_exact(exact, z + 2.0 * rng.standard_normal((20000, 1))))
    assert seen - error > exact_mass(m, 4.0) + 0.05
    assert abs(m - 0.3) < 0.2


@pytest.mark.parametrize("s", [0.3, 1.0])
def test_gaussian_centroids(s):
    """The backward channel z = z_hat + eps: for each stored cache, the corrected mass is at most the mean true mass, and near it."""
    rng = generator(2, "centroids")
    stored, exact = rng.standard_normal(300), 1.5 + rng.standard_normal(24)
    true, error = mean(mass_of_exact(exact, stored + s * rng.standard_normal((4000, 300))))
    plain = float(mass_of_exact(exact, stored))
    corrected = float(mass_of_exact(exact, stored + logit_correction(s**2, "centroid")))
    assert corrected < true + error
    sizes = np.exp(stored - np.log(np.exp(stored).sum()))
    assert true - corrected < 1.5 * corrected * np.expm1(s**2) * (sizes**2).sum() + error
    # exact tokens had gained, and the formula says how much
    assert plain > true + error
    assert exact_mass(corrected, s**2, "centroid") == pytest.approx(plain, rel=1e-12)
    assert mass_of_exact(exact, stored + logit_correction(s**2, "dither")) > plain + error


@pytest.fixture(scope="module")
def caches():
    """Mass of the 16 exact keys of 1500 independent Gaussian caches of 512: true, and with 2-bit Lloyd-Max or dithered keys of equal error.

    Columns: exact, then each quantiser's plain, +s^2/2, -s^2/2.
    """
    rng = generator(3, "caches")
    d, n, kept, scale = 64, 512, 16, 1.5 / 8
    law = Gaussian()
    code = rate.lloyd_max(law, 4)
    error = code.distortion(law)
    step = np.sqrt(12 * error)
    rows = []
    for _ in range(1500):
        q, k = rng.standard_normal(d), rng.standard_normal((n, d))
        u = step * rng.uniform(-0.5, 0.5, k.shape)
        s2 = logit_variance(q[None], error * np.eye(d), scale)[0]
        row = [mass_of_exact(scale * (k[:kept] @ q), scale * (k[kept:] @ q))]
        for k_hat in (code.decode(code.encode(k)), step * np.rint((k + u) / step) - u):
            z = scale * (k_hat[kept:] @ q)
            row += [mass_of_exact(scale * (k[:kept] @ q), z + c) for c in (0, s2 / 2, -s2 / 2)]
        rows.append(row)
    return np.array(rows)


def test_real_quantisers_have_the_signs_of_their_kind(caches):
    """2-bit Lloyd-Max keys: exact tokens gain, +s^2/2 repairs it. Subtractive dither: they lose, -s^2/2 repairs it. Never the other."""
    true = caches[:, 0]
    bias = {name: mean(caches[:, c] - true) for c, name in enumerate(["", "L", "L+", "L-", "D", "D+", "D-"]) if name}
    assert bias["L"][0] > bias["L"][1] and bias["D"][0] < -bias["D"][1]
    for plain, right, wrong in (("L", "L+", "L-"), ("D", "D-", "D+")):
        (b, _), (r, margin), (w, w_margin) = bias[plain], bias[right], bias[wrong]
        assert abs(r) + margin < 0.3 * abs(b)
        assert abs(w) - w_margin > 1.5 * abs(b)
        assert np.sign(w) == np.sign(b)
