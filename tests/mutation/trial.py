"""One mutant tried: its module written into a copy of the tree, the tests that reach it run there, in a forked process.

The fork has NumPy, SciPy, hypothesis and pytest loaded and nothing of ours, so a trial costs the tests alone. First come the tests that
executed the mutant's statement on the unchanged sources, the quickest first, up to the first failure; then, for what survives them,
all tests of the package (a value remembered by one test may be looked at by another).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: what the copy needs; everything that git knows or would take
TREES = ("kvtheory", "reference", "gpu", "proofs_checks", "figures", "tests", "docs", "scripts", "examples")
LOADED = [
    "numpy",
    "scipy.special",
    "scipy.stats",
    "scipy.linalg",
    "scipy.integrate",
    "scipy.optimize",
    "scipy.sparse.linalg",
    "hypothesis",
    "hypothesis.extra.numpy",
    "hypothesis.stateful",
    "pytest",
    "flint",
    "ml_dtypes",
    "safetensors.numpy",
    "constriction",
    "isal.isal_zlib",
    "xml.dom",
    "concurrent.futures.process",
    "multiprocessing",
]


def copy(root: Path, to: Path) -> None:
    """The tree as it stands, compiled."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for name in TREES:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for path in root.iterdir():
        if path.is_file():
            shutil.copy2(path, to / path.name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j1", str(to)], check=False, stdout=subprocess.DEVNULL)


class Reached:
    """A pytest plugin: seconds of each test, and the lines of `folder`'s modules that it executed."""

    def __init__(self, folder: Path, package: Path, lines: bool) -> None:
        self.prefix, self.package, self.lines = f"{folder}/", str(package), lines
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, dict[str, set[int]]] = {}
        self.now: dict[str, set[int]] = {}

    def _global(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.package):
            return None
        lines = self.now.setdefault(name[len(self.prefix) :], set())
        lines.add(frame.f_lineno)

        def local(frame: Any, event: str, arg: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return local

        return local

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.now = self.tests.setdefault(item.nodeid, {})
        self.seconds[item.nodeid] = 0.0
        if self.lines:
            sys.settrace(self._global)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            sys.settrace(None)


class Select:
    """A pytest plugin: these tests, in this order."""

    def __init__(self, order: Sequence[str]) -> None:
        self.rank = {name: i for i, name in enumerate(order)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])


def forked(copied: Path, log: Path, run: Callable[[], int], cpu_seconds: float, wall_seconds: float) -> str:
    """`run()` in a fork that stands in `copied`: "passed", "failed" or "timeout"."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setsid()
            out = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            limit = int(cpu_seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
            os.chdir(copied)
            sys.path[:] = [str(copied), *(p for p in sys.path if p not in ("", str(Path.cwd())))]
            os.environ["PYTHONPATH"] = str(copied)
            for name in [n for n in sys.modules if n.partition(".")[0] in (*TREES, "kvtheory")]:
                del sys.modules[name]  # ours, and of the tree outside the copy
            code = run()
        except BaseException as problem:
            print(f"{type(problem).__name__}: {problem}")
        finally:
            sys.stdout.flush()
            os._exit(code)
    start = time.monotonic()
    while time.monotonic() - start < wall_seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status):
                return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "failed"
            return "passed" if os.WEXITSTATUS(status) == 0 else "failed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _pytest(arguments: list[str], plugin: Any) -> int:
    import pytest

    sys.dont_write_bytecode = not isinstance(plugin, Reached)
    return int(
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", *arguments], plugins=[plugin])
    )


def baseline(copied: Path, package: Path, tests: Sequence[str], kept: Path) -> dict[str, Any]:
    """{"seconds": {test: s}, "lines": {test: {module: [lines]}}} of the unchanged sources; RuntimeError where a test fails."""
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    half, log = kept.with_suffix(".part"), kept.with_suffix(".log")

    def run(lines: bool) -> int:
        plugin = Reached(copied, package, lines)
        code = _pytest([*tests], plugin)
        if code == 0:
            half.write_text(
                json.dumps(
                    {t: {m: sorted(n) for m, n in by.items()} for t, by in plugin.tests.items()}
                    if lines
                    else plugin.seconds
                )
            )
        return code

    found = []
    for lines in (False, True):  # tracing makes tests some times slower: their seconds are those of a pass without it
        if forked(copied, log, lambda lines=lines: run(lines), 3600, 7200) != "passed":
            raise RuntimeError(
                f"the tests fail before any mutant:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
            )
        found.append(json.loads(half.read_text(encoding="utf-8")))
    half.unlink()
    kept.write_text(json.dumps({"seconds": found[0], "lines": found[1]}), encoding="utf-8")
    return {"seconds": found[0], "lines": found[1]}


def order(base: dict[str, Any], module: str, lines: tuple[int, int] | None) -> list[str]:
    """The tests that executed one of these lines of the module, the quickest first; all for lines outside of functions."""
    if lines is None:
        chosen = list(base["seconds"])
    else:
        span = range(lines[0], lines[1] + 1)
        chosen = [t for t, by in base["lines"].items() if not set(by.get(module, ())).isdisjoint(span)]
    return sorted(chosen, key=lambda t: base["seconds"][t])


def attempt(
    copied: Path, module: str, text: str, base: dict[str, Any], lines: tuple[int, int] | None, log: Path
) -> tuple[str, str]:
    """("killed" | "timeout" | "survived", the first test that failed or ""), with the module put back afterwards."""
    path = copied / module
    before = path.read_bytes()
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    try:
        path.write_text(text, encoding="utf-8")
        narrow = order(base, module, lines)
        for chosen in (narrow, order(base, module, None) if len(narrow) < len(base["seconds"]) else []):
            if not chosen:
                continue
            files = list(dict.fromkeys(t.partition("::")[0] for t in chosen))
            cost = sum(base["seconds"][t] for t in chosen)
            outcome = forked(
                copied, log, lambda c=chosen, f=files: _pytest(["-x", *f], Select(c)), 20 + 4 * cost, 60 + 20 * cost
            )
            if outcome != "passed":
                said = log.read_text(encoding="utf-8", errors="replace").splitlines()
                by = next((s.split()[1] for s in reversed(said) if s.startswith(("FAILED ", "ERROR "))), "")
                return ("timeout" if outcome == "timeout" else "killed"), by
        return "survived", ""
    finally:
        path.write_bytes(before)


def load() -> None:
    """Import what every trial needs, once."""
    import importlib

    for name in LOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
