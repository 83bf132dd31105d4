"""The claim on the paper's whole stack (arXiv 2604.15356): prefixes shared, what is left predicted, the residual quantised, on sessions of trained models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, NotRun, Picture, exact, numerical
from proofs_checks.sequential import measured

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture | NotRun]
#: caches of sessions computed alone differ in their last bits, of which four digits of an error show nothing
DIGITS, DIGITS_BECAUSE = 2e-3, "four digits; floats of another shape of execution"


def bytes_at(curve: Sequence[tuple[int, float]], error: float) -> float:
    """Bytes at which a codec of several rates, (bytes, error) each, would have this error: linear in the error's logarithm, between its rates."""
    points = sorted((float(np.log2(e)), float(b)) for b, e in curve)
    return float(np.interp(float(np.log2(max(error, 1e-300))), [p[0] for p in points], [p[1] for p in points]))


def _linear(curve: Sequence[tuple[int, float]], error: float) -> float:
    points = sorted((e, float(b)) for b, e in curve)
    return float(np.interp(error, [p[0] for p in points], [p[1] for p in points]))


@claim(
    id="sharing/three-layers-on-real-models", paper=PAPER, section="the two layers on top of a quantiser, on trained models",
    statement="On sessions of a trained model prefix sharing, prediction and TurboQuant of the residual together take fewer bytes than TurboQuant alone, and than any two of the three, at "
    "equal attention error. Sharing takes bytes and no error; prediction takes error, at the price of passes.",
    formula="B(share, predict, quantise) < min{B(share, quantise), B(predict, quantise), B(quantise)} at one error, < B(share, predict)",
    assumptions=("these sessions, one run", "bytes between two rates of TurboQuant by the logarithm of the error"),
    expected=Verdict.HOLDS_UNDER,
    functions={"bytes_at": "proofs_checks.sequential.stacked.bytes_at"},
    mutants=[
        Mutant("interpolated in the error, not its logarithm", "bytes_at", lambda true: _linear),
        Mutant("at the least bytes, not at equal error", "bytes_at", lambda true: lambda curve, error: float(min(b for b, _ in curve))),
        Mutant("at half the bytes", "bytes_at", lambda true: lambda curve, error: true(curve, error) / 2),
    ],
)  # fmt: skip
def three_layers(context: Context, *, bytes_at: Function) -> Result:
    tables = context.memo("tables", lambda: measured.load("stack"))
    if not tables:
        yield NotRun(
            missing="a saved table of the stack",
            how="python -m benchmarks.sequential stack --model smol > proofs_checks/sequential/measured/stack-smol.json",
        )
    for table in tables:
        where = f"{table['title']}, {table['sessions']} sessions of {table['tokens']} tokens, {table['distinct_prefixes']} prefixes that differ, saved table"
        rows = table["rows"]
        plain = {r["bits"]: r for r in rows if not r["sharing"] and r["prediction"] is None}
        shared = {r["bits"]: r for r in rows if r["sharing"] and r["prediction"] is None}
        alone = [(r["bytes"], r["error"]) for r in plain.values()]
        inside = sorted(plain)[1:-1]
        off, chord = (
            [abs(f([p for p, r in zip(alone, plain.values()) if r["bits"] != b], plain[b]["error"]) / plain[b]["bytes"] - 1) for b in inside] for f in (bytes_at, _linear)
        )  # fmt: skip
        yield numerical(
            what="bytes of TurboQuant by the curve of its other rates, off its own, mean over rates: less than by a chord in the error", ran_on=where, observed=float(np.mean(off)),
            predicted=float(np.mean(chord)), relation="<", tolerance=0.0, because="as measured", note=f"at most {max(off):.1%}, across two bits",
        )  # fmt: skip
        for bits, row in shared.items():
            if bits is None:
                continue
            yield numerical(
                what=f"attention error of TurboQuant({bits}) with prefixes shared and without", ran_on=where, observed=row["error"], predicted=plain[bits]["error"],
                tolerance=DIGITS, because=DIGITS_BECAUSE,
            )  # fmt: skip
        curve = [(r["bytes"], r["error"]) for bits, r in shared.items() if bits is not None]
        for row in rows:
            if row["prediction"] is None or not row["sharing"]:
                continue
            pair = next(
                r
                for r in rows
                if not r["sharing"] and r["prediction"] == row["prediction"] and r["bits"] == row["bits"]
            )
            if row["bits"] is None:
                continue
            name = f"{row['prediction']}, TurboQuant({row['bits']}) of the residual"
            by = bytes_at(alone, row["error"])
            yield numerical(
                what=f"bytes of all three, {name}, below those of TurboQuant alone at the same error", ran_on=where, observed=row["bytes"], predicted=by, relation="<", tolerance=0.0,
                because="as measured", note=f"{by / row['bytes']:.2f} times fewer; attention error {row['error']:.4g}",
            )  # fmt: skip
            by = bytes_at(curve, row["error"])
            yield numerical(
                what=f"bytes of all three, {name}, below those of sharing and TurboQuant at the same error", ran_on=where, observed=row["bytes"], predicted=by, relation="<", tolerance=0.0,
                because="as measured", note=f"{by / row['bytes']:.2f} times fewer",
            )  # fmt: skip
            yield exact(
                what=f"bytes of all three, {name}, below those of prediction and TurboQuant, which reconstruct the same", ran_on=where, observed=row["bytes"], predicted=pair["bytes"],
                relation="<", note=f"{pair['bytes'] / row['bytes']:.2f} times fewer",
            )  # fmt: skip
            lossless = [r for r in rows if r["sharing"] and r["bits"] is None and r["prediction"] == row["prediction"]]
            for other in lossless:
                yield exact(
                    what=f"bytes of all three, {name}, below those of sharing and prediction without a quantiser, which leave no error but rounding", ran_on=where,
                    observed=row["bytes"], predicted=other["bytes"], relation="<", note=f"{other['bytes'] / row['bytes']:.2f} times fewer; its error {other['error']:.1e}",
                )  # fmt: skip
