"""Sweeps: the same rows from any executor, nothing run twice, nothing half-written."""

import json
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvtheory.sweep import Task, executor, run

CALLS = []


def square(x):
    CALLS.append(x)
    return [{"square": x * x}, {"square": -x * x}]


def fails_at_three(x):
    CALLS.append(x)
    if x == 3:
        raise KeyboardInterrupt
    return [{"x": x}]


class Here:
    """An executor that runs at once in this process."""

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except BaseException as problem:
            future.set_exception(problem)
        return future


def tasks(function, values):
    return [Task({"x": x, "codec": "a"}, function, (x,)) for x in values]


def test_processes_threads_and_this_process_agree(tmp_path):
    found = []
    with executor(2) as processes, ThreadPoolExecutor(2) as threads:
        for i, pool in enumerate((processes, threads, Here())):
            found.append(run(tasks(square, range(5)), pool, tmp_path / str(i), same={"seed": 0}))
    rows, timings = found[0]
    assert rows[2] == {"x": 1, "codec": "a", "square": 1} and len(rows) == 10
    assert [r for r, _ in found] == [rows] * 3
    assert [t["x"] for t in timings] == list(range(5)) and all(t["seconds"] >= 0 for t in timings)


def test_an_interrupted_sweep_continues_where_it_stopped(tmp_path):
    CALLS.clear()
    with pytest.raises(KeyboardInterrupt):
        run(tasks(fails_at_three, [1, 2, 3]), Here(), tmp_path, same={})
    finished = len(list((tmp_path / "tasks").glob("*.json")))
    CALLS.clear()
    seen = []
    rows, _ = run(
        [Task(t.key, fails_at_three, (9,) if t.key["x"] == 3 else t.arguments) for t in tasks(fails_at_three, [1, 2, 3])],
        Here(), tmp_path, same={}, progress=lambda done, of, task: seen.append((done, of)),
    )  # fmt: skip
    assert len(CALLS) == 3 - finished and seen[-1] == (3, 3)
    # the row is headed by the key, whatever the rows themselves say
    assert [r["x"] for r in rows] == [1, 2, 9]
    assert not list(tmp_path.rglob(".*"))


def test_another_sweep_is_not_continued(tmp_path):
    run(tasks(square, [1]), Here(), tmp_path, same={"sources": "a", "seed": 1})
    with pytest.raises(ValueError, match="folder: sources changed since the sweep in"):
        run(tasks(square, [1]), Here(), tmp_path, same={"sources": "b", "seed": 1})
    with pytest.raises(ValueError, match="two are equal"):
        run(tasks(square, [1, 1]), Here(), tmp_path / "x", same={})
    with pytest.raises(ValueError, match="Out of range float"):
        run([Task({"x": 1}, lambda: [{"y": float("nan")}])], Here(), tmp_path / "y", same={})
    assert not list((tmp_path / "y" / "tasks").glob("*"))
    assert json.loads((tmp_path / "sweep.json").read_text()) == {"sources": "a", "seed": 1}


def test_a_dask_cluster_gives_the_same(tmp_path):
    pytest.importorskip("distributed")
    with executor(1, scheduler="local") as pool:
        rows, _ = run(tasks(abs_rows, [-1, 2]), pool, tmp_path, same={})
    assert [r["abs"] for r in rows] == [1, 2]


def abs_rows(x):
    return [{"abs": abs(x)}]
