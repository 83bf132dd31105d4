"""Bits that public packages say and bits that they hold, from a saved run of benchmarks/peers.py."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "packages-held-bits"
CAPTION = (
    "Bits a number that public packages say (hollow) and hold (filled), codes, norms, scales and all that decoding needs counted, at a claim of 2 bits; a panel for "
    "each system, ours first. Right of the filled mark: the bits held. The horizontal axis is logarithmic: a package that keeps codes in bytes, or sketches in floats, holds several times what "
    "its name says. Colour and mark of what is held: circles within one bit of the claim, squares beyond it. From the saved run of benchmarks/peers.py in docs/peers.md; packages that do not run at 2 bits are left out, "
    "other widths are in the CSV."
)
#: the width that is drawn
_BITS = 2
_ALLOWED = 1.0

Row = dict[str, Any]


def _rows(results: dict[str, Any]) -> list[Row]:
    return [row for name in sorted(results) for row in results[name]["rows"]]


def draw(results: dict[str, Any], style: str) -> Any:
    rows = [r for r in _rows(results) if r["claimed"] == _BITS]
    systems = list(dict.fromkeys(r["system"] for r in rows))
    figure, panels = styles.subplots(
        style, wide=True, columns=2, rows=-(-len(systems) // 2), ratio=0.52, squeeze=False, sharex=True
    )
    for axes in list(panels.flat)[len(systems) :]:
        axes.set_axis_off()
    for axes, system in zip(panels.flat, systems):
        own = [r for r in rows if r["system"] == system]
        for y, row in enumerate(own):
            within = row["held"] <= row["claimed"] + _ALLOWED
            colour = styles.COLOURS[0 if within else 5]
            axes.plot([row["claimed"], row["held"]], [y, y], color="#a8b0bb", lw=0.8, zorder=1)
            axes.plot(row["claimed"], y, "o", color=styles.GUIDE, mfc="white", zorder=2)
            axes.plot(row["held"], y, "o" if within else "s", color=colour, zorder=3)
            axes.annotate(
                f"{row['held']:.3g}", (row["held"], y), xytext=(0.6, 0), textcoords="offset fontsize", va="center"
            )
        axes.axvline(_BITS, color=styles.GUIDE, ls="--", lw=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_xlim(1.6, 260)
        axes.set_yticks(range(len(own)), [r["package"] for r in own])
        axes.set_ylim(len(own) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_title(system, loc="left")
        styles.plain_ticks(axes.xaxis)
    for axes in panels[-1]:
        axes.set_xlabel("bits a number held (hollow: said)")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["system", "package", "bits claimed", "bits held", "error over exact"]
    return header, [[r["system"], r["package"], r["claimed"], r["held"], r["error over exact"]] for r in _rows(results)]
