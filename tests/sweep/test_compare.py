"""Comparisons: real bytes, held-out queries, the same results after an interruption, and what is said when something is missing."""

import hashlib
import importlib.metadata
import json
import math
import os
import re
import sys
import zlib
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from typer.testing import CliRunner

import figures
import kvtheory
import reference
from kvtheory import Cache, distortion, sweep, synthetic
from kvtheory.cli import app
from reference import compare
from reference.codec import Codec
from reference.shape import Shape

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

TOKENS, PREFIX, HELD, SEGMENTS = 96, 64, 32, 4
SPLIT = compare.Split(PREFIX, HELD, SEGMENTS, "float16")
#: 2 KV heads of 16 + 24 channels: keys alone, or square heads, would show
NUMBERS = 2 * PREFIX * (16 + 24)


def captured(index, seed=0):
    layer = synthetic.make(
        "attention_sink",
        kv_heads=2,
        query_heads=4,
        tokens=TOKENS,
        head_dim=16,
        value_dim=24,
        model_dim=40,
        queries=TOKENS,
        seed=seed,
    )
    return layer.replace(
        keys=layer.keys.astype(np.float32), values=layer.values.astype(np.float32), queries=layer.queries.astype(np.float32),
        query_positions=np.arange(TOKENS), index=index,
    )  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cache.safetensors"
    Cache([captured(3), captured(7, seed=1)], meta={"model": "toy", "text": "noise"}).save(path)
    return path


class Here:
    """An executor in this process that is interrupted when it has run `stop` tasks."""

    def __init__(self, stop=None):
        self.stop, self.calls = stop, 0

    def submit(self, function, *arguments):
        if self.calls == self.stop:
            raise KeyboardInterrupt
        self.calls += 1
        future = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as problem:
            future.set_exception(problem)
        return future


def done(tasks, tmp):
    return sweep.run(tasks, Here(), tmp, same={})


def rows_of(source, codecs, split=SPLIT, layers=None):
    return [
        {**task.key, **row}
        for task in compare.plan([source], codecs, split=split, layers=layers)
        for row in task.run(*task.arguments)
    ]


def by_hand(layer):
    """The prefix as a codec gets it, and the layer that judges, written without `compare.divide`."""
    coded = kvtheory.Layer(
        layer.keys[:, :PREFIX].astype(np.float16), layer.values[:, :PREFIX].astype(np.float16), layer.queries[:, :PREFIX],
        layer.output_proj, index=layer.index, query_positions=np.arange(PREFIX),
    )  # fmt: skip
    judged = kvtheory.Layer(
        layer.keys[:, :PREFIX], layer.values[:, :PREFIX], layer.queries[:, PREFIX:], layer.output_proj
    )
    return coded, judged


# -- what is measured --------------------------------------------------------------------------------------------------


def test_rates_are_those_of_the_bytes_and_errors_are_the_unit(file):
    source = compare.source(file)
    assert (source.model, source.text, source.tokens, list(source.layers)) == ("toy", "noise", TOKENS, [3, 7])
    assert source.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    rows = rows_of(source, compare.codecs_at(["Full", "TurboQuant"], [2, 4], seeds=(5,)))
    assert len(rows) == 3 * 2 * 3 * SEGMENTS
    for index, layer in ((3, captured(3)), (7, captured(7, seed=1))):
        coded, judged = by_hand(layer)
        for codec in (reference.Full(), reference.TurboQuant(bits=2, seed=5), reference.TurboQuant(bits=4, seed=5)):
            stream = codec.encode(coded)
            own = [
                r
                for r in rows
                if r["layer"] == index
                and r["codec"] == codec.codec_id
                and r["bits"] in (None, getattr(codec, "bits", None))
            ]
            assert {r["stream_bytes"] for r in own} == {len(stream)}
            assert {r["decode_flops"] for r in own} == {codec.decode_flops(stream)}
            assert {r["numbers"] for r in own} == {r["stream_numbers"] for r in own} == {NUMBERS}
            assert {r["held_bits"] for r in own} == {8 * len(stream) / NUMBERS} == {reference.held_bits(stream, coded)}
            # scales and header are in it: a nominal rate would be less
            assert own[0]["held_bits"] > (16 if codec.codec_id == "Full" else codec.bits + 16 * 2 / 40)
            decoded = codec.decode(stream)
            for part in (None, 0, 1):
                one = [r for r in own if r["head"] == part]
                assert [r["segment"] for r in one] == list(range(SEGMENTS)) and [r["queries"] for r in one] == [
                    8
                ] * SEGMENTS
                error = sum(r["numerator"] for r in one) / sum(r["denominator"] for r in one)
                if part is None:
                    expected = distortion.attention_error(judged, decoded)
                else:
                    expected = distortion.attention_error(judged, decoded, by="kv_head")[part]
                assert math.isclose(error, expected, rel_tol=1e-9), (index, codec, part)


