"""kvtheory.risk against its definitions: by loops over queries, by attention itself, and in closed form."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtheory import attention, distortion, risk
from kvtheory.randomness import generator
from kvtheory.risk import krylov, spectra


def head(seed: int, n: int = 12, m: int = 5, d: int = 4, dv: int = 3, sharp: float = 1.0):
    rng = np.random.default_rng(seed)
    return sharp * rng.standard_normal((m, d)), rng.standard_normal((n, d)), rng.standard_normal((n, dv)) + 0.5


def law(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(n, 0.7)) * 0.9 + 0.1 / n


def attended(q, k, v, w):
    """A of the measure sum_i w_i delta_i, by kvtheory.attention with log-weights ln(n w)."""
    with np.errstate(divide="ignore"):
        bias = np.log(len(w) * np.asarray(w, dtype=float))
    return attention.attend(q[None], k[None], v[None], log_weights=bias[None])[0]


# --- profiles


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.1, 1.0, 8.0]))
@settings(max_examples=25)
def test_profiles_are_their_definition_and_have_barycentre_zero(seed, uniform, sharp):
    q, k, v = head(seed, sharp=sharp)
    p = np.full(12, 1 / 12) if uniform else law(seed, 12)
    o = attended(q, k, v, p)
    for kind, size in (("centred", 3), ("augmented", 4)):
        gamma = risk.response_profiles(q, k, v, None if uniform else p, kind=kind)
        assert gamma.shape == (12, 5, size) and gamma.dtype == np.float64
        np.testing.assert_allclose(np.tensordot(p, gamma, 1), 0, atol=1e-12)
        c = np.sqrt(p @ (v**2).sum(axis=1))
        for j, query in enumerate(q):
            e = np.exp(k @ query / 2)  # scale 1/sqrt(4)
            b = e / (p @ e)
            expected = (
                b[:, None] * (v - o[j]) if kind == "centred" else np.column_stack([b[:, None] * v - o[j], c * (b - 1)])
            )
            np.testing.assert_allclose(gamma[:, j], expected, atol=1e-11)


@given(st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 5.0]))
@settings(max_examples=25)
def test_error_identity_for_any_weights_and_either_profile(seed, sharp):
    q, k, v = head(seed, sharp=sharp)
    p, w = law(seed, 12), law(seed + 1, 12)
    w[::3] = 0
    w /= w.sum()
    error = attended(q, k, v, w) - attended(q, k, v, p)
    mass = w @ risk.density(q, k, p)
    np.testing.assert_allclose(
        np.tensordot(w, risk.response_profiles(q, k, v, p), 1) / mass[:, None], error, atol=1e-11
    )
    plus = np.tensordot(w, risk.response_profiles(q, k, v, p, kind="augmented"), 1)
    c = np.sqrt(p @ (v**2).sum(axis=1))
    # 1 and a sum near -1 cancel where mass is tiny: the sum is known to its terms' size times n 2^-52
    most = 1 + float(mass.max())
    np.testing.assert_allclose(1 + plus[:, -1] / c, mass, rtol=1e-10, atol=12 * 2.0**-51 * most)
    o = attended(q, k, v, p)
    # not divided by the mass, for the same reason
    size = 1 + np.abs(o).max() + np.abs(v).max()
    np.testing.assert_allclose(
        plus[:, :-1] - o * plus[:, -1:] / c, error * mass[:, None], rtol=1e-10, atol=12 * 2.0**-50 * most * size
    )
    kept = np.flatnonzero(w)
    assert risk.attention_risk(q, k, v, kept, w[kept], weights=p) == pytest.approx(
        (error**2).sum(axis=1).mean(), rel=1e-9
    )


def test_profiles_survive_logits_that_overflow_exp():
    q, k, v = head(0, sharp=4000.0)
    assert np.isfinite(risk.response_profiles(q, k, v)).all()


# --- spectrum


@given(
    st.integers(0, 10**6),
    st.sampled_from([(12, 5, 3), (40, 2, 3), (7, 7, 1)]),
    st.sampled_from(["centred", "augmented"]),
    st.booleans(),
)
@settings(max_examples=25)
def test_exact_spectrum_is_that_of_the_weighted_profiles(seed, sizes, kind, uniform):
    n, m, dv = sizes
    q, k, v = head(seed, n=n, m=m, dv=dv)
    p = np.full(n, 1 / n) if uniform else law(seed, n)
    gamma = risk.response_profiles(q, k, v, p, kind=kind)
    singular = np.linalg.svd((np.sqrt(p / m)[:, None, None] * gamma).reshape(n, -1), compute_uv=False)
    for s in (risk.spectrum(q, k, v, p, kind=kind), risk.profile_spectrum(gamma, p)):
        assert s.n == n and len(s.eigenvalues) == len(singular) and s.complete
        np.testing.assert_allclose(s.eigenvalues, singular**2, atol=1e-12 * s.trace)
        assert s.trace == pytest.approx((singular**2).sum(), rel=1e-12)
        for r in range(len(singular) + 2):
            assert s.tail(r) == pytest.approx((singular[r:] ** 2).sum(), abs=1e-12 * s.trace)


def test_trace_is_the_token_factor_of_transform_coding():
    """tr Sigma / n = sum_i a_i^2 ||v_i - o||^2 = D_K at unit logit noise: the two papers measure one object."""
    q, k, v = head(3, m=1)
    unit = np.full(k.shape, 1 / (0.25 * (q**2).sum()))  # scale^2 sum_c q_c^2 sigma^2 = 1
    assert risk.spectrum(q, k, v).trace / 12 == pytest.approx(
        distortion.key_term(q, k, v, np.eye(3), unit)[0], rel=1e-12
    )


@pytest.mark.parametrize("decay", ["steep", "slow", "rank 3"])
def test_leading_spectrum_errs_upwards_and_within_its_error(decay, monkeypatch):
    rng = np.random.default_rng(5)
    n, m, dv = 160, 16, 8
    q, k = rng.standard_normal((m, 4)) * (3 if decay == "steep" else 0.5), rng.standard_normal((n, 4))
    v = (
        rng.standard_normal((n, dv))
        if decay != "rank 3"
        else rng.standard_normal((n, 3)) @ rng.standard_normal((3, dv))
    )
    q = q if decay != "rank 3" else q * 0
    whole = risk.spectrum(q, k, v)
    monkeypatch.setattr(spectra, "LARGEST_GRAM", 10)
    for rank in (1, 3, 10, 30, 120):
        s = risk.spectrum(q, k, v, rank=rank)
        assert not s.complete and len(s.eigenvalues) <= rank
        assert s.trace == pytest.approx(whole.trace, rel=1e-12)
        for r in range(len(s.eigenvalues) + 1):
            above = s.tail(r) - whole.tail(r)
            assert -1e-12 * whole.trace <= above <= s.error + 1e-12 * whole.trace, (decay, rank, r)
        with pytest.raises(ValueError, match="m: expected at most"):
            s.tail(len(s.eigenvalues) + 1)


def test_krylov_is_accurate_where_the_spectrum_decays():
    x = np.random.default_rng(1).standard_normal((200, 90)) * 0.7 ** np.arange(90)
    found = krylov.leading(lambda y: x @ y, lambda y: x.T @ y, x.shape, 10)
    np.testing.assert_allclose(found.eigenvalues, np.linalg.svd(x, compute_uv=False)[:10] ** 2, rtol=1e-10)
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(10), atol=1e-12)


def repeated(n: int, distinct: int, dv: int = 8, seed: int = 0):
    rng = np.random.default_rng(seed)
    i = np.arange(n) % distinct
    return rng.standard_normal((20, 8)), rng.standard_normal((distinct, 8))[i], rng.standard_normal((distinct, dv))[i]


def flat_signs(distinct: int):
    rng = np.random.default_rng(1)
    return (
        rng.standard_normal((200, 8)),
        np.repeat(rng.standard_normal((distinct, 8)), 300 // distinct, axis=0) * (distinct > 1),
        np.sign(rng.standard_normal((300, 1))),
    )


def peaked():
    rng = np.random.default_rng(2)
    return 400 * rng.standard_normal((20, 8)), 40 * rng.standard_normal((300, 8)), rng.standard_normal((300, 8))


def agrees_with_the_exact_spectrum(q, k, v, rank: int) -> None:
    """Eigenvalues never above the true ones, tails never below, and no further above than `error` says."""
    exact, found = risk.spectrum(q, k, v), risk.spectrum(q, k, v, rank=rank)
    room = 1e-11 * exact.trace
    assert len(found.eigenvalues) == min(rank, len(k), len(q) * v.shape[1])
    assert (found.eigenvalues <= exact.eigenvalues[: len(found.eigenvalues)] + room).all()
    for m in range(len(found.eigenvalues) + 1):
        assert -room <= found.tail(m) - exact.tail(m) <= found.error + room, m


@pytest.mark.parametrize(
    "head_of", [lambda: repeated(200, 10), lambda: repeated(300, 5, 20), lambda: flat_signs(1), lambda: flat_signs(4), peaked],
    ids=["10 tokens 20 times", "5 tokens 60 times", "equal keys, dv = 1", "4 keys, dv = 1", "very peaked"],
)  # fmt: skip
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_leading_spectrum_where_the_rank_is_below_the_krylov_basis(head_of, rank):
    q, k, v = head_of()
    assert krylov.columns(rank) < min(len(k), len(q) * v.shape[1])  # the Krylov path
    agrees_with_the_exact_spectrum(q, k, v, rank)


@given(
    st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, 1.0, 30.0]), st.integers(1, 6)
)  # fmt: skip
@settings(max_examples=80)
def test_leading_spectrum_of_anything_small(seed, n, m, dv, sharp, rank):
    q, k, v = head(seed, n=n, m=m, dv=dv, sharp=sharp)
    i = np.random.default_rng(seed).integers(0, n, n)  # some tokens recur
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectra, "LARGEST_GRAM", 0)
        agrees_with_the_exact_spectrum_of_profiles(q, k[i], v[i], rank)


def agrees_with_the_exact_spectrum_of_profiles(q, k, v, rank: int) -> None:
    """The same, with the Gram path closed: against singular values of the profiles."""
    gamma = risk.response_profiles(q, k, v)
    exact = np.linalg.svd((gamma / np.sqrt(len(k) * len(q))).reshape(len(k), -1), compute_uv=False) ** 2
    found = risk.spectrum(q, k, v, rank=rank)
    room = 1e-11 * exact.sum() + 1e-300
    assert (found.eigenvalues <= exact[: len(found.eigenvalues)] + room).all()
    for m in range(len(found.eigenvalues) + 1):
        assert -room <= found.tail(m) - exact[m:].sum() <= found.error + room, m


def hides_from_the_start(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """X whose leading right singular vector is orthogonal to the block that `leading` starts from, and X's singular values."""
    width = 400
    start = generator(0, "risk krylov").standard_normal((width, rank + 8))
    rng = np.random.default_rng(1)
    covered = np.linalg.qr(start)[0]
    v = rng.standard_normal(width)
    for _ in range(2):
        v -= covered @ (covered.T @ v)
    right = np.linalg.qr(np.column_stack([v, rng.standard_normal((width, width - 1))]))[0]
    left = np.linalg.qr(rng.standard_normal((width, width)))[0]
    # the others lie close together, so that rounding is not blown up into the direction that hides
    singular = np.r_[10, rng.uniform(1, 2, width - 1)]
    return (left * singular) @ right.T, np.sort(singular)[::-1]


