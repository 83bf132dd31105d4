"""True risk of the best weighted tokens, the best dropped ones, and what minimising a linearised risk gives."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "weights-against-dropping"
CAPTION = (
    "True risk of keeping at most K own tokens of small caches cut from heads. Circles: the best found with free weights, and shaded below it "
    "how far the optimum could at most be lower (proved); squares: the best with equal weights, over all subsets, exactly. Triangles and diamonds: the "
    "true risk of the summaries that are exactly optimal for the linear risk of the centred and of the augmented profile; grey: random subsets of K, their mean. "
    "Where attention sits on one token the centred profile cannot tell that losing it is fatal, and its optimum can be worse than random."
)
_LINES = (
    ("free", "weights free", 0, "-"),
    ("equal", "equal weights", 1, "--"),
    ("centred", "linear optimum, centred", 2, ":"),
    ("augmented", "linear optimum, augmented", 3, "-."),
)


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for data in results.values() for c in data["curves"]]


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.ticker import MaxNLocator

    curves = _curves(results)
    columns = min(len(curves), 3)
    rows = -(-len(curves) // columns)
    figure, panels = styles.subplots(style, wide=True, columns=columns, rows=rows, ratio=0.85, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, curve in zip(panels.flat, curves):
        points = curve["points"]
        K = [p["K"] for p in points]
        for field, label, i, line in _LINES:
            (handles[label],) = axes.plot(K, [p[field] for p in points], **styles.look(i), ls=line)
        (handles["random subsets, mean"],) = axes.plot(K, [p["random"] for p in points], color=styles.GUIDE, lw=0.9)
        handles["proved room below"] = axes.fill_between(
            K, [p["free_lower"] for p in points], [p["free"] for p in points], color=styles.look(0)["color"], alpha=0.18, lw=0
        )  # fmt: skip
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{curve['head']}, n = {curve['n']}", loc="left")
    for axes in list(panels.flat)[len(curves) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("true risk")
    for axes in list(panels.flat)[max(0, len(curves) - columns) : len(curves)]:
        axes.set_xlabel("tokens kept, K")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    fields = ("K", "free", "free_lower", "equal", "centred", "augmented", "random")
    return ["head", "n", "queries", *fields], [
        [c["head"], c["n"], c["queries"], *(p[f] for f in fields)] for c in _curves(results) for p in c["points"]
    ]
