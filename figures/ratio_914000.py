"""914,000x taken apart: a waterfall of the factors behind the printed ratio, and what other ways to count give."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from figures import style as styles

NAME = "ratio-914000"
CAPTION = (
    "The ratio of 914,000 taken apart, on a logarithmic axis. Above, a waterfall: each bar multiplies what stands above it, and begins where that ends. "
    "Most of the ratio is to keep token ids and to run the whole model again as decoder, with the 8 KV heads that such a model stores; "
    "counting 64 heads instead multiplies it by 8, and prediction by the model, 4.3 bits instead of the 17 of a raw id, by 4. The paper's own residual coder, which "
    "spends at least one bit per number, ends at 3. Below, other ways to count the same: each dot is a ratio to 3-bit TurboQuant. Ids of "
    "log₂ 128256 = 16.97 bits instead of whole 17 change nothing that shows; that ratio and the factor of prediction from it are in the CSV only."
)
#: a row that is a factor between two of the others
_FACTORS = {"bought by prediction": "log2 128256 over 4.3 bits; no ratio to TurboQuant"}
#: the same row as the one of 17 bits, but for rounding to whole bits
_TWIN = "raw token ids of log2 128256 bits"
#: how the rows of the waterfall begin
_PRINTED, _HEADS, _IDS, _CODER = "printed limit", "8 KV heads", "raw token ids of 17", "the paper's adaptive"

Step = dict[str, Any]


def _steps(results: dict[str, Any]) -> list[Step]:
    steps: list[Step] = results["sequential/ratio-914000"]["steps"]
    return steps


def _row(steps: list[Step], begins: str) -> Step:
    return next(s for s in steps if s["label"].startswith(begins))


def waterfall(steps: list[Step]) -> list[tuple[str, float, float]]:
    """(what is counted, ratio before, ratio after): each begins where the one before it ends, but for the coder that is built."""
    printed, few, ids = (_row(steps, begins)["ratio"] for begins in (_PRINTED, _HEADS, _IDS))
    heads, prediction = printed / few, printed / ids
    replay = printed / heads / prediction
    return [
        ("keep token ids of 17 bits, run the model again as decoder", 1, replay),
        ("count 64 KV heads, where such a model stores 8", replay, replay * heads),
        ("let the model predict the ids: 4.3 bits", replay * heads, printed),
        ("the paper's residual coder, at least one bit a number", 1, _row(steps, _CODER)["ratio"]),
    ]


def _label(text: str) -> str:
    return re.sub(r"\blog2 (\d+)", r"$\\log_2 \1$", "\n".join(textwrap.wrap(text, 40)))


def _rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), [_label(text) for text in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _beside(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(0.6, 0), textcoords="offset fontsize", va="center")


def draw(results: dict[str, Any], style: str) -> Any:
    steps = _steps(results)
    bars = waterfall(steps)
    others = [
        s for s in steps if s["label"] not in _FACTORS and not s["label"].startswith((_TWIN, _PRINTED, _CODER))
    ]  # fmt: skip
    figure, (above, below) = styles.subplots(
        style, wide=True, rows=2, ratio=0.026 * len(steps) + 0.04, sharex=True, height_ratios=[len(bars) + 0.6, len(others)]
    )  # fmt: skip
    for y, (_, start, end) in enumerate(bars):
        coder = y == len(bars) - 1
        above.barh(
            y,
            end - start,
            0.62,
            left=start,
            color=styles.COLOURS[5 if coder else 0],
            hatch="////" if coder else "",
            edgecolor="white",
            lw=0.6,
        )
        _beside(
            above,
            f"{end:,.3g}" if coder else f"× {end / start:,.3g}" if end / start < 100 else f"× {end / start:,.0f}",
            end,
            y,
        )
        if not coder and y:
            above.plot([start, start], [y - 1 + 0.31, y - 0.31], color=styles.GUIDE, lw=0.8)
    total = bars[-2][2]
    above.plot([total, total], [len(bars) - 2 + 0.31, len(bars) - 0.6], color=styles.GUIDE, ls="--", lw=0.8)
    above.annotate(
        f"= {total:,.0f}",
        (total, len(bars) - 1),
        xytext=(-0.4, 0),
        textcoords="offset fontsize",
        ha="right",
        va="center",
        weight="bold",
    )
    _rows(above, [label for label, _, _ in bars])
    for y, step in enumerate(others):
        below.plot([1, step["ratio"]], [y, y], color="#a8b0bb", lw=0.8, zorder=1)
        below.plot(step["ratio"], y, "o", color=styles.COLOURS[0], zorder=2)
        _beside(below, f"{step['ratio']:,.0f}", step["ratio"], y)
    _rows(below, [s["label"] for s in others])
    above.set_xscale("log")
    above.set_xlim(1, max(s["ratio"] for s in steps) * 12)
    above.tick_params(axis="x", labelbottom=True)
    above.set_xlabel("ratio to TurboQuant at 3 bits per number")
    below.set_xlabel("ratio to TurboQuant at 3 bits per number")
    above.set_title("the printed ratio, factor by factor", loc="left", weight="bold")
    below.set_title("other ways to count", loc="left", weight="bold")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    def note(label: str) -> str:
        return _FACTORS.get(label) or (
            "not drawn: the row of 17 bits without rounding to whole bits" if label.startswith(_TWIN) else ""
        )

    rows = [
        [s["label"], "factor" if s["label"] in _FACTORS else "ratio to TurboQuant at 3 bits", s["ratio"], note(s["label"])]
        for s in _steps(results)
    ]  # fmt: skip
    return ["what is counted", "quantity", "value", "note"], rows + [
        [label, "bar of the waterfall: factor", end / start, f"from {start:.6g} to {end:.6g}"] for label, start, end in waterfall(_steps(results))
    ]  # fmt: skip
