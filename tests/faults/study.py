"""What is tried, and what must be so afterwards. Each function takes commands and a scratch folder, and returns what happened, or raises AssertionError.

killed        the process is killed before an event: what lies there under a name is whole; the command, given again, gives the undisturbed results
full          from an event on, nothing can be created (no space left): an error that says so, no traceback, nothing half-written; then as above
small         the same with a real limit: a file system of so many kilobytes, or of no file longer than that
unwritable    the folder cannot be written: refused with its name, at once
together      two of the same in one folder at the same time: each ends with the undisturbed results, or is refused by name
interrupted   Ctrl-C, as a terminal sends it: all processes are gone within 2 s, and the last line says what there is
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.commands import Command
from tests.faults.instrument import PATIENCE, Ended, content, end, halves, run, scratch, session, start

#: seconds from Ctrl-C until nothing runs
WITHIN = 2.0
#: seconds that a process has to finish forking: CPython loses a KeyboardInterrupt that comes in the midst of its hooks there
SETTLED = 0.3


class Study:
    """Disturbances of one command. expected: events and content of the undisturbed one."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command, self.folder, self.count = command, folder / command.name.replace(" ", ""), 0
        out, ended = self._run("undisturbed")
        assert ended.status == 0, ended.said
        self.events, self.expected = ended.events, content(out)
        assert self.events and self.expected and not halves(out) and not scratch(out), (self.events, halves(out))

    def _new(self, name: str) -> Path:
        self.count += 1
        out = self.folder / f"{self.count}-{name}" / "out"
        out.mkdir(parents=True)
        self.command.prepare(out)
        return out

    def _run(self, name: str, act: str | None = None, at: int | None = None, **limits: Any) -> tuple[Path, Ended]:
        out = self._new(name)
        return out, run(partial(self.command.run, out), out.parent / "log", out, act, at, **limits)

    def _again(self, out: Path) -> None:
        """Given again in what is left: the undisturbed results, and no other file."""
        ended = run(partial(self.command.again, out), out.parent / "again.log", out)
        assert ended.status == 0, ended.said
        found = content(out)
        assert found == self.expected, [n for n in {*found, *self.expected} if found.get(n) != self.expected.get(n)]

    def points(self, most: int) -> list[int]:
        """Numbers of events, evenly spread, the first and the last among them."""
        if self.events <= most:
            return list(range(self.events))
        return (
            sorted({round(i * (self.events - 1) / (most - 1)) for i in range(most)}) if most > 1 else [self.events // 2]
        )

    def killed(self, most: int) -> str:
        left, points = 0, self.points(most)
        for at in points:
            out, ended = self._run(f"killed-{at}", "kill", at)
            assert ended.status == -signal.SIGKILL and ended.events == at + 1, (at, ended)
            assert ended.lingered < WITHIN, "workers outlived the killed process"
            assert not halves(out), (at, halves(out))
            left += scratch(out)
            self._again(out)
            shutil.rmtree(out.parent)
        return f"{len(points)} of {self.events} events: none half-written, all resumed to the same bytes; {left} scratch files left under dot names"

    def full(self, most: int) -> str:
        points = self.points(most)
        for at in points:
            out, ended = self._run(f"full-{at}", "full", at)
            self._failed(out, ended, at)
            shutil.rmtree(out.parent)
        return f"{len(points)} of {self.events} events: an error that says so, none half-written, all resumed to the same bytes"

    def _failed(self, out: Path, ended: Ended, at: object) -> None:
        if ended.status == 0:  # what came after needed no room
            assert content(out) == self.expected, at
            return
        said = ("No space left on device", "File too large")
        assert ended.status > 0 and any(word in ended.said for word in said), (at, ended)
        # a library function raises OSError, which the process here prints; a command says it in a sentence
        assert "Traceback" not in ended.said or self.command.name == "save", (at, ended.said)
        assert not halves(out), (at, halves(out))
        assert not scratch(out), at
        self._again(out)

    def small(self, kilobytes: Sequence[int]) -> str:
        """A file system of that size, where this process may mount one; else no file may be longer."""
        mounted = 0
        for size in kilobytes:
            out = self._new(f"small-{size}")
            kept = out.parent / "kept"
            here = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(out)], capture_output=True, check=False
            ).returncode
            if here == 0:
                mounted += 1
                try:
                    try:
                        self.command.prepare(out)
                    except OSError:
                        continue
                    ended = run(partial(self.command.run, out), out.parent / "log", out)
                    shutil.copytree(out, kept)
                finally:
                    subprocess.run(["umount", str(out)], check=True)
                self._failed(kept, ended, f"{size} kB")
            else:
                ended = run(partial(self.command.run, out), out.parent / "log", out, largest=size << 10)
                self._failed(out, ended, f"{size} kB a file")
        of = "a full file system" if mounted else "no file above it (no right to mount)"
        return f"{len(kilobytes)} sizes, {min(kilobytes)} to {max(kilobytes)} kB, {of}: as above"

    def unwritable(self) -> str:
        ways = {"a file": _a_file, "/proc": _proc, "a read-only file system": _mounted}
        tried = []
        for name, way in ways.items():
            base = self.folder / f"unwritable-{name.replace('/', '')}"
            base.mkdir(parents=True)
            if (out := way(base)) is None:
                continue
            tried.append(name)
            before = sorted(str(p) for p in base.rglob("*"))
            ended = run(partial(self.command.run, out), self.folder / "unwritable.log", out)
            if way is _mounted:
                subprocess.run(["umount", str(out)], check=True)
            assert ended.status > 0, (name, ended)
            assert str(out) in ended.said.replace("\n", ""), (name, ended.said)
            assert "Traceback" not in ended.said or self.command.name == "save", (name, ended.said)
            assert sorted(str(p) for p in base.rglob("*")) == before, name
        return f"{', '.join(tried)}: refused by name, nothing written"

    def together(self, times: int) -> str:
        refused = 0
        for _ in range(times):
            out = self._new("together")
            logs = [out.parent / f"log{i}" for i in range(2)]
            ended = [
                end(pid, log) for pid, log in [(start(partial(self.command.run, out), log, out), log) for log in logs]
            ]
            late = [one for one in ended if one.status]
            refused += len(late)
            assert len(late) < 2 and all("another" in one.said and "Traceback" not in one.said for one in late), ended
            assert not halves(out) and not scratch(out), halves(out)
            found = content(out)
            assert found == self.expected, [n for n in {*found, *self.expected} if found.get(n) != self.expected.get(n)]
        return f"{times} times two: the same bytes as one alone" + (f", {refused} refused by name" if refused else "")


