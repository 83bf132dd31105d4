"""The residual of a predicted position against the token's bits, with the bounds that hold for every mixture; and its correlation by layer."""

from __future__ import annotations

import math
from typing import Any

from figures import style as styles

NAME = "surprisal-residual"
CAPTION = (
    "The residual of keys and values predicted by the mean over the 16 likeliest tokens, on trained models; squared, over the squared largest distance Δ² of two candidates. Left: of "
    "the token that came, against its bits under the law of those 16, −log₂ p; line: the bound (1 − 2^−h)². Middle: its expectation, against the entropy of that law; lines: ½ (1 − 2^−H) and H/4. "
    "Each mark is a position, in the lowest, a middle and the highest layer. Both bounds are kept, with room; neither promises a gain at the 3 to 4 bits of the paper. Tokens outside of the 16 "
    "have no bits here and are left out of the left panel. Right: rank correlation of surprisal and squared residual in segments of 16 positions, by depth of the layer, with "
    "95 % bands over segments; solid: keys, dashed: values."
)
LAYERS = ("lowest layer", "middle layer", "highest layer")


def _models(results: dict[str, Any]) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = results["prediction/residual-bounds-on-real-models"]["models"]
    return models


def draw(results: dict[str, Any], style: str) -> Any:
    models = _models(results)
    figure, (left, middle, right) = styles.subplots(style, wide=True, columns=3, ratio=1.05)
    first = models[0]["points"]
    numbers = sorted({p["layer"] for p in first})
    for i, number in enumerate(numbers):
        own = [p for p in first if p["layer"] == number]
        came = [(-math.log2(1 - x), y) for p in own for x, y in zip(p["less"], p["residual"]) if x < 1]
        mean = [(x, y) for p in own for x, y in zip(p["entropy_bits"], p["expected"])]
        look = {**styles.look(i), "ls": "none", "ms": 1.8, "mew": 0, "alpha": 0.55}
        left.plot(*zip(*came), **look, label=LAYERS[i])
        middle.plot(*zip(*mean), **look)
    grid = [j / 50 for j in range(1, 601)]
    left.plot(grid, [(1 - 2.0**-h) ** 2 for h in grid], color="black", lw=1, label="$(1 - 2^{-h})^2$")
    middle.plot(
        grid[:200], [0.5 * (1 - 2.0**-h) for h in grid[:200]], color="black", lw=1, label=r"$\frac{1}{2}(1 - 2^{-H})$"
    )
    middle.plot(grid[:110], [h / 4 for h in grid[:110]], color="black", lw=1, ls="--", label="$H/4$")
    left.set(xlim=(0, 12), ylim=(0, 1.03), xlabel="bits of the token that came, $h$", ylabel=r"$\|R\|^2/\Delta^2$")
    middle.set(xlim=(0, 4.05), ylim=(0, 0.56), xlabel="entropy of the law, $H$, bits", ylabel=r"$E\|R\|^2/\Delta^2$")
    middle.legend(loc="upper left")
    left.set_title(_short(models[0]["model"]), loc="left")
    for i, model in enumerate(models):
        for part, line in (("keys", "-"), ("values", "--")):
            bands = model["correlations"][part]
            x = [j / (len(bands) - 1) for j in range(len(bands))]
            right.fill_between(
                x, [b["low"] for b in bands], [b["high"] for b in bands], color=styles.COLOURS[i], alpha=0.15, lw=0
            )
            right.plot(
                x,
                [b["estimate"] for b in bands],
                line,
                color=styles.COLOURS[i],
                label=f"{_short(model['model'])}, {part}",
            )
    right.set(ylim=(0, 1), xlabel="depth of the layer", ylabel="rank correlation")
    right.legend(loc="lower center")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, markerscale=2.5)
    return figure


def _short(title: str) -> str:
    return title.split(",", maxsplit=1)[0].removesuffix("-Instruct")


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows: list[list[Any]] = []
    for model in _models(results):
        for p in model["points"]:
            rows += [
                [model["model"], p["text"], p["layer"], p["part"], i, *numbers, "", "", ""]
                for i, numbers in enumerate(zip(p["less"], p["residual"], p["entropy_bits"], p["expected"]))
            ]
        for part, bands in model["correlations"].items():
            rows += [
                [model["model"], "all", i, part, "", "", "", "", "", b["estimate"], b["low"], b["high"]]
                for i, b in enumerate(bands)
            ]
    header = [
        "model",
        "text",
        "layer",
        "part",
        "position",
        "1 - p of what came",
        "residual / diameter",
        "entropy bits",
        "expected / diameter",
    ]
    return [*header, "rank correlation", "low", "high"], rows
