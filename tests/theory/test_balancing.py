"""kvtheory.balancing: laws of mass, support and exactness for every input; means by following every path of a walk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtheory import risk
from kvtheory.balancing import METHODS, clusters, cube, halving, moves, sample, spectral, strata, walks
from kvtheory.risk import spectra
from kvtheory.risk.profiles import probabilities


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


@pytest.mark.parametrize("window", [3, 4, 5])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_path_of_a_walk_with_a_window(window, together, seed, monkeypatch):
    """One protected direction: constant s / (s - 2), K - s + 2 tokens' weights; also where null spaces are kept for several steps."""
    if together:
        monkeypatch.setattr(spectral, "_SMALL", 0)
    n, m, whole = 9, 1, 4
    K = whole + window - 2
    x, p = cloud(seed, n, 5), np.full(n, 1 / n)
    leading, tail = walks.split(x, p, m)
    total, mean, second = 0.0, np.zeros(n), 0.0
    for chance, weight in paths(lambda coin: walks.balance(x, p, K, m, "spectral", coin, window=window)):
        assert np.count_nonzero(weight) <= K
        np.testing.assert_allclose(weight @ leading, 0, atol=1e-9)
        total, mean = total + chance, mean + chance * weight
        second += chance * ((weight @ tail) ** 2).sum()
    assert total == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(mean, p, atol=1e-12)
    proved = window / (window - 2) * (tail**2).sum() * whole / n * (1 - whole / n) / whole**2
    assert second <= proved * (1 + 1e-9)
    spectrum = risk.Spectrum((x**2).sum() / n, np.linalg.eigvalsh(x.T @ x / n)[::-1], n, 0.0)
    assert proved == pytest.approx(risk.spectral_bound(spectrum, K, m, window=window) * (1 - whole / n), rel=1e-9)


@pytest.mark.parametrize("method", ["cube", "spectral"])
@pytest.mark.parametrize("seed", range(4))
def test_every_path_of_a_walk_with_uneven_inclusion(method, seed):
    """Weights of total 1 and protected directions on every path, means P, and the bound with r_i p_i / pi_i for r_i."""
    n, m, whole = 9, 1, 4
    rng = np.random.default_rng(seed)
    x, inclusion = cloud(seed, n, 5), rng.dirichlet(np.full(n, 6.0))
    p = rng.dirichlet(np.full(n, 9.0)) if seed % 2 else np.full(n, 1 / n)
    x = x - p @ x
    K = whole + (m + 1) * (1 if method == "cube" else 2)
    leading, tail = walks.split(x, p, m)
    pi, _ = walks._probabilities(inclusion, whole)
    total, mean, second = 0.0, np.zeros(n), 0.0
    for chance, weight in paths(lambda coin: walks.balance(x, p, K, m, method, coin, inclusion=inclusion)):
        assert 1 <= np.count_nonzero(weight) <= K
        assert weight.sum() == pytest.approx(1, abs=1e-9)
        np.testing.assert_allclose(weight @ leading, 0, atol=1e-9)
        total, mean = total + chance, mean + chance * weight
        second += chance * ((weight @ tail) ** 2).sum()
    assert total == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(mean, p, atol=1e-12)
    r2 = (tail**2).sum(axis=1) * (p / pi) ** 2
    assert second <= (2 if method == "spectral" else m + 3) * (r2 @ (pi * (1 - pi))) * (1 + 1e-9)


