"""The run: packages installed, codecs taking turns, one table for each system, one verdict for each."""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from peers import systems
from peers.coders import DIM
from peers.systems import OURS, SYSTEMS, System
from peers.worker import Worker, work

#: a codec that used this many seconds on one operation at one width is not asked again
ENOUGH = 4.0
BASE = ("numpy==2.4.6", "scipy==1.17.1", "torch==2.13.0")
#: what is compared of the turns; the best one of a peer is one in which its memory happened to be in the process already
KINDS = ("median", "best")
#: what single packages import
MORE = ("safetensors==0.8.0", "packaging==26.4", "ninja==1.11.1.4", "termcolor==3.3.0", "tqdm==4.70.1")


def install(folder: Path, chosen: list[System]) -> tuple[str, dict[str, str], dict[str, str]]:
    """(interpreter, {requirement: its folder}, {requirement: why it is not there}); what is there already is left alone."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)

    def pip(*arguments: str) -> str:
        """'' or the last line of the error; a stamp is left when it went well."""
        stamp = folder / f"{arguments[-1].replace('==', '-')}.stamp"
        if stamp.exists():
            return ""
        print(f"installing {arguments[-1]} ...", file=sys.stderr, flush=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        stamp.touch()
        return ""

    broken = "".join(pip(requirement) for requirement in (*BASE, *MORE))
    folders, missing = {}, {}
    for requirement in sorted({package.requirement for system in chosen for package in system.packages.values()}):
        target = folders[requirement] = str(folder / "peers" / requirement.split("==", maxsplit=1)[0])
        why = broken or pip("--no-deps", "--ignore-requires-python", "--target", target, requirement)
        if why:
            missing[requirement] = why
    return str(python), folders, missing


def take_turns(workers: list[Worker], do: str, rounds: int, failed: dict[str, str]) -> dict[str, list[float]]:
    """{codec: processor seconds of each of its turns}; ours goes first and last in every round, and a round before is not counted."""
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    spent = dict.fromkeys(seconds, 0.0)
    ours = workers[0]
    for number in range(rounds + 1):
        for worker in (*workers, ours):
            name = worker.name
            if name in failed or spent[name] > ENOUGH:
                continue
            answer = worker.ask(do)
            if "error" in answer:
                failed[name] = f"{do}: {answer['error']}"
                continue
            if worker is not ours:
                spent[name] += answer["seconds"]
            if number or spent[name] > ENOUGH:
                seconds[name].append(answer["seconds"])
    return seconds


def measure(system: System, workers: list[Worker], bits: int, rounds: int, folder: str) -> list[dict[str, Any]]:
    """A row for each codec that works at this width, ours first, and one with "error" for each that does not."""
    failed: dict[str, str] = {}
    exact, numbers = system.exact(bits, folder), rows_of(system, folder) * DIM
    for worker in workers:
        answer = worker.ask("build", system=system.name, bits=bits)
        if "error" in answer:
            failed[worker.name] = f"build: {answer['error']}"
    times = {do: take_turns(workers, do, rounds, failed) for do in ("encode", "decode")}
    table = []
    for worker in workers:
        row: dict[str, Any] = {"name": worker.name, "bits": bits}
        quality = {} if worker.name in failed else worker.ask("quality", bits=bits, numbers=numbers)
        worker.ask("rest")
        if worker.name in failed or "error" in quality:
            table.append(row | {"error": failed.get(worker.name) or quality["error"]})
            continue
        row |= quality
        row["error ratio"] = quality["mse"] / exact
        row["honest"] = quality["held"] <= bits + 1 and abs(row["error ratio"] - 1) <= 0.02
        for do, every in times.items():
            # for each number that is coded
            turns = [one / (numbers * quality["share"]) for one in every[worker.name]]
            row[do] = {"best": min(turns), "median": statistics.median(turns)}
        table.append(row)
    return table


def rows_of(system: System, folder: str) -> int:
    """How many vectors are given."""
    x = systems.timed(system.name, folder)
    return sum(array.size for array in (x if isinstance(x, tuple) else (x,))) // DIM


def show(table: list[dict[str, Any]]) -> tuple[dict[str, list[str]], int]:
    """Print the rows of one width; what an honest peer does at more than half our speed by KINDS of turns, and how many honest peers there are."""
    ours = table[0]
    if "error" in ours:
        print(f"| {ours['name']} | {ours['bits']} | FAILED: {ours['error']} |")
        return {kind: [f"{ours['bits']} bits: ours failed"] for kind in KINDS}, 0
    short: dict[str, list[str]] = {kind: [] for kind in KINDS}
    honest = 0
    for row in table:
        if "error" in row:
            print(f"| {row['name']} | {row['bits']} | did not run: {row['error']} | | | | | | | | | |")
            continue
        line = f"| {row['name']} | {row['bits']} | {row['held']:.3f} | {row['mse']:.4f} | {row['error ratio']:.3f} | {row['bias']:+.4f} |"
        for do in ("encode", "decode"):
            line += f" {4e-6 / row[do]['best']:.4g} ({4e-6 / row[do]['median']:.4g}) |"
        for do in ("encode", "decode"):
            ratios = {kind: row[do][kind] / ours[do][kind] for kind in KINDS}
            line += " |" if row is ours else f" {ratios['best']:.2f} ({ratios['median']:.2f}) |"
            for kind, ratio in ratios.items():
                if row["honest"] and row is not ours and ratio < 2:
                    short[kind].append(f"{do} {row['bits']} bits {ratio:.2f} of {row['name']}")
        honest += row["honest"] and row is not ours
        says = "ours" if row is ours else "yes" if row["honest"] else "no"
        print(line + f" {says} | {row['nan']} |", flush=True)
    return short, honest


def compare(system: System, workers: list[Worker], rounds: int, folder: str, missing: dict[str, str]) -> dict[str, str]:
    """Print the table of a system; for KINDS of turns, whether ours is at least twice as fast as every honest peer."""
    print(f"\n## {system.name}: {system.says}\n")
    for name, package in system.packages.items():
        why = f" NOT INSTALLED: {missing[package.requirement]}" if package.requirement in missing else ""
        print(f"- {name}: {package.requirement}" + (f" ({package.note})" if package.note else "") + why)
    exact = " ".join(f"{system.exact(bits, folder):.4f}" for bits in system.widths)
    print(f"\nExact error at {', '.join(map(str, system.widths))} bits: {exact}\n")
    print(
        "| package | bits claimed | bits held | error | error / exact | bias | encode MB/s | decode MB/s "
        "| ours/peer encode | ours/peer decode | honest | a NaN |"
    )
    print("|--|--|--|--|--|--|--|--|--|--|--|--|", flush=True)
    short: dict[str, list[str]] = {kind: [] for kind in KINDS}
    honest = 0
    for bits in system.widths:
        less, more = show(measure(system, workers, bits, rounds, folder))
        honest += more
        for kind in KINDS:
            short[kind] += less[kind]
    if not honest:
        return {
            kind: f"{system.name}: no honest peer ran" + "".join(f"; {one}" for one in short[kind]) for kind in KINDS
        }
    return {kind: f"{system.name}: " + (f"no ({'; '.join(short[kind])})" if short[kind] else "yes") for kind in KINDS}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def one_thread() -> None:
    """Start this script anew with one thread, and with the BLAS kernels that fit the machine, for itself and its workers."""
    wanted = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"} | wanted
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main(about: str) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--venv", type=Path, default=cache / "kvtheory" / "peers", help="where the packages go")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each codec at each width")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    # `make bench` gives all benchmarks the same options
    options, _ = parser.parse_known_args()
    if options.worker:
        work(options.worker, options.folder)
        return
    if unknown := set(options.systems.split(",")) - set(SYSTEMS):
        parser.error(f"--systems: expected some of {', '.join(SYSTEMS)}, got {', '.join(sorted(unknown))}")
    one_thread()
    chosen = [SYSTEMS[name] for name in options.systems.split(",")]
    python, folders, missing = install(options.venv.expanduser().resolve(), chosen)
    introduce(options)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        systems.write_arrays(folder, options.heads, options.tokens)
        root = str(Path(__file__).resolve().parents[2])
        ours = Worker(OURS, sys.executable, root, folder)
        for system in chosen:
            there = [(name, package) for name, package in system.packages.items() if package.requirement not in missing]
            workers = [Worker(name, python, folders[package.requirement], folder) for name, package in there]
            lines.append(compare(system, [ours, *workers], options.rounds, folder, missing))
            for worker in workers:
                worker.end()
        ours.end()
    print("\nAt least 2x every honest peer, encode and decode, at every width?\n")
    for kind in KINDS:
        print(f"- {kind} turns: " + ". ".join(line[kind] for line in lines))


def introduce(options: argparse.Namespace) -> None:
    import kvtheory

    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{date.today()}, {processor()}, {os.cpu_count()} processors{load}; Python {platform.python_version()}")
    print(f"ours: kvtheory {kvtheory.__version__}, NumPy {np.__version__}; peers on {', '.join((*BASE, *MORE))}")
    print(
        f"\n({options.heads}, {options.tokens}, {DIM}) float32 of keys; mse, prod: ours also as much again as values, all counted; kivi: keys"
        f"\nand values for all. MB/s of float32, one thread, processor time: best (median) of {options.rounds} turns (ours: twice as many)."
        "\nError and bias: means of ||x - x'||^2 / ||x||^2 and <x, x'> / ||x||^2 - 1; mse, prod, qjl: on 4,096 unit directions."
    )
