"""Bits of a token against its position: they fall, ever more slowly, to a rate that is not 0."""

from __future__ import annotations

import itertools
import math
from typing import Any

from figures import style as styles

NAME = "context-growth"
CAPTION = (
    "Left: mean surprisal of tokens whose positions lie in one span, each span twice as long as the one before; windows of several texts, bands: 95 % over windows. Dashed: the fit h̄ + a t^−b, which "
    "levels off at h̄ bits, not at 0; so a cache costs its length times h̄. Right: the same by text, first model: what is said weighs more than how much was said before."
)


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    curves: list[dict[str, Any]] = results["sequential/context-plateau"]["curves"]
    return curves


def _middles(spans: list[int]) -> list[float]:
    return [math.sqrt(a * b) for a, b in itertools.pairwise(spans)]


def draw(results: dict[str, Any], style: str) -> Any:
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.72, sharey=True)
    curves = _curves(results)
    for i, curve in enumerate(curves):
        x = _middles(curve["spans"])
        bands, (limit, size, power) = curve["bands"], curve["fit"]
        colour = styles.COLOURS[i]
        left.fill_between(x, [b["low"] for b in bands], [b["high"] for b in bands], color=colour, alpha=0.18, lw=0)
        name = curve["model"].split(",")[0].removesuffix("-Instruct")
        left.plot(
            x,
            [b["estimate"] for b in bands],
            color=colour,
            marker=styles.MARKERS[i],
            label=f"{name}, {curve['windows']} windows",
        )
        left.plot(
            x,
            [limit + size * t**-power for t in x],
            "--",
            color=colour,
            label=rf"$\bar h = {limit:.1f}$, $b = {power:.2f}$",
        )
    for i, (text, bits) in enumerate(curves[0]["by_text"].items()):
        right.plot(_middles(curves[0]["spans"]), bits, **styles.look(i), label=text)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")
    left.set_ylabel("bits a token")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows: list[list[Any]] = []
    for curve in _curves(results):
        spans = list(zip(curve["spans"], curve["spans"][1:]))
        rows += [
            [curve["model"], "all", a, b - 1, x["estimate"], x["low"], x["high"]]
            for (a, b), x in zip(spans, curve["bands"])
        ]
        for text, bits in curve["by_text"].items():
            rows += [[curve["model"], text, a, b - 1, x, "", ""] for (a, b), x in zip(spans, bits)]
    return ["model", "text", "from position", "to position", "bits a token", "low", "high"], rows
