"""The exact optimum of small caches between what every cache allows and what no reducer of own tokens can beat."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from kvtheory import balancing, risk
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical, search
from proofs_checks.risk.exhausted import (
    forced_equal,
    linear_risks,
    optimum,
    other_budget,
    rounding_of,
    small_heads,
    uniform,
)
from proofs_checks.risk.heads import (
    EPS,
    SQUARE_BECAUSE,
    Compared,
    Float,
    One,
    dense,
    factor,
    gram,
    named,
    worst_equality,
)

_SOLVED = (
    "on each support the solver's optimum is off by its rounding, of the size of that of the profiles' Gram matrix: "
    + SQUARE_BECAUSE
)


def _profiles(one: One) -> Float:
    return risk.response_profiles(one.q, one.k, one.v, None, one.scale)


def _solver(
    context: Context, best_summary: Function, group: str, ones: list[One], K: int
) -> Generator[Evidence, None, list[risk.Optimum]]:
    """The solver's optima, against linear systems and against the summaries that it hands out."""
    optima = [best_summary(_profiles(one), K) for one in ones]
    values = [optimum(context, one, K) for one in ones]
    yield worst_equality(
        f"least linear risk of at most {K} own tokens by the solver = that by all supports' linear systems", group,
        [Compared(one, found.risk, value, rounding_of(context, one, value)) for one, found, value in zip(ones, optima, values)],
        _SOLVED, role="control",
    )  # fmt: skip
    reached = []
    for one, found, value in zip(ones, optima, values):
        attended = float(linear_risks(one, dense(one.n, found.index, found.weight)[None])[0])
        reached.append(Compared(one, attended, found.risk, rounding_of(context, one, value)))
    yield worst_equality(
        f"linear risk, by attention, of the solver's summary of at most {K} tokens = the risk it states", group, reached, _SOLVED, role="control",
    )  # fmt: skip
    return optima


def _simplex_fraction(n: int, K: int) -> Fraction:
    """Least risk of K tokens at corners of a regular simplex of tr Sigma = 1, over all supports, by their linear systems, in rationals.

    <Gamma_i, Gamma_l> = n/(n - 1) (delta_il - 1/n); by symmetry a support of s tokens has equal weights, w^T G w = n/(n - 1) (1/s - 1/n).
    """
    return min(
        sum(
            Fraction(n, n - 1) * ((i == l) - Fraction(1, n)) / s**2
            for i in range(s)
            for l in range(s)  # noqa: E741
        )
        for s in range(1, K + 1)
    )  # type: ignore[return-value]


