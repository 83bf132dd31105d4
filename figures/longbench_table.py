"""The paper's LongBench-v2 table with the intervals that 108 questions allow."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "longbench-table"
CAPTION = (
    "Questions right of the 108 of LongBench-v2's long subset, from the percentages that arXiv 2607.01520 prints (one run each), with exact "
    "(Clopper-Pearson) 95 % intervals. Right: the least and the greatest p that the exact paired (McNemar) test of two methods can have, given "
    "these counts and whichever questions they answered; the dashed line is 0.05. No pair comes near it: the table supports no order."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    return next(iter(results.values()))  # type: ignore[no-any-return]


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.62)
    n = data["questions"]
    for i, m in enumerate(data["methods"]):
        left.plot([m["low"], m["high"]], [i, i], color=styles.COLOURS[0])
        left.plot([100 * m["right"] / n], [i], "o", color=styles.COLOURS[0])
        left.annotate(
            f"{m['right']}", (100 * m["right"] / n, i), xytext=(0, 5), textcoords="offset points", ha="center"
        )
    left.set_yticks(range(len(data["methods"])), [m["method"] for m in data["methods"]])
    left.invert_yaxis()
    left.set_ylim(len(data["methods"]) - 0.5, -0.6)
    left.set_xlabel("right answers, %")
    names = []
    for i, p in enumerate(data["pairs"]):
        right.plot([p["least"], p["greatest"]], [i, i], color=styles.COLOURS[5])
        right.plot([p["least"]], [i], "|", color=styles.COLOURS[5], ms=8)
        right.plot([p["greatest"]], [i], "|", color=styles.COLOURS[5], ms=8)
        first, second = p["pair"].split(":")[1].split(" of ")[0].split(" and ")
        names.append(f"{first.strip()} against {second}")
    right.axvline(0.05, color=styles.GUIDE, ls="--")
    right.set_yticks(range(len(names)), names)
    right.set_ylim(len(names) - 0.5, -0.6)
    right.set_xlim(0, 1.03)
    right.set_xlabel("exact paired p, from least to greatest")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    rows = [["method", m["method"], m["right"], m["low"], m["high"]] for m in data["methods"]]
    return ["what", "name", "right", "low", "high"], rows + [
        ["pair", p["pair"], "", p["least"], p["greatest"]] for p in data["pairs"]
    ]