@given(
    st.integers(0, 10**6),
    st.integers(5, 40),
    st.integers(0, 3),
    st.sampled_from(["cube", "spectral"]),
    st.sampled_from(["norm", "wild"]),
)
@settings(max_examples=60)
def test_mass_and_support_with_uneven_inclusion(seed, n, m, method, kind):
    """Also with probabilities over orders of magnitude, where tokens with pi_i >= 1 are kept with their own weight."""
    x = cloud(seed, n, 6) * np.exp(np.random.default_rng(seed).standard_normal((n, 1)))
    K = min(2 * m + 6, n - 1) if method == "spectral" else min(m + 5, n - 1)
    if (2 if method == "spectral" else 1) * (m + 1) >= K:
        return
    wild = np.exp(3 * np.random.default_rng(seed + 1).standard_normal(n))
    index, weight = sample(x, K, method, m, seed, probability="norm" if kind == "norm" else wild)
    assert 1 <= len(index) <= K and weight.sum() == pytest.approx(1, abs=1e-12) and (weight > 0).all()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "shape", ["decaying", "each token four times", "rank 3", "no tail", "one heavy tail", "one-hot"]
)
@pytest.mark.parametrize("m", [0, 1, 4])
def test_every_step_of_the_spectral_walk_is_within_its_ratio(m, shape, together, monkeypatch):
    """|| sum u_i T_i ||^2 <= s' / (s' - m - 1) sum u_i^2 r_i^2 on s' coordinates, u a null vector of the constraints: what the proof needs."""
    if together:
        monkeypatch.setattr(spectral, "_SMALL", 0)
    n = 60
    x = {
        "decaying": lambda: cloud(m, n, 20),
        "each token four times": lambda: np.repeat(cloud(m, n // 4, 20), 4, axis=0),
        "rank 3": lambda: cloud(m, n, 20, rank=3),
        "no tail": lambda: np.zeros((n, 3)),
        "one heavy tail": lambda: cloud(m, n, 20) * np.where(np.arange(n) == 7, 1e6, 1.0)[:, None],
        "one-hot": lambda: np.eye(n),
    }[shape]()
    leading, tail = walks.split(x, np.full(n, 1 / n), m)
    m = leading.shape[1]
    features, steps = moves.constraints(leading), []
    rng = np.random.default_rng(0)

    class Watched(spectral.Window):
        def __init__(self, constraints, gram):
            super().__init__(constraints, gram)
            self.constraints, self.gram, self.left = constraints, gram, np.ones(len(gram), dtype=bool)

        def direction(self):
            y = super().direction()
            assert (y[~self.left] == 0).all() and y @ y == pytest.approx(1, rel=1e-12)
            scale = np.sqrt((self.constraints**2).sum(axis=1))
            np.testing.assert_allclose(self.constraints @ y / np.where(scale > 0, scale, 1), 0, atol=1e-13)
            moved = int(self.left.sum())
            steps.append((y @ self.gram @ y) / (moved / (moved - m - 1)))
            return y

        def settle(self, place):
            super().settle(place)
            self.left[place] = False

    monkeypatch.setattr(spectral, "Window", Watched)
    pi = np.full(n, 20 / n)
    w = spectral.spectral_walk(pi, leading, tail, lambda up: bool(rng.random() < up))
    assert len(steps) > 5 and max(steps) <= 1 + 1e-9
    np.testing.assert_allclose((w - pi) @ features, 0, atol=1e-8)
    assert ((w > 0) & (w < 1)).sum() <= 2 * m + 1


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 5), st.integers(1, 6), st.booleans())
@settings(max_examples=80)
def test_cube_moves_at_most_m_plus_2_coordinates_also_where_columns_are_dependent(seed, n, m, distinct, repeat):
    rng = np.random.default_rng(seed)
    leading = rng.standard_normal((n, m))
    if repeat:
        leading = leading[rng.integers(0, min(distinct, n), n)]
    moved = []

    def watched(here, u):
        moved.append(len(u))
        return moves.ends(here, u)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cube, "ends", watched)
        pi = rng.uniform(0.05, 0.95, n)
        w = cube.cube_walk(pi, leading, lambda up: bool(rng.random() < up))
    assert max(moved, default=0) <= m + 2
    assert ((w > 0) & (w < 1)).sum() <= (min(m + 1, distinct) if repeat else m + 1)
    np.testing.assert_allclose((w - pi) @ moves.constraints(leading), 0, atol=1e-8)


@pytest.mark.parametrize("method", ["cube", "spectral"])
def test_constraints_do_not_drift_over_a_long_cache(method):
    n, m, K = 20_000, 24, 500
    x = cloud(5, n, 40)
    index, weight = sample(x, K, method, m, seed=1)
    directions = np.linalg.svd(x, full_matrices=False)[2][:m]
    size = np.sqrt((x**2).sum(axis=1).mean())
    assert np.abs(directions @ (weight @ x[index])).max() < 1e-11 * size and len(index) <= K
    again = sample(x, K, method, m, seed=1)
    assert index.tobytes() == again[0].tobytes() and weight.tobytes() == again[1].tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_missing_from_coordinates_counts_in_the_norms(seed):
    """Every path, profiles in 3 of 5 directions: the error in these is bounded by 2 sum r_i^2 pi_i (1 - pi_i) with r_i whole."""
    n, m, whole = 9, 1, 4
    x, p = cloud(seed, n, 5), np.full(n, 1 / n)
    directions = np.linalg.svd(x)[2]
    given_, missing = x @ directions[:3].T, ((x @ directions[3:].T) ** 2).sum(axis=1)
    total, mean, within = 0.0, np.zeros(n), 0.0
    for chance, weight in paths(
        lambda coin: walks.balance(given_, p, whole + 2 * m, m, "spectral", coin, missing=missing)
    ):
        assert np.abs((weight @ x) @ directions[0]) < 1e-9
        total, mean = total + chance, mean + chance * weight
        within += chance * ((weight @ given_) ** 2).sum()
    np.testing.assert_allclose(mean, p, atol=1e-12)
    r2 = ((x @ directions[1:].T) ** 2).sum(axis=1)
    assert within <= 2 * r2.sum() * whole / n * (1 - whole / n) / whole**2
    other = sample(given_, whole + 2 * m, "spectral", m, seed=0, missing=1e6 * missing)
    assert len(other[0]) <= whole + 2 * m


# --- strata, merges, groups


