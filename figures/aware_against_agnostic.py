"""What knowing the queries is worth: exact optima under the worst law, and the minimax over all laws."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "aware-against-agnostic"
CAPTION = (
    "Least linear risk of K own tokens under the worst of several laws of queries, exactly, centred profile. Circles: the reducer knows "
    "which law it is; squares: it does not, but may toss coins (minimax, its upper and proved lower value closer than a mark). Full lines: weights free; dashed: "
    "equal weights on the tokens kept. First panel: needles and a background, the law asks for two needles, so few tokens suffice "
    "for a reducer that knows; the other panels: small caches cut from heads, every query a law of its own."
)
_LINES = (
    ("aware", "law known, weights free", 0, "-"),
    ("aware_equal", "law known, equal weights", 0, "--"),
    ("agnostic", "law not known, weights free", 1, "-"),
    ("agnostic_equal", "law not known, equal weights", 1, "--"),
)


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for data in results.values() for c in data["curves"]]


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    curves = _curves(results)
    columns = min(len(curves), 2 if len(curves) <= 4 else 3)
    rows = -(-len(curves) // columns)
    figure, panels = styles.subplots(
        style, wide=True, columns=columns, rows=rows, ratio=0.62 if columns < 3 else 0.8, squeeze=False
    )
    handles: dict[str, Any] = {}
    for axes, curve in zip(panels.flat, curves):
        points = curve["points"]
        # a risk of 0 but for rounding ends a line
        floor = 1e-12 * max(p["agnostic_equal"] for p in points)
        for field, label, i, line in _LINES:
            shown = [p for p in points if p[field] > floor]
            look = styles.look(i)
            (handles[label],) = axes.plot(
                [p["K"] for p in shown], [p[field] for p in shown], **look, ls=line, mfc=look["color"] if line == "-" else "white"
            )  # fmt: skip
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 100 * low:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{curve['head']}" + (f"; {curve['laws']}" if columns < 3 else ""), loc="left")
    for axes in list(panels.flat)[len(curves) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("linear risk, worst law")
    for axes in list(panels.flat)[max(0, len(curves) - columns) : len(curves)]:
        axes.set_xlabel("tokens kept, K")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    fields = ("K", *(field for field, *_ in _LINES))
    return ["head", "laws", *fields], [
        [c["head"], c["laws"], *(p[f] for f in fields)] for c in _curves(results) for p in c["points"]
    ]
