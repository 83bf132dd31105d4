"""First-order distortion against measurement, and where it stops being true."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "distortion-prediction"
CAPTION = (
    "Measured over predicted output error against the mean logit variance that the key noise causes: each line is one head. Left: "
    "synthetic kinds; right: every measured head of the real cache. The band is 10 % around the first-order prediction; the dashed "
    "line is the rule of thumb, a mean logit variance of 0.1. Thick grey lines: two limiting cases that theory gives in closed form, "
    "attention that is diffuse and attention that is all on one token. They are landmarks and no envelope: heads lie above, between "
    "and below them. Heads whose attention sits on a sink leave the frame."
)


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for data in results.values() for c in data["curves"]]


def _group(curve: dict[str, Any]) -> str:
    return str(curve["label"].split(" head")[0])


def draw(results: dict[str, Any], style: str) -> Any:
    data = results["transform-coding/validity-range"]
    import matplotlib

    width = matplotlib.rcParams["lines.linewidth"]
    figure, panels = styles.subplots(style, wide=True, columns=2, ratio=0.95, sharey=True)
    # real groups go on where the synthetic kinds end, so that no two entries of the legend look alike
    groups = list(dict.fromkeys(map(_group, sorted(data["curves"], key=lambda c: c["source"] != "synthetic"))))
    handles: dict[str, Any] = {}
    for axes, real in zip(panels, (False, True)):
        curves = [c for c in data["curves"] if (c["source"] != "synthetic") is real]
        for c in curves:
            group = _group(c)
            (handles[group],) = axes.plot(
                c["mean_logit_variance"], c["ratio"], **styles.look(groups.index(group)), ls="--" if real else "-", lw=0.7 * width, alpha=0.85, mew=0
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set(xlabel="mean logit variance", title="real cache" if real else "synthetic")
        if not curves:
            axes.text(0.5, 0.5, "no real cache in this run", transform=axes.transAxes, ha="center")
    for axes in panels:
        handles[f"within {data['within']:.0%} of the prediction"] = axes.axhspan(
            1 - data["within"], 1 + data["within"], color="#e3e6ea", lw=0, zorder=0
        )
        handles[f"rule of thumb, {data['rule']:g}"] = axes.axvline(data["rule"], color=styles.GUIDE, ls="--", lw=0.8)
        x = data["limits"]["mean_logit_variance"]
        limits = ((k, v) for k, v in data["limits"].items() if k != "mean_logit_variance")
        for (label, y), ls in zip(limits, ("-", (0, (1, 1)))):
            (handles[f"limit: {label}"],) = axes.plot(x, y, color="#a8b0bb", lw=2.2 * width, ls=ls, zorder=1)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    panels[0].set(ylabel="measured / predicted", ylim=(0.55, 2.6))
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [c["label"], c["source"], *point]
        for c in _curves(results)
        for point in zip(c["mean_logit_variance"], c["ratio"], c["low"], c["high"])
    ]
    return ["head", "source", "mean logit variance", "measured / predicted", "low", "high"], rows
