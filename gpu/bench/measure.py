"""The table on a GPU: every operation is checked first, then timed kernel by kernel, beside a copy in the same run.

Nothing is measured unless everything is right. What no time is left for is listed, and so is what cannot run, with the error.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.bench.cases import Case, Data, Wrong, cases
from gpu.bench.clock import Clock, Timing, copy_bandwidth
from gpu.bench.record import Launch, recording
from kvtheory.files import replacing

__all__ = ["Result", "Settings", "card", "check", "measure", "table"]


@dataclass(frozen=True)
class Settings:
    """tokens: in the order in which they are measured. seconds: of everything. share: seconds of one thing's repeats, at least `repeats` of them."""

    heads: int = 8
    dim: int = 128
    group: int = 4
    tokens: tuple[int, ...] = (32768, 1 << 20, 4096, 262144)
    checked: tuple[int, ...] = (257, 1025)
    seconds: float = 480.0
    share: float = 0.15
    repeats: int = 5
    copy_bytes: int = 1 << 30
    only: str = ""

    def chosen(self) -> list[Case]:
        return [case for case in cases() if re.search(self.only, case.name)]


@dataclass
class Result:
    """All that is written as JSON. rows: one a kernel, operation and size; operations: one an operation and size."""

    card: dict[str, Any]
    copy_bytes_a_second: float = 0.0
    checked: list[str] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(self.__dict__, indent=1) + "\n", encoding="utf-8")


