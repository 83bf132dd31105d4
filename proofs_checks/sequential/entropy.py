"""Claims of arXiv 2604.15356 about entropy: what a cache costs, given what came before, against what its tokens cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory.entropy import FiniteLanguage, SequentialEntropies
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact
from proofs_checks.sequential.instances import (
    COUNTEREXAMPLE,
    GAP,
    HALF,
    MERGED,
    Instance,
    Power,
    Truth,
    arbitrary_caches,
    laws_on_a_grid,
    of_float,
    open_loop_model,
    ternary_label,
    ternary_models,
    truth,
    two_token_partitions,
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
FIELDS = ("kv_given_kv", "tokens", "total_kv", "total_tokens")


def _worst(excess: Sequence[float]) -> float:
    return max(excess, default=0.0)


def _agreement(what: str, ran_on: str, pairs: Sequence[tuple[float, Power]]) -> Evidence:
    """Control: floats of the statement's function against the exact numbers."""
    error = _worst([abs(value - true.bits()) for value, true in pairs])
    return exact(
        what=f"{what}: {len(pairs)} floats within 1e-12 bit of the exact number", ran_on=ran_on, observed=bool(error <= 1e-12), predicted=True,
        role="control", note=f"largest difference {error:.1e} bit",
    )  # fmt: skip


def _violations(left: Sequence[float], right: Sequence[float]) -> int:
    return sum(a > b + GAP for a, b in zip(left, right))


