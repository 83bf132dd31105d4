"""Fitted codecs in comparisons: what a spec means, fitted once to another work, small tasks, and codecs at equal held bits."""

import json
import math
import pickle
import re

import numpy as np
import pytest

import figures
import reference
from kvtheory import Cache
from kvtheory.cli import on_model
from kvtheory.statistics import bootstrap_ratios, expanded_percentiles
from reference import compare
from reference.compare import fitted
from reference.compare.equal_rate import at_rates, row
from reference.compare.specs import options_at
from reference.compare.summary import labels
from tests.sweep.test_compare import (  # noqa: F401  (fixtures)
    NUMBERS,
    SPLIT,
    Here,
    by_hand,
    captured,
    command,
    here,
    rows_of,
    sources,
    table,
    toys,
)

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

AATC = "AATC(window=0, protected=0)"
WORDS = np.random.default_rng(0).integers(0, 50_000, 400)


def write(path, layers=None, text="hamlet", model="toy", tokens=WORDS[:96]):
    layers = layers or [captured(3, seed=5), captured(7, seed=6)]
    Cache(layers, tokens=tokens, meta={"model": model, "text": text}).save(path)
    return path


@pytest.fixture
def tested(tmp_path):
    return write(tmp_path / "test.safetensors", [captured(3), captured(7, seed=1)])


@pytest.fixture
def other(tmp_path):
    return write(tmp_path / "other.safetensors", text="emma", tokens=WORDS[200:296])


# -- specs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Full, TurboQuant,Full", [("Full", {}), ("TurboQuant", {})]),
        ("TurboQuant(rotation=haar,bits=2)", [("TurboQuant", {"rotation": "haar", "bits": 2})]),
        ("MetricKLT( joint = none , jensen=true, shrinkage=1e-3)", [("MetricKLT", {"joint": "none", "jensen": True, "shrinkage": 1e-3})]),
        ("AATC(value_bits=None,weights='variance')", [("AATC", {"value_bits": None, "weights": "variance"})]),
        ("PolarQuant(level_bits=(3,2,)),Full()", [("PolarQuant", {"level_bits": (3, 2)}), ("Full", {})]),
        ("TurboQuant(kind=mse|\"prod\",bits=2|3)", [("TurboQuant", {"kind": k, "bits": b}) for k in ("mse", "prod") for b in (2, 3)]),
        ("", []),
    ],
)  # fmt: skip
def test_what_a_spec_means(text, found):
    own = compare.specs(text)
    assert [(spec.name, dict(spec.options)) for spec in own] == found
    assert [type(v) for s in own for v in s.options.values()] == [type(v) for _, o in found for v in o.values()]
    # what is printed is read back
    assert compare.specs(",".join(map(str, own))) == own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Nothing(a=1)", "no codec 'Nothing'; there are "),
        ("AATC(head=1)", "AATC has no option 'head'; there are bits, value_bits"),
        ("AATC(layers=1)", "AATC has no option 'layers'"),
        ("AATC(window=0,window=1)", "option 'window' twice"),
        ("AATC(window)", "expected '=' at ')'"),
        ("AATC(window=0", "expected ',' at the end"),
        ("AATC(window=0)x", "expected ',' at 'x'"),
        ("AATC(window=)", "expected a value at ')'"),
        ("AATC(window=__import__('os').getpid())", "expected ',' at"),
        (",Full", "expected a codec's name at ',Full'"),
        ("Full,'", "expected a codec's name at"),
    ],
)
def test_what_is_no_spec(text, said):
    with pytest.raises(ValueError, match=r"^codecs: ") as problem:
        compare.specs(text)
    assert said in str(problem.value)


