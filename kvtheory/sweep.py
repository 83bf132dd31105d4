"""Sweeps: lists of independent tasks, run through any `concurrent.futures.Executor`, finished ones kept.

A task is a function of a module with arguments that pickle, and a key of plain values that says what it is. Its result is a list
of rows (dicts of plain values). `run` writes each task's rows to its own file as it finishes (whole or not at all), so that an
interrupted sweep continues where it stopped and gives the same rows. The file is named by the hash of what the rows depend on: the
key, the function, and `version`, which says the code behind them; another version is another file, and only its own tasks run again.
Timings are kept apart from results: rows of equal tasks are equal, byte for byte. A task says how long its parts took with `stage`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from kvtheory import checks, files

__all__ = ["Task", "executor", "finished", "processes", "run", "stage"]

Row = dict[str, Any]
Progress = Callable[[int, int, "Task"], None]


@dataclass(frozen=True)
class Task:
    """key: what the task is, plain values by name (they head each of its rows). run(*arguments) -> rows.

    version: of the code and the libraries that the rows depend on, in no row; "" where the caller answers for that otherwise (`same` of `run`).
    """

    key: Mapping[str, Any]
    run: Callable[..., list[Row]]
    arguments: tuple[Any, ...] = field(default=(), compare=False)
    version: str = ""

    @property
    def name(self) -> str:
        """A file name: the hash of the key, the function's name and the version."""
        what = [f"{self.run.__module__}.{self.run.__qualname__}", self.key, *([self.version] if self.version else [])]
        return hashlib.sha256(json.dumps(what, sort_keys=True, allow_nan=False).encode()).hexdigest()[:24]


#: seconds of the stages of the task that this process runs, by name
_stages: dict[str, float] = {}


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count what runs inside towards `name` among the timings of the task that is running: CPU seconds of this process, all its threads."""
    start = time.process_time()
    try:
        yield
    finally:
        _stages[name] = _stages.get(name, 0.0) + time.process_time() - start


@contextmanager
def processes(jobs: int, context: BaseContext | None = None) -> Iterator[Executor]:
    """`jobs` worker processes of this machine, which never outlive the block: ended at once where it raises (Ctrl-C), and by
    themselves where this process is killed.

    context: of multiprocessing; default its own default. ValueError for fewer than one.
    """
    if jobs < 1:
        raise ValueError(f"jobs: expected at least 1, got {jobs}")
    with _Processes(jobs, mp_context=context, initializer=_begin) as pool:
        try:
            yield pool
        except BaseException:
            # what they have in hand nobody will read; waiting for it would be waiting for the longest task
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.kill()
            raise


class _Processes(ProcessPoolExecutor):
    """Of `processes`, which ends its tasks itself: a cancelled future in a pool whose workers died makes its thread print a traceback."""


def _begin() -> None:
    """A worker: Ctrl-C reaches the whole process group, and the parent decides; without the parent it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def executor(jobs: int = 1, scheduler: str | None = None) -> Iterator[Executor]:
    """`jobs` processes, or with `scheduler` ("tcp://host:port", or "local" for a Dask cluster on this machine) a Dask cluster's.

    The extra `sweep` brings Dask; ModuleNotFoundError says so where it is absent.
    """
    if scheduler is None:
        with processes(jobs) as pool:
            yield pool
        return
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"scheduler: a Dask cluster needs the extra `sweep`: {checks.install('sweep')}"
        ) from None
    options = {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": None} if scheduler == "local" else {}
    with Client(None if scheduler == "local" else scheduler, **options) as client, client.get_executor() as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False)  # cancels what waits; what runs is not waited for
            raise


def run(
    tasks: Sequence[Task], pool: Executor, folder: str | os.PathLike[str], *, same: Mapping[str, Any], progress: Progress | None = None
) -> tuple[list[Row], list[Row]]:  # fmt: skip
    """(rows of all tasks in their order, one timing row a task). Finished tasks found in `folder` are not run again.

    A timing row: the key, `seconds`, `cpu_seconds`, and `<name>_seconds` of each stage that the task named.

    same: what must be unchanged for a folder to be continued (data, options; sources, where tasks have no version). ValueError names what changed, and two
    tasks with one key.
    """
    folder = Path(folder)
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError("tasks: expected keys that differ, two are equal")
    stamp = folder / "sweep.json"
    same = json.loads(json.dumps(dict(same), sort_keys=True))
    if stamp.is_file():
        before = json.loads(stamp.read_text(encoding="utf-8"))
        changed = sorted(k for k in before.keys() | same.keys() if before.get(k) != same.get(k))
        if changed:
            raise ValueError(f"folder: {', '.join(changed)} changed since the sweep in {folder}; choose another folder")
    else:
        _write(stamp, same)
    kept = {task.name: record for task in tasks if (record := finished(folder, task)) is not None}
    waiting: dict[Future[tuple[list[Row], dict[str, float]]], Task] = {}
    try:
        for task in tasks:
            if task.name not in kept:
                waiting[pool.submit(_timed, task.run, task.arguments)] = task
        for future in as_completed(waiting):
            task = waiting[future]
            rows, seconds = future.result()
            record = {"rows": [{**task.key, **row} for row in rows], "timing": seconds}
            _write(_file(folder, task), record)
            kept[task.name] = json.loads(json.dumps(record))
            if progress is not None:
                progress(len(kept), len(tasks), task)
    except BaseException:
        for future in () if isinstance(pool, _Processes) else waiting:
            future.cancel()
        raise
    rows = [row for name in names for row in kept[name]["rows"]]
    timings = [{**task.key, **kept[name]["timing"]} for task, name in zip(tasks, names)]
    return rows, timings


def finished(folder: str | os.PathLike[str], task: Task) -> dict[str, Any] | None:
    """{"rows": the task's rows, "timing": seconds by name} of a task finished in `folder`; None where there is no such file, or not a whole one."""
    try:
        record = json.loads(_file(Path(folder), task).read_text(encoding="utf-8"))
    except (
        FileNotFoundError,
        ValueError,
        RecursionError,
    ):  # a file that something else damaged: the task is done again
        return None
    whole = isinstance(record, dict) and isinstance(record.get("rows"), list) and isinstance(record.get("timing"), dict)
    return record if whole and all(isinstance(row, dict) for row in record["rows"]) else None


def _file(folder: Path, task: Task) -> Path:
    return folder / "tasks" / f"{task.name}.json"


def _timed(function: Callable[..., list[Row]], arguments: tuple[Any, ...]) -> tuple[list[Row], dict[str, float]]:
    _stages.clear()
    start, cpu = time.perf_counter(), time.process_time()
    rows = function(*arguments)
    parts = {f"{name}_seconds": seconds for name, seconds in _stages.items()}
    return rows, {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu, **parts}


def _write(path: Path, value: Any) -> None:
    with files.replacing(path) as scratch:
        scratch.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
