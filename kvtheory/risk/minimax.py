"""Best summaries of small caches, by going through all supports: what no reducer that keeps K of the cache's own tokens can beat.

A summary is a measure Phat = sum_i w_i delta_i, w >= 0 of sum 1, on at most K of the n tokens. Two risks, never mixed:

    linear   sum_j nu_j ||N_j(w)||^2,             N_j(w) = sum_i w_i Gamma_i(q_j), in the profile that is handed in;
    true     sum_j nu_j ||N_j(w)||^2 / D_j(w)^2,  D_j(w) = sum_i w_i b_i(q_j), N in the centred profile: `attention_risk`.

Linear, one law nu (query-aware): on a support the nearest point to 0 of a convex hull, solved by non-negative least squares.
Linear, several laws (query-agnostic): the worst law is a maximum of convex functions, on a support a second-order cone programme
(`best_for_laws`); of reducers that toss coins, a zero-sum game between them and the law, solved by columns (`best_mixture`).
True: on a support a sum of ratios, neither convex nor quasi-convex but for one query; so a bracket (`best_attended`), and a floor
under it (`hull_floor`) that grants every query weights of its own.

Every result carries what was reached and what is proved: no summary of the kind asked for is below `lower` (up to rounding), since
a convex f lies above its tangents: f(w') >= f(w) + min_i f'_i(w) - f'(w).w for all w' on the support.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.risk.bounds import budget
from kvtheory.risk.profiles import density, means, one_head, response_profiles
from kvtheory.risk.spectra import Spectrum

Float = NDArray[np.float64]

#: tokens: 3432 supports at most
LARGEST = 14
#: relative distance between what a mixture reaches and what is proved at which columns are no longer added
_CLOSED = 1e-7
_ROUNDS = 400


@dataclass(frozen=True)
class Optimum:
    """risk: of the summary (index ascending, weight > 0 of sum 1); lower: proved, no summary of K own tokens has less."""

    risk: float
    lower: float
    index: NDArray[np.intp]
    weight: Float


@dataclass(frozen=True)
class Mixture:
    """A reducer that tosses a coin: summary r, a row of weights (r, n), with chances[r]; and the law that makes it hard.

    risk: its mean risk under the worst law; lower: proved, no reducer, coins or not, stays below it under every law: it is the least
    risk under the law `law` (l,), a mixture of the laws asked for.
    """

    risk: float
    lower: float
    chances: Float
    weights: Float
    law: Float


def best_summary(profiles: ArrayLike, K: int, law: ArrayLike | None = None, equal: bool = False) -> Optimum:
    """The least linear risk of at most K own tokens, query-aware: exact, over all supports.

    profiles (n, m, c) as `response_profiles` gives them, n <= 14; law (m,): the queries' probabilities, default 1/m.
    equal False: weights free on the support. True: the same weight on each token kept, any number of them up to K; lower = risk.
    ValueError for n > 14, K < 1 and what does not fit.
    """
    gamma, laws = _profiles(profiles, None if law is None else np.asarray(law, dtype=np.float64)[None])
    K = min(budget(K), len(gamma))
    x = _rows(gamma, laws[0])
    if equal:
        w = _equal_weights(len(gamma), K)
        risks = ((w @ x) ** 2).sum(axis=1)
        at = int(np.argmin(risks))
        return _optimum(float(risks[at]), float(risks[at]), w[at])
    found = list(_each_support(x, K))
    best = min(found, key=lambda f: f.risk)
    return _optimum(best.risk, min(f.lower for f in found), best.w)


def best_for_laws(profiles: ArrayLike, K: int, laws: ArrayLike, equal: bool = False) -> Optimum:
    """min over summaries of max over laws of the linear risk: query-agnostic, without coins. Exact up to the solver's 1e-8.

    laws (l, m): each row the probabilities of the m queries under one law; the identity makes every law on these queries possible.
    On a support, min t with ||X_l^T w|| <= t for every law, X_l X_l^T the Gram matrix under law l: a second-order cone programme.
    Supports whose least risk under the mixture's hardest law is above the best found are not solved. `lower`: the least risk under the
    law sum_l mu_l nu_l, mu the programme's multipliers, which is below the maximum for any mu and flat about the best.
    profiles, K, equal, errors: as in `best_summary`.
    """
    gamma, p = _profiles(profiles, laws)
    n, K = len(gamma), min(budget(K), len(gamma))
    x = np.stack([_rows(gamma, law) for law in p])
    if equal:
        w = _equal_weights(n, K)
        risks = _table(w, x).max(axis=1)
        at = int(np.argmin(risks))
        return _optimum(float(risks[at]), float(risks[at]), w[at])
    hard = best_mixture(gamma, K, p).law
    queue = sorted(_each_support(_rows(gamma, hard @ p), K), key=lambda f: f.lower)
    best, reached, lower, solve = np.zeros(n), np.inf, np.inf, _cone_programme(len(p), x.shape[2], K)
    for found in queue:
        if found.lower >= reached:
            lower = min(lower, found.lower)
            break
        w = np.zeros((2, n))
        w[0, found.kept], mu = solve(x[:, found.kept])
        w[1, found.kept], _, floor = _nearest(_rows(gamma[found.kept], mu @ p))
        risks = _table(w, x).max(axis=1)
        if risks.min() < reached:
            best, reached = w[int(np.argmin(risks))], float(risks.min())
        lower = min(lower, max(found.lower, floor))
    return _optimum(reached, min(lower, reached), best)


def best_mixture(profiles: ArrayLike, K: int, laws: ArrayLike, equal: bool = False) -> Mixture:
    """min over random summaries of max over laws of the mean linear risk: the minimax value of all query-agnostic reducers.

    By von Neumann's theorem it is max over mu of the least risk under the law sum_l mu_l nu_l, mu in the simplex: each mu bounds it
    from below (`best_summary`), and each finite set of summaries from above (`game`, a linear programme whose multipliers are the
    next mu); the summary that is best against mu is added until both meet within 1e-7. profiles, K, laws, equal: as in `best_for_laws`.
    """
    gamma, p = _profiles(profiles, laws)
    n, K = len(gamma), min(budget(K), len(gamma))
    x = np.stack([_rows(gamma, law) for law in p])
    if equal:
        w = _equal_weights(n, K)
        value, chances, mu = game(_table(w, x))
        return Mixture(value, float((_table(w, x) @ mu).min()), chances[chances > 0], w[chances > 0], mu)
    even = np.full(len(p), 1 / len(p))
    mu, hard, columns, lower, best = even, even, np.zeros((0, n)), -np.inf, None
    noise = 1e-15 * float((x**2).sum(axis=2).max())
    for _ in range(_ROUNDS):
        found = list(_each_support(_rows(gamma, mu @ p), K))
        least, floor = min(f.risk for f in found), min(f.lower for f in found)
        if floor > lower:
            lower, hard = floor, mu
        # with the best all that are as good: where laws are alike up to a permutation of tokens, so are summaries
        columns = np.unique(np.vstack([columns, *(f.w[None] for f in found if f.risk <= least * (1 + 1e-9))]), axis=0)
        value, chances, mu = game(_table(columns, x))
        best = Mixture(value, min(lower, value), chances[chances > 0], columns[chances > 0], hard)
        if value - lower <= _CLOSED * value + noise:
            break
        mu = (mu + hard) / 2  # half way to the best law known: cutting planes alone swing from vertex to vertex
    assert best is not None
    return best


def game(risks: ArrayLike) -> tuple[float, Float, Float]:
    """(value, chances (r,), law (l,)) of the zero-sum game with payoff risks (r, l): min over mixtures of rows of max over columns."""
    from scipy.optimize import linprog

    table = np.asarray(risks, dtype=np.float64)
    checks.shape("risks", table, ("summary", "law"))
    checks.finite("risks", table, ("summary", "law"))
    if table.size == 0:
        raise ValueError(f"risks: expected at least one summary and one law, got shape {table.shape}")
    # the value lies between 0 and this, if no risk is negative: the solver's tolerances are absolute
    rows, unit = len(table), abs(float(table.max(axis=1).min())) or float(np.abs(table).max()) or 1.0
    done = linprog(
        np.append(np.zeros(rows), 1.0),
        A_ub=np.column_stack([table.T / unit, -np.ones(table.shape[1])]), b_ub=np.zeros(table.shape[1]),
        A_eq=np.append(np.ones(rows), 0.0)[None], b_eq=[1.0], bounds=[(0, None)] * rows + [(None, None)], method="highs",
    )  # fmt: skip
    if done.status != 0 or done.x is None:
        raise ArithmeticError(f"risks: no solution of the game: {done.message}")
    chances, law = np.maximum(done.x[:-1], 0), np.maximum(-done.ineqlin.marginals, 0)
    chances, law = chances / chances.sum(), law / law.sum()
    return float((chances @ table).max()), chances, law


def best_attended(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    K: int,
    law: ArrayLike | None = None,
    scale: float | None = None,
    *,
    equal: bool = False,
    refine: int = 12,
) -> Optimum:
    """The least TRUE risk of at most K own tokens, P uniform, query-aware: a bracket [lower, risk]; risk is reached by the summary.

    q (m, d), k (n, d), v (n, dv), n <= 14; law (m,) default 1/m. equal: equal weights on the support: exact, lower = risk.
    One query: exact. A_Phat is any mean of the kept values, w_i ~ x_i / b_i gives the mean with weights x, so the risk is the squared
    distance of A_P from their hull. Several: `risk` is the best of descents (SLSQP) from the linear optimum, from equal weights and
    from reweighted least squares, on the `refine` most promising supports: an upper bound, not proved optimal, never above `equal`. `lower` is proved: on
    a support D_j(w) <= max_i b_i(q_j), which makes the risk at least a convex quadratic; and it is at least `hull_floor`.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    b = density(q, k, scale=scale)
    if (b == 0).any():
        raise ValueError(
            "k: expected logits of one query within about 700 of each other, got attention weights that vanish"
        )
    gamma, laws = _profiles(
        response_profiles(q, k, _turned(v), scale=scale), None if law is None else np.asarray(law)[None]
    )
    p, n, K = laws[0], len(gamma), min(budget(K), len(gamma))
    true = _TrueRisk(gamma, b, p)
    same = _equal_weights(n, K)
    risks = true.of(same)
    dropped, least = same[int(np.argmin(risks))], float(risks.min())
    if equal:
        return _optimum(least, least, dropped)
    hull = _hull(_turned(v), means(q, k, _turned(v), np.full(n, 1 / n), scale)[0])
    supports = [list(S) for S in combinations(range(n), K)]
    if len(q) == 1:
        found = []
        for S in supports:
            x, risk, lower = hull(S, 0)
            w = np.zeros(n)
            w[S] = x / b[S, 0]
            found.append(_Found(S, w / w.sum(), risk, lower))
    else:
        found = [true.bracket(S) for S in supports]
        # never worse than dropping: the best equal weights, on a support they leave room on
        kept = np.sort(np.argsort(dropped == 0, kind="stable")[:K]).tolist()
        at = supports.index(kept)
        if least < found[at].risk:
            found[at] = found[at]._replace(w=dropped, risk=least)
        found.sort(key=lambda f: f.risk)
        reached = found[0].risk
        for i, f in enumerate(found[:refine]):
            if f.lower < reached and f.risk > 0:
                found[i] = true.descend(f)
                reached = min(reached, found[i].risk)
        for i, f in enumerate(found):
            if f.lower < reached:
                found[i] = f._replace(lower=max(f.lower, sum(p[j] * hull(f.kept, j)[2] for j in range(len(q)))))
    best = min(found, key=lambda f: f.risk)
    return _optimum(best.risk, min(best.risk, *(f.lower for f in found)), best.w)


