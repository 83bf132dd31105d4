"""A command in a process of its own, in which something goes wrong at a chosen moment; and whether what it leaves is whole.

Moments are counted in *events*: each file under a folder that is opened for writing, each rename, removal and new folder, as Python's audit
hooks tell of them before they happen. The same command has the same events, so "before the 7th" is the same moment every time.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
#: seconds in which a command here must have ended by itself, on a busy machine
PATIENCE = 120.0


@dataclass(frozen=True)
class Ended:
    """status: exit status, or minus the signal. said: all that it printed. events: how many it came to. seconds: from `end` until all its
    processes were gone; lingered: from the end of the command's own process."""

    status: int
    said: str
    events: int
    seconds: float
    lingered: float

    @property
    def last(self) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        return lines[-1] if lines else ""


class _Hook:
    """Counts events under a folder; at number `at` (from 0) and `act`: "kill" ends the process, "full" is a full disk from then on."""

    def __init__(self, under: Path, act: str | None, at: int | None, count: Any) -> None:
        self.under, self.act, self.at, self.count, self.seen = str(under), act, at, count, 0
        self.own = os.getpid()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(flags, int) or not flags & _WRITES:
                return
            needs_room = True
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            path, needs_room = args[0], event == "os.mkdir"
        else:
            return
        if not isinstance(path, (str, bytes, os.PathLike)) or not os.fsdecode(path).startswith(self.under):
            return
        if os.getpid() != self.own:  # a worker
            return
        now, self.seen = self.seen, self.seen + 1
        os.pwrite(self.count, str(self.seen).encode(), 0)
        if self.at is None or now < self.at:
            return
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif needs_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))


def start(
    command: Callable[[], Any], log: Path, under: Path, act: str | None = None, at: int | None = None, *,
    largest: int | None = None,
) -> int:  # fmt: skip
    """The process id, in a session of its own. largest: of any file that it may write, bytes."""
    log.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ["COLUMNS"] = "300"
        count = os.open(log.with_suffix(".events"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        sys.addaudithook(_Hook(under, act, at, count))
        try:
            command()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
    finally:
        os._exit(status)


def end(pid: int, log: Path) -> Ended:
    """Wait for it, and until nothing of its session is left."""
    began = time.monotonic()
    _, status = os.waitpid(pid, 0)
    own = time.monotonic() - began
    while (left := session(pid)) and time.monotonic() - began < PATIENCE:
        time.sleep(0.01)
    seconds = time.monotonic() - began
    for one in left:
        os.kill(one, signal.SIGKILL)
    counted = log.with_suffix(".events")
    events = int(counted.read_text() or 0) if counted.exists() else 0
    said = log.read_text(errors="replace") if log.exists() else ""
    seconds = float("inf") if left else seconds
    return Ended(os.waitstatus_to_exitcode(status), said, events, seconds, seconds - own)


def run(
    command: Callable[[], Any], log: Path, under: Path, act: str | None = None, at: int | None = None, **limits: Any
) -> Ended:
    """`start` and `end`."""
    return end(start(command, log, under, act, at, **limits), log)


def session(leader: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(entry))
    return found


# -- what is left ------------------------------------------------------------------------------------------------------


def visible(folder: Path) -> list[Path]:
    """Files of a folder under names that anybody reads: no part of the path begins with a dot."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return sorted(p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def scratch(folder: Path) -> int:
    """How many files that were being written are left, under names that nobody reads."""
    return sum(p.is_file() and p.name != ".lock" for p in folder.rglob("*")) - len(visible(folder))


def halves(folder: Path) -> list[str]:
    """The visible files that are not whole."""
    return [str(path.relative_to(folder)) for path in visible(folder) if not _whole(path)]


def _whole(path: Path) -> bool:
    data = path.read_bytes()
    try:
        if path.suffix == ".json":
            return isinstance(json.loads(data), dict) and data.strip().endswith(b"}")
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return bool(pyarrow.parquet.read_table(path).num_rows)
        if path.suffix == ".safetensors":
            from kvtheory import Cache

            return all(layer.tokens for layer in Cache.load(path))
    except Exception:
        return False
    ends = {
        ".png": b"IEND\xaeB`\x82", ".svg": b"</svg>\n", ".pdf": b"%%EOF\n", ".html": b"</html>", ".csv": b"\n", ".txt": b"\n", ".state": b"",
    }  # fmt: skip
    return len(data) > 0 and data.rstrip(b"\n").endswith(ends[path.suffix].rstrip(b"\n"))


def content(folder: Path) -> dict[str, Any]:
    """What results say, by file: without seconds, which differ from run to run, and what is made of them."""
    found: dict[str, Any] = {}
    for path in visible(folder):
        if (
            path.name == "timings.parquet" or path.suffix == ".html"
        ):  # the page is drawn from the ledger, with its seconds
            continue
        data: Any = path.read_bytes()
        if path.suffix == ".json":
            data = _timeless(json.loads(data))
        found[str(path.relative_to(folder))] = data
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in ("seconds", "timing")}
    return [_timeless(v) for v in value] if isinstance(value, list) else value
