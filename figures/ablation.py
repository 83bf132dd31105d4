"""What each choice of a codec is worth: its error over the baseline's at equal held bits, a line a variant."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "ablation"
CAPTION = (
    "Error of the attention output over that of the baseline at equal held bits (keys and values together, log2 of the error interpolated between "
    "the two nearest held rates of each codec): geometric mean over KV heads of all layers, with the paired bootstrap interval over segments of held-out "
    "queries. Left of 1 is better than the baseline. Where a codec was not measured on both sides of a rate, there is no point."
)
MEASURE = "attention by head"

Line = dict[str, Any]


def _sources(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [results[name] for name in sorted(results)]


def draw(results: dict[str, Any], style: str) -> Any:
    sources = _sources(results)
    shown = [line for source in sources for line in source["lines"] if line["measure"] == MEASURE]
    variants = list(dict.fromkeys(line["label"] for line in shown))
    rates = sorted({line["held_bits"] for line in shown})
    figure, panels = styles.subplots(
        style, columns=len(sources), wide=True, ratio=(0.3 + 0.09 * len(variants)) * (1 if len(sources) > 1 else 0.6), squeeze=False, sharey=True,
    )  # fmt: skip
    for axes, source in zip(panels[0], sources):
        axes.axvline(1, color=styles.GUIDE, lw=0.8)
        for i, rate in enumerate(rates):
            own = [line for line in source["lines"] if line["measure"] == MEASURE and line["held_bits"] == rate]
            # rates of one variant lie under one another, the lowest on top
            heights = [variants.index(line["label"]) + 0.6 * ((i + 0.5) / len(rates) - 0.5) for line in own]
            ratios = [line["ratio"] for line in own]
            bars = [[line["ratio"] - line["low"] for line in own], [line["high"] - line["ratio"] for line in own]]
            axes.errorbar(
                ratios, heights, xerr=bars, ls="none", elinewidth=1, capsize=2, label=f"{rate:g} bits", **styles.look(i)
            )
        axes.set_xscale("log")
        axes.set_xlabel(f"error over that of {source['baseline']}")
        axes.set_title(_title(source), loc="left")
        styles.plain_ticks(axes.xaxis)
    panels[0, 0].set_yticks(range(len(variants)), variants)
    panels[0, 0].set_ylim(len(variants) - 0.5, -0.5)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(rates), title="held bits per number")
    return figure


def _title(source: dict[str, Any]) -> str:
    text = f" on {source['text']}" if source["text"] else ""
    return f"{source['model'].rstrip('/').rsplit('/', 1)[-1]}{text}, {len(source['layers'])} layers"


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["model", "text", "baseline", "codec", "measure", "held_bits", "ratio", "low", "high", "level"]
    return header, [
        [source["model"], source["text"], source["baseline"], line["label"], line["measure"], line["held_bits"], line["ratio"], line["low"],
         line["high"], source["level"]]
        for source in _sources(results)
        for line in source["lines"]
    ]  # fmt: skip
