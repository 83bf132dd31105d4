"""914,000x taken apart: what each assumption behind the printed ratio contributes."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from figures import style as styles

NAME = "ratio-914000"
CAPTION = (
    "The ratio of 914,000 taken apart. Above: each dot is the ratio to 3-bit TurboQuant under one change of what is counted, on a "
    "logarithmic axis that starts at 1, no gain. Replaying the tokens reaches the limit, with the whole model as decoder. A token id "
    "without any prediction already gives a quarter of it; with the 8 KV heads that such a model stores it falls eightfold; and the "
    "paper's adaptive residual coder, with at least one bit per number, ends at 3. Below: a factor between two ways to count, not a "
    "ratio to TurboQuant: what prediction buys, log₂ 128256 bits of a raw token id over the 4.3 bits of the model. Ids of "
    "log₂ 128256 = 16.97 bits instead of whole 17 change nothing that shows; that ratio is in the CSV only."
)
#: a row that is a factor between two of the others
_FACTORS = {"bought by prediction": r"prediction buys: $\log_2 128256$ bits over 4.3"}
#: the same row as the one of 17 bits, but for rounding to whole bits
_TWIN = "raw token ids of log2 128256 bits"

Step = dict[str, Any]


def _steps(results: dict[str, Any]) -> list[Step]:
    steps: list[Step] = results["sequential/ratio-914000"]["steps"]
    return steps


def _label(text: str) -> str:
    wrapped = "\n".join(textwrap.wrap(_FACTORS.get(text, text), 46))
    return re.sub(r"\blog2 (\d+)", r"$\\log_2 \1$", wrapped)


def _dots(axes: Any, steps: list[Step], colour: str, marker: str) -> None:
    for y, step in enumerate(steps):
        ratio = step["ratio"]
        axes.plot([1, ratio], [y, y], color="#a8b0bb", lw=0.8, zorder=1)
        axes.plot(ratio, y, marker, color=colour, zorder=2)
        axes.annotate(
            f"{ratio:,.4g}" if ratio < 100 else f"{ratio:,.0f}", (ratio, y), xytext=(0.8, 0), textcoords="offset fontsize", va="center"
        )  # fmt: skip
    axes.set_yticks(range(len(steps)), [_label(s["label"]) for s in steps])
    axes.set_ylim(len(steps) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def draw(results: dict[str, Any], style: str) -> Any:
    steps = _steps(results)
    ratios = [s for s in steps if s["label"] not in _FACTORS and not s["label"].startswith(_TWIN)]
    factors = [s for s in steps if s["label"] in _FACTORS]
    figure, (above, below) = styles.subplots(
        style, wide=True, rows=2, ratio=0.026 * len(steps) + 0.06, sharex=True, height_ratios=[len(ratios) + 0.2, len(factors) + 0.2]
    )  # fmt: skip
    _dots(above, ratios, styles.COLOURS[0], "o")
    _dots(below, factors, styles.COLOURS[5], "D")
    above.set_xscale("log")
    above.set_xlim(1, max(s["ratio"] for s in steps) * 8)
    above.tick_params(axis="x", labelbottom=True)
    above.set_xlabel("ratio to TurboQuant at 3 bits per number")
    below.set_xlabel("factor between two ways to count")
    above.set_title("ratios", loc="left", weight="bold")
    below.set_title("factors", loc="left", weight="bold")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    def note(label: str) -> str:
        if label in _FACTORS:
            return "log2 128256 over 4.3 bits; no ratio to TurboQuant"
        return "not drawn: the row of 17 bits without rounding to whole bits" if label.startswith(_TWIN) else ""

    return ["what is counted", "quantity", "value", "note"], [
        [s["label"], "factor" if s["label"] in _FACTORS else "ratio to TurboQuant at 3 bits", s["ratio"], note(s["label"])]
        for s in _steps(results)
    ]  # fmt: skip
