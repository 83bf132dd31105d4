"""The predicted table: what bounds each kernel on each card, from its launches, its machine code and published peaks. Nothing here is measured.

For a launch of W warps that must move B bytes on a card with P processors at f Hz and a bandwidth of M bytes a second:

    memory        B / (0.9 M): copies reach about nine tenths of the published peak
    issue         W x instructions / (4 P f): each of the four schedulers of a processor issues one instruction of a warp a cycle
    shared        W x 32 lanes x bytes of shared memory / (128 P f)
    float64       W x 32 x float64 instructions / (units P f)
    conversions   W x 32 x conversions and special functions / (16 P f)
    latency       LATENCY, where the launch has too few warps to fill the card, and always what a launch takes at least

The predicted time is the largest. Bytes and warps are exact: launches are recorded in the simulator at two sizes and carried on along the line
between. Instructions are an estimate: each once through (both sides of a branch, slow paths too), those in loops times the factor

    max(1, bytes that must move / bytes that the code moves once through, bytes written / bytes that the code stores once through),

and for products of matrices times as often as their multiply-adds, counted from the shapes, need. `--write` puts the table into docs/gpu-bench.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu.bench.cards import CARDS, LIMITS, Card, occupancy
from gpu.bench.record import Launch, recording
from gpu.bench.sass import Code, compiled, read, tool_version
from gpu.compile import ARCHITECTURES
from gpu.module import OPTIONS, Source, simulator, sources
from gpu.simt.build import with_includes
from kvtheory.files import replacing

__all__ = ["PAGE", "Prediction", "Work", "bounds", "digest", "main", "predictions", "works"]

PAGE = Path(__file__).parents[2] / "docs" / "gpu-bench.md"
MARKS = "<!-- predicted: made by python -m gpu.bench --write -->", "<!-- end of predicted -->"
TOKENS, HEADS, DIM, GROUP = 32768, 8, 128, 4
#: sizes that are run in the simulator: multiples of all groups, windows and tiles
SIZES = (512, 1024)
#: seconds that a kernel takes whatever it does: launch and one pass through memory
LATENCY = 4e-6
COPY = 0.9


@dataclass(frozen=True)
class Work:
    """One kernel of one operation at TOKENS tokens: launches, bytes, blocks, threads of a block, dynamic shared memory,
    multiply-adds or 0, bytes written.
    """

    operation: str
    file: str
    kernel: str
    instances: tuple[str, ...]
    launches: int
    nbytes: float
    blocks: float
    block: int
    shared_mem: int
    multiply_adds: float
    written: float

    @property
    def warps(self) -> float:
        return self.blocks * -(-self.block // 32)


def _dims(a: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in a.shape)


def _products(one: Launch) -> float:
    """Multiply-adds of a product of matrices, by its arguments; 0 for any other kernel."""
    a = one.args
    file, kernel = one.file, one.kernel
    if file == "scores.cu" and kernel in ("statistics", "columns"):
        (heads, rows, dim), (_, tokens, _) = _dims(a[0]), _dims(a[1])
        return float(heads * rows * tokens * dim)
    if file == "profiles.cu" and kernel in ("forward", "adjoint"):
        (tokens, queries), (_, channels) = _dims(a[0]), _dims(a[1])
        return float(tokens * queries * channels * _dims(a[4])[1])
    if file == "profiles.cu" and kernel == "gram":
        (tokens, queries), (_, channels) = _dims(a[0]), _dims(a[3])
        return tokens**2 / 2 * (channels + 3 * queries)
    if file == "transform.cu" and kernel == "product":
        return float(len(a[0]) * a[1].size)
    if file == "transform.cu" and kernel == "project":
        return float(a[0].size * len(a[1]))
    tables = [x for x in a if getattr(x, "ndim", 0) == 2 and x.dtype == np.int8]
    if tables and kernel in ("signs", "decode", "add_signs", "sketched"):
        return float(tables[0].size * 32 * one.grid[0])  # blocks of 32 rows (gpu.vectors.product_grid)
    return 0.0


def works(only: str = "", heads: int = HEADS, dim: int = DIM, say: Callable[[str], None] = print) -> list[Work]:
    """Every kernel of every operation that `only` finds, at TOKENS tokens: run at SIZES in the simulator, and carried on."""
    from gpu.bench.cases import Data, cases

    out: list[Work] = []
    for case in cases():
        if not re.search(only, case.name):
            continue
        found: list[dict[tuple[str, str], list[Launch]]] = []
        for tokens in SIZES:
            data = Data(np, heads, tokens, dim, GROUP)
            with simulator("fast"):
                task = case.make(data)
                with recording() as calls:
                    task.run()
            groups: dict[tuple[str, str], list[Launch]] = {}
            for one in calls:
                groups.setdefault((one.file, one.kernel), []).append(one)
            found.append(groups)
        at = min(TOKENS, case.most)
        for key in found[1]:
            small, large = found[0].get(key, []), found[1][key]

            def carried(
                number: Callable[[Launch], float],
                small: Any = small,
                large: Any = large,
                at: int = at,
                case: Any = case,
            ) -> float:
                low, high = (sum(number(one) for one in own) for own in (small, large))
                if case.most < TOKENS:  # a Gram matrix grows with the square
                    return high * (at / SIZES[1]) ** 2
                return max(high, high + (high - low) / (SIZES[1] - SIZES[0]) * (at - SIZES[1]))

            out.append(
                Work(
                    case.name, *key, tuple(dict.fromkeys(one.instance for one in large)), len(large), carried(lambda one: one.nbytes),
                    carried(lambda one: one.blocks), int(np.prod(large[0].block)), max(one.shared_mem for one in large), carried(_products),
                    carried(lambda one: one.written),
                )
            )  # fmt: skip
        say(f"{case.name}: {len(found[1])} kernels")
    return out


@dataclass(frozen=True)
class Prediction:
    """work, its code on sm_90, registers by architecture, and on each card resident warps, seconds and what bounds them."""

    work: Work
    code: Code
    executed: dict[str, float]
    registers: dict[str, int]
    shared: int
    warps: dict[str, tuple[int, str]]
    seconds: dict[str, float]
    bound: dict[str, str]


def _executed(work: Work, code: Code) -> dict[str, float]:
    """Instructions and bytes of one warp's lane by kind, loops counted as often as the module's docstring says."""
    once, looped = code.once, code.looped
    factor = 1.0
    moved = 32 * work.warps * max(once["global bytes"], 1)
    if looped["global bytes"]:
        factor = max(1.0, work.nbytes / moved)
    if looped["stored bytes"]:
        factor = max(factor, work.written / (32 * work.warps * once["stored bytes"]))
    arithmetic = looped["multiply"] + looped["float64"]
    if work.multiply_adds and arithmetic:
        factor = max(factor, work.multiply_adds / (32 * work.warps * arithmetic))
    return {kind: once[kind] + looped[kind] * (factor - 1) for kind in once}


def bounds(work: Work, executed: dict[str, float], card: Card) -> dict[str, float]:
    """Seconds by resource."""
    cycles = card.processors * card.clock
    warps = work.warps
    return {
        "memory": work.nbytes / (COPY * card.bandwidth),
        "issue": warps * executed.get("all", 0) / (4 * cycles),
        "shared memory": warps * 32 * executed.get("shared bytes", 0) / (128 * cycles),
        "float64": warps * 32 * executed.get("float64", 0) / (LIMITS[card.architecture].float64 * cycles),
        "conversions": warps * 32 * executed.get("slow", 0) / (16 * cycles),
        "latency": LATENCY * work.launches,
    }


def predictions(found: list[Work], say: Callable[[str], None] = print) -> list[Prediction]:
    """Compiles what was launched for every architecture. Errors as `gpu.compile.compile_source`."""
    by_file: dict[tuple[str, str], set[str]] = {}
    for work in found:
        by_file.setdefault((work.file, work.kernel), set()).update(work.instances)
    code: dict[tuple[str, str], Code] = {}
    taken: dict[tuple[str, str, str], Any] = {}
    for file in sorted({file for file, _ in by_file}):
        wanted = sorted({i for (f, _), own in by_file.items() for i in own if f == file})
        for source in (s for s in sources() if s.name == file):
            own = tuple(i for i in wanted if i in source.instances and (file, i) not in code)
            if not own:
                continue
            code |= {(file, i): one for i, one in read(source, own, "90").items()}
            for architecture in ARCHITECTURES:
                resources = compiled(source, own, architecture).resources
                taken |= {(file, i, architecture): one for i, one in resources.items()}
        say(f"{file}: {len(wanted)} instances compiled for {', '.join(ARCHITECTURES)}")
    out = []
    for work in found:
        # of several instances, the one with most instructions
        instance = max(work.instances, key=lambda i: code[work.file, i].once["all"])
        machine = code[work.file, instance]
        executed = _executed(work, machine)
        registers = {a: taken[work.file, instance, a].registers for a in ARCHITECTURES}
        shared = {a: taken[work.file, instance, a].shared_bytes + work.shared_mem for a in ARCHITECTURES}
        warps = {a: occupancy(a, registers[a], shared[a], work.block) for a in ARCHITECTURES}
        seconds, bound = {}, {}
        for card in CARDS:
            times = bounds(work, executed, card)
            bound[card.name] = max(times, key=lambda name: times[name])
            seconds[card.name] = times[bound[card.name]]
        out.append(Prediction(work, machine, executed, registers, shared["90"], warps, seconds, bound))
    return out


def why(p: Prediction, card: Card) -> str:
    """One sentence: what bounds the kernel on a card, and what would have to change for it to be much faster."""
    bound = p.bound[card.name]
    each = p.work.warps * p.executed["all"] / max(p.work.nbytes, 1)
    room = 4 * card.processors * card.clock / (COPY * card.bandwidth)
    if bound == "memory":
        return f"memory: {each:.2f} warp instructions a byte, and the card issues {room:.2f} in the time of one; no byte moves twice"
    if bound == "issue":
        return f"issue slots: {each:.2f} warp instructions a byte, where memory leaves room for {room:.2f}; only fewer instructions a number help"
    if bound == "latency":
        return "latency: the launch is smaller than what it takes to start; only fewer launches help"
    if bound == "float64":
        return f"float64 units: {p.executed['float64'] / p.executed['all']:.0%} of its instructions are float64, which bits or bounds depend on"
    if bound == "shared memory":
        return f"shared memory: {p.executed['shared bytes'] * 32 * p.work.warps / max(p.work.nbytes, 1):.1f} bytes for each that must move"
    return f"conversions and special functions: {p.executed['slow'] / p.executed['all']:.0%} of its instructions, at an eighth of the rate"


def table(found: list[Prediction]) -> str:
    h200 = next(c for c in CARDS if c.name.startswith("H200"))
    lines = [
        f"Instructions are {tool_version()}; registers and shared memory by {_nvrtc()}. {TOKENS} tokens (gram: 8192), {HEADS} KV heads, d = {DIM}, float16. "
        f"Predicted, not measured.", "",
        f"| operation | kernel | bytes that must move | warp instructions a byte | shared bytes a byte | registers {', '.join(ARCHITECTURES)} "
        "| resident warps 80, 90, 100, 120 | " + " | ".join(f"{c.name}, us" for c in CARDS) + " | of copy, H200 |",
        "|" + "---|" * (8 + len(CARDS)),
    ]  # fmt: skip
    for p in found:
        w = p.work
        times = " | ".join(f"{p.seconds[c.name] * 1e6:.1f} {p.bound[c.name]}" for c in CARDS)
        share = w.nbytes / (COPY * h200.bandwidth) / p.seconds[h200.name]
        lines.append(
            f"| {w.operation} | {w.file} `{w.kernel}` | {w.nbytes:.3g} | {w.warps * p.executed['all'] / max(w.nbytes, 1):.2f} "
            f"| {32 * w.warps * p.executed.get('shared bytes', 0) / max(w.nbytes, 1):.2f} | {', '.join(str(p.registers[a]) for a in ARCHITECTURES)} "
            f"| {', '.join(str(p.warps[a][0]) for a in ARCHITECTURES)} | {times} | {share:.0%} |"
        )
    lines += ["", "What bounds each on an H200, and why it cannot be much faster:", ""]
    told: dict[tuple[str, str], str] = {}
    for p in found:
        told.setdefault(
            (p.work.file, p.work.kernel), f"- {p.work.file} `{p.work.kernel}` ({p.work.operation}): {why(p, h200)}"
        )
    lines += told.values()
    lines += ["", *_targets(found, h200)]
    return "\n".join(lines)


def _targets(found: list[Prediction], card: Card) -> list[str]:
    """The targets of the project beside what is predicted: codecs against the copy, attention against the fp16 kernel."""
    seconds: dict[str, float] = {}
    nbytes: dict[str, float] = {}
    for p in found:
        name = p.work.operation
        seconds[name] = seconds.get(name, 0.0) + p.seconds[card.name]
        nbytes[name] = nbytes.get(name, 0.0) + p.work.nbytes
    lines = [f"Targets, predicted for the {card.name}, all kernels of an operation one after another:", "", "| operation | us | of copy | target | predicted to meet it |", "|---|---|---|---|---|"]  # fmt: skip
    exact = seconds.get("Full attend")
    for name, time in seconds.items():
        share = nbytes[name] / (COPY * card.bandwidth) / time
        if name.endswith((" encode", " decode")):
            lines.append(
                f"| {name} | {time * 1e6:.1f} | {share:.0%} | 80% of copy | {'yes' if share >= 0.8 else 'no'} |"
            )
        elif name.endswith(" attend") and exact and name != "Full attend":
            own = max(
                (p for p in found if p.work.operation == name and "attend" in p.work.kernel),
                key=lambda p: p.work.nbytes,
            )
            bits = 8 * own.work.nbytes / (2 * HEADS * TOKENS * DIM)
            target, speed = 0.7 * 16 / bits, exact / time
            lines.append(
                f"| {name} | {time * 1e6:.1f} | {share:.0%} | {target:.2f} x fp16 | {speed:.2f} x: {'yes' if speed >= target else 'no'} |"
            )
    return lines


def _nvrtc() -> str:
    from cupy.cuda import nvrtc

    return "NVRTC " + ".".join(map(str, nvrtc.getVersion()))


def digest(source: Source) -> str:
    """Of all that decides a source's machine code but the compiler: its text, what it includes, the options, its instances."""
    what = (OPTIONS, source.instances, sorted((p.name, t) for p, t in with_includes(source.path).items()))
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def stamp(files: set[str]) -> str:
    """What the table was made from, for the test that it is current."""
    own: dict[str, list[str]] = {}
    for source in sources():
        if source.name in files:
            own.setdefault(source.name, []).append(digest(source))
    own = {name: sorted(found) for name, found in own.items()}
    return f"<!-- made from: {json.dumps({'nvrtc': _nvrtc(), 'sources': own}, sort_keys=True)} -->"


def main(only: str = "", write: bool = False, json_path: Path | None = None, say: Callable[[str], None] = print) -> int:
    """Prints the prediction; --write puts it into the page. Exit status 0; what cannot be predicted raises."""
    from gpu.bench.__main__ import _load_all

    _load_all()
    found = predictions(works(only, say=say), say)
    text = table(found)
    say("")
    say(text)
    if json_path is not None:
        rows = [
            {**p.work.__dict__, "executed": p.executed, "registers": p.registers, "shared": p.shared, "warps": p.warps, "seconds": p.seconds, "bound": p.bound}
            for p in found
        ]  # fmt: skip
        with replacing(json_path) as scratch:
            scratch.write_text(json.dumps({"predicted": True, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if write:
        if only:
            raise ValueError(f"--write: expected all operations, got --only {only!r}")
        begin, end = MARKS
        page = PAGE.read_text(encoding="utf-8")
        head, rest = page.split(begin, 1)
        made = f"{head}{begin}\n{stamp({p.work.file for p in found})}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"
        with replacing(PAGE) as scratch:
            scratch.write_text(made, encoding="utf-8")
    return 0 if all(math.isfinite(t) for p in found for t in p.seconds.values()) else 1
