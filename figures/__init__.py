"""Figures: one file each, drawn from saved results only, never recomputing science. `python -m figures` = `kvtheory figures`.

A figure module has NAME, CAPTION, `draw(results, style) -> matplotlib Figure` and `table(results) -> (header, rows)`, where
`results` maps the id of each claim that saved data for the figure to those data.
"""

from __future__ import annotations

from figures.book import Drawn, draw, names
from kvtheory import __version__

__kvtheory__ = __version__
__all__ = ["Drawn", "draw", "names"]
