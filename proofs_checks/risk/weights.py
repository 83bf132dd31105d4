"""Weights against mere dropping: the best weighted K tokens and the best equally weighted ones, exactly, on small caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from kvtheory import risk
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, search
from proofs_checks.risk.exhausted import (
    dropped,
    forced_equal,
    optimum,
    other_budget,
    output_room,
    rounding_of,
    small_heads,
    subsets,
    true_risks,
)
from proofs_checks.risk.heads import EPS, SQUARE_BECAUSE, Compared, Float, One, dense, named, worst_equality

_SOLVED = "rounding of outputs and of the solver, of the size of that of the profiles: " + SQUARE_BECAUSE


def _profiles(one: One, kind: Any = "centred") -> Float:
    return risk.response_profiles(one.q, one.k, one.v, None, one.scale, kind)


def _two_of_three() -> Fraction:
    """Least squared error of at most two equally weighted of the values -2, 1, 1 of mean 0, all attended to alike."""
    values = (Fraction(-2), Fraction(1), Fraction(1))
    return min((sum(S, Fraction(0)) / len(S)) ** 2 for s in (1, 2) for S in combinations(values, s))


def _raised(found: risk.Optimum) -> risk.Optimum:
    return replace(found, lower=1.2 * found.risk)


def _exactly(true: Function) -> Function:
    """Exactly K tokens where at most K are allowed."""

    def wrong(profiles: Any, K: int, law: Any = None, equal: bool = False) -> Any:
        if not equal:
            return true(profiles, K, law)
        x = np.asarray(profiles)
        rows = [S for S in combinations(range(len(x)), K)]
        risks = [float((x[list(S)].mean(axis=0) ** 2).sum(axis=1).mean()) for S in rows]
        best = int(np.argmin(risks))
        return risk.Optimum(risks[best], risks[best], np.array(rows[best]), np.full(K, 1 / K))

    return wrong


@claim(
    id="risk/weights-beat-dropping", paper="kvtheory", section="a statement of our own; the true risk, and the linear one of the centred profile",
    statement="A statement of our own. The best K own tokens with free weights are never worse than the best K or fewer of equal weight, in linear and in true "
    "risk, and can be better without bound: of the values −2, 1, 1, attended to alike, two weighted tokens have no error and two equal ones at least 1/4.",
    formula="min_{w, |supp w| ≤ K} r(Σ wᵢ δᵢ) ≤ min_{0 < |S| ≤ K} r(Σ_{i ∈ S} δᵢ/|S|),   0 < 1/4 on the instance",
    expected=Verdict.HOLDS,
    functions={"best_summary": "kvtheory.risk.best_summary", "best_attended": "kvtheory.risk.best_attended"},
    mutants=[
        *systematic.scales("best_summary", fields=("risk",)), *systematic.scales("best_attended", fields=("risk",)),
        forced_equal("best_summary"), forced_equal("best_attended"),
        Mutant("weights always free (linear)", "best_summary", lambda true: lambda profiles, K, law=None, equal=False: true(profiles, K, law)),
        Mutant("weights always free (true)", "best_attended", lambda true: lambda *a, **k: true(*a, **{**k, "equal": False})),
        Mutant("exactly K tokens", "best_summary", _exactly),
        other_budget("best_summary", 1), other_budget("best_attended", 1), other_budget("best_attended", -1),
        Mutant("lower bound not one", "best_attended", lambda true: lambda *a, **k: _raised(true(*a, **k))),
    ],
    figure="weights-against-dropping",
)  # fmt: skip
def weights_beat_dropping(
    context: Context, *, best_summary: Function, best_attended: Function
) -> Iterator[Evidence | Picture]:
    one = named("three values", risk.flat_cache(np.array([[-2.0], [1.0], [1.0]])))
    where = "values −2, 1, 1 attended to alike, K = 2"
    least, weighted = _two_of_three(), (Fraction(1, 3) * -2 + Fraction(2, 3) * 1) ** 2
    yield exact(
        what="least squared error with equal weights > that with weights 1/3 and 2/3",
        ran_on=where,
        observed=least,
        predicted=weighted,
        relation=">",
    )
    yield exact(
        what="least squared error with equal weights = 1/4",
        ran_on=where,
        observed=least,
        predicted=Fraction(1, 4),
        role="control",
    )
    for equal, value in ((False, weighted), (True, least)):
        for name, found in (
            ("linear", best_summary(_profiles(one), 2, equal=equal).risk),
            ("true", best_attended(one.q, one.k, one.v, 2, None, one.scale, equal=equal).risk),
        ):
            yield numerical(
                what=f"least {name} risk by the functions, {'equal' if equal else 'free'} weights = its rational value, plus 1", ran_on=where, observed=1 + found,
                predicted=1 + float(value), tolerance=64 * EPS, because="three-term sums", role="control",
            )  # fmt: skip
    one = named("four values", risk.flat_cache(np.array([[0.0], [10.0], [11.0], [-21.0]])))
    yield numerical(
        what="least linear risk by the function, equal weights on at most two = 0, by one token; plus 1", ran_on="values 0, 10, 11, −21 attended to alike, K = 2",
        observed=1 + best_summary(_profiles(one), 2, equal=True).risk, predicted=1.0, tolerance=64 * EPS, because="four-term sums", role="control",
    )  # fmt: skip
    yield _not_below(context, best_attended)
    n, ratios = context.size(9, 12), []
    for K in (2, 4):
        for group, ones in small_heads(context, n, 5, context.size(2, 9)):
            systems, enumerated, attended, linear, true, bracket = [], [], [], [], [], []
            for one in ones:
                free, same = (best_summary(_profiles(one), K, equal=e).risk for e in (False, True))
                truth = optimum(context, one, K)
                systems.append(Compared(one, free, truth, rounding_of(context, one, truth)))
                truth = dropped(context, one, K, true=False)
                enumerated.append(Compared(one, same, truth, rounding_of(context, one, truth)))
                linear.append(Compared(one, free, same, rounding_of(context, one, same)))
                found, equal = (best_attended(*one[1:4], K, None, one.scale, equal=e) for e in (False, True))
                truth, room = dropped(context, one, K, true=True), output_room(one)
                attended.append(Compared(one, equal.risk, truth, room(truth)))
                true.append(Compared(one, found.risk, equal.risk, room(equal.risk)))
                reached = float(true_risks(one, dense(n, found.index, found.weight)[None])[0])
                bracket.append(Compared(one, reached, found.risk, room(found.risk)))
                ratios.append(equal.risk / found.risk)
            for what, compared in (
                (f"free weights, K = {K}: least linear risk by the solver = that by linear systems", systems),
                (
                    f"equal weights, at most {K}: least linear risk by the function = that of all subsets by attention",
                    enumerated,
                ),
                (
                    f"equal weights, at most {K}: least true risk by the function = that of all subsets by attention",
                    attended,
                ),
                (f"free weights, K = {K}: true risk, by attention, of the summary found = the risk stated", bracket),
            ):
                yield worst_equality(what, group, compared, _SOLVED, role="control")
            for what, compared in (("linear", linear), ("true", true)):
                yield worst_equality(
                    f"least {what} risk, K = {K}: free weights ≤ equal weights", group, compared, _SOLVED, relation="<="
                )
    yield numerical(
        what="least true risk with equal weights over that found with free ones, smallest of all heads and K, ≥ 1", ran_on=f"heads of the groups above, n = {n}, K = 2 and 4",
        observed=min(ratios), predicted=1.0, relation=">=", tolerance=1e-9, because="the descent starts from the best equal weights, too; two roundings of one risk",
        note=f"geometric mean {np.exp(np.mean(np.log(ratios))):.3g}, largest {max(ratios):.3g}",
    )  # fmt: skip
    curves = [
        _curve(context, one, context.size(5, 6), best_summary, best_attended)
        for _, ones in small_heads(context, n, 5, 2)
        for one in ones
    ]
    fooled = max(
        (p["centred"] / p["free"], c["head"], p["K"], p["augmented"] / p["free"]) for c in curves for p in c["points"]
    )
    yield numerical(
        what="true risk of the summary that is exactly optimal for the centred profile's linear risk over the least true risk found, largest, ≤ 1",
        ran_on=f"the heads of the figure, n = {n}, K up to {len(curves[0]['points'])}", observed=fooled[0], predicted=1.0, relation="<=", tolerance=1e-6,
        because="outputs are rounded", role="assumption", worst_case=f"{fooled[1]}, K = {fooled[2]}",
        note=f"with the augmented profile {fooled[3]:.3g} there: the centred profile does not see what a lost softmax mass costs",
    )  # fmt: skip
    yield Picture("weights-against-dropping", {"curves": curves})


def _not_below(context: Context, best_attended: Function) -> Evidence:
    """Random supports and weights against the proved lower bound, which they must not beat."""
    n, K, tries, least, rng = 9, 3, context.size(3000, 30000), (np.inf, ""), context.rng("below the bracket")
    for one in small_heads(context, n, 5, 3)[0][1]:
        w = np.zeros((tries, n))
        kept = rng.permuted(np.tile(np.arange(n), (tries, 1)), axis=1)[:, :K]
        np.put_along_axis(w, kept, rng.dirichlet(np.full(K, 0.7), tries), axis=1)
        found = best_attended(*one[1:4], K, None, one.scale)
        best = min(float(true_risks(one, w).min()), found.risk)
        least = min(
            least,
            (
                best / found.lower,
                f"{one.label}: lower bound over what the descent reached {found.lower / found.risk:.3f}",
            ),
        )
    return search(
        what="least true risk of K own tokens over the proved lower bound found by search ≥ 1", ran_on=f"synthetic heads, n = {n}, K = {K}", worst=least[0], bound=1.0,
        relation=">=", tries=3 * tries, optimiser="random supports and weights, and the solver's descent", worst_case=least[1], tightness=1 / least[0],
    )  # fmt: skip


def _curve(context: Context, one: One, K_most: int, best_summary: Function, best_attended: Function) -> dict[str, Any]:
    """True risks against K: best weighted (bracket), best dropped, and what minimising a linear risk gives, by either profile."""
    points = []
    for K in range(1, K_most + 1):
        found = best_attended(*one[1:4], K, None, one.scale)
        point = {"K": K, "free": found.risk, "free_lower": found.lower, "equal": dropped(context, one, K, true=True)}
        for kind in ("centred", "augmented"):
            s = best_summary(_profiles(one, kind), K)
            point[kind] = float(true_risks(one, dense(one.n, s.index, s.weight)[None])[0])
        w = subsets(one.n, K)
        point["random"] = float(true_risks(one, w[(w > 0).sum(axis=1) == K]).mean())
        points.append(point)
    return {"head": one.label, "n": one.n, "queries": len(one.q), "points": points}
