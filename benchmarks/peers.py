"""TurboQuant beside the public packages of that name: bits, error, bias, speed and NaN, all in one run.

    python benchmarks/peers.py [--venv FOLDER --heads 8 --tokens 4096 --rounds 5]

Pinned packages go into a virtual environment of their own (the user's cache folder, or --venv), each into its own folder because
several install a module of the same name; the second run finds them there. Every codec, ours too, runs in a process of its own with
one thread, and they take turns (ours, peer, peer, ..., ours), so that a busy machine is busy for all of them. The clock is the
processor time of the process: on an idle machine that is the wall time, on a shared one the turns of others do not count.

A peer gets the array (heads, tokens, 128) of float32; ours a Layer with that array as keys and another as values, both of which are
counted. "honest" is a peer that holds at most b + 1 bits a number with an error within 2 % of the exact optimum.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

DIM = 128
WIDTHS = (1, 2, 3, 4)
#: the array to be timed, unit directions, and rows with one NaN
FILES = ("x.npy", "unit.npy", "nan.npy")
#: a codec that used this many seconds on one operation at one width is not asked again
ENOUGH = 4.0
BASE = ("numpy==2.4.6", "scipy==1.17.1")
TORCH = "torch==2.13.0"
OURS = "kvtheory"


@dataclasses.dataclass(frozen=True)
class Coder:
    """prepare: array -> what the package takes (not timed); encode, decode; and, of what encode gives, the bytes held."""

    prepare: Callable[[Any], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _ours(bits: int) -> Coder:
    import kvtheory
    import reference

    codec = reference.TurboQuant(bits=bits)

    def prepare(x):
        keys = x.reshape(-1, *x.shape[-2:])
        return kvtheory.Layer(keys, np.ascontiguousarray(keys[:, ::-1]))

    return Coder(prepare, codec.encode, lambda stream: codec.decode(stream).keys)


def _pyturboquant_cpu(bits: int) -> Coder:
    from pyturboquant_cpu import dequantize_mse, quantize_mse

    return Coder(lambda x: x, lambda x: quantize_mse(x, bits, seed=1), dequantize_mse)


def _pyturboquant(bits: int) -> Coder:
    import torch
    from pyturboquant.core import MSEQuantizer

    codec = MSEQuantizer(DIM, bits, seed=1)
    return Coder(torch.from_numpy, codec.quantize, codec.dequantize)


def _turboquant_py(bits: int) -> Coder:
    from turboquant import TurboQuant

    codec = TurboQuant(DIM, bits, mode="mse", seed=1)
    return Coder(lambda x: x.reshape(-1, DIM), codec.quantize, codec.dequantize)


def _turboquant_torch(bits: int) -> Coder:
    import torch
    from turboquant import TurboQuantMSE

    codec = TurboQuantMSE(DIM, bits, seed=1)
    return Coder(torch.from_numpy, codec.quantize, codec.dequantize)


def _turboquant(bits: int) -> Coder:
    import torch

    setattr(np, "trapz", np.trapezoid)  # noqa: B010 it calls a function that NumPy 2 dropped
    sys.modules["turboquant.cache"] = type(sys)("turboquant.cache")  # which needs transformers
    sys.modules["turboquant.cache"].TurboQuantCache = None
    from turboquant import TurboQuantMSE

    codec = TurboQuantMSE(DIM, bits, device="cpu", seed=1)
    return Coder(torch.from_numpy, codec.quantize, lambda held: codec.dequantize(*held))


def _turboquant_llm(bits: int) -> Coder:
    from turboquant_llm import TurboQuantCompressor, TurboQuantConfig

    codec = TurboQuantCompressor(DIM, TurboQuantConfig(bits_main=bits, seed=1))
    return Coder(lambda x: x, codec.compress, codec.reconstruct_first_stage)


@dataclasses.dataclass(frozen=True)
class Package:
    """A pinned requirement, how it is built, whether it needs torch, and what to know about it."""

    requirement: str
    build: Callable[[int], Coder]
    torch: bool
    note: str = ""


PACKAGES = {
    "pyturboquant-cpu": Package("pyturboquant-cpu==0.1.0", _pyturboquant_cpu, False),
    "pyturboquant": Package("pyturboquant==0.1.1", _pyturboquant, True, "asks for Python 3.12, runs on 3.11"),
    "turboquant-py": Package("turboquant-py==0.1.0", _turboquant_py, False),
    "turboquant-torch": Package("turboquant-torch==0.4.0", _turboquant_torch, True),
    "turboquant": Package("turboquant==0.2.0", _turboquant, True, "np.trapz put back, its transformers cache left out"),
    "turboquant-llm": Package("turboquant-llm==0.1.0", _turboquant_llm, False, "its sketch is held but never decoded"),
}


# -- the process of one codec ----------------------------------------------------------------------------------------------


def held_bytes(thing: Any) -> int:
    """Bytes of all arrays, tensors and numbers that an encoded object holds."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, (bytes, bytearray)):
        return len(thing)
    if isinstance(thing, float):
        return 8
    if hasattr(thing, "element_size"):  # a tensor
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(map(held_bytes, thing.values()))
    if isinstance(thing, (tuple, list)):
        return sum(map(held_bytes, thing))
    return held_bytes(vars(thing)) if hasattr(thing, "__dict__") else 0


