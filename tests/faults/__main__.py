"""`make faults`: every disturbance of every command, one table. `python -m tests.faults [COMMAND ...]`"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.commands import commands, to_interrupt
from tests.faults.study import WITHIN, Study, interrupted

POINTS = 16
TIMES = 5


def main(names: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        every = commands(folder / "inputs")
        print(f"{'command':<20} {'fault':<12} {'s':>5}  what happened", flush=True)

        def tell(command: str, fault: str, attempt: Callable[[], str]) -> None:
            nonlocal failed
            began = time.monotonic()
            try:
                said = attempt()
            except AssertionError as problem:
                failed, said = failed + 1, f"FAILED: {' '.join(str(problem).split())[:300]}"
            print(f"{command:<20} {fault:<12} {time.monotonic() - began:>5.0f}  {said}", flush=True)

        for command in every.values():
            if names and command.name not in names:
                continue
            try:
                study = Study(command, folder)
            except AssertionError as problem:
                failed += 1
                print(f"{command.name:<20} undisturbed: FAILED {problem}", flush=True)
                continue
            tell(command.name, "kill -9", partial(study.killed, POINTS))
            tell(command.name, "disk full", partial(study.full, POINTS))
            tell(command.name, "disk full", partial(study.small, (16, 40, 80, 160)))
            tell(command.name, "read-only", study.unwritable)
            tell(command.name, "two at once", partial(study.together, TIMES))
        for command, moments, least in to_interrupt(folder / "inputs"):
            if names and command.name not in names:
                continue

            def attempt(command=command, moments=moments, least=least) -> str:  # type: ignore[no-untyped-def]
                slowest, last = interrupted(command, folder, moments, least)
                return f"{len(moments)} moments: all processes gone within {slowest:.2f} s (allowed {WITHIN:.0f}); last line {last!r}"

            tell(command.name, "Ctrl-C", attempt)
    print("all as promised" if not failed else f"{failed} not as promised")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
