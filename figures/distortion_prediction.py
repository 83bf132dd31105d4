"""First-order distortion against measurement, and where it stops being true."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "distortion-prediction"
CAPTION = (
    "Measured over predicted output error against the mean logit variance that the key noise causes: each line is one head. Left: "
    "synthetic kinds; right: every measured head of the real cache. The band is 10 % around the first-order prediction; the dashed "
    "line is the rule of thumb, a mean logit variance of 0.1. Grey: the two limiting cases that theory gives in closed form. Heads whose attention sits on a sink leave the frame."
)


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for data in results.values() for c in data["curves"]]


def draw(results: dict[str, Any], style: str) -> Any:
    data = results["transform-coding/validity-range"]
    figure, panels = styles.subplots(style, wide=True, columns=2, ratio=0.8, sharey=True)
    for axes, real in zip(panels, (False, True)):
        curves = [c for c in data["curves"] if (c["source"] != "synthetic") is real]
        axes.axhspan(1 - data["within"], 1 + data["within"], color="#e3e6ea", lw=0)
        axes.axvline(data["rule"], color="#5b6678", ls="--", lw=0.8)
        x = data["limits"]["mean_logit_variance"]
        for (label, y), ls in zip(
            ((k, v) for k, v in data["limits"].items() if k != "mean_logit_variance"), ("-", ":")
        ):
            axes.plot(x, y, color="#5b6678", lw=0.9, ls=ls, label=label)
        groups = list(dict.fromkeys(c["label"].split(" head")[0] for c in curves))
        for c in curves:
            group = groups.index(c["label"].split(" head")[0])
            first = c is next(d for d in curves if d["label"].split(" head")[0] == groups[group])
            axes.plot(
                c["mean_logit_variance"], c["ratio"], color=styles.COLOURS[group % 6], marker=styles.MARKERS[group % 8],
                lw=0.8, ms=2.6, alpha=0.75, label=groups[group] if first else None,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set(xlabel="mean logit variance", title="real cache" if real else "synthetic")
        if not curves:
            axes.text(0.5, 0.5, "no real cache in this run", transform=axes.transAxes, ha="center")
        axes.legend(loc="upper left", fontsize="x-small")
    panels[0].set(ylabel="measured / predicted", ylim=(0.55, 2.6))
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [c["label"], c["source"], *point]
        for c in _curves(results)
        for point in zip(c["mean_logit_variance"], c["ratio"], c["low"], c["high"])
    ]
    return ["head", "source", "mean logit variance", "measured / predicted", "low", "high"], rows
