"""All targets, each its share of T seconds, one table: `make fuzz T=60`, or `python -m tests.fuzz.every SECONDS [TARGET ...]`.

The decoders of streams get half (target.py), the readers of files the rest in equal shares (files.py), at least 2 seconds each. Exit status 1
if one found something; its output then names the input's file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

FILES = ("cache", "ledger", "task", "questions", "npz", "tensors", "torch")


def shares(seconds: float, names: list[str]) -> dict[str, int]:
    """Whole seconds by target."""
    if len(names) == 1:
        return {names[0]: max(2, round(seconds))}
    rest = [name for name in names if name != "streams"]
    of_files = seconds / 2 if "streams" in names else seconds
    own = {"streams": max(2, round(seconds / 2))} if "streams" in names else {}
    return own | {name: max(2, round(of_files / len(rest))) for name in rest}


def main(arguments: list[str]) -> int:
    if not arguments:
        raise SystemExit(__doc__)
    names = arguments[1:] or ["streams", *FILES]
    unknown = [name for name in names if name not in ("streams", *FILES)]
    if unknown:
        raise SystemExit(f"no target {', '.join(unknown)}; there are streams, {', '.join(FILES)}")
    failed = []
    print(f"{'target':<10} {'s':>4} {'inputs':>9} {'coverage':>9}  found", flush=True)
    for name, seconds in shares(float(arguments[0]), names).items():
        module = ["tests.fuzz.target"] if name == "streams" else ["tests.fuzz.files", name]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", *module, f"-max_total_time={seconds}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        runs = re.findall(r"^#(\d+)", done.stdout, re.MULTILINE)
        coverage = re.findall(r"cov: (\d+)", done.stdout)
        print(
            f"{name:<10} {time.monotonic() - began:>4.0f} {int(runs[-1]) if runs else 0:>9,} {coverage[-1] if coverage else '-':>9}  "
            f"{'nothing' if done.returncode == 0 else 'SOMETHING'}", flush=True,
        )  # fmt: skip
        if done.returncode:
            failed.append(name)
            print(done.stdout[-3000:], flush=True)
    print("nothing found" if not failed else f"found something in {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
