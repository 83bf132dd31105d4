"""What each predictor saves, and what it asks of the decoder."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "predictor-gains"
CAPTION = (
    "Predictive delta coding on trained models: bits a number that each predictor saves, against coding the cache directly with the same quantiser at equal error of the attention output above the lowest "
    "layer; header and tokens are counted, what was fitted beforehand is not. Beside each bar the passes of the model that decoding a position takes (and those of a predictor's own model, in passes of the target); of the lower third of the model's own layers the error is that of the layers above. An arrow: the error is below that of 8 bits, so the "
    "gain is at least this. Left of the line nothing is saved. Bars: means over texts; dots: each text."
)


def _models(results: dict[str, Any]) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = results["prediction/gains-on-real-models"]["models"]
    return models


def draw(results: dict[str, Any], style: str) -> Any:
    models = _models(results)
    names = list(dict.fromkeys(line["predictor"] for m in models for line in m["lines"]))
    figure, axes = styles.subplots(style, wide=True, ratio=0.055 * len(names) + 0.06)
    height = 0.8 / len(models)
    for i, model in enumerate(models):
        short = model["model"].split(",")[0].removesuffix("-Instruct")
        for k, line in enumerate(model["lines"]):
            y = names.index(line["predictor"]) + height * (i - (len(models) - 1) / 2)
            gain = sum(line["gains"]) / len(line["gains"])
            axes.barh(y, gain, height * 0.85, color=styles.COLOURS[i], label=short if k == 0 else None)
            if len(line["gains"]) > 1:
                axes.plot(line["gains"], [y] * len(line["gains"]), ".", color=styles.GUIDE, markersize=3)
            passes = "1 pass" if line["passes"] == 1 else f"{line['passes']} passes" if line["passes"] else "no pass"
            if line["own_pass"]:
                passes += f", {line['own_pass']:.1f} of its own"
            text = f"{'nil, ' if gain <= 0 else ''}{gain:.2f}{'' if line['inside'] else ' →'}, {passes}"
            axes.annotate(
                text,
                (max(gain, *line["gains"], 0), y),
                xytext=(0.4, 0),
                textcoords="offset fontsize",
                va="center",
                size="small",
            )
    axes.axvline(0.0, color=styles.GUIDE, lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    least, most = axes.dataLim.intervalx
    # what stands behind the bars takes half of the width
    axes.set_xlim(least - 0.03 * (most - least), most + 0.55 * (most - least))
    axes.set_xlabel("bits a number saved at equal attention error")
    axes.legend(loc="upper right")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    keys = ("predictor", "inside", "passes", "own_pass", "state_bytes", "decode_seconds", "held_bits", "error")
    rows = [
        [m["model"], text, gain, *(line[k] for k in keys)]
        for m in _models(results)
        for line in m["lines"]
        for text, gain in zip(line["texts"], line["gains"])
    ]
    return ["model", "text", "gain_bits", *keys], rows
