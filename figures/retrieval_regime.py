"""The retrieval regime: where the trace of the covariance stops bounding the true risk."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "retrieval-regime"
CAPTION = (
    "Left: when a query puts its mass a on one token, the centred trace bound tr Σ/K falls to 0 while the true risk of keeping "
    "K of n tokens at random rises: dropping the token destroys the answer. The bound 2·tr Σ⁺/K with the augmented profile (radius "
    "of the values for c) and the self-normalised safe bound are proved; tr Σ⁺/K with the root mean square for c happens to hold "
    "here and fails elsewhere. Right: true risk of sampling over the trace bound for each head against the mass beside its largest "
    "attention weight, mean over queries; above: all heads, below: those at most 3, on even scales. Dashed: 1, where the bound ends. "
    "All horizontal axes run backwards: attention is sharper further right."
)
#: heads above this ratio would flatten the others
_NEAR = 3.0


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["risk/retrieval-regime"]
    return data


def _group(head: dict[str, Any]) -> str:
    return str(head["head"].split(" head")[0]) if "layer" in head["head"] else "synthetic kinds"


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, panels = styles.subplots(style, wide=True, columns=2, rows=2, ratio=0.47)
    grid = panels[0, 0].get_gridspec()
    for axes in panels[:, 0]:
        axes.remove()
    left, (above, below) = figure.add_subplot(grid[:, 0]), panels[:, 1]
    x = [1 - c["mass"] for c in data["curve"]]
    for i, (field, label) in enumerate(
        (
            ("true", "true risk"),
            ("trace_bound", r"centred trace bound $\mathrm{tr}\,\Sigma/K$"),
            ("augmented_trace_bound", r"augmented trace $\mathrm{tr}\,\Sigma^+/K$"),
            ("augmented_bound", r"augmented bound $2\,\mathrm{tr}\,\Sigma^+/K$ (proved)"),
            ("safe_bound", "safe bound (proved)"),
        )
    ):
        left.plot(x, [c[field] for c in data["curve"]], **styles.look(i), ls=styles.LINES[i], label=label)
    left.set_xscale("log")
    left.set_yscale("log")
    left.invert_xaxis()
    left.set(xlabel="$1 - a$: mass not on the query's token (axis reversed)", ylabel="mean squared error")
    # room for the legend below the curve that falls
    left.set_ylim(bottom=1e-3 * min(c["trace_bound"] for c in data["curve"]))
    left.legend(loc="lower left")

    heads = sorted(data["heads"], key=lambda h: "layer" in h["head"])
    groups = list(dict.fromkeys(map(_group, heads)))
    if len(groups) > 6:
        groups = ["synthetic kinds", "heads of the real cache"]
    for axes, chosen in ((above, heads), (below, [h for h in heads if h["true_over_bound"] <= _NEAR])):
        for i, group in enumerate(groups):
            own = [
                h for h in chosen if _group(h) == group or (group == "heads of the real cache" and "layer" in h["head"])
            ]
            axes.plot(
                [1 - h["a_max"] for h in own], [h["true_over_bound"] for h in own], ls="none", mec="white", mew=0.4, label=group,
                **styles.look((5, 0, 1, 2, 3, 4)[i]),
            )  # fmt: skip
        axes.axhline(1.0, color=styles.GUIDE, ls="--", lw=0.8)
    above.set_xscale("log")
    above.set_yscale("log")
    for axes in (above, below):
        axes.invert_xaxis()
    above.set_title("all heads", loc="left")
    below.set_title(f"those at most {_NEAR:g}", loc="left")
    above.set_ylabel("true risk / bound")
    below.set_ylabel("true risk / bound")
    below.set_xlabel(r"$1 -$ mean $a_{\max}$ (axes reversed)")
    above.legend(loc="upper left")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    curve = ("mass", "n", "K", "true", "trace_bound", "augmented_trace_bound", "augmented_bound", "safe_bound")
    heads = (
        "head",
        "a_max",
        "mass_on_first",
        "true_over_bound",
        "true_over_augmented",
        "augmented_over_centred",
        "without_first",
    )
    header = [
        "panel", "mass_on_querys_token", "n", "K", "true_risk", "centred_trace_bound", "augmented_trace_bound", "augmented_bound",
        "safe_bound", "head", "mean_a_max", "mean_mass_on_first_token", "true_risk_over_centred_trace_bound",
        "true_risk_over_augmented_trace_bound", "augmented_over_centred_trace_bound", "true_over_centred_without_first_token",
    ]  # fmt: skip
    rows = [["left", *(c[f] for f in curve), *("" for _ in heads)] for c in data["curve"]]
    return header, rows + [["right", *("" for _ in curve), *(h[f] for f in heads)] for h in data["heads"]]
