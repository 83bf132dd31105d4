"""Mutants of all decoders, 20,000 here, millions with `python -m tests.fuzz.run`; and that the engine, the checker and the runner do see.

KVTHEORY_FUZZ=100000 checks more; KVTHEORY_FUZZ_SEED other ones. test_findings.py has what was found, one test each.
"""

import json
import os
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

import reference
from reference import stream
from tests.fuzz import run as runner
from tests.fuzz import seeds as seeds_
from tests.fuzz.check import Checker
from tests.fuzz.messages import parse
from tests.fuzz.mutations import Mutant, Mutator, chunk_rng

SEED = int(os.environ.get("KVTHEORY_FUZZ_SEED", "1"))
PARTS = 4
CODECS = {name: codec for name, codec in reference.codecs().items() if name not in seeds_.WITHOUT}
TRIES = int(os.environ.get("KVTHEORY_FUZZ", "20000")) // PARTS


@pytest.fixture(scope="module")
def mutator():
    return Mutator(seeds_.load(), seeds_.cache_files())


@pytest.mark.parametrize("chunk", range(PARTS))
def test_mutants_do_only_what_is_promised(mutator, chunk):
    """No crash, no hang, no allocation far above the honest size, no exception but those promised: see check.py."""
    tally, offences = runner.do_chunk(mutator, SEED, chunk, TRIES, set())
    assert not offences, json.dumps(offences[0])[:2000]
    counts = tally.counts
    assert sum(counts.values()) == TRIES and tally.traced >= TRIES // 200
    decoded = sum(n for key, n in counts.items() if key.endswith(" decoded"))
    assert TRIES // 20 < decoded < TRIES // 2  # the engine gets behind the checks, and into them
    for codec in CODECS:
        for entry in ("codec", "decode", "cache", "inspect"):
            outcomes = [n for key, n in counts.items() if key.startswith(f"{codec} {entry} ")]
            assert sum(outcomes) > 0, f"{codec} {entry}"


def test_seeds_are_honest_and_come_back_whole(mutator):
    """Taken apart and joined, a seed is itself (but for what DEFLATE makes of it), and of every codec, kind and state there are some."""
    for seed in mutator.seeds:
        joined = seed.message.join()
        assert joined == seed.data or "kvtc" in seed.name
        assert reference.decode(joined, seed.state) is not None
        assert seed.state_message is None or seed.state_message.join() == seed.state
    held = {seed.codec.codec_id for seed in mutator.seeds}
    assert held == set(CODECS)
    piped = {
        stage.codec_id for seed in mutator.seeds if seed.codec.codec_id == "Pipeline" for stage in seed.codec.stages
    }
    assert piped == set(CODECS) - {"Pipeline"}
    assert {seed.message.kind for seed in mutator.seeds} == {0, 1, 2}
    assert {seed.codec.codec_id for seed in mutator.seeds if seed.state} >= {"KVQuant", "AATC", "PALU", "MetricKLT", "KVTC", "Pipeline"}  # fmt: skip


def test_every_part_of_every_codec_is_mutated_alone(mutator):
    """For each codec and each of its parts there are mutants in which that part differs and all others are as they were."""
    rng, alone, states = chunk_rng(2, 0), set(), set()
    for _ in range(12000):
        mutant = mutator.mutant(rng)
        if mutant.entry in ("file", "inspect", "load"):
            continue
        seed = mutator.seeds[mutant.seed]
        try:
            parts = [part.join() for part in parse(mutant.data).groups[0].children]
        except (ValueError, zlib.error):
            continue
        whole = [part.join() for part in seed.message.groups[0].children]
        changed = [i for i, (a, b) in enumerate(zip(parts, whole)) if a != b]
        if len(parts) == len(whole) and len(changed) == 1:
            alone.add((seed.codec.codec_id, type(seed.codec).part_names[changed[0]]))
        if mutant.state != seed.state and parts == whole:
            states.add(seed.codec.codec_id)
    wanted = {(name, part) for name, codec in CODECS.items() for part in codec.part_names}
    assert wanted - alone == set()
    assert states == {seed.codec.codec_id for seed in mutator.seeds if seed.state}


def test_nine_in_ten_are_sealed(mutator):
    rng, sealed = chunk_rng(3, 0), 0
    mutants = [mutator.mutant(rng) for _ in range(4000)]
    mutants = [mutant for mutant in mutants if mutant.entry != "file"]
    for mutant in mutants:
        try:
            stream.unseal(mutant.data)
            sealed += 1
        except reference.CorruptStream:
            pass
    assert 0.87 < sealed / len(mutants) < 0.95


def test_a_chunk_is_the_same_mutants_every_time(mutator):
    once, again = chunk_rng(5, 7), chunk_rng(5, 7)
    assert [mutator.mutant(once) for _ in range(200)] == [mutator.mutant(again) for _ in range(200)]


# -- the checker sees what it is there for ---------------------------------------------------------------------------


class _Misbehaving:
    """Stands in for `reference.decode` in the checker."""

    def __init__(self, act):
        self.act = act

    def __call__(self, data, state=b""):
        return self.act(data)


