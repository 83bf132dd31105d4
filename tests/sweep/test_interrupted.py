"""Ctrl-C in the middle of the command, as a terminal sends it: to every process of the group."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtheory import Cache
from tests.sweep.test_compare import captured

pytest.importorskip("pyarrow.parquet")

#: as a process in the foreground of a terminal, which may have been started by one that ignores the signal
COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from kvtheory.cli import app; app()"
TASKS = 2 * 8 * 6


def test_a_real_interruption_is_resumed(tmp_path):
    path = tmp_path / "cache.safetensors"
    Cache([captured(3), captured(7, seed=1)], meta={"model": "toy", "text": "noise"}).save(path)
    options = [
        "compare",
        "--cache",
        str(path),
        "--codecs",
        "TurboQuant",
        "--bits",
        "1,2,3,4,5,6,7,8",
        "--seeds",
        "6",
        "--jobs",
        "1",
        "--no-figures",
    ]

    def start(folder):
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *options, "--out", str(tmp_path / folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=Path(__file__).parents[2], start_new_session=True, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip

    own = start("out")
    deadline = time.monotonic() + 200
    while not list((tmp_path / "out" / "tasks").glob("*.json")):
        assert own.poll() is None and time.monotonic() < deadline, own.stdout.read()
        time.sleep(0.005)
    os.killpg(own.pid, signal.SIGINT)
    said, _ = own.communicate(timeout=200)
    assert own.returncode == 130 and "Traceback" not in said, said
    kept = int(re.search(r"interrupted; (\d+) finished tasks are kept", said)[1])
    assert 1 <= kept < TASKS and kept == len(list((tmp_path / "out" / "tasks").glob("*.json")))
    assert not (tmp_path / "out" / "results.parquet").exists()

    def written():
        return {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "tasks").glob("*.json")}

    before = written()
    said, _ = start("out").communicate(timeout=300)
    assert f"{TASKS} tasks, {kept} finished before" in said, said
    after = written()
    assert len(after) == TASKS and {name: after[name] for name in before} == before  # none of them was run again
    said, _ = start("whole").communicate(timeout=300)
    assert f"{TASKS} tasks\n" in said, said
    out, whole = ((tmp_path / name / "results.parquet").read_bytes() for name in ("out", "whole"))
    assert out == whole
