"""The gain of the spectral walk over random sampling, law of queries by law."""

from __future__ import annotations

import math
from typing import Any

from figures import style as styles

NAME = "query-knowledge"
CAPTION = (
    "What a sample chosen by half of a head's queries is worth under other laws of queries: mean linear risk of random sampling of as many tokens over that of the "
    "spectral walk, a mark for each head, a bar at the geometric mean of its group. At 1 (dashed) nothing is gained. A Gaussian with the mean and the covariance of the queries of "
    "the choice is served almost as the queries themselves; a head that shares the keys still gains; heads of other KV heads, other layers and isotropic queries do not, "
    "and pay for the budget that protected directions took."
)


def _gains(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [g for data in results.values() for g in data["gains"]]


def draw(results: dict[str, Any], style: str) -> Any:
    gains = _gains(results)
    names = list(dict.fromkeys(g["law"] for g in gains))
    order = [n for n in names if "isotropic" not in n] + [n for n in names if "isotropic" in n]
    figure, axes = styles.subplots(style, wide=True, ratio=0.46)
    groups = list(dict.fromkeys(g["group"] for g in gains))
    for i, group in enumerate(groups):
        shift = 0.26 * (i - (len(groups) - 1) / 2)
        for j, law in enumerate(order):
            values = [g["gain"] for g in gains if g["group"] == group and g["law"] == law]
            if not values:
                continue
            look = styles.look(i)
            axes.plot(
                values,
                [j + shift] * len(values),
                look["marker"],
                color=look["color"],
                ms=3,
                mfc="white",
                label=group if j == 0 else None,
            )
            mean = math.exp(sum(map(math.log, values)) / len(values))
            axes.plot([mean], [j + shift], "|", color=look["color"], ms=11, mew=2)
    axes.axvline(1.0, color=styles.GUIDE, ls="--", lw=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlabel("gain over random sampling (linear risk)")
    axes.legend(loc="lower right")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    return ["group", "law", "head", "gain"], [[g["group"], g["law"], g["head"], g["gain"]] for g in _gains(results)]