def test_residuals_are_no_bound_and_what_is_missed_is():
    """Every Ritz value may have an eigenvalue near it and the largest eigenvalue be missing: only the trace tells."""
    x, singular = hides_from_the_start(4)
    found = krylov.leading(lambda y: x @ y, lambda y: x.T @ y, x.shape, 4)
    residual = np.linalg.norm(x @ (x.T @ found.vectors) - found.vectors * found.eigenvalues, 2)
    excess = (singular[:4] ** 2).sum() - found.eigenvalues.sum()
    assert excess > 90 and 4 * residual < 10
    assert excess <= (x**2).sum() - found.captured


def test_spectrum_reports_what_the_krylov_space_misses(monkeypatch):
    x, singular = hides_from_the_start(4)
    # profiles of a flat cache are its centred values: X / sqrt(n)
    monkeypatch.setattr(spectra._Matrix, "forward", lambda self, y: x @ y)
    monkeypatch.setattr(spectra._Matrix, "adjoint", lambda self, y: x.T @ y)
    monkeypatch.setattr(spectra._Matrix, "trace", lambda self: float((x**2).sum()))
    monkeypatch.setattr(spectra, "LARGEST_GRAM", 10)
    s = risk.spectrum(np.zeros((1, 1)), np.zeros((400, 1)), np.zeros((400, 400)), rank=4)
    assert 90 < s.tail(4) - (singular[4:] ** 2).sum() <= s.error


