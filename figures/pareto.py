"""Attention error against held bits: a curve a codec, and which layers make it."""

from __future__ import annotations

import math
from typing import Any

from figures import style as styles

NAME = "pareto"
CAPTION = (
    "Left: error of the attention output against the bits that a codec holds. Error: sum of ‖ô − o‖² over sum of ‖o‖² of held-out "
    "queries behind the prefix, taken as future queries that see exactly the compressed prefix. Markers: geometric mean over layers; "
    "bars: its bootstrap interval over segments of held-out queries, the same segments for all codecs; dots: single layers. "
    "Bits: 8 times the bytes of the whole stream (codes, norms, tables, indices, header, checksum) over the numbers of keys and values; "
    "a state fitted beforehand is not in them. Numbers beside the markers of the first curve are nominal bits. Codecs outside the frame are in its corner, with "
    "their bits and error. Grey: a quarter for each bit, as the squared error of a fine quantiser. Right: the error of each layer. "
    "Middle, where the model ran on the compressed prefix: KL divergence of its next-token law from the plain model's, mean over the "
    "positions behind the prefix. With more than eight codecs layers are left out, and the grey line joins the points that no other beats in both bits and error."
)
#: a point this many times below the others' least error would flatten all the rest: it goes to the corner
_FAR = 100.0
#: more curves than this in the right panel, and each codec shows one point only
_CURVES = 6
#: more codecs than this, and what is drawn of each is its points: no layers, but the frontier
_MANY = 8

Point = dict[str, Any]


