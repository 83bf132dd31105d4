"""The figures of sequential compression, drawn from what their claims yield: whole in both styles, tables as wide as their headers."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from figures import (
    adaptive_bits,
    context_growth,
    divergence,
    predictor_gains,
    prefix_store_bytes,
    recompute_differences,
    replay_frontier,
    surprisal_residual,
)
from figures import style as styles
from proofs_checks import sequential
from proofs_checks.claim import Claim
from proofs_checks.context import Context
from proofs_checks.evidence import Picture

MODULES = [
    adaptive_bits, context_growth, divergence, predictor_gains, prefix_store_bytes, recompute_differences, replay_frontier, surprisal_residual
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    found = {}
    for claim in vars(sequential).values():
        if isinstance(claim, Claim) and claim.figure in {m.NAME for m in MODULES}:
            (picture,) = (x for x in claim.run(Context(claims=40, claim_id=claim.id)) if isinstance(x, Picture))
            found[picture.figure] = {claim.id: picture.data}
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
@pytest.mark.parametrize("style", ["paper"])  # both: test_looks
def test_whole(results, module, style):
    with styles.using(style):
        figure = module.draw(results[module.NAME], style)
        FigureCanvasAgg(figure).draw()  # lays out as well
        assert all(axes.get_xlabel() for axes in figure.axes)
        # no label of an axis runs out of the picture
        box = figure.bbox
        for axes in figure.axes:
            low, high = sorted(axes.get_ylim())
            ticks = [tick.label1 for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
            for label in (axes.xaxis.label, axes.yaxis.label, *ticks):
                if label.get_text():
                    extent = label.get_window_extent()
                    assert extent.x0 >= box.x0 - 2 and extent.y0 >= box.y0 - 2 and extent.x1 <= box.x1 + 2
        styles.close(figure)
    header, rows = module.table(results[module.NAME])
    assert rows and all(len(row) == len(header) for row in rows)


def test_no_marks_are_lost(results):
    """Every position of three layers, keys and values, has its row."""
    _, rows = surprisal_residual.table(results[surprisal_residual.NAME])
    models = results[surprisal_residual.NAME]["prediction/residual-bounds-on-real-models"]["models"]
    positions = sum(len(p["less"]) for m in models for p in m["points"])
    assert sum(row[4] != "" for row in rows) == positions > 0
