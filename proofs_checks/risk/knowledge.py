"""What knowing the queries is worth: the exact optimum under each law against the minimax over them, coins allowed."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from kvtheory import risk
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.risk.exhausted import (
    best_by_descent,
    best_by_systems,
    forced_equal,
    other_budget,
    rounding_of,
    small_heads,
    subsets,
    true_risks,
)
from proofs_checks.risk.heads import EPS, SQUARE_BECAUSE, Compared, Float, One, dense, deviations, named, worst_equality

#: relative distance at which kvtheory.risk.best_mixture stops
_CLOSED = 1e-7
_GAME = "the mixture and its lower bound meet within 1e-7 relative"


def hidden_laws(n: int, hidden: int) -> Float:
    """Uniform on each set of `hidden` of n queries, (sets, n)."""
    return np.stack([np.isin(np.arange(n), S) / hidden for S in combinations(range(n), hidden)])


def _needles(n: int, mass: Fraction, leak: Fraction) -> One:
    return named(f"needles, leak {leak}", risk.hidden_needles(n, float(mass), float(leak)))


def _profiles(one: One) -> Float:
    return risk.response_profiles(one.q, one.k, one.v, None, one.scale)


def _enumerated(n: int, mass: Fraction, leak: Fraction, hidden: int) -> Fraction:
    """The aware summary's risk by its softmax, in rationals: background and needles 1..hidden in equal weights, queries 1..hidden."""
    f = leak / (n - 1)
    total = Fraction(0)
    for j in range(hidden):
        full = [mass if i == j else f for i in range(n)]
        rest = 1 - mass - leak
        kept = rest + sum(full[:hidden])
        total += sum(((full[i] / kept if i < hidden else 0) - full[i]) ** 2 for i in range(n))
    return total / hidden


