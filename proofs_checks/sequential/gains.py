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
#: models that are really smaller than the target; the second is exact in its own layers and judged by the others
LOWER, UPPER = "the lower third of the model's own layers", "error_of_the_upper_layers"
SMALLER = ("a smaller model", LOWER)


def _linear(plain: Any, bits: float, error: float) -> tuple[float, bool]:
    points = sorted((e, r) for r, e in plain)
    return float(np.interp(error, [p[0] for p in points], [p[1] for p in points])) - bits, True


@claim(
    id="prediction/gains-on-real-models", paper=PAPER, section="predictive delta coding, on trained models",
    statement="On trained models the mean over the likeliest tokens, or over all, saves bits at equal attention error, and one pass of the token that came, which the same decoder has, "
    "saves more in fewer passes. A really smaller model, which takes no pass of the target, saves less than that one pass, or nothing. Of all predictors measured the token that came "
    "leaves the least error.",
    formula="gain(F(past, t_t)) > gain(Σ p_v F(past, v)) > 0,   1 < k + 1 passes",
    assumptions=("the decoder's forward pass repeats the encoder's (same weights, same plan)", "these texts, one run each"),
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
    tables = context.memo("tables", lambda: measured.load("predictors"))
    larger = context.memo("larger", lambda: measured.load("smaller"))
    drawn = []
    for table in [*tables, *larger]:
        lines: dict[str, dict[str, Any]] = {}
        for text in table["texts"]:
            where = f"{table['title']}, {text['positions']} positions of {text['text']}, {text['surprisal_bits_a_token']:.2f} bits a token, {table['inner']} on the residual, saved table"
            yield from _of_text(table, text, where, saved, lines)
        drawn.append(
            {"model": table["title"], "positions": table["texts"][0]["positions"], "lines": list(lines.values())}
        )
    for table in context.memo("vocabulary", lambda: measured.load("vocabulary")):
        yield from _vocabulary(table, saved)
    points = [(1.0, 2.0**-2), (2.0, 2.0**-4)]
    yield numerical(
        what="bits saved by 1 bit and an error of 1/8, where 1 bit leaves 1/4 and 2 bits 1/16: 1/2", ran_on="by hand", observed=saved(points, 1.0, 2.0**-3)[0], predicted=0.5,
        role="control", tolerance=1e-12, because="two logarithms",
    )  # fmt: skip
    yield Picture(figure="predictor-gains", data={"models": drawn})


def _of_text(
    table: dict[str, Any], text: dict[str, Any], where: str, saved: Function, lines: dict[str, dict[str, Any]]
) -> Result:
    plain = [(t["held_bits"], t["error"]) for t in text["turboquant"]]
    without = [([*plain[:i], *plain[i + 1 :]], plain[i]) for i in range(1, len(plain) - 1)]
    off, chord = ([f(rest, *own)[0] for rest, own in without] for f in (saved, _linear))
    yield numerical(
        what="bits that TurboQuant itself saves against the curve of its other rates, mean of the absolute values: less than by a chord in the error", ran_on=where,
        observed=float(np.mean(np.abs(off))), predicted=float(np.mean(np.abs(chord))), relation="<", tolerance=0.0, because="as measured; between its own two rates it saves nothing",
        note=f"at most {max(np.abs(off)):.2f}, across two bits; between neighbouring rates, as the gains are, the curve bends a quarter as much",
    )  # fmt: skip
    rows = {r["predictor"]: (r, *saved(plain, r["held_bits"], r["error"])) for r in text["predictors"]}
    for r in text["predictors"]:
        if r["predictor"] == LOWER:
            # in its own layers nothing is left but rounding, of which a geometric mean over all layers would make a wonder
            upper = [(t["held_bits"], t[UPPER]) for t in text["turboquant"]]
            rows[LOWER] = ({**r, "error": r[UPPER]}, *saved(upper, r["held_bits"], r[UPPER]))
    known = rows[KNOWN]
    if MEAN in rows:
        mean = rows[MEAN]
        yield numerical(
            what="bits a number saved by the mean over the 4 likeliest", ran_on=where, observed=mean[1], predicted=0.0, relation=">", tolerance=0.0, because="as measured"
        )  # fmt: skip
        yield numerical(
            what="bits a number saved by the token that came, above those of the mean", ran_on=where, observed=known[1], relation=">", tolerance=0.0, because="as measured",
            predicted=mean[1], note="at least: below the error of 8 bits there is nothing to compare with",
        )  # fmt: skip
        yield exact(
            what="passes of the model a position: token known, fewer than the mean's", ran_on=where, observed=known[0]["target_passes_a_position"],
            predicted=mean[0]["target_passes_a_position"], relation="<",
        )  # fmt: skip
    for smaller in SMALLER:
        if smaller in rows:
            yield numerical(
                what=f"bits a number saved by {smaller}, below those of the token that came", ran_on=where, observed=rows[smaller][1], predicted=known[1], relation="<", tolerance=0.0,
                because="as measured", note=f"its own pass takes {rows[smaller][0]['own_pass']:.2f} of the target's operations",
            )  # fmt: skip
    nearest = min((row["error"], name) for name, (row, _, _) in rows.items() if name != KNOWN)
    yield numerical(
        what="attention error of the token that came, below that of every other predictor with the same quantiser", ran_on=where, observed=known[0]["error"], relation="<", tolerance=0.0,
        because="as measured", predicted=nearest[0], note=f"next: {nearest[1]}",
    )  # fmt: skip
    for name, (row, gain, inside) in rows.items():
        line = lines.setdefault(
            name,
            {
                "predictor": name, "texts": [], "gains": [], "inside": True, "passes": row["target_passes_a_position"], "own_pass": row.get("own_pass", 0),
                "state_bytes": row["state_bytes"], "decode_seconds": row["decode_seconds"], "held_bits": row["held_bits"], "error": row["error"],
            },
        )  # fmt: skip
        line["texts"].append(text["text"])
        line["gains"].append(gain)
        line["inside"] &= inside
        yield numerical(
            what=f"bits a number saved at equal attention error above the lowest layer, {name}: above 0", ran_on=where, role="assumption", observed=gain, predicted=0.0, relation=">",
            tolerance=0.0, because="one line for each predictor, whichever its sign: the claim is not that all of them save", note=f"{'nil; ' if gain <= 0 else ''}"
            f"{'' if inside else 'at least: its error lies outside those of 1 to 8 bits; '}{row['target_passes_a_position']} target passes a position, own pass "
            f"{row.get('own_pass', 0):g} of one; {row['decode_seconds']:g} s to decode; state {row['state_bytes']:,} bytes; held {row['held_bits']:.3f} bits",
        )  # fmt: skip


def _vocabulary(table: dict[str, Any], saved: Function) -> Result:
    """The paper's own predictor, on few positions: what more candidates bring."""
    for run in table["runs"]:
        where = f"{table['title']}, first {run['positions']} positions of {table['text']}, {table['inner']} on the residual, saved table"
        plain = [(t["held_bits"], t["error"]) for t in run["turboquant"]]
        rows = {r["predictor"]: (r, *saved(plain, r["held_bits"], r["error"])) for r in run["predictors"]}
        known, most = rows[KNOWN], max(rows.values(), key=lambda row: row[0]["candidates"])
        yield numerical(
            what="bits a number saved by the token that came, one pass, above those of the mean over the most candidates", ran_on=where, observed=known[1], predicted=most[1], relation=">",
            tolerance=0.0, because="as measured", note=f"{most[0]['predictor']}: {most[0]['candidates'] + 1:,} passes a position, {most[0]['encode_seconds']:g} s in all. "
            + "; ".join(f"{row['candidates']:,} candidates {gain:.3f} bits" for row, gain, _ in rows.values() if row["candidates"]),
        )  # fmt: skip
        for name, (row, gain, inside) in rows.items():
            yield numerical(
                what=f"bits a number saved at equal attention error above the lowest layer, {name}: above 0", ran_on=where, role="assumption", observed=gain, predicted=0.0, relation=">",
                tolerance=0.0, because="one line for each predictor, whichever its sign", note=f"{'nil; ' if gain <= 0 else ''}{'' if inside else 'at least; '}{row['encode_seconds']:g} s to encode",
            )  # fmt: skip
