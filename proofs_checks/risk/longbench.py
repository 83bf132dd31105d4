"""The paper's LongBench-v2 table as counts of questions: what it can say about an order, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from math import comb
from typing import Any

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical

#: printed accuracies, per cent, and the questions right of those of LongBench-v2's "long" subset
PRINTED = {"full cache": "37.04", "clustering, 128 directions": "37.04", "clustering, 64 directions": "35.19", "random": "34.26"}  # fmt: skip
QUESTIONS = 108


def _counts(questions: int) -> dict[str, int] | None:
    """The counts of which the printed percentages are the roundings, or None where there are none."""
    found = {}
    for name, text in PRINTED.items():
        near = round(Fraction(text) * questions / 100)
        if abs(Fraction(100 * near, questions) - Fraction(text)) > Fraction(1, 200):
            return None
        found[name] = near
    return found


def _by_tables(first: int, second: int, trials: int) -> tuple[Fraction, Fraction]:
    """Least and greatest exact two-sided p over all 2 x 2 tables with these margins, the binomial summed over both tails."""
    values = []
    for both in range(max(0, first + second - trials), min(first, second) + 1):
        b, c = first - both, second - both
        n, least = b + c, abs(b - c)
        values.append(Fraction(sum(comb(n, i) for i in range(n + 1) if abs(n - 2 * i) >= least), 2**n))
    return min(values), max(values)


def _one_sided(true: Function) -> Function:
    def wrong(first: int, second: int, trials: int) -> tuple[Fraction, Fraction]:
        low, high = true(first, second, trials)
        return low / 2, high / 2

    return wrong


def _unpaired(true: Function) -> Function:
    """As if the successes of the one were failures of the other."""
    return lambda first, second, trials: (true(first, second, trials)[1],) * 2


def _normal(true: Function) -> Function:
    """The Wald interval."""

    def wrong(successes: int, trials: int, level: float) -> Any:
        found = true(successes, trials, level)
        half = 1.959964 * (found.estimate * (1 - found.estimate) / trials) ** 0.5
        return found._replace(low=found.estimate - half, high=found.estimate + half)

    return wrong


@claim(
    id="risk/longbench-table", paper="2607.01520", section="Section 6 (LongBench-v2, long subset, Qwen3-32B, about 95 % of the cache removed); no profile enters",
    statement="The table's accuracies, 37.04 (full cache and clustering in 128 directions), 35.19 (clustering in 64) and 34.26 % (random), are 40, 38 and 37 of 108 questions. "
    "They support no order of the methods: whichever questions were answered, the exact paired (McNemar) test of any two of them has p ≥ 1/4, "
    "and each exact 95 % interval holds all the other accuracies.",
    formula="p = min(1, 2 P(X ≤ min(b, c))), X ~ Bin(b + c, 1/2), b − c = 3 at most:   p ≥ 2 · 2⁻³",
    expected=Verdict.HOLDS,
    functions={"p_range": "kvtheory.statistics.paired_p_range", "interval": "kvtheory.statistics.proportion_interval"},
    mutants=[
        *systematic.scales("p_range"),
        Mutant("one tail", "p_range", _one_sided),
        Mutant("unpaired", "p_range", _unpaired),
        Mutant("differences of one question more", "p_range", lambda true: lambda a, b, n: true(max(a, b) + 1, min(a, b), n)),
        Mutant("normal interval", "interval", _normal),
        Mutant("interval at 90 %", "interval", lambda true: lambda x, n, level: true(x, n, 0.9)),
        Mutant("interval for twice the questions", "interval", lambda true: lambda x, n, level: true(2 * x, 2 * n, level)),
    ],
    figure="longbench-table",
)  # fmt: skip
def longbench_table(context: Context, *, p_range: Function, interval: Function) -> Iterator[Evidence | Picture]:
    fitting = [n for n in range(1, 216) if _counts(n)]
    where = "the four printed percentages"
    yield exact(what="least number of questions of which all of them are roundings", ran_on=where, observed=fitting[0], predicted=QUESTIONS, role="control",
                note="the subset has 108 questions; other fitting numbers up to 215: " + (", ".join(map(str, fitting[1:])) or "none"))  # fmt: skip
    counts = _counts(QUESTIONS)
    assert counts is not None
    yield exact(what="questions right, in the order of the table", ran_on=where, observed=list(counts.values()), predicted=[40, 40, 38, 37])  # fmt: skip
    pairs = []
    for (a, x), (b, y) in combinations(counts.items(), 2):
        low, high = p_range(x, y, QUESTIONS)
        name = f"{a} against {b}: {x} and {y} of {QUESTIONS}"
        for label, value, truth in zip(("least", "greatest"), (low, high), _by_tables(x, y, QUESTIONS)):
            yield exact(what=f"{label} p by the function = {label} over all tables with these margins", ran_on=name, observed=value, predicted=truth, role="control")  # fmt: skip
        yield exact(what="least exact p of the paired test ≥ 1/4", ran_on=name, observed=low, predicted=Fraction(1, 4), relation=">=")  # fmt: skip
        pairs.append({"pair": name, "least": float(low), "greatest": float(high)})
    bars = []
    for name, x in counts.items():
        found = interval(x, QUESTIONS, 0.95)
        # Clopper-Pearson: at either end the tail beyond the count has probability 1/40, by exact sums at the rational value of the float
        for end, tail in ((found.low, range(x, QUESTIONS + 1)), (found.high, range(x + 1))):
            p = Fraction(end)
            mass = sum(comb(QUESTIONS, i) * p**i * (1 - p) ** (QUESTIONS - i) for i in tail)
            yield numerical(what="binomial tail beyond the count at the end of its 95 % interval = 1/40", ran_on=f"{name}, {x} of {QUESTIONS}", observed=float(mass),
                            predicted=1 / 40, tolerance=1e-9, because="the inverse incomplete beta function is good to 1e-12; the tail's slope is below 10", role="control")  # fmt: skip
        within = sum(Fraction(found.low) <= Fraction(y, QUESTIONS) <= Fraction(found.high) for y in counts.values())
        yield exact(what="accuracies of the table inside the interval", ran_on=f"{name}, {x} of {QUESTIONS}", observed=within, predicted=len(counts))  # fmt: skip
        bars.append({"method": name, "right": x, "low": 100 * found.low, "high": 100 * found.high})
    yield Picture("longbench-table", {"questions": QUESTIONS, "methods": bars, "pairs": pairs})