def test_rates_and_seeds_go_where_a_codec_takes_them():
    full, turbo, fixed, klt = compare.specs("Full,TurboQuant,TurboQuant(bits=4),MetricKLT")
    assert options_at(full, [2, 3], [0]) == [{}]
    assert options_at(turbo, [2], [0, 1]) == [{"bits": 2, "seed": 0}, {"bits": 2, "seed": 1}]
    assert options_at(fixed, [2, 3], [0]) == [{"seed": 0, "bits": 4}]
    assert options_at(klt, [1.5, 2], [0, 1]) == [{"bits": 1.5}, {"bits": 2}]
    assert [s.fitted for s in (full, turbo, fixed, klt)] == [False, False, False, True]
    with pytest.raises(ValueError, match="bits: MetricKLT needs at least one"):
        options_at(klt, [], [0])


def test_labels_say_what_is_not_the_default():
    rows = [
        ("AATC", json.dumps(reference.AATC(bits, **options).parameters), "")
        for bits, options in ((2, {}), (3, {}), (2, {"window": 0, "weights": "variance"}))
    ]
    assert labels(rows) == ["AATC", "AATC", "AATC(weights=variance, window=0)"]
    polar = reference.PolarQuant(level_bits=(3, 2))
    assert labels([("PolarQuant", json.dumps(polar.parameters), "")]) == ["PolarQuant(level_bits=(3, 2))"]


# -- fitting -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fits(monkeypatch):
    """What is fitted, as it happens: codec, options, rates."""
    calls, true = [], fitted._fit
    monkeypatch.setattr(fitted, "_fit", lambda *arguments: (calls.append(arguments[:3]), true(*arguments))[1])
    return calls


def test_a_codec_is_fitted_once_and_its_tasks_are_small(tested, other, tmp_path, fits):
    its = compare.calibration(other)
    found = compare.fit([AATC, "MetricKLT"], [2, 3], its, tmp_path / "states")
    assert [(f.codec_id, f.bits) for f in found] == [("AATC", 2), ("AATC", 3), ("MetricKLT", 2), ("MetricKLT", 3)]
    assert [(name, rates) for name, _, rates in fits] == [("AATC", [2, 3]), ("MetricKLT", [2, 3])]
    layers = list(Cache.load(other))
    for codec, whole in zip(
        found,
        [reference.AATC.fit(layers, bits=b, window=0, protected=0) for b in (2, 3)]
        + reference.MetricKLT.fit_rates(layers, [2, 3]),
    ):
        assert (codec.state_bytes, codec.calibration) == (whole.state_bytes, f"emma, 96 tokens, {its.source.id}")
        assert codec.parameters == json.loads(json.dumps(whole.parameters))
        # cut to a layer it writes streams of the same length that decode to the same
        for index, layer in ((3, captured(3)), (7, captured(7, seed=1))):
            coded = by_hand(layer)[0]
            stream = whole.encode(coded)
            (one,) = compare.tasks.through_bytes(codec.only([index]), [coded])
            assert one.stream_bytes == len(stream)
            decoded = reference.decode(stream, whole.state)
            assert np.array_equal(one.decoded.keys, decoded.keys) and np.array_equal(one.decoded.values, decoded.values)
        with pytest.raises(ValueError, match="was not fitted to a layer of index 4"):
            codec.of(4)
    tasks = compare.plan([compare.source(tested)], found, split=SPLIT)
    assert len(tasks) == 8 and max(len(pickle.dumps(t.arguments)) for t in tasks) < 2000 < found[0].state_bytes
    assert tasks[0].key["state"] == found[0].state and tasks[0].key["calibration"] == found[0].calibration

    fits.clear()
    again = compare.fit([AATC, "MetricKLT"], [3, 2, 4], its, tmp_path / "states")
    assert [rates for *_, rates in fits] == [[4], [4]]
    assert again[1] == found[0] and [f.state for f in again[:2]] == [f.state for f in found[1::-1]]
    compare.fit([AATC], [2], its, tmp_path / "states", layers=[3])  # bits go over all layers: another set, another fit
    assert len(fits) == 3


