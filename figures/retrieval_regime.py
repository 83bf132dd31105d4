"""The retrieval regime: where the trace of the covariance stops bounding the true risk."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "retrieval-regime"
CAPTION = (
    "Left: when a query puts its mass a on one token, the centred trace bound tr Sigma / K falls to 0 while the true risk of keeping "
    "K of n tokens at random rises: dropping the token destroys the answer. The bound 2 tr Sigma+ / K with the augmented profile (radius "
    "of the values for c) and the self-normalised safe bound are proved; tr Sigma+ / K with the root mean square for c happens to hold "
    "here and fails elsewhere. Right: true risk of sampling over the trace bound for each head, against its mean largest "
    "attention weight."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["risk/retrieval-regime"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.82)
    x = [1 - c["mass"] for c in data["curve"]]
    for i, (field, label) in enumerate(
        (
            ("true", "true risk"),
            ("trace_bound", "centred trace bound"),
            ("augmented_trace_bound", "augmented trace"),
            ("augmented_bound", "augmented bound (proved)"),
            ("safe_bound", "safe bound"),
        )
    ):
        left.plot(
            x,
            [c[field] for c in data["curve"]],
            color=styles.COLOURS[i],
            marker=styles.MARKERS[i],
            ls=styles.LINES[i],
            label=label,
        )
    left.set_xscale("log")
    left.set_yscale("log")
    left.invert_xaxis()
    left.set(xlabel="1 - a: mass not on the query's token", ylabel="mean squared error")
    left.legend(loc="lower left")
    real = [h for h in data["heads"] if "layer" in h["head"]]
    synthetic = [h for h in data["heads"] if "layer" not in h["head"]]
    for heads, i, label in ((synthetic, 3, "synthetic kinds"), (real, 0, "heads of the real cache")):
        if heads:
            right.plot(
                [h["a_max"] for h in heads], [h["true_over_bound"] for h in heads], styles.MARKERS[i], color=styles.COLOURS[i], label=label
            )  # fmt: skip
    right.axhline(1.0, color="#5b6678", ls="--", lw=0.8)
    right.set_yscale("log")
    right.set(xlabel="mean largest attention weight", ylabel="true risk / centred trace bound", xlim=(0, 1.03))
    right.legend(loc="best")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    rows = [
        [
            "instance",
            c["mass"],
            c["true"],
            c["trace_bound"],
            c["augmented_trace_bound"],
            c["augmented_bound"],
            c["safe_bound"],
        ]
        for c in data["curve"]
    ]
    rows += [
        [h["head"], h["a_max"], h["true_over_bound"], 1.0, h["augmented_over_centred"], "", ""] for h in data["heads"]
    ]
    return [
        "source",
        "mass or mean a_max",
        "true (or over bound)",
        "centred bound",
        "augmented trace",
        "augmented bound",
        "safe bound",
    ], rows