@claim(
    id="risk/minimax-trace", paper="2607.01520", section="Section 4 (query-agnostic minimax rate), under our reading: centred profile, linear risk, own tokens",
    statement="Of all caches of n tokens with tr Σ = T, the hardest has a least linear risk ‖∫ Γ_P dP̂‖² of K of its own tokens of exactly "
    "(T/K)(n − K)/(n − 1), whatever the weights, and no cache more: random sampling without replacement has that mean on each of them, so "
    "some K equally weighted tokens do as well, and on the regular simplex no K tokens do better. With the centred profile "
    "Γ(q) = (e_q(k)/Z_P(q)) (v − A_P(q)), P uniform. From below, for any cache: n λ (1/K − 1/n), λ the least of Σ's n − 1 leading eigenvalues.",
    formula="sup_{tr Σ = T} min_{|P̂| ≤ K} ‖∫ Γ_P dP̂‖² = (T/K)(n − K)/(n − 1),   min_{|P̂| ≤ K} ‖∫ Γ_P dP̂‖² ≥ n λ_{n−1}(Σ) (1/K − 1/n)",
    expected=Verdict.HOLDS,
    functions={
        "trace_bound": "kvtheory.risk.trace_bound",
        "spectral_floor": "kvtheory.risk.spectral_floor",
        "best_summary": "kvtheory.risk.best_summary",
        "simplex": "kvtheory.risk.simplex",
    },
    mutants=[
        *systematic.scales("trace_bound"),
        *systematic.square_dropped("trace_bound"),
        Mutant("tr Σ/K, no finite population factor", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, True)),
        *systematic.scales("spectral_floor"),
        *systematic.square_dropped("spectral_floor"),
        Mutant("mean eigenvalue for the least", "spectral_floor",
               lambda true: lambda s, K: true(replace(s, eigenvalues=np.full(s.n, s.trace / (s.n - 1))), K)),
        Mutant("1/K for 1/K − 1/n", "spectral_floor", lambda true: lambda s, K: true(s, K) * s.n / (s.n - K) if s.n > K else true(s, K)),
        *systematic.scales("best_summary", fields=("risk",)),
        other_budget("best_summary", 1), other_budget("best_summary", -1), forced_equal("best_summary"),
        *systematic.scales("simplex", fields=("v",)),
    ],
)  # fmt: skip
def minimax_trace(
    context: Context, *, trace_bound: Function, spectral_floor: Function, best_summary: Function, simplex: Function
) -> Iterator[Evidence]:
    for n, K in ((5, 2), (9, 3), (12, 5)):
        one = named("simplex", simplex(n))
        s = risk.spectrum(one.q, one.k, one.v, None, one.scale)
        least, where = _simplex_fraction(n, K), f"regular simplex of {n} tokens, tr Σ = 1, K = {K}"
        yield exact(what="least linear risk of at most K own tokens = (T/K)(n − K)/(n − 1)", ran_on=where, observed=least,
                    predicted=Fraction(n - K, K * (n - 1)))  # fmt: skip
        for what, value in (
            ("least linear risk by the solver", best_summary(_profiles(one), K).risk),
            ("(tr Σ/K)(n − K)/(n − 1) by the functions", trace_bound(s, K, replace=False)),
            ("n λ (1/K − 1/n) by the functions", spectral_floor(s, K)),
        ):
            yield numerical(what=f"{what} = its rational value", ran_on=where, observed=value, predicted=float(least), tolerance=64 * n * EPS,
                            because="eigenvalues and means of n equal terms", role="control")  # fmt: skip
    n, ratios = context.size(10, 12), []
    for K in (3, 5):
        for group, ones in small_heads(context, n, 6, context.size(3, 9)):
            optima = yield from _solver(context, best_summary, group, ones, K)
            above, below = [], []
            for one, found in zip(ones, optima):
                s = risk.spectrum(one.q, one.k, one.v, None, one.scale)
                equal = best_summary(_profiles(one), K, equal=True).risk
                room = rounding_of(context, one, found.risk)
                above.append(Compared(one, max(found.risk, equal), trace_bound(s, K, replace=False), room))
                below.append(Compared(one, spectral_floor(s, K), found.risk, room))
                ratios.append(found.risk / trace_bound(s, K, replace=False))
            yield worst_equality(
                f"least linear risk of at most {K} own tokens, weights free or equal, ≤ (tr Σ/K)(n − K)/(n − 1)",
                group,
                above,
                _SOLVED,
                relation="<=",
            )
            yield worst_equality(f"n λ (1/K − 1/n) ≤ the least linear risk of at most {K} own tokens", group, below, _SOLVED, relation="<=")  # fmt: skip

    tries, rng, most = context.size(40, 400), context.rng("near the simplex"), (0.0, "")
    for t in range(tries):
        n = int(rng.integers(4, 9))
        K, spread = int(rng.integers(1, n - 1)), 10 ** rng.uniform(-2, 0.5)
        one = named("perturbed", risk.flat_cache(np.eye(n) + spread * rng.standard_normal((n, n)) / np.sqrt(n)))
        s = risk.spectrum(one.q, one.k, one.v, None, one.scale)
        free = best_summary(_profiles(one), K).risk
        most = max(
            most, (spectral_floor(s, K) / free, f"floor over optimum at n = {n}, K = {K}, spread {spread:.3g}, try {t}"),
            (free / trace_bound(s, K, replace=False), f"optimum over sampling at n = {n}, K = {K}, spread {spread:.3g}, try {t}"),
        )  # fmt: skip
    yield search(
        what="largest of floor over optimum and optimum over (tr Σ/K)(n − K)/(n − 1) found by search ≤ 1", ran_on="simplexes with noise, 4 to 8 tokens",
        worst=most[0], bound=1.0, tries=tries, optimiser="random search", worst_case=most[1], tightness=most[0],
        note=f"on heads the best K tokens have {min(ratios):.2g} to {max(ratios):.2g} of the risk of random ones: the trace is the worst case, not the heads'",
    )  # fmt: skip