def test_what_is_not_finished_is_fitted_again_and_what_was_changed_is_refused(other, tmp_path, fits):
    its = compare.calibration(other)
    with pytest.raises(KeyboardInterrupt):
        compare.fit([AATC, "MetricKLT"], [2], its, tmp_path, pool=Here(stop=1))
    compare.fit([AATC, "MetricKLT"], [2], its, tmp_path, pool=Here())
    assert [name for name, *_ in fits] == ["AATC", "MetricKLT"]
    (codec,) = compare.fit([AATC], [2], its, tmp_path)
    assert len(fits) == 2 and not list(tmp_path.rglob(".*"))
    folder = next(p for p in tmp_path.iterdir() if p.name.startswith("AATC-"))
    (folder / "about.json").unlink()  # written last: without it nothing is finished
    assert compare.fit([AATC], [2], its, tmp_path) == [codec] and len(fits) == 3
    path = folder / "layer-3.state"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match=r"layer-3\.state is not the file that was written"):
        codec.of(3)


def test_a_calibration_may_be_cut_short(other, tmp_path):
    its = compare.calibration(other, tokens=40)
    (codec,) = compare.fit(AATC, [2], its, tmp_path)
    cut = [
        layer.replace(
            keys=layer.keys[:, :40], values=layer.values[:, :40], positions=np.arange(40), queries=layer.queries[:, :40],
            query_positions=np.arange(40),
        ) for layer in Cache.load(other)
    ]  # fmt: skip
    assert codec.state_bytes == reference.AATC.fit(cut, bits=2, window=0, protected=0).state_bytes
    whole = reference.AATC.fit(cut, bits=2, window=0, protected=0)
    assert codec.of(3).state == fitted._by_layer(whole)[3].state and "40 tokens" in codec.calibration
    with pytest.raises(ValueError, match="expected 1 to 96 tokens"):
        compare.calibration(other, tokens=97)


def test_a_state_that_is_no_tuple_by_layer_is_one_file(tested, other, tmp_path, toys):  # noqa: F811
    (codec,) = compare.fit("Mean", [1], compare.calibration(other), tmp_path)
    assert list(codec.files) == ["all"] and [p.name for p in tmp_path.rglob("*.state")] == ["whole.state"]
    rows = rows_of(compare.source(tested), [codec])
    assert {r["state_bytes"] for r in rows} == {codec.of(3).state_bytes} and len({r["held_bits"] for r in rows}) == 1
    summary = compare.summarise(rows)[0].points[0]
    assert math.isclose(summary.amortised_bits, summary.held_bits + 8 * codec.state_bytes / (2 * NUMBERS))


def test_the_codec_that_refused_is_named(other, tmp_path):
    for pool in (None, Here()):
        with pytest.raises(ValueError, match=r"codecs: MetricKLT\(coding=fixed\): bits: expected "):
            compare.fit("MetricKLT(coding=fixed)", [12], compare.calibration(other), tmp_path, pool=pool)
    with pytest.raises(ValueError, match=r"AATC\(window=-1\): window: expected"):
        compare.fit("AATC(window=-1)", [2], compare.calibration(other), tmp_path)
    assert not list(tmp_path.glob("*.json"))


# -- another work, the same model --------------------------------------------------------------------------------------


def test_a_calibration_on_the_same_work_is_refused(tested, tmp_path):
    one = compare.source(tested)

    def refused(**options):
        path = write(tmp_path / "calibration.safetensors", **options)
        with pytest.raises(ValueError, match="is the same work as the test text hamlet") as problem:
            compare.usable(one, compare.calibration(path), [3, 7])
        return str(problem.value)

    refused(tokens=WORDS[200:296])  # the name of the text
    assert "64 tokens in a row" in refused(text="renamed", tokens=WORDS[20:116])
    assert "64 tokens in a row" in refused(text="renamed", tokens=np.r_[WORDS[300:340], WORDS[32:96]])
    with pytest.raises(ValueError, match="is the same work"):
        compare.usable(one, compare.calibration(tested), [3])

    def passes(captures=None, **options):
        compare.usable(
            one, compare.calibration(write(tmp_path / "calibration.safetensors", captures, **options)), [3, 7]
        )

    passes(text="emma", tokens=np.r_[WORDS[300:333], WORDS[33:96]])  # 63 in a row may be a quotation
    with pytest.raises(ValueError, match="expected a cache of toy, got one of tiny in"):
        passes(text="emma", tokens=WORDS[200:296], model="tiny")
    with pytest.raises(ValueError, match="has no layer 7"):
        passes(captures=[captured(3, seed=5)], text="emma", tokens=WORDS[200:296])
    with pytest.raises(ValueError, match="the embedded sample is a test text"):
        compare.calibration("sample")


