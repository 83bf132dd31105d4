"""The claim on what each predictor saves on trained models (arXiv 2604.15356, layer 2), one line each: bits, passes, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential import measured

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]

KNOWN, MEAN = "the token that came", "mean of the 4 likeliest"


def _linear(plain: Any, bits: float, error: float) -> tuple[float, bool]:
    points = sorted((e, r) for r, e in plain)
    return float(np.interp(error, [p[0] for p in points], [p[1] for p in points])) - bits, True


@claim(
    id="prediction/gains-on-real-models", paper=PAPER, section="predictive delta coding, on trained models",
    statement="On trained models the mean over the likeliest tokens saves bits at equal attention error, and one pass of the token that came, which the same decoder has, saves more "
    "in fewer passes. Of all predictors measured it leaves the least error.",
    formula="gain(F(past, t_t)) > gain(Σ p_v F(past, v)) > 0,   1 < k + 1 passes",
    assumptions=("the decoder's forward pass repeats the encoder's (same weights, same plan)", "one text, one run"),
    expected=Verdict.HOLDS_UNDER,
    functions={"saved": "proofs_checks.sequential.residual.saved"},
    mutants=[
        Mutant("interpolated in the error, not its logarithm", "saved", lambda true: _linear),
        Mutant("bits spent, not saved", "saved", lambda true: lambda plain, bits, error: (-true(plain, bits, error)[0], true(plain, bits, error)[1])),
        Mutant("at equal bits, not at equal error", "saved", lambda true: lambda plain, bits, error: true(plain, bits, min(plain)[1])),
    ],
    figure="predictor-gains",
)  # fmt: skip
def gains_on_real_models(context: Context, *, saved: Function) -> Result:
    points = [(1.0, 2.0**-2), (2.0, 2.0**-4)]
    yield numerical(
        what="bits saved by 1 bit and an error of 1/8, where 1 bit leaves 1/4 and 2 bits 1/16: 1/2", ran_on="by hand", observed=saved(points, 1.0, 2.0**-3)[0], predicted=0.5,
        role="control", tolerance=1e-12, because="two logarithms",
    )  # fmt: skip
    drawn = []
    for table in context.memo("tables", lambda: measured.load("predictors")):
        plain = [(t["held_bits"], t["error"]) for t in table["turboquant"]]
        where = f"{table['title']}, {table['positions']} positions of {table['text']}, {table['surprisal_bits_a_token']:.2f} bits a token, {table['inner']} on the residual, saved table"
        rows = {r["predictor"]: (r, *saved(plain, r["held_bits"], r["error"])) for r in table["predictors"]}
        known, mean = rows[KNOWN], rows[MEAN]
        yield numerical(
            what="bits a number saved by the mean over the 4 likeliest", ran_on=where, observed=mean[1], predicted=0.0, relation=">", tolerance=0.0, because="as measured"
        )  # fmt: skip
        yield numerical(
            what="bits a number saved by the token that came, above those of the mean", ran_on=where, observed=known[1], relation=">", tolerance=0.0, because="as measured",
            predicted=mean[1], note="at least: below the error of 8 bits there is nothing to compare with",
        )  # fmt: skip
        nearest = min((row["error"], name) for name, (row, _, _) in rows.items() if name != KNOWN)
        yield numerical(
            what="attention error of the token that came, below that of every other predictor with the same quantiser", ran_on=where, observed=known[0]["error"], relation="<", tolerance=0.0,
            because="as measured", predicted=nearest[0], note=f"next: {nearest[1]}",
        )  # fmt: skip
        yield exact(
            what="passes of the model a position: token known, fewer than the mean's", ran_on=where, observed=known[0]["target_passes_a_position"],
            predicted=mean[0]["target_passes_a_position"], relation="<",
        )  # fmt: skip
        lines = []
        for name, (row, gain, inside) in rows.items():
            lines.append(
                {
                    "predictor": name, "gain_bits": gain, "inside": inside, "passes": row["target_passes_a_position"], "state_bytes": row["state_bytes"],
                    "decode_seconds": row["decode_seconds"], "held_bits": row["held_bits"], "error": row["error"],
                }
            )  # fmt: skip
            yield numerical(
                what=f"bits a number saved at equal attention error above the lowest layer, {name}: above 0", ran_on=where, role="assumption", observed=gain, predicted=0.0, relation=">",
                tolerance=0.0, because="reported, not judged", note=f"{'nil; ' if gain <= 0 else ''}{'' if inside else 'at least: its error lies outside those of 1 to 8 bits; '}"
                f"{row['target_passes_a_position']} target passes a position; {row['decode_seconds']:g} s to decode; state {row['state_bytes']:,} bytes; held "
                f"{row['held_bits']:.3f} bits",
            )  # fmt: skip
        drawn.append({"model": table["title"], "positions": table["positions"], "lines": lines})
    yield Picture(figure="predictor-gains", data={"models": drawn})