@claim(
    id="sequential/total-entropy", paper=PAPER, section="Theorem 1, summed over positions (theory.md A1)",
    statement="Over a whole sequence, the entropy of the cache of a deterministic model is at most the entropy of its tokens.",
    formula="Σ_t H(KV_t | KV_<t) = H(KV_≤n) ≤ H(t_≤n)",
    expected=Verdict.HOLDS,
    functions={"sequential": "kvtheory.entropy.sequential"},
    mutants=[
        *systematic.scales("sequential", fields=("total_kv",)), *systematic.natural_log("sequential", fields=("total_kv",)),
        *systematic.scales("sequential", fields=("total_tokens",)), PER_STEP_AND_TOTAL, KV_AND_TOKENS, CONDITIONED_ON_TOKENS, UNCONDITIONED,
        TAKEN_INJECTIVE,
    ],
)  # fmt: skip
def total_entropy(context: Context, *, sequential: Function) -> Result:
    found = sequential(MERGED.language, MERGED.kv)
    where = "four strings, each 1/4; KV = number of ones after two tokens, nothing after one"
    yield exact(
        what="H(KV_≤n) of the law (1/4, 1/2, 1/4), in bits",
        ran_on=where,
        observed=of_float(found.total_kv),
        predicted=1.5,
        role="control",
    )
    yield exact(
        what="H(t_≤n) of the law (1/4, 1/4, 1/4, 1/4), in bits",
        ran_on=where,
        observed=of_float(found.total_tokens),
        predicted=2.0,
        role="control",
    )
    yield exact(
        what="H(KV_≤n) ≤ H(t_≤n)",
        ran_on=where,
        observed=of_float(found.total_kv),
        predicted=of_float(found.total_tokens),
        relation="<=",
        tightness=0.75,
    )
    found = sequential(COUNTEREXAMPLE.language, COUNTEREXAMPLE.kv)
    yield exact(
        what="H(KV_≤n) ≤ H(t_≤n), attained: the string can be read off the cache at the end", ran_on=COUNTEREXAMPLE.label,
        observed=of_float(found.total_kv), predicted=of_float(found.total_tokens), relation="<=", tightness=1.0,
    )  # fmt: skip
    yield exact(
        what="Σ_t H(KV_t|KV_<t) = H(KV_≤n)",
        ran_on=COUNTEREXAMPLE.label,
        observed=of_float(math.fsum(found.kv_given_kv)),
        predicted=of_float(found.total_kv),
    )
    for label, cases in (
        (f"{context.size(40, 400)} arbitrary deterministic caches, |V| 2..3, n 2..4", arbitrary_caches(context)),
        (ternary_label(context.size(20, 400)), ternary_models(context, context.size(20, 400))),
    ):
        all_found = [sequential(c.language, c.kv) for c, _ in cases]
        excess = [f.total_kv - f.total_tokens for f in all_found]
        yield exact(
            what="cases with H(KV_≤n) > H(t_≤n)", ran_on=label, observed=_violations(*zip(*((f.total_kv, f.total_tokens) for f in all_found))),
            predicted=0, worst_case=f"largest H(KV_≤n) - H(t_≤n): {_worst(excess):.3g} bit",
        )  # fmt: skip
        yield exact(
            what="the same, decided by integers",
            ran_on=label,
            observed=sum(t.total_kv.exceeds(t.total_tokens) for _, t in cases),
            predicted=0,
        )
        rule = _worst([abs(math.fsum(f.kv_given_kv) - f.total_kv) for f in all_found])
        yield exact(
            what="cases where Σ_t H(KV_t|KV_<t) is not H(KV_≤n) within 1e-12 bit", ran_on=label,
            observed=sum(abs(math.fsum(f.kv_given_kv) - f.total_kv) > 1e-12 for f in all_found), predicted=0, note=f"largest difference {rule:.1e}",
        )  # fmt: skip
        yield _agreement(
            "totals", label,
            [pair for f, (_, t) in zip(all_found, cases) for pair in ((f.total_kv, t.total_kv), (f.total_tokens, t.total_tokens))],
        )  # fmt: skip


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
        Mutant(
            "steps counted from the end", "sequential", _record(lambda f: {"kv_given_kv": f.kv_given_kv[::-1], "tokens": f.tokens[::-1]})
        ),
    ],
    figure="per-step-counterexample", correction="sequential/per-step-entropy-corrected",
)  # fmt: skip
def per_step_entropy(context: Context, *, sequential: Function, next_token_given_kv: Function) -> Result:
    language, kv, label = COUNTEREXAMPLE
    found = sequential(language, kv)
    yield exact(what="KV(a) = KV(b)", ran_on=label, observed=str(kv(("a",))), predicted=str(kv(("b",))), role="control")
    for what, observed, predicted in (
        ("H(t_1), bits", found.tokens[0], 1.0),
        ("H(t_2|t_1), bits", found.tokens[1], 0.0),
        ("H(KV_1), bits", found.kv_given_kv[0], 0.0),
        ("H(KV_2|KV_1), bits", found.kv_given_kv[1], 1.0),
        ("H(KV_≤2), bits", found.total_kv, 1.0),
        ("H(t_≤2), bits", found.total_tokens, 1.0),
        ("H(t_2|KV_1), bits", next_token_given_kv(language, kv)[1], 1.0),
    ):
        yield exact(what=what, ran_on=label, observed=of_float(observed), predicted=predicted, role="control")
    yield exact(
        what="H(KV_2|KV_1) ≤ H(t_2|t_1)", ran_on="|V|=3, n=2, one layer, one head, d=1, m=2, integer weights", observed=of_float(found.kv_given_kv[1]),
        predicted=of_float(found.tokens[1]), relation="<=",
        note="the cache forgot which of a, b came first; when c or a follows, it learns it late: the bit moves from step 1 to step 2",
    )  # fmt: skip
    yield exact(
        what="H(t_2|t_1) = H(t_2|KV_1)",
        ran_on=label,
        observed=of_float(found.tokens[1]),
        predicted=of_float(next_token_given_kv(language, kv)[1]),
    )

    number = context.size(20, 400)
    cases = ternary_models(context, number)
    steps = [sequential(c.language, c.kv) for c, _ in cases]
    by_floats = [_violations(f.kv_given_kv, f.tokens) for f in steps]
    by_integers = [sum(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.tokens)) for _, t in cases]
    excess = [max(a - b for a, b in zip(f.kv_given_kv, f.tokens)) for f in steps]
    yield exact(
        what="violating steps of each model, by floats and by integers", ran_on=ternary_label(number), observed=str(by_floats),
        predicted=str(by_integers), role="control",
    )  # fmt: skip
    yield exact(
        what="models that break the bound at some step", ran_on=ternary_label(number), observed=sum(map(bool, by_floats)), predicted=0,
        worst_case=f"largest H(KV_t|KV_<t) - H(t_t|t_<t): {max(excess):.3f} bit",
    )  # fmt: skip
    yield exact(
        what="models that break the TOTAL bound", ran_on=ternary_label(number), observed=sum(f.total_kv > f.total_tokens + GAP for f in steps),
        predicted=0, role="control",
    )  # fmt: skip
    yield _agreement(
        "per step", ternary_label(number),
        [pair for f, (_, t) in zip(steps, cases) for pair in (*zip(f.kv_given_kv, t.kv_given_kv), *zip(f.tokens, t.tokens))],
    )  # fmt: skip

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
            what="models whose KV is neither constant nor tells the two tokens apart everywhere (either way no law breaks the bound)",
            ran_on=where, observed=unlike, predicted=0, role="control",
        )  # fmt: skip
        broken = 0
        for cells in partitions:
            table = dict(zip(prefixes, cells))
            for law in laws_on_a_grid(length, parts):
                f = sequential(law, table.__getitem__)
                broken += _violations(f.kv_given_kv, f.tokens)
        yield exact(
            what=f"violating steps with |V|=2, over all laws with probabilities in multiples of 1/{parts}", ran_on=where, observed=broken,
            predicted=0, role="control",
        )  # fmt: skip

    small = context.size(30, 800)
    rates = {}
    for name, arguments in (
        ("|V|=2, closed loop", {}),
        ("|V|=2, open loop", {"loop": "open"}),
        ("|V|=2, rotary keys rounded after rotation, d=2", {"rotation": 1.0, "head_dim": 2}),
        ("|V|=2, BOS", {"start": True}),
        ("|V|=2, attention sink", {"sink": 0.0}),
    ):
        own = ternary_models(context, small, 2, 4, **arguments)  # type: ignore[arg-type]
        broken = sum(any(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.tokens)) for _, t in own)
        rates[name] = broken / small
        yield exact(
            what=f"models that break the bound, {name}", ran_on=f"{small} random 2-layer models, ternary KV, n=4", observed=broken, predicted=0,
            role="control" if name.endswith("closed loop") else "assumption",
        )  # fmt: skip
    dense = context.size(8, 400)  # a full tree of 4^4 strings each: the dearest instances
    spread = ternary_models(context, dense, floor=1)
    broken = sum(any(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.tokens)) for _, t in spread)
    rates["|V|=4, every transition at least 1/8"] = broken / dense
    yield exact(
        what="models that break the bound when no transition is rarer than 1/8", ran_on=ternary_label(dense), observed=broken, predicted=0,
        role="assumption", note="what the cache forgot must matter for the next token: predictable text breaks the bound, noise hides it",
    )  # fmt: skip
    rates["|V|=4, sparse transitions"] = sum(map(bool, by_floats)) / number
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
            "violating_share": rates,
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
    id="sequential/per-step-entropy-corrected", paper=PAPER, section="Theorem 1, corrected (theory.md A1, ii)",
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
        PER_STEP_AND_TOTAL, KV_AND_TOKENS,
    ],
)  # fmt: skip
def per_step_corrected(context: Context, *, sequential: Function, tokens_given_kv: Function) -> Result:
    language, kv, label = COUNTEREXAMPLE
    found, slack = sequential(language, kv), tokens_given_kv(language, kv)
    yield exact(what="H(t_1|KV_1), bits", ran_on=label, observed=of_float(slack[1]), predicted=1.0, role="control")
    yield exact(
        what="H(KV_2|KV_1), bits", ran_on=label, observed=of_float(found.kv_given_kv[1]), predicted=1.0, role="control"
    )
    yield exact(
        what="H(t_2|t_1), bits", ran_on=label, observed=of_float(found.tokens[1]), predicted=0.0, role="control"
    )
    yield exact(
        what="H(KV_2|KV_1) ≤ H(t_2|t_1) + H(t_1|KV_1), attained", ran_on=label, observed=of_float(found.kv_given_kv[1]),
        predicted=of_float(found.tokens[1] + slack[1]), relation="<=", tightness=1.0,
    )  # fmt: skip
    for where, cases in _all_cases(context):
        all_found = [(sequential(c.language, c.kv), tokens_given_kv(c.language, c.kv)) for c, _ in cases]
        excess = [a - (b + c) for f, s in all_found for a, b, c in zip(f.kv_given_kv, f.tokens, s)]
        yield exact(
            what="steps with H(KV_t|KV_<t) > H(t_t|t_<t) + H(t_<t|KV_<t)", ran_on=where, observed=sum(x > GAP for x in excess), predicted=0,
            worst_case=f"largest excess {max(excess):.2g} bit", note=f"attained at {sum(abs(x) < GAP for x in excess)} of {len(excess)} steps",
        )  # fmt: skip
        yield exact(
            what="the same, decided by integers", ran_on=where, predicted=0,
            observed=sum(a.exceeds(b + c) for _, t in cases for a, b, c in zip(t.kv_given_kv, t.tokens, t.tokens_given_kv)),
        )  # fmt: skip
        yield _agreement(
            "H(t_<t|KV_<t)",
            where,
            [pair for (_, s), (_, t) in zip(all_found, cases) for pair in zip(s, t.tokens_given_kv)],
        )


