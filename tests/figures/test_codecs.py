"""The figures of the codecs, drawn from what their claims yield: whole in both styles, with tables that say what the bars and lines do."""

import pytest

import kvtheory
from figures import codec_held_bits, kvquant_ablation, rotation_codecs
from figures import style as styles
from kvtheory import quantization
from proofs_checks.context import Context
from proofs_checks.quantizers import held, kvquant, polar


@pytest.fixture(scope="module")
def results():
    found = {
        ("layer 2", bits, stage): (0.1 + 0.01 * i + 1 / bits, bits + 0.5)
        for bits in (2, 3)
        for i, stage in enumerate(["all", *kvquant.WITHOUT, "Q-Norm"])
    }
    return {
        codec_held_bits: {"quantizers/held-bits": held._picture(Context(cache=kvtheory.sample_cache()))},
        rotation_codecs: {
            "quantizers/polar-distortion": polar._picture(
                Context(), quantization.mse_distortion, quantization.polar_distortion
            )
        },
        kvquant_ablation: {"quantizers/kvquant-stages": kvquant._picture(found)},
    }


@pytest.mark.parametrize("module", [codec_held_bits, rotation_codecs, kvquant_ablation], ids=lambda m: m.NAME)
@pytest.mark.parametrize("style", ["paper"])  # both: test_looks
def test_whole(results, module, style):
    with styles.using(style):
        figure = module.draw(results[module], style)
        figure.canvas.draw()
        assert all(ax.get_xlabel() or ax.get_title("left") for ax in figure.axes)
        styles.close(figure)
    header, rows = module.table(results[module])
    assert rows and all(len(row) == len(header) for row in rows)


def test_held_bits_are_claimed_ones_and_more(results):
    header, rows = codec_held_bits.table(results[codec_held_bits])
    for row in rows:
        named = dict(zip(header, row))
        assert named["held"] > named["claimed"]
        assert named["held"] == pytest.approx(sum(row[4:-1]))
        assert (named["state"] > 0) == (named["codec"] == "KVQuant")
    assert len(rows) == 2 * 6


def test_what_is_measured_is_what_was_predicted(results):
    """Within 5 %: the codecs are drawn at one seed, and all vectors under it share a sketch."""
    header, rows = rotation_codecs.table(results[rotation_codecs])
    for row in rows:
        named = dict(zip(header, row))
        assert named["measured"] == pytest.approx(named["predicted"], rel=0.05), row


def test_ratios_are_over_all_stages(results):
    header, rows = kvquant_ablation.table(results[kvquant_ablation])
    for row in rows:
        named = dict(zip(header, row))
        assert (named["over_all"] == 1) == (named["taken away"] == "all") and named["over_all"] >= 1
