"""Comparisons against kept tokens: shares are of what the bytes hold, ratios are at equal budget and at equal kept, an oracle is an oracle."""

import json
import math

import numpy as np
import pytest

import figures
import kvtheory
import reference
from kvtheory import attention, distortion
from reference import compare
from tests.sweep.test_compare import (  # noqa: F401
    HELD,
    PREFIX,
    SPLIT,
    by_hand,
    captured,
    command,
    file,
    here,
    rows_of,
    sources,
    table,
)

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")


def kept_table(codec, keep, kept, errors):
    """Rows of a codec whose one parameter is `keep`."""
    about = {"parameters": json.dumps({"keep": keep}), "kept": kept, "law": "prompt", "held_bits": 16 * kept}
    return table(codec, 1, errors, **about)


def test_kept_is_what_the_bytes_hold(file):  # noqa: F811
    codec = reference.MergeReduce(keep=0.3, reducer="refit", sinks=1, window=4, queries=32)
    rows = rows_of(compare.source(file), [codec, reference.ScissorHands(keep=0.5, window=4), reference.Full()])
    for index, layer in ((3, captured(3)), (7, captured(7, seed=1))):
        coded, _ = by_hand(layer)
        for one in (codec, reference.ScissorHands(keep=0.5, window=4)):
            shares = reference.decode(one.encode(coded)).kept / PREFIX
            assert (shares < 1).all()
            own = [r for r in rows if r["layer"] == index and r["codec"] == one.codec_id]
            for head in (0, 1):
                assert {r["kept"] for r in own if r["head"] == head} == {shares[head]}
            assert {r["kept"] for r in own if r["head"] is None} == {shares.mean()}
    assert {r["kept"] for r in rows if r["codec"] == "Full"} == {1.0} and {r["law"] for r in rows} == {"prompt"}
    (summary,) = compare.summarise(rows)
    assert [(p.keep, p.label) for p in summary.points][1:] == [
        (0.5, "ScissorHands(window=4)"),
        (None, "Full"),
    ]
    assert summary.points[0].kept == pytest.approx(
        np.mean([r["kept"] for r in rows if r["head"] is None and r["codec"] == "MergeReduce"])
    )


def test_an_oracle_is_given_the_queries_that_judge_it(file):  # noqa: F811
    source, codec = compare.source(file), reference.SnapKV(keep=0.25, sinks=1, window=4)
    tasks = compare.plan([source], [codec], split=SPLIT, law="held-out") + compare.plan([source], [codec], split=SPLIT)
    assert len({task.name for task in tasks}) == 4
    rows = [{**task.key, **r} for task in tasks for r in task.run(*task.arguments)]
    for index, layer in ((3, captured(3)), (7, captured(7, seed=1))):
        coded, judged = by_hand(layer)
        asked = coded.replace(queries=judged.queries, query_positions=None)
        errors = {}
        for law, one in (("held-out", asked), ("prompt", coded)):
            own = [r for r in rows if r["layer"] == index and r["head"] is None and r["law"] == law]
            errors[law] = sum(r["numerator"] for r in own) / sum(r["denominator"] for r in own)
            expected = distortion.attention_error(judged, codec.decode(codec.encode(one)))
            assert math.isclose(errors[law], expected, rel_tol=1e-9)
        assert errors["held-out"] != errors["prompt"]
    (summary,) = compare.summarise(rows)
    assert {p.label: p.law for p in summary.points} == {
        "SnapKV(sinks=1, window=4), oracle": "held-out",
        "SnapKV(sinks=1, window=4)": "prompt",
    }
    with pytest.raises(ValueError, match="law: expected one of prompt, held-out, got 'future'"):
        compare.plan([source], [codec], law="future")


