"""Claims as tasks: an interrupted `verify --scheduler` goes on, and a change costs the claims that it touches and no others."""

import contextlib
import json
import re
import sys

import pytest
from typer.testing import CliRunner

import kvtheory
import proofs_checks
from kvtheory import sweep
from kvtheory.cli import app
from proofs_checks import tasks
from proofs_checks.context import Context
from proofs_checks.run import run_claim
from reference.compare import versions
from tests.proofs_checks import toy
from tests.sweep.test_sweep import Here

CHEAP = ("trie/metric", "risk/error-identity", "quantizers/held-bits")


@pytest.fixture
def here(monkeypatch):
    """Tasks run in this process; .ran: ids of the claims that were checked since it was last cleared."""
    pool = Here()
    pool.ran = []
    monkeypatch.setattr(sweep, "executor", lambda *_: contextlib.nullcontext(pool))
    true = tasks.run_claim
    monkeypatch.setattr(tasks, "run_claim", lambda claim, context: pool.ran.append(claim.id) or true(claim, context))
    yield pool
    versions.of_modules.cache_clear()


def verify(folder, *more, claims="trie/*", start="--out"):
    done = CliRunner().invoke(
        app, ["verify", "--claim", claims, "--no-figures", "--scheduler", "here", start, str(folder), *more]
    )
    return done.exit_code, re.sub(r"[\s│]+", " ", done.output)


def without_seconds(folder):
    ledger = json.loads((folder / "ledger.json").read_text())
    assert all(record.pop("seconds") >= 0 for record in ledger["claims"])
    return json.dumps(ledger)


def test_an_interrupted_run_goes_on_and_gives_the_plain_ledger(tmp_path, here, monkeypatch):
    plain = CliRunner().invoke(app, ["verify", "--claim", "trie/*", "--no-figures", "--out", str(tmp_path / "plain")])
    assert plain.exit_code == 0
    counted = tasks.run_claim

    def until_the_fourth(claim, context):
        if len(here.ran) == 3:
            raise KeyboardInterrupt
        return counted(claim, context)

    monkeypatch.setattr(tasks, "run_claim", until_the_fourth)
    code, said = verify(tmp_path / "out")
    assert code == 130 and len(here.ran) == 3
    kept = len(list((tmp_path / "out" / "finished" / "tasks").glob("*.json")))
    assert f"interrupted after {kept} of 6 claims; continue with --resume" in said
    assert not (tmp_path / "out" / "ledger.json").exists()
    monkeypatch.setattr(tasks, "run_claim", counted)
    here.ran.clear()
    code, said = verify(tmp_path / "out", start="--resume")
    assert code == 0 and len(here.ran) == 6 - kept
    assert without_seconds(tmp_path / "out") == without_seconds(tmp_path / "plain")
    # and the plain command takes what the tasks left, and nothing is remembered without --resume
    again = CliRunner().invoke(app, ["verify", "--claim", "trie/*", "--no-figures", "--resume", str(tmp_path / "out")])
    assert again.exit_code == 0 and "6 finished before" in again.output
    here.ran.clear()
    assert verify(tmp_path / "out")[0] == 0 and len(here.ran) == 6


def test_a_changed_file_costs_its_own_claims_and_no_others(tmp_path, here, monkeypatch):
    claims = "*"
    chosen = [claim for claim in proofs_checks.claims().values() if claim.id in CHEAP]
    assert len(chosen) == len(CHEAP), "claims have other names now"
    monkeypatch.setattr(proofs_checks, "claims", lambda: {claim.id: claim for claim in chosen})
    code, said = verify(tmp_path, claims=claims)
    assert code == 0, said
    assert sorted(here.ran) == sorted(CHEAP)
    before = without_seconds(tmp_path)
    true = versions._source
    monkeypatch.setattr(versions, "_source", lambda name: true(name) + b"# changed" * (name == "kvtheory.trie"))
    versions.of_modules.cache_clear()
    monkeypatch.setattr("proofs_checks.ledger.source_digest", lambda: "0" * 64)
    # the plain command goes on under the same sources only
    refused = CliRunner().invoke(app, ["verify", "--claim", claims, "--resume", str(tmp_path)])
    assert refused.exit_code == 2 and "sources changed" in re.sub(r"[\s│]+", " ", refused.output)
    here.ran.clear()
    code, said = verify(tmp_path, claims=claims, start="--resume")
    assert code == 0 and here.ran == ["trie/metric"] and "2 finished before" in said
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger["run"]["sources"] == "0" * 64
    assert json.loads(without_seconds(tmp_path))["claims"] == json.loads(before)["claims"]
    # another seed is another run
    code, said = verify(tmp_path, "--seed", "3", claims=claims, start="--resume")
    assert code == 2 and "seed changed since that run" in said


