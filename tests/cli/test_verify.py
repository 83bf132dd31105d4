"""`kvtheory verify` and `kvtheory figures` as a user runs them."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import kvtheory.entropy
from kvtheory.cli import app

CHEAP = "trie/metric"


def run(*args: str):
    return CliRunner().invoke(app, list(args))


def strip(ledger: dict) -> dict:
    for record in ledger["claims"]:
        record.pop("seconds")
    return ledger


def test_one_claim_end_to_end_and_deterministic(tmp_path):
    ledgers = []
    for name in ("a", "b"):
        done = run("verify", "--claim", CHEAP, "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        assert CHEAP in done.output and "all as expected" in done.output
        ledgers.append(strip(json.loads((tmp_path / name / "ledger.json").read_text())))
        assert (tmp_path / name / "index.html").read_text().count("<svg") >= 1
    assert ledgers[0] == ledgers[1]
    for path in sorted((tmp_path / "a" / "figures").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / "figures" / path.name).read_bytes(), path.name


def test_a_wrong_formula_turns_the_exit_status(tmp_path, monkeypatch):
    true = kvtheory.entropy.sequential

    def swapped(language, kv_map):
        found = true(language, kv_map)
        return found._replace(kv_given_kv=found.tokens, tokens=found.kv_given_kv)

    if not hasattr(true(kvtheory.entropy.FiniteLanguage({(0,): 1}), lambda p: p), "_replace"):
        pytest.skip("record is no named tuple")
    monkeypatch.setattr(kvtheory.entropy, "sequential", swapped)
    done = run(
        "verify", "--claim", "sequential/per-step-entropy", "--cache", "none", "--no-figures", "--out", str(tmp_path)
    )
    assert done.exit_code == 1, done.output
    assert "differs" in done.output


def test_a_selection_does_not_replace_the_whole_ledger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "ledger.json").write_text("the whole one")
    assert run("verify", "--claim", CHEAP, "--no-figures").exit_code == 0
    assert (tmp_path / "report" / "ledger.json").read_text() == "the whole one"
    assert (tmp_path / "report" / "selected" / "ledger.json").is_file()


def test_resume_skips_what_is_finished(tmp_path):
    assert run("verify", "--claim", CHEAP, "--no-figures", "--out", str(tmp_path)).exit_code == 0
    again = run("verify", "--claim", CHEAP, "--no-figures", "--resume", str(tmp_path))
    assert again.exit_code == 0 and "1 finished before" in again.output
    other = run("verify", "--claim", CHEAP, "--no-figures", "--resume", str(tmp_path), "--seed", "5")
    assert other.exit_code == 2 and "seed changed since that run" in re.sub(r"[\s│]+", " ", other.output)


def test_bad_options_say_what_is_there(tmp_path):
    done = run("verify", "--claim", "nothing/*", "--out", str(tmp_path))
    assert done.exit_code == 2 and "no claim matches" in re.sub(r"[\s│]+", " ", done.output)
    done = run("verify", "--cache", str(tmp_path / "absent"), "--out", str(tmp_path))
    assert done.exit_code == 2 and "no cache file at" in re.sub(r"[\s│]+", " ", done.output)
    done = run("figures", "--results", str(tmp_path / "absent"))
    assert done.exit_code == 2 and "no finished run" in re.sub(r"[\s│]+", " ", done.output)


@pytest.mark.parametrize("module", ["kvtheory", "proofs_checks", "figures"])
def test_modules_run_as_programs(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert (
        kvtheory.__version__
        in subprocess.run(
            [sys.executable, "-m", "kvtheory", "--version"], capture_output=True, text=True, check=True
        ).stdout
    )