def test_one_segment_by_brute_force(file):
    """Every held-out query over the whole prefix and nothing else, W_O by head, written out once more."""
    rows = [r for r in rows_of(compare.source(file), [reference.TurboQuant(bits=3)], layers=[3]) if r["head"] is None]
    layer = captured(3)
    coded, _ = by_hand(layer)
    back = reference.decode(reference.TurboQuant(bits=3).encode(coded))
    over = under = 0.0
    for j in range(PREFIX + 16, PREFIX + 24):  # segment 2
        outputs = []
        for k, v in ((layer.keys[:, :PREFIX], layer.values[:, :PREFIX]), (back.keys, back.values)):
            out = 0.0
            for h in range(4):
                z = k[h // 2].astype(float) @ layer.queries[h, j].astype(float) / 4.0
                a = np.exp(z - z.max())
                out = out + (a / a.sum()) @ v[h // 2].astype(float) @ layer.output_proj[h]
            outputs.append(out)
        over += ((outputs[1] - outputs[0]) ** 2).sum()
        under += (outputs[0] ** 2).sum()
    assert math.isclose(rows[2]["numerator"], over, rel_tol=1e-9)
    assert math.isclose(rows[2]["denominator"], under, rel_tol=1e-9)


def test_what_comes_after_the_prefix_is_seen_by_nobody(tmp_path):
    """Other tokens after the prefix change no row, other held-out queries change no byte."""
    found = []
    for k, q in ((0, 0), (9, 0), (0, 9)):
        layer = captured(3)
        keys, queries = layer.keys.copy(), layer.queries.copy()
        keys[:, PREFIX:] += k
        queries[:, PREFIX:] += q
        path = tmp_path / f"{k}{q}.safetensors"
        Cache([layer.replace(keys=keys, queries=queries)]).save(path)
        found.append([{**r, "cache": ""} for r in rows_of(compare.source(path), [reference.TurboQuant(bits=3)])])
    assert found[0] == found[1]
    assert [r["stream_bytes"] for r in found[0]] == [r["stream_bytes"] for r in found[2]]
    assert [r["numerator"] for r in found[0]] != [r["numerator"] for r in found[2]]


def test_divide_gives_a_codec_the_prefix_and_its_own_queries_only():
    order = np.random.default_rng(0).permutation(TOKENS)  # queries in any order
    layer = captured(3)
    layer = layer.replace(
        queries=layer.queries[:, order], query_positions=order,
        extras={"inputs": np.ones((TOKENS, 40)), "key_fisher": np.ones((2, 16)), "key_weight": np.ones((2, 16, 40))},
    )  # fmt: skip
    coded, judged = compare.divide(layer, SPLIT)
    assert (
        coded.tokens == judged.tokens == PREFIX and coded.keys.dtype == np.float16 and judged.keys.dtype == np.float32
    )
    assert coded.query_positions.tolist() == list(range(PREFIX)) and judged.query_positions is None
    assert np.array_equal(judged.queries, captured(3).queries[:, PREFIX:])
    assert set(coded.extras) == {"inputs", "key_weight"} and coded.extras["inputs"].shape == (PREFIX, 40)
    shorter = compare.Split(1024, 512).within(384)
    assert (shorter.prefix, shorter.held, shorter.segments) == (256, 128, 8)
    assert compare.Split(1024, 512).within(1536) == compare.Split(1024, 512)
    with pytest.raises(ValueError, match=r"keys: expected finite numbers, got -inf at .head 0, token 0"):
        compare.divide(layer.replace(keys=layer.keys * 1e6), SPLIT)
    assert (
        compare.divide(layer.replace(keys=layer.keys * 1e6), replace(SPLIT, dtype="bfloat16"))[0].keys.dtype.name
        == "bfloat16"
    )


# -- codecs still to come ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean(Codec):
    """Calibrated: keys and values become the means found by `fit`, which are its state."""

    bits: int = 1
    means: bytes = field(default=b"", metadata={"state": True})
    part_names = ("shape",)

    @classmethod
    def fit(cls, calibration, bits=1):
        means = [np.stack([x.astype(np.float64).mean((0, 1)) for x in (layer.keys,)]) for layer in calibration]
        return cls(bits, np.mean(means, axis=0).astype("<f8").tobytes())

    def state_parts(self):
        return [self.means] if self.means else []

    @classmethod
    def from_state(cls, arguments, parts):
        return cls(**arguments, means=bytes(parts[0].rest()))

    def encode_parts(self, data):
        return [Shape.of(data).write()]

    def decode_parts(self, parts):
        shape = Shape.read(parts[0])
        mean = np.frombuffer(self.means, "<f8")
        keys = np.broadcast_to(mean, (shape.kv_heads, shape.tokens, shape.head_dim)).astype(shape.key_dtype)
        return shape.decoded(keys, np.zeros((shape.kv_heads, shape.tokens, shape.value_dim), shape.value_dtype))


@dataclass(frozen=True)
class Together(Codec):
    """Layers coded together: DEFLATE over all of them, lossless."""

    scope = "cache"
    part_names = ("blob",)

    def encode_parts(self, data):
        return [zlib.compress(b"".join(len(s).to_bytes(8, "little") + s for s in map(reference.Full().encode, data)))]

    def decode_parts(self, parts):
        blob, out = zlib.decompress(bytes(parts[0].rest())), []
        while blob:
            size = int.from_bytes(blob[:8], "little")
            out.append(reference.decode(blob[8 : 8 + size]))
            blob = blob[8 + size :]
        return out


@dataclass(frozen=True)
class Needy(Codec):
    needs = frozenset({"extras:key_fisher"})
    part_names = ("shape",)

    def encode_parts(self, data):
        raise AssertionError

    decode_parts = encode_parts


@pytest.fixture
def toys(monkeypatch):
    from reference import codec

    for toy in (Mean, Together, Needy):
        monkeypatch.setitem(codec._registered, toy.codec_id, toy)


def test_a_fitted_codec_has_its_state_beside_the_rate(file, toys, tmp_path):
    codec = Mean.fit([captured(0, seed=4)])
    assert codec.state_bytes > 128
    tasks = compare.plan([compare.source(file)], [codec, Mean.fit([captured(0, seed=5)])], split=SPLIT)
    rows, timings = done(tasks, tmp=tmp_path)
    compare.write(tmp_path, rows, timings)
    table = pyarrow.parquet.read_table(tmp_path / "results.parquet").to_pylist()
    # once for both layers of the table
    expected = table[0]["held_bits"] + 8 * codec.state_bytes / (2 * NUMBERS)
    assert all(math.isclose(r["amortised_bits"], expected, rel_tol=1e-12) for r in table)
    assert all(
        r["state_bytes"] == codec.state_bytes and r["held_bits"] == 8 * r["stream_bytes"] / NUMBERS for r in table
    )
    (summary,) = compare.summarise(rows)
    assert len(summary.curves()) == 2 and all(label.startswith("Mean(state=") for label in summary.curves())
    assert math.isclose(summary.points[0].amortised_bits, expected, rel_tol=1e-12)
    with pytest.raises(ValueError, match="Mean is fitted to calibration data first"):
        compare.codecs_at(["Mean"], [1])


def test_a_codec_of_all_layers_is_one_task_with_one_rate(file, toys, tmp_path):
    tasks = compare.plan([compare.source(file)], [Together(), reference.Full()], split=SPLIT)
    assert [(t.key["codec"], t.key["layers"]) for t in tasks] == [("Full", "3"), ("Full", "7"), ("Together", "3,7")]
    rows, timings = done(tasks, tmp=tmp_path)
    compare.write(tmp_path, rows, timings)
    together = [r for r in rows if r["codec"] == "Together"]
    stream = Together().encode([by_hand(captured(3))[0], by_hand(captured(7, seed=1))[0]])
    assert {r["held_bits"] for r in together} == {8 * len(stream) / (2 * NUMBERS)} and {
        r["layer"] for r in together
    } == {3, 7}
    assert [r["numerator"] for r in together] == [r["numerator"] for r in rows if r["codec"] == "Full"]
    (summary,) = compare.summarise(rows)
    held = {p.codec: p.held_bits for p in summary.points}
    assert held["Together"] == 8 * len(stream) / (2 * NUMBERS)


# -- interruption ------------------------------------------------------------------------------------------------------


def test_interrupted_and_resumed_is_the_same_file(file, tmp_path):
    tasks = compare.plan([compare.source(file)], compare.codecs_at(["Full", "TurboQuant"], [2, 3]), split=SPLIT)
    whole = compare.write(tmp_path / "a", *sweep.run(tasks, Here(), tmp_path / "a", same={}))[0]
    with pytest.raises(KeyboardInterrupt):
        sweep.run(tasks, Here(stop=2), tmp_path / "b", same={})
    # what was submitted before the interruption may be lost; run two, then the rest
    sweep.run(tasks[:2], Here(), tmp_path / "b", same={})
    rest = Here()
    again = compare.write(tmp_path / "b", *sweep.run(tasks, rest, tmp_path / "b", same={}))[0]
    assert rest.calls == len(tasks) - 2
    assert whole.read_bytes() == again.read_bytes()
    with sweep.executor(2) as processes:
        parallel = compare.write(tmp_path / "c", *sweep.run(tasks, processes, tmp_path / "c", same={}))[0]
    assert parallel.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.rglob(".*"))


def test_the_tables_are_what_the_schema_says(file, tmp_path):
    tasks = compare.plan([compare.source(file)], compare.codecs_at(["Full", "TurboQuant"], [2]), split=SPLIT)
    results, timings = compare.write(tmp_path, *done(tasks, tmp=tmp_path))
    for path, columns in ((results, compare.COLUMNS), (timings, compare.TIMING_COLUMNS)):
        table = pyarrow.parquet.read_table(path)
        assert table.schema.names == list(columns)
        for column in table.schema:
            kind, nullable, meaning = columns[column.name]
            assert (column.type, column.nullable) == (pyarrow.type_for_alias(kind), nullable)
            assert column.metadata[b"meaning"].decode() == meaning
            assert nullable or table[column.name].null_count == 0
    facts = pyarrow.parquet.read_table(timings).to_pylist()
    assert len(facts) == len(tasks) and all(r["seconds"] > 0 and r["cores"] > 0 and r["cpu"] for r in facts)
    assert json.loads(facts[0]["versions"])["numpy"] == importlib.metadata.version("numpy")
    # nothing of one machine or one run in the results
    assert not {"seconds", "cpu", "cores", "versions"} & set(compare.COLUMNS)
    from kvtheory.cli.on_model import MODEL_COLUMNS

    documented = (importlib.resources.files("kvtheory") / ".." / "docs" / "compare.md").read_text(encoding="utf-8")
    for name in [*compare.COLUMNS, *compare.TIMING_COLUMNS, *MODEL_COLUMNS, *compare.EQUAL_RATE_COLUMNS]:
        assert f"`{name}`" in documented, name


def test_without_pyarrow_it_says_which_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"kvtheory\[sweep\]"):
        compare.write(tmp_path, [], [])
    said = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "x")])
    assert said.exit_code == 1 and "kvtheory[sweep]" in said.output and not (tmp_path / "x").exists()