def _corrupt(data, grab=0):
    held = bytearray(grab)
    raise reference.CorruptStream("no", len(held) * 0)


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda data: {}["x"], "exception"),
        (lambda data: (_ for _ in ()).throw(ValueError("not the promised one")), "exception"),
        (lambda data: sys.exit(1), "exception"),
        (lambda data: (_ for _ in ()).throw(reference.CorruptStream("beyond", len(data) + 1)), "offset"),
        (lambda data: __import__("warnings").warn("overflow", RuntimeWarning), "warning"),
        (lambda data: time.sleep(0.2), "time"),
        (lambda data: _corrupt(data, 8 << 20), "memory"),
        (lambda data: _corrupt(data, 1 << 40), "memory"),
        (lambda data: [SimpleNamespace(keys=np.zeros(2), values=np.array([1.0, np.nan]))], "numbers"),
    ],
    ids=["key-error", "value-error", "exit", "offset", "warning", "slow", "large", "too-large", "nan"],
)
def test_the_checker_sees(mutator, monkeypatch, act, kind):
    checker = Checker(mutator.seeds)
    monkeypatch.setattr("tests.fuzz.check.SECONDS", 0.1)
    monkeypatch.setattr("tests.fuzz.check.EVERY", 1)
    checker.honest(Mutant(0, "decode", mutator.seeds[0].data))
    monkeypatch.setattr(reference, "decode", _Misbehaving(act))
    with checker.guarded():
        offence = checker.check(Mutant(0, "decode", mutator.seeds[0].data))
    checker.close()
    assert offence is not None and offence.kind == kind
    assert any(f"OFFENCE {kind}" in key for key in checker.tally.counts)


def test_the_checker_ends_what_hangs(mutator, monkeypatch):
    checker = Checker(mutator.seeds)
    monkeypatch.setattr("tests.fuzz.check.TIMEOUT", 0.3)
    monkeypatch.setattr("tests.fuzz.check.SECONDS", 0.1)

    def hang(data):
        while True:
            pass

    monkeypatch.setattr(reference, "decode", _Misbehaving(hang))
    with checker.guarded():
        offence = checker.check(Mutant(0, "decode", b""))
    checker.close()
    assert offence is not None and offence.kind == "time"


def test_the_checker_lets_honest_streams_pass(mutator, monkeypatch):
    monkeypatch.setattr("tests.fuzz.check.EVERY", 1)
    checker = Checker(mutator.seeds, mutator.files)
    with checker.guarded():
        for place, seed in enumerate(mutator.seeds):
            assert checker.check(Mutant(place, "decode", seed.data, seed.state)) is None
        for place, data in enumerate(mutator.files):
            assert checker.check(Mutant(-1 - place, "file", data)) is None
    checker.close()
    assert all(key.endswith(" decoded") for key in checker.tally.counts)


# -- the runner ------------------------------------------------------------------------------------------------------


def _state(folder):
    held = json.loads((folder / "progress.json").read_text())
    return {name: held[name] for name in ("done", "checked", "offences", "counts")}


def test_an_interrupted_run_goes_on_to_the_same_counts(mutator, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "CHUNK", 40)
    whole = runner.Run(tmp_path / "whole", 200, 0, False)
    whole.go(mutator, 2)
    part = runner.Run(tmp_path / "part", 80, 0, False)
    part.go(mutator, 1)
    assert "minutes left" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--resume goes on"):
        runner.Run(tmp_path / "part", 200, 0, False)
    with pytest.raises(SystemExit, match="a run of seed 0"):
        runner.Run(tmp_path / "part", 200, 1, True)
    runner.Run(tmp_path / "part", 200, 0, True).go(mutator, 1)
    assert _state(tmp_path / "part") == _state(tmp_path / "whole")
    assert _state(tmp_path / "whole")["done"] == [0, 1, 2, 3, 4]
    assert _state(tmp_path / "whole")["checked"] == 200


def test_a_crash_costs_one_mutant_and_is_kept(mutator, tmp_path, monkeypatch):
    """The process dies at two mutants of the chunk, and another one raises: all three are kept, the rest is counted."""
    monkeypatch.setattr(runner, "CHUNK", 30)
    rng = chunk_rng(0, 0)
    mutants = [mutator.mutant(rng) for _ in range(30)]
    honest = Checker.check

    def check(self, mutant):
        if mutant in (mutants[7], mutants[20]):
            os._exit(3)
        if mutant == mutants[11]:
            self._call = lambda mutant: lambda: {}["x"]
            try:
                return honest(self, mutant)
            finally:
                del self._call
        return honest(self, mutant)

    monkeypatch.setattr(Checker, "check", check)
    run = runner.Run(tmp_path, 30, 0, False)
    run.go(mutator, 1)
    kept = {
        (one["kind"], one["place"]): one
        for one in map(json.loads, (p.read_text() for p in (tmp_path / "offences").iterdir()))
    }
    assert sorted(kept) == [("crash", 7), ("crash", 20), ("exception", 11)]
    assert bytes.fromhex(kept["crash", 7]["data"]) == mutants[7].data and run.offences == 3
    assert run.tally.counts["skipped"] == 2 and run.checked == 30
    monkeypatch.setattr(Checker, "check", honest)
    assert (
        runner.main(["--replay", str(tmp_path / "offences" / "exception-0-11.json")]) == 0
    )  # it did no harm of its own
    assert runner.main(["--out", str(tmp_path), "--mutants", "30", "--resume"]) == 1


def test_coverage_guided_fuzzing_finds_no_offence(tmp_path):
    """Ten seconds of target.py under atheris."""
    pytest.importorskip("atheris")
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.target",
        "-max_total_time=10",
        "-seed=1",
        f"-artifact_prefix={tmp_path}/",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = int(done.stderr.split("Done ")[1].split()[0])
    assert runs > 200 and "cov: " in done.stderr
