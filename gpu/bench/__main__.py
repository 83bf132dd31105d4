"""python -m gpu.bench: on a GPU checks every kernel, then measures; without one prints what the kernels' machine code predicts.

    python -m gpu.bench --minutes 8 --json bench.json      # with a GPU: checks, then the table; stops early, and says what was left
    python -m gpu.bench --only 'KIVI|Full' --tokens 32768
    python -m gpu.bench --model                            # the prediction, though there is a GPU
    python -m gpu.bench --write                            # the prediction, into docs/gpu-bench.md

Exit status: 1 where a result is not the reference's (nothing is measured then), 2 where something could not run, else 0.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["main", "on_gpu", "prebuild"]


def _load_all() -> None:
    import gpu

    for found in pkgutil.walk_packages(gpu.__path__, "gpu."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)


def _build(job: tuple[str, tuple[str, ...], str]) -> str:
    """In a process of its own: the cubin of one source, into the cache that the GPU's process then reads."""
    from gpu.compile import stored
    from gpu.module import sources

    _load_all()
    name, instances, architecture = job
    own = next(s for s in sources() if (s.name, s.instances) == (name, instances))
    stored(own, architecture)
    return name


def prebuild(architecture: str, workers: int | None = None, say: Callable[[str], None] = print) -> None:
    """Compiles all kernels by as many processes as there are cores; what fails here is compiled again, and complained of, when it is launched."""
    from gpu.module import sources

    _load_all()
    start = time.monotonic()
    jobs = [(s.name, s.instances, architecture) for s in sources()]
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA's context
    with ProcessPoolExecutor(workers or min(len(jobs), os.cpu_count() or 1), mp_context=context) as pool:
        for future in [pool.submit(_build, job) for job in jobs]:
            try:
                future.result()
            except Exception as error:
                say(f"could not be built beforehand: {(str(error).splitlines() or [type(error).__name__])[0]}")
    say(f"{len(jobs)} files of kernels for sm_{architecture} in {time.monotonic() - start:.0f} s")


def on_gpu(
    xp: Any,
    settings: Any,
    say: Callable[[str], None],
    json_path: Path | None = None,
    check_only: bool = False,
    start: float | None = None,
) -> int:
    """Checks, then measures and prints; the exit status. start: `time.monotonic()` from which the settings' seconds count."""
    from gpu.bench import measure

    start = time.monotonic() if start is None else start
    result = measure.Result(measure.card(xp))

    def save() -> None:
        if json_path is not None:
            result.write(json_path)

    say(f"{result.card['name']}, driver {result.card['driver']}, CuPy {result.card['cupy']}")
    right = measure.check(xp, settings, result, say)
    say(
        f"checked: {len(result.checked)} right, {len(result.wrong)} wrong, {len(result.errors)} that cannot run; {time.monotonic() - start:.0f} s"
    )
    save()
    if not right:
        say("nothing is measured where a result is wrong")
        return 1
    if not check_only:
        measure.measure(xp, settings, result, say, save, start)
        say("")
        say(measure.table(result))
    return 2 if result.errors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m gpu.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of everything, compiling and checking included")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--only", default="", help="regular expression: operations by name (model: kernels)")
    parser.add_argument("--tokens", help="sizes, as 4096,1048576; in this order")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--model", action="store_true", help="the prediction, which needs no GPU")
    parser.add_argument("--write", action="store_true", help="put the prediction into docs/gpu-bench.md")
    given = parser.parse_args(arguments)
    say = functools.partial(print, flush=True)
    start = time.monotonic()
    if not (given.model or given.write):
        from gpu.module import Unavailable, require_gpu

        try:
            xp = require_gpu()
        except Unavailable as missing:
            say(f"{missing}\nPredicted from the kernels' machine code, NOT measured:\n")
        else:
            from gpu.bench.measure import Settings

            sizes = tuple(int(n) for n in given.tokens.split(",")) if given.tokens else Settings.tokens
            settings = Settings(seconds=60 * given.minutes, only=given.only, tokens=sizes)
            prebuild(str(xp.cuda.Device().compute_capability), say=say)
            return on_gpu(xp, settings, say, given.json, given.check_only, start)
    from gpu.bench import model

    return model.main(only=given.only, write=given.write, json_path=given.json, say=say)


if __name__ == "__main__":
    sys.exit(main())