# -- what the rows say -------------------------------------------------------------------------------------------------


def row(codec, bits, layer, segment, numerator, denominator=1.0, head=None, seed=None, **changes):
    parameters = {"bits": bits} | ({} if seed is None else {"seed": seed})
    return {
        "model": "m", "text": "t", "cache": "c", "prefix": 8, "held": 4, "dtype": "float16", "codec": codec, "state": "",
        "parameters": json.dumps(parameters), "bits": bits, "seed": seed, "layer": layer, "head": head, "segment": segment,
        "queries": 2, "numerator": numerator, "denominator": denominator, "numbers": 100, "stream_bytes": 25, "stream_numbers": 100,
        "held_bits": float(bits), "state_bytes": 0, "window": None, **changes,
    }  # fmt: skip


def table(codec, bits, errors, seeds=(None,), **changes):
    """errors: layer -> (one number a segment), for the layer and its one KV head."""
    return [
        row(codec, bits, layer, s, error * (1 + (seed or 0)), head=head, seed=seed, **changes)
        for seed in seeds for layer, own in errors.items() for head in (None, 0) for s, error in enumerate(own)
    ]  # fmt: skip


def test_a_summary_is_the_geometric_mean_over_layers_of_ratios_of_sums():
    errors = {0: [0.1, 0.3], 1: [0.4, 0.4]}
    rows = (
        table("A", 2, errors)
        + table("A", 3, {k: [x / 4 for x in v] for k, v in errors.items()})
        + table("B", 2, errors, (0, 1))
    )
    (summary,) = compare.summarise(rows, draws=200)
    a2, a3, b2 = summary.points
    assert math.isclose(a2.error.estimate, math.sqrt(0.2 * 0.4)) and math.isclose(
        a3.error.estimate, a2.error.estimate / 4
    )
    assert math.isclose(a2.head_error.estimate, a2.error.estimate) and a2.by_layer == pytest.approx({0: 0.2, 1: 0.4})
    # two seeds, the second with twice the error: sqrt(2) more
    assert math.isclose(b2.error.estimate, a2.error.estimate * math.sqrt(2)) and b2.bits == 2
    assert summary.curves() == {"A": [0, 1], "B": [2]} and (summary.queries, summary.segments) == (4, 2)
    assert summary.bootstrap.contrast(1, 0).low == pytest.approx(0.25)
    with pytest.raises(ValueError, match="was not measured on all of layer 1"):
        compare.summarise(rows + table("C", 2, {0: [0.1, 0.1]}))