def test_ratios_at_equal_budget_and_at_equal_kept():
    """A: error kept^-2, kept = budget. B: 3 kept^-2, but it keeps .8 of its budget: ratio 3 at equal kept, 3 / .64 at equal budget."""
    rows = []
    for keep in (0.5, 0.25, 0.1):
        rows += kept_table("A", keep, keep, {0: [keep**-2, keep**-2]})
        rows += kept_table("B", keep, 0.8 * keep, {0: [3 * (0.8 * keep) ** -2] * 2})
    (summary,) = compare.summarise(rows, draws=50)
    assert summary.curves().keys() == {"A", "B"}
    found = {
        (one.axis, one.held_bits, one.label): one for one in compare.at_equal_kept(summary, [0.5, 0.25, 0.3, 0.1], "A")
    }
    for share in (0.5, 0.3, 0.25, 0.1):
        one = found["budget", share, "B"]
        assert math.isclose(one.ratio.estimate, 3 / 0.64, rel_tol=1e-9) and one.ratio.low == pytest.approx(3 / 0.64)
    for share in (0.3, 0.25, 0.1):
        # a power of what is kept: interpolation in log2 is exact
        one = found["kept", share, "B"]
        assert math.isclose(one.error.estimate, 3 * share**-2, rel_tol=1e-9)
        assert math.isclose(one.ratio.estimate, 3, rel_tol=1e-9)
    assert found["kept", 0.5, "B"].error is None
    assert found["kept", 0.5, "B"].why == "was measured from 0.08 to 0.4 of the tokens kept"
    assert found["kept", 0.3, "B"].below[1] == pytest.approx(0.2) and found["budget", 0.3, "B"].above[1] == 0.5


def test_a_number_of_tokens_is_a_budget_too_and_codecs_without_one_have_no_place():
    rows = kept_table("A", 4, 0.5, {0: [1.0, 1.0]}) + kept_table("A", 80, 1.0, {0: [0.5, 0.5]})
    rows += table("B", 2, {0: [1.0, 2.0]}, kept=1.0, law="prompt")
    (summary,) = compare.summarise(rows, draws=50)
    from reference.compare.summary import place

    assert [place(p, "budget", summary.prefix) for p in summary.points] == [0.5, 1.0, None]
    assert [place(p, "kept", summary.prefix) for p in summary.points] == [0.5, 1.0, None]
    assert [place(p, "bits", summary.prefix) for p in summary.points] == [8.0, 16.0, 2.0]
    assert {one.label for one in compare.at_equal_kept(summary, [0.5])} == {"A"}
    with pytest.raises(ValueError, match="axis: expected one of bits, kept, budget"):
        compare.error_curves(summary, axis="tokens")


def test_rows_of_older_files_are_read():
    (summary,) = compare.summarise(table("A", 2, {0: [0.1, 0.3]}))
    (point,) = summary.points
    assert (point.keep, point.kept, point.law) == (None, None, "prompt")
    assert compare.picture(summary)["points"][0]["kept"] is None


def test_the_command(file, tmp_path, here):  # noqa: F811
    out = tmp_path / "out"
    options = ["--cache", file, "--codecs", "Full,StreamingLLM(keep=.5|.25,sinks=1),SnapKV(keep=.5|.25,window=4)"]
    code, said = command(
        *options, "--oracle", "SnapKV(keep=.25,window=4)", "--baseline", "StreamingLLM(sinks=1)", "--out", out, "--at-kept", ".5,.3", "--no-figures"
    )  # fmt: skip
    assert code == 0, said
    assert "StreamingLLM(sinks=1) - 50% 50.0% 8." in said and "SnapKV(window=4), oracle - 25% 25.0% 4." in said
    assert "at equal budget of tokens, and over that of StreamingLLM(sinks=1)" in said
    assert "StreamingLLM(sinks=1) at 0.3" not in said and "held bits, and over" not in said
    rows = json.loads((out / "equal-kept.json").read_text())
    assert {(r["measure"], r["axis"]) for r in rows} == {
        (m, a) for m in ("attention", "attention by head") for a in ("budget", "kept")
    }
    codecs = [reference.StreamingLLM(keep=0.5, sinks=1), reference.SnapKV(keep=0.5, window=4)]
    (summary,) = compare.summarise(rows_of(compare.source(file), codecs, split=compare.Split(PREFIX, HELD, 8)))
    ratio = summary.bootstrap.contrast(1, 0)
    (own,) = [
        r for r in rows
        if (r["measure"], r["axis"], r["target"], r["label"]) == ("attention", "budget", 0.5, "SnapKV(window=4)")
    ]  # fmt: skip
    assert own["ratio"] == pytest.approx(ratio.estimate, rel=1e-9)
    assert (own["ratio_low"], own["ratio_high"]) == pytest.approx((ratio.low, ratio.high), rel=1e-9)
    read = pyarrow.parquet.read_table(out / "equal-kept.parquet").to_pylist()
    assert [r["ratio"] for r in read] == [r["ratio"] for r in rows]
    (saved,) = [json.loads(p.read_text())["data"] for p in (out / "data" / "kept-pareto").glob("*.json")]
    assert [p["label"] for p in saved["points"]] == [
        "StreamingLLM(sinks=1)", "StreamingLLM(sinks=1)", "SnapKV(window=4)", "SnapKV(window=4)", "SnapKV(window=4), oracle",
    ]  # fmt: skip
    (drawn,) = figures.draw(out, names=["kept-pareto"], formats=("svg",))
    assert drawn.files[0].stat().st_size > 1000
    csv = (out / "figures" / "kept-pareto.csv").read_text().splitlines()
    assert len(csv) == 1 + 5 and csv[1].startswith("toy,noise,attention error,StreamingLLM(sinks=1),0.5,0.5,")
    # no baseline, nothing asked: no table at equal kept tokens, and what was there is removed
    code, said = command(*options, "--out", out, "--no-figures")
    assert code == 0 and not (out / "equal-kept.json").exists() and "oracle" not in said


