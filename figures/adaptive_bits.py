"""Bits by surprisal against bits by the residual's energy."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "adaptive-bits"
CAPTION = (
    "Bits that each position's residual gets, at the same mean: the paper's rule, in proportion to the token's surprisal and at least 1 (crosses), against reverse water-filling on the residual's "
    "energy, mean over layers (dots). The energy stops growing at the spread of the candidates, surprisal does not. Right: error Σ E 4^−b that is left, over that of as many bits for every position; the "
    "rule leaves more than no rule. Bits that say which position got how many are not counted, for neither."
)


def _models(results: dict[str, Any]) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = results["prediction/adaptive-bits"]["models"]
    return models


def draw(results: dict[str, Any], style: str) -> Any:
    models = _models(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.75)
    for name, marker, colour, label in (
        ("water", "o", styles.COLOURS[0], "water-filling"),
        ("paper", "x", styles.COLOURS[5], "the paper's rule"),
    ):
        points = [p for text in models[0]["texts"] for p in zip(text["surprisal_bits"], text["bits"][name])]
        left.plot(*zip(*points), marker, color=colour, ms=3, mew=0.8 if marker == "x" else 0, alpha=0.7, label=label)
    left.set(xlabel="surprisal of the token, bits", ylabel="bits a number")
    left.set_title(models[0]["model"].split(",")[0], loc="left")
    left.legend(loc="upper left")
    labels = []
    for i, (model, text) in enumerate((m, t) for m in models for t in m["texts"]):
        even = text["distortion"]["even"]
        for name, marker, colour in (("paper", "x", styles.COLOURS[5]), ("water", "o", styles.COLOURS[0])):
            right.plot([1.0, text["distortion"][name] / even], [i, i], color=colour, lw=1, alpha=0.6)
            right.plot(text["distortion"][name] / even, i, marker, color=colour, ms=5, mew=1.4)
        labels.append(f"{model['model'].split('-')[0]}, {text['text']}")
    right.axvline(1.0, color=styles.GUIDE, ls="--", lw=0.8)
    right.set_xscale("log")
    styles.plain_ticks(right.xaxis)
    right.set_yticks(range(len(labels)), labels)
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set_xlabel("error over that of even bits")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows: list[list[Any]] = []
    for model in _models(results):
        for text in model["texts"]:
            rows += [
                [model["model"], text["text"], i, *numbers]
                for i, numbers in enumerate(
                    zip(text["surprisal_bits"], text["energy"], text["bits"]["paper"], text["bits"]["water"])
                )
            ]
    return [
        "model",
        "text",
        "position",
        "surprisal bits",
        "energy over variance",
        "bits by surprisal",
        "bits by water-filling",
    ], rows
