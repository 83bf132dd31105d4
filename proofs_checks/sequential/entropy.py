"""Claims of arXiv 2604.15356 about entropy: what a cache costs, given what came before, against what its tokens cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory.entropy import FiniteLanguage, SequentialEntropies, conditional_entropy_bits
from kvtheory.statistics import proportion_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, statistical
from proofs_checks.sequential.instances import (
    BECAUSE,
    COUNTEREXAMPLE,
    GAP,
    HALF,
    MERGED,
    ROUNDING,
    Instance,
    Power,
    Truth,
    arbitrary_caches,
    information,
    laws_on_a_grid,
    open_loop_model,
    ternary_label,
    ternary_models,
    truth,
    two_token_partitions,
    two_token_violations,
)

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]

# What one may get wrong in SequentialEntropies. Each keeps the record.


def _record(change: Callable[[SequentialEntropies], dict[str, Any]]) -> Callable[[Function], Function]:
    def wrong(true: Function) -> Function:
        def mutated(language: FiniteLanguage, kv_map: Function) -> SequentialEntropies:
            found: SequentialEntropies = true(language, kv_map)
            return found._replace(**change(found))

        return mutated

    return wrong


def _differences(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip((0.0, *numbers), numbers))


def _cumulated(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(itertools.accumulate(numbers))


def _marginals(true: Function) -> Function:
    """H(KV_t) without its condition: each step as a language of its own."""

    def mutated(language: FiniteLanguage, kv_map: Function) -> SequentialEntropies:
        steps = []
        for t in range(1, language.length + 1):
            law = FiniteLanguage({p: language.probability(p) for p in language.prefixes(t)})
            last = {p: kv_map(p) for p in law}
            steps.append(true(law, lambda p, t=t, last=last: last[p] if len(p) == t else 0).total_kv)
        found: SequentialEntropies = true(language, kv_map)
        return found._replace(kv_given_kv=tuple(steps), total_kv=math.fsum(steps))

    return mutated


def _of_map(name: str, change: Callable[[Function], Function]) -> Mutant:
    def wrong(true: Function) -> Function:
        return lambda language, kv_map: true(language, change(kv_map))

    return Mutant(name, "sequential", wrong)


PER_STEP_AND_TOTAL = Mutant(
    "entropies of whole histories for those of steps", "sequential",
    _record(lambda f: {"kv_given_kv": _cumulated(f.kv_given_kv), "tokens": _cumulated(f.tokens), "total_kv": f.kv_given_kv[-1], "total_tokens": f.tokens[-1]}),
)  # fmt: skip
KV_AND_TOKENS = Mutant(
    "KV and tokens exchanged", "sequential",
    _record(lambda f: {"kv_given_kv": f.tokens, "tokens": f.kv_given_kv, "total_kv": f.total_tokens, "total_tokens": f.total_kv}),
)  # fmt: skip
CONDITIONED_ON_TOKENS = Mutant(
    "KV conditioned on the tokens before it instead of the KV", "sequential",
    _record(lambda f: {"kv_given_kv": f.kv_given_tokens, "total_kv": math.fsum(f.kv_given_tokens)}),
)  # fmt: skip
UNCONDITIONED = Mutant("KV without its condition, added up over steps", "sequential", _marginals)
TAKEN_INJECTIVE = _of_map("the cache taken to be injective", lambda kv_map: lambda prefix: (kv_map(prefix), prefix))


def _recount(name: str, field: str, pair: Callable[[Any, Function, int], tuple[Any, Any]]) -> Mutant:
    """One field counted anew: H(X_t | Y_t) with (X_t, Y_t) = pair(string, kv_map, t), t from 0."""

    def wrong(true: Function) -> Function:
        def mutated(language: FiniteLanguage, kv_map: Function) -> SequentialEntropies:
            found: SequentialEntropies = true(language, kv_map)
            changed: dict[str, Any] = {field: _steps_of(language, kv_map, pair)}
            return found._replace(**changed)

        return mutated

    return Mutant(name, "sequential", wrong)


def _steps_of(
    language: FiniteLanguage, kv: Function, pair: Callable[[Any, Function, int], tuple[Any, Any]]
) -> tuple[float, ...]:
    return tuple(
        conditional_entropy_bits((*pair(s, kv, t), p) for s, p in language.items()) for t in range(language.length)
    )


#: Slips of single steps that need not break an inequality, nor a sum: for every claim on `sequential`.
STEP_SLIPS = [
    *systematic.scales("sequential", fields=("tokens",)),
    _recount("tokens without their condition", "tokens", lambda s, kv, t: (s[t], ())),
    _recount("tokens given the last token only", "tokens", lambda s, kv, t: (s[t], s[:t][-1:])),
    _recount("KV given the last KV only", "kv_given_kv", lambda s, kv, t: (kv(s[: t + 1]), kv(s[:t]) if t else ())),
    Mutant("KV capped at 1 bit", "sequential", _record(lambda f: {"kv_given_kv": tuple(min(1.0, x) for x in f.kv_given_kv)})),
    Mutant(
        "KV averaged over steps", "sequential",
        _record(lambda f: {"kv_given_kv": (math.fsum(f.kv_given_kv) / len(f.kv_given_kv),) * len(f.kv_given_kv)}),
    ),
    Mutant("the lesser of KV and token", "sequential", _record(lambda f: {"kv_given_kv": tuple(map(min, f.kv_given_kv, f.tokens))})),
    Mutant(
        "steps counted from the end", "sequential", _record(lambda f: {"kv_given_kv": f.kv_given_kv[::-1], "tokens": f.tokens[::-1]})
    ),
]  # fmt: skip
#: and for H(t_t|KV_<t)
NEXT_TOKEN_SLIPS = [
    Mutant("H(t_t) without its condition", "next_token_given_kv", lambda true: lambda language, kv: _steps_of(language, kv, lambda s, kv, t: (s[t], ()))),
    Mutant(
        "the token given the last KV only", "next_token_given_kv",
        lambda true: lambda language, kv: _steps_of(language, kv, lambda s, kv, t: (s[t], kv(s[:t]) if t else ())),
    ),
]  # fmt: skip


def _apart(left: float, right: float, relation: str) -> float:
    """How far a pair is from its relation, relative to the larger side; inf for a NaN, which would hide among others."""
    difference = abs(left - right) if relation == "=" else left - right
    if not math.isfinite(difference):
        return math.inf
    return difference / max(abs(left), abs(right)) if difference else 0.0


def _worst_of(
    what: str, ran_on: str, pairs: Sequence[tuple[float, float]], relation: Any = "=", role: Any = "statement", note: str = ""
) -> Evidence:  # fmt: skip
    """Float against float: the one pair, of many, that is furthest from the relation."""
    left, right = max(pairs, key=lambda pair: _apart(pair[0], pair[1], relation), default=(0.0, 0.0))
    return numerical(
        what=f"{what}, at the worst of {len(pairs)} cases", ran_on=ran_on, observed=left, predicted=right, relation=relation, role=role,
        tolerance=ROUNDING, because=BECAUSE, note=note or None,
    )  # fmt: skip


def _dyadic(
    what: str, ran_on: str, observed: float, predicted: float, relation: Any = "=", role: Any = "control", **more: Any
) -> Evidence:
    """Floats of a law in powers of two, where no step rounds."""
    return numerical(
        what=what, ran_on=ran_on, observed=observed, predicted=predicted, relation=relation, role=role, tolerance=0.0,
        because="all probabilities are powers of two: no step rounds", **more,
    )  # fmt: skip


def _agreement(what: str, ran_on: str, pairs: Sequence[tuple[float, Power]]) -> Evidence:
    """Control: floats of a function of the statement against the exact numbers, step by step."""
    return _worst_of(
        f"{what} in float64 = its exact value", ran_on, [(value, true.bits()) for value, true in pairs], role="control"
    )


def _injective(told: object) -> str:
    return "injective" if told else "not injective"


def _measured_right(ran_on: str, found: Sequence[SequentialEntropies], truths: Sequence[Truth]) -> Result:
    """Controls: every entropy of `sequential` that a claim of this file speaks of, step by step and in order."""
    for what, pairs in (
        ("H(KV_t|KV_<t)", [pair for f, t in zip(found, truths) for pair in zip(f.kv_given_kv, t.kv_given_kv)]),
        ("H(t_t|t_<t)", [pair for f, t in zip(found, truths) for pair in zip(f.tokens, t.tokens)]),
        ("H(KV_≤n)", [(f.total_kv, t.total_kv) for f, t in zip(found, truths)]),
        ("H(t_≤n)", [(f.total_tokens, t.total_tokens) for f, t in zip(found, truths)]),
    ):
        yield _agreement(what, ran_on, pairs)


def _violations(left: Sequence[float], right: Sequence[float]) -> int:
    return sum(a > b + GAP for a, b in zip(left, right))


@claim(
    id="sequential/total-entropy", paper=PAPER, section="Theorem 1, summed over positions",
    statement="Over a whole sequence, the entropy of the cache of a deterministic model is at most the entropy of its tokens.",
    formula="Σ_t H(KV_t | KV_<t) = H(KV_≤n) ≤ H(t_≤n)",
    expected=Verdict.HOLDS,
    functions={"sequential": "kvtheory.entropy.sequential"},
    mutants=[
        *systematic.scales("sequential", fields=("total_kv",)), *systematic.natural_log("sequential", fields=("total_kv",)),
        *systematic.scales("sequential", fields=("total_tokens",)), PER_STEP_AND_TOTAL, KV_AND_TOKENS, CONDITIONED_ON_TOKENS, UNCONDITIONED,
        TAKEN_INJECTIVE, *STEP_SLIPS,
    ],
)  # fmt: skip
def total_entropy(context: Context, *, sequential: Function) -> Result:
    found = sequential(MERGED.language, MERGED.kv)
    where = "four strings, each 1/4; KV = number of ones after two tokens, nothing after one"
    yield _dyadic("H(KV_≤n) of the law (1/4, 1/2, 1/4), in bits", where, found.total_kv, 1.5)
    yield _dyadic("H(t_≤n) of the law (1/4, 1/4, 1/4, 1/4), in bits", where, found.total_tokens, 2.0)
    yield _dyadic("H(KV_≤n) ≤ H(t_≤n)", where, found.total_kv, found.total_tokens, "<=", "statement", tightness=0.75)
    where = COUNTEREXAMPLE.label
    found = sequential(COUNTEREXAMPLE.language, COUNTEREXAMPLE.kv)
    yield _dyadic(
        "H(KV_≤n) ≤ H(t_≤n), attained: the string can be read off the cache at the end", where, found.total_kv, found.total_tokens, "<=", "statement",
        tightness=1.0,
    )  # fmt: skip
    yield _dyadic("Σ_t H(KV_t|KV_<t) = H(KV_≤n)", where, math.fsum(found.kv_given_kv), found.total_kv, role="statement")
    for where, cases in (
        (f"{context.size(40, 400)} arbitrary deterministic caches, |V| 2..3, n 2..4", arbitrary_caches(context)),
        (ternary_label(context.size(20, 400)), ternary_models(context, context.size(20, 400))),
    ):
        all_found = [sequential(c.language, c.kv) for c, _ in cases]
        yield _worst_of("H(KV_≤n) ≤ H(t_≤n)", where, [(f.total_kv, f.total_tokens) for f in all_found], "<=")
        yield exact(
            what="caches with H(KV_≤n) > H(t_≤n), counted in exact integer arithmetic", ran_on=where, predicted=0,
            observed=sum(t.total_kv.exceeds(t.total_tokens) for _, t in cases),
        )  # fmt: skip
        yield _worst_of(
            "Σ_t H(KV_t|KV_<t) = H(KV_≤n)", where, [(math.fsum(f.kv_given_kv), f.total_kv) for f in all_found]
        )
        yield from _measured_right(where, all_found, [t for _, t in cases])


@claim(
    id="sequential/per-step-entropy", paper=PAPER, section="Theorem 1 (abstract)",
    statement="At each position, the new KV given all KV before it has at most the entropy of the new token given the tokens before "
    "it (and the token has the same entropy given that KV).",
    formula="H(KV_i | KV_<i) ≤ H(t_i | t_<i) = H(t_i | KV_<i)",
    expected=Verdict.FAILS,
    functions={"sequential": "kvtheory.entropy.sequential", "next_token_given_kv": "kvtheory.entropy.next_token_given_kv"},
    mutants=[
        *systematic.scales("sequential", fields=("kv_given_kv",)), *systematic.natural_log("sequential", fields=("kv_given_kv",)),
        *systematic.scales("sequential", fields=("tokens",)), *systematic.scales("next_token_given_kv"),
        PER_STEP_AND_TOTAL, KV_AND_TOKENS, CONDITIONED_ON_TOKENS, UNCONDITIONED, TAKEN_INJECTIVE,
        *(m for m in STEP_SLIPS if "in tokens" not in m.name), *NEXT_TOKEN_SLIPS,
    ],
    figure="per-step-counterexample", correction="sequential/per-step-entropy-corrected",
)  # fmt: skip
def per_step_entropy(context: Context, *, sequential: Function, next_token_given_kv: Function) -> Result:
    language, kv, label = COUNTEREXAMPLE
    found = sequential(language, kv)
    yield _dyadic(
        "the smallest counterexample: H(KV_2|KV_1) ≤ H(t_2|t_1)", f"{label}; |V|=3, n=2, one layer, one head, d=1, m=2, integer weights",
        found.kv_given_kv[1], found.tokens[1], "<=", "statement",
        note="the cache forgot which of a, b came first; when c or a follows, it learns it late: the bit moves from step 1 to step 2",
    )  # fmt: skip
    own = truth(COUNTEREXAMPLE)
    yield exact(
        what="H(KV_2|KV_1) ≤ H(t_2|t_1) as integers: 2^(2 H(KV_2|KV_1)) ≤ 2^(2 H(t_2|t_1))", ran_on=label, observed=own.kv_given_kv[1].power(),
        predicted=own.tokens[1].power(), relation="<=",
    )  # fmt: skip
    yield _dyadic(
        "the counterexample again: H(t_2|t_1) = H(t_2|KV_1)",
        label,
        found.tokens[1],
        next_token_given_kv(language, kv)[1],
        "=",
        "statement",
    )
    collide = "KV(a) = KV(b)"
    yield exact(
        what="the model writes the same KV for a and for b", ran_on=label, predicted=collide, role="control",
        observed=collide if kv(("a",)) == kv(("b",)) else "KV(a) ≠ KV(b)",
    )  # fmt: skip
    for what, observed, predicted in (
        ("H(t_1), bits", found.tokens[0], 1.0),
        ("H(t_2|t_1), bits", found.tokens[1], 0.0),
        ("H(KV_1), bits", found.kv_given_kv[0], 0.0),
        ("H(KV_2|KV_1), bits", found.kv_given_kv[1], 1.0),
        ("H(KV_≤2), bits", found.total_kv, 1.0),
        ("H(t_≤2), bits", found.total_tokens, 1.0),
        ("H(t_2|KV_1), bits", next_token_given_kv(language, kv)[1], 1.0),
    ):
        yield _dyadic(what, label, observed, predicted)

    number = context.size(20, 400)
    cases = ternary_models(context, number)
    arbitrary = arbitrary_caches(context)
    for where, some in (
        (f"{len(arbitrary)} arbitrary deterministic caches, laws without Markov structure", arbitrary),
        (ternary_label(number), cases),
    ):
        steps = [sequential(c.language, c.kv) for c, _ in some]
        yield from _measured_right(where, steps, [t for _, t in some])
        yield _agreement(
            "H(t_t|KV_<t)", where,
            [pair for c, t in some for pair in zip(next_token_given_kv(c.language, c.kv), t.next_token_given_kv)],
        )  # fmt: skip
    # `steps` are now those of the transformers
    by_floats = [_violations(f.kv_given_kv, f.tokens) for f in steps]
    by_integers = [sum(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.tokens)) for _, t in cases]
    yield exact(
        what="models in which float64 and exact integer arithmetic count different numbers of steps that break the bound", ran_on=ternary_label(number),
        observed=sum(a != b for a, b in zip(by_floats, by_integers)), predicted=0, role="control",
    )  # fmt: skip
    largest_excess = max(
        ((a, b) for f in steps for a, b in zip(f.kv_given_kv, f.tokens)), key=lambda pair: pair[0] - pair[1]
    )
    yield numerical(
        what="H(KV_t|KV_<t) ≤ H(t_t|t_<t) at the step of all models that breaks it most", ran_on=ternary_label(number), observed=largest_excess[0],
        predicted=largest_excess[1], relation="<=", tolerance=ROUNDING, because=BECAUSE,
        note=f"{sum(map(bool, by_floats))} of {number} models break it at some step",
    )  # fmt: skip
    yield _worst_of(
        "H(KV_≤n) ≤ H(t_≤n)", ternary_label(number), [(f.total_kv, f.total_tokens) for f in steps], "<=", "control"
    )

    # smallest: two tokens do not do it, for transformers without positions, BOS or sinks
    largest = context.size(1, 2)
    for length, parts in ((2, 4), (3, 2)):
        partitions = two_token_partitions(length, largest)
        prefixes = [p for t in range(1, length + 1) for p in itertools.product((0, 1), repeat=t)]
        where = (
            f"all {sum(partitions.values())} two-token models of two layers, m = d = 1, weights in -{largest}..{largest}, hard attention, exact, "
            f"n={length}: {len(partitions)} different caches"
        )
        unlike = sum(
            models for cells, models in partitions.items() if len(set(cells)) > 1 and any(
                dict(zip(prefixes, cells))[p + (0,)] == dict(zip(prefixes, cells))[p + (1,)]
                for t in range(length) for p in itertools.product((0, 1), repeat=t)
            )
        )  # fmt: skip
        yield exact(
            what="two-token models whose KV is neither the same for all texts nor different for the two tokens after every text (if either, no law breaks the bound)",
            ran_on=where, observed=unlike, predicted=0, role="control",
        )  # fmt: skip
        broken = 0
        for cells in partitions:
            table = dict(zip(prefixes, cells))
            for law in laws_on_a_grid(length, parts):
                f = sequential(law, table.__getitem__)
                broken += _violations(f.kv_given_kv, f.tokens)
        yield exact(
            what=f"steps that break the bound with |V|=2, over all laws with probabilities in multiples of 1/{parts}", ran_on=where, observed=broken,
            predicted=0, role="control",
        )  # fmt: skip

    two_tokens: dict[str, dict[str, Any]] = {}
    for example in two_token_violations():
        law = FiniteLanguage({string: HALF for string in example.strings})
        caches, plain = example.model.caches(2), example.within.caches(2)
        f, own, safe = (
            sequential(law, caches.kv),
            truth(Instance(law, caches.kv, "")),
            truth(Instance(law, plain.kv, "")),
        )
        where = f"{example.weights}, each 1/2; ternary KV, every number {caches.margin:.2f} or more from a rounding threshold"
        yield _dyadic(
            f"H(KV_2|KV_1) ≤ H(t_2|t_1) with |V|=2: {example.name}",
            where,
            f.kv_given_kv[1],
            f.tokens[1],
            "<=",
            "statement",
        )
        yield exact(
            what=f"2^(2 H(KV_2|KV_1)) and 2^(2 H(t_2|t_1)) with |V|=2, exact: {example.name}", ran_on=where, role="control",
            observed=f"{own.kv_given_kv[1].power()} and {own.tokens[1].power()}", predicted="4 and 1",
        )  # fmt: skip
        yield exact(
            what=f"steps that break the bound for the same weights and law with that feature removed: {example.name}", ran_on=where, predicted=0, role="control",
            observed=sum(a.exceeds(b) for a, b in zip(safe.kv_given_kv, safe.tokens)),
        )  # fmt: skip
        two_tokens[example.name] = {
            "model": example.weights,
            "tokens_bits": list(f.tokens),
            "kv_bits": list(f.kv_given_kv),
        }

    # how often random models do: shares with their intervals, which a small budget leaves wide
    small, dense = (
        context.size(30, 800),
        context.size(8, 400),
    )  # dense: a full tree of 4^4 strings each, the dearest instances
    shares: dict[str, dict[str, Any]] = {}
    families: list[tuple[str, str, int, list[tuple[Instance, Truth]]]] = [
        ("|V|=4, sparse transitions", ternary_label(number), number, cases),
        ("|V|=4, every transition at least 1/8", ternary_label(dense), dense, ternary_models(context, dense, floor=1)),
    ]
    for name, arguments in (
        ("open loop", {"loop": "open"}),
        ("rotary keys rounded after rotation, d=2", {"rotation": 1.0, "head_dim": 2}),
        ("BOS", {"start": True}),
        ("attention sink", {"sink": 0.0}),
    ):
        where = f"{small} random 2-layer models, ternary KV, n=4"
        families.append((f"|V|=2, {name}", where, small, ternary_models(context, small, 2, 4, **arguments)))  # type: ignore[arg-type]
    for name, where, models, some in families:
        broken = sum(any(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.tokens)) for _, t in some)
        interval = proportion_interval(broken, models, 1 - context.alpha(len(families)))
        shares[name] = {
            "broken": broken,
            "models": models,
            "low": interval.low,
            "high": interval.high,
            "level": interval.level,
        }
        yield statistical(
            what=f"the share of random models that break the bound is above 0: {name}", ran_on=where, interval=interval, predicted=0.0, relation="!=",
            role="assumption", note=f"{broken} of {models} models",
        )  # fmt: skip
    within = ternary_models(context, small, 2, 4)
    yield exact(
        what="random two-token models that break the bound without any of those features (closed loop; no positions, BOS or sink)", ran_on=f"{small} random 2-layer models, ternary KV, n=4",
        observed=sum(any(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.tokens)) for _, t in within), predicted=0, role="control",
    )  # fmt: skip
    yield Picture(
        figure="per-step-counterexample",
        data={
            "strings": [{"tokens": list(s), "probability": str(p), "kv": [str(kv(s[:t])) for t in (1, 2)]} for s, p in language.items()],
            "tokens_bits": list(found.tokens), "kv_bits": list(found.kv_given_kv), "total_tokens": found.total_tokens,
            "total_kv": found.total_kv,
            "random_models": {
                "label": ternary_label(number),
                "tokens_bits": [x for f in steps for x in f.tokens], "kv_bits": [x for f in steps for x in f.kv_given_kv],
            },
            "two_token_models": two_tokens, "violating_share": shares,
        },
    )  # fmt: skip


def _all_cases(context: Context) -> list[tuple[str, list[tuple[Instance, Truth]]]]:
    number = context.size(20, 400)
    return [
        (f"{context.size(40, 400)} arbitrary deterministic caches, |V| 2..3, n 2..4", arbitrary_caches(context)),
        (ternary_label(number), ternary_models(context, number)),
        (ternary_label(number, "open loop"), ternary_models(context, number, loop="open")),
    ]


@claim(
    id="sequential/per-step-entropy-corrected", paper=PAPER, section="Theorem 1, corrected",
    statement="At each position, the new KV given all KV before it has at most the entropy of the new token plus what the cache so far "
    "leaves open about the tokens so far.",
    formula="H(KV_t | KV_<t) ≤ H(t_t | t_<t) + H(t_<t | KV_<t)",
    expected=Verdict.HOLDS,
    functions={"sequential": "kvtheory.entropy.sequential", "tokens_given_kv": "kvtheory.entropy.tokens_given_kv"},
    mutants=[
        *systematic.scales("tokens_given_kv"), *systematic.natural_log("tokens_given_kv"),
        *systematic.scales("sequential", fields=("kv_given_kv",)),
        Mutant("the slack left out (the statement as printed)", "tokens_given_kv", lambda true: lambda language, kv: (0.0,) * language.length),
        Mutant(
            "the slack of the cache after the step, not before it", "tokens_given_kv",
            lambda true: lambda language, kv: (*true(language, kv)[1:], 0.0),
        ),
        PER_STEP_AND_TOTAL, KV_AND_TOKENS, *STEP_SLIPS,
    ],
)  # fmt: skip
def per_step_corrected(context: Context, *, sequential: Function, tokens_given_kv: Function) -> Result:
    language, kv, label = COUNTEREXAMPLE
    found, slack = sequential(language, kv), tokens_given_kv(language, kv)
    yield _dyadic("H(t_1|KV_1), bits", label, slack[1], 1.0)
    yield _dyadic("H(KV_2|KV_1), bits", label, found.kv_given_kv[1], 1.0)
    yield _dyadic("H(t_2|t_1), bits", label, found.tokens[1], 0.0)
    yield _dyadic(
        "H(KV_2|KV_1) ≤ H(t_2|t_1) + H(t_1|KV_1), attained",
        label,
        found.kv_given_kv[1],
        found.tokens[1] + slack[1],
        "<=",
        "statement",
        tightness=1.0,
    )
    for where, cases in _all_cases(context):
        all_found = [sequential(c.language, c.kv) for c, _ in cases]
        all_slack = [tokens_given_kv(c.language, c.kv) for c, _ in cases]
        truths = [t for _, t in cases]
        pairs = [(a, b + c) for f, s in zip(all_found, all_slack) for a, b, c in zip(f.kv_given_kv, f.tokens, s)]
        yield _worst_of(
            "H(KV_t|KV_<t) ≤ H(t_t|t_<t) + H(t_<t|KV_<t)", where, pairs, "<=",
            note=f"attained at {sum(abs(a - b) < GAP for a, b in pairs)} of {len(pairs)} steps",
        )  # fmt: skip
        yield exact(
            what="steps with H(KV_t|KV_<t) > H(t_t|t_<t) + H(t_<t|KV_<t), counted in exact integer arithmetic", ran_on=where, predicted=0,
            observed=sum(a.exceeds(b + c) for t in truths for a, b, c in zip(t.kv_given_kv, t.tokens, t.tokens_given_kv)),
        )  # fmt: skip
        yield _agreement(
            "H(t_<t|KV_<t)", where, [pair for s, t in zip(all_slack, truths) for pair in zip(s, t.tokens_given_kv)]
        )
        yield from _measured_right(where, all_found, truths)


@claim(
    id="sequential/per-step-entropy-decoded", paper=PAPER, section="Theorem 1, sharpened",
    statement="Where decoding makes the new KV a function of the stored cache and the new token, it has at most the entropy of the new token "
    "given that cache.",
    formula="H(KV_t | KV_<t) ≤ H(t_t | KV_<t) = H(t_t | t_<t) + I(t_t; t_<t | KV_<t)",
    assumptions=("KV_t is a function of (KV_<t, t_t): exact KV, or a quantised cache in closed loop (attention reads what is stored)",),
    expected=Verdict.HOLDS_UNDER,
    functions={"sequential": "kvtheory.entropy.sequential", "next_token_given_kv": "kvtheory.entropy.next_token_given_kv"},
    mutants=[
        *systematic.scales("next_token_given_kv"), *systematic.natural_log("next_token_given_kv"),
        *systematic.scales("sequential", fields=("kv_given_kv",)),
        Mutant(
            "the token given the tokens before it", "next_token_given_kv",
            lambda true: lambda language, kv: true(language, lambda prefix: prefix),
        ),
        *NEXT_TOKEN_SLIPS, *STEP_SLIPS,
    ],
)  # fmt: skip
def per_step_decoded(context: Context, *, sequential: Function, next_token_given_kv: Function) -> Result:
    language, kv, label = COUNTEREXAMPLE
    found, given = sequential(language, kv), next_token_given_kv(language, kv)
    yield _dyadic("H(t_2|KV_1), bits", label, given[1], 1.0)
    yield _dyadic("H(KV_2|KV_1), bits", label, found.kv_given_kv[1], 1.0)
    yield _dyadic(
        "H(KV_2|KV_1) ≤ H(t_2|KV_1), attained", label, found.kv_given_kv[1], given[1], "<=", "statement", tightness=1.0
    )
    yield exact(
        what="I(t_2; t_1|KV_1) as an integer, 2^(2 I)", ran_on=label, observed=information(COUNTEREXAMPLE)[1].power(), predicted=4, role="control",
        note="1 bit: the cache does not know what the first token says about the second",
    )  # fmt: skip
    arbitrary = arbitrary_caches(context)
    yield from _split_of_next_token(
        f"{len(arbitrary)} arbitrary deterministic caches, |V| 2..3, n 2..4", arbitrary, sequential, next_token_given_kv,
        context.memo("information, arbitrary", lambda: [information(c) for c, _ in arbitrary]),
    )  # fmt: skip
    number = context.size(20, 400)
    cases = ternary_models(context, number)
    where = ternary_label(number)
    undecided = sum(
        len({(c.kv(p), p[-1], tuple(c.kv(p[:i]) for i in range(1, t))) for p in c.language.prefixes(t)})
        != len({(p[-1], tuple(c.kv(p[:i]) for i in range(1, t))) for p in c.language.prefixes(t)})
        for c, _ in cases
        for t in range(1, c.language.length + 1)
    )
    yield exact(
        what="steps where KV_t is not a function of (KV_<t, t_t)",
        ran_on=where,
        observed=undecided,
        predicted=0,
        role="control",
    )
    pairs = [
        pair for c, _ in cases for pair in zip(sequential(c.language, c.kv).kv_given_kv, next_token_given_kv(c.language, c.kv))
    ]  # fmt: skip
    yield _worst_of(
        "H(KV_t|KV_<t) ≤ H(t_t|KV_<t)",
        where,
        pairs,
        "<=",
        note=f"attained at {sum(abs(a - b) < GAP for a, b in pairs)} of {len(pairs)} steps",
    )
    yield exact(
        what="steps with H(KV_t|KV_<t) > H(t_t|KV_<t), counted in exact integer arithmetic", ran_on=where, predicted=0,
        observed=sum(a.exceeds(b) for _, t in cases for a, b in zip(t.kv_given_kv, t.next_token_given_kv)),
    )  # fmt: skip
    yield from _split_of_next_token(
        where,
        cases,
        sequential,
        next_token_given_kv,
        context.memo("information, ternary", lambda: [information(c) for c, _ in cases]),
    )
    for loop, observed, bits in (("open", "violated", 1), ("closed", "holds", 0)):
        caches = open_loop_model(loop).caches(2)
        own = truth(Instance(FiniteLanguage({(0, 2): HALF, (1, 2): HALF}), caches.kv, ""))
        step, bound = own.kv_given_kv[1], own.next_token_given_kv[1]
        yield exact(
            what=f"H(KV_2|KV_1) ≤ H(t_2|KV_1) = 0 with a ternary store in {loop} loop: holds or is violated", role="control", predicted=observed,
            ran_on=f"ac, bc; v(a) = .3, v(b) = .4, both stored as 0; every number {caches.margin:.3f} or more from a rounding threshold",
            observed="violated" if step.exceeds(bound) else "holds", note=f"H(KV_2|KV_1) = {bits} bit" + (": the assumption is needed" if bits else ""),
        )  # fmt: skip
    cases = ternary_models(context, number, loop="open")
    broken = sum(any(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.next_token_given_kv)) for _, t in cases)
    yield statistical(
        what="without the assumption, the share of random models that break the bound is above 0 (open loop: attention reads exact KV, the store is ternary)",
        ran_on=ternary_label(number, "open loop"), interval=proportion_interval(broken, number, 1 - context.alpha(1)), predicted=0.0, relation="!=",
        role="assumption", note=f"{broken} of {number} models",
    )  # fmt: skip


def _split_of_next_token(
    where: str, cases: Sequence[tuple[Instance, Truth]], sequential: Function, next_token_given_kv: Function, shared: Sequence[Sequence[Power]]
) -> Result:  # fmt: skip
    """H(t_t|KV_<t) = H(t_t|t_<t) + I(t_t; t_<t|KV_<t), true of every deterministic cache; and that each side is measured right."""
    truths = [t for _, t in cases]
    all_found = [sequential(c.language, c.kv) for c, _ in cases]
    given = [next_token_given_kv(c.language, c.kv) for c, _ in cases]
    yield from _measured_right(where, all_found, truths)
    yield _agreement(
        "H(t_t|KV_<t)", where, [pair for g, t in zip(given, truths) for pair in zip(g, t.next_token_given_kv)]
    )
    bits = [i.bits() for steps in shared for i in steps]
    tokens, next_tokens = [x for f in all_found for x in f.tokens], [x for g in given for x in g]
    yield _worst_of(
        "H(t_t|KV_<t) = H(t_t|t_<t) + I(t_t; t_<t|KV_<t)", where, [(a, b + c) for a, b, c in zip(next_tokens, tokens, bits)],
        note=f"I > 0 at {sum(i.top > i.bottom for steps in shared for i in steps)} of {len(bits)} steps, up to {max(bits):.3f} bit",
    )  # fmt: skip
    yield exact(
        what="steps with H(t_t|KV_<t) ≠ H(t_t|t_<t) + I(t_t; t_<t|KV_<t), counted in exact integer arithmetic", ran_on=where, predicted=0,
        observed=sum(
            a.exceeds(b + i) or (b + i).exceeds(a) for t, steps in zip(truths, shared) for a, b, i in zip(t.next_token_given_kv, t.tokens, steps)
        ),
    )  # fmt: skip


@claim(
    id="sequential/per-step-entropy-injective", paper=PAPER, section="Theorem 1 with its unverified assumption",
    statement="Where the cache so far determines the tokens so far, a step of KV has exactly the entropy of a step of tokens.",
    formula="t_≤i ↦ KV_≤i injective  ⇒  H(KV_i | KV_<i) = H(t_i | t_<i) = H(t_i | KV_<i)",
    assumptions=("the map from tokens to caches is injective on the strings of positive probability, at every length",),
    expected=Verdict.HOLDS_UNDER,
    functions={"sequential": "kvtheory.entropy.sequential", "is_injective": "kvtheory.entropy.is_injective"},
    mutants=[
        *systematic.scales("sequential", fields=("kv_given_kv",)), *systematic.natural_log("sequential", fields=("kv_given_kv",)),
        PER_STEP_AND_TOTAL, CONDITIONED_ON_TOKENS, *STEP_SLIPS,
        Mutant("conditioned one step too little", "sequential", _record(lambda f: {"kv_given_kv": _cumulated(f.kv_given_kv)})),
        Mutant("every cache called injective", "is_injective", lambda true: lambda language, kv: True),
        Mutant(
            "injective at the last step only", "is_injective",
            lambda true: lambda language, kv: len({tuple(kv(s[:t]) for t in range(1, language.length + 1)) for s in language}) == len(language),
        ),
    ],
)  # fmt: skip
def per_step_injective(context: Context, *, sequential: Function, is_injective: Function) -> Result:
    dyadic = FiniteLanguage({(0, 0): HALF, (0, 1): Fraction(1, 4), (1, 0): Fraction(1, 8), (1, 1): Fraction(1, 8)})
    found = sequential(dyadic, lambda prefix: prefix[-1])
    where = "law 1/2, 1/4, 1/8, 1/8 on two bits; KV = last token"
    yield _dyadic("H(t_≤2), bits", where, found.total_tokens, 1.75)
    yield numerical(
        what="H(KV_1) + H(KV_2|KV_1), bits", ran_on=where, observed=math.fsum(found.kv_given_kv), predicted=1.75, role="control",
        tolerance=ROUNDING, because=BECAUSE,
    )  # fmt: skip
    yield exact(
        what="the cache of the counterexample: injective at every length or not", ran_on=COUNTEREXAMPLE.label,
        observed=_injective(is_injective(COUNTEREXAMPLE.language, COUNTEREXAMPLE.kv)), predicted="not injective", role="control",
        note="after two tokens it is injective, after one it is not",
    )  # fmt: skip
    for where, cases in _all_cases(context):
        # injectivity once more, by whole histories
        told = [bool(is_injective(c.language, c.kv)) for c, _ in cases]
        true = [
            all(
                len({tuple(c.kv(p[:i]) for i in range(1, t + 1)) for p in c.language.prefixes(t)})
                == len(c.language.prefixes(t))
                for t in range(1, c.language.length + 1)
            )
            for c, _ in cases
        ]
        yield exact(
            what="caches that the function and an enumeration of all histories judge differently as to injectivity",
            ran_on=where,
            observed=sum(a != b for a, b in zip(told, true)),
            predicted=0,
            role="control",
        )
        all_found = [sequential(c.language, c.kv) for c, _ in cases]
        yield from _measured_right(where, all_found, [t for _, t in cases])
        chosen = [(f, t) for f, (_, t), yes in zip(all_found, cases, told) if yes]
        yield exact(
            what="number of injective caches among them",
            ran_on=where,
            observed=len(chosen),
            predicted=1,
            relation=">=",
            role="control",
        )
        yield _worst_of(
            "H(KV_t|KV_<t) = H(t_t|t_<t) at the steps of injective caches", where,
            [pair for f, _ in chosen for pair in zip(f.kv_given_kv, f.tokens)],
        )  # fmt: skip
        yield exact(
            what="steps of injective caches where H(KV_t|KV_<t), H(t_t|t_<t) and H(t_t|KV_<t) are not all equal, counted in exact integer arithmetic", ran_on=where, predicted=0,
            observed=sum(
                a.exceeds(b) or b.exceeds(a) or b.exceeds(c) or c.exceeds(b)
                for _, t in chosen
                for a, b, c in zip(t.kv_given_kv, t.tokens, t.next_token_given_kv)
            ),
        )  # fmt: skip
    spare = Instance(
        FiniteLanguage({s: Fraction(1, 8) for s in itertools.product(range(2), repeat=3)}),
        lambda prefix: prefix[-1] * (len(prefix) > 1),
        "",
    )
    where = "three fair coins, the first never stored"
    found = sequential(spare.language, spare.kv)
    yield exact(
        what="the cache that never stores the first coin: injective or not",
        ran_on=where,
        observed=_injective(is_injective(spare.language, spare.kv)),
        predicted="not injective",
        role="control",
    )
    for t, (step, token) in enumerate(zip(found.kv_given_kv, found.tokens)):
        yield _dyadic(
            f"H(KV_{t + 1}|KV_<{t + 1}) ≤ H(t_{t + 1}|t_<{t + 1}) for a cache that is not injective", where, step, token, "<=",
            note="injectivity is sufficient, not necessary: what was forgotten must not matter for the next token",
        )  # fmt: skip
    yield from _real_injectivity(context)


def _real_injectivity(context: Context) -> Result:
    """The assumption on a real cache: do different tokens write different values in layer 0, stored at b bits?

    Only there does no context enter the values, so that equal values of different tokens are a collision for good. Of a deeper layer
    distinct rows say nothing: positions differ by their context. The whole vocabulary: sequential/injectivity-on-real-models.
    """
    first = [pair for pair in context.real() if pair[1].index == 0]
    if not first or context.cache is None or context.cache.tokens is None:
        return
    label, layer = first[0]
    tokens = np.asarray(context.cache.tokens)
    values = np.asarray(layer.values, np.float64)  # (heads, tokens, dv)
    rows = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    for bits in (None, 4, 2, 1):
        step = np.where(high > low, (high - low) / (2 ** (bits or 1) - 1), 1.0)
        stored = rows if bits is None else np.rint((rows - low) / step)
        number = np.unique(stored, axis=0, return_inverse=True)[1].reshape(-1)
        pairs = np.unique(np.stack([number, tokens[: len(rows)]]), axis=1).shape[1]
        yield exact(
            what="different tokens with equal values, " + ("as captured" if bits is None else f"codes of {bits} bits, min/max per position"),
            ran_on=f"{label}, all KV heads, {len(rows)} positions, {len(np.unique(tokens))} different tokens",
            observed=int(pairs - number.max() - 1), predicted=0, role="assumption",
        )  # fmt: skip
