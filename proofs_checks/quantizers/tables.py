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
    beta_by_lloyd,
    beta_distortion,
    farthest_from_digits,
    gaussian_by_lloyd,
    highest,
    optimal_distortion,
    worst,
)

PAPER = "2504.19874"

#: as the paper prints it, and D_mse at d = 128 as computed once with other code
PRINTED = {1: "0.36", 2: "0.117", 3: "0.03", 4: "0.009"}
AT_128 = {1: "0.3609", 2: "0.1160", 3: "0.0340", 4: "0.0093"}
#: dimensions at which all four printed figures are right to half a unit
LARGE = (256, 512, 1024, 4096)
#: smallest d at which D_mse exceeds the printed value (it rises with d)
FIRST_ABOVE = {1: 95, 2: 395, 3: 16, 4: 47}


@claim(
    id="quantizers/turboquant-printed-table",
    paper=PAPER,
    section="Theorem 1, small bit-widths, read as upper bounds (our reading: the paper prints approximations)",
    statement=(
        "Read as upper bounds for every d, which is our reading, the printed figures for 1, 2, 3, 4 bits say D_mse is at most .36, "
        ".117, .03, .009: the rounded table is not a bound. The paper prints them with 'approximately', and as approximations at "
        "large d (256 to 4096) they are right to their digits."
    ),
    formula="our reading: D_mse ≤ 0.36, 0.117, 0.03, 0.009 for b = 1, 2, 3, 4 and all d;  the paper: D_mse ≈ 0.36, 0.117, 0.03, 0.009",
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
        Mutant("4^(−b)", "mse_distortion", lambda true: lambda dim, bits: 4.0**-bits),
    ],
)
def turboquant_printed_table(context: Context, *, mse_distortion: Any, printed: Any) -> Iterator[Evidence]:
    yield exact(
        what="the table as printed", ran_on="arXiv 2504.19874, Theorem 1", role="control", relation="=",
        observed=" ".join(str(printed(b)) for b in PRINTED_BITS), predicted=" ".join(PRINTED.values()),
    )  # fmt: skip
    case, seen, unit = farthest_from_digits([(f"b={b}", mse_distortion(128, b), text) for b, text in AT_128.items()])
    yield numerical(
        what="D_mse at d = 128 is .3609 .1160 .0340 .0093 to four digits: |difference| within half a unit of the last", role="control",
        ran_on="b = 1..4", observed=seen, predicted=unit, relation="<=", tolerance=1e-9, because="D_mse is exact to 1e-12",
        worst_case=case, note="the four figures were computed once with other code",
    )  # fmt: skip
    used = [(d + step, b) for b, d in FIRST_ABOVE.items() for step in (-1, 0)]
    used += [(d, b) for d in LARGE for b in PRINTED_BITS]
    own = context.memo("own", lambda: {key: optimal_distortion(*key) for key in used})
    case, seen, true = worst([(f"d={d}, b={b}", mse_distortion(d, b), own[d, b]) for d, b in used])
    yield numerical(
        what="D_mse = its value in incomplete beta functions, at all d used below", ran_on=f"{len(used)} pairs of d and b", role="control",
        observed=seen, predicted=true, tolerance=1e-9, because="log gamma at d = 4096 loses 3e-12, over D ≥ .009: 3e-10", worst_case=case,
    )  # fmt: skip
    for d in LARGE:
        case, seen, unit = farthest_from_digits([(f"b={b}", mse_distortion(d, b), text) for b, text in PRINTED.items()])
        yield numerical(
            what="as an approximation the printed value is right: |D_mse − printed| within half a unit of its last digit, worst b",
            role="control", ran_on=f"d = {d}, b = 1..4", observed=seen, predicted=unit, relation="<=", tolerance=1e-9,
            because="D_mse is exact to 1e-12", worst_case=case,
        )  # fmt: skip
    limits = context.memo("limits", lambda: {b: gaussian_by_lloyd(2**b) for b in PRINTED_BITS})
    for where, values in (("d = 128", {b: mse_distortion(128, b) for b in PRINTED_BITS}), ("d to infinity", limits)):
        case, seen, unit = farthest_from_digits([(f"b={b}", values[b], text) for b, text in PRINTED.items()])
        yield numerical(
            what="the printed value outside d = 256 to 4096: |D_mse − printed| over half a unit of its last digit ≤ 1, worst b", role="assumption",
            ran_on=where, observed=seen / unit, predicted=1.0, relation="<=", tolerance=1e-9, because="D_mse is exact to 1e-9",
            worst_case=case, note="at d = 128 D_mse(2) = .1160 is one unit below .117; the limit .009501 is 1e-6 past half a unit",
        )  # fmt: skip
    for b, d in FIRST_ABOVE.items():
        # The counterexample is decided without the optimum: no quantiser is better than the best one, and that lies above.
        yield numerical(
            what="D_mse ≤ the printed value, at the smallest d where it exceeds it", ran_on=f"d = {d}, b = {b}",
            observed=mse_distortion(d, b), predicted=printed(b), relation="<=", tolerance=1e-9, because="D_mse is exact to 1e-12",
            tightness=mse_distortion(d, b) / printed(b),
        )  # fmt: skip
        yield numerical(
            what="D_mse ≤ the printed value, one dimension lower", ran_on=f"d = {d - 1}, b = {b}", role="control", observed=mse_distortion(d - 1, b),
            predicted=printed(b), relation="<=", tolerance=1e-9, because="D_mse is exact to 1e-12",
        )  # fmt: skip
    case, seen, bound = highest([(f"d=128, b={b}", mse_distortion(128, b), printed(b)) for b in PRINTED_BITS])
    yield numerical(
        what="D_mse ≤ the printed value at the head size of most models, where it exceeds it most", ran_on="d = 128", observed=seen, predicted=bound, relation="<=",
        tolerance=1e-9, because="D_mse is exact to 1e-12", tightness=seen / bound, worst_case=case,
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
        Mutant("d + 1", "mse_distortion", lambda true: lambda dim, bits: true(dim + 1, bits)),
        Mutant("2 d", "mse_distortion", lambda true: lambda dim, bits: true(2 * dim, bits)),
    ],
)
def turboquant_table(context: Context, *, mse_distortion: Any, table: Any) -> Iterator[Evidence]:
    # The limit d -> infinity by the check's own Newton-free route: Lloyd iteration on the normal law.
    limits = context.memo("limits", lambda: {b: gaussian_by_lloyd(2**b) for b in PRINTED_BITS})
    for b in PRINTED_BITS:
        yield numerical(
            what="D_mse in the limit of large d ≤ the table", ran_on=f"b = {b}", observed=limits[b], predicted=table(b), relation="<=",
            tolerance=0.0, because="the limit is exact to 1e-9", tightness=limits[b] / table(b),
        )  # fmt: skip
        yield numerical(
            what="D_mse in the limit of large d > the next lower four-digit value", ran_on=f"b = {b}", observed=limits[b],
            predicted=table(b) - 1e-4, relation=">", tolerance=0.0, because="the limit is exact to 1e-9",
        )  # fmt: skip
    own = context.memo(
        "own",
        lambda: (
            {(d, b): beta_distortion(d, beta_by_lloyd(d, 2**b))[0] for d in (4, 64, 128) for b in PRINTED_BITS}
            | {(d, b): optimal_distortion(d, b) for d in (8, 256, 1024, 4096) for b in PRINTED_BITS}
        ),
    )
    case, seen, true = worst([(f"d={d}, b={b}", mse_distortion(d, b), value) for (d, b), value in own.items()])
    yield numerical(
        what="D_mse = its value in incomplete beta functions (at d = 4, 64, 128 with points by Lloyd iteration)", ran_on="d = 4..4096, b = 1..4", observed=seen,
        predicted=true, tolerance=1e-9, because="Lloyd iteration run to 1e-13; log gamma at d = 4096 loses 3e-12, over D ≥ .009: 3e-10", worst_case=case,
    )  # fmt: skip
    dims = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 1024, 4096)
    values = {b: [mse_distortion(d, b) for d in dims] + [limits[b]] for b in PRINTED_BITS}
    rise = min(values[b][i + 1] / values[b][i] for b in PRINTED_BITS for i in range(len(dims)))
    yield numerical(
        what="D_mse rises with d to the normal limit, smallest ratio of neighbours", ran_on=f"d = {', '.join(map(str, dims))} and the limit", observed=rise,
        predicted=1.0, relation=">", tolerance=1e-9, because="D_mse is exact to 1e-12",
    )  # fmt: skip
    # 1 - D/D_inf = c/d + O(1/d^2): quadrupling d from 1024 divides it by 4, to the second order 1/d.
    gap = [1 - values[b][-3] / limits[b] for b in PRINTED_BITS]
    next_gap = [1 - values[b][-2] / limits[b] for b in PRINTED_BITS]
    case, seen, want = worst([(f"b={b}", g / n, 4.0) for b, g, n in zip(PRINTED_BITS, gap, next_gap)])
    yield numerical(
        what="the gap to the limit falls as 1/d: quadrupling d divides it by 4, within 2 %", ran_on="d = 1024 and 4096", observed=seen, predicted=want, tolerance=0.02,
        because="second-order term, of relative size 10/d, and a limit exact to 1e-9", worst_case=case,
    )  # fmt: skip
