"""A Dask cluster of separate processes on loopback: one worker is killed in the middle, and the Parquet and the ledger are those of a local run, byte for byte."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import reference
from kvtheory import Cache, sweep
from kvtheory.cli import app
from proofs_checks import tasks as claim_tasks
from reference import compare
from tests.sweep.test_compare import SPLIT, captured, command, sources  # noqa: F401  (fixtures)

pytest.importorskip("distributed")
pytest.importorskip("pyarrow.parquet")

#: seconds in which a process on this machine must have started or said that another is gone; a busy machine takes tens of them
PATIENCE = 240
START_WORKER = "import sys; from distributed.cli.dask_worker import main; sys.exit(main(sys.argv[1:]))"
START_SCHEDULER = "import sys; from distributed.cli.dask_scheduler import main; sys.exit(main(sys.argv[1:]))"


def slowly(folder, run, *arguments):
    """`run`, which leaves a file with the number of its process, and waits in the middle until the test lets it go on."""
    path = Path(folder)
    own = path / f"started-{time.monotonic_ns()}-{os.getpid()}"
    own.touch()
    deadline = time.monotonic() + PATIENCE
    while not (path / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return run(*arguments)


def start(code, *arguments):
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip


@contextmanager
def cluster(folder):
    """(address, the workers' processes): a scheduler and two workers of one thread, each a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    processes = [start(START_SCHEDULER, "--host", "127.0.0.1", "--port", port, "--no-dashboard")]
    try:
        options = ("--nthreads", 1, "--nworkers", 1, "--no-nanny", "--no-dashboard", "--local-directory", folder)
        processes += [start(START_WORKER, address, *options, "--name", name) for name in ("a", "b")]
        yield address, processes[1:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(what, processes):
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing happened"
        assert all(process.poll() is None for process in processes), "a process of the cluster ended by itself"
        time.sleep(0.02)
    return found


def slow(tasks, signs):
    """The same tasks, slowly."""
    return [sweep.Task(t.key, slowly, (str(signs), t.run, *t.arguments), t.version) for t in tasks]


@contextmanager
def one_dies(workers, signs):
    """While the block runs slow tasks: when both workers are in the middle of one, the first dies there, and the other goes on."""
    seen = []

    def kill():
        begun = wait_for(
            lambda: {int(p.name.rsplit("-", 1)[1]) for p in signs.glob("started-*")} >= {w.pid for w in workers},
            workers,
        )
        seen.append(begun)
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0].wait()
        (signs / "go").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        (signs / "go").touch()
        killer.join()
    assert workers[0].poll() == -signal.SIGKILL and workers[1].poll() is None and seen == [True]


def test_a_killed_worker_changes_no_byte(tmp_path, sources):  # noqa: F811
    path = tmp_path / "cache.safetensors"
    Cache([captured(3), captured(7, seed=1)], meta={"model": "toy", "text": "noise"}).save(path)
    codecs = [
        reference.Full(), *(reference.TurboQuant(bits=b) for b in (2, 3, 4)), reference.KIVI(bits=2, group=8, window=8),
        reference.SnapKV(keep=0.5, sinks=1, window=4), reference.Pipeline([reference.SnapKV(keep=0.5, window=4), reference.QJL()]),
    ]  # fmt: skip
    tasks = compare.plan([compare.source(path)], codecs, split=SPLIT)
    with sweep.executor(1) as pool:
        rows, timings = sweep.run(tasks, pool, tmp_path / "local", same={})
    local, _ = compare.write(tmp_path / "local", rows, timings)

    signs = tmp_path / "signs"
    signs.mkdir()
    with cluster(tmp_path / "scratch") as (address, workers):
        with one_dies(workers, signs), sweep.executor(scheduler=address) as pool:
            rows, timings = sweep.run(slow(tasks, signs), pool, tmp_path / "cluster", same={})
        # the same command, here and on what is left of the cluster
        options = ["--cache", path, "--codecs", "Full,QJL,KIVI", "--bits", "2", "--no-figures", "--out"]
        for name, more in (("here", ["--jobs", 1]), ("there", ["--scheduler", address])):
            code, said = command(*options, tmp_path / name, *more)
            assert code == 0, said
        written = [(tmp_path / name / "results.parquet").read_bytes() for name in ("here", "there")]
        assert written[0] == written[1]
    begun = [p.name for p in signs.glob("started-*")]
    # what the dead worker had in hand was done again by the other
    assert len(begun) > len(tasks) and sum(name.endswith(f"-{workers[0].pid}") for name in begun) >= 1
    there, _ = compare.write(tmp_path / "cluster", rows, timings)
    assert there.read_bytes() == local.read_bytes()
    assert np.isfinite([t["encode_seconds"] for t in timings]).all()


def test_a_killed_worker_changes_no_claim(tmp_path, monkeypatch):
    """`verify --scheduler`: the ledger and the figures' data are those of the plain run, but for the seconds."""
    signs = tmp_path / "signs"
    signs.mkdir()
    plan = claim_tasks.plan
    monkeypatch.setattr(claim_tasks, "plan", lambda *given: slow(plan(*given), signs))
    options = ["verify", "--claim", "trie/*", "--claim", "distortion/attention-*", "--no-figures", "--out"]
    with cluster(tmp_path / "scratch") as (address, workers):
        with one_dies(workers, signs):
            done = CliRunner().invoke(app, [*options, str(tmp_path / "there"), "--scheduler", address])
        assert done.exit_code == 0, done.output
    begun = [p.name for p in signs.glob("started-*")]
    done = CliRunner().invoke(app, [*options, str(tmp_path / "here")])
    assert done.exit_code == 0, done.output
    ledgers = {}
    for name in ("here", "there"):
        ledger = json.loads((tmp_path / name / "ledger.json").read_text())
        assert all(record.pop("seconds") >= 0 for record in ledger["claims"])
        files = sorted((tmp_path / name / "data").rglob("*.json"))
        ledgers[name] = [json.dumps(ledger), *((p.relative_to(tmp_path / name), p.read_bytes()) for p in files)]
    assert ledgers["here"] == ledgers["there"] and len(ledgers["here"]) > 1
    # the claim that the dead worker had in hand was checked again by the other
    claims = len(json.loads(ledgers["here"][0])["claims"])
    assert claims >= 6 and len(begun) > claims