@pytest.mark.parametrize("protect", [0, 2])
@pytest.mark.parametrize("uneven", [False, True])
def test_stratified_error_is_the_scatter_within_strata(protect, uneven):
    """Its closed form, by the law of each stratum written out, against draws (5 standard errors) and against tr Sigma / K."""
    n, K, draws = 23, 6, 4000
    p = np.random.default_rng(0).dirichlet(np.full(n, 1.0)) * 0.9 + 0.1 / n if uneven else np.full(n, 1 / n)
    p = probabilities(p, n)  # as `sample` does: the last bit may decide a cell
    x = cloud(1, n, 4)
    x = x - p @ x
    order = strata.kd_order(walks.split(x, p, protect).leading, p, K) if protect else np.arange(n)
    ends = np.concatenate([[0], np.cumsum(p[order])])
    scatter = 0.0
    for g in range(K):
        share = np.clip(np.minimum(ends[1:], (g + 1) / K) - np.maximum(ends[:-1], g / K), 0, None) * K
        assert share.sum() == pytest.approx(1, rel=1e-12)
        y = x[order]
        scatter += (share @ (y**2).sum(axis=1) - ((share @ y) ** 2).sum()) / K**2
    assert scatter <= (p @ (x**2).sum(axis=1)) / K
    errors = np.empty(draws)
    for seed in range(draws):
        index, weight = sample(x, K, "stratified", protect, seed, weights=p)
        errors[seed] = ((weight @ x[index]) ** 2).sum()
    assert abs(errors.mean() - scatter) <= 5 * errors.std(ddof=1) / np.sqrt(draws)


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 4), st.booleans())
def test_kd_order_is_a_permutation_whose_cells_are_boxes(seed, n, m, ties):
    leading = np.random.default_rng(seed).standard_normal((n, m))
    leading = leading.round() if ties else leading
    order = strata.kd_order(leading, np.full(n, 1 / n), n)
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
    # the first cut: everything in the first half lies below everything in the second
    half = n // 2
    if n >= 2:
        assert leading[order[:half], 0].max() <= leading[order[half + n % 2 :], 0].min()


@given(st.integers(0, 10**6), st.integers(2, 60), st.data())
@settings(max_examples=40)
def test_merges_of_uneven_weights_keep_mass_and_count(seed, n, data):
    K = data.draw(st.integers(1, n - 1))
    rng = np.random.default_rng(seed)
    weight = rng.dirichlet(np.full(n, 0.5)) + 1e-9
    kept = weight.copy()
    assert halving._merge_lightest(kept, K, rng) == K
    assert np.count_nonzero(kept) == K and kept.sum() == pytest.approx(weight.sum(), rel=1e-12)
    # nothing is heavier than the heaviest, unless it was merged from no more than the lightest
    assert (kept[kept > 0] >= weight[kept > 0] * (1 - 1e-12)).all()


def test_groups_of_large_budgets_are_as_many_and_as_good(monkeypatch):
    """Within k-d cells: never more than K groups, every token in one, and the scatter near that of groups found together."""
    x, p, rng = cloud(0, 600, 8), np.full(600, 1 / 600), np.random.default_rng(0)
    scatter = {}
    for together in (512, 16):
        monkeypatch.setattr(clusters, "_TOGETHER", together)
        group = clusters._groups(x, p, 96, rng)
        assert group.shape == (600,) and group.min() >= 0 and group.max() < 96
        centres = np.stack([x[group == g].mean(axis=0) if (group == g).any() else x[0] for g in range(96)])
        scatter[together] = ((x - centres[group]) ** 2).sum()
    assert scatter[16] < 1.3 * scatter[512]


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
        (dict(method="cube", derandomise=True), "derandomise: only spectral can, got method 'cube'"),
        (dict(method="halving", probability="norm"), "probability: only cube and spectral can"),
        (dict(method="cube", window=4), "window: only spectral can"),
        (dict(method="iid", missing=np.zeros(10)), "missing: only spectral can"),
        (dict(probability="size"), 'probability: expected "equal", "norm" or numbers'),
        (dict(probability=np.zeros(10)), "probability: expected numbers above 0"),
        (dict(probability=np.ones(9)), "probability: expected"),
        (dict(probability=np.array([1.0] * 3 + [1e-300] * 7), K=5, protect=0), "probability: too uneven for K = 5"),
        (dict(K=4, protect=1, probability="norm"), "expects K > 4, got 4"),
        (dict(window=7), "window: expected 1 < window <= K \\+ 1 = 6, got 7"),
        (dict(window=2, protect=1), "window: expected 2 < window"),
        (dict(missing=np.full(10, -1.0)), "missing: expected squares >= 0"),
        (dict(profiles=np.zeros((0, 3))), "profiles: expected shape"),
        (dict(profiles=np.full((10, 3), np.inf)), "profiles: expected finite numbers, got inf"),
        (dict(weights=np.full(10, 0.2)), "weights: expected probabilities that sum to 1"),
    ],
)
def test_refusals(change, match):
    with pytest.raises(ValueError, match=match):
        sample(**(dict(profiles=cloud(0, 10, 3), K=5) | change))