def test_the_figure_has_all_three_panels(tmp_path):
    from matplotlib.figure import Figure

    from figures import kept_pareto

    point = {"label": "A", "budget": 0.5, "kept": 0.5, "error": 0.1, "low": 0.05, "high": 0.2, "held_bits": 8.0}
    key = {
        "label": "A",
        "budget": 0.5,
        "kept": 0.5,
        "held_bits": 8.0,
        "loss_bits": [3.0, -1.0, 7.0, 0.95],
        "question": "seen",
    }
    about = {"model": "m", "text": "t", "prefix": 8}
    drawn = kept_pareto.draw(
        {"x": {**about, "points": [point], "on_model": [{**point, "kept": 0.4}], "passkey": [key]}}, "paper"
    )
    assert isinstance(drawn, Figure)
    assert [axes.get_ylabel() for axes in drawn.axes] == [
        "attention error",
        "KL divergence, bits",
        "passkey, bits lost",
    ]
    _, rows = kept_pareto.table({"x": {**about, "points": [point], "on_model": [], "passkey": [key]}})
    assert [r[2] for r in rows] == ["attention error", "passkey bits lost"] and rows[1][-3:] == [3.0, -1.0, 7.0]
    alone = kept_pareto.draw({"x": {**about, "points": [point], "on_model": [], "passkey": []}}, "paper")
    assert [axes.get_ylabel() for axes in alone.axes] == ["attention error"]
    assert "kept-pareto" in figures.names()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--passkey", "2"], "passkey: expected --model"),
        (["--prefill", "half"], "prefill: expected one of plain, compressed, both"),
        (["--at-kept", "50"], "at-kept: expected shares of the tokens, at most 1, got 50"),
        (["--oracle", "Nothing"], "no codec 'Nothing'"),
        (["--oracle", "AATC"], "AATC is fitted to calibration data first"),
        (["--question", "odd"], "'odd'"),
    ],
)
def test_bad_options_are_said(arguments, said, tmp_path):
    code, output = command(*arguments, "--out", tmp_path / "out")
    assert code == 2 and said in output, output


