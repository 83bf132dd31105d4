"""Exact small minimax and floors: against brute force, against another solver (cvxpy), against attention, and at the edges."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtheory import attention, risk


def head(seed: int, n: int = 7, m: int = 4, d: int = 5, dv: int = 3, sharp: float = 1.0):
    rng = np.random.default_rng(seed)
    return sharp * rng.standard_normal((m, d)), rng.standard_normal((n, d)), rng.standard_normal((n, dv)) + 0.3


def risks_of(gamma, w, law=None):
    """Linear risks of summaries w (r, n), by the definition."""
    squares = (np.tensordot(w, gamma, 1) ** 2).sum(axis=2)
    return squares.mean(axis=1) if law is None else squares @ law


def random_summaries(rng, n, K, tries=4000):
    w = np.zeros((tries, n))
    kept = rng.permuted(np.tile(np.arange(n), (tries, 1)), axis=1)[:, :K]
    np.put_along_axis(w, kept, rng.dirichlet(np.full(K, 0.6), tries), axis=1)
    return w


def subsets(n, K):
    return np.stack([np.isin(np.arange(n), S) / len(S) for s in range(1, K + 1) for S in combinations(range(n), s)])


def dense(n, found):
    w = np.zeros(n)
    w[found.index] = found.weight
    return w


def by_cvxpy(gamma, K, laws):
    """min over supports of K of min over the simplex of max over laws, an epigraph programme in the squared risks."""
    import cvxpy

    n, best = len(gamma), np.inf
    for S in combinations(range(n), K):
        w, t = cvxpy.Variable(K, nonneg=True), cvxpy.Variable()
        factors = [(gamma[list(S)] * np.sqrt(law)[:, None]).reshape(K, -1) for law in laws]
        problem = cvxpy.Problem(
            cvxpy.Minimize(t), [cvxpy.sum(w) == 1, *(cvxpy.sum_squares(a.T @ w) <= t for a in factors)]
        )
        best = min(best, problem.solve(solver=cvxpy.CLARABEL))
    return best


# --- linear, one law


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]), st.booleans())
@settings(max_examples=12, deadline=None)
def test_best_summary_is_that_of_another_solver_and_attains_its_risk(seed, K, even):
    q, k, v = head(seed)
    gamma = risk.response_profiles(q, k, v)
    law = None if even else np.random.default_rng(seed).dirichlet(np.ones(4))
    found = risk.best_summary(gamma, K, law)
    truth = by_cvxpy(gamma, K, [np.full(4, 0.25) if even else law])
    assert found.risk == pytest.approx(truth, rel=1e-6, abs=1e-9)
    assert found.lower <= found.risk * (1 + 1e-12) and found.lower == pytest.approx(found.risk, rel=1e-9)
    assert len(found.index) <= K and (np.diff(found.index) > 0).all() and (found.weight > 0).all()
    assert found.weight.sum() == pytest.approx(1, abs=1e-12)
    assert risks_of(gamma, dense(7, found)[None], law)[0] == pytest.approx(found.risk, rel=1e-9)
    if even:
        assert risk.linear_risk(gamma, found.index, found.weight) == pytest.approx(found.risk, rel=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 7), st.sampled_from(["centred", "augmented"]))
@settings(max_examples=20, deadline=None)
def test_no_random_summary_is_below_and_equal_weights_are_all_subsets(seed, K, kind):
    gamma = risk.response_profiles(*head(seed, sharp=2.0), kind=kind)
    free, equal = risk.best_summary(gamma, K), risk.best_summary(gamma, K, equal=True)
    size = float((gamma**2).sum(axis=2).mean())
    assert risks_of(gamma, random_summaries(np.random.default_rng(seed), 7, K)).min() >= free.lower - 1e-13 * size
    assert equal.risk == pytest.approx(risks_of(gamma, subsets(7, K)).min(), rel=1e-9, abs=1e-13 * size)
    assert equal.lower == equal.risk and len(equal.index) <= K and np.ptp(equal.weight) < 1e-15
    assert free.risk <= equal.risk + 1e-13 * size
    if K > 1:
        assert free.risk <= risk.best_summary(gamma, K - 1).risk + 1e-13 * size


def test_equal_weights_may_keep_fewer_than_the_budget():
    x = np.array([0.0, 10.0, 11.0, -21.0])[:, None, None]
    assert risk.best_summary(x, 2, equal=True).index.tolist() == [0]


def test_rationals():
    gamma = np.array([-2.0, 1.0, 1.0])[:, None, None]
    free = risk.best_summary(gamma, 2)
    assert free.risk == pytest.approx(0, abs=1e-30) and free.weight[0] == pytest.approx(1 / 3, rel=1e-12)
    assert risk.best_summary(gamma, 2, equal=True).risk == pytest.approx(1 / 4)
    assert risk.best_summary(gamma, 1).risk == pytest.approx(1)


@pytest.mark.parametrize("K", [1, 2, 5, 6, 7, 100])
def test_budgets_up_to_all_tokens_and_beyond(K):
    q, k, v = head(1, n=6)
    gamma = risk.response_profiles(q, k, v)
    found = risk.best_summary(gamma, K)
    assert len(found.index) <= min(K, 6)
    if K >= 6:
        assert found.risk < 1e-28 and risk.best_summary(gamma, K, equal=True).risk < 1e-28
        assert risk.best_attended(q, k, v, K).risk < 1e-28 and risk.hull_floor(q, k, v, K) < 1e-28
        assert (
            risk.best_mixture(gamma, K, np.eye(4)).risk < 1e-26 and risk.best_for_laws(gamma, K, np.eye(4)).risk < 1e-14
        )


def test_one_token_and_duplicates():
    q, k, v = head(2, n=1)
    gamma = risk.response_profiles(q, k, v)
    for found in (risk.best_summary(gamma, 1), risk.best_attended(q, k, v, 1), risk.best_for_laws(gamma, 1, np.eye(4))):
        assert found.risk < 1e-28 and found.index.tolist() == [0] and found.weight.tolist() == [1.0]
    assert risk.spectral_floor(risk.spectrum(q, k, v), 1) == 0
    q, k, v = head(3, n=4)
    twice = risk.response_profiles(q, np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0))
    once = risk.response_profiles(q, k, v)
    for K in (1, 2, 3):
        assert risk.best_summary(twice, K).risk == pytest.approx(risk.best_summary(once, K).risk, rel=1e-9)
    assert risk.best_summary(twice, 4).risk < 1e-28
    same = risk.best_summary(np.ones((5, 2, 2)) * 0, 2)
    assert same.risk == 0 and same.weight.sum() == 1


@pytest.mark.parametrize("factor", [1e-150, 1e-30, 1e30, 1e140])
def test_scale_of_the_profiles_does_not_matter(factor):
    gamma = risk.response_profiles(*head(4))
    at_one, there = risk.best_summary(gamma, 3), risk.best_summary(factor * gamma, 3)
    assert there.risk == pytest.approx(factor**2 * at_one.risk, rel=1e-9)
    np.testing.assert_array_equal(there.index, at_one.index)


def test_refusals():
    q, k, v = head(5)
    gamma = risk.response_profiles(q, k, v)
    big = np.zeros((15, 1, 1))
    for function in (
        risk.best_summary,
        lambda g, K: risk.best_mixture(g, K, np.eye(1)),
        lambda g, K: risk.best_for_laws(g, K, np.eye(1)),
    ):
        with pytest.raises(ValueError, match="at most 14 tokens, got 15"):
            function(big, 2)
    for K in (0, -1, 1.5, True):
        for call in (
            lambda K=K: risk.best_summary(gamma, K), lambda K=K: risk.best_attended(q, k, v, K), lambda K=K: risk.hull_floor(q, k, v, K),
            lambda K=K: risk.best_mixture(gamma, K, np.eye(4)), lambda K=K: risk.best_for_laws(gamma, K, np.eye(4)),
            lambda K=K: risk.any_atoms_floor(q, k, v, K), lambda K=K: risk.refitted_atoms(q, v[:4], K),
            lambda K=K: risk.spectral_floor(risk.spectrum(q, k, v), K),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="K: expected an int >= 1"):
                call()
    with pytest.raises(ValueError, match="laws: expected rows >= 0 that sum to 1"):
        risk.best_summary(gamma, 2, [0.5, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match=r"laws: expected shape \(l, m=4\)"):
        risk.best_mixture(gamma, 2, np.eye(3))
    with pytest.raises(ValueError, match="laws: expected rows >= 0"):
        risk.best_for_laws(gamma, 2, [[1.5, -0.5, 0, 0]])
    with pytest.raises(ValueError, match="profiles: expected finite numbers, got nan"):
        risk.best_summary(np.where(gamma == gamma[0, 0, 0], np.nan, gamma), 2)
    with pytest.raises(ValueError, match="law: expected probabilities"):
        risk.any_atoms_floor(q, k, v, 2, [1, 1, 0, 0])
    with pytest.raises(ValueError, match="linearly independent queries, got 2 of rank 1"):
        risk.refitted_atoms(np.ones((2, 3)), v[:2], 2)
    with pytest.raises(ValueError, match="logits of one query within about 700"):
        risk.best_attended(np.full((1, 1), 2000.0), np.array([[0.0], [1.0]]), np.zeros((2, 1)), 1)
    with pytest.raises(ValueError, match="rank None"):
        risk.spectral_floor(risk.spectrum(q, k, v, rank=1), 2)
    with pytest.raises(ValueError, match="at most n = 7"):
        risk.spectral_floor(risk.spectrum(q, k, v), 8)
    with pytest.raises(ValueError, match="at least one summary"):
        risk.game(np.zeros((0, 2)))
    for bad in ((1, 0.5, 0.1), (4, 0.9, 0.2), (4, 0.5, 0.0)):
        with pytest.raises(ValueError, match="expected"):
            risk.hidden_needles(*bad)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        risk.simplex(1)


# --- several laws


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("K", [1, 2, 3])
def test_minimax_without_coins_is_that_of_another_programme(seed, K):
    rng = np.random.default_rng(seed)
    gamma = risk.response_profiles(*head(seed, n=6))
    laws = np.eye(4) if seed % 2 else rng.dirichlet(np.ones(4), 3)
    found = risk.best_for_laws(gamma, K, laws)
    assert found.risk == pytest.approx(by_cvxpy(gamma, K, laws), rel=1e-5)
    assert found.lower <= found.risk and found.lower == pytest.approx(found.risk, rel=1e-5)
    w = dense(6, found)
    assert max(risks_of(gamma, w[None], law)[0] for law in laws) == pytest.approx(found.risk, rel=1e-9)
    random = random_summaries(rng, 6, K)
    assert np.max([risks_of(gamma, random, law) for law in laws], axis=0).min() >= found.lower * (1 - 1e-9)
    equal = risk.best_for_laws(gamma, K, laws, equal=True)
    assert equal.risk == pytest.approx(np.max([risks_of(gamma, subsets(6, K), law) for law in laws], axis=0).min())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("equal", [False, True])
def test_a_mixture_is_a_saddle_point(seed, K, equal):
    gamma = risk.response_profiles(*head(seed, n=6))
    laws = np.eye(4)
    found = risk.best_mixture(gamma, K, laws, equal=equal)
    assert found.chances.sum() == pytest.approx(1) and found.law.sum() == pytest.approx(1)
    assert ((found.weights > 0).sum(axis=1) <= K).all()
    np.testing.assert_allclose(found.weights.sum(axis=1), 1, atol=1e-12)
    against = [float(found.chances @ risks_of(gamma, found.weights, law)) for law in laws]
    assert max(against) == pytest.approx(found.risk, rel=1e-9)
    # against its law no summary does better
    assert risk.best_summary(gamma, K, found.law @ laws, equal).risk == pytest.approx(found.risk, rel=1e-6)
    assert found.lower <= found.risk * (1 + 1e-12) and found.lower >= found.risk * (1 - 1e-6)
    # knowing the law < coins < none
    assert max(risk.best_summary(gamma, K, law, equal).risk for law in laws) <= found.risk * (1 + 1e-9)
    assert found.risk <= risk.best_for_laws(gamma, K, laws, equal).risk * (1 + 1e-7)


def test_one_law_is_no_game():
    gamma, law = risk.response_profiles(*head(8)), np.array([0.1, 0.2, 0.3, 0.4])
    truth = risk.best_summary(gamma, 3, law).risk
    assert risk.best_mixture(gamma, 3, law[None]).risk == pytest.approx(truth, rel=1e-7)
    assert risk.best_for_laws(gamma, 3, law[None]).risk == pytest.approx(truth, rel=1e-6)


def test_games_with_known_values():
    value, chances, law = risk.game([[0, 1], [1, 0]])
    assert value == pytest.approx(0.5) and chances == pytest.approx([0.5, 0.5]) and law == pytest.approx([0.5, 0.5])
    value, chances, law = risk.game([[2, 3], [1, 4]])  # a saddle point in pure strategies
    assert value == pytest.approx(3) and chances == pytest.approx([1, 0]) and law == pytest.approx([0, 1])
    for factor in (1e-20, 1e20):
        assert risk.game(factor * np.array([[0, 1], [3, 0]]))[0] == pytest.approx(0.75 * factor)
    assert risk.game(np.zeros((2, 3)))[0] == 0


# --- true risk


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]), st.sampled_from([0.5, 2.0, 6.0]))
@settings(max_examples=12, deadline=None)
def test_true_risk_bracket_holds_and_is_reached(seed, K, sharp):
    q, k, v = head(seed, sharp=sharp)
    found, equal = risk.best_attended(q, k, v, K), risk.best_attended(q, k, v, K, equal=True)
    size = float(((v - v.mean(axis=0)) ** 2).sum(axis=1).max())
    assert risk.attention_risk(q, k, v, found.index, found.weight) == pytest.approx(
        found.risk, rel=1e-7, abs=1e-13 * size
    )
    assert len(found.index) <= K and found.lower <= found.risk <= equal.risk * (1 + 1e-12) + 1e-15
    truth = min(risk.attention_risk(q, k, v, np.flatnonzero(w), w[w > 0]) for w in subsets(7, K))
    assert equal.risk == pytest.approx(truth, rel=1e-8, abs=1e-13 * size)
    floor = risk.hull_floor(q, k, v, K)
    assert floor <= found.risk + 1e-13 * size
    tried = [
        risk.attention_risk(q, k, v, np.flatnonzero(w), w[w > 0])
        for w in random_summaries(np.random.default_rng(seed), 7, K, 200)
    ]
    assert min(tried) >= max(floor, found.lower) - 1e-12 * size


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0.5, 3.0]))
@settings(max_examples=12, deadline=None)
def test_one_query_is_exact_and_dv_plus_one_tokens_can_suffice(seed, K, sharp):
    q, k, v = head(seed, m=1, dv=2, sharp=sharp)
    found = risk.best_attended(q, k, v, K)
    assert found.lower == pytest.approx(found.risk, rel=1e-8, abs=1e-14)
    assert risk.hull_floor(q, k, v, K) == pytest.approx(found.risk, rel=1e-8, abs=1e-14)
    assert risk.attention_risk(q, k, v, found.index, found.weight) == pytest.approx(found.risk, rel=1e-6, abs=1e-14)
    if K > 2:  # Caratheodory: the output lies in a triangle of values
        assert found.risk < 1e-25


def test_descent_finds_the_optimum_that_a_fine_grid_finds():
    q, k, v = head(11, n=3, m=3, sharp=3.0)
    t = np.linspace(0, 1, 20001)
    edges = [np.insert(np.column_stack([t, 1 - t]), i, 0, axis=1) for i in range(3)]
    grid = np.vstack(edges)
    gamma, b = risk.response_profiles(q, k, v), risk.density(q, k)
    risks = ((np.tensordot(grid, gamma, 1) ** 2).sum(axis=2) / (grid @ b) ** 2).mean(axis=1)
    found = risk.best_attended(q, k, v, 2)
    # the grid misses a smooth minimum by the square of its step, 5e-5
    assert found.lower <= found.risk <= risks.min() * (1 + 1e-12) and found.risk == pytest.approx(risks.min(), rel=1e-5)


def test_laws_weigh_the_queries():
    q, k, v = head(12)
    law = np.array([0.0, 0.0, 1.0, 0.0])
    alone = risk.best_attended(q[2:3], k, v, 2)
    assert risk.hull_floor(q, k, v, 2, law) == pytest.approx(alone.risk, rel=1e-9)
    assert risk.best_attended(q, k, v, 2, law).risk == pytest.approx(alone.risk, rel=1e-5)
    gamma = risk.response_profiles(q, k, v)
    assert risk.best_summary(gamma, 2, law).risk == pytest.approx(risk.best_summary(gamma[:, 2:3], 2).risk, rel=1e-12)
    assert risk.any_atoms_floor(q, k, v, 1, law) == pytest.approx(0, abs=1e-25)


# --- floors


@given(st.integers(0, 10**6), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_floors_are_below_every_optimum(seed, K):
    q, k, v = head(seed)
    gamma, s = risk.response_profiles(q, k, v), risk.spectrum(q, k, v)
    optimum = risk.best_summary(gamma, K).risk
    assert risk.spectral_floor(s, K) <= optimum + 1e-13 * s.trace
    assert optimum <= risk.trace_bound(s, K, replace=False) + 1e-13 * s.trace
    attended = risk.best_attended(q, k, v, K, refine=3).risk
    assert risk.any_atoms_floor(q, k, v, K) <= attended + 1e-13
    assert risk.hull_floor(q, k, v, K) <= attended + 1e-13


def test_no_rank_no_floor():
    flat = risk.flat_cache(np.random.default_rng(0).standard_normal((8, 3)))
    assert risk.spectral_floor(risk.spectrum(*flat), 2) == 0
    assert risk.best_summary(risk.response_profiles(*flat), 4).risk < 1e-28


@pytest.mark.parametrize("n", [2, 3, 8, 14])
def test_simplex_is_the_hardest_cache_for_its_trace(n):
    instance = risk.simplex(n, 2.5)
    s = risk.spectrum(*instance)
    assert s.trace == pytest.approx(2.5, rel=1e-12)
    for K in {1, n // 2, n - 1}:
        value = 2.5 * (n - K) / (K * (n - 1))
        assert risk.spectral_floor(s, K) == pytest.approx(value, rel=1e-10)
        assert risk.best_summary(risk.response_profiles(*instance), K).risk == pytest.approx(value, rel=1e-10)
        assert risk.best_attended(*instance, K).risk == pytest.approx(value, rel=1e-10)


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([1.0, 0.3]))
@settings(max_examples=20, deadline=None)
def test_made_up_atoms_reach_their_floor(seed, K, scale):
    q, k, v = head(seed, n=20, m=4, d=6)
    law = np.random.default_rng(seed).dirichlet(np.ones(4)) * 0.9 + 0.025
    o = attention.attend(q[None], k[None], v[None], scale=scale)[0]
    keys, values = risk.refitted_atoms(q, o, K, law, scale)
    assert keys.shape == (K, 6) and values.shape == (K, 3)
    error = ((attention.attend(q[None], keys[None], values[None], scale=scale)[0] - o) ** 2).sum(axis=1) @ law
    centred = (o - law @ o) * np.sqrt(law)[:, None]
    tail = np.linalg.eigvalsh(centred.T @ centred).clip(0)[::-1][K - 1 :].sum()
    assert risk.any_atoms_floor(q, k, v, K, law, scale) == pytest.approx(tail, rel=1e-7, abs=1e-13)
    assert error == pytest.approx(tail, rel=1e-6, abs=1e-12)
    # so are weights between 1/(2K) and 3/(2K): no atom is out of reach of a softmax
    weights = np.exp(scale * q @ keys.T)
    weights /= weights.sum(axis=1, keepdims=True)
    assert weights.min() >= 0.499 / K and weights.max() <= 1.501 / K


def test_orthonormal_values_keep_the_floor_only_for_own_tokens():
    n, K = 10, 4
    look = risk.lookup(n, 0.5)
    b = 0.5 / (n - 1)
    assert risk.any_atoms_floor(*look, K) == pytest.approx((0.5 - b) ** 2 * (1 - K / n), rel=1e-10)
    assert risk.any_atoms_floor(*look, K) < risk.search_floor(n, K) < risk.hull_floor(*look, K)
    assert risk.any_atoms_floor(*risk.lookup(2, 0.5), 1) == pytest.approx(0, abs=1e-25)


def test_hidden_needles_in_closed_form():
    n, mass, leak = 6, Fraction(1, 2), Fraction(1, 8)
    q, k, v = risk.hidden_needles(n, float(mass), float(leak))
    a = attention.weights(q, k, (n + 1) ** -0.5)
    f = float(leak) / (n - 1)
    np.testing.assert_allclose(a[:, 1:], f + (0.5 - f) * np.eye(n), atol=1e-14)
    for hidden in (1, 3, 6):
        kept = np.arange(hidden + 1)
        found = risk.attention_risk(q[:hidden], k, v, kept, np.full(hidden + 1, 1 / (hidden + 1)))
        assert found == pytest.approx(float(risk.hidden_needles_risk(n, mass, leak, hidden)), rel=1e-10, abs=1e-28)
    assert risk.hidden_needles_floor(n, mass, 3) == Fraction(1, 8)
    # all queries alike: no own tokens do better than the floor
    assert risk.hull_floor(q, k, v, 3) >= 1 / 8 - 1e-12


def test_the_cone_solver_is_loaded_only_when_it_is_used():
    code = (
        "import sys, kvtheory, numpy as np; r = kvtheory.risk; g = r.response_profiles(*r.lookup(4, .5)); r.best_summary(g, 2);"
        "r.best_mixture(g, 2, np.eye(4)); print('cvxpy' in sys.modules); r.best_for_laws(g, 2, np.eye(4)); print('cvxpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