def test_krylov_basis_stays_orthonormal_where_the_space_is_exhausted():
    x = np.repeat(np.random.default_rng(0).standard_normal((10, 160)), 20, axis=0)
    trace = float((x**2).sum())
    found = krylov.leading(lambda y: x @ y, lambda y: x.T @ y, x.shape, 4, trace)
    assert found.captured == pytest.approx(trace, rel=1e-12)
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(4), atol=1e-13)
    np.testing.assert_allclose(found.eigenvalues, np.linalg.eigvalsh(x @ x.T)[::-1][:4], rtol=1e-12)
    nothing = krylov.leading(lambda y: 0 * x @ y, lambda y: 0 * x.T @ y, x.shape, 4, 0.0)
    assert nothing.captured == 0 and nothing.vectors.shape == (200, len(nothing.eigenvalues))
    with pytest.raises(ArithmeticError, match="captured"):
        krylov.leading(lambda y: x @ y, lambda y: x.T @ y, x.shape, 4, trace / 2)


def test_long_caches_need_a_rank_and_then_no_square_matrix(monkeypatch):
    monkeypatch.setattr(spectra, "LARGEST_GRAM", 100)
    monkeypatch.setattr(spectra, "_BLOCK", 1 << 14)
    q, k, v = head(0, n=6000, m=40, dv=4)
    with pytest.raises(ValueError, match="rank: expected a number"):
        risk.spectrum(q, k, v)
    tracemalloc.start()
    s = risk.spectrum(q, k, v, rank=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert s.n == 6000 and peak < 6000 * 8 * 40 * 4 * 1.5 < 6000**2  # never the n x n matrix: 288 MB


# --- risks and bounds


def test_the_whole_cache_has_no_risk_and_repeated_tokens_add_up():
    q, k, v = head(2)
    everything = np.arange(12)
    assert risk.attention_risk(q, k, v, everything, np.full(12, 1 / 12)) < 1e-28
    twice = risk.attention_risk(q, k, v, [1, 4, 1], [0.25, 0.5, 0.25])
    assert twice == pytest.approx(risk.attention_risk(q, k, v, [1, 4], [0.5, 0.5]), rel=1e-12)
    gamma = risk.response_profiles(q, k, v)
    assert risk.linear_risk(gamma, [1, 4, 1], [0.25, 0.5, 0.25]) == pytest.approx(
        risk.linear_risk(gamma, [1, 4], [0.5, 0.5])
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_trace_bound_is_the_mean_over_all_draws(weighted):
    q, k, v = head(7, n=5)
    p = law(7, 5) if weighted else np.full(5, 0.2)
    gamma = risk.response_profiles(q, k, v, p)
    s = risk.spectrum(q, k, v, p)
    mean = sum(
        np.prod(p[list(draw)]) * risk.linear_risk(gamma, draw, np.full(3, 1 / 3))
        for draw in product(range(5), repeat=3)
    )
    assert risk.trace_bound(s, 3) == pytest.approx(mean, rel=1e-12)
    if not weighted:
        mean = np.mean([risk.linear_risk(gamma, kept, np.full(3, 1 / 3)) for kept in combinations(range(5), 3)])
        assert risk.trace_bound(s, 3, replace=False) == pytest.approx(mean, rel=1e-12)
        assert risk.trace_bound(s, 5, replace=False) == 0


def test_bounds_are_their_formulas():
    s = risk.Spectrum(trace=15.0, eigenvalues=np.array([8.0, 4.0, 2.0, 1.0]), n=20, error=0.0)
    assert risk.trace_bound(s, 6) == 2.5
    assert risk.trace_bound(s, 6, replace=False) == pytest.approx(2.5 * 14 / 19)
    assert risk.spectral_bound(s, 7, 2) == 2 * 3 / 3
    assert risk.spectral_bound(s, 7) == min(30 / 7, 14 / 5, 6 / 3, 2 / 1)
    assert risk.spectral_bound(s, 9) == 0  # m = 4: rank exhausted
    assert risk.paper_bound(s, 7) == 3 / 7
    assert risk.cube_bound(s, 7, 2) == 4 * 3 / 5
    leading = risk.Spectrum(trace=16.0, eigenvalues=np.array([8.0, 4.0]), n=20, error=0.5, complete=False)
    assert leading.tail(2) == 4.0 and risk.spectral_bound(leading, 9) == 8 / 5


@given(st.integers(0, 10**6), st.sampled_from([0.3, 2.0, 10.0]), st.integers(2, 5))
@settings(max_examples=30)
def test_safe_bound_holds_for_any_cache(seed, sharp, K):
    q, k, v = head(seed, n=8, sharp=sharp)
    q[0] = 50 * k[0]  # a needle
    subsets = [risk.attention_risk(q, k, v, kept, np.full(K, 1 / K)) for kept in combinations(range(8), K)]
    assert np.mean(subsets) <= risk.safe_bound(q, k, v, K)


@given(st.integers(0, 10**6), st.sampled_from([0.3, 2.0, 10.0]), st.integers(1, 4), st.booleans())
@settings(max_examples=40)
def test_augmented_bound_is_twice_the_second_moment_and_holds_for_any_cache(seed, sharp, K, replace):
    """Every subset, or every draw: 2 E (||N||^2 + B^2 D^2) with N, D from attention itself, and the risk below it."""
    n = 5
    q, k, v = head(seed, n=n, sharp=sharp)
    q[0] = 50 * k[0]  # a needle
    draws = product(range(n), repeat=K) if replace else combinations(range(n), K)
    u = v - v.mean(axis=0)
    b, o = risk.density(q, k), attended(q, k, u, np.full(n, 1 / n))
    moment, true = [], []
    for draw in draws:
        w = np.bincount(draw, minlength=n) / K
        mass, out = w @ b, attended(q, k, u, w)
        N = mass[:, None] * out - o
        moment.append((N**2).sum(axis=1).mean() + (u**2).sum(axis=1).max() * ((mass - 1) ** 2).mean())
        true.append(((out - o) ** 2).sum(axis=1).mean())
    bound = risk.augmented_bound(q, k, v, K, replace=replace)
    assert bound == pytest.approx(2 * np.mean(moment), rel=1e-9, abs=1e-14)
    assert np.mean(true) <= bound * (1 + 1e-12)
    assert bound <= risk.safe_bound(q, k, v, K) * (1 + 1e-12)
    assert risk.augmented_bound(q, k, v + 7.0, K, replace=replace) == pytest.approx(bound, rel=1e-9)


def test_augmented_bound_needs_its_2():
    for n, density, least in ((3, Fraction(1281, 1000), 1.39), (20, Fraction(1027, 1000), 1.92)):
        instance = risk.dissenter(n, density)
        true, trace = risk.dissenter_risk(n, density)
        assert isinstance(true, Fraction) and isinstance(trace, Fraction) and least < true / trace < 2
        mean = np.mean([risk.attention_risk(*instance, [i], [1.0], 1.0) for i in range(n)])
        assert mean == pytest.approx(float(true), rel=1e-12)
        assert risk.augmented_bound(*instance, 1, 1.0, replace=False) == pytest.approx(2 * float(trace), rel=1e-11)
    # and with the root mean square for c, constant 1 fails on two tokens already: 13/50 against 9/50
    q, k, v = np.ones((1, 1)), np.log([[0.4], [0.6]]), np.array([[1.0], [0.0]])
    s = risk.spectrum(q, k, v, scale=1.0, kind="augmented")
    assert risk.trace_bound(s, 1, replace=False) == pytest.approx(9 / 50, rel=1e-12)
    assert np.mean([risk.attention_risk(q, k, v, [i], [1.0], 1.0) for i in (0, 1)]) == pytest.approx(13 / 50, rel=1e-12)


def test_safe_bound_needs_its_4():
    # small enough to enumerate, by multisets
    n, K, mass = 4, 5, 0.3
    instance = risk.faint_needle(n, mass)
    risks = {
        tuple(sorted(d)): risk.attention_risk(*instance, sorted(d), np.full(K, 1 / K), 1.0) for d in product(range(n), repeat=K)
    }  # fmt: skip
    mean = np.mean([risks[tuple(sorted(d))] for d in product(range(n), repeat=K)])
    assert risk.faint_needle_risk(n, mass, K) == pytest.approx(mean, rel=1e-9)
    instance = risk.faint_needle(10000, 0.05)
    assert 0.8 < risk.faint_needle_risk(10000, 0.05, 40000) / risk.safe_bound(*instance, 40000, 1.0) < 1


def test_linear_risk_is_not_the_risk_of_a_needle():
    """C-T6: where one query's mass sits on one token the centred trace vanishes and the risk of sampling does not."""
    instance = risk.lookup(64, 0.9997)
    s = risk.spectrum(*instance)
    assert risk.attention_risk(*instance, np.arange(16), np.full(16, 1 / 16)) > 100 * risk.trace_bound(s, 16)


# --- instances


@pytest.mark.parametrize("mass", [Fraction(1, 2), Fraction(9, 10), Fraction(1, 50)])
def test_lookup_closed_forms(mass):
    n, K = 20, 6
    instance = risk.lookup(n, float(mass))
    a = attention.weights(instance.q, instance.k, n**-0.5)
    np.testing.assert_allclose(np.diag(a), float(mass), rtol=1e-12)
    trace, mean = risk.lookup_trace(n, mass), risk.lookup_sampling_risk(n, mass, K)
    assert isinstance(trace, Fraction) and isinstance(mean, Fraction)
    assert risk.spectrum(*instance).trace == pytest.approx(float(trace), rel=1e-11)
    for seed in range(3):
        kept = np.random.default_rng(seed).choice(n, K, replace=False)
        assert risk.attention_risk(*instance, kept, np.full(K, 1 / K)) == pytest.approx(float(mean), rel=1e-11)


def test_search_floor_holds_for_own_tokens_and_not_for_made_up_ones():
    assert risk.search_floor(64, 16, Fraction(1, 2)) == Fraction(3, 16) and risk.search_floor(8, 8) == 0
    instance = risk.lookup(16, 0.5)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        K = int(rng.integers(1, 16))
        kept, weight = rng.choice(16, K, replace=False), rng.dirichlet(np.full(K, 0.3))
        assert risk.attention_risk(*instance, kept, weight) >= risk.search_floor(16, K)
    q, k, v = risk.lookup(16, 0.5, value_dim=2, seed=1)
    o = attended(q, k, v, np.full(16, 1 / 16))
    keys, values = risk.summary_by_synthetic_tokens(q, o, 0.25)
    assert len(keys) == 4
    np.testing.assert_allclose(attended(q, keys, values, np.full(4, 0.25)), o, atol=1e-12)
    with pytest.raises(ValueError, match="linearly independent"):
        risk.summary_by_synthetic_tokens(np.ones((2, 3)), np.zeros((2, 1)), 1.0)


def test_lookup_with_signs_and_hidden_queries():
    instance, hidden = risk.hidden_lookup(32, 8, mass=0.75, value_dim=4, seed=3)
    assert instance.q.shape == (8, 32) and instance.v.shape == (32, 4)
    np.testing.assert_allclose((instance.v**2).sum(axis=1), 1)
    a = attention.weights(instance.q, instance.k, 32**-0.5)
    np.testing.assert_allclose(a[np.arange(8), hidden], 0.75, rtol=1e-12)


def test_flat_cache_has_the_given_profiles_and_no_denominator():
    x = np.random.default_rng(0).standard_normal((9, 4))
    instance = risk.flat_cache(x)
    np.testing.assert_allclose(risk.response_profiles(*instance)[:, 0], x - x.mean(axis=0), atol=1e-14)
    assert risk.attention_risk(*instance, [2, 5], [0.3, 0.7]) == pytest.approx(
        risk.linear_risk(risk.response_profiles(*instance), [2, 5], [0.3, 0.7]), rel=1e-12
    )


@pytest.mark.parametrize("m", [2, 4, 6])
def test_the_leading_directions_of_the_block_instances_are_the_features(m):
    for instance in (risk.coherent_block(m, 5), risk.opposed_pairs(m, 12)):
        n = len(instance.v)
        values = instance.v
        np.testing.assert_allclose(values[:, :m].T @ values[:, m:], 0, atol=1e-10)  # features and tail are uncorrelated
        assert risk.spectrum(*instance).tail(m) == pytest.approx((values[:, m:] ** 2).sum() / n, rel=1e-10)


# --- refusals


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(q=np.zeros((5, 3))), r"k: expected shape \(n, d=3\), got \(12, 4\)"),
        (dict(v=np.zeros((11, 3))), r"v: expected shape \(n=12, dv\), got \(11, 3\)"),
        (dict(k=np.zeros((0, 4)), v=np.zeros((0, 3))), "k: expected n >= 1, got 0"),
        (dict(v=np.full((12, 3), np.nan)), "v: expected finite numbers, got nan"),
        (dict(scale=-1.0), "scale: expected a finite number above 0"),
        (dict(weights=np.full(12, 0.1)), "weights: expected probabilities that sum to 1"),
        (dict(weights=np.r_[0, np.full(11, 1 / 11)]), "weights: expected probabilities above 0"),
        (dict(weights=np.full(3, 1 / 3)), r"weights: expected shape \(n=12\), got \(3,\)"),
        (dict(kind="middle"), 'kind: expected "centred" or "augmented", got \'middle\''),
    ],
)
def test_profiles_and_spectrum_say_what_is_wrong(change, match):
    q, k, v = head(0)
    for function in (risk.response_profiles, risk.spectrum):
        with pytest.raises(ValueError, match=match):
            function(**(dict(q=q, k=k, v=v) | change))


