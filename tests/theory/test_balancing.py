"""kvtheory.balancing: laws of mass, support and exactness for every input; means by following every path of a walk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtheory import risk
from kvtheory.balancing import METHODS, clusters, sample, walks
from kvtheory.risk import spectra


def cloud(seed: int, n: int, size: int, rank: int | None = None) -> np.ndarray:
    """Profiles of barycentre 0 with decaying directions."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, size)) * 0.8 ** np.arange(size)
    if rank is not None:
        x = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, size))
    return x - x.mean(axis=0)


class Tosses:
    """A coin that first follows `known` and then falls True; remembers what fell, and the branches it did not take."""

    def __init__(self, known: list[bool]) -> None:
        self.known, self.taken, self.chance = known, [], 1.0
        self.branches: list[list[bool]] = []

    def __call__(self, up: float) -> bool:
        new = len(self.taken) >= len(self.known)
        toss = True if new else self.known[len(self.taken)]
        if new and up < 1:
            self.branches.append([*self.taken, False])
        self.chance *= up if toss else 1 - up
        self.taken.append(toss)
        return toss


def paths(walk) -> Iterator[tuple[float, np.ndarray]]:
    """(probability, result) of every sequence of tosses that walk(coin) may see."""
    todo: list[list[bool]] = [[]]
    while todo:
        coin = Tosses(todo.pop())
        result = walk(coin)
        todo += coin.branches
        yield coin.chance, result


# --- laws that every method keeps