def _sources(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [results[name] for name in sorted(results)]


def _curves(points: list[Point]) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(point["label"], []).append(point)
    return {label: sorted(own, key=lambda p: p["held_bits"]) for label, own in curves.items()}


def _framed(points: list[Point]) -> tuple[list[Point], list[Point]]:
    """(points of the frame, points of its corner): apart stand single points far below the curves, and errors of 0."""
    curves = _curves(points)
    least = min((p["error"] for own in curves.values() if len(own) > 1 for p in own if p["error"] > 0), default=0.0)
    corner = [p for p in points if p["error"] == 0 or (len(curves[p["label"]]) == 1 and p["error"] * _FAR < least)]
    return [p for p in points if p not in corner], corner


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.lines import Line2D

    sources = _sources(results)
    ran = any(source["on_model"] for source in sources)
    # one look for a codec in all panels
    labels = list(dict.fromkeys(p["label"] for source in sources for p in source["points"]))
    many = len(labels) > _MANY
    if many:
        # the panels keep their height whatever the legend below takes: a line of it is about 0.17 inches, twice that on slides
        columns, width = 1 + ran, styles.WIDTHS[style][1]
        legend = -(-len(labels) // styles.legend_columns(labels)) * (0.17 if style == "paper" else 0.34)
        ratio = (1.0 if ran else 0.6) + legend * columns / (width * len(sources))
        figure, panels = styles.subplots(
            style, columns=columns, rows=len(sources), wide=True, ratio=ratio, squeeze=False
        )
    else:
        figure, panels = styles.subplots(
            style, columns=2 + ran, rows=len(sources), wide=True, ratio=1.1 if ran else 0.8, squeeze=False,
            width_ratios=(1, 1, 1.1) if ran else (1, 1.15),
        )  # fmt: skip
    looks = {label: _look(i) for i, label in enumerate(labels)}
    # many or long names would cover the curves
    below = len(labels) > 4 or max(map(len, labels)) > 30
    for source, row in zip(sources, panels):
        framed, corner = _framed(source["points"])
        _trade_off(row[0], framed, corner, looks, many)
        row[0].set(ylabel="attention error")
        if framed and not below:
            row[0].legend(loc="upper right")
        row[0].set_title(_title(source), loc="left")
        if not many:
            _by_layer(row[-1], source, framed, looks, row[0].get_ylim())
        if ran and source["on_model"]:
            _trade_off(row[1], *_framed(source["on_model"]), looks, many)
            row[1].set(ylabel="KL divergence, bits")
            row[1].set_title("the model's next tokens", loc="left")
        elif ran:
            row[1].set_axis_off()
    if below:
        handles = [Line2D([], [], label=label, **looks[label]) for label in labels]
        figure.legend(handles=handles, loc="outside lower center", ncols=styles.legend_columns(labels))
    return figure


def _look(i: int) -> dict[str, Any]:
    return {
        "color": styles.COLOURS[i % len(styles.COLOURS)],
        "marker": styles.MARKERS[(i + 3 * (i // len(styles.COLOURS))) % len(styles.MARKERS)],
        "ls": styles.LINES[i % len(styles.LINES)],
    }


def frontier(points: list[Point]) -> list[Point]:
    """The points that no other beats in both held bits and error, by held bits."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p["held_bits"], p["error"])):
        if not found or point["error"] < found[-1]["error"]:
            found.append(point)
    return found


def _trade_off(
    axes: Any, framed: list[Point], corner: list[Point], looks: dict[str, dict[str, Any]], many: bool
) -> None:
    import matplotlib

    markersize = matplotlib.rcParams["lines.markersize"]
    if many:
        best = frontier(framed)
        axes.plot(
            [p["held_bits"] for p in best],
            [p["error"] for p in best],
            color="#c3cad3",
            lw=5,
            solid_capstyle="round",
            zorder=1,
        )
    named = next((label for label, points in _curves(framed).items() if len(points) > 1), None)
    for label, points in _curves(framed).items():
        look = looks[label]
        for p in points:
            spread = [] if many else [e for e in p["by_layer"] if e > 0]
            axes.plot([p["held_bits"]] * len(spread), spread, "o", color=look["color"], alpha=0.3, mew=0, zorder=2)
        errors = [p["error"] for p in points]
        bars = [[p["error"] - p["low"] for p in points], [p["high"] - p["error"] for p in points]]
        axes.errorbar(
            [p["held_bits"] for p in points], errors, yerr=bars, capsize=1.3 * markersize, capthick=1, elinewidth=1,
            zorder=3, label=label, **look,
        )  # fmt: skip
        for p in points:
            if p["bits"] is not None and label == named:
                axes.annotate(
                    f"{p['bits']:g}", (p["held_bits"], p["error"]), xytext=(6, 1), textcoords="offset points",
                    color=look["color"], fontweight="bold",
                )  # fmt: skip
    axes.set_yscale("log")
    if framed:
        held = [p["held_bits"] for p in framed]
        margin = max(0.5, 0.15 * (max(held) - min(held)))
        axes.set_xlim(min(held) - margin, max(held) + margin)
        if not many:
            _guide(axes, framed)
    for i, p in enumerate(corner):
        text = "0" if p["error"] == 0 else _power(p["error"])
        y = 0.05 + 0.07 * i
        axes.plot(
            [0.04 if many else 0.96],
            [y],
            transform=axes.transAxes,
            clip_on=False,
            **{**looks[p["label"]], "ls": "none"},
        )
        axes.annotate(
            f"{p['label']}, {p['held_bits']:.1f} bits: {text}", (0.07 if many else 0.93, y), xycoords="axes fraction", ha="left" if many else "right", va="center",
            color=looks[p["label"]]["color"], bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}, zorder=4,
        )  # fmt: skip
    axes.set(xlabel="held bits per number")


def _guide(axes: Any, framed: list[Point]) -> None:
    """4^-bits through the last point of the first curve that has several."""
    for points in _curves(framed).values():
        if len(points) > 1:
            last = points[-1]
            ends = axes.get_xlim()
            heights = [last["error"] * 4.0 ** (last["held_bits"] - x) for x in ends]
            axes.plot(ends, heights, color="#8a94a3", lw=0.8, ls=(0, (4, 3)), zorder=1)
            axes.annotate(
                "$4^{-b}$",
                (ends[0], heights[0]),
                xytext=(0.7, 0.3),
                textcoords="offset fontsize",
                color="#5b6678",
            )
            return


def _power(x: float) -> str:
    exponent = math.floor(math.log10(x))
    return f"${x / 10.0**exponent:.1f} \\cdot 10^{{{exponent}}}$"


def _by_layer(
    axes: Any,
    source: dict[str, Any],
    framed: list[Point],
    looks: dict[str, dict[str, Any]],
    limits: tuple[float, float],
) -> None:
    title = f"its {len(source['layers'])} layers"
    if len(framed) > _CURVES:
        rates = sorted(p["held_bits"] for p in framed)
        middle = rates[len(rates) // 2]
        framed = [min(own, key=lambda p: abs(p["held_bits"] - middle)) for own in _curves(framed).values()]
        title += f", each codec near {middle:.2f} held bits"
    places = list(range(len(source["layers"])))
    ends = []
    for p in framed:
        shown = [(x, e) for x, e in zip(places, p["by_layer"]) if e > 0]
        if not shown:
            continue
        look = looks[p["label"]]
        axes.plot(*zip(*shown), **{**look, "ls": "-"}, lw=0.9)
        axes.axhline(p["error"], color=look["color"], lw=0.5, alpha=0.5, zorder=1)
        if len(_curves(framed)) == 1 and p["bits"] is not None:
            ends.append((shown[-1][1], f"{p['bits']:g} bits", look["color"]))
    axes.set_yscale("log")
    axes.set(xlabel="layer", ylim=limits)
    axes.set_xlim(-0.5, places[-1] + 0.5)
    step = -(-len(places) // 8)
    axes.set_xticks(places[::step], [str(index) for index in source["layers"]][::step])
    axes.set_title(title, loc="left")
    _end_labels(axes, ends, places[-1])


def _end_labels(axes: Any, ends: list[tuple[float, str, str]], x: float) -> None:
    """Names right of the last point, moved apart where they would touch."""
    low, high = (math.log(y) for y in axes.get_ylim())
    least = 0.055 * (high - low)
    height = -math.inf
    for y, name, colour in sorted(ends):
        height = max(math.log(y), height + least)
        axes.annotate(
            name, (x, y), xytext=(1.02, (height - low) / (high - low)), textcoords="axes fraction", color=colour, va="center",
            annotation_clip=False,
        )  # fmt: skip


def _title(source: dict[str, Any]) -> str:
    title = f"{source['model'].rstrip('/').rsplit('/', 1)[-1]}, {source['prefix']:,} tokens" + (
        f" of {source['text']}" if source["text"] else ""
    )
    return title if len(title) <= 44 else title[:43] + "…"


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = [
        "model", "text", "prefix", "dtype", "queries", "codec", "bits", "held_bits", "state_bytes", "amortised_bits",
        "error", "low", "high", "head_error", "head_low", "head_high", "level",
    ]  # fmt: skip
    return header, [
        [*(source[h] for h in header[:5]), p["label"], "" if p["bits"] is None else p["bits"], *(p[h] for h in header[7:16]),
         source["level"]]
        for source in _sources(results)
        for p in source["points"]
    ]  # fmt: skip