def test_other_refusals():
    q, k, v = head(0)
    s = risk.spectrum(q, k, v)
    for call, match in (
        (lambda: risk.spectrum(q, k, v, rank=0), "rank: expected an int >= 1"),
        (lambda: s.tail(-1), "m: expected an int >= 0"),
        (lambda: risk.trace_bound(s, 0), "K: expected an int >= 1"),
        (lambda: risk.trace_bound(s, 13, replace=False), "K: expected at most n = 12"),
        (lambda: risk.augmented_bound(q, k, v, 13, replace=False), "K: expected at most n = 12 without replacement"),
        (lambda: risk.augmented_bound(q, k, v, 0), "K: expected an int >= 1"),
        (lambda: risk.dissenter(3, 1.5), "n, density: expected n >= 2 and 0 < density"),
        (lambda: risk.faint_needle(5, 0.1), "n, mass: expected an even n >= 4"),
        (lambda: risk.spectral_bound(s, 6, 3), "m: expected an int with 0 <= 2 m < K = 6"),
        (lambda: risk.cube_bound(s, 6, 6), "m: expected an int with 0 <= m < K = 6"),
        (lambda: risk.attention_risk(q, k, v, [12], [1.0]), r"index: expected tokens in 0\.\.11"),
        (lambda: risk.attention_risk(q, k, v, [], []), "index"),
        (lambda: risk.attention_risk(q, k, v, [1, 2], [0.5, 0.6]), "weight: expected numbers >= 0 that sum to 1"),
        (lambda: risk.attention_risk(q, k, v, [1, 2], [1.5, -0.5]), "weight: expected numbers >= 0"),
        (lambda: risk.search_floor(4, 5), "K: expected at most n = 4"),
        (lambda: risk.search_floor(4, 2, 1.5), "mass: expected a number between 0 and 1"),
        (lambda: risk.lookup(10, 1.0), "mass: expected a number between 0 and 1"),
        (lambda: risk.coherent_block(3, 2), "m, copies: expected an even m"),
        (lambda: risk.opposed_pairs(3, 3), "m, pairs"),
        (lambda: risk.hidden_lookup(10, 11), "hidden: expected 1 <= hidden <= n = 10"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            call()


# --- windows of the spectral walk, and coordinates of long caches


@given(st.integers(1, 400), st.data())
def test_best_window_is_the_best_and_below_its_closed_form(K, data):
    """s / ((s - m - 1)(K - s + 2)) over whole s, against all of them; real s give 1 / (sqrt(K + 2) - sqrt(m + 1))^2."""
    m = data.draw(st.integers(0, K - 1))
    s = risk.Spectrum(trace=2.0, eigenvalues=np.full(K + 1, 2.0 / (K + 1)), n=K + 1, error=0.0)
    every = {w: risk.spectral_bound(s, K, m, window=w) for w in range(m + 2, K + 2)}
    best = risk.spectral_window(K, m)
    assert every[best] == pytest.approx(min(every.values()), rel=1e-12)
    continuous = s.tail(m) / (np.sqrt(K + 2) - np.sqrt(m + 1)) ** 2
    assert continuous <= every[best] * (1 + 1e-12)
    assert every[m + 2] == pytest.approx(risk.cube_bound(s, K, m), rel=1e-12)
    if 2 * m < K:
        assert every[2 * m + 2] == pytest.approx(risk.spectral_bound(s, K, m), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(m=None, window=4), "m: expected an int where a window is given"),
        (dict(m=2, window=3), "window: expected an int with m \\+ 1 = 3 < window <= K \\+ 1 = 11, got 3"),
        (dict(m=2, window=12), "window: expected an int"),
        (dict(m=10, window=11), "m: expected an int with 0 <= m < K = 10, got 10"),
        (dict(m=2, window=5.0), "window: expected an int"),
    ],
)
def test_windows_that_do_not_fit_are_refused(arguments, match):
    s = risk.Spectrum(trace=2.0, eigenvalues=np.full(20, 0.1), n=20, error=0.0)
    with pytest.raises(ValueError, match=match):
        risk.spectral_bound(s, 10, **arguments)


