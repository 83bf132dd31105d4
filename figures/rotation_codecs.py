"""Squared error of the codecs that rotate or sketch, at the bits they hold."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "rotation-codecs"
CAPTION = (
    "Squared error of keys over their squared length against the bits a number held for them (norms and radii counted, the "
    "header aside), d = 128. "
    "Lines: predicted exactly, TurboQuant by integration, QJL by ((π/2) d − 1)/m, the kind 'prod' as QJL of what one bit less "
    "leaves, PolarQuant by the "
    "mean cosines of its angles' errors. Points: measured on 4,096 random directions; filled ones are defaults. Dotted: a "
    "proved lower bound of every code. "
    "Unbiased inner products cost a factor of 4 to 6 in squared error with 'prod', and up to 400 with QJL, whose decoded keys "
    "are farther off than 0 is until "
    "there are 1.57 signs a coordinate. PolarQuant's other points are examples, 2, 1, 1, 1 to 6, 4, 4, 4 bits for its four "
    "levels."
)
_ORDER = ("TurboQuant mse", "PolarQuant", "TurboQuant prod", "QJL")


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["quantizers/polar-distortion"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, ax = styles.subplots(style, wide=True, ratio=0.52)
    ends = []
    for i, name in enumerate(_ORDER):
        rows, look = data["series"][name], styles.look(i)
        ax.plot(rows["held_bits"], rows["predicted"], color=look["color"], ls=styles.LINES[i])
        for nominal, x, y in zip(rows["nominal"], rows["held_bits"], rows["measured"]):
            default = data["default"].get(name) == nominal
            ax.plot(
                x, y, ls="none", mfc=look["color"] if default else "white", **look, ms=7 if default else 4.5, zorder=3
            )
        ends.append((rows["predicted"][-1], name, look["color"]))
    ax.plot(*zip(*data["any_code"]), color=styles.GUIDE, ls=":")
    ends.append((data["any_code"][-1][1], "any code", styles.GUIDE))
    ax.axhline(1, color=styles.GUIDE, lw=0.8)
    ax.annotate("decoding 0", (5.4, 1), xytext=(0, 3), textcoords="offset points", color=styles.GUIDE)
    ax.set(yscale="log", xlabel="bits a number held", ylabel="squared error / squared length", xlim=(0.8, 6.4))
    styles.labels_at_right(ax, ends)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    header = ["codec", "nominal", "held_bits", "predicted", "measured"]
    return header, [
        [name, *row] for name in _ORDER for row in zip(*(data["series"][name][column] for column in header[1:]))
    ]