def test_what_is_common_is_in_every_version(monkeypatch):
    claims = [proofs_checks.claims()[name] for name in CHEAP]
    before = [tasks.version(claim) for claim in claims]
    true = versions._source
    for module in ("proofs_checks.evidence", "proofs_checks.run", "kvtheory.layer.record"):
        versions.of_modules.cache_clear()
        monkeypatch.setattr(versions, "_source", lambda name, m=module: true(name) + b"#" * (name == m))
        assert not set(before) & {tasks.version(claim) for claim in claims}, module
    versions.of_modules.cache_clear()


@pytest.mark.parametrize("name", CHEAP)
def test_all_code_that_a_claim_runs_is_in_its_version(name):
    """Every function of ours that is called while the claim and its mutants are checked stands in a file of the closure."""
    claim = proofs_checks.claims()[name]
    own = {tasks.__name__.partition(".")[0], "kvtheory", "reference"}
    files = {
        str(versions._path(module))
        for start in (*tasks.modules(claim), *tasks.MACHINERY)
        for module in versions.closure(start)[0]
    }
    roots = tuple(str(versions._path(package)).removesuffix("__init__.py") for package in own)
    ran = set()
    sys.setprofile(lambda frame, event, _: ran.add(frame.f_code) if event == "call" else None)
    try:
        run_claim(claim, Context(cache=kvtheory.sample_cache(), cache_name="sample", claims=100))
    finally:
        sys.setprofile(None)
    used = {code.co_filename for code in ran if code.co_name != "<module>" and code.co_filename.startswith(roots)}
    assert len(used) > 5 and used <= files, used - files


def test_what_was_not_run_or_crashed_is_tried_again(tmp_path, here, monkeypatch):
    found = {claim.id: claim for claim in (toy.area, toy.absent, toy.crash)}
    monkeypatch.setattr(proofs_checks, "claims", lambda: found)
    assert verify(tmp_path, claims="*")[0] == 1 and sorted(here.ran) == ["toy/absent", "toy/area", "toy/crash"]
    for record in (tmp_path / "claims").glob("*.json"):  # a run that was interrupted before it was recorded
        record.unlink()
    here.ran.clear()
    assert verify(tmp_path, claims="*", start="--resume")[0] == 1 and sorted(here.ran) == ["toy/absent", "toy/crash"]
    assert json.loads((tmp_path / "data" / "toy" / "toy--area.json").read_text())["data"] == {"x": [1, 2.5]}


def test_a_worker_with_other_sources_or_another_cache_is_refused(tmp_path, here, monkeypatch):
    claim = proofs_checks.claims()["trie/metric"]
    cache = kvtheory.sample_cache()
    (task,) = tasks.plan([claim], Context(cache=cache, cache_name="sample", claims=100))
    of, *rest = task.arguments
    assert tasks.check(*task.arguments)[0]["record"]["as_expected"]
    with pytest.raises(RuntimeError, match="other sources or libraries than the client"):
        tasks.check("0" * 32, *rest)
    path = tmp_path / "cache.safetensors"
    kvtheory.Cache(list(cache), meta={"model": "another"}).save(path)
    tasks._cache.cache_clear()
    with pytest.raises(RuntimeError, match="holds other numbers on this worker"):
        tasks.check(of, str(path), *rest[1:])
    tasks._cache.cache_clear()
    monkeypatch.setattr(tasks, "version", lambda _: str(len(here.ran)) + "x" * len(str(object())))
    monkeypatch.setattr(tasks, "plan", lambda claims, context: [sweep.Task({"claim": "trie/metric"}, tasks.check, ("other", *rest), "other")])  # fmt: skip
    code, said = verify(tmp_path / "out", claims="trie/metric")
    assert code == 1 and "not finished: trie/metric: this worker has other sources" in said and "Traceback" not in said