@given(
    st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 6), st.integers(1, 4), st.integers(1, 30),
    st.sampled_from(["centred", "augmented"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_features_are_coordinates_of_the_profiles(seed, n, m, dv, rank, kind, uniform):
    """Inner products of one projection, and norms with what is missing; in H_nu, that is with the 1/m of the mean over queries."""
    q, k, v = head(seed, n=n, m=m, dv=dv)
    p = np.full(n, 1 / n) if uniform else law(seed, n)
    gamma = risk.response_profiles(q, k, v, p, kind=kind).reshape(n, -1) / np.sqrt(m)
    found = risk.profile_features(q, k, v, rank, p, kind=kind)
    size = (gamma**2).sum(axis=1)
    assert found.coordinates.shape == (n, min(rank, found.coordinates.shape[1])) and found.missing.shape == (n,)
    np.testing.assert_allclose((found.coordinates**2).sum(axis=1) + found.missing, size, atol=1e-11 * size.max())
    left = gamma @ gamma.T - found.coordinates @ found.coordinates.T
    # what is left is the Gram matrix of what a projection leaves, so positive, and its diagonal is `missing`
    assert np.linalg.eigvalsh(left).min() >= -1e-10 * size.sum()
    np.testing.assert_allclose(np.diag(left), found.missing, atol=1e-11 * size.max())
    if rank >= gamma.shape[1]:
        np.testing.assert_allclose(left, 0, atol=1e-11 * size.max())


def test_features_take_the_leading_directions():
    q, k, v = head(4, n=900, m=24, dv=8)
    gamma = risk.response_profiles(q, k, v).reshape(900, -1)
    found = risk.profile_features(q, k, v, 6)
    exact = risk.spectrum(q, k, v)
    assert gamma.shape[1] > krylov.columns(6)  # the Krylov path
    assert (found.coordinates**2).sum() / 900 == pytest.approx(exact.eigenvalues[:6].sum(), rel=1e-3)
    assert found.missing.mean() == pytest.approx(exact.tail(6), rel=1e-2)


def test_symmetric_krylov_agrees_with_the_two_sided_one():
    x = np.random.default_rng(1).standard_normal((400, 90)) * 0.8 ** np.arange(90)
    trace = float((x**2).sum())
    one = krylov.leading(lambda y: x @ y, lambda y: x.T @ y, x.shape, 10, trace)
    other = krylov.symmetric(lambda y: x.T @ (x @ y), 90, 10, trace)
    exact = np.linalg.svd(x)[1][:10] ** 2
    np.testing.assert_allclose(other.eigenvalues, exact, rtol=1e-10)
    np.testing.assert_allclose(one.eigenvalues, exact, rtol=1e-9)
    np.testing.assert_allclose(other.vectors.T @ other.vectors, np.eye(10), atol=1e-12)
    with pytest.raises(ArithmeticError, match="captured"):
        krylov.symmetric(lambda y: x.T @ (x @ y), 90, 10, trace / 2)