# -- equal rates -------------------------------------------------------------------------------------------------------


def noisy(codec, bits, scale, seed, held=None):
    """Rows of two layers of one KV head with errors of scale 4^-bits, and denominators of their own."""
    draw = np.random.default_rng(seed)
    rows = table(codec, bits, {k: (scale * 4.0**-bits * draw.lognormal(size=8)).tolist() for k in (0, 1)})
    return [{**r, "held_bits": held or float(bits), "denominator": 1 + r["segment"]} for r in rows]


def test_equal_rates_by_hand():
    rows = [
        *noisy("A", 2, 1.0, 0, held=2.2), *noisy("A", 3, 1.0, 1, held=3.4), *noisy("B", 1, 2.0, 2), *noisy("B", 2, 2.0, 3), *noisy("B", 4, 2.0, 4),
    ]  # fmt: skip
    (summary,) = compare.summarise(rows, draws=400, seed=9)
    over, under = np.empty((5, 2, 8)), np.empty((5, 2, 8))
    for i, (codec, bits) in enumerate((("A", 2), ("A", 3), ("B", 1), ("B", 2), ("B", 4))):
        for r in rows:
            if (r["codec"], r["bits"], r["head"]) == (codec, bits, None):
                over[i, r["layer"], r["segment"]], under[i, r["layer"], r["segment"]] = r["numerator"], r["denominator"]
    boot = bootstrap_ratios(over, under, 0.95, seed=9, draws=400)

    def mix(logs):  # A at 2.8 between 2.2 and 3.4, B between 2 and 4
        return np.log2(np.exp(1)) * (0.5 * logs[0] + 0.5 * logs[1]), np.log2(np.exp(1)) * (
            0.6 * logs[3] + 0.4 * logs[4]
        )

    a, b = mix(boot.log_estimates)
    draws_a, draws_b = mix(boot.log_replicates)
    ratio = [2 ** (b - a), *(2**x for x in expanded_percentiles(draws_b - draws_a, 8, 0.95))]

    for over_what in ("layers", "heads"):
        own = at_rates(compare.error_curves(summary, over_what), [2.8, 4, 1.5], "attention", 8, 0.95, "A")
        at = {(e.label, e.held_bits): e for e in own}
        assert math.isclose(at["A", 2.8].error.estimate, 2**a, rel_tol=1e-12)
        assert math.isclose(at["B", 2.8].error.estimate, 2**b, rel_tol=1e-12)
        assert np.allclose(
            [at["B", 2.8].ratio.estimate, at["B", 2.8].ratio.low, at["B", 2.8].ratio.high], ratio, rtol=1e-12
        )
        assert (at["B", 2.8].below, at["B", 2.8].above) == ((2.0, 2.0), (4.0, 4.0))
        assert (at["A", 2.8].below, at["A", 2.8].above) == ((2.0, 2.2), (3.0, 3.4))
        assert at["A", 2.8].ratio[:3] == (1, 1, 1)
        # nothing is extrapolated
        assert at["A", 4].error is None and at["A", 4].why == "was measured from 2.2 to 3.4 bits per number"
        assert (
            at["B", 4].ratio is None and at["B", 4].error is not None and at["B", 4].why.startswith("A: was measured")
        )
    with pytest.raises(ValueError, match='over: expected "layers" or "heads"'):
        compare.error_curves(summary, "tokens")