@given(
    st.integers(0, 10**6),
    st.integers(2, 40),
    st.integers(1, 12),
    st.integers(0, 4),
    st.sampled_from(METHODS),
    st.booleans(),
    st.data(),
)
@settings(max_examples=150)
def test_mass_order_support(seed, n, size, protect, method, uneven, data):
    need = {"cube": protect, "spectral": 2 * protect}.get(method, 0)
    K = data.draw(st.integers(need + 1, max(need + 1, n + 2)))
    p = (
        None
        if method == "srs" or not uneven
        else np.random.default_rng(seed).dirichlet(np.full(n, 0.3)) * 0.99 + 0.01 / n
    )
    index, weight = sample(cloud(seed, n, size), K, method, protect, seed, weights=p)
    assert index.dtype == np.int64 and weight.dtype == np.float64
    assert 1 <= len(index) <= K and (np.diff(index) > 0).all() and index[0] >= 0 and index[-1] < n
    assert (weight > 0).all() and weight.sum() == pytest.approx(1, abs=1e-14)
    if n <= K and method != "iid":
        np.testing.assert_allclose(weight, np.full(n, 1 / n) if p is None else p, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_profiles_are_flattened_scale_free_and_seeded(method):
    x = cloud(0, 30, 12)
    one = sample(x, 12, method, 2, seed=5)
    for other in (sample(x.reshape(30, 4, 3), 12, method, 2, seed=5), sample(1024.0 * x, 12, method, 2, seed=5)):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_allclose(one[1], other[1], rtol=1e-9)
    assert any(not np.array_equal(one[0], sample(x, 12, method, 2, seed=s)[0]) for s in range(6, 12))


@pytest.mark.parametrize(
    ("method", "uneven"), [(x, y) for x in METHODS for y in (False, True) if (x, y) != ("srs", True)]
)
def test_means_are_those_of_p(method, uneven):
    """Monte Carlo; each of the 11 means is tested at 5 standard errors, so a true sampler fails with probability below 1e-4. (Walks: exactly, below.)"""
    n, K, draws = 11, 6, 400 if method in ("cube", "spectral") else 1500
    p = np.random.default_rng(1).dirichlet(np.full(n, 2.0)) if uneven else np.full(n, 1 / n)
    x = cloud(3, n, 4)
    weights = np.zeros((draws, n))
    for seed in range(draws):
        index, weight = sample(x, K, method, 1 if method != "cluster" else 0, seed, weights=p)
        weights[seed, index] = weight
    error = weights.std(axis=0, ddof=1) / np.sqrt(draws)
    assert (np.abs(weights.mean(axis=0) - p) <= 5 * error + 1e-12).all()


# --- the walks, exactly


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("method", ["cube", "spectral"])
@pytest.mark.parametrize("seed", range(4))
def test_every_path_of_a_walk(m, method, seed):
    """All tosses: unbiased, protected part and mass exact on every path, support K, and the proved second moment."""
    n = 9
    K = (4 + m) if method == "cube" else (4 + 2 * m)  # K' = 4
    x = cloud(seed, n, 5)
    p = np.random.default_rng(seed).dirichlet(np.full(n, 9.0)) if seed % 2 else np.full(n, 1 / n)
    x = x - p @ x
    leading, tail = walks.split(x, p, m)
    pi, r2 = 4 * p, (tail**2).sum(axis=1)
    total, mean, second = 0.0, np.zeros(n), 0.0
    for chance, weight in paths(lambda coin: walks.balance(x, p, K, m, method, coin)):
        assert np.count_nonzero(weight) <= K
        assert weight.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(weight @ leading, 0, atol=1e-9)
        total, mean = total + chance, mean + chance * weight
        second += chance * ((weight @ tail) ** 2).sum()
    assert total == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(mean, p, atol=1e-12)
    constant = 2 if method == "spectral" else m + 2
    assert second <= constant * (r2 @ (pi * (1 - pi))) / 16 * (1 + 1e-9)


@given(st.integers(0, 10**6), st.integers(0, 5), st.integers(20, 60))
@settings(max_examples=40)
def test_derandomised_walk_never_exceeds_its_bound(seed, m, n):
    x = cloud(seed, n, 12)
    K = min(n - 1, 2 * m + 8)
    index, weight = sample(x, K, "spectral", m, derandomise=True)
    sure = 2 * ((walks.split(x, np.full(n, 1 / n), m).tail ** 2).sum() / n) / (K - 2 * m)
    assert ((weight @ x[index]) ** 2).sum() <= sure * (1 - (K - 2 * m) / n) * (1 + 1e-9)


@pytest.mark.parametrize("m", [2, 4, 6, 10])
def test_plain_cube_attains_its_constant_and_the_spectral_walk_escapes(m):
    """C = (m + 2) against sum r^2 pi (1 - pi) / K'^2, that is (m + 2)/2 against tail_m / K', for every seed (C-T2)."""
    instance = risk.coherent_block(m, 12)
    gamma, s = risk.response_profiles(*instance), risk.spectrum(*instance)
    half = len(gamma) // 2
    for seed in range(3):
        error = risk.linear_risk(gamma, *sample(gamma, half + m, "cube", m, seed))
        assert error == pytest.approx((m + 2) / 2 * s.tail(m) / half, rel=1e-9)
        assert risk.linear_risk(gamma, *sample(gamma, half + 2 * m, "spectral", m, seed)) < 1e-20


@pytest.mark.parametrize("m", [0, 1, 3])
def test_spectral_walk_attains_its_step_ratio_on_opposed_pairs(m):
    """|| error ||^2 + 2 sum r^2 w (1 - w) = 2 sum r^2 pi (1 - pi) on every path: the constant 2 of the step cannot be lowered."""
    pairs = 24
    instance = risk.opposed_pairs(m, pairs)
    gamma = risk.response_profiles(*instance)
    for seed in range(3):
        index, weight = sample(gamma, pairs + 2 * m, "spectral", m, seed)
        w = np.zeros(2 * pairs)
        w[index] = weight * pairs
        phi = risk.linear_risk(gamma, index, weight) * pairs**2 + 2 * (w * (1 - w)).sum()
        assert phi == pytest.approx(2 * 2 * pairs / 4, rel=1e-9)


def test_protected_directions_are_exact_and_unprotected_ones_are_not():
    x = cloud(8, 200, 30)
    directions = np.linalg.svd(x, full_matrices=False)[2]
    for method, K in (("cube", 60), ("spectral", 60)):
        index, weight = sample(x, K, method, 10)
        error = directions @ (weight @ x[index])
        assert np.abs(error[:10]).max() < 1e-11 and np.abs(error[10:]).max() > 1e-4
    index, weight = sample(x, 60, "srs", 10)
    assert np.abs(directions[:10] @ (weight @ x[index])).max() > 1e-3


@pytest.mark.parametrize("shape", ["decaying", "10 tokens 30 times", "rank 3", "zero"])
def test_split_of_caches_too_large_for_a_gram_matrix(shape, monkeypatch):
    """The Krylov path: coordinates in orthonormal directions, hardly more left than by the exact ones, and walks exact in them."""
    n, m = 300, 4
    x = {
        "decaying": lambda: cloud(0, n, 90),
        "10 tokens 30 times": lambda: cloud(0, 10, 90)[np.arange(n) % 10],
        "rank 3": lambda: cloud(0, n, 90, rank=3),
        "zero": lambda: np.zeros((n, 90)),
    }[shape]()
    p = np.full(n, 1 / n)
    exact = walks.split(x, p, m)
    monkeypatch.setattr(spectra, "LARGEST_GRAM", 10)
    found = walks.split(x, p, m)
    total = (x**2).sum()
    assert found.leading.shape == exact.leading.shape
    np.testing.assert_allclose((found.leading**2).sum() + (found.tail**2).sum(), total, rtol=1e-12)
    # the tail is what a projection leaves: orthogonal to what was taken
    np.testing.assert_allclose(found.leading.T @ found.tail, 0, atol=1e-12 * max(total, 1))
    assert 0 <= (found.tail**2).sum() - (exact.tail**2).sum() + 1e-12 * total <= 1e-6 * total
    index, weight = sample(x, 60, "spectral", m)
    np.testing.assert_allclose(weight @ found.leading[index], 0, atol=1e-9)


def test_protecting_more_than_the_rank_spends_the_budget_on_weight():
    x = cloud(4, 80, 20, rank=3)
    for method in ("cube", "spectral"):
        index, weight = sample(x, 30, method, 10)
        assert ((weight @ x[index]) ** 2).sum() < 1e-20 * (x**2).sum() / 80
        assert len(index) <= 30


@pytest.mark.parametrize("method", METHODS)
def test_degenerate_profiles(method):
    """Equal tokens, zero profiles, ties everywhere: the laws still hold."""
    for x in (np.zeros((16, 3)), np.ones((16, 3)), np.repeat(cloud(0, 4, 3), 4, axis=0), np.eye(16)):
        for seed in range(3):
            index, weight = sample(x, 8, method, 2, seed)
            assert len(index) <= 8 and weight.sum() == pytest.approx(1, abs=1e-12)


def test_heavy_tokens_are_kept_with_their_own_weight():
    p = np.array([0.4, 0.3] + [0.3 / 18] * 18)
    for method in ("cube", "spectral"):
        index, weight = sample(cloud(1, 20, 6), 9, method, 1, weights=p)
        held = dict(zip(index.tolist(), weight.tolist()))
        assert held[0] == pytest.approx(0.4, rel=1e-12) and held[1] == pytest.approx(0.3, rel=1e-12)


def test_balancing_beats_sampling_where_the_spectrum_decays():
    x = cloud(2, 256, 40)
    mean = {}
    for method, protect in (("srs", 0), ("halving", 0), ("cluster", 0), ("cube", 20), ("spectral", 15)):
        errors = []
        for seed in range(20):
            index, weight = sample(x, 64, method, protect, seed)
            errors.append(((weight @ x[index]) ** 2).sum())
        mean[method] = np.mean(errors)
    assert mean["spectral"] < mean["cube"] < mean["srs"] / 5
    assert mean["halving"] < mean["srs"] / 1.5 and mean["cluster"] < mean["srs"] / 1.5


def test_lloyd_finds_separate_groups():
    rng = np.random.default_rng(0)
    centres = 10 * np.eye(4)
    member = rng.integers(4, size=60)
    group = clusters.lloyd(centres[member] + 0.1 * rng.standard_normal((60, 4)), np.full(60, 1 / 60), centres + 1)
    np.testing.assert_array_equal(group, member)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(method="best"), "method: expected one of iid, srs"),
        (dict(K=0), "K: expected an int >= 1"),
        (dict(K=2.0), "K: expected an int >= 1"),
        (dict(protect=-1), "protect: expected an int >= 0"),
        (dict(K=4, protect=4, method="cube"), 'method "cube" with protect = 4 expects K > 4, got 4'),
        (dict(K=4, protect=2), 'method "spectral" with protect = 2 expects K > 4, got 4'),
        (dict(method="srs", weights=np.arange(1, 11) / 55), 'method "srs" expects uniform'),
        (dict(method="cube", derandomise=True), "derandomise"),
        (dict(profiles=np.zeros((0, 3))), "profiles: expected shape"),
        (dict(profiles=np.full((10, 3), np.inf)), "profiles: expected finite numbers, got inf"),
        (dict(weights=np.full(10, 0.2)), "weights: expected probabilities that sum to 1"),
    ],
)
def test_refusals(change, match):
    with pytest.raises(ValueError, match=match):
        sample(**(dict(profiles=cloud(0, 10, 3), K=5) | change))
