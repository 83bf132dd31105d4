"""The process of one codec: it answers requests, a JSON line each. And the other end of that."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from peers import systems
from peers.coders import DIM, Coder

SCRIPT = Path(__file__).resolve().parents[1] / "peers.py"
#: seed of what is timed, and the first of those whose error is taken
SEED = 1


def rows(arrays: Any) -> np.ndarray:
    """Vectors of one array, or of keys and values."""
    if not isinstance(arrays, tuple):
        return np.asarray(arrays, np.float64).reshape(-1, DIM)
    return np.concatenate([rows(array) for array in arrays])


def nan_handling(coder: Coder, x: Any) -> str:
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


def quality(system: systems.System, build: systems.Build, bits: int, folder: str) -> dict[str, float]:
    """Mean of ||x - x'||^2 / ||x||^2, and of <x, x'> / ||x||^2 - 1, over `sketches` seeds."""
    x = systems.judged(system.name, folder)
    parts = [x] if system.sketches == 1 else np.split(x, system.sketches, axis=1)
    error, product = [], []
    for number, part in enumerate(parts):
        coder = build(bits, SEED + number)
        back, truth = rows(coder.decode(coder.encode(coder.prepare(part)))), rows(part)
        squares = (truth**2).sum(axis=1)
        error.append(((back - truth) ** 2).sum(axis=1) / squares)
        product.append((back * truth).sum(axis=1) / squares)
    return {"mse": float(np.mean(error)), "bias": float(np.mean(product) - 1)}


def work(name: str, folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a package prints goes elsewhere
    sys.path[:] = [path for path in sys.path if path != str(SCRIPT.parent)]  # it has a turboquant.py too
    system = coder = taken = code = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {}
            if request["do"] == "build":
                system = systems.SYSTEMS[request["system"]]
                build = system.ours if name == systems.OURS else system.packages[name].build
                coder = build(request["bits"], SEED)
                nan = systems.with_nan(system.name, folder)
                clean = tuple(map(np.nan_to_num, nan)) if isinstance(nan, tuple) else np.nan_to_num(nan)
                coder.decode(coder.encode(coder.prepare(clean)))  # tables made at the first call are not timed
                taken = coder.prepare(systems.timed(system.name, folder))
            elif request["do"] == "quality":
                answer = quality(system, build, request["bits"], folder)
                answer["nan"] = nan_handling(coder, nan)
                answer["held"] = 8 * coder.held(code) / (coder.share * request["numbers"])
                answer["share"] = coder.share
            elif request["do"] == "rest":
                system = coder = taken = code = None
            else:
                start = time.process_time()
                if request["do"] == "encode":
                    code = coder.encode(taken)
                else:
                    coder.decode(code)
                answer["seconds"] = time.process_time() - start
        except Exception as error:  # reported in the table, never hidden
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """The process of one codec, from here."""

    def __init__(self, name: str, python: str, path: str, folder: str) -> None:
        self.name = name
        # compilers that a package calls are found beside its interpreter
        tools = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
        environment = dict(os.environ, PYTHONPATH=path, PATH=tools)
        command = [python, str(SCRIPT), "--worker", name, "--folder", folder]
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
