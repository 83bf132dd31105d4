"""Compositions: fitted last stages, what they are fitted to, the choice on another text, gains and their product."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import figures
import reference
from kvtheory import Rope, synthetic
from reference import compare
from reference.compare import frontier
from reference.compare.seen import as_seen
from reference.rotary import rotary
from tests.sweep.test_calibrated import other, tested  # noqa: F401  (fixtures)
from tests.sweep.test_compare import SPLIT, by_hand, captured, command, here, sources, table  # noqa: F401

pytest.importorskip("pyarrow")

CHAIN = "SnapKV(keep=.5, window=4, sinks=1) > MetricKLT(joint=head)"
FRONT = reference.SnapKV(keep=0.5, window=4, sinks=1)


# -- what a last stage is fitted to ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), keep=st.integers(8, 30), turned=st.booleans())
def test_each_head_is_seen_with_its_own_tokens_where_they_stood(seed, keep, turned):
    rope = Rope(1.0 / 100.0 ** (np.arange(4) / 4)) if turned else None
    layer = synthetic.make("attention_sink", kv_heads=2, query_heads=4, tokens=32, head_dim=8, queries=32, seed=seed)
    layer = layer.replace(rope=rope, query_positions=np.arange(32), positions=np.arange(32) + 5 * (np.arange(32) > 9))
    front = reference.SnapKV(keep=keep, window=4, sinks=1)
    seen = as_seen([front], layer)
    places = front.places(layer)
    assert seen.tokens == keep and (np.diff(seen.positions) > 0).all() and seen.queries is layer.queries
    for h, own in enumerate(places):
        assert np.array_equal(seen.values[h], layer.values[h, own])
        keys, left = layer.keys[h, own], seen.keys[h]
        if rope is not None:  # without their rotations they are the same
            keys = rotary(rope).undo(keys, layer.positions[own])
            left = rotary(rope).undo(left, seen.positions)
        assert np.allclose(left, keys, rtol=0, atol=1e-13 * np.abs(layer.keys).max())
    if all(np.array_equal(places[0], one) for one in places):
        assert np.array_equal(seen.positions, layer.positions[places[0]])
    else:
        # as near as can be to where the tokens stood: no row is further from their mean than rows were moved apart
        mean = np.mean([layer.positions[own] for own in places], axis=0)
        assert (np.abs(seen.positions - mean) <= 0.5 + len(mean)).all() and (seen.positions >= np.floor(mean)).all()


def test_without_a_stage_the_layer_is_what_it_was():
    layer = captured(3)
    assert as_seen([], layer) is layer


def test_a_chain_is_fitted_to_what_it_will_code_once_for_all_rates(tested, other, tmp_path):  # noqa: F811
    its = compare.calibration(other)
    found = compare.fit(CHAIN, [2, 3], its, tmp_path / "states")
    layers = [as_seen([FRONT], captured(index, seed=seed)) for index, seed in ((3, 5), (7, 6))]
    for codec, last in zip(found, reference.MetricKLT.fit_rates(layers, [2, 3], joint="head"), strict=True):
        whole = reference.Pipeline([FRONT, last])
        assert (codec.state_bytes, codec.scope, codec.bits) == (len(whole.state), "layer", last.bits)
        assert "queries" in codec.needs
        for index, layer in ((3, captured(3)), (7, captured(7, seed=1))):
            coded = by_hand(layer)[0]
            stream = whole.encode(coded)
            (one,) = compare.tasks.through_bytes(codec.only([index]), [coded])
            decoded = reference.decode(stream, whole.state)
            assert one.stream_bytes == len(stream)
            assert np.array_equal(one.decoded.keys, decoded.keys) and np.array_equal(
                one.decoded.positions, decoded.positions
            )
    tasks = compare.plan([compare.source(tested)], found, split=SPLIT)
    said = json.loads(tasks[0].key["parameters"])
    assert said == {"stages": "SnapKV(keep=0.5, sinks=1, window=4) > MetricKLT(joint=head)", "bits": 2.0}
    # another reducer is another state, though MetricKLT's options are the same
    (more,) = compare.fit("SnapKV(keep=.25, window=4, sinks=1) > MetricKLT(joint=head)", [2], its, tmp_path / "states")
    assert more.state != found[0].state
    # and a change of the reducer's code is another version of its tasks
    assert compare.versions.of_codec(found[0]) != compare.versions.of_modules("reference.metric_klt")


def test_only_the_last_stage_is_fitted(other, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="only the last one may be fitted to calibration data, MetricKLT is stage 1"):
        compare.fit("MetricKLT > SnapKV(keep=.5)", [2], compare.calibration(other), tmp_path)


# -- the choice --------------------------------------------------------------------------------------------------------


def summary_of(errors, **about):
    """errors: (codec, stages of a chain) -> error at 1 bit, which falls by 4 a bit; segments differ."""
    rows = []
    for (codec, stages), at_1 in errors.items():
        said = {"stages": stages} if stages else {}
        for bits in (1, 2, 3):
            own = table(codec, bits, {0: [0.5 * at_1 * 4.0 ** (1 - bits), 1.5 * at_1 * 4.0 ** (1 - bits)]}, **about)
            rows += [{**r, "parameters": json.dumps({**said, "bits": bits}), "kept": 0.5} for r in own]
    (summary,) = compare.summarise(rows, draws=200)
    return summary


PAPER, OTHER, OURS = ("TurboQuant", ""), ("KIVI", ""), ("MetricKLT", "")
REDUCED, JOINT = (("Pipeline", f"SnapKV(keep=0.5) > {last}") for last in ("TurboQuant", "MetricKLT"))


def test_the_winner_is_not_chosen_on_the_test():
    first = summary_of({PAPER: 0.8, OTHER: 0.4, OURS: 0.1, JOINT: 0.05}, text="a", cache="a")
    judged = summary_of({PAPER: 0.2, OTHER: 0.6, OURS: 0.1, JOINT: 0.3}, text="b", cache="b")
    own = {c.kind: c for c in frontier.choose(first, judged, [1.5])}
    assert (
        list(own) == ["composition", "own", "paper"] and own["paper"].label == "KIVI" and own["paper"].candidates == 2
    )
    assert own["paper"].best == "TurboQuant" and own["paper"].regret.estimate == pytest.approx(3)
    assert own["paper"].error.estimate == pytest.approx(0.6 / 2) and own["paper"].chosen_error == pytest.approx(0.2)
    # both curves have the same segments: a paired ratio has no width
    assert own["own"].against["paper"] == pytest.approx((1 / 6, 1 / 6, 1 / 6, 0.95))
    assert own["composition"].against["own"].estimate == pytest.approx(3)
    assert own["own"].error.low < own["own"].error.estimate < own["own"].error.high
    # outside what was measured there is nothing to choose
    assert frontier.choose(first, judged, [3.5]) == []


def test_each_layer_takes_what_is_best_for_it_on_the_other_text():
    first = [summary_of({OURS: own, JOINT: its}, text="a", cache="a") for own, its in ((0.2, 0.4), (0.8, 0.1))]
    judged = [summary_of({OURS: own, JOINT: its}, text="b", cache="b") for own, its in ((0.2, 0.1), (0.8, 0.1))]
    own = {c.kind: c for c in frontier.choose(first[0], judged[0], [2], (first[:1], judged[:1]))}
    assert (own["layerwise"].label, own["layerwise"].best) == ("0: MetricKLT", "0: SnapKV(keep=0.5) > MetricKLT")
    assert own["layerwise"].regret.estimate == pytest.approx(2)
    both = [dataclasses.replace(one, layers=(0, 1)) for one in (first[0], judged[0])]
    (mixed, *_) = frontier.choose(*both, [2], (first, judged))
    assert mixed.label == "0: MetricKLT; 1: SnapKV(keep=0.5) > MetricKLT" and mixed.kind == "layerwise"
    # geometric means over layers, of errors at 2 bits
    assert mixed.error.estimate == pytest.approx(math.sqrt(0.2 * 0.1) / 4)
    assert mixed.chosen_error == pytest.approx(math.sqrt(0.2 * 0.1) / 4)
    assert mixed.regret.estimate == pytest.approx(math.sqrt(2)) and mixed.candidates == 2


def test_what_cannot_be_a_choice_is_refused():
    one = summary_of({PAPER: 0.8}, text="a", cache="a")
    with pytest.raises(ValueError, match="judged: expected another text than what is chosen on, a"):
        frontier.choose(one, one, [2])
    with pytest.raises(ValueError, match="judged: expected the same model as what is chosen on, m, got n"):
        frontier.choose(one, summary_of({PAPER: 0.8}, text="b", cache="b", model="n"), [2])


@given(errors=st.tuples(*[st.floats(1e-6, 2.0)] * 4), rate=st.floats(1.0, 3.0))
def test_gains_are_ratios_at_one_rate_and_excess_is_what_they_do_not_multiply_to(errors, rate):
    base, reduced, coder, joint = errors
    summary = summary_of({PAPER: base, REDUCED: reduced, OURS: coder, JOINT: joint})
    (gain,) = frontier.gains(summary, [rate], "TurboQuant")
    assert (gain.joint_label, gain.coder) == ("SnapKV(keep=0.5) > MetricKLT", "MetricKLT")
    assert math.isclose(gain.reduction.estimate, base / reduced, rel_tol=1e-9)
    assert math.isclose(gain.coding.estimate, base / coder, rel_tol=1e-9)
    assert math.isclose(gain.product.estimate, base / reduced * base / coder, rel_tol=1e-9)
    assert math.isclose(gain.joint.estimate, base / joint, rel_tol=1e-9)
    assert math.isclose(gain.excess.estimate, reduced * coder / (base * joint), rel_tol=1e-9)
    # paired: what all curves share has no width
    assert math.isclose(gain.excess.low, gain.excess.high, rel_tol=1e-9)


def test_gains_need_all_four_curves():
    summary = summary_of({PAPER: 0.8, OURS: 0.1, JOINT: 0.05})
    assert frontier.gains(summary, [2], "TurboQuant") == []
    with pytest.raises(ValueError, match="base: no curve 'KIVI'; there are TurboQuant, MetricKLT"):
        frontier.gains(summary, [2], "KIVI")


def test_a_chain_stands_beside_its_parts_at_one_nominal_rate():
    rows = []
    for codec, said, error in (
        ("SnapKV", {"keep": 0.5}, {0: [0.1, 0.1], 1: [0.3, 0.3]}),
        ("TurboQuant", {"bits": 2}, {0: [0.2, 0.2], 1: [0.2, 0.2]}),
        ("Pipeline", {"stages": "SnapKV(keep=0.5) > TurboQuant", "bits": 2}, {0: [0.3, 0.3], 1: [0.75, 0.75]}),
    ):
        bits = said.get("bits")
        held = {"SnapKV": 8.0, "TurboQuant": 2.25, "Pipeline": 1.2}[codec]
        own = table(codec, bits or 8, error, held_bits=held, kept=1.0 if codec == "TurboQuant" else 0.5)
        rows += [{**r, "parameters": json.dumps(said), "bits": bits} for r in own]
    (summary,) = compare.summarise(rows, draws=50)
    (one,) = frontier.parts(summary)
    assert (one.least, one.most) == pytest.approx((1.0, 1.5)) and one.ratio == pytest.approx(math.sqrt(1.5))
    assert (one.kept, one.rate, one.held) == (0.5, 2.25, 1.2)
    assert one.reduction_error == pytest.approx(math.sqrt(0.03)) and one.coder_error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (("Pipeline", {}), "composition"), (("MetricKLT", {}), "own"), (("KVTC", {}), "paper"),
        (("MergeReduce", {"reducer": "refit-values"}), "own"), (("MergeReduce", {"reducer": "cluster"}), "paper"),
    ],
)  # fmt: skip
def test_whose_a_codec_is(said, kind):
    assert frontier.kind_of(*said) == kind


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_chooses_on_one_cache_and_judges_on_the_other(tmp_path, tested, here):  # noqa: F811
    from tests.sweep.test_calibrated import WORDS, write

    first = write(
        tmp_path / "first.safetensors", [captured(3, seed=8), captured(7, seed=9)], "persuasion", tokens=WORDS[300:396]
    )
    out = tmp_path / "out"
    options = [
        "--cache",
        tested,
        "--cache",
        first,
        "--codecs",
        "TurboQuant,SnapKV(keep=.5,window=4),SnapKV(keep=.5,window=4) > TurboQuant",
    ]
    options += ["--bits", "1,2,3,4", "--at", "3,9", "--baseline", "TurboQuant", "--out", out]
    code, said = command(*options, "--choose", "persuasion", "--no-figures")
    assert code == 0 and "toy on hamlet: attention error of the codec chosen on persuasion among its kind" in said, said
    assert "at 9 held bits" in said and "none was measured on both sides of it on both texts" in said
    (found,) = json.loads((out / "composition.json").read_text())
    assert found["about"]["text"] == "hamlet" and found["about"]["chosen_on"] == "persuasion"
    assert {c["held_bits"] for c in found["choices"]} == {3.0} and found["choices"][0]["label"].startswith("3: ")
    assert len(found["parts"]) == 4
    (drawn,) = figures.draw(out, names=["composition"], formats=("svg",))
    header, *rows = drawn.files[1].read_text().splitlines()
    assert [p.suffix for p in drawn.files] == [".svg", ".csv", ".txt"] and len(rows) == len(found["choices"])
    assert header.startswith("model,text,chosen_on,row,held_bits,kind,label")
    # without it what was there is removed
    assert command(*options, "--no-figures")[0] == 0
    assert not (out / "composition.json").exists() and not (out / "data" / "composition").exists()
    code, said = command(*options, "--choose", "emma")
    assert (
        code == 2
        and "choose: expected one of the texts or caches that are read, hamlet, persuasion, got 'emma'" in said
    )
    code, said = command("--cache", tested, "--choose", "hamlet", "--out", tmp_path / "x")
    assert code == 2 and "choose: expected hamlet once, and another text, of toy, got 1 in all" in said