def _climb(context: Context, purpose: str, K: int, m: int, score: Function) -> tuple[float, Float, int]:
    """(largest score, profiles, tries): random restarts, then Gaussian steps that shrink while they do not help. n = 7, 6 channels."""
    rng, tries = context.rng(purpose), 0
    best: tuple[float, Float] = (0.0, np.zeros((7, 6)))
    for _ in range(context.size(2, 24)):
        x, width = rng.standard_normal((7, 6)), 0.5
        value = score(x, K, m)
        for _ in range(context.size(40, 400)):
            step = x + width * rng.standard_normal(x.shape)
            there = score(step, K, m)
            tries += 1
            if there > value:
                x, value = step, there
            else:
                width *= 0.97
        if value > best[0]:
            best = (value, x)
    return *best, tries


def _tail_of_smallest(true: Function) -> Function:
    def wrong(*args: object, **kwargs: object) -> object:
        s = true(*args, **kwargs)
        return replace(s, eigenvalues=s.eigenvalues[::-1])

    return wrong


@claim(
    id="risk/minimax-sandwich", paper="2607.01520", section="Section 4.3 (query-aware minimax rate), under our reading: centred profile, linear risk, own tokens",
    statement="The least linear risk of K of a cache's own tokens, weights free, is at most that of the derandomised spectral walk and so at most "
    "2 tail_m(Σ)/(K − 2m) for every m < K/2, and 0 as soon as K exceeds the rank of Σ. A rate tail_m/K cannot be improved by more than a constant: on the "
    "regular simplex the least risk is (tail_m/K)(n − K)/(n − 1 − m) for every m, so at m = K/3 the upper bound is at most 6 (n − 1 − m)/(n − K) times "
    "the truth there. With the centred profile Γ(q) = (e_q(k)/Z_P(q)) (v − A_P(q)), P uniform.",
    formula="min_{|P̂| ≤ K} ‖∫ Γ_P dP̂‖² ≤ 2 tail_m(Σ)/(K − 2m);   = 0 for K > rank Σ;   = (tail_m/K)(n − K)/(n − 1 − m) on the simplex",
    expected=Verdict.HOLDS,
    functions={
        "best_summary": "kvtheory.risk.best_summary",
        "spectrum": "kvtheory.risk.spectrum",
    },
    mutants=[
        *systematic.scales("best_summary", fields=("risk",)),
        *systematic.square_dropped("best_summary", fields=("risk",)),
        other_budget("best_summary", 1), other_budget("best_summary", -1), forced_equal("best_summary"),
        *systematic.scales("spectrum", fields=("eigenvalues",)),
        Mutant("smallest eigenvalues left out of the tail", "spectrum", _tail_of_smallest),
    ],
)  # fmt: skip
def minimax_sandwich(context: Context, *, best_summary: Function, spectrum: Function) -> Iterator[Evidence]:
    n = 12
    one = named("simplex", risk.simplex(n))
    s = spectrum(one.q, one.k, one.v, None, one.scale)
    for K, m in ((3, 1), (6, 2)):
        yield numerical(
            what="least linear risk of K own tokens = (tail_m/K)(n − K)/(n − 1 − m)", ran_on=f"regular simplex, n = {n}, K = {K}, m = {m}",
            observed=best_summary(_profiles(one), K).risk, predicted=s.tail(m) / K * (n - K) / (n - 1 - m), tolerance=64 * n * EPS,
            because="eigenvalues and means of n equal terms",
            details={"2 tail_m/(K − 2m) over the optimum": risk.spectral_bound(s, K, m) / best_summary(_profiles(one), K).risk},
        )  # fmt: skip
    rank = 3
    one = named("few directions", risk.flat_cache(context.rng("few directions").standard_normal((n, rank))))
    trace = risk.spectrum(one.q, one.k, one.v, None, one.scale).trace
    where = f"{n} Gaussian profiles of rank {rank}, all attended to alike"
    yield numerical(what="least linear risk of rank + 1 own tokens over tr Σ: 0 but for rounding (Carathéodory)", ran_on=f"{where}, K = {rank + 1}",
                    observed=best_summary(_profiles(one), rank + 1).risk / trace, predicted=(64 * n * EPS) ** 2, relation="<=", tolerance=0.0,
                    because="a mean of 12 profiles, each rounded at eps, squared")  # fmt: skip
    n, K = context.size(10, 12), 5
    for group, ones in small_heads(context, n, 6, context.size(3, 9)):
        optima = yield from _solver(context, best_summary, group, ones, K)
        walks, bounds, gaps = [], [], {}
        for one, found in zip(ones, optima):
            x = context.memo(("factor", one.label, n), lambda one=one: factor(one, gram(one, uniform(one))))  # type: ignore[misc]
            s = spectrum(one.q, one.k, one.v, None, one.scale)
            m = min(range((K - 1) // 2 + 1), key=lambda m, s=s: risk.spectral_bound(s, K, m))  # type: ignore[misc]
            w = dense(n, *balancing.sample(x, K, "spectral", m, seed=context.seed, derandomise=True))
            walk, bound = float(linear_risks(one, w[None])[0]), risk.spectral_bound(s, K, m)
            room = rounding_of(context, one, found.risk) + 1e-8
            walks.append(Compared(one, found.risk, walk, room))
            bounds.append(Compared(one, walk, bound, room))
            gaps[one.label] = {"optimum over bound": found.risk / bound, "walk over bound": walk / bound, "m": m}
        yield worst_equality(
            f"least linear risk of at most {K} own tokens ≤ that of the derandomised walk",
            group,
            walks,
            _SOLVED,
            relation="<=",
        )
        worst = worst_equality(f"linear risk of the derandomised walk ≤ 2 tail_m/(K − 2m), K = {K}, best m", group, bounds,
                               _SOLVED + "; a walk settles a coordinate within 1e-9", relation="<=")  # fmt: skip
        worst.details["sandwich"] = gaps
        yield worst

    def over_bound(walk: bool) -> Function:
        def score(x: Float, K: int, m: int) -> float:
            x = x - x.mean(axis=0)
            bound = risk.spectral_bound(risk.profile_spectrum(x[:, None, :]), K, m)
            if bound <= 0:
                return 0.0
            if not walk:
                return float(best_summary(x[:, None, :], K).risk / bound)
            w = dense(len(x), *balancing.sample(x, K, "spectral", m, seed=context.seed, derandomise=True))
            return float(((w @ x) ** 2).sum() / bound)

        return score

    for K, m in ((3, 1), (5, 1)):
        for walk, whose in ((True, "the derandomised walk"), (False, "the exact optimum")):
            worst_ratio, x, tries = _climb(context, f"climb {K} {m} {whose}", K, m, over_bound(walk))
            s = risk.profile_spectrum((x - x.mean(axis=0))[:, None, :])
            yield search(
                what=f"largest linear risk of {whose} over 2 tail_m/(K − 2m) found by search ≤ 1", ran_on=f"7 tokens, 6 channels, K = {K}, m = {m}",
                worst=worst_ratio, bound=1.0, tries=tries, optimiser="hill climbing with shrinking Gaussian steps", tightness=worst_ratio,
                worst_case=f"eigenvalues {', '.join(f'{v / s.trace:.3g}' for v in s.eigenvalues[:3])} of the trace",
            )  # fmt: skip
    for m, pairs in ((0, 6), (1, 6), (2, 6)):
        one = named("opposed pairs", risk.opposed_pairs(m, pairs, context.seed))
        K = pairs + 2 * m
        s = spectrum(one.q, one.k, one.v, None, one.scale)
        free = best_summary(_profiles(one), K).risk
        yield numerical(
            what="least linear risk ≤ 2 tail_m/(K − 2m), where each step of the walk is as bad as its proof allows", ran_on=f"{pairs} opposed pairs, m = {m}, K = {K}",
            observed=free, predicted=risk.spectral_bound(s, K, m), relation="<=", tolerance=64 * n * EPS, because="sums of n terms",
            tightness=free / risk.spectral_bound(s, K, m),
        )  # fmt: skip