def test_log2_error_is_interpolated_at_equal_held_bits_and_never_extrapolated():
    rows = [r for b in (2, 3, 5) for r in table("A", b, {0: [2.0 * 4.0**-b, 2.0 * 4.0**-b]})]
    (summary,) = compare.summarise(rows, draws=50)
    for held in (2, 2.5, 3, 4.25, 5):
        estimate, replicates = compare.at_held_bits(summary, "A", held)
        assert math.isclose(estimate, 1 - 2 * held) and np.allclose(replicates, estimate)
    for held in (1.9, 5.1):
        with pytest.raises(ValueError, match="was measured from 2 to 5 bits"):
            compare.at_held_bits(summary, "A", held)
    with pytest.raises(ValueError, match="no curve 'B'"):
        compare.at_held_bits(summary, "B", 3)


def test_intervals_of_codecs_are_paired_through_the_whole_way(file):
    """TurboQuant against itself with twice the error everywhere: the ratio has no width."""
    rows = rows_of(compare.source(file), [reference.TurboQuant(bits=3)])
    double = [{**r, "codec": "Twice", "numerator": 2 * r["numerator"]} for r in rows]
    (summary,) = compare.summarise(rows + double)
    contrast = summary.bootstrap.contrast(1, 0)
    assert contrast.low == pytest.approx(2, rel=1e-12) and contrast.high == pytest.approx(2, rel=1e-12)
    assert summary.points[0].error.high > 1.02 * summary.points[0].error.low


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_plans_that_cannot_be_are_refused(file, tmp_path, toys):
    source = compare.source(file)
    with pytest.raises(ValueError, match="toy has no layer 5; there are 3, 7"):
        compare.plan([source], [reference.Full()], layers=[5], split=SPLIT)
    with pytest.raises(ValueError, match="toy, layer 3: extras:key_fisher: Needy needs it"):
        compare.plan([source], [Needy()], split=SPLIT)
    with pytest.raises(ValueError, match="at least one of each"):
        compare.plan([source], [])
    twice = compare.plan([source], [reference.Full(), reference.Full()], split=SPLIT)
    with pytest.raises(ValueError, match="two are equal"):
        sweep.run(twice, Here(), tmp_path, same={})
    path = tmp_path / "bare.safetensors"
    Cache([captured(0).replace(queries=None, query_positions=None)]).save(path)
    with pytest.raises(ValueError, match="unnamed, layer 0: queries: compare needs it"):
        compare.plan([compare.source(path)], [reference.Full()], split=SPLIT)
    few = captured(0)
    Cache([few.replace(queries=few.queries[:, -3:], query_positions=few.query_positions[-3:])]).save(path)
    with pytest.raises(ValueError, match="queries: expected at least 4 at positions 64 to 95, got 3"):
        compare.plan([compare.source(path)], [reference.Full()], split=SPLIT)
    Cache([]).save(path)
    with pytest.raises(ValueError, match="has no layers"):
        compare.source(path)
    Cache([captured(1), captured(1)]).save(path)
    with pytest.raises(ValueError, match=r"two layers of .* have index 1"):
        compare.source(path)
    with pytest.raises(ValueError, match="prefix: expected at least 1, got 0"):
        compare.Split(prefix=0)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        compare.Split(dtype="int8")
    with pytest.raises(ValueError, match=r"codecs: TurboQuant\(bits=2.5, seed=0\): bits: expected an int"):
        compare.codecs_at(["TurboQuant"], [2.5])
    with pytest.raises(ValueError, match="bits: TurboQuant needs at least one"):
        compare.codecs_at(["Full", "TurboQuant"])