# -- with a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a random model of two layers with a tokenizer of single characters."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as parts

    from tests.models import tiny

    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    made = Tokenizer(parts.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("model")
    tiny.llama().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def its_source(model, tmp_path_factory):
    from kvtheory import models

    _, loaded = models.load(model)
    path = tmp_path_factory.mktemp("cache") / "cache.safetensors"
    models.capture(loaded, None, np.random.default_rng(0).integers(3, 90, PREFIX + HELD)).save(path)
    return compare.source(path)


CODECS = (reference.Full(), reference.SnapKV(keep=0.25, sinks=1, window=4))


def test_compressed_prefill_is_a_run_of_its_own(model, its_source):
    from kvtheory import Cache, models
    from kvtheory.cli import on_model
    from kvtheory.models.runner import Runner

    tasks = on_model.plan(its_source, model, CODECS, None, SPLIT, (None, 24))
    assert len({task.name for task in tasks}) == 4
    rows = [{**task.key, **row} for task in tasks for row in task.run(*task.arguments)]
    on = on_model.summarise(rows)[its_source.id, PREFIX]
    label = "SnapKV(sinks=1, window=4)"
    assert [p.label for p in on.points] == ["Full", label, "Full, prefill by 24", f"{label}, prefill by 24"]
    full, plain, full_chunked, chunked = on.points
    assert full.kl_bits.estimate < 1e-3 * plain.kl_bits.estimate > 1e3 * full_chunked.kl_bits.estimate
    assert plain.kept == chunked.kept == 0.25 and (plain.keep, chunked.prefill) == (0.25, 24)

    # by hand
    runner, tokens = Runner(models.load(model)[1]), Cache.load(its_source.path).tokens

    def compress(index, layer):
        return CODECS[1].reduce(
            layer.replace(keys=layer.keys.astype(np.float16), values=layer.values.astype(np.float16))
        )

    expected = runner.evaluate(tokens, PREFIX, runner.compressed_prefill(tokens[:PREFIX], 24, compress))
    assert chunked.kl_bits.estimate == pytest.approx(expected.mean_kl_bits, rel=1e-9)
    assert chunked.kl_bits.estimate != pytest.approx(plain.kl_bits.estimate, rel=1e-3)
    found = on.at_equal_kept([0.25], PREFIX, label)
    ratios = {(o.measure, o.axis): o.ratio.estimate for o in found if o.label.endswith("window=4), prefill by 24")}
    assert ratios["kl", "budget"] == pytest.approx(chunked.kl_bits.estimate / plain.kl_bits.estimate)
    assert set(ratios) == {(m, a) for m in ("kl", "perplexity") for a in ("budget", "kept")}


def test_a_codec_of_all_layers_has_no_compressed_prefill(its_source, model):
    from dataclasses import dataclass

    from kvtheory.cli import find_key, on_model

    @dataclass(frozen=True)
    class Whole(reference.Full):
        scope = "cache"
        register = False

    with pytest.raises(ValueError, match="codes all layers together"):
        on_model.plan(its_source, model, [Whole()], None, SPLIT, (16,))
    with pytest.raises(ValueError, match="codes all layers together"):
        find_key.plan(its_source, model, [Whole()], None, SPLIT, find_key.Samples(1, 200, 0, "seen"), (16,))


FILLER = "It is so. They came late! Was he there? Nobody had seen the dog. Rain fell all day."


@pytest.mark.parametrize("question", ["seen", "unseen"])
def test_passkey_is_the_runner_s_and_paired(question, model, its_source, monkeypatch):
    from io import StringIO

    from rich.console import Console

    from kvtheory.cli import find_key
    from kvtheory.cli import printed as program
    from kvtheory.models import capture, passkey, texts

    monkeypatch.setattr(texts, "text", lambda name: FILLER)
    find_key._asked.cache_clear()
    samples = find_key.Samples(3, 200, 1, question)
    codecs = (*CODECS, reference.StreamingLLM(keep=0.25, sinks=1))
    tasks = find_key.plan(its_source, model, codecs, None, SPLIT, samples, (None, 64))
    rows = [{**task.key, **row} for task in tasks for row in task.run(*task.arguments)]
    assert len(rows) == 18 and [r["sample"] for r in rows] == [0] * 6 + [1] * 6 + [2] * 6

    runner = find_key._runner(model)
    for number in range(3):
        asked = passkey.ask(runner, number, tokens=200, seed=1, question=question)
        decoded = [
            CODECS[1].reduce(layer.replace(keys=layer.keys.astype(np.float16), values=layer.values.astype(np.float16)))
            for layer in capture(runner.model, None, asked.fed[: asked.prefix])
        ]
        right, log2_p = passkey.score(runner, asked, decoded)
        (own,) = [r for r in rows if r["sample"] == number and r["codec"] == "SnapKV" and r["prefill"] is None]
        assert (own["key"], own["right"], own["coded"]) == (asked.key, right, asked.prefix)
        assert own["log2_p"] == pytest.approx(log2_p, rel=1e-9) and own["log2_p"] != own["full_log2_p"]
    exact = [r for r in rows if r["codec"] == "Full" and r["prefill"] is None]
    assert [r["log2_p"] for r in exact] == pytest.approx([r["full_log2_p"] for r in exact], abs=0.05)

    found = find_key.summarise(rows, baseline=("StreamingLLM", codecs[2].parameters))
    snap, chunked = (f for f in found if f.codec == "SnapKV")
    mine, base, full = (
        np.array([r[c] for r in rows if r["codec"] == n and r["prefill"] is None])
        for n, c in (("SnapKV", "log2_p"), ("StreamingLLM", "log2_p"), ("SnapKV", "full_log2_p"))
    )
    assert snap.gain_bits.estimate == pytest.approx((mine - base).mean())
    assert (
        snap.loss_bits.estimate == pytest.approx((full - mine).mean()) and snap.loss_bits.low < snap.loss_bits.estimate
    )
    assert (snap.samples, snap.kept, chunked.label) == (
        3,
        pytest.approx(0.25, abs=0.01),
        f"{snap.label}, prefill by 64",
    )
    assert next(f for f in found if f.codec == "StreamingLLM").gain_bits is None
    assert next(f for f in found if f.codec == "Full").gain_bits is None  # no `keep` of its own to compare at

    written = StringIO()
    program.passkey_table(Console(file=written, width=300), found)
    assert f"passkey, 3 samples, question {question}: the full cache finds" in written.getvalue()
    assert "the full cache misses" in written.getvalue()  # a random model finds nothing


def test_the_tables_are_documented(tmp_path):
    from importlib import resources

    from kvtheory.cli.find_key import PASSKEY_COLUMNS

    documented = (resources.files("kvtheory") / ".." / "docs" / "compare.md").read_text(encoding="utf-8")
    for name in [*PASSKEY_COLUMNS, *compare.EQUAL_KEPT_COLUMNS]:
        assert f"`{name}`" in documented, name


def test_the_question_is_not_among_what_is_coded(model, monkeypatch):
    from kvtheory.cli import find_key
    from kvtheory.models import passkey

    runner = find_key._runner(model)
    for number in range(3):
        seen, unseen = (passkey.ask(runner, number, tokens=220, filler=FILLER, question=q) for q in passkey.QUESTIONS)
        np.testing.assert_array_equal(seen.fed, unseen.fed)
        np.testing.assert_array_equal(seen.targets, unseen.targets)
        coded, behind = (runner.tokenizer.decode(part) for part in np.split(unseen.fed, [unseen.prefix]))
        assert behind.startswith("What is the pass key? The pass key is") and f"{seen.key} is the pass key." in coded
        assert "What is the pass key" not in coded
        assert passkey.score(runner, seen, None)[1] == pytest.approx(passkey.score(runner, unseen, None)[1], abs=1e-2)
    with pytest.raises(ValueError, match="question: expected one of seen, unseen"):
        passkey.ask(runner, 0, tokens=220, filler=FILLER, question="later")


def test_attention_of_weighted_ragged_summaries_is_theirs(file):  # noqa: F811
    """The error of a reducer's rows is that of kvtheory.attention on what its bytes hold: weights and all."""
    codec = reference.MergeReduce(keep=0.25, reducer="random", sinks=1, window=4)
    rows = [r for r in rows_of(compare.source(file), [codec]) if r["head"] is None and r["layer"] == 3]
    coded, judged = by_hand(captured(3))
    decoded = kvtheory.Decoded(
        **{n: getattr(codec.reduce(coded), n) for n in ("keys", "values", "log_weights", "positions", "kept")}
    )
    wrong = true = 0.0
    for h in range(judged.query_heads):
        kv, n = h // judged.group, decoded.kept[h // judged.group]
        parts = [
            attention.attend(judged.queries[h : h + 1], k, v, scale=judged.scale, log_weights=w)[0]
            @ judged.projection(h)
            for k, v, w in (
                (judged.keys[kv : kv + 1], judged.values[kv : kv + 1], None),
                (decoded.keys[kv : kv + 1, :n], decoded.values[kv : kv + 1, :n], decoded.log_weights[kv : kv + 1, :n]),
            )
        ]
        true, wrong = true + parts[0], wrong + parts[1] - parts[0]
    error = sum(r["numerator"] for r in rows) / sum(r["denominator"] for r in rows)
    assert math.isclose(error, (wrong**2).sum() / (true**2).sum(), rel_tol=1e-6)
