"""Look-ups: the centred trace says nothing about their risk (C-T6), a bound that always holds (C-L2), a floor for them (C-T4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import attention, risk
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, search, statistical
from proofs_checks.risk.heads import EPS, Float, One, energies, groups, named, outputs, synthetic

#: the masses at which theory C-T6 reports the regime (n = 256, K = 64), as fractions
MASSES = (Fraction(1, 2), Fraction(88, 100), Fraction(982, 1000), Fraction(9997, 10000))


def _two_tokens(a: Fraction) -> tuple[Fraction, Fraction]:
    """(true risk, tr Σ) of the smallest instance, exactly and by enumeration: 2 tokens, 2 queries, K = 1.

    Query j has attention a on token j and 1 - a on the other; values (1, 0) and (0, 1); each token is kept with probability 1/2.
    """
    values = [(Fraction(1), Fraction(0)), (Fraction(0), Fraction(1))]
    true, trace = Fraction(0), Fraction(0)
    for weights in ((a, 1 - a), (1 - a, a)):
        o = [weights[0] * values[0][c] + weights[1] * values[1][c] for c in range(2)]
        for i in range(2):
            square = (values[i][0] - o[0]) ** 2 + (values[i][1] - o[1]) ** 2
            true += square / 4  # token i alone gives its value; mean over 2 queries and 2 subsets
            trace += 2 * weights[i] ** 2 * square / 2  # n a_i^2 ||v_i - o||^2, mean over 2 queries
    return true, trace


def _linearised(true: Function) -> Function:
    """The ratio of the denominators taken as 1."""

    def wrong(q: Any, k: Any, v: Any, index: Any, weight: Any, scale: Any = None, *, weights: Any = None) -> float:
        gamma = risk.response_profiles(q, k, v, weights, scale)
        return risk.linear_risk(gamma, index, weight)

    return wrong


def _augmented(true: Function) -> Function:
    return lambda q, k, v, weights=None, scale=None, kind="centred", rank=None: true(
        q, k, v, weights, scale, "augmented", rank
    )


def _subsets(context: Context, n: int, K: int, draws: int) -> Float:
    """Random subsets of K as weights (draws, n)."""
    rng = context.rng(f"subsets {n} {K}")
    w = np.zeros((draws, n))
    for row in w:
        row[rng.choice(n, K, replace=False)] = 1 / K
    return w


def _true_risks(one: One, w: Float) -> Float:
    return energies(outputs(one, w) - outputs(one, np.full((1, one.n), 1 / one.n)))


@claim(
    id="risk/retrieval-regime", paper="2607.01520", section="Section 4 (query-agnostic upper bound); theory C-T6",
    statement="Random sampling has mean squared attention error at most tr Σ/K for every cache, without assumptions, Σ being built "
    "from the centred profile (C-D1). It has not: as the mass of a query concentrates on one token, v − A_P vanishes there and tr Σ "
    "with it, while losing that token loses the answer, through Z_P/Z_P̂. Heads with an attention sink are in this regime.",
    formula="E r(P̂) = E_ν E ‖A_P̂ − A_P‖² ≤ tr Σ_{P,ν}/K   (without replacement: times (n − K)/(n − 1))",
    expected=Verdict.FAILS,
    functions={
        "trace_bound": "kvtheory.risk.trace_bound",
        "spectrum": "kvtheory.risk.spectrum",
        "attention_risk": "kvtheory.risk.attention_risk",
    },
    mutants=[
        *systematic.scales("trace_bound"),
        *systematic.square_dropped("trace_bound"),
        Mutant("no finite population factor", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, True)),
        *systematic.scales("spectrum", fields=("trace",)),
        Mutant("augmented profile for the centred one", "spectrum", _augmented),
        *systematic.scales("attention_risk"),
        Mutant("denominators taken as equal (linearised)", "attention_risk", _linearised),
    ],
    figure="retrieval-regime", correction="risk/safe-bound",
)  # fmt: skip
def retrieval_regime(
    context: Context, *, trace_bound: Function, spectrum: Function, attention_risk: Function
) -> Iterator[Evidence | Picture]:
    # Smallest counterexample, in rationals; and the functions on the same cache.
    for a in (Fraction(3, 4), Fraction(1, 2)):
        true, trace = _two_tokens(a)
        one = named("two tokens", risk.lookup(2, float(a)))
        where = f"2 tokens, 2 queries with mass {a} on their own, orthonormal values, K = 1"
        bound = trace_bound(spectrum(one.q, one.k, one.v, None, one.scale), 1, replace=False)
        found = np.mean([attention_risk(one.q, one.k, one.v, [i], [1.0], one.scale) for i in range(2)])
        why = "two-term softmax sums; the logit ln(a/(1 - a)) is rounded once"
        yield numerical(what="tr Σ/K by the functions against the rational value", ran_on=where, observed=bound, predicted=float(trace),
                        tolerance=64 * EPS, because=why, role="control")  # fmt: skip
        yield numerical(what="true mean risk by the functions against the rational value", ran_on=where, observed=float(found),
                        predicted=float(true), tolerance=64 * EPS, because=why, role="control")  # fmt: skip
        yield exact(
            what="true mean risk of both subsets against tr Σ/K", ran_on=where, observed=true, predicted=trace, relation="<=",
            tightness=float(true / trace),
            note="with x = 2a(1 − a): risk 1 − x against bound 2x², so it fails for every a but 1/2" if a != Fraction(1, 2) else "equal",
        )  # fmt: skip

    # Theory's instance, in closed form, and as the functions see it.
    n, K = context.size(64, 256), context.size(16, 64)
    w = _subsets(context, n, K, 2)
    curve = []
    for a in MASSES:
        one = named(f"look-up, mass {float(a)}", risk.lookup(n, float(a)))
        where = f"look-up, n = {n}, K = {K}, mass {float(a)} on the query's own token, orthonormal values"
        s = spectrum(one.q, one.k, one.v, None, one.scale)
        bound = trace_bound(s, K, replace=False)
        closed = float(risk.lookup_trace(n, a)) / K * (n - K) / (n - 1)
        # v - o cancels to 1 - a, of which rounding is eps / (1 - a), squared; the logits are rounded at eps ln(n/(1 - a))
        tolerance = 64 * EPS * np.log(n / (1 - float(a))) / (1 - float(a))
        why = "cancellation of v − A_P to 1 − a, and rounding of a logit of ln(n a/(1 − a))"
        yield numerical(what="tr Σ/K·(n−K)/(n−1) by the functions against its closed form", ran_on=where, observed=bound,
                        predicted=closed, tolerance=tolerance, because=why, role="control")  # fmt: skip
        mean = float(risk.lookup_sampling_risk(n, a, K))
        for row in w:
            kept = np.flatnonzero(row)
            yield numerical(
                what="true risk of a random subset (all have the same) against its closed form", ran_on=where,
                observed=attention_risk(one.q, one.k, one.v, kept, row[kept], one.scale), predicted=mean, tolerance=tolerance,
                because=why, role="control",
            )  # fmt: skip
        found = float(_true_risks(one, w).mean())
        yield numerical(what="true mean risk against tr Σ/K·(n−K)/(n−1)", ran_on=where, observed=found, predicted=bound, relation="<=",
                        tolerance=tolerance, because=why, tightness=found / bound)  # fmt: skip
        # theory prints, for n = 256, K = 64: true .220/.596/.737/.763, tr Σ/K .257/.045/.0013/.0000
        curve.append({
            "mass": float(a), "n": n, "K": K, "true": mean, "trace_bound": closed,
            "augmented_trace_bound": risk.trace_bound(risk.spectrum(*one[1:4], None, one.scale, "augmented"), K, replace=False),
            "safe_bound": risk.safe_bound(*one[1:4], K, one.scale),
        })  # fmt: skip

    # Which real heads are there.
    heads, points = groups(context, context.size(64, 242), context.size(8, 32)), []
    for group, ones in heads:
        draws = context.size(60, 1000)
        K = ones[0].n // 3
        w = _subsets(context, ones[0].n, K, draws)
        rows = []
        for one in ones:
            bound = trace_bound(spectrum(one.q, one.k, one.v, None, one.scale), K, replace=False)
            weights = attention.weights(one.q, one.k, one.scale)
            rest = One(one.label, one.q, one.k[1:], one.v[1:], one.scale)
            rest_w = _subsets(context, rest.n, K, draws)
            rest_bound = risk.trace_bound(risk.spectrum(*rest[1:4], None, one.scale), K, replace=False)
            rows.append({
                "head": one.label, "a_max": float(weights.max(axis=1).mean()), "mass_on_first": float(weights[:, 0].mean()),
                "true_over_bound": _true_risks(one, w) / bound, "without_first": float(_true_risks(rest, rest_w).mean() / rest_bound),
                "augmented_over_centred": risk.spectrum(*one[1:4], None, one.scale, "augmented").trace * (one.n - K) / (one.n - 1) / K / bound,
            })  # fmt: skip
        worst = max(rows, key=lambda r: float(r["true_over_bound"].mean()))
        above = sum(float(r["true_over_bound"].mean()) > 2 for r in rows)
        yield statistical(
            what="true mean risk over tr Σ/K·(n−K)/(n−1), worst head", ran_on=f"{group}; n = {ones[0].n}, K = {K}, {draws} subsets",
            interval=mean_interval(worst["true_over_bound"], 1 - context.alpha(len(heads) * len(ones))), predicted=1.0, relation="<=",
            worst_case=f"{worst['head']}: mean largest attention weight {worst['a_max']:.4f}, {worst['mass_on_first']:.4f} of it on token 0",
            note=f"{above} of {len(rows)} heads above 2; {sum(r['without_first'] > 2 for r in rows)} with token 0 out of the cache",
            details={"heads": [r | {"true_over_bound": float(r["true_over_bound"].mean())} for r in rows]},
        )  # fmt: skip
        points += [r | {"true_over_bound": float(r["true_over_bound"].mean())} for r in rows]
    yield Picture("retrieval-regime", {"curve": curve, "heads": points})


def _instances(context: Context) -> Iterator[tuple[One, int]]:
    """Caches small enough to take every subset of, and budgets: synthetic kinds, look-ups, and needles of every sharpness."""
    for one in synthetic(context, 7, 6):
        yield from ((one, K) for K in (2, 4))
    for a in (0.5, 0.9, 0.9997):
        yield named(f"look-up, n = 2, mass {a}", risk.lookup(2, a)), 1
        yield named(f"look-up, n = 8, mass {a}", risk.lookup(8, a)), 4
    big = risk.lookup(8, 0.99)
    yield named("look-up, n = 8, values of norm 100", big._replace(v=100 * big.v)), 4


@claim(
    id="risk/safe-bound", paper="2607.01520", section="Section 4 (query-agnostic upper bound), corrected; theory C-L2",
    statement="For every cache, sampling K tokens with or without replacement has true mean risk at most 4 B² ρ/K, ρ the mean over "
    "queries of n Σ aᵢ² and B the radius of the values. No profile enters. It is what can be said without assumptions, and it is "
    "loose: where attention is a look-up it exceeds the largest possible error.",
    formula="E r(P̂) ≤ 4 B² ρ/K,   ρ = E_ν [n Σᵢ aᵢ²],   B = maxᵢ ‖vᵢ − v̄‖",
    expected=Verdict.HOLDS, functions={"safe_bound": "kvtheory.risk.safe_bound"},
    mutants=[
        *systematic.square_dropped("safe_bound"),
        Mutant("n missing in ρ", "safe_bound", lambda true: lambda q, k, v, K, scale=None: true(q, k, v, K, scale) / len(k)),
        Mutant("ρ left out", "safe_bound", lambda true: lambda q, k, v, K, scale=None: true(0 * np.asarray(q), k, v, K, scale)),
        Mutant("1/K squared", "safe_bound", lambda true: lambda q, k, v, K, scale=None: true(q, k, v, K, scale) / K),
        Mutant("constant 1/2 for 4", "safe_bound", lambda true: lambda q, k, v, K, scale=None: true(q, k, v, K, scale) / 8),
    ],
)  # fmt: skip
def safe_bound(context: Context, *, safe_bound: Function) -> Iterator[Evidence]:
    def ratio(one: One, K: int, replace: bool) -> float:
        def truth() -> float:
            n = one.n
            if replace:
                draws = np.array(list(itertools.product(range(n), repeat=K)))
                w = np.stack([np.bincount(d, minlength=n) for d in draws]) / K
            else:
                subsets = np.array(list(itertools.combinations(range(n), K)))
                w = np.zeros((len(subsets), n))
                np.put_along_axis(w, subsets, 1 / K, axis=1)
            return float(_true_risks(one, w).mean())

        mean = context.memo(("truth", one.label, K, replace), truth)
        return mean / safe_bound(one.q, one.k, one.v, K, one.scale)

    found = [(ratio(one, K, False), f"{one.label}, K = {K}") for one, K in _instances(context)]
    for K in (16, 32):  # every subset has the same risk
        one = named("look-up, n = 64, mass 0.9997", risk.lookup(64, 0.9997))
        mean = float(_true_risks(one, _subsets(context, 64, K, 1))[0])
        found.append((mean / safe_bound(one.q, one.k, one.v, K, one.scale), f"{one.label}, K = {K}"))
    worst = max(found)
    yield numerical(
        what="mean true risk over all subsets / bound, largest", ran_on=f"{len(found)} small caches and budgets", observed=worst[0],
        predicted=1.0, relation="<=", tolerance=1e-9, because="ratios stay far from 1 or exceed it outright", worst_case=worst[1],
        tightness=worst[0],
    )  # fmt: skip
    tries, rng, best = context.size(60, 1000), context.rng("adversary"), (0.0, "")
    for t in range(tries):
        n = int(rng.integers(2, 6))
        K = int(rng.integers(1, min(n, 4)))
        sharp, spread = 10 ** rng.uniform(-1, 1.5), 10 ** rng.uniform(-1, 1)
        v = rng.standard_normal((n, 2))
        v[0] *= spread
        one = One(f"adversary {t}", sharp * rng.standard_normal((2, 2)), rng.standard_normal((n, 2)), v, 0.7)
        best = max(best, *((ratio(one, K, replace), f"n = {n}, K = {K}, sharpness {sharp:.3g}, {'with' if replace else 'without'} replacement")
                           for replace in (True, False)))  # fmt: skip
    yield search(
        what="mean true risk / bound", ran_on="2 to 5 tokens, 2 queries, random sharpness and one value of random size", worst=best[0],
        bound=1.0, tries=tries, optimiser="random search", worst_case=best[1], tightness=best[0],
    )  # fmt: skip


@claim(
    id="risk/search-lower-bound", paper="2607.01520", section="Section 4 (search instances); theory C-T4, no profile enters",
    statement="On a search instance, where query j puts half its mass on token j and values are orthonormal, every summary made of K of "
    "the cache's own tokens, however weighted, has true risk at least (1 − K/n)/4: the tokens it lacks alone cost exactly that much.",
    formula="r(P̂) ≥ (1/n) Σ_{j not kept} ⟨A_P̂(q_j) − A_P(q_j), v_j⟩² = mass² (1 − K/n),   mass = 1/2",
    assumptions=("the summary's tokens are tokens of the cache: with linearly independent queries, 2 dv made-up tokens have no risk at all",),
    expected=Verdict.HOLDS_UNDER, functions={"search_floor": "kvtheory.risk.search_floor"},
    mutants=[
        *systematic.scales("search_floor"),
        *systematic.square_dropped("search_floor"),
        Mutant("1 - (K/n)^2", "search_floor", lambda true: lambda n, K, mass=0.5: true(n, K, mass) * (n + K) / n),
        Mutant("mass for mass^2", "search_floor", lambda true: lambda n, K, mass=0.5: true(n, K, mass) / mass),
    ],
)  # fmt: skip
def search_lower_bound(context: Context, *, search_floor: Function) -> Iterator[Evidence]:
    n = context.size(32, 128)
    own = {mass: named(f"look-up, mass {mass}", risk.lookup(n, mass)) for mass in (0.5, 0.9)}
    least: tuple[float, str] = (np.inf, "")
    for mass, one in own.items():
        for K in (n // 8, n // 4, n // 2, n - 1):
            rng = context.rng(f"own tokens {mass} {K}")
            w = np.zeros((4, n))
            for r, row in enumerate(w):
                row[rng.choice(n, K, replace=False)] = 1.0 if r == 0 else rng.exponential(size=K)
            w /= w.sum(axis=1, keepdims=True)
            error = outputs(one, w) - outputs(one, np.full((1, n), 1 / n))
            missing = np.where(w == 0, np.einsum("rjc,jc->rj", error, one.v) ** 2, 0).sum(axis=1) / n
            floor = search_floor(n, K, mass)
            strained = missing[np.argmax(np.abs(missing - floor))]
            yield numerical(
                what="squared error along the values of the tokens that are missing, any weights",
                ran_on=f"look-up, n = {n}, mass {mass}, K = {K}, 4 summaries, the worst", observed=float(strained), predicted=floor,
                tolerance=64 * EPS * n, because="sums of n terms, and rounding of a logit of ln(n a/(1 − a))",
            )  # fmt: skip
            ratios = energies(error) / max(floor, EPS)
            least = min(
                least,
                (float(ratios.min()), f"mass {mass}, K = {K}, {'equal' if ratios.argmin() == 0 else 'random'} weights"),
            )
    yield search(
        what="true risk / floor, least found", ran_on=f"look-ups, n = {n}, own tokens, equal and random weights", worst=least[0], bound=1.0,
        relation=">=", tries=32, optimiser="random search", worst_case=least[1], tightness=1 / least[0],
    )  # fmt: skip
    dv = 4
    one = named("look-up with signs", risk.lookup(n, 0.5, dv, context.seed))
    o = outputs(one, np.full((1, n), 1 / n))[0]
    keys, values = risk.summary_by_synthetic_tokens(one.q, o, one.scale)
    made_up = One("made-up tokens", one.q, keys, values, one.scale)
    found = float(((outputs(made_up, np.full((1, 2 * dv), 1 / (2 * dv)))[0] - o) ** 2).sum(axis=1).mean())
    yield numerical(
        what="true risk of 8 made-up tokens against the floor for 8 own ones", ran_on=f"search instance, n = {n}, dv = {dv}, random signs",
        observed=found, predicted=search_floor(n, 2 * dv), relation=">=", tolerance=1e-9, because="0 but for rounding", role="assumption",
        note="so a lower bound over all measures of support K needs value_dim of order n, or dependent queries",
    )  # fmt: skip
