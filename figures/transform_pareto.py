"""Attention error against total held bits, a line and a band for each codec, and its ratio to a baseline."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "transform-pareto"
CAPTION = (
    "Above: error of the attention output (sum of ‖ô − o‖² over sum of ‖o‖² of held-out future queries, geometric mean over layers) against "
    "the bits per number that codecs hold for keys and values together: 8 times the bytes of whole streams over the numbers of both. States "
    "fitted to another text are not in the bits. Markers: measured; lines: log2 of the error interpolated in held bits; bands: bootstrap intervals "
    "over segments of held-out queries. Below: the error over that of the baseline at equal held bits, where both were measured, with its paired interval."
)

Curve = dict[str, Any]


def _sources(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [results[name] for name in sorted(results)]


def draw(results: dict[str, Any], style: str) -> Any:
    sources = _sources(results)
    labels = list(dict.fromkeys(curve["label"] for source in sources for curve in source["curves"]))
    looks = {
        label: {**styles.look(i), "ls": "-" if i < len(styles.COLOURS) else "-."} for i, label in enumerate(labels)
    }
    over = any(source["baseline"] for source in sources)
    figure, panels = styles.subplots(
        style, columns=len(sources), rows=1 + over, wide=True, ratio=0.36 if len(sources) == 1 else 0.75, squeeze=False, sharex="col",
        height_ratios=(1.5, 1) if over else (1,),
    )  # fmt: skip
    for column, source in enumerate(sources):
        upper = panels[0, column]
        for curve in source["curves"]:
            _line(upper, curve["error"], looks[curve["label"]])
        upper.set_yscale("log")
        upper.set_title(_title(source), loc="left")
        if not column:
            upper.set_ylabel("attention error")
        if over:
            lower = panels[1, column]
            _ratios(lower, source, looks)
            if not column or source["baseline"] != sources[0]["baseline"]:
                lower.set_ylabel(f"error over that of\n{source['baseline']}")
        panels[-1, column].set_xlabel("held bits per number, keys and values")
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **looks[label]) for label in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=styles.legend_columns(labels))
    return figure


def _line(axes: Any, points: list[dict[str, float]], look: dict[str, Any], marker: bool = True) -> None:
    held = [p["held_bits"] for p in points]
    axes.fill_between(
        held, [p["low"] for p in points], [p["high"] for p in points], color=look["color"], alpha=0.2, lw=0
    )
    axes.plot(held, [p["estimate"] for p in points], color=look["color"], marker=look["marker"] if marker else None)


def _ratios(axes: Any, source: dict[str, Any], looks: dict[str, dict[str, Any]]) -> None:
    if source["baseline"] is None:
        axes.set_axis_off()
        return
    axes.axhline(1, color=looks[source["baseline"]]["color"])
    for curve in source["curves"]:
        if curve["ratio"]:
            # knots of both curves, not measurements: no markers
            _line(axes, curve["ratio"], looks[curve["label"]], marker=False)
    axes.set_yscale("log")
    styles.plain_ticks(axes.yaxis)


def _title(source: dict[str, Any]) -> str:
    text = f" on {source['text']}" if source["text"] else ""
    return f"{source['model'].rstrip('/').rsplit('/', 1)[-1]}{text}, {source['prefix']:,} tokens, {len(source['layers'])} layers"


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = [
        "model",
        "text",
        "codec",
        "baseline",
        "quantity",
        "held_bits",
        "nominal_bits",
        "estimate",
        "low",
        "high",
        "level",
    ]
    rows: list[list[Any]] = []
    for source in _sources(results):
        for curve in source["curves"]:
            for quantity in ("error", "ratio"):
                bits = curve["bits"] if quantity == "error" else [""] * len(curve["ratio"])
                rows += [
                    [
                        source["model"], source["text"], curve["label"], (source["baseline"] or "") if quantity == "ratio" else "", quantity,
                        p["held_bits"], "" if b is None else b, p["estimate"], p["low"], p["high"], source["level"],
                    ]
                    for p, b in zip(curve[quantity], bits)
                ]  # fmt: skip
    return header, rows