def rows(decoded: Any) -> np.ndarray:
    return np.asarray(decoded, np.float64).reshape(-1, DIM)


def with_nan(coder: Coder, x: np.ndarray) -> str:
    """What becomes of a NaN in one row of x."""
    try:
        back = rows(coder.decode(coder.encode(coder.prepare(x))))
    except Exception as error:  # whatever a package raises
        named = "NaN" in str(error) or "nan" in str(error)
        return f"refused{'' if named else ', but not by name'}: {type(error).__name__}"
    hit = np.isnan(rows(x)).any(axis=1)
    wrong = ~np.isfinite(back).all(axis=1)
    if wrong[~hit].any():
        return "spoils other rows"
    return "NaN in that row" if wrong[hit].any() else "finite numbers, no word"


def work(name: str, folder: str) -> None:
    """Answer requests, a JSON line each, about one codec."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a package prints goes elsewhere
    sys.path[:] = [
        path for path in sys.path if path != str(Path(__file__).resolve().parent)
    ]  # it has a turboquant.py too
    x, unit, nan = (np.load(Path(folder, file)) for file in FILES)
    build = _ours if name == OURS else PACKAGES[name].build
    if name != OURS and PACKAGES[name].torch:
        import torch

        torch.set_num_threads(1)
    coder = taken = code = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {}
            if request["do"] == "build":
                coder = build(request["bits"])
                coder.decode(coder.encode(coder.prepare(unit[:, :16])))  # tables made at the first call are not timed
                taken = coder.prepare(x)
            elif request["do"] == "quality":
                back, truth = rows(coder.decode(coder.encode(coder.prepare(unit)))), rows(unit)
                squares = (truth**2).sum(axis=1)
                answer["mse"] = float((((back - truth) ** 2).sum(axis=1) / squares).mean())
                answer["bias"] = float(((back * truth).sum(axis=1) / squares).mean() - 1)
                answer["nan"] = with_nan(coder, nan)
                counted = 2 if name == OURS else 1  # keys and values
                answer["held"] = 8 * held_bytes(code) / (counted * x.size)
            else:
                start = time.process_time()
                if request["do"] == "encode":
                    code = coder.encode(taken)
                else:
                    coder.decode(code)
                answer["seconds"] = time.process_time() - start
        except Exception as error:  # reported in the table, never hidden
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """The process of one codec."""

    def __init__(self, name: str, python: str, path: str, folder: str) -> None:
        self.name = name
        environment = dict(os.environ, PYTHONPATH=path)
        command = [python, str(Path(__file__).resolve()), "--worker", name, "--folder", folder]
        self._log = Path(folder, f"{name}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        try:
            assert self._process.stdin and self._process.stdout
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            last = self._log.read_text().strip().splitlines()[-1:]
            return {"error": f"the process ended: {''.join(last)}"[:200]}
        return json.loads(line)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


# -- the run -----------------------------------------------------------------------------------------------------------------


def install(folder: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """(interpreter, {package: its folder}, {package: why it is not there}); what is there already is left alone."""
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

    missing = {}
    broken = "".join(pip(requirement) for requirement in BASE)
    no_torch = pip(TORCH)
    for name, package in PACKAGES.items():
        target = ["--no-deps", "--ignore-requires-python", "--target", str(folder / "peers" / name)]
        why = broken or (package.torch and no_torch) or pip(*target, package.requirement)
        if why:
            missing[name] = why
    return str(python), {name: str(folder / "peers" / name) for name in PACKAGES}, missing


def arrays(folder: str, heads: int, tokens: int) -> None:
    """The data, from random streams that no package draws from."""
    from kvtheory.randomness import generator

    rng = generator(20240601, "benchmarks/peers.py data")
    x = rng.standard_normal((heads, tokens, DIM), np.float32)
    unit = rng.standard_normal((1, 4096, DIM))
    unit = (unit / np.linalg.norm(unit, axis=-1, keepdims=True)).astype(np.float32)
    nan = rng.standard_normal((1, 16, DIM), np.float32)
    nan[0, 3, 5] = np.nan
    for file, array in zip(FILES, (x, unit, nan), strict=True):
        np.save(Path(folder, file), array)


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


def measure(workers: list[Worker], bits: int, rounds: int, exact: float) -> list[dict[str, Any]]:
    """A row for each codec that works at this width, ours first, and one with "error" for each that does not."""
    failed: dict[str, str] = {}
    for worker in workers:
        answer = worker.ask("build", bits=bits)
        if "error" in answer:
            failed[worker.name] = f"build: {answer['error']}"
    times = {do: take_turns(workers, do, rounds, failed) for do in ("encode", "decode")}
    table = []
    for worker in workers:
        row: dict[str, Any] = {"name": worker.name, "bits": bits}
        quality = {} if worker.name in failed else worker.ask("quality")
        if worker.name in failed or "error" in quality:
            table.append(row | {"error": failed.get(worker.name) or quality["error"]})
            continue
        row |= quality
        row["error ratio"] = quality["mse"] / exact
        row["honest"] = quality["held"] <= bits + 1 and abs(row["error ratio"] - 1) <= 0.02
        for do, every in times.items():
            turns = every[worker.name]
            row[do] = {"best": min(turns), "median": statistics.median(turns), "turns": len(turns)}
        table.append(row)
    return table


def show(table: list[dict[str, Any]], megabytes: float) -> bool:
    """Print the rows of one width; whether ours is at least twice as fast as every honest peer."""
    ours = table[0]
    if "error" in ours:
        print(f"| {ours['name']} | {ours['bits']} | FAILED: {ours['error']} |")
        return False
    twice = True
    for row in table:
        if "error" in row:
            print(f"| {row['name']} | {row['bits']} | did not run: {row['error']} | | | | | | | | | |")
            continue
        line = f"| {row['name']} | {row['bits']} | {row['held']:.3f} | {row['mse']:.4f} | {row['error ratio']:.3f} | {row['bias']:+.4f} |"
        share = 2 if row is ours else 1
        for do in ("encode", "decode"):
            line += f" {share * megabytes / row[do]['best']:.4g} ({share * megabytes / row[do]['median']:.4g}) |"
        for do in ("encode", "decode"):
            best, median = (row[do][which] / (ours[do][which] / 2) for which in ("best", "median"))
            line += " |" if row is ours else f" {best:.2f} ({median:.2f}) |"
            if row["honest"] and row is not ours:
                twice = twice and best >= 2
        honest = "ours" if row is ours else "yes" if row["honest"] else "no"
        print(line + f" {honest} | {row['nan']} |", flush=True)
    return twice


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


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=cache / "kvtheory" / "peers", help="where the packages go")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each codec at each width")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    # `make bench` gives all benchmarks the same options
    options, _ = parser.parse_known_args()
    if options.worker:
        work(options.worker, options.folder)
        return
    one_thread()
    import kvtheory
    from kvtheory.quantization import mse_distortion

    python, folders, missing = install(options.venv.expanduser().resolve())
    megabytes = options.heads * options.tokens * DIM * 4 / 1e6
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{date.today()}, {processor()}, {os.cpu_count()} processors{load}; Python {platform.python_version()}")
    print(f"ours: kvtheory {kvtheory.__version__}, NumPy {np.__version__}; peers on {', '.join((*BASE, TORCH))}:")
    for name, package in PACKAGES.items():
        note = f" ({package.note})" if package.note else ""
        print(f"- {package.requirement}{note}" + (f" NOT INSTALLED: {missing[name]}" if name in missing else ""))
    print(
        f"\n({options.heads}, {options.tokens}, {DIM}) float32, {megabytes:.1f} MB; ours: as keys, and as much again as values, all counted."
        f"\nMB/s of float32, one thread, processor time: best (median) of {options.rounds} turns. Error and bias on 4,096 unit directions:"
        "\n||x - x'||^2 and <x, x'> - 1; exact optimum "
        + " ".join(f"{mse_distortion(DIM, b):.4f}" for b in WIDTHS)
        + "\n"
    )
    print(
        "| package | bits claimed | bits held | error | error / exact | bias | encode MB/s | decode MB/s "
        "| ours/peer encode | ours/peer decode | honest | a NaN |"
    )
    print("|--|--|--|--|--|--|--|--|--|--|--|--|", flush=True)
    good, honest = True, 0
    with tempfile.TemporaryDirectory() as folder:
        arrays(folder, options.heads, options.tokens)
        root = str(Path(__file__).resolve().parents[1])
        workers = [Worker(OURS, sys.executable, root, folder)]
        workers += [Worker(name, python, folders[name], folder) for name in PACKAGES if name not in missing]
        for bits in WIDTHS:
            table = measure(workers, bits, options.rounds, mse_distortion(DIM, bits))
            good = show(table, megabytes) and good
            honest += sum(bool(row.get("honest")) for row in table[1:])
        for worker in workers:
            worker.end()
    verdict = "yes" if good and honest else "no" if honest else "no honest peer ran"
    print(f"\nat least 2x every honest peer at every width: {verdict}")


if __name__ == "__main__":
    main()