@claim(
    id="sequential/per-step-entropy-decoded", paper=PAPER, section="Theorem 1, sharpened (theory.md A1, ii')",
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
        Mutant(
            "the token given the last KV only", "next_token_given_kv",
            lambda true: lambda language, kv: tuple(
                true(FiniteLanguage({p: language.probability(p) for p in language.prefixes(t)}), lambda p, t=t: kv(p) if len(p) == t - 1 else 0)[-1]
                for t in range(1, language.length + 1)
            ),
        ),
    ],
)  # fmt: skip
def per_step_decoded(context: Context, *, sequential: Function, next_token_given_kv: Function) -> Result:
    language, kv, label = COUNTEREXAMPLE
    found, given = sequential(language, kv), next_token_given_kv(language, kv)
    yield exact(what="H(t_2|KV_1), bits", ran_on=label, observed=of_float(given[1]), predicted=1.0, role="control")
    yield exact(
        what="H(KV_2|KV_1), bits", ran_on=label, observed=of_float(found.kv_given_kv[1]), predicted=1.0, role="control"
    )
    yield exact(
        what="H(KV_2|KV_1) ≤ H(t_2|KV_1), attained", ran_on=label, observed=of_float(found.kv_given_kv[1]), predicted=of_float(given[1]), relation="<=",
        tightness=1.0,
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
    all_found = [(sequential(c.language, c.kv), next_token_given_kv(c.language, c.kv)) for c, _ in cases]
    excess = [a - b for f, s in all_found for a, b in zip(f.kv_given_kv, s)]
    yield exact(
        what="steps with H(KV_t|KV_<t) > H(t_t|KV_<t)", ran_on=where, observed=sum(x > GAP for x in excess), predicted=0,
        worst_case=f"largest excess {max(excess):.2g} bit", note=f"attained at {sum(abs(x) < GAP for x in excess)} of {len(excess)} steps",
    )  # fmt: skip
    yield exact(
        what="the same, decided by integers", ran_on=where, predicted=0,
        observed=sum(a.exceeds(b) for _, t in cases for a, b in zip(t.kv_given_kv, t.next_token_given_kv)),
    )  # fmt: skip
    yield _agreement(
        "H(t_t|KV_<t)",
        where,
        [pair for (_, s), (_, t) in zip(all_found, cases) for pair in zip(s, t.next_token_given_kv)],
    )
    for loop, observed, bits in (("open", "violated", 1), ("closed", "holds", 0)):
        caches = open_loop_model(loop).caches(2)
        own = truth(Instance(FiniteLanguage({(0, 2): HALF, (1, 2): HALF}), caches.kv, ""))
        step, bound = own.kv_given_kv[1], own.next_token_given_kv[1]
        yield exact(
            what=f"H(KV_2|KV_1) ≤ H(t_2|KV_1) = 0 with a ternary store in {loop} loop", role="control", predicted=observed,
            ran_on=f"ac, bc; v(a) = .3, v(b) = .4, both stored as 0; every number {caches.margin:.3f} or more from a rounding threshold",
            observed="violated" if step.exceeds(bound) else "holds", note=f"H(KV_2|KV_1) = {bits}: the assumption is needed",
        )  # fmt: skip
    cases = ternary_models(context, number, loop="open")
    broken = sum(any(a.exceeds(b) for a, b in zip(t.kv_given_kv, t.next_token_given_kv)) for _, t in cases)
    yield exact(
        what="models that break it with an open-loop store (attention reads exact KV, the store is ternary)",
        ran_on=ternary_label(number, "open loop"), observed=broken, predicted=0, role="assumption",
    )  # fmt: skip


@claim(
    id="sequential/per-step-entropy-injective", paper=PAPER, section="Theorem 1 with its unverified assumption (theory.md A1, iii)",
    statement="Where the cache so far determines the tokens so far, a step of KV has exactly the entropy of a step of tokens.",
    formula="t_≤i ↦ KV_≤i injective  ⇒  H(KV_i | KV_<i) = H(t_i | t_<i) = H(t_i | KV_<i)",
    assumptions=("the map from tokens to caches is injective on the strings of positive probability, at every length",),
    expected=Verdict.HOLDS_UNDER,
    functions={"sequential": "kvtheory.entropy.sequential", "is_injective": "kvtheory.entropy.is_injective"},
    mutants=[
        *systematic.scales("sequential", fields=("kv_given_kv",)), *systematic.natural_log("sequential", fields=("kv_given_kv",)),
        PER_STEP_AND_TOTAL,
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
    yield exact(
        what="H(KV_2|KV_1) = 3/4 h(1/3) + 1/4 and H(t_≤2) = 7/4: total",
        ran_on=where,
        observed=of_float(found.total_tokens),
        predicted=1.75,
        role="control",
    )
    yield exact(
        what="H(KV_1) + H(KV_2|KV_1) = 7/4",
        ran_on=where,
        observed=bool(abs(sum(found.kv_given_kv) - 1.75) < 1e-12),
        predicted=True,
        role="control",
    )
    yield exact(
        what="the counterexample is injective (it is, at the end, not at the first step)", ran_on=COUNTEREXAMPLE.label,
        observed=bool(is_injective(COUNTEREXAMPLE.language, COUNTEREXAMPLE.kv)), predicted=False, role="control",
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
            what="which caches are injective", ran_on=where, observed=str(told), predicted=str(true), role="control"
        )
        chosen = [(sequential(c.language, c.kv), t) for (c, t), yes in zip(cases, told) if yes]
        yield exact(
            what="injective caches among them",
            ran_on=where,
            observed=len(chosen),
            predicted=1,
            relation=">=",
            role="control",
        )
        yield exact(
            what="steps of injective caches where H(KV_t|KV_<t) is not H(t_t|t_<t), within 1e-12 bit", ran_on=where, predicted=0,
            observed=sum(abs(a - b) > 1e-12 for f, _ in chosen for a, b in zip(f.kv_given_kv, f.tokens)),
        )  # fmt: skip
        yield exact(
            what="the same, decided by integers, H(t_t|KV_<t) included", ran_on=where, predicted=0,
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
    found = sequential(spare.language, spare.kv)
    yield exact(
        what="H(KV_t|KV_<t) ≤ H(t_t|t_<t) at every step of a cache that is not injective", ran_on="three fair coins, the first never stored",
        observed=all(a <= b for a, b in zip(found.kv_given_kv, found.tokens)) and not is_injective(spare.language, spare.kv), predicted=True,
        role="control", note="injectivity is sufficient, not necessary: what was forgotten must not matter for the next token",
    )  # fmt: skip
    yield from _real_injectivity(context)


def _real_injectivity(context: Context) -> Result:
    """The assumption on a real cache: do different tokens write different values, stored at b bits?

    In layer 0 no position and no context enters the values, so equal values there are equal for good.
    """
    if not context.real() or context.cache is None or context.cache.tokens is None:
        return
    label, layer = min(context.real(), key=lambda pair: pair[1].index or 0)
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
