"""How far apart keys and values are where two texts part, and behind; and what a bound by layers' stretches says of it."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "divergence"
CAPTION = (
    "Distance of keys and values of two texts that differ in one token, by layer, over the distance of the two embeddings. At the position of that token it is about as large as between two unrelated "
    "positions, from the first layer on; behind it, where the tokens are equal again and the paper's bound is 0, it is 0 in the first layer only. Above: the bound by the product of the layers' stretches "
    "(largest singular values of their Jacobians, the largest over the states measured), and by the power of the largest, as κ^l has it: true and of no use."
)


def _models(results: dict[str, Any]) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = results["sharing/delta-after-divergence"]["models"]
    return models


SERIES = (
    ("power", "bound, power of the largest stretch"),
    ("product", "bound, product of the stretches"),
    ("unrelated", "two unrelated positions"),
    ("at", "where the texts part"),
    ("behind", "behind, equal tokens"),
)


def draw(results: dict[str, Any], style: str) -> Any:
    models = _models(results)
    figure, panels = styles.subplots(
        style, wide=True, columns=len(models), ratio=0.45 * len(models), sharey=True, squeeze=False
    )
    for axes, model in zip(panels[0], models):
        for i, (name, label) in enumerate(SERIES):
            y = [v / model["embedding_distance"] for v in model[name]]
            points = [(x + 1, v) for x, v in enumerate(y) if v > 0]
            axes.plot(*zip(*points), **styles.look(i), ls=styles.LINES[i], label=label)
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.set_title(model["model"].split(",")[0], loc="left")
    panels[0][0].set_ylabel("distance / distance of the embeddings")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [model["model"], i + 1, *(model[name][i] for name, _ in SERIES)]
        for model in _models(results)
        for i in range(len(model["at"]))
    ]
    return ["model", "layer", *(label for _, label in SERIES)], rows
