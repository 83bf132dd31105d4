"""The Pareto picture of many codecs: the frontier, and panels that their legend does not squash."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import figures
from figures import pareto
from figures import style as styles
from kvtheory import Cache
from tests.sweep.test_compare import captured, command, here, sources  # noqa: F401  (fixtures)

pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow.parquet")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_frontier_is_what_no_other_beats(pairs):
    points = [{"held_bits": float(b), "error": float(e)} for b, e in pairs]
    found = {(p["held_bits"], p["error"]) for p in pareto.frontier(points)}
    beaten = {
        (b, e) for b, e in pairs if any(x <= b and y <= e and (x, y) != (b, e) for x, y in pairs)
    }  # fmt: skip
    assert found == set(pairs) - beaten


def test_looks_differ():
    looks = [tuple(pareto._look(i).values()) for i in range(24)]
    assert len({(colour, marker) for colour, marker, _ in looks}) == 24


@pytest.mark.parametrize("style", ["paper", "slides"])
def test_many_codecs_leave_the_panels_their_height(tmp_path, here, style):  # noqa: F811
    path = tmp_path / "cache.safetensors"
    Cache([captured(3), captured(7, seed=1)], meta={"model": "toy"}).save(path)
    codecs = "Full,TurboQuant(rotation=hadamard|haar),TurboQuant(kind=prod),QJL,PolarQuant(level_bits=(4,2,2)|(3,2,2)|(4,3,2)|(4,3,3)),KIVI(group=8,window=8)"
    code, said = command(
        "--cache", path, "--codecs", codecs, "--bits", "2,3", "--no-figures", "--out", tmp_path / "out"
    )
    assert code == 0, said
    (drawn,) = figures.draw(tmp_path / "out", names=["pareto"], formats=("svg",), style=style)
    assert drawn.files[0].stat().st_size > 10_000
    saved = (tmp_path / "out" / "data" / "pareto").glob("*.json")
    results = {path.stem: json.loads(path.read_text())["data"] for path in saved}
    # twenty more, of names so long that each takes a line of the legend
    (only,) = results.values()
    only["points"] += [{**only["points"][1], "label": f"{'a codec of a long name ' * 3}{i}"} for i in range(20)]
    with styles.using(style):
        figure = pareto.draw(results, style)
        figure.draw_without_rendering()  # lays out
        (axes,) = figure.axes
        width, height = (
            axes.get_position().width * figure.get_figwidth(),
            axes.get_position().height * figure.get_figheight(),
        )
        legend = figure.legends[0].get_window_extent()
        panel = axes.get_window_extent()
    assert height > 0.4 * width
    assert legend.y0 > -1 and legend.y1 < panel.y0 + 1  # pixels: all of it, below the panel
