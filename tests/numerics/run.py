"""`make numerics`: the same streams and verdicts under other threads, BLAS kernels, NumPy and Python versions; rounding against exact values.

    python -m tests.numerics.run [--python LABEL=INTERPRETER ...] [--venvs FOLDER] [--tests]

Conditions set in the subprocess of each check, never here. --python: further interpreters, with NumPy and the base dependencies installed.
--venvs: make them there (NumPy one minor version back; Python 3.12 and 3.13 where pyenv has them), which needs an index. --tests: run the
torch-free tests (tests/theory, tests/certified, tests/layer) on each of them as well. Exit status 1 where a stream, what is decoded from it, or a verdict differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.numerics.measure import rounding

ROOT = Path(__file__).resolve().parents[2]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: kernels of OpenBLAS that every x86-64 machine of the last ten years has; the name is set in the check's own process
KERNELS = ("Haswell", "Nehalem")
BASE = [
    "scipy",
    "safetensors",
    "ml_dtypes",
    "isal",
    "matplotlib",
    "typer",
    "rich",
    "jinja2",
    "python-flint",
    "constriction",
    "cvxpy-base",
    "clarabel",
]
TESTS = ["pytest", "pytest-timeout", "hypothesis", "jsonschema"]
TORCH_FREE = ("tests/theory", "tests/certified", "tests/layer")


def run(interpreter: str, environment: dict[str, str], states: Path | None) -> dict[str, Any]:
    command = [interpreter, "-m", "tests.numerics.measure", *([str(states)] if states else [])]
    env = {k: v for k, v in os.environ.items() if k not in (*THREADS, "OPENBLAS_CORETYPE")}
    env |= {t: "1" for t in THREADS} | environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def make(folder: Path) -> dict[str, str]:
    """{label: interpreter} of venvs in `folder`, made where they are missing."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    major, minor = next(p for p in pins if p.startswith("numpy==")).partition("==")[2].split(".")[:2]
    older = f"{major}.{int(minor) - 1}"
    wanted = {f"NumPy {older}": (sys.executable, f"numpy=={older}.*")}
    for version in ("3.12", "3.13"):
        found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        if found:
            wanted[f"Python {version}"] = (str(found[-1]), "numpy")
        else:
            print(f"Python {version}: not there (pyenv install {version})")
    made = {}
    for label, (python, numpy) in wanted.items():
        where = folder / label.replace(" ", "-")
        if not (where / "done").is_file():
            subprocess.run([python, "-m", "venv", str(where)], check=True)
            loose = where / "constraints.txt"
            loose.write_text(
                "\n".join(p for p in pins if numpy == "numpy" or not p.startswith("numpy==")) + "\n", encoding="utf-8"
            )
            subprocess.run(
                [
                    str(where / "bin/python"),
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    "-c",
                    str(loose),
                    numpy,
                    *BASE,
                    *TESTS,
                ],
                check=True,
            )
            (where / "done").touch()
        made[label] = str(where / "bin/python")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="LABEL=INTERPRETER")
    parser.add_argument("--venvs", type=Path)
    parser.add_argument("--tests", action="store_true")
    options = parser.parse_args()
    others = dict(p.split("=", 1) for p in options.python) | (make(options.venvs.resolve()) if options.venvs else {})
    bad = 0
    for what, error, allowed in rounding():
        bad += not error <= allowed
        print(
            f"{'within' if error <= allowed else 'BEYOND'} {what}: {error:.2e} from exact, conditioning allows {allowed:.2e}"
        )
    with tempfile.TemporaryDirectory() as folder:
        base = run(sys.executable, {}, None)
        states = Path(folder) / "states.json"
        states.write_text(json.dumps(base["states"]), encoding="utf-8")
        conditions = [("2 threads", sys.executable, dict.fromkeys(THREADS, "2"))]
        conditions += [(f"BLAS kernel {k}", sys.executable, {"OPENBLAS_CORETYPE": k}) for k in KERNELS]
        conditions += [(label, python, {}) for label, python in others.items()]
        print(
            f"base: Python {base['python']}, NumPy {base['numpy']}, 1 thread; {len(base['streams'])} codecs, {len(base['verdicts'])} claims"
        )
        for label, python, environment in conditions:
            got = run(python, environment, states)
            wrong = [
                f"{kind} of {n}"
                for kind in ("streams", "decoded", "verdicts")
                for n, v in base[kind].items()
                if got[kind].get(n) != v
            ]
            moved = [f"state of {n}" for n, v in base["fits"].items() if got["fits"].get(n) != v]
            moved += [n for n, v in base["parts of a fit"].items() if got["parts of a fit"].get(n) != v]
            bad += len(wrong)
            print(
                f"{'same' if not wrong else 'DIFFERENT'} {label} (Python {got['python']}, NumPy {got['numpy']}): "
                f"{len(base['streams'])} streams, {len(base['verdicts'])} verdicts{'; ' + ', '.join(wrong) if wrong else ''}"
                f"{'; fitted anew, bits differ in: ' + ', '.join(moved) if moved else '; fitted anew, same bits'}"
            )
    if options.tests:
        for label, python in others.items():
            env = os.environ | {t: "1" for t in THREADS} | {"PYTHONPATH": str(ROOT), "CI": "1"}
            done = subprocess.run(
                [python, "-m", "pytest", *(t for t in TORCH_FREE if (ROOT / t).is_dir())],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            bad += done.returncode != 0
            print(
                f"torch-free tests, {label}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]}"
            )
    print(f"{bad} differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
