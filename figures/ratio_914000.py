"""914,000x taken apart: what each assumption behind the printed ratio contributes."""

from __future__ import annotations

import textwrap
from typing import Any

from figures import style as styles

NAME = "ratio-914000"
CAPTION = (
    "The ratio of 914,000 taken apart: each bar is the ratio to 3-bit TurboQuant under one change of what is counted (logarithmic "
    "scale). Replaying the tokens reaches the limit, with the whole model as decoder. A token id without any prediction already gives a "
    "quarter of it; with the 8 KV heads that such a model stores it falls eightfold; and the paper's adaptive residual coder, with at "
    "least one bit per number, ends at 3."
)


def _steps(results: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = results["sequential/ratio-914000"]["steps"]
    return steps


def draw(results: dict[str, Any], style: str) -> Any:
    steps = _steps(results)
    figure, axes = styles.subplots(style, wide=True, ratio=0.075 * len(steps) + 0.06)
    for y, step in enumerate(steps):
        axes.barh(y, step["ratio"], left=0.0, height=0.62, color=styles.COLOURS[0 if y == 0 else 4])
        axes.text(
            step["ratio"] * 1.15,
            y,
            f"{step['ratio']:,.4g}" if step["ratio"] < 100 else f"{step['ratio']:,.0f}",
            va="center",
        )
    axes.set_yticks(range(len(steps)), ["\n".join(textwrap.wrap(s["label"], 44)) for s in steps])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1, max(s["ratio"] for s in steps) * 12)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ratio to TurboQuant at 3 bits per number")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    return ["what is counted", "ratio"], [[s["label"], s["ratio"]] for s in _steps(results)]
