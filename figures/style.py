"""One look for all figures: column widths of the usual venues, colours that stay apart for colour-blind readers and in grey."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Okabe-Ito, ordered so that neighbours differ in lightness as well as in hue
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))

#: muted ink of guide lines and their words
GUIDE = "#5b6678"

#: inches: one column, text width
WIDTHS = {"paper": (3.4, 7.0), "slides": (6.5, 12.0)}

#: verdict -> colour, the same in every figure and in the report
VERDICTS = {
    "holds": "#1b7f4b",
    "holds under assumptions": "#0b6f93",
    "fails as stated": "#8a2f86",
    "not settled": "#a66a00",
    "not run": "#a66a00",
}


def look(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th of several series: 8 colours with 8 markers, then the same colours with other markers (64 pairs)."""
    return {"color": COLOURS[i % 8], "marker": MARKERS[(i + 3 * (i // 8)) % 8]}


def labels_at_right(axes: Any, ends: Sequence[tuple[float, str, str]], least: float = 0.055) -> None:
    """Names (height in data, text, colour) right of the panel, moved apart to `least` of its height where they would touch."""
    transform = axes.transScale + axes.transLimits
    last = -math.inf
    for height, text, colour in sorted(((transform.transform((1, y))[1], text, colour) for y, text, colour in ends)):
        last = max(height, last + least)
        axes.annotate(text, (1.02, last), xycoords="axes fraction", color=colour, va="center", annotation_clip=False)


def plain_ticks(axis: Any) -> None:
    """Numbers near 1 on a logarithmic axis as 0.5, 1, 2, not as powers of ten; more of them where it covers less than a factor 3."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if high > 3 * low else (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0))
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_columns(labels: Sequence[str]) -> int:
    """Columns of a legend below a figure of text width."""
    return max(1, min(len(labels), 90 // (8 + max(map(len, labels), default=1))))


@contextmanager
def using(style: str) -> Iterator[None]:
    """matplotlib set for "paper" or "slides", on the Agg backend, with embedded fonts and reproducible ids."""
    import matplotlib
    from cycler import cycler

    if style not in WIDTHS:
        raise ValueError(f'style: expected "paper" or "slides", got {style!r}')
    size = 8 if style == "paper" else 14
    settings: Any = {
        "font.size": size, "axes.titlesize": size, "axes.labelsize": size, "legend.fontsize": size - 1,
        "xtick.labelsize": size - 1, "ytick.labelsize": size - 1, "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans",
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": cycler(color=COLOURS),
        "axes.grid": True, "grid.color": "#e3e6ea", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
        "lines.linewidth": 1.2 if style == "paper" else 2.2, "lines.markersize": 3.5 if style == "paper" else 7,
        "figure.dpi": 100, "savefig.dpi": 200, "figure.constrained_layout.use": True,
        "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "kvtheory", "path.simplify": True,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def subplots(
    style: str, *, columns: int = 1, rows: int = 1, wide: bool = False, ratio: float = 0.68, **options: Any
) -> Any:
    """(figure, axes) of one column or text width; `ratio` is height over width of one panel."""
    from matplotlib.figure import Figure

    width = WIDTHS[style][1 if wide else 0]
    figure = Figure(figsize=(width, width / columns * ratio * rows))
    return figure, figure.subplots(rows, columns, **options)


def close(figure: Any) -> None:
    """Release a figure's memory."""
    figure.clear()
