"""Query laws, feature maps, accumulation in trees, selection: against enumeration, closed forms and attention itself."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kvtheory import risk, statistics, synthetic
from kvtheory.layer import Rope
from kvtheory.risk import laws, maps


@pytest.fixture(scope="module")
def head():
    return synthetic.make("gaussian", kv_heads=1, query_heads=1, tokens=40, head_dim=8, value_dim=5, queries=12).head(0)


def test_held_out_parts_the_queries_in_blocks():
    q = np.arange(20.0).reshape(10, 2)
    choose, test = laws.held_out(q, block=3)
    np.testing.assert_array_equal(choose, q[[0, 1, 2, 6, 7, 8]])
    np.testing.assert_array_equal(test, q[[3, 4, 5, 9]])
    with pytest.raises(ValueError, match="more than block = 10 queries, got 10"):
        laws.held_out(q, block=10)


def test_recent_window_turns_queries_behind_the_tokens():
    rope = Rope(np.array([1.0, 0.3]))
    rng = np.random.default_rng(0)
    plain, where = rng.standard_normal((6, 4)), np.array([9, 2, 5, 7, 30, 4])
    found = laws.recent_window(rope.apply(plain, where), where, 3, after=9, rope=rope)
    # positions 5, 7, 9 are asked again from 10 on
    np.testing.assert_allclose(found, rope.apply(plain[[2, 3, 0]], [10, 12, 14]), atol=1e-12)
    np.testing.assert_array_equal(laws.recent_window(plain, where, 2, 9, None), plain[[3, 0]])
    assert len(laws.recent_window(plain, where, 50, 9, None)) == 5
    with pytest.raises(ValueError, match="after: expected a query at or before it, got 1, the first is at 2"):
        laws.recent_window(plain, where, 2, 1, None)
    with pytest.raises(TypeError, match="positions: expected integers"):
        laws.recent_window(plain, where.astype(float), 2, 9, None)


def test_gaussian_laws_have_their_moments():
    q = np.random.default_rng(1).standard_normal((30, 3)) @ np.diag([3.0, 1, 0.1]) + [1, 2, 3]
    fit, flat = laws.gaussian_fit(q, 40000, seed=3), laws.isotropic(q, 40000, seed=3)
    np.testing.assert_allclose(fit.mean(axis=0), q.mean(axis=0), atol=0.1)
    np.testing.assert_allclose(np.cov(fit.T, bias=True), np.cov(q.T, bias=True), atol=0.4)
    np.testing.assert_allclose(np.cov(flat.T), (q**2).sum(axis=1).mean() / 3 * np.eye(3), atol=0.3)
    np.testing.assert_array_equal(laws.gaussian_fit(q, 5, seed=1), laws.gaussian_fit(q, 5, seed=1))
    assert (laws.gaussian_fit(q, 5, seed=1) != laws.gaussian_fit(q, 5, seed=2)).any()


def test_a_mixture_draws_from_its_laws_by_their_shares():
    a, b = np.zeros((3, 2)), np.ones((7, 2))
    drawn = laws.mixture([a, b], [0.25, 0.75], 4000)
    assert abs(drawn[:, 0].mean() - 0.75) < 0.04 and set(np.unique(drawn)) == {0, 1}
    np.testing.assert_array_equal(laws.mixture([a, b], [0, 1], 10), np.ones((10, 2)))
    with pytest.raises(ValueError, match="shares: expected numbers >= 0 of sum 1"):
        laws.mixture([a, b], [0.5, 0.6], 10)
    with pytest.raises(ValueError, match=r"laws\[1\]: expected shape \(m, d=2\)"):
        laws.mixture([a, np.ones((7, 3))], [0.5, 0.5], 10)


@pytest.mark.parametrize("call", [laws.gaussian_fit, laws.isotropic])
def test_laws_refuse_nan_nothing_and_no_count(call):
    with pytest.raises(ValueError, match="q: expected finite"):
        call(np.array([[np.nan, 1]]), 3)
    with pytest.raises(ValueError, match="q: expected at least one query"):
        call(np.zeros((0, 2)), 3)
    with pytest.raises(ValueError, match="count: expected an int >= 1, got 0"):
        call(np.ones((2, 2)), 0)


@pytest.mark.parametrize("kind", ["centred", "augmented"])
def test_the_gram_matrix_is_that_of_the_profiles(head, kind):
    x = risk.response_profiles(head.q, head.k, head.v, None, head.scale, kind).reshape(40, -1)
    g = risk.profile_gram(head.q, head.k, head.v, head.scale, kind)
    np.testing.assert_allclose(g, x @ x.T / len(head.q), atol=1e-12 * np.abs(g).max())
    np.testing.assert_allclose(risk.token_energy(head.q, head.k, head.v, head.scale, kind), np.diag(g) / 40, rtol=1e-10)
    trace = risk.spectrum(head.q, head.k, head.v, None, head.scale, kind).trace
    assert risk.token_energy(head.q, head.k, head.v, head.scale, kind).sum() == pytest.approx(trace)


def test_held_energy_of_the_leading_directions_is_what_the_tail_leaves(head):
    g = risk.profile_gram(head.q, head.k, head.v, head.scale)
    s = risk.spectrum(head.q, head.k, head.v, None, head.scale)
    for f in (1, 4, 9):
        assert risk.held_energy(g, maps.profile_map(g, f)) == pytest.approx(1 - s.tail(f) / s.trace)
    assert risk.held_energy(g, np.eye(40)) == pytest.approx(1)
    phi = np.random.default_rng(0).standard_normal((40, 6))
    assert risk.held_energy(g, phi) == pytest.approx(
        risk.held_energy(g, phi @ np.random.default_rng(1).standard_normal((6, 6)) + 2)
    )
    # a column twice holds no more
    assert risk.held_energy(g, np.hstack([phi, phi])) == pytest.approx(risk.held_energy(g, phi))
    assert risk.protected_bound(g, maps.profile_map(g, 3), 12) == pytest.approx(risk.spectral_bound(s, 12, 3))
    with pytest.raises(ValueError, match="K: expected an int above 2 f = 12, got 12"):
        risk.protected_bound(g, phi, 12)
    with pytest.raises(ValueError, match="trace above 0"):
        risk.held_energy(np.zeros((3, 3)), np.ones((3, 1)))


def test_feature_maps_span_what_they_say(head):
    k, v = head.k, head.v
    span = np.linalg.qr(np.column_stack([np.ones(40), k]))[0]
    phi = maps.keys_pca(k, 8)
    np.testing.assert_allclose(span @ (span.T @ phi), phi, atol=1e-10)
    span = np.linalg.qr(np.column_stack([np.ones(40), k, v]))[0]
    phi = maps.linear_map(k, v, 100)
    assert phi.shape == (40, 13)
    np.testing.assert_allclose(span @ (span.T @ phi), phi, atol=1e-10)
    # 1 + 13 + 13 * 14 / 2 monomials of degree 2 at most: all of R^40
    assert maps.quadratic_map(k, v, 20).shape == (40, 20)


def test_random_features_tend_to_the_exponential_kernel(head):
    k, v = 0.5 * head.k, head.v
    exact, sampled = (maps.kernel_map(k, v, 1, features, size=1.0) for features in (0, 20000))
    assert abs(float(exact[:, 0] @ sampled[:, 0])) > 0.95


def test_effective_rank():
    one = risk.flat_cache(np.eye(9))
    assert risk.effective_rank(risk.spectrum(*one)) == pytest.approx(8)
    with pytest.raises(ValueError, match="expected all eigenvalues"):
        risk.effective_rank(risk.Spectrum(1.0, np.ones(1), 3, 0.0, complete=False))


def test_errors_add_up_geometrically_or_with_the_depth():
    assert risk.accumulated_risk([Fraction(1)] * 8) == 2 - Fraction(1, 128)
    assert risk.accumulated_risk([4, 0, 0]) == 1 and risk.accumulated_risk([0, 0, 4]) == 4
    assert risk.accumulated_bias([1] * 8) == 64 and risk.accumulated_bias([4, 9]) == 25
    values = risk.staircase(5)
    for size in (2, 4, 8, 16, 32):
        halves = values.reshape(-1, 2, size // 2).max(axis=2)
        assert (halves[:, 0] - halves[:, 1] == 2).all()
    for wrong in ([], [-1.0], [float("nan")]):
        with pytest.raises(ValueError, match="V: expected"):
            risk.accumulated_risk(wrong)
    with pytest.raises(ValueError, match="L: expected an int from 0 to 20, got 21"):
        risk.staircase(21)


def test_a_selection_stays_below_its_bound_and_refit_weights_are_optimal(head):
    q, k, v, scale = head.q, head.k, head.v, head.scale
    rng = np.random.default_rng(0)
    for size in (3, 10, 30):
        kept = np.sort(rng.choice(40, size, replace=False))
        assert risk.attention_risk(q, k, v, kept, np.full(size, 1 / size), scale) <= risk.selection_bound(
            q, k, v, kept, scale
        )
    kept = np.arange(12)
    w = risk.refit_weights(q, k, v, kept, scale, ridge=1e-6)
    assert (w >= 0).all() and w.sum() == pytest.approx(1)

    def objective(w: np.ndarray) -> float:
        """Least over the free total: numerator and denominator, by their definitions."""
        b = risk.density(q, k, scale=scale)
        o = b.T @ v / 40
        numerator = np.einsum("i,ij,ijc->jc", w, b[kept], v[kept][:, None] - o)
        denominator = w @ b[kept]
        c2 = (v**2).sum(axis=1).mean()
        x = np.hstack([numerator, np.sqrt(c2) * denominator[:, None]]).ravel()
        aim = np.hstack([np.zeros_like(numerator), np.full((len(q), 1), np.sqrt(c2))]).ravel()
        return float(((x * (x @ aim) / (x @ x) - aim) ** 2).sum())

    least = objective(w)
    for _ in range(200):
        other = np.maximum(w + 0.02 * rng.standard_normal(12), 0)
        assert objective(other) >= least * (1 - 1e-4)
    with pytest.raises(ValueError, match="index: expected different tokens in 0"):
        risk.selection_bound(q, k, v, np.array([1, 1]))
    with pytest.raises(TypeError, match="index: expected integers"):
        risk.refit_weights(q, k, v, np.array([0.5]))


def test_exact_paired_p_values():
    from scipy.stats import binomtest

    for b in range(6):
        for c in range(6):
            expected = binomtest(b, b + c).pvalue if b + c else 1.0
            assert float(statistics.paired_p_value(b, c)) == pytest.approx(expected)
    assert statistics.paired_p_range(40, 37, 108)[0] == Fraction(1, 4)
    # 3 and 1 of 4: both are right on 1 or on 0 of them
    assert statistics.paired_p_range(3, 1, 4) == (Fraction(1, 2), Fraction(5, 8))
    with pytest.raises(ValueError, match="second: expected an int from 0 to trials = 3, got 4"):
        statistics.paired_p_range(1, 4, 3)