# -- the command -------------------------------------------------------------------------------------------------------


def command(*arguments):
    found = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return found.exit_code, re.sub(r"[\s│]+", " ", found.output)


@pytest.fixture
def sources(monkeypatch):
    """Sources that stay the same while the tests run, whoever edits them."""
    monkeypatch.setattr(compare.versions, "of_modules", lambda *names: "these")


@pytest.fixture
def here(monkeypatch, sources):
    """The command's tasks run in this process; `here.stop` interrupts."""
    pool = Here()

    @contextmanager
    def executor(jobs=1, scheduler=None):
        pool.calls = 0
        yield pool

    monkeypatch.setattr(sweep, "executor", executor)
    return pool


def test_the_command_on_the_sample_cache_interrupted_and_resumed(tmp_path, here):
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = ["--cache", "sample", "--codecs", "Full,TurboQuant", "--bits", "2,3"]
    assert command(*options, "--out", whole, "--no-figures")[0] == 0
    assert not (whole / "figures").exists()

    finished = sweep.run

    def interrupted(tasks, pool, folder, **more):
        finished(tasks[:2], pool, folder, **more)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "run", interrupted)
        code, said = command(*options, "--out", out)
    assert code == 130 and f"2 finished tasks are kept in {out}, the same command continues" in said
    code, said = command(*options, "--out", out)
    assert code == 0 and "6 tasks, 2 finished before" in said, said
    assert here.calls == 4
    assert (out / "results.parquet").read_bytes() == (whole / "results.parquet").read_bytes()
    assert re.search(r"TurboQuant 2 2\.25\d\d 7\.\d\d 0 0\.\d+ \[0\.\d+, 0\.\d+\]", said), said
    for suffix in ("png", "pdf", "svg", "csv", "txt"):
        assert (out / "figures" / f"pareto.{suffix}").stat().st_size > 100
    # more bits may be added to a finished comparison; another seed is another one
    code, said = command(*options[:-1], "2,3,4", "--out", out, "--no-figures")
    assert code == 0 and "8 tasks, 6 finished before" in said
    code, said = command(*options, "--out", out, "--seed", 1)
    assert code == 2 and "seed changed since the sweep in" in said and "choose another folder" in said