def _a_file(base: Path) -> Path:
    """A file in the place of the folder."""
    (base / "taken").write_text("no folder")
    return base / "taken"


def _proc(_: Path) -> Path:
    return Path("/proc/nothing")


def _mounted(base: Path) -> Path | None:
    """Permissions would not stop root; None where this process may not mount."""
    out = base / "out"
    out.mkdir()
    return (
        out
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro", "none", str(out)], capture_output=True, check=False
        ).returncode
        == 0
        else None
    )


def interrupted(
    command: Command, folder: Path, moments: Sequence[int], least: int = 0, settled: float = SETTLED
) -> tuple[float, str]:
    """(seconds of the slowest, last line of one): Ctrl-C when so many events were seen, to the whole session. least: processes that it must have then."""
    slowest, last = 0.0, ""
    for at in moments:
        out = folder / f"interrupted-{command.name.replace(' ', '')}-{at}" / "out"
        out.mkdir(parents=True)
        command.prepare(out)
        log = out.parent / "log"
        pid, began = start(partial(command.run, out), log, out), time.monotonic()
        counted = log.with_suffix(".events")
        while not (counted.exists() and int(counted.read_text() or 0) >= at and len(session(pid)) >= least):
            assert time.monotonic() - began < PATIENCE and os.waitpid(pid, os.WNOHANG) == (0, 0), (at, log.read_text())
            time.sleep(0.002)
        time.sleep(settled)
        os.killpg(pid, signal.SIGINT)
        ended = end(pid, log)
        assert ended.status == 130, (at, ended)
        assert ended.seconds < WITHIN, (at, ended)
        assert "interrupted" in ended.last and "Traceback" not in ended.said, ended.said
        assert not halves(out) and not scratch(out), halves(out)
        slowest, last = max(slowest, ended.seconds), ended.last.replace(str(folder), "")
    return slowest, last
