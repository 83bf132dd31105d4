"""Three experiments on real keys: independent noise, dither, and deterministic codes, against the law of independent noise."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "noise-laws"
CAPTION = (
    "Measured output error of coded keys over D_K, the key term of Theorem 1 with each channel's mean squared error, by bits a number. Left: "
    "four experiments of the same error; lines are medians over the query heads of the real cache, bands their middle half. Noise and dither follow "
    "the law; the small numbers along the bottom are median logit variances, beyond about 0.1 the first order itself ends. Lloyd-Max lies above it at 1 to 3 bits. Right: why, to first "
    "order: dividing by each token's own error instead of its channel's mean takes away what outlying tokens add, and the coherent term, the "
    "shrinkage that all tokens share, takes away the rest."
)
_LEFT = ("independent Gaussian noise", "subtractive dither", "rounding to equal steps", "Lloyd-Max")
_RIGHT = {
    "Lloyd-Max, first order": r"over $D_K$",
    "Lloyd-Max, first order, over D_K of each token's own error": "each token's own error",
    "Lloyd-Max, first order, over that and the coherent part": "… and the coherent term",
}


def draw(results: dict[str, Any], style: str) -> Any:
    data = results["transform-coding/noise-laws"]
    bits = data["bits"]
    figure, panels = styles.subplots(style, wide=True, columns=2, ratio=0.72, sharey=True)
    for axes, chosen in zip(panels, (dict(zip(_LEFT, _LEFT)), _RIGHT)):
        for i, (name, label) in enumerate(chosen.items()):
            curve = data["curves"][name]
            look = {**styles.look(i if axes is panels[0] else (3, 4, 6)[i]), "ls": styles.LINES[i]}
            axes.plot(bits, curve["median"], label=label, **look)
            axes.fill_between(bits, curve["low"], curve["high"], color=look["color"], alpha=0.12, lw=0)
        axes.axhline(1.0, color=styles.GUIDE, lw=0.8)
        axes.set(xlabel="bits a number", yscale="log", xticks=bits, ylim=(0.4, 6))
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.legend(loc="upper right")
    panels[0].set(ylabel=r"measured error / $D_K$", title="all orders")
    panels[1].set(title="Lloyd-Max, first order")
    for b, variance in zip(bits, data["median_logit_variance"]):
        panels[0].annotate(
            f"{variance:.1g}" if variance < 1 else f"{variance:.1f}", (b, 0.415), ha="center", va="bottom", color=styles.GUIDE,
            fontsize="x-small",
        )  # fmt: skip
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [name, b, *entry]
        for data in results.values()
        for name, curve in data["curves"].items()
        for b, entry in zip(data["bits"], zip(curve["median"], curve["low"], curve["high"]))
    ]
    return ["experiment", "bits", "median of heads", "quarter below", "quarter above"], rows
