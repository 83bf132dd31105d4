"""The readers of files: honest ones are read in a process that imported nothing else, and the targets see what they are there for."""

import subprocess
import sys

import pytest

pytest.importorskip("atheris")
pytest.importorskip("torch")

from tests.fuzz import every, files

HONEST = sorted((path.parent.name, path.name) for path in files.CORPUS.glob("*/*"))


def test_each_target_has_a_small_corpus():
    assert {target for target, _ in HONEST} == set(files.TARGETS) == set(every.FILES)
    assert sum((files.CORPUS / target / name).stat().st_size for target, name in HONEST) < 20_000


@pytest.mark.parametrize(("target", "name"), HONEST)
def test_honest_files_are_read(target, name, tmp_path):
    reader, _ = files.TARGETS[target]
    path = tmp_path / "input"
    path.write_bytes((files.CORPUS / target / name).read_bytes())
    reader(path)


def test_a_cache_in_bfloat16_is_read_where_nothing_else_was_imported():
    """Found by the fuzzer's first input: NumPy knew no bfloat16 unless something else had imported ml_dtypes."""
    found = files.CORPUS / "cache" / "cache-1"
    code = f"import kvtheory; (layer,) = kvtheory.Cache.load({str(found)!r}); print(layer.keys.dtype)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "bfloat16", done.stderr


@pytest.mark.parametrize("problem", [KeyError("x"), TypeError("x"), MemoryError(), RecursionError()])
def test_another_error_than_the_promised_is_seen(problem, monkeypatch):
    def reader(path):
        raise problem

    monkeypatch.setitem(files.TARGETS, "cache", (reader, (files.CorruptCache,)))
    with pytest.raises(type(problem)):
        files.one_input("cache")(b"x")


def test_what_takes_long_is_seen(monkeypatch):
    monkeypatch.setattr(files, "SECONDS", -1.0)
    with pytest.raises(AssertionError, match="took"):
        files.one_input("questions")(b"")


def test_shares_are_of_the_whole_time():
    given = every.shares(60, ["streams", *every.FILES])
    assert given["streams"] == 30 and 58 <= sum(given.values()) <= 62
    assert every.shares(60, ["npz"]) == {"npz": 60}


def test_coverage_guided_fuzzing_of_files_runs():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.every", "2", "task"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "nothing found" in done.stdout, done.stdout
    assert int(done.stdout.splitlines()[1].split()[2].replace(",", "")) > 100
