"""Theorem 1: the printed table of small bit-widths, and what it would be as an upper bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proofs_checks import mutants as systematic
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical
from proofs_checks.quantizers.instruments import (
    PRINTED_BITS,
    gaussian_by_lloyd,
    highest,
    worst,
)

PAPER = "2504.19874"

#: smallest d at which D_mse exceeds the printed value (it rises with d)
FIRST_ABOVE = {1: 95, 2: 395, 3: 16, 4: 47}


@claim(
    id="quantizers/turboquant-printed-table",
    paper=PAPER,
    section="Theorem 1, small bit-widths",
    statement="For 1, 2, 3, 4 bits D_mse is .36, .117, .03, .009 (printed with 'approximately'), read as upper bounds.",
    formula="D_mse ≤ 0.36, 0.117, 0.03, 0.009 for b = 1, 2, 3, 4",
    expected=Verdict.FAILS,
    correction="quantizers/turboquant-table",
    functions={
        "mse_distortion": "kvtheory.quantization.mse_distortion",
        "printed": "kvtheory.quantization.printed_mse",
    },
    mutants=[
        *systematic.scales("mse_distortion"),
        *systematic.scales("printed"),
        Mutant(
            "the table rounded up",
            "printed",
            lambda true: lambda bits: {1: 0.3634, 2: 0.1175, 3: 0.0346, 4: 0.0096}[bits],
        ),
        Mutant("one bit more", "mse_distortion", lambda true: lambda dim, bits: true(dim, bits + 1)),
        Mutant("4^-b", "mse_distortion", lambda true: lambda dim, bits: 4.0**-bits),
    ],
)
def turboquant_printed_table(context: Context, *, mse_distortion: Any, printed: Any) -> Iterator[Evidence]:
    yield exact(
        what="the table as printed", ran_on="arXiv 2504.19874, Theorem 1", role="control", relation="=",
        observed=" ".join(str(printed(b)) for b in PRINTED_BITS), predicted="0.36 0.117 0.03 0.009",
    )  # fmt: skip
    yield exact(
        what="D_mse at d = 128 to four digits", ran_on="b = 1..4", role="control", relation="=",
        observed=" ".join(f"{mse_distortion(128, b):.4f}" for b in PRINTED_BITS), predicted="0.3609 0.1160 0.0340 0.0093",
    )  # fmt: skip
    for b, d in FIRST_ABOVE.items():
        # The counterexample is decided without the optimum: no quantiser is better than the best one, and that lies above.
        yield numerical(
            what="D_mse against the printed value, at the smallest d where it exceeds it", ran_on=f"d = {d}, b = {b}",
            observed=mse_distortion(d, b), predicted=printed(b), relation="<=", tolerance=1e-9, because="D_mse is exact to 1e-12",
            tightness=mse_distortion(d, b) / printed(b),
        )  # fmt: skip
        yield numerical(
            what="one dimension lower it does not", ran_on=f"d = {d - 1}, b = {b}", role="control", observed=mse_distortion(d - 1, b),
            predicted=printed(b), relation="<=", tolerance=1e-9, because="D_mse is exact to 1e-12",
        )  # fmt: skip
    case, seen, bound = highest([(f"d=128, b={b}", mse_distortion(128, b), printed(b)) for b in PRINTED_BITS])
    yield numerical(
        what="largest excess at the head size of most models", ran_on="d = 128", observed=seen, predicted=bound, relation="<=",
        tolerance=1e-9, because="D_mse is exact to 1e-12", tightness=seen / bound, worst_case=case,
        note="as approximations the values are right to their digits, cut off rather than rounded in the limit: .03455 and .009501",
    )  # fmt: skip


@claim(
    id="quantizers/turboquant-table",
    paper=PAPER,
    section="Theorem 1, small bit-widths, corrected",
    statement="For 1, 2, 3, 4 bits D_mse is at most .3634, .1175, .0346, .0096 in every dimension, and no smaller four-digit table is.",
    formula="D_mse(d, b) < D_mse(∞, b) = .363380, .117482, .034548, .009501 ≤ .3634, .1175, .0346, .0096",
    expected=Verdict.HOLDS,
    functions={
        "mse_distortion": "kvtheory.quantization.mse_distortion",
        "table": "kvtheory.quantization.rounded_up_mse",
    },
    mutants=[
        *systematic.scales("table"),
        *systematic.scales("mse_distortion"),
        Mutant("the paper's table", "table", lambda true: lambda bits: {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}[bits]),
        Mutant("one unit lower in the last digit", "table", lambda true: lambda bits: true(bits) - 1e-4),
        Mutant("one unit higher in the last digit", "table", lambda true: lambda bits: true(bits) + 1e-4),
    ],
)
def turboquant_table(context: Context, *, mse_distortion: Any, table: Any) -> Iterator[Evidence]:
    # The limit d -> infinity by the check's own Newton-free route: Lloyd iteration on the normal law.
    limits = context.memo("limits", lambda: {b: gaussian_by_lloyd(2**b) for b in PRINTED_BITS})
    for b in PRINTED_BITS:
        yield numerical(
            what="the normal limit against the table", ran_on=f"b = {b}", observed=limits[b], predicted=table(b), relation="<=",
            tolerance=0.0, because="the limit is exact to 1e-9", tightness=limits[b] / table(b),
        )  # fmt: skip
        yield numerical(
            what="and it is above the table's next lower four-digit value", ran_on=f"b = {b}", observed=limits[b],
            predicted=table(b) - 1e-4, relation=">", tolerance=0.0, because="the limit is exact to 1e-9",
        )  # fmt: skip
    dims = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 1024, 4096)
    values = {b: [mse_distortion(d, b) for d in dims] + [limits[b]] for b in PRINTED_BITS}
    rise = min(values[b][i + 1] / values[b][i] for b in PRINTED_BITS for i in range(len(dims)))
    yield numerical(
        what="D_mse rises with d to the normal limit, smallest ratio of neighbours", ran_on=f"d = {dims} and the limit", observed=rise,
        predicted=1.0, relation=">", tolerance=1e-9, because="D_mse is exact to 1e-12",
    )  # fmt: skip
    # 1 - D/D_inf = c/d + O(1/d^2): quadrupling d from 1024 divides it by 4, to the second order 1/d.
    gap = [1 - values[b][-3] / limits[b] for b in PRINTED_BITS]
    next_gap = [1 - values[b][-2] / limits[b] for b in PRINTED_BITS]
    case, seen, want = worst([(f"b={b}", g / n, 4.0) for b, g, n in zip(PRINTED_BITS, gap, next_gap)])
    yield numerical(
        what="the gap to the limit falls as 1/d", ran_on="d = 1024 and 4096", observed=seen, predicted=want, tolerance=0.02,
        because="second-order term, of relative size 10/d, and a limit exact to 1e-9", worst_case=case,
    )  # fmt: skip