def test_sources_that_all_share_run_all_tasks_again(tmp_path, here, monkeypatch):
    options = ["--codecs", "Full", "--layers", "2", "--no-figures", "--out", tmp_path]
    assert command(*options)[0] == 0
    assert command(*options)[0] == 0 and here.calls == 0
    monkeypatch.setattr(compare.versions, "of_modules", lambda *names: "other")
    code, said = command(*options)
    assert code == 0 and "finished before" not in said and here.calls == 1


def test_a_cache_file_and_its_panel(tmp_path, here):
    path = tmp_path / "long.safetensors"
    Cache([captured(3)], meta={"model": "toy"}).save(path)
    code, said = command(
        "--cache",
        path,
        "--cache",
        "sample",
        "--bits",
        "3",
        "--out",
        tmp_path / "out",
        "--budget",
        "full",
        "--no-figures",
    )
    # 32 held-out positions: 16 segments of 2; three seeds
    assert code == 0 and "toy: 1 layer, 64 tokens as float16, 32 held-out queries in 16 segments" in said, said
    found = pyarrow.parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert {r["model"] for r in found} == {"toy", "smol"} and {r["segment"] for r in found} == set(range(16))
    assert {r["seed"] for r in found} == {None, 0, 1, 2}
    saved = [json.loads(p.read_text()) for p in sorted((tmp_path / "out" / "data" / "pareto").glob("*.json"))]
    assert [d["data"]["model"] for d in saved] == ["toy", "smol"]
    assert [p["label"] for p in saved[0]["data"]["points"]] == ["Full", "TurboQuant"]
    (drawn,) = figures.draw(tmp_path / "out", names=["pareto"], formats=("svg",))
    assert [line.split(",")[0] for line in drawn.files[1].read_text().splitlines()] == [
        "model",
        "toy",
        "toy",
        "smol",
        "smol",
    ]