def hull_floor(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, K: int, law: ArrayLike | None = None, scale: float | None = None
) -> float:
    """min over K tokens S of sum_j nu_j dist(A_P(q_j), conv{v_i : i in S})^2: below the true risk of any K own values, proved.

    A_Phat(q) is a mean of the kept values, whatever the weights and even whatever keys they are given. q (m, d), k (n, d), v (n, dv),
    n <= 14, P uniform. 0 where few values surround the outputs; attained by one query. On `lookup` it is at least `search_floor`.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    n, K = _small(len(k)), min(budget(K), len(k))
    p = _laws(None if law is None else np.asarray(law)[None], len(q))[0]
    hull = _hull(_turned(v), means(q, k, _turned(v), np.full(n, 1 / n), scale)[0])
    return min(sum(p[j] * hull(list(S), j)[2] for j in range(len(q))) for S in combinations(range(n), K))


def spectral_floor(spectrum: Spectrum, K: int) -> float:
    """n lambda (1/K - 1/n), lambda the least of the n - 1 leading eigenvalues: below the linear risk of any K own tokens (proved). P uniform.

    Proof. With X (n, .) the profiles, X^T 1 = 0, so that X X^T / n has Sigma's eigenvalues and the eigenvector 1 of eigenvalue 0.
    For w of sum 1, w - 1/n is orthogonal to 1 and ||X^T w||^2 = ||X^T (w - 1/n)||^2 >= n lambda ||w - 1/n||^2 >= n lambda (1/K - 1/n),
    as K numbers of sum 1 have a sum of squares >= 1/K. Where all eigenvalues are alike (`simplex`) it is (tr Sigma/K)(n - K)/(n - 1):
    there no K own tokens do better than random ones without replacement (`trace_bound`), in the mean or at best.
    ValueError for an incomplete spectrum and K > n.
    """
    if not spectrum.complete:
        raise ValueError("spectrum: expected all eigenvalues (rank None)")
    n, K = spectrum.n, budget(K)
    if n < K:
        raise ValueError(f"K: expected at most n = {n}, got {K}")
    values = spectrum.eigenvalues
    least = float(values[n - 2]) if 2 <= n <= len(values) + 1 else 0.0
    return least * (n / K - 1)


# --- parts


def _small(n: int) -> int:
    if n > LARGEST:
        raise ValueError(
            f"profiles: expected at most {LARGEST} tokens, got {n}: {comb(n, n // 2)} supports are too many to go through"
        )
    return n


def _laws(laws: ArrayLike | None, queries: int) -> Float:
    """(l, m) probabilities, checked; None: one law, 1/m each."""
    if laws is None:
        return np.full((1, queries), 1 / queries)
    p = np.asarray(laws, dtype=np.float64)
    checks.shape("laws", p, ("l", "m"), {"m": queries})
    checks.finite("laws", p, ("law", "query"))
    if len(p) == 0 or (p < 0).any() or (np.abs(p.sum(axis=1) - 1) > 1e-9).any():
        raise ValueError(
            f"laws: expected rows >= 0 that sum to 1, got {len(p)} rows, least entry {p.min(initial=np.inf)!r}, sums {p.sum(axis=1)}"
        )
    return p


def _profiles(profiles: ArrayLike, laws: ArrayLike | None) -> tuple[Float, Float]:
    gamma = np.asarray(profiles, dtype=np.float64)
    sizes = checks.shape("profiles", gamma, ("n", "m", "c"))
    checks.finite("profiles", gamma, ("token", "query", "channel"))
    if gamma.size == 0:
        raise ValueError(f"profiles: expected at least one of each axis, got shape {gamma.shape}")
    _small(sizes["n"])
    return gamma, _laws(laws, sizes["m"])


def _rows(gamma: Float, law: Float) -> Float:
    """x (n, n or fewer) with x x^T = sum_j law_j Gamma(q_j) Gamma(q_j)^T, by an orthogonal factor: nothing is squared."""
    x = (gamma * np.sqrt(law)[:, None]).reshape(len(gamma), -1)
    if x.shape[1] > len(x):
        return np.ascontiguousarray(np.asarray(np.linalg.qr(x.T, mode="r")).T)
    square = np.zeros((len(x), len(x)))
    square[:, : x.shape[1]] = x
    return square


def _turned(v: Float) -> Float:
    """v (n, dv) in at most n coordinates, distances kept."""
    return np.ascontiguousarray(np.asarray(np.linalg.qr(v.T, mode="r")).T) if v.shape[1] > len(v) else v


def _nearest(x: Float) -> tuple[Float, float, float]:
    """(w, f, lower) for min over the simplex of f(w) = ||x^T w||^2, x (K, r): the point of the rows' hull nearest to 0.

    As non-negative least squares: u = s w has ||x^T u||^2 + (1 - sum u)^2 = s^2 f + (1 - s)^2, least f/(1 + f) over s: increasing in f.
    """
    from scipy.optimize import nnls

    squares = np.einsum("ir,ir->i", x, x)
    unit2 = float(squares.max())
    if unit2 == 0:
        return np.append(1.0, np.zeros(len(x) - 1)), 0.0, 0.0
    system, right = np.ones((x.shape[1] + 1, len(x))), np.zeros(x.shape[1] + 1)
    np.divide(x.T, np.sqrt(unit2), out=system[:-1])
    right[-1] = 1.0
    u = nnls(system, right)[0]
    w = u / u.sum()
    point = system[:-1] @ w
    f = float(point @ point)
    return w, f * unit2, max(0.0, 2 * float((point @ system[:-1]).min()) - f) * unit2


class _Found(NamedTuple):
    """Of one support: the best weights known, dense (n,), their risk, and what is proved for all weights on it."""

    kept: list[int]
    w: Float
    risk: float
    lower: float


def _each_support(x: Float, K: int) -> Iterator[_Found]:
    for kept in combinations(range(len(x)), K):
        w = np.zeros(len(x))
        w[list(kept)], risk, lower = _nearest(x[list(kept)])
        yield _Found(list(kept), w, risk, lower)


def _equal_weights(n: int, K: int) -> Float:
    """Equal weights on every non-empty set of at most K of n tokens, (r, n)."""
    bits = (np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1
    kept = bits[bits.sum(axis=1) <= K]
    return kept / kept.sum(axis=1, keepdims=True)


def _table(w: Float, x: Float) -> Float:
    """Linear risks (r, l) of summaries w (r, n) under the laws whose factors are x (l, n, r)."""
    return np.asarray((np.einsum("rn,lnc->rlc", w, x) ** 2).sum(axis=2))


def _optimum(risk: float, lower: float, w: Float) -> Optimum:
    index = np.flatnonzero(w > 0)
    return Optimum(risk, lower, index, w[index] / w[index].sum())


def _cone_programme(laws: int, width: int, K: int) -> Any:
    """solve(x (l, K, r)) -> w (K,), mu (l,): min over the simplex of max_l ||x_l^T w||, its multipliers; compiled once for all supports."""
    import cvxpy

    factors = [cvxpy.Parameter((width, K)) for _ in range(laws)]
    w, t = cvxpy.Variable(K, nonneg=True), cvxpy.Variable()
    below = [cvxpy.norm(a @ w) <= t for a in factors]
    problem = cvxpy.Problem(cvxpy.Minimize(t), [cvxpy.sum(w) == 1, *below])

    def solve(x: Float) -> tuple[Float, Float]:
        unit = float(np.abs(x).max()) or 1.0
        for factor, a in zip(factors, x):
            factor.value = a.T / unit
        problem.solve(solver=cvxpy.CLARABEL)
        if w.value is None:
            raise ArithmeticError(f"profiles: no solution on a support: {problem.status}")
        found = np.maximum(np.asarray(w.value, dtype=np.float64), 0)
        mu = np.array([max(float(np.sum(c.dual_value)), 0.0) for c in below])
        # where the optimum is 0 no multiplier is needed
        return found / found.sum(), mu / mu.sum() if mu.sum() > 0 else np.full(laws, 1 / laws)

    return solve


def _hull(v: Float, o: Float) -> Any:
    """hull(S, j): (weights, dist(o_j, conv v_S)^2, a proved lower bound of it)."""
    return lambda S, j: _nearest(v[S] - o[j])


class _TrueRisk:
    """sum_j p_j ||N_j||^2 / D_j^2 on one cache."""

    def __init__(self, gamma: Float, b: Float, p: Float) -> None:
        self.gamma, self.b, self.p = gamma, b, p

    def of(self, w: Float) -> Float:
        """(r,) of summaries w (r, n); of any scale, as it divides out."""
        squares = (np.tensordot(w, self.gamma, 1) ** 2).sum(axis=2)
        return np.asarray((squares / (w @ self.b) ** 2) @ self.p)

    def gradient(self, w: Float) -> Float:
        point, mass = np.tensordot(w, self.gamma, 1), w @ self.b
        first = np.einsum("njc,jc->nj", self.gamma, point)
        return np.asarray(2 * (first / mass**2 - (point**2).sum(axis=1) / mass**3 * self.b) @ self.p)

    def bracket(self, S: list[int]) -> _Found:
        """The best of four candidates on the support S, and a floor: the denominators at their largest."""
        gamma, b = self.gamma[S], self.b[S]
        relaxed, _, lower = _nearest(_rows(gamma, self.p / b.max(axis=0) ** 2))
        linear = _nearest(_rows(gamma, self.p))[0]
        reweighted = _nearest(_rows(gamma, self.p / (linear @ b) ** 2))[0]
        w = np.zeros((4, len(self.gamma)))
        w[:, S] = [np.full(len(S), 1 / len(S)), relaxed, linear, reweighted]
        risks = self.of(w)
        best = int(np.argmin(risks))
        return _Found(S, w[best], float(risks[best]), lower)

    def descend(self, found: _Found) -> _Found:
        """A local search on the support, never worse than where it starts."""
        from scipy import optimize

        minimize: Any = optimize.minimize  # its stubs know no bounds given as pairs
        S = found.kept

        def dense(x: Float) -> Float:
            w = np.zeros(len(self.gamma))
            w[S] = np.maximum(x, 0)
            return w / w.sum()

        sum_one: Any = {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(len(S))}
        options: Any = {"maxiter": 200, "ftol": 1e-14}
        done = minimize(
            lambda x: float(self.of(dense(x)[None])[0]) / found.risk, found.w[S], jac=lambda x: self.gradient(dense(x))[S] / found.risk,
            bounds=[(0, 1)] * len(S), constraints=sum_one, method="SLSQP", options=options,
        )  # fmt: skip
        w = dense(done.x)
        risk = float(self.of(w[None])[0])
        return found._replace(w=w, risk=risk) if risk < found.risk else found