@claim(
    id="risk/aware-agnostic-separation", paper="2607.01520", section="Section 4 (query-aware against query-agnostic); true risk, no profile, where not called linear",
    statement="Knowing the law of queries is worth any factor. n needles of orthonormal values and a background of value 0; the law is uniform on h of "
    "the n queries, query j putting mass 1/2 on needle j and a leak ε evenly on the others. A reducer that knows which h keeps h + 1 tokens with squared attention "
    "error below ε² for h of at most n/2; any reducer that keeps K own tokens without knowing, coins or not, whatever the weights, has at least (1 − K/n)/4 under "
    "the worst of these laws. The exact minimax of the linear risk (centred profile) over all these laws separates likewise. Knowing never hurts, and coins help where the law is not known.",
    formula="max_S min_{|P̂| ≤ h + 1} r_S(P̂) ≤ ε²   while   min over random P̂, |P̂| ≤ K, of max_S E r_S(P̂) ≥ mass² (1 − K/n)",
    expected=Verdict.HOLDS,
    functions={
        "aware": "kvtheory.risk.hidden_needles_risk",
        "agnostic": "kvtheory.risk.hidden_needles_floor",
        "best_summary": "kvtheory.risk.best_summary",
        "best_mixture": "kvtheory.risk.best_mixture",
        "best_for_laws": "kvtheory.risk.best_for_laws",
    },
    mutants=[
        *systematic.scales("aware"),
        Mutant("renormalisation forgotten", "aware", lambda true: lambda n, mass, leak, hidden: (n - hidden) * (leak / (n - 1)) ** 2),
        *systematic.scales("agnostic"),
        Mutant("mass for mass²", "agnostic", lambda true: lambda n, mass, K: true(n, mass, K) / mass),
        Mutant("all tokens counted as needles", "agnostic", lambda true: lambda n, mass, K: mass * mass * (n + 1 - K) / n),
        *systematic.scales("best_summary", fields=("risk",)),
        other_budget("best_summary", 1), forced_equal("best_summary"),
        *systematic.scales("best_mixture", fields=("risk",)),
        other_budget("best_mixture", 1), other_budget("best_mixture", -1), forced_equal("best_mixture"),
        *systematic.scales("best_for_laws", fields=("risk",)), other_budget("best_for_laws", 1), forced_equal("best_for_laws"),
        Mutant("mean of the laws for the worst", "best_for_laws", lambda true: lambda profiles, K, laws, equal=False: true(profiles, K, np.mean(laws, axis=0)[None], equal)),
        Mutant("best against the mean law", "best_mixture", lambda true: lambda profiles, K, laws, equal=False: true(profiles, K, np.mean(laws, axis=0)[None], equal)),
    ],
    figure="aware-against-agnostic",
)  # fmt: skip
def aware_agnostic_separation(
    context: Context,
    *,
    aware: Function,
    agnostic: Function,
    best_summary: Function,
    best_mixture: Function,
    best_for_laws: Function,
) -> Iterator[Evidence | Picture]:
    n, hidden, K, half = 12, 2, 3, Fraction(1, 2)
    for leak in (Fraction(1, 10), Fraction(1, 1000)):
        where = f"{n} needles, h = {hidden}, K = {K}, leak {leak}"
        truth, bound = aware(n, half, leak, hidden), agnostic(n, half, K)
        yield exact(what="squared attention error of the background and the h needles, in closed form = by its softmax", ran_on=where,
                    observed=truth, predicted=_enumerated(n, half, leak, hidden), role="control")  # fmt: skip
        yield exact(
            what="squared attention error of a reducer that knows ≤ ε²",
            ran_on=where,
            observed=truth,
            predicted=leak**2,
            relation="<=",
        )
        one = _needles(n, half, leak)
        law = dense(n, np.arange(hidden), np.full(hidden, 1 / hidden))
        yield numerical(
            what="the same, by attention", ran_on=where, predicted=float(truth), tolerance=1e-9, role="control",
            observed=float(true_risks(one, dense(n + 1, np.arange(hidden + 1), np.full(hidden + 1, 1 / 3))[None], law)[0]),
            because=f"outputs near 1/2 of rounding {64 * EPS:.0e} differ by a leak over n or more",
        )  # fmt: skip
        # K own tokens with needles 1..K, however weighted: only the floor's part of their error is looked at
        kept = context.rng("weights").dirichlet(np.ones(K), 16)
        missed = []
        for weights in np.vstack([kept, np.full(K, 1 / K)]):
            w = dense(n + 1, np.arange(1, K + 1), weights)
            o, whole = (risk.profiles.means(one.q, one.k[x > 0], one.v[x > 0], x[x > 0], one.scale)[0] for x in (w, np.full(n + 1, 1 / (n + 1))))  # fmt: skip
            missed.append(float((((o - whole) * np.eye(n)) ** 2)[K:].sum()) / n)
        yield numerical(
            what="squared attention error along the values of needles not kept, mean of all laws = mass² (1 − K/n)", ran_on=f"{where}, K needles in 17 weightings, the least",
            observed=min(missed), predicted=float(bound), tolerance=1e-12, because="sums of 12 squares",
        )  # fmt: skip
        yield exact(what="a reducer that does not know over one that does > 1/(8 ε²)", ran_on=where, observed=bound / truth,
                    predicted=1 / (8 * leak**2), relation=">")  # fmt: skip

    yield from _coins(context, best_mixture, best_for_laws)

    # The exact minimax over all C(n, h) laws, linear risk.
    n = context.size(7, 9)
    one, laws = _needles(n, half, Fraction(1, 20)), hidden_laws(n, 2)
    gamma, curve = _profiles(one), []
    for K in (3, 5):
        knows = max(best_summary(gamma, K, law).risk for law in laws)
        blind = best_mixture(gamma, K, laws)
        where = f"{n} needles, all {len(laws)} laws on two queries, leak 1/20, K = {K}"
        yield from _game(context, one, laws, blind, best_summary, K, where)
        # by symmetry every law is as hard as the first, whose optimum linear systems give
        yield numerical(what="linear risk under the worst law: a reducer that does not know > 50 times one that does", ran_on=where,
                        observed=blind.lower, predicted=50 * knows, relation=">", tolerance=_CLOSED, because=_GAME,
                        details={"factor": blind.lower / knows})  # fmt: skip
    for K in range(2, n + 1):
        curve.append(_point(context, one, laws, K, best_summary, best_mixture))
    pictures = [{"head": f"{n} needles, leak 1/20", "laws": f"two of {n} queries", "points": curve}]

    # Heads: every single query a law of its own.
    for group, ones in small_heads(context, context.size(8, 10), 4, context.size(1, 3)):
        worst = []
        for one in ones:
            points = [_point(context, one, np.eye(4), K, best_summary, best_mixture) for K in range(1, 6)]
            worst += [
                Compared(one, p["aware"], p["agnostic"], rounding_of(context, one, p["agnostic"]) + _CLOSED) for p in points
            ]  # fmt: skip
            pictures.append({"head": one.label, "laws": "each of 4 queries", "points": points})
        yield worst_equality("worst law's least linear risk for a reducer that knows ≤ for one that does not", group, worst,
                             _GAME + "; " + SQUARE_BECAUSE, relation="<=")  # fmt: skip
        one = ones[-1]
        yield from _game(context, one, np.eye(4), best_mixture(_profiles(one), 3, np.eye(4)), best_summary, 3, f"{one.label}, each of 4 queries a law, K = 3")  # fmt: skip
    yield Picture("aware-against-agnostic", {"curves": pictures})