def card(xp: Any) -> dict[str, Any]:
    """What the driver says of the current device, and clocks by nvidia-smi where there is one. Whatever cannot be had is None."""

    def ask(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except Exception:
            return None

    runtime = xp.cuda.runtime
    device = int(xp.cuda.Device().id)
    found = ask(lambda: runtime.getDeviceProperties(device)) or {}
    name = found.get("name", "unknown")
    properties = {
        key: int(found[key])
        for key in ("multiProcessorCount", "l2CacheSize", "totalGlobalMem", "clockRate", "memoryClockRate", "memoryBusWidth", "major", "minor")
        if key in found
    }  # fmt: skip
    smi = None
    if program := shutil.which("nvidia-smi"):
        fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
        command = [program, f"--query-gpu={fields}", "--format=csv,noheader", f"--id={device}"]
        done = ask(lambda: subprocess.run(command, capture_output=True, text=True, check=True, timeout=20))
        said = done.stdout.strip() if done else ""
        smi = dict(zip(fields.split(","), (one.strip() for one in said.split(",")))) if said else None
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "properties": properties,
        "nvidia-smi": smi,
        "driver": ask(lambda: int(runtime.driverGetVersion())),
        "runtime": ask(lambda: int(runtime.runtimeGetVersion())),
        "nvrtc": ask(lambda: list(xp.cuda.nvrtc.getVersion())),
        "cupy": str(xp.__version__),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _failed(case: Case, tokens: int, error: BaseException) -> dict[str, Any]:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return {"operation": case.name, "tokens": tokens, "error": f"{type(error).__name__}: {first[:300]}{place}"}


def _free(xp: Any) -> None:
    pool = getattr(xp, "get_default_memory_pool", None)
    if pool is not None:
        pool().free_all_blocks()


def check(xp: Any, settings: Settings, result: Result, say: Callable[[str], None] = print) -> bool:
    """Every operation at the small sizes against the reference. False if one is wrong; one that cannot run is an error, not wrong."""
    broken: set[str] = set()
    for tokens in settings.checked:
        # its arrays are shared by all operations
        data = Data(xp, settings.heads, tokens, settings.dim, settings.group)
        for case in settings.chosen():
            if case.name in broken:
                continue
            try:
                task = case.make(data)
                task.check(task.run())
                if task.plain is not None and tokens == settings.checked[0]:
                    _plain(task.plain, case, tokens, result)
                result.checked.append(f"{case.name}, {tokens} tokens")
            except Wrong as error:
                result.wrong.append(_failed(case, tokens, error))
                say(f"WRONG  {case.name}, {tokens} tokens: {error}")
            except Exception as error:
                broken.add(case.name)
                result.errors.append(_failed(case, tokens, error))
                say(f"ERROR  {result.errors[-1]['operation']}: {result.errors[-1]['error']}")
    return not result.wrong


def _plain(run: Callable[[], Any], case: Case, tokens: int, result: Result) -> bool:
    try:
        run()
        return True
    except Exception as error:
        result.errors.append({**_failed(case, tokens, error), "of": "array version"})
        return False


def _grouped(calls: Sequence[Launch]) -> Iterable[tuple[tuple[str, str], list[Launch]]]:
    out: dict[tuple[str, str], list[Launch]] = {}
    for one in calls:
        out.setdefault((one.file, one.kernel), []).append(one)
    return out.items()


def measure(
    xp: Any,
    settings: Settings,
    result: Result,
    say: Callable[[str], None] = print,
    save: Callable[[], None] = lambda: None,
    start: float | None = None,
) -> None:
    """Fills `result.rows` and `.operations`, until `settings.seconds` after `start`; what is then left is in `result.left`."""
    start = time.monotonic() if start is None else start
    cache = result.card["properties"].get("l2CacheSize", 0)
    clock = Clock(xp, min(max(2 * cache, 64 << 20), settings.copy_bytes), settings.share, settings.repeats)
    result.copy_bytes_a_second = copy_bandwidth(clock, settings.copy_bytes)
    say(f"copy: {result.copy_bytes_a_second / 1e9:.0f} GB/s, {settings.copy_bytes >> 20} MiB read and as many written")
    broken = {one["operation"] for one in result.errors if one.get("of") is None}
    took: dict[str, tuple[int, float]] = {}
    for tokens in settings.tokens:
        _free(xp)
        data = Data(xp, settings.heads, tokens, settings.dim, settings.group)
        for case in settings.chosen():
            if case.name in broken or tokens > case.most:
                continue
            spent = time.monotonic() - start
            # a longer layer takes as much longer, at worst; the first time nobody knows
            before, seconds = took.get(case.name, (tokens, 5.0))
            guess = seconds * max(1.0, tokens / before)
            if spent + guess > settings.seconds:
                result.left.append(
                    f"{case.name}, {tokens} tokens: {guess:.0f} s expected, {settings.seconds - spent:.0f} s left"
                )
                continue
            try:
                _one(case, data, clock, result, say)
            except Exception as error:
                result.errors.append(_failed(case, tokens, error))
                say(f"ERROR  {case.name}, {tokens} tokens: {result.errors[-1]['error']}")
            took[case.name] = tokens, time.monotonic() - start - spent
            _free(xp)
            save()
    _compare(result)
    result.seconds = time.monotonic() - start
    save()


def _one(case: Case, data: Data, clock: Clock, result: Result, say: Callable[[str], None]) -> None:
    copy = result.copy_bytes_a_second
    task = case.make(data)
    with recording() as calls:
        task.run()
    if not calls:
        raise RuntimeError(f"no kernel is launched for {data.tokens} tokens")
    device_seconds, moved = 0.0, 0
    for (file, kernel), own in _grouped(calls):
        timings = [clock.time(one.again) for one in own]
        seconds, nbytes = sum(t.median for t in timings), sum(one.nbytes for one in own)
        device_seconds, moved = device_seconds + seconds, moved + nbytes
        result.rows.append({
            "operation": case.name, "tokens": data.tokens, "file": file, "kernel": kernel, "launches": len(own), "bytes": nbytes,
            "seconds": seconds, "least": sum(t.least for t in timings), "most": sum(t.most for t in timings),
            "repeats": min(t.repeats for t in timings), "bytes_a_second": nbytes / seconds, "of_copy": nbytes / seconds / copy,
        })  # fmt: skip
    row: dict[str, Any] = {
        "operation": case.name, "tokens": data.tokens, "kernels_seconds": device_seconds, "bytes": task.nbytes or moved,
        "of_copy": (task.nbytes or moved) / device_seconds / copy, "launches": len(calls), "fp16_bytes": data.fp16_bytes, "array_seconds": None, "note": task.note,
        **task.facts,
    }  # fmt: skip
    calls.clear()
    if task.plain is not None:
        try:
            timing: Timing = clock.time(task.plain)
            row["array_seconds"] = timing.median
        except Exception as error:
            row["note"] = _failed(case, data.tokens, error)["error"]
    result.operations.append(row)
    against = f", array version {row['array_seconds'] * 1e6:.0f} us" if row["array_seconds"] else ""
    say(f"{case.name}, {data.tokens} tokens: {device_seconds * 1e6:.0f} us, {row['of_copy']:.0%} of copy{against}")


def _compare(result: Result) -> None:
    """Attention on codes beside the fp16 kernel, and beside decoding first."""
    seconds = {(o["operation"], o["tokens"]): o["kernels_seconds"] for o in result.operations}
    for row in result.operations:
        name, tokens = row["operation"], row["tokens"]
        exact = seconds.get(("Full attend", tokens))
        if not name.endswith(" attend") or name == "Full attend" or exact is None:
            continue
        row["fp16_attend_seconds"] = exact
        row["speed_of_fp16"] = exact / row["kernels_seconds"]
        row["target_speed_of_fp16"] = 0.7 * 16 / row["held bits"]
        decode = seconds.get((name.replace(" attend", " decode"), tokens))
        row["decompress_then_attend_seconds"] = None if decode is None else decode + exact


def table(result: Result) -> str:
    """Markdown: kernels, then operations, then what is missing and why."""
    name, copy = result.card["name"], result.copy_bytes_a_second
    lines = [
        f"{name}, driver {result.card['driver']}, {result.card['date']}; copy {copy / 1e9:.0f} GB/s.", "",
        "| operation | tokens | kernel | bytes that must move | us | GB/s | of copy |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in sorted(result.rows, key=lambda r: (r["operation"], r["tokens"])):
        lines.append(
            f"| {r['operation']} | {r['tokens']} | {r['file']} `{r['kernel']}` | {r['bytes']} | {r['seconds'] * 1e6:.1f} "
            f"| {r['bytes_a_second'] / 1e9:.0f} | {r['of_copy']:.0%} |"
        )
    lines += [
        "", "| operation | tokens | kernels, us | of copy | array version, us | bits a number | speed of fp16 | target | decompress, then attend, us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip

    def number(value: float | None, form: str, times: float = 1.0) -> str:
        return "-" if value is None else format(value * times, form)

    for r in sorted(result.operations, key=lambda r: (r["operation"], r["tokens"])):
        lines.append(
            f"| {r['operation']} | {r['tokens']} | {r['kernels_seconds'] * 1e6:.1f} | {r['of_copy']:.0%} "
            f"| {number(r['array_seconds'], '.1f', 1e6)} | {number(r.get('held bits'), '.2f')} | {number(r.get('speed_of_fp16'), '.2f')} "
            f"| {number(r.get('target_speed_of_fp16'), '.2f')} | {number(r.get('decompress_then_attend_seconds'), '.1f', 1e6)} |"
        )
    for title, own in (
        ("Wrong", [f"{e['operation']}, {e['tokens']} tokens: {e['error']}" for e in result.wrong]),
        ("Errors", [f"{e['operation']}, {e['tokens']} tokens{' (array version)' if e.get('of') else ''}: {e['error']}" for e in result.errors]),
        ("Not measured, for want of time", result.left),
    ):  # fmt: skip
        if own:
            lines += ["", f"{title}:", "", *(f"- {one}" for one in own)]
    return "\n".join(lines) + "\n"
