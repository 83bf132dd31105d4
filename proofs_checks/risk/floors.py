"""Floors under every summary: of the cache's own tokens, and of any atoms, merged and made up ones included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import attention, risk
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical, search
from proofs_checks.risk.exhausted import dropped, other_budget, output_room, small_heads, true_risks, uniform
from proofs_checks.risk.heads import (
    EPS,
    SQUARE_BECAUSE,
    Compared,
    Float,
    One,
    dense,
    named,
    outputs,
    rounding,
    worst_equality,
)

_RATIONAL = "sums of n terms, and rounding of a logit of ln(n a/(1 − a))"
#: relative; keys by least squares from queries whose condition number stays below 1e5 in what is run here, and K atoms 2 (K - 1) wide
_REFIT = 1e-8
_REFIT_BECAUSE = (
    "keys by least squares: rounding times the queries' condition number (below 1e5), times the atoms' width 2(K − 1)"
)


def _refit_risk(one: One, refitted_atoms: Function, K: int) -> float:
    """Squared attention error of K made-up atoms, by attention on them."""
    o = outputs(one, uniform(one)[None])[0]
    keys, values = refitted_atoms(one.q, o, K, scale=one.scale)
    return _atoms_risk(one, keys, values)


def _atoms_risk(one: One, keys: Float, values: Float) -> float:
    o = outputs(one, uniform(one)[None])[0]
    return float(((attention.attend(one.q[None], keys[None], values[None], scale=one.scale)[0] - o) ** 2).sum(1).mean())


def _principal_tail(one: One, K: int) -> float:
    """tail_(K-1) of the covariance of the outputs, from the eigenvalues of their Gram matrix."""
    o = outputs(one, uniform(one)[None])[0]
    o = o - o.mean(axis=0)
    return float(np.linalg.eigvalsh(o @ o.T / len(o)).clip(0)[::-1][K - 1 :].sum())


def _floor(function: Function, one: One, K: int) -> float:
    return float(function(one.q, one.k, one.v, K, None, one.scale))


def _uncentred(q: Any, k: Any, v: Any, K: int, law: Any = None, scale: Any = None) -> float:
    o = risk.profiles.means(q, k, v, np.full(len(k), 1 / len(k)), scale)[0]
    return float((np.linalg.svd(o, compute_uv=False) ** 2)[K - 1 :].sum()) / len(q)


def _fewer_atoms(true: Function) -> Function:
    return lambda q, o, K, law=None, scale=None: true(q, o, max(1, K - 1), law, scale)


def _scaled(keys: float, values: float) -> Any:
    def wrong(true: Function) -> Function:
        def atoms(*args: Any, **kwargs: Any) -> Any:
            k, v = true(*args, **kwargs)
            return keys * k, values * v

        return atoms

    return wrong


_REFIT_MUTANTS = [
    Mutant("an atom fewer", "refitted_atoms", _fewer_atoms),
    Mutant("scale forgotten", "refitted_atoms", lambda true: lambda q, o, K, law=None, scale=None: true(q, o, K, law, 1.0)),
    Mutant("values halved", "refitted_atoms", _scaled(1, 0.5)),
    Mutant("keys of the other sign", "refitted_atoms", _scaled(-1, 1)),
]  # fmt: skip


@claim(
    id="risk/search-lower-bound-any-atoms", paper="2607.01520", section="Section 4 (search instances), under our reading: P̂ any measure with K atoms; no profile enters",
    statement="Under our reading, on a search instance, where query j puts half its mass on token j, every measure with K atoms, the cache's own or not, has squared "
    "attention error at least (1 − K/n)/4. This does not hold. With two tokens and orthonormal values one merged atom has no error, against 1/8. With orthonormal "
    "values in general K atoms reach (a − b)² (1 − K/n) and no less, a = 1/2 and b = (1 − a)/(n − 1); with values of dimension dv, dv + 1 made-up "
    "atoms reproduce every output.",
    formula="r(P̂) ≥ mass² (1 − K/n), mass = 1/2, for every P̂ with K atoms",
    expected=Verdict.FAILS,
    functions={"search_floor": "kvtheory.risk.search_floor", "refitted_atoms": "kvtheory.risk.refitted_atoms"},
    mutants=[*systematic.scales("search_floor"), *systematic.square_dropped("search_floor"), *_REFIT_MUTANTS],
    correction="risk/any-atoms-floor",
)  # fmt: skip
def search_lower_bound_any_atoms(
    context: Context, *, search_floor: Function, refitted_atoms: Function
) -> Iterator[Evidence]:
    half = Fraction(1, 2)
    yield exact(
        what="squared attention error of one atom of value (1/2, 1/2) ≥ (1 − K/n)/4", ran_on="2 tokens, 2 queries with attention 1/2 on each, values (1, 0) and (0, 1), K = 1",
        observed=sum((half - half) ** 2 for _ in range(4)), predicted=half**2 * (1 - half), relation=">=",
    )  # fmt: skip
    yield numerical(what="the floor by the function = its rational value", ran_on="n = 2, K = 1", observed=search_floor(2, 1), predicted=1 / 8,
                    tolerance=8 * EPS, because="a square and a quotient", role="control")  # fmt: skip
    for n, K in ((12, 2), (12, 6), (64, 16)):
        one, b = named("look-up", risk.lookup(n, 0.5)), Fraction(1, 2) / (n - 1)
        found, where = (
            _refit_risk(one, refitted_atoms, K),
            f"look-up, n = {n}, orthonormal values, K = {K} made-up atoms",
        )
        yield numerical(what="squared attention error = (a − b)² (1 − K/n), the least possible", ran_on=where, observed=found,
                        predicted=float((half - b) ** 2 * (1 - Fraction(K, n))), tolerance=_REFIT, because=_REFIT_BECAUSE, role="control")  # fmt: skip
        yield numerical(what="squared attention error ≥ (1 − K/n)/4", ran_on=where, observed=found, predicted=search_floor(n, K), relation=">=",
                        tolerance=_REFIT, because=_REFIT_BECAUSE, tightness=search_floor(n, K) / found)  # fmt: skip
    n, dv = 64, 4
    one = named("search instance", risk.lookup(n, 0.5, dv, context.seed))
    where = f"search instance, n = {n}, dv = {dv}, random signs, {dv + 1} made-up atoms"
    found = _refit_risk(one, refitted_atoms, dv + 1)
    yield numerical(what="squared attention error: 0 but for rounding", ran_on=where, observed=found, predicted=_REFIT**2, relation="<=", tolerance=0.0,
                    because=_REFIT_BECAUSE, role="control")  # fmt: skip
    yield numerical(what="squared attention error ≥ (1 − K/n)/4", ran_on=where, observed=found, predicted=search_floor(n, dv + 1), relation=">=",
                    tolerance=_REFIT, because=_REFIT_BECAUSE)  # fmt: skip


@claim(
    id="risk/any-atoms-floor", paper="kvtheory", section="a floor of our own, and what reaches it; proof in the docstring of kvtheory.risk.atoms; true risk, no profile enters",
    statement="A statement of our own. Every measure with K atoms, whatever their keys, values and weights, has squared attention error at least the sum of all but "
    "the K − 1 largest eigenvalues of the covariance of the outputs A_P(q), q ~ ν; and where the queries are linearly independent K made-up atoms reach it, dv + 1 "
    "of them without any error.",
    formula="min_{|P̂| ≤ K} r(P̂) ≥ tail_{K−1}(Cov_ν A_P(q)),   with equality for linearly independent queries",
    expected=Verdict.HOLDS,
    functions={"any_atoms_floor": "kvtheory.risk.any_atoms_floor", "refitted_atoms": "kvtheory.risk.refitted_atoms"},
    mutants=[
        *systematic.scales("any_atoms_floor"), *systematic.square_dropped("any_atoms_floor"),
        other_budget("any_atoms_floor", 1), other_budget("any_atoms_floor", -1),
        Mutant("outputs not centred", "any_atoms_floor", lambda true: _uncentred),
        *_REFIT_MUTANTS,
    ],
)  # fmt: skip
def any_atoms_floor(context: Context, *, any_atoms_floor: Function, refitted_atoms: Function) -> Iterator[Evidence]:
    for K in (1, 3, 5):
        for group, ones in small_heads(context, context.size(48, 242), 6, context.size(4, 9)):
            floors, reached, details = [], [], {}
            for one in ones:
                floor, tail = _floor(any_atoms_floor, one, K), _principal_tail(one, K)
                total = _principal_tail(one, 1)
                room = 64 * (rounding(one) / np.sqrt(total) + EPS) * total / tail
                floors.append(Compared(one, floor, tail, room))
                made = _refit_risk(one, refitted_atoms, K)
                reached.append(Compared(one, made, floor, room + _REFIT))
                rng = context.rng(f"subset {K}")
                own = np.stack(
                    [dense(one.n, rng.choice(one.n, K, replace=False), np.full(K, 1 / K)) for _ in range(20)]
                )
                details[one.label] = float(true_risks(one, own).mean()) / made
            yield worst_equality(
                f"the floor of {K} atoms = tail_{K - 1} of the outputs' covariance, by its Gram matrix",
                group,
                floors,
                SQUARE_BECAUSE,
                role="control",
            )
            last = worst_equality(
                f"squared attention error of {K} made-up atoms, by attention on them, = the floor",
                group,
                reached,
                _REFIT_BECAUSE,
            )
            last.details["own tokens at random over made-up atoms"] = details
            last = replace(
                last,
                note=f"{K} own tokens at random, equally weighted, have {min(details.values()):.3g} to {max(details.values()):.3g} times that error",
            )
            yield last  # fmt: skip
    # nothing found below: the atoms that reach it, moved, and atoms at random
    tries, rng, least = context.size(120, 2000), context.rng("below"), (np.inf, "")
    one = small_heads(context, 24, 6, 1)[0][1][0]
    o = outputs(one, uniform(one)[None])[0]
    for K in (2, 3):
        floor, (keys, values) = _floor(any_atoms_floor, one, K), refitted_atoms(one.q, o, K, scale=one.scale)
        for t in range(tries):
            width = 10 ** rng.uniform(-6, 0)
            ratio = _atoms_risk(one, keys + width * rng.standard_normal(keys.shape), values + width * rng.standard_normal(values.shape)) / floor  # fmt: skip
            least = min(least, (ratio, f"K = {K}, moved by {width:.2g}, try {t}"))
            picked = rng.choice(one.n, K, replace=False)
            ratio = _atoms_risk(one, one.k[picked] + width * rng.standard_normal(keys.shape), one.v[picked] + width * rng.standard_normal(values.shape)) / floor  # fmt: skip
            least = min(least, (ratio, f"K = {K}, own tokens moved by {width:.2g}, try {t}"))
    yield search(
        what="least squared attention error of K atoms over the floor found by search ≥ 1", ran_on=f"{one.label}, n = 24, K = 2 and 3", worst=least[0], bound=1.0 - _REFIT,
        relation=">=", tries=4 * tries, optimiser="random moves of the made-up atoms and of own tokens", worst_case=least[1], tightness=1 / least[0],
    )  # fmt: skip


@claim(
    id="risk/own-tokens-floor", paper="kvtheory", section="a floor of our own; proof in the docstring of kvtheory.risk.hull_floor; true risk, no profile enters",
    statement="A statement of our own. Every summary of K of the cache's own tokens, however weighted, has squared attention error at least the mean squared distance of the outputs "
    "from the convex hull of the kept values, at the best K tokens. One query attains it; on a search instance it is at least the floor (1 − K/n)/4.",
    formula="r(P̂) ≥ min_{|S| ≤ K} E_ν dist(A_P(q), conv{vᵢ : i ∈ S})²",
    expected=Verdict.HOLDS,
    functions={"hull_floor": "kvtheory.risk.hull_floor", "best_attended": "kvtheory.risk.best_attended"},
    mutants=[
        *systematic.scales("hull_floor"), *systematic.square_dropped("hull_floor"),
        other_budget("hull_floor", 1), other_budget("hull_floor", -1),
        *systematic.scales("best_attended", fields=("risk",)), *systematic.scales("best_attended", fields=("lower",)),
        other_budget("best_attended", 1),
    ],
)  # fmt: skip
def own_tokens_floor(context: Context, *, hull_floor: Function, best_attended: Function) -> Iterator[Evidence]:
    # Smallest: 2 values 1 and 0 with attention a and 1 - a: one token errs by min(a, 1 - a)^2.
    for a in (Fraction(1, 2), Fraction(1, 5)):
        one = One("two tokens", np.ones((1, 1)), np.log([[float(a)], [float(1 - a)]]), np.array([[1.0], [0.0]]), 1.0)
        yield numerical(what="the floor by the function = its rational value", ran_on=f"values 1 and 0 with attention {a} and {1 - a}, K = 1",
                        observed=_floor(hull_floor, one, 1), predicted=float(a**2), tolerance=64 * EPS, because="two-term softmax sums", role="control")  # fmt: skip
    n = 9
    for mass, K in ((0.5, 3), (0.9, 3), (0.5, 7)):
        one = named("look-up", risk.lookup(n, mass))
        b = (1 - mass) / (n - 1)
        # nearest point of the kept corners' hull to an output: what is missing is shared out evenly
        closed = (n - K) / n * (mass**2 + (n - K - 1) * b**2 + ((mass + (n - K - 1) * b) ** 2) / K)
        closed += K / n * ((n - K) * b**2 + ((n - K) * b) ** 2 / K)
        floor, where = _floor(hull_floor, one, K), f"look-up, n = {n}, mass {mass}, orthonormal values, K = {K}"
        yield numerical(what="the floor by the function = its closed form", ran_on=where, observed=floor, predicted=closed, tolerance=64 * n * EPS,
                        because=_RATIONAL, role="control")  # fmt: skip
        yield numerical(what="mass² (1 − K/n) ≤ the floor", ran_on=where, observed=risk.search_floor(n, K, mass), predicted=floor, relation="<=",
                        tolerance=64 * n * EPS, because=_RATIONAL, tightness=risk.search_floor(n, K, mass) / floor)  # fmt: skip
        found = best_attended(one.q, one.k, one.v, K, None, one.scale)
        yield numerical(
            what="the floor ≤ the least squared attention error found of K own tokens", ran_on=where, observed=floor, predicted=found.risk, relation="<=",
            tolerance=64 * n * EPS, because=_RATIONAL, tightness=floor / found.risk,
        )  # fmt: skip
    n, K = context.size(9, 11), 3
    for group, ones in small_heads(context, n, 4, context.size(3, 9)):
        single, tight, reached, below, lower = [], [], [], [], []
        for one in ones:
            alone = one._replace(q=one.q[:1])
            room = output_room(alone)
            found = best_attended(alone.q, alone.k, alone.v, K, None, alone.scale)
            floor = _floor(hull_floor, alone, K)
            single.append(Compared(alone, floor, found.risk, room(floor)))
            tight.append(Compared(alone, found.lower, found.risk, room(floor)))
            summary = dense(n, found.index, found.weight)[None]
            reached.append(Compared(alone, float(true_risks(alone, summary)[0]), found.risk, room(floor)))
            floor = _floor(hull_floor, one, K)
            equal = dropped(context, one, K, true=True)
            below.append(Compared(one, floor, equal, output_room(one)(equal)))
            bracket = best_attended(one.q, one.k, one.v, K, None, one.scale)
            lower.append(
                Compared(one, max(bracket.lower, floor), min(bracket.risk, equal), output_room(one)(bracket.risk))
            )
        why = "rounding of outputs and of a least-squares solution, " + SQUARE_BECAUSE
        yield worst_equality(
            f"one query: the floor of {K} own tokens = the least squared attention error", group, single, why
        )
        yield worst_equality("one query: the lower bound stated = the risk stated", group, tight, why, role="control")
        yield worst_equality(
            "one query: squared attention error of the best summary, by attention = the risk stated",
            group,
            reached,
            why,
            role="control",
        )
        yield worst_equality(
            f"the floor of {K} own tokens ≤ squared attention error of the best equally weighted {K}, all subsets by attention",
            group,
            below,
            why,
            relation="<=",
        )
        yield worst_equality("several queries: the proved lower bounds ≤ what is reached", group, lower, why, relation="<=", role="control")  # fmt: skip
