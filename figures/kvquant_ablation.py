"""KVQuant without one of its stages, on the real cache."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "kvquant-ablation"
CAPTION = (
    "KVQuant without one of its stages: error at the attention output over that with all of them, on the layers of the real "
    "cache, fitted to the first "
    "half of their tokens, at 2 and 3 bits a code; right of 1 the stage helps. Bits held differ where outliers and the sink "
    "are not kept (the table "
    "beside this figure has them). Last row: with Q-Norm, which the other rows are without; right of 1 it harms, as it does at "
    "2 bits where a sink draws "
    "the attention."
)


def _ratios(
    results: dict[str, Any],
) -> tuple[list[str], list[str], list[int], dict[tuple[str, int, str], dict[str, Any]]]:
    data = results["quantizers/kvquant-stages"]
    rows = {(row["layer"], row["bits"], row["stage"]): row for row in data["rows"]}
    layers = list(dict.fromkeys(row["layer"] for row in data["rows"]))
    return layers, [*data["without"], "Q-Norm"], sorted({row["bits"] for row in data["rows"]}), rows


def draw(results: dict[str, Any], style: str) -> Any:
    layers, stages, bits, rows = _ratios(results)
    figure, axes = styles.subplots(
        style, columns=len(layers), wide=True, ratio=0.62, sharex=True, sharey=True, squeeze=False
    )
    for ax, layer in zip(axes[0], layers):
        for i, b in enumerate(bits):
            ratios = [rows[layer, b, stage]["error"] / rows[layer, b, "all"]["error"] for stage in stages]
            heights = [len(stages) - 1 - j + 0.14 * (len(bits) - 1 - 2 * i) for j in range(len(stages))]
            ax.hlines(heights, 1, ratios, color=styles.look(i)["color"])
            ax.plot(ratios, heights, ls="none", label=f"{b} bits", **styles.look(i))
        ax.axvline(1, color="black", lw=0.8)
        ax.axhline(0.5, color=styles.GUIDE, lw=0.6, ls=":")
        names = [f"without {stage}" for stage in stages[:-1]] + ["with Q-Norm"]
        ax.set_yticks(range(len(stages)), names[::-1])
        ax.set(xscale="log", xlabel="attention error / with all stages", title=layer)
        ax.set_xticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"])
        ax.minorticks_off()
        ax.grid(axis="y", visible=False)
    axes[0][0].legend(loc="upper right")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    layers, stages, bits, rows = _ratios(results)
    header = ["layer", "bits", "taken away", "attention_error", "over_all", "held_bits"]
    return header, [
        [layer, b, stage, rows[layer, b, stage]["error"], rows[layer, b, stage]["error"] / rows[layer, b, "all"]["error"], rows[layer, b, stage]["held_bits"]]
        for layer in layers
        for b in bits
        for stage in ("all", *stages)
    ]  # fmt: skip
