"""What of a drawn figure cannot be read: texts that touch, and texts outside the canvas, by the renderer's own boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

#: of the height of a line: the box of a line of text is that of its tallest letters, with room above and below that ink seldom fills
_SLACK = 0.12


@contextmanager
def _recorded() -> Iterator[list[Text]]:
    """The texts that are drawn, in order: those of hidden ticks and of empty labels are not."""
    drawn: list[Text] = []
    plain = Text.draw

    def draw(self: Text, renderer: Any) -> None:
        if self.get_visible() and self.get_text().strip() and renderer is not None:
            drawn.append(self)
        plain(self, renderer)

    with mock.patch.object(Text, "draw", draw):
        yield drawn


def _corners(text: Text, renderer: Any) -> np.ndarray:
    """(4, 2) pixels: the box of the text's lines, turned as the text is."""
    angle = text.get_rotation()
    if angle % 90 == 0:
        box = Text.get_window_extent(text, renderer)
        x0, y0, x1, y1 = box.x0, box.y0, box.x1, box.y1
        dx, dy = (0, _SLACK) if angle % 180 == 0 else (_SLACK, 0)
        line = (y1 - y0 if angle % 180 == 0 else x1 - x0) / (1 + text.get_text().count("\n"))
        return np.array([(x0 + dx * line, y0 + dy * line), (x1 - dx * line, y0 + dy * line),
                         (x1 - dx * line, y1 - dy * line), (x0 + dx * line, y1 - dy * line)])  # fmt: skip
    # a turned text: the box of the same text lying flat, turned about the centre of what it covers
    centre = Text.get_window_extent(text, renderer)
    text.set_rotation(0)
    flat = Text.get_window_extent(text, renderer)
    text.set_rotation(angle)
    height = flat.height * (1 - 2 * _SLACK / (1 + text.get_text().count("\n")))
    half = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * (flat.width / 2, height / 2)
    turn = math.radians(angle)
    matrix = np.array([(math.cos(turn), math.sin(turn)), (-math.sin(turn), math.cos(turn))])
    return half @ matrix + ((centre.x0 + centre.x1) / 2, (centre.y0 + centre.y1) / 2)


def _touch(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two convex quadrilaterals overlap: no edge's normal parts them."""
    for corners in (a, b):
        edges = np.roll(corners, -1, axis=0) - corners
        for normal in np.stack((-edges[:, 1], edges[:, 0]), axis=1):
            first, second = a @ normal, b @ normal
            if first.max() <= second.min() or second.max() <= first.min():
                return False
    return True


def faults(figure: Figure) -> list[str]:
    """One line for each pair of texts that overlap and each text that leaves the canvas; none for a figure that can be read."""
    canvas = FigureCanvasAgg(figure)
    with _recorded() as drawn:
        figure.draw_without_rendering()
    renderer = canvas.get_renderer()
    # constrained layout draws texts more than once; the last state of each is what is seen
    texts = list(dict.fromkeys(drawn))
    boxes = {text: _corners(text, renderer) for text in texts}
    width, height = figure.bbox.width, figure.bbox.height
    found = []
    for text, corners in boxes.items():
        low, high = corners.min(axis=0), corners.max(axis=0)
        if low.min() < -0.5 or high[0] > width + 0.5 or high[1] > height + 0.5:
            found.append(f"outside the canvas: {text.get_text()!r}")
    low, high = (np.array([getattr(boxes[t], end)(axis=0) for t in texts]).reshape(-1, 2) for end in ("min", "max"))
    near = ((low[:, None] < high) & (high[:, None] > low)).all(axis=2)
    for a, b in ((texts[i], texts[j]) for i, j in zip(*np.nonzero(np.triu(near, 1)))):
        if _touch(boxes[a], boxes[b]):
            found.append(f"overlap: {a.get_text()!r} and {b.get_text()!r}")
    return found