def _coins(context: Context, best_mixture: Function, best_for_laws: Function) -> Iterator[Evidence]:
    """A look-up of 3 tokens at mass 1/2, one of them kept, each query a law; and the minimax without coins on one head."""
    one, each = named("look-up", risk.lookup(3, 0.5)), np.eye(3)
    a, b = Fraction(1, 2), Fraction(1, 4)
    # (3 a_i)^2 ||v_i - o||^2, the outputs being a at the query's own value and b at the others
    own, other = 9 * a**2 * ((1 - a) ** 2 + 2 * b**2), 9 * b**2 * (a**2 + (1 - b) ** 2 + b**2)
    where, why = (
        "look-up of 3 tokens, mass 1/2, one token kept, each query a law",
        "three-term softmax sums and a solver's 1e-8",
    )
    yield exact(what="linear risk under the worst law: a token drawn at random < any one token", ran_on=where, observed=(own + 2 * other) / 3,
                predicted=max(own, other), relation="<")  # fmt: skip
    for name, function, value in (
        ("with coins", best_mixture, (own + 2 * other) / 3),
        ("without", best_for_laws, max(own, other)),
    ):
        yield numerical(what=f"minimax of the linear risk, {name}, by the function = its rational value", ran_on=where, observed=function(_profiles(one), 1, each).risk,
                        predicted=float(value), tolerance=_CLOSED, because=why, role="control")  # fmt: skip
    one = small_heads(context, 7, 3, 1)[0][1][0]
    least, found = best_mixture(_profiles(one), 3, each), best_for_laws(_profiles(one), 3, each)
    where = f"{one.label}, n = 7, K = 3, each of 3 queries a law"
    w = dense(one.n, found.index, found.weight)
    squares = (deviations(one, w[None], np.full(7, 1 / 7)) ** 2).sum(axis=2)[0]
    yield numerical(what="linear risk of the summary found without coins under the worst law, by attention = the risk it states", ran_on=where,
                    observed=float(squares.max()), predicted=found.risk, tolerance=rounding_of(context, one, found.risk), because=SQUARE_BECAUSE, role="control")  # fmt: skip
    yield numerical(what="the lower bound proved = what is reached, without coins", ran_on=where, observed=found.lower, predicted=found.risk,
                    tolerance=1e-6, because="the bound is flat about the multipliers, which the solver gives to some 1e-5", role="control")  # fmt: skip
    truth = context.memo("without coins", lambda: best_by_descent(deviations(one, np.eye(7), np.full(7, 1 / 7)), 3))
    yield numerical(what="minimax without coins by the function = the least of descents on all supports", ran_on=where, observed=found.risk, predicted=truth,
                    tolerance=1e-5, because="the descents stop at 1e-10, at a corner of a maximum", role="control")  # fmt: skip
    yield numerical(what="minimax with coins ≤ minimax without", ran_on=where, observed=least.risk, predicted=found.risk, relation="<=",
                    tolerance=_CLOSED, because=_GAME, tightness=least.risk / found.risk)  # fmt: skip


def _game(
    context: Context, one: One, laws: Float, blind: Any, best_summary: Function, K: int, where: str
) -> Iterator[Evidence]:
    """The mixture's risk from attention, and that no summary does better against the law it names: a saddle point."""
    p = np.full(one.n, 1 / one.n)
    squares = (deviations(one, blind.weights, p) ** 2).sum(axis=2)
    room = rounding_of(context, one, blind.risk) + _CLOSED
    yield numerical(
        what="tokens kept by the mixture's summaries ≤ K, chances of sum 1: largest excess", ran_on=where, predicted=1e-9, relation="<=", tolerance=0.0,
        observed=max(float((blind.weights > 0).sum(axis=1).max()) - K, abs(float(blind.chances.sum()) - 1)), role="control",
        because="a sum of chances",
    )  # fmt: skip
    yield numerical(
        what="linear risk of the mixture under its worst law, by attention = the risk it states", ran_on=where, observed=float((blind.chances @ squares @ laws.T).max()),
        predicted=blind.risk, tolerance=room, because=SQUARE_BECAUSE, role="control",
    )  # fmt: skip
    # the least risk under the mixture of laws it names, by linear systems on attention's Gram matrix
    weights = blind.law @ laws
    x = (np.sqrt(weights)[:, None] * deviations(one, np.eye(one.n), p)).reshape(one.n, -1)
    least = best_by_systems(x @ x.T, K)
    yield numerical(
        what="least linear risk under the law named = the risk of the mixture: a saddle point", ran_on=where, observed=least, predicted=blind.risk,
        tolerance=room, because=_GAME + "; " + SQUARE_BECAUSE, role="control",
    )  # fmt: skip
    yield numerical(
        what="the same least risk by the solver", ran_on=where, observed=best_summary(_profiles(one), K, weights).risk, predicted=least,
        tolerance=room, because=SQUARE_BECAUSE, role="control",
    )  # fmt: skip


def _point(
    context: Context, one: One, laws: Float, K: int, best_summary: Function, best_mixture: Function
) -> dict[str, float]:
    """What a budget reaches with and without knowing the law; for the picture and for the inequality between them."""
    gamma = _profiles(one)
    # needles are alike: one law stands for all
    some = laws[:1] if len(laws) > one.n else laws
    squares = context.memo(
        ("equal", one.label, one.n, K),
        lambda: (deviations(one, subsets(one.n, K), np.full(one.n, 1 / one.n)) ** 2).sum(axis=2) @ laws.T,
    )
    return {
        "K": K, "aware": max(best_summary(gamma, K, law).risk for law in some), "agnostic": best_mixture(gamma, K, laws).risk,
        "aware_equal": float(squares.min(axis=0).max()), "agnostic_equal": risk.game(squares)[0],
    }  # fmt: skip
