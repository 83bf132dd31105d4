"""Attention error, KL divergence and passkey retrieval against the share of tokens that is kept: a curve for each codec."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "kept-pareto"
CAPTION = (
    "Against the share of the prefix's tokens that each KV head keeps (mean over heads and layers; a codec may keep less than its budget). "
    "Attention error: sum of ‖ô − o‖² over sum of ‖o‖² of held-out future queries, geometric mean over layers. KL divergence: of the model's "
    "next-token laws behind the replaced prefix from its own, mean over positions. Bars: bootstrap intervals over segments, the same segments for all "
    "codecs. Passkey: log2 P(key) with the full cache less that with the codec's, mean over samples with its t interval, paired. Oracle: "
    "given the very queries that it is judged by. Prefill by n: the prompt itself was read in chunks of n tokens that attend to compressed past."
)

Point = dict[str, Any]


def _sources(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [results[name] for name in sorted(results)]


def _keys(source: dict[str, Any]) -> list[Point]:
    """Points of passkey with an interval, as those of the other panels."""
    found = []
    for p in source["passkey"]:
        if p["loss_bits"] is not None:
            estimate, low, high, _ = p["loss_bits"]
            found.append({**p, "error": estimate, "low": low, "high": high})
    return found


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.lines import Line2D

    sources = _sources(results)
    panels = [("points", "attention error"), ("on_model", "KL divergence, bits"), ("passkey", "passkey, bits lost")]
    shown = [
        (name, title) for name, title in panels if any(_keys(s) if name == "passkey" else s[name] for s in sources)
    ]
    figure, axes = styles.subplots(
        style, columns=len(shown), rows=len(sources), wide=True, ratio=1.15 if len(shown) > 2 else 0.8, squeeze=False
    )
    labels = list(dict.fromkeys(p["label"] for s in sources for name, _ in shown for p in s[name]))
    looks = _looks(labels)
    for source, row in zip(sources, axes):
        for (name, title), panel in zip(shown, row):
            points = _keys(source) if name == "passkey" else source[name]
            _panel(panel, points, looks, log=name != "passkey")
            panel.set_ylabel(title)
            panel.set_xlabel("tokens kept")
        row[0].set_title(_title(source), loc="left")
    # a colour for each codec, a line for each way it was used
    own = list(dict.fromkeys(map(_codec, labels)))
    handles = [Line2D([], [], label=label, **_look(i)) for i, label in enumerate(own)]
    for way in dict.fromkeys(label[len(_codec(label)) + 2 :] for label in labels if label != _codec(label)):
        handles.append(Line2D([], [], label=way, color=styles.GUIDE, mfc="white", marker="o", ls=_line(way)))
    columns = max(2, styles.legend_columns([str(h.get_label()) for h in handles]))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + -(-len(handles) // columns) * 0.024 * width)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _codec(label: str) -> str:
    """A label without what was done with the codec."""
    return label.split(", prefill by ", maxsplit=1)[0].removesuffix(", oracle")


def _look(i: int) -> dict[str, Any]:
    """Colours come again after eight codecs, with another marker and a line of dots and dashes."""
    return {**styles.look(i), "ls": "-" if i < len(styles.COLOURS) else "-."}


def _line(way: str) -> str:
    return "--" if "prefill" in way else ":"


def _looks(labels: list[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of the codec; broken lines and open markers for a compressed prefill and for an oracle."""
    own = list(dict.fromkeys(map(_codec, labels)))
    looks = {}
    for label in labels:
        look = _look(own.index(_codec(label)))
        changed = label != _codec(label)
        looks[label] = {**look, "ls": _line(label), "mfc": "white"} if changed else look
    return looks


def _panel(axes: Any, points: list[Point], looks: dict[str, dict[str, Any]], log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for label in dict.fromkeys(p["label"] for p in points):
        own = sorted((p for p in points if p["label"] == label), key=lambda p: p["kept"])
        errors = [p["error"] for p in own]
        bars = [[max(0.0, p["error"] - p["low"]) for p in own], [max(0.0, p["high"] - p["error"]) for p in own]]
        axes.errorbar([p["kept"] for p in own], errors, yerr=bars, capsize=2, elinewidth=0.8, **looks[label])
    axes.set_xscale("log")
    if log and all(p["error"] > 0 for p in points):
        axes.set_yscale("log")
    elif not log:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -1.0), max(high, 1.0))
    ticks = sorted({float(f"{p['budget']:.3g}") for p in points if isinstance(p["budget"], float)})
    if len(ticks) < 4:
        # few budgets leave the axis bare: round shares between them, clear of their labels
        low, high = axes.get_xlim()
        round_ones = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
        ticks += [x for x in round_ones if low <= x <= high and all(max(x / t, t / x) > 1.15 for t in ticks)]
    if ticks:
        axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _title(source: dict[str, Any]) -> str:
    text = f" of {source['text']}" if source["text"] else ""
    return f"{source['model'].rstrip('/').rsplit('/', 1)[-1]}, {source['prefix']:,} tokens{text}"


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["model", "text", "quantity", "codec", "budget", "kept", "held_bits", "estimate", "low", "high"]
    rows: list[list[Any]] = []
    for source in _sources(results):
        for quantity, points in (
            ("attention error", source["points"]),
            ("kl bits", source["on_model"]),
            ("passkey bits lost", _keys(source)),
        ):
            rows += [
                [
                    source["model"], source["text"], quantity, p["label"], p["budget"], p["kept"], p["held_bits"], p["error"], p["low"], p["high"],
                ]
                for p in points
            ]  # fmt: skip
    return header, rows