def test_two_curves_are_compared_at_equal_held_bits(file, tmp_path):
    from kvtheory.cli.printed import lines_at_equal_rates

    codecs = [reference.TurboQuant(bits=b, rotation=r) for r in ("hadamard", "haar") for b in (2, 4)]
    (summary,) = compare.summarise(rows_of(compare.source(file), codecs))
    (line,) = lines_at_equal_rates(summary)
    assert "error of TurboQuant(rotation=haar) / TurboQuant = " in line and "log2 error interpolated" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--codecs", "Nothing"], "no codec 'Nothing'; there are "),
        (["--codecs", ""], "at least one of each"),
        (["--bits", "2,x"], "bits: expected numbers, got 'x'"),
        (["--bits", "9"], "bits: expected 1 to 8, got 9"),
        (["--layers", "2-"], "layers: expected indices as 2,18 or 0-9, got '2-'"),
        (["--layers", "9-2"], "from low to high"),
        (["--layers", "3"], "smol has no layer 3; there are 2, 18"),
        (["--cache", "absent.safetensors"], "no cache file at absent.safetensors"),
        (["--model", "smol", "--text", "absent"], "no file 'absent' and no text of that name"),
        (["--budget", "huge"], "'huge'"),
        (["--jobs", "0"], "'--jobs'"),
        (["--dtype", "int8"], "'int8'"),
    ],
)
def test_bad_options_are_said(arguments, said, tmp_path):
    code, output = command(*arguments, "--out", tmp_path / "out")
    assert code == 2 and said in output, output
    assert not (tmp_path / "out" / "tasks").exists()


def test_capture_has_a_process_of_its_own():
    from kvtheory.cli.captured import alone

    assert alone(os.getpid) != os.getpid()