def test_equal_rates_name_a_baseline_by_its_spec(tested):
    codecs = compare.codecs_at("TurboQuant(rotation=hadamard|haar),Full", [2, 3, 5])
    (summary,) = compare.summarise(rows_of(compare.source(tested), codecs))
    found = {e.label: e for e in compare.at_equal_rate(summary, 3.5, baseline="TurboQuant(rotation=haar)")}
    assert list(found) == ["TurboQuant", "TurboQuant(rotation=haar)", "Full"]
    assert found["TurboQuant"].baseline == "TurboQuant(rotation=haar)" and found["TurboQuant"].ratio.low > 0
    log, _ = compare.at_held_bits(summary, "TurboQuant", 3.5)
    assert math.isclose(found["TurboQuant"].error.estimate, 2**log)
    assert re.fullmatch(r"was measured at 1\d\.\d+ only, bits per number", found["Full"].why)
    for spec, said in (
        ("Full,QJL", "expected one codec"),
        ("QJL", "is not among the codecs compared: TurboQuant, TurboQuant"),
    ):
        with pytest.raises(ValueError, match=said):
            compare.at_equal_rate(summary, 3, baseline=spec)


def test_a_baseline_whose_parameters_fit_chose_is_found(tested, other, tmp_path, here):  # noqa: F811
    """Without Fisher information PALU becomes PALU(search=energy)."""
    its = compare.calibration(other)
    rows = rows_of(compare.source(tested), compare.fit("PALU,PALU(ratio=.5)", [2, 4], its, tmp_path / "states"))
    (summary,) = compare.summarise(rows)
    assert list(summary.curves()) == ["PALU(search=energy)", "PALU(ratio=0.5, search=energy)"]
    held = 0.5 * sum(p.held_bits for p in summary.points[2:])
    (_, half) = compare.at_equal_rate(summary, held, baseline="PALU(ratio=.5)")
    assert half.baseline == "PALU(ratio=0.5, search=energy)" and half.ratio.estimate == 1
    with pytest.raises(ValueError, match="PALU is not among the codecs compared"):  # either may be meant
        compare.at_equal_rate(summary, held, baseline="PALU")
    # the command knows which was made from which
    options = [
        "--cache",
        tested,
        "--calibration",
        other,
        "--codecs",
        "PALU,PALU(ratio=.5)",
        "--bits",
        "2,4",
        "--at",
        held,
    ]
    code, said = command(*options, "--baseline", "PALU", "--no-figures", "--out", tmp_path / "out")
    assert code == 0 and "and over that of PALU(search=energy)" in said, said


def test_an_error_of_zero_has_no_logarithm():
    rows = [*noisy("A", 2, 1.0, 0), *noisy("A", 3, 1.0, 1), *noisy("Z", 2, 0.0, 0), *noisy("Z", 3, 0.0, 1)]
    (summary,) = compare.summarise(rows, draws=50)
    zero = {e.label: e for e in compare.at_equal_rate(summary, [2.5])}["Z"]
    assert zero.error is None and zero.why == "has an error of 0 there, which has no logarithm"


def test_the_table_on_disk(tmp_path):
    rows = [*noisy("A", 2, 1.0, 0), *noisy("A", 3, 1.0, 1), *noisy("B", 2, 1.0, 0), *noisy("B", 4, 1.0, 1)]
    (summary,) = compare.summarise(rows, draws=50)
    own = at_rates(compare.error_curves(summary), [2.5, 3.5], "attention", 8, 0.95, "A")
    about = {"model": "m", "text": "t", "cache": "c", "prefix": 8, "layers": "0,1"}
    parquet, text = compare.write_equal_rates(tmp_path, [row(e, about) for e in own])
    kept = pyarrow.parquet.read_table(parquet)
    assert kept.schema.names == list(compare.EQUAL_RATE_COLUMNS) and kept.to_pylist() == json.loads(text.read_text())
    first = kept.to_pylist()[1]
    assert (first["label"], first["target_bits"], first["below_bits"], first["above_bits"]) == ("B", 2.5, 2, 4)
    assert first["ratio"] == own[1].ratio.estimate and kept.to_pylist()[2]["error"] is None


