"""Keeping the most attended tokens against balanced samples of the same size: who wins, and why."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import balancing, risk
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.risk.heads import (
    EPS,
    SQUARE_BECAUSE,
    Compared,
    Float,
    One,
    dense,
    energies,
    groups,
    mass_ratio,
    named,
    of_layer,
    outputs,
    rounding,
    square_tolerance,
    worst_equality,
)


def _uniform(one: One) -> Float:
    return np.full(one.n, 1 / one.n)


def _risk(one: One, w: Float) -> float:
    return float(energies(outputs(one, w[None]) - outputs(one, _uniform(one)[None]))[0])


def _top(one: One, K: int) -> Any:
    """The K tokens of most attention, ties by age."""
    mass = risk.density(one.q, one.k, scale=one.scale).mean(axis=1)
    return np.sort(np.argsort(-mass, kind="stable")[:K])


def _halves(one: One) -> tuple[One, One]:
    """The head with every second query, to choose by, and with the others, to test on."""
    choose, test = risk.laws.held_out(one.q)
    return one._replace(q=choose), one._replace(q=test)


def _profiles(context: Context, one: One) -> Float:
    def leading() -> Float:
        values, vectors = np.linalg.eigh(risk.profile_gram(one.q, one.k, one.v, one.scale))
        return np.asarray((vectors * np.sqrt(values.clip(0)))[:, ::-1][:, :48])

    return context.memo(("profiles", one.label), leading)


def _heads(context: Context) -> list[tuple[str, list[One]]]:
    """The synthetic kinds, and real layers with all tokens that a third of their queries sees."""
    found = [groups(context, 128, 48)[0]]
    return found + [(label, of_layer(label, layer, 242, context.size(48, 96))) for label, layer in context.real()]


def _equal_mass(true: Function) -> Function:
    """1 - K/n for the attention dropped."""

    def wrong(q: Any, k: Any, v: Any, index: Any, scale: Any = None) -> float:
        radius2 = float(((v - v.mean(axis=0)) ** 2).sum(axis=1).max())
        return 4 * radius2 * (1 - len(index) / len(k)) ** 2

    return wrong


def _radius_of_norms(true: Function) -> Function:
    return lambda q, k, v, index, scale=None: true(q, k, v, index, scale) * float((v**2).sum(axis=1).mean() / ((v - v.mean(axis=0)) ** 2).sum(axis=1).max())  # fmt: skip


@claim(
    id="risk/selection-bound", paper="kvtheory", section="the correction of risk/selection-beats-balance; true risk, no profile",
    statement="Keeping tokens S with equal weights moves the output by exactly (1 − a(S)) (A_S − A_D), D the tokens dropped and a(S) the attention S had, so its squared error is at most "
    "4R² E (1 − a(S))², R the values' radius: the constant is attained. The linear risk of the same selection is E (n a(S)/K)² ‖A_S − A_P‖²: softmax divides a selection's error by a "
    "square of up to (n/K)², which no balance is needed for. Weights refit to the queries do better than both on real heads.",
    formula="A_S − A_P = (1 − a(S)) (A_S − A_D);   r(S) ≤ 4R² E (1 − a(S))²;   ‖∫ Γ dP̂_S‖² = E (n a(S)/K)² ‖A_S − A_P‖²",
    expected=Verdict.HOLDS,
    functions={"selection_bound": "kvtheory.risk.selection_bound", "refit_weights": "kvtheory.risk.refit_weights", "attention_risk": "kvtheory.risk.attention_risk"},
    mutants=[
        *systematic.scales("selection_bound")[1:], *systematic.square_dropped("selection_bound"),
        Mutant("share of the tokens for that of attention", "selection_bound", _equal_mass),
        Mutant("mean square of the values for their radius", "selection_bound", _radius_of_norms),
        Mutant("twice the bound", "selection_bound", lambda true: lambda *a, **k: 2 * true(*a, **k)),
        Mutant("weights left as they were", "refit_weights", lambda true: lambda q, k, v, index, scale=None, ridge=1e-3: np.full(len(index), 1 / len(index))),
        Mutant("weights of the token before", "refit_weights", lambda true: lambda q, k, v, index, scale=None, ridge=1e-3: np.roll(true(q, k, v, index, scale, ridge=ridge), 1)),
        *systematic.scales("attention_risk"),
    ],
    figure="selection-against-balance",
)  # fmt: skip
def selection_bound(
    context: Context, *, selection_bound: Function, refit_weights: Function, attention_risk: Function
) -> Iterator[Evidence | Picture]:
    # attained: kept tokens at one end, dropped ones at the other, and two in the middle that get no attention; mean value 0
    keys = np.log(np.array([[0.4], [0.4], [0.1], [0.1], [1e-30], [1e-30]]))
    one, kept = (
        named("two ends", risk.Instance(np.ones((1, 1)), keys, np.array([[3.0], [3.0], [-3.0], [-3.0], [0.0], [0.0]]))),
        np.array([0, 1]),
    )
    for what, observed in (
        ("true risk = the bound", attention_risk(one.q, one.k, one.v, kept, np.full(2, 0.5), one.scale)),
        ("the bound = 4 · 9 · (1/5)²", 4 * 9 / 25),
    ):
        yield numerical(what=f"{what}, values 3, 3 kept, −3, −3, 0, 0 dropped, attention 2/5, 2/5, 1/10, 1/10, 0, 0", ran_on="6 tokens, one query", observed=observed,
                        predicted=selection_bound(one.q, one.k, one.v, kept, one.scale), tolerance=256 * EPS, because="six-term sums", tightness=1.0)  # fmt: skip
    for group, ones in _heads(context):
        K = ones[0].n // 4
        identity, bounds, linear = [], [], []
        for one in ones:
            kept = _top(one, K)
            w, p = dense(one.n, kept, np.full(K, 1 / K)), _uniform(one)
            rest = np.where(w > 0, 0.0, 1 / (one.n - K))
            o_s, o_d, o = outputs(one, np.stack([w, rest, p]))
            ratio = mass_ratio(one, w[None], p)[0]  # n a(S)/K
            gone = (1 - K / one.n * ratio)[:, None]
            identity.append(
                Compared(
                    one,
                    float(np.abs(gone * (o_s - o_d) - (o_s - o)).max()),
                    4 * rounding(one) + 8 * one.n * EPS * float(np.abs(one.v).max()),
                    0.0,
                )
            )
            true = float(attention_risk(one.q, one.k, one.v, kept, np.full(K, 1 / K), one.scale))
            truth = _risk(one, w)
            room = square_tolerance(one, p, truth, max(truth, 1e-300))
            linear.append(Compared(one, true, truth, room))
            bounds.append(Compared(one, true, selection_bound(one.q, one.k, one.v, kept, one.scale), room))
        yield worst_equality(f"largest component of (A_S − A_P) − (1 − a(S)) (A_S − A_D), K = n/4 = {K}: at most its rounding", group, identity, "rounding of three outputs", relation="<=")  # fmt: skip
        yield worst_equality(
            f"true risk of the selection by the function = by attention, K = {K}",
            group,
            linear,
            SQUARE_BECAUSE,
            role="control",
        )
        worst = worst_equality(
            f"true risk of the {K} most attended tokens ≤ 4R² E (1 − a(S))²",
            group,
            bounds,
            SQUARE_BECAUSE,
            relation="<=",
        )
        yield worst

    rows = []
    for group, ones in _heads(context):
        K = ones[0].n // 4
        for both in ones:
            choose, test = _halves(both)
            rows.append({"group": group, **_row(context, both.label, choose, test, K, refit_weights)})
    for group in dict.fromkeys(r["group"] for r in rows):
        own = [r for r in rows if r["group"] == group]
        for against in ("top mass", "spectral walk"):
            ratios = {r["head"]: r["top mass, refit"] / r[against] for r in own}
            yield numerical(
                what=f"true risk of the most attended tokens with weights refit over that of {against}, geometric mean, < 1", ran_on=f"{group}, {len(own)} heads, K = n/4 = {own[0]['K']}, queries held out",
                observed=float(np.exp(np.mean(np.log(list(ratios.values()))))), predicted=1.0, relation="<", tolerance=1e-9, because="ratios of measured errors; the walk's mean over seeds",
                role="statement" if "layer" in group else "assumption", details={"ratio": ratios},
            )  # fmt: skip
    # a cache where the refit must win, exactly: unlike values attended to alike, for runs without a real cache
    one = named("values −3, 1, 1, 1", risk.flat_cache(np.array([[-3.0], [1.0], [1.0], [1.0]])))
    found = refit_weights(one.q, one.k, one.v, np.array([0, 1]), one.scale, ridge=1e-9)
    error = float(attention_risk(one.q, one.k, one.v, np.array([0, 1]), found, one.scale))
    yield numerical(what="true risk of two of the values −3, 1, 1, 1 with weights refit (1/4, 3/4), plus 1", ran_on="4 tokens attended to alike, ridge 1e-9", observed=1 + error, predicted=1.0,
                    tolerance=1e-6, because="the ridge moves the weights by some 1e-9 of themselves; the output is then off by 1e-8")  # fmt: skip
    yield Picture("selection-against-balance", {"heads": rows})


def _row(context: Context, label: str, choose: One, test: One, K: int, refit_weights: Function) -> dict[str, Any]:
    """True risks over the output's energy, by queries held out; everything but the refit by true functions, once."""

    def others() -> dict[str, Any]:
        x, n = _profiles(context, choose), choose.n
        energy = float(energies(outputs(test, _uniform(test)[None]))[0])
        kept = _top(choose, K)
        walks = [dense(n, *balancing.sample(x, K, "spectral", K // 6, seed=context.seed + s)) for s in range(2)]
        rng = context.rng(f"random {label}")
        random = [dense(n, rng.choice(n, K, replace=False), np.full(K, 1 / K)) for _ in range(4)]
        token = risk.token_energy(test.q, test.k, test.v, test.scale)
        a = risk.density(test.q, test.k, scale=test.scale)[kept].sum(axis=0) / n
        norm = np.sqrt(risk.token_energy(choose.q, choose.k, choose.v, choose.scale))
        selected = dense(n, kept, np.full(K, 1 / K))
        return {
            "energy": energy, "random": float(np.mean([_risk(test, w) for w in random])) / energy, "spectral walk": float(np.mean([_risk(test, w) for w in walks])) / energy,
            "top mass": _risk(test, selected) / energy, "attention dropped": float((1 - a).mean()), "mass ratio squared": float(((n / K * a) ** 2).mean()),
            "trace share of the top K/2": float(token[_top(choose, K // 2)].sum() / token.sum()), "surely kept by norm": int((balancing.walks._probabilities(norm / norm.sum(), K)[0] >= 1).sum()),
        }  # fmt: skip

    found = dict(context.memo(("row", label), others))
    kept = _top(choose, K)
    refit = dense(choose.n, kept, refit_weights(choose.q, choose.k, choose.v, kept, choose.scale))
    return {"head": label, "n": choose.n, "K": K, **found, "top mass, refit": _risk(test, refit) / found["energy"]}


@claim(
    id="risk/selection-beats-balance", paper="kvtheory", section="SnapKV's choice against the balanced samples of Section 4; true risk, inside the walk the centred profile",
    statement="At equal budget the tokens of most attention, with equal weights, have a lower squared attention error than a balanced sample of equal probabilities (the spectral walk). It does not hold for every "
    "cache: of the values 1, 1, −1, −1 attended to alike the first two err by 1 and every balanced pair by 0. On real heads it holds where little attention is dropped: the error of a selection falls with the square of "
    "the attention dropped, and a few tokens hold most of tr Σ, which equal probabilities cannot keep.",
    formula="r(top K by E aᵢ, equal weights) < E r(spectral walk, K)",
    expected=Verdict.FAILS,
    functions={"sample": "kvtheory.balancing.sample", "attention_risk": "kvtheory.risk.attention_risk"},
    mutants=[
        Mutant("random sampling for the walk", "sample", lambda true: lambda x, K, method, m=0, seed=0: true(x, K, "srs", 0, seed)),
        Mutant("first tokens for the walk", "sample", lambda true: lambda x, K, method, m=0, seed=0: (np.arange(K), np.full(K, 1 / K))),
        Mutant("half the budget for the walk", "sample", lambda true: lambda x, K, method, m=0, seed=0: true(x, max(1, K // 2), method, 0, seed)),
        *systematic.scales("attention_risk"),
    ],
    correction="risk/selection-bound",
)  # fmt: skip
def selection_beats_balance(context: Context, *, sample: Function, attention_risk: Function) -> Iterator[Evidence]:
    one = named("two ends", risk.Instance(np.zeros((1, 1)), np.zeros((4, 1)), np.array([[1.0], [1.0], [-1.0], [-1.0]])))
    pair = sum((Fraction(v) for v in (1, 1)), Fraction(0)) / 2
    yield exact(what="squared error of the two oldest of four tokens of equal attention < that of one of either value", ran_on="values 1, 1, −1, −1, K = 2", observed=pair**2, predicted=Fraction(0),
                relation="<", note="smallest counterexample of equal attention: 4 tokens, one query")  # fmt: skip
    yield numerical(what="the former by the function = 1", ran_on="values 1, 1, −1, −1, K = 2", observed=attention_risk(one.q, one.k, one.v, _top(one, 2), np.full(2, 0.5), one.scale),
                    predicted=1.0, tolerance=64 * EPS, because="four-term sums", role="control")  # fmt: skip
    # the walk with m = 0 on these: opposed pairs, of which the derandomised end keeps one each
    pairs = named("opposed pairs", risk.opposed_pairs(0, 8, context.seed))
    w = [dense(16, *sample(pairs.v, 8, "spectral", 0, seed=context.seed + s)) for s in range(16)]
    kept = sorted({int((x > 0).sum()) for x in w})
    yield exact(
        what="tokens that the walk keeps of 8 opposed pairs, K = 8",
        ran_on="16 walks",
        observed=kept,
        predicted=[8],
        role="control",
    )
    errors = energies(outputs(pairs, np.stack(w)) - outputs(pairs, _uniform(pairs)[None]))
    bound = float(risk.spectral_bound(risk.spectrum(pairs.q, pairs.k, pairs.v, None, pairs.scale), 8, 0)) / 2
    farthest = float(errors[np.argmax(np.abs(errors - bound))])
    yield numerical(what="squared error of the walk = 2 Σ rᵢ² πᵢ(1 − πᵢ)/K², on the path farthest from it", ran_on="8 opposed pairs, K = 8, 16 walks", observed=farthest, predicted=bound, tolerance=1e-8,
                    because="a walk settles a coordinate within 1e-9", role="control")  # fmt: skip
    for group, ones in _heads(context):
        K = ones[0].n // 4
        ratios: dict[str, float] = {}
        for both in ones:
            choose, test = _halves(both)
            x, top = _profiles(context, choose), _top(choose, K)
            walks = [sample(x, K, "spectral", K // 6, context.seed + s) for s in range(context.size(2, 8))]
            balanced = float(np.mean([attention_risk(test.q, test.k, test.v, *s, test.scale) for s in walks]))
            ratios[both.label] = (
                float(attention_risk(test.q, test.k, test.v, top, np.full(K, 1 / K), test.scale)) / balanced
            )
        yield numerical(
            what="squared error of the most attended tokens over that of the walk, geometric mean of the heads, < 1", ran_on=f"{group}, {len(ones)} heads, K = n/4 = {K}, queries held out",
            observed=float(np.exp(np.mean(np.log(list(ratios.values()))))), predicted=1.0, relation="<", tolerance=1e-9, because="ratios of measured errors, the walk's mean over seeds",
            details={"ratio": ratios}, worst_case=max(ratios, key=lambda label: ratios[label]),
        )  # fmt: skip
