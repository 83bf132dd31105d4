"""Coverage-guided fuzzing of the readers of files, one target each: `python -m tests.fuzz.files cache -max_total_time=60`.

    cache        kvtheory.Cache.load, and every layer
    ledger       a claim that `verify --resume` goes on from, and ledger.json's records as the order of reading has them
    task         a finished task of a sweep
    questions    FILE.jsonl of `compare --tasks`
    npz          `kvtheory import` of .npz: names, shapes, every array
    tensors      the same of .safetensors
    torch        the same of .pt

Each reads what libFuzzer makes of tests/fuzz/corpus/TARGET. Anything but a result or the reader's promised error within a second of the
processor's time, or an allocation above MEMORY, ends the run with the input in a file crash-*. Parquet is written and never read here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(
    include=["kvtheory.layer", "kvtheory.interop", "kvtheory.sweep", "kvtheory.models.tasks", "proofs_checks.ledger"]
):
    import kvtheory
    from kvtheory import sweep
    from kvtheory.interop import CannotImport
    from kvtheory.interop.captured import open_file
    from kvtheory.layer.store import CorruptCache
    from kvtheory.models import tasks
    from proofs_checks import ledger

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 1.0
MEMORY_MB = 2048


def _cache(path: Path) -> None:
    for layer in kvtheory.Cache.load(path):
        assert layer.tokens >= 0


def _ledger(path: Path) -> None:
    path = path.rename(path.with_name("a--b.json"))
    run, record = ledger._saved(path)
    assert isinstance(run, dict) and isinstance(record["as_expected"], bool)


_TASK = sweep.Task({"x": 1}, _ledger)


def _task(path: Path) -> None:
    target = path.parent / "tasks" / f"{_TASK.name}.json"
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    found = sweep.finished(path.parent, _TASK)
    assert found is None or all(isinstance(row, dict) for row in found["rows"])


def _questions(path: Path) -> None:
    items, _ = tasks.read(path)
    assert items and all(item.prompt.strip() and item.answers for item in items)


def _imported(suffix: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        source = open_file(path.rename(path.with_suffix(suffix)))
        try:
            for name in source.names():
                assert source.shape(name) == source.read(name).shape
        finally:
            source.close()

    return read


#: reader, the errors that it promises
TARGETS: dict[str, tuple[Callable[[Path], None], tuple[type[Exception], ...]]] = {
    "cache": (_cache, (CorruptCache,)),
    "ledger": (_ledger, (ValueError,)),
    "task": (_task, ()),
    "questions": (_questions, (ValueError,)),
    "npz": (_imported(".npz"), (CannotImport,)),
    "tensors": (_imported(".safetensors"), (CannotImport,)),
    "torch": (_imported(".pt"), (CannotImport,)),
}


def one_input(target: str) -> Callable[[bytes], None]:
    reader, promised = TARGETS[target]
    for module in ("numpy", "safetensors.numpy", *(("torch",) if target == "torch" else ())):
        importlib.import_module(module)  # what the first input would pay for
    folder = Path(tempfile.mkdtemp(prefix="kvtheory-fuzz-"))

    def test(data: bytes) -> None:
        path = folder / "input"
        path.write_bytes(data)
        began = time.process_time()
        with contextlib.suppress(*promised):
            reader(path)
        took = time.process_time() - began
        assert took < SECONDS, f"took {took:.2f} s"

    return test


def main(arguments: list[str]) -> Any:
    target, *arguments = arguments
    if target not in TARGETS:
        raise SystemExit(f"expected one of {', '.join(TARGETS)}, got {target!r}")
    warnings.simplefilter("error", RuntimeWarning)
    options = {"-timeout": "20", "-rss_limit_mb": str(MEMORY_MB), "-max_len": "8192"}
    given = {argument.split("=")[0] for argument in arguments}
    own = [f"{name}={value}" for name, value in options.items() if name not in given]
    with tempfile.TemporaryDirectory() as found:  # what is found is forgotten; the committed corpus stays as it is
        atheris.Setup([sys.argv[0], *arguments, *own, found, os.fspath(CORPUS / target)], one_input(target))
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
