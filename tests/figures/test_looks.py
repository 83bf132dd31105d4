"""Every figure in both styles: no text over another or off the canvas, series that stay apart without colour, the same bytes for the same data.

Drawn from tests/figures/saved.json.gz: what one `kvtheory verify` and one `kvtheory compare` saved, rounded to four digits.
"""

import gzip
import importlib
import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import Collection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import figures
from figures import book
from figures import style as styles
from tests.figures import layout

SAVED = json.loads(gzip.decompress((Path(__file__).parent / "saved.json.gz").read_bytes()))

#: what dichromats see (Machado, Oliveira, Fernandes 2009, severity 1), on linear RGB; grey is its luminance
SEEN = {
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "grey": np.tile([0.2126, 0.7152, 0.0722], (3, 1)),
}  # fmt: skip
#: CIE76; 2.3 is just noticeable side by side, and marks a figure apart need a few times that
LEAST = 7.0


def lab(rgb):
    """CIELAB (D65) of linear RGB."""
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ np.clip(rgb, 0, 1)
        / (0.9505, 1, 1.089)
    )
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a, b, matrix):
    linear = [
        np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in (np.array(to_rgb(x)) for x in (a, b))
    ]
    return float(np.linalg.norm(lab(matrix @ linear[0]) - lab(matrix @ linear[1])))


def marks(handle):
    """What tells a series apart besides its colour, and the colour."""
    if hasattr(handle, "get_linestyle") and hasattr(handle, "get_marker"):
        filled = handle.get_marker() not in ("None", "", None) and to_rgb(handle.get_markerfacecolor()) != (1, 1, 1)
        shape = "line", handle.get_marker(), str(handle._unscaled_dash_pattern), filled, handle.get_linewidth() > 1.8
        return shape, handle.get_color()
    if isinstance(handle, Collection):
        return ("bar of an interval",), handle.get_edgecolor()[0][:3]
    if hasattr(handle, "get_hatch"):
        return ("patch", handle.get_hatch()), handle.get_facecolor()[:3]
    return (type(handle).__name__,), "black"


def alike(figure: Figure) -> list[str]:
    """Pairs of a legend that neither shape nor colour keeps apart, for each way of seeing."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    found = []
    for legend in legends:
        entries = [(text.get_text(), *marks(handle)) for text, handle in zip(legend.get_texts(), legend.legend_handles)]
        for (a, shape, colour), (b, other, second) in combinations(entries, 2):
            if shape == other:
                found += [
                    f"{a!r} and {b!r} in {name}: {far:.1f}"
                    for name, matrix in SEEN.items()
                    if (far := distance(colour, second, matrix)) < LEAST
                ]
    return found


def test_there_is_data_for_every_figure():
    assert set(SAVED) == set(figures.names())


@pytest.mark.parametrize("name", sorted(SAVED))
def test_every_figure_can_be_read(name):
    module = importlib.import_module(figures.names()[name])
    for style in ("paper", "slides"):
        with styles.using(style):
            figure = module.draw(SAVED[name], style)
            assert layout.faults(figure) == [], style
            assert alike(figure) == [], style
            assert figure.get_figwidth() in styles.WIDTHS[style]
            styles.close(figure)


@pytest.mark.parametrize("name", ["coding-gains"])
def test_the_same_bytes_with_fonts_inside(name, tmp_path):
    for run in ("a", "b"):
        (tmp_path / run / "data" / name).mkdir(parents=True)
        for claim, data in SAVED[name].items():
            (tmp_path / run / "data" / name / "x.json").write_text(json.dumps({"claim": claim, "data": data}))
        book.draw(tmp_path / run, names=[name])
    files = sorted((tmp_path / "a" / "figures").iterdir())
    assert [f.suffix for f in files] == [".csv", ".pdf", ".png", ".svg", ".txt"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / "figures" / file.name).read_bytes(), file.name
    pdf = (tmp_path / "a" / "figures" / f"{name}.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    svg = (tmp_path / "a" / "figures" / f"{name}.svg").read_text()
    assert "<text" not in svg and not re.search(r'(href|src)="(?!#)', svg)


def test_the_layout_check_sees_what_is_wrong():
    with styles.using("paper"):
        figure = Figure(figsize=(3, 2), layout="none")
        figure.text(0.1, 0.5, "one text here")
        figure.text(0.12, 0.51, "another on it")
        figure.text(0.95, 0.9, "off the canvas")
        figure.text(0.1, 0.2, "apart")
        figure.text(0.1, 0.8, "hidden", visible=False)
        figure.text(0.1, 0.8, "turned", rotation=45)
        found = layout.faults(figure)
        assert (
            len(found) == 2 and "one text here" in found[1] and "another" in found[1] and "off the canvas" in found[0]
        )
        axes = figure.subplots()
        axes.plot([0, 1], color="#009E73", label="green")
        axes.plot([1, 0], color="#CC79A7", label="pink")
        axes.plot([1, 1], "o", color="#CC79A7", label="dots")
        axes.legend()
        assert alike(figure) and all("green" in pair and "pink" in pair for pair in alike(figure))