def test_the_models_own_numbers_at_equal_rates():
    def run(codec, bits, kl, surprisal):
        return [
            {
                "cache": "c", "prefix": 8, "codec": codec, "parameters": json.dumps({"bits": bits}), "state": "", "bits": bits, "segment": s,
                "positions": 4, "kl_bits": 4 * kl, "agree": 3, "predicted": 4, "plain_surprisal_bits": 8.0, "surprisal_bits": 4 * surprisal,
                "stream_bytes": 25, "held_bits": float(bits), "state_bytes": 50,
            } for s in range(4)
        ]  # fmt: skip

    rows = [*run("A", 2, 0.4, 3.0), *run("A", 4, 0.1, 2.0), *run("B", 2, 0.2, 2.5), *run("B", 4, 0.05, 2.5)]
    found = on_model.summarise(rows)["c", 8]
    assert [p.label for p in found.points] == ["A", "A", "B", "B"]
    assert found.points[0].amortised_bits == 2 + 8 * 50 / (8 * 25 / 2) and math.isclose(found.points[0].perplexity, 8)
    kl_a, kl_b, ppl_a, ppl_b = found.at_equal_rate([3])
    assert (kl_a.measure, ppl_a.measure) == ("kl", "perplexity")
    assert math.isclose(kl_a.error.estimate, 0.2) and math.isclose(kl_b.error.estimate, 0.1)
    # the mean surprisal is linear: 2.5 bits of both
    assert math.isclose(ppl_a.error.estimate, 2**2.5) and math.isclose(ppl_b.error.estimate, 2**2.5)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_fits_resumes_and_compares_at_equal_rates(tested, other, tmp_path, here, fits, monkeypatch):  # noqa: F811
    out = tmp_path / "out"
    options = [
        "--cache",
        tested,
        "--calibration",
        other,
        "--codecs",
        f"{AATC},MetricKLT,TurboQuant(bits=2|3)",
        "--bits",
        "2,4",
    ]
    options += ["--baseline", AATC, "--at", "4,4.5,5,9", "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "plan", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        code, said = command(*options)
    assert code == 130 and [name for name, *_ in fits] == ["AATC", "MetricKLT"], said
    code, said = command(*options)
    assert code == 0 and len(fits) == 2, said
    assert "12 tasks" in said and "at equal held bits, and over that of AATC(protected=0, window=0)" in said
    assert "MetricKLT at 9: was measured from" in said and "nothing is extrapolated" in said
    rows = pyarrow.parquet.read_table(out / "results.parquet").to_pylist()
    assert {r["calibration"] for r in rows if r["codec"] == "AATC"} == {f"emma, 96 tokens, {compare.source(other).id}"}
    assert {r["calibration"] for r in rows if r["codec"] == "TurboQuant"} == {""}
    (summary,) = compare.summarise(rows)
    expected = {(e.label, e.held_bits): e for e in compare.at_equal_rate(summary, [4, 4.5, 5, 9], AATC)}
    kept = json.loads((out / "equal-rate.json").read_text())
    assert {r["measure"] for r in kept} == {"attention", "attention by head"} and len(kept) == 2 * 3 * 4
    for r in kept[:12]:
        e = expected[r["label"], r["target_bits"]]
        assert (r["error"], r["ratio"]) == (e.error and e.error.estimate, e.ratio and e.ratio.estimate)
        assert r["why"] == e.why
    assert any(r["ratio"] and r["label"] == "MetricKLT" for r in kept)
    timed = pyarrow.parquet.read_table(out / "timings.parquet").to_pylist()
    assert sorted(r["codec"] for r in timed if r["task"] == "fit") == ["AATC"] * 2 + ["MetricKLT"] * 2

    # pictures from saved results alone: the ratios of the table, the errors of the points
    header, *lines = [line.split(",") for line in (out / "figures" / "ablation.csv").read_text().splitlines() if line]
    ratios = {r["ratio"] for r in kept if r["ratio"] is not None and r["label"] != r["baseline"]}
    assert header[0] == "model" and len(lines) == len(
        [r for r in kept if r["ratio"] is not None and r["label"] != r["baseline"]]
    )
    assert all(any(str(ratio) in line for line in lines) for ratio in ratios)
    saved = json.loads(next((out / "data" / "transform-pareto").glob("*.json")).read_text())["data"]
    assert [c["label"] for c in saved["curves"]] == ["AATC(protected=0, window=0)", "MetricKLT", "TurboQuant"]
    errors = [p.error.estimate for p in summary.points]
    assert np.allclose([p["estimate"] for c in saved["curves"] for p in c["error"]], errors, rtol=1e-12)
    middle = saved["curves"][1]["ratio"]
    assert middle and middle[0]["low"] <= middle[0]["estimate"] <= middle[0]["high"]
    for name in ("transform-pareto", "ablation"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 1000
    # without a baseline: no ratios, no picture of them, and no table of the run before
    code, said = command(*options[:6], "--bits", "2", "--out", out, "--no-figures")
    assert code == 0 and "and over that of" not in said and len(fits) == 2
    assert not (out / "data" / "ablation").exists()
    saved = json.loads(next((out / "data" / "transform-pareto").glob("*.json")).read_text())["data"]
    assert saved["baseline"] is None and [c["label"] for c in saved["curves"]] == [
        "TurboQuant"
    ]  # the others have one rate
    figures.draw(out, formats=("svg",))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "codecs that are fitted need --calibration"),
        (
            ("--calibration", "emma"),
            "no captured cache at 'emma': for --cache it is a file of `kvtheory capture` of toy on another work",
        ),
        (("--calibration", "sample"), "the embedded sample is a test text"),
        (("--calibration", "TESTED"), "is the same work as the test text hamlet"),
        (("--calibration", "OTHER", "--calibration", "OTHER"), "expected one for toy, got"),
        (("--calibration", "TINY"), "expected a cache of toy, got"),
        (("--calibration", "OTHER", "--baseline", "AATC"), "baseline: AATC is not among the codecs: MetricKLT"),
        (("--calibration", "OTHER", "--baseline", "AATC,Full"), "baseline: expected one codec"),
        (("--calibration", "OTHER", "--at", "2,x"), "at: expected numbers, got 'x'"),
        (("--calibration", "OTHER", "--at", "-1"), "at: expected numbers above 0"),
        (("--calibration", "OTHER", "--calibration-tokens", "97"), "expected 1 to 96 tokens"),
        (("--calibration", "OTHER", "--layers", "5"), "toy has no layer 5; there are 3, 7"),
        (("--model", "smol", "--calibration", "absent"), "no file 'absent' and no text of that name"),
    ],
)
def test_what_is_wrong_with_a_calibration_is_said(arguments, said, tested, other, tmp_path, here, monkeypatch):  # noqa: F811
    from kvtheory.cli import captured as program

    tiny = write(tmp_path / "tiny.safetensors", text="emma", tokens=WORDS[200:296], model="tiny")
    paths = {"TESTED": tested, "OTHER": other, "TINY": tiny}
    source = [] if "--model" in arguments else ["--cache", tested]
    if "--model" in arguments:  # the test text is captured, the calibration is not
        true = program.captured
        monkeypatch.setattr(
            program, "captured", lambda c, o, m, words, n: tested if words.id == "hamlet" else true(c, o, m, words, n)
        )
    code, output = command(
        *source, "--codecs", "MetricKLT", *(paths.get(a, a) for a in arguments), "--out", tmp_path / "out"
    )
    assert code == 2 and said in output, output
    assert not (tmp_path / "out" / "tasks").exists()