def test_a_model_is_captured_once_and_run_on_the_compressed_prefix(tmp_path, here, monkeypatch):
    """A random model of two layers with a tokenizer of single characters, from a folder; the text from a file."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from kvtheory import models
    from kvtheory.cli import captured as program
    from kvtheory.models.runner import Runner
    from tests.models import tiny

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(c): c - 32 for c in range(32, 127)}, unk_token=" "))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tiny.llama().save_pretrained(tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    text = "".join(chr(c) for c in np.random.default_rng(0).integers(33, 127, 2000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--bits", "3", "--no-figures"]
    options += ["--out", tmp_path / "out"]
    monkeypatch.setattr(program, "alone", lambda function, *arguments: function(*arguments))
    code, said = command(*options)
    assert (
        code == 0 and "capturing" in said and "1,024 tokens as float16, 512 held-out queries in 8 segments" in said
    ), said
    assert "4 tasks 2 model runs" in said and re.search(
        r"TurboQuant 3 4\.\d+ \S+ \[\S+, \S+\] \d+\.\d% \d+\.\d+", said
    ), said
    (kept,) = (tmp_path / "out" / "captured").iterdir()
    cache = Cache.load(kept)
    assert (
        len(cache) == 2 and cache.meta["tokens"] == 1536 and re.fullmatch(r"text\.txt-[0-9a-f]{8}", cache.meta["text"])
    )

    # the same by hand: each layer's prefix through bytes, all of them replaced
    codec = reference.TurboQuant(bits=3)
    decoded = []
    for layer in cache:
        keys, values = (x[:, :1024].astype(np.float16) for x in (layer.keys, layer.values))
        decoded.append(codec.decode(codec.encode(kvtheory.Layer(keys, values, index=layer.index))))
    expected = Runner(models.load(tmp_path / "model")[1]).evaluate(cache.tokens, 1024, decoded)
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "model.parquet").to_pylist()
    turbo = [r for r in rows if r["codec"] == "TurboQuant"]
    assert [r["segment"] for r in turbo] == list(range(8)) and sum(r["predicted"] for r in turbo) == 511
    assert math.isclose(sum(r["kl_bits"] for r in turbo), expected.kl_bits.sum(), rel_tol=1e-9)
    assert math.isclose(turbo[2]["kl_bits"], expected.kl_bits[128:192].sum(), rel_tol=1e-9)
    assert sum(r["agree"] for r in turbo) == expected.agrees.sum()
    assert math.isclose(2 ** (sum(r["surprisal_bits"] for r in turbo) / 511), expected.perplexity, rel_tol=1e-12)
    assert math.isclose(
        2 ** (sum(r["plain_surprisal_bits"] for r in turbo) / 511), expected.plain_perplexity, rel_tol=1e-12
    )
    full = sum(r["kl_bits"] for r in rows if r["codec"] == "Full")
    assert full < 1e-3 * expected.kl_bits.sum()
    each = pyarrow.parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert turbo[0]["stream_bytes"] == sum(
        {r["layer"]: r["stream_bytes"] for r in each if r["codec"] == "TurboQuant"}.values()
    )

    before = (tmp_path / "out" / "model.parquet").read_bytes()
    code, said = command(*options)
    assert (
        code == 0 and "capturing" not in said and "4 tasks, 4 finished before 2 model runs, 2 finished before" in said
    )
    assert (tmp_path / "out" / "model.parquet").read_bytes() == before
    code, said = command(*options, "--no-kl")
    assert code == 0 and "model runs" not in said and not (tmp_path / "out" / "model.parquet").exists()
    # fitted to another text, captured once; the same work under another name is refused
    words = "".join(chr(c) for c in np.random.default_rng(1).integers(33, 127, 300))
    (tmp_path / "other.txt").write_text(words, encoding="utf-8")
    (tmp_path / "same.txt").write_text(text[100:400], encoding="utf-8")
    more = [
        "--codecs",
        "AATC(window=0)",
        "--layers",
        "1",
        "--bits",
        "2,3",
        "--at",
        "2.7",
        "--calibration-tokens",
        "200",
    ]
    code, said = command(*options, *more, "--calibration", tmp_path / "same.txt")
    assert code == 2 and "they share 64 tokens in a row" in said
    code, said = command(*options, *more, "--calibration", tmp_path / "other.txt")
    assert code == 0 and "on 200 tokens of other.txt" in said and "1 fit to other.txt-" in said, said
    kept = json.loads((tmp_path / "out" / "equal-rate.json").read_text())
    assert [r["measure"] for r in kept] == ["attention", "attention by head", "kl", "perplexity"]
    fitted = [r for r in pyarrow.parquet.read_table(tmp_path / "out" / "model.parquet").to_pylist()]
    means = {b: sum(r["kl_bits"] for r in fitted if r["bits"] == b) / 512 for b in (2, 3)}
    held = {r["bits"]: r["held_bits"] for r in fitted}
    t = (2.7 - held[2]) / (held[3] - held[2])
    assert math.isclose(kept[2]["error"], means[2] ** (1 - t) * means[3] ** t, rel_tol=1e-9)
    code, said = command(*options, *more, "--calibration", tmp_path / "other.txt")
    assert code == 0 and "capturing" not in said and " fit to" not in said and "2 model runs, 2 finished before" in said

    (tmp_path / "text.txt").write_text(text[::-1], encoding="utf-8")
    code, said = command(*options)
    assert code == 2 and "text changed since the sweep" in said
