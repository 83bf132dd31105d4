"""The commands that are disturbed: small, the same every time, each in an empty folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import proofs_checks
from kvtheory import Cache, synthetic
from kvtheory.cli import app
from proofs_checks import ledger, tasks
from tests.faults.instrument import run


@dataclass(frozen=True)
class Command:
    """run(folder) begins; again(folder) is what a user does after it was cut off. prepare(folder): what must be there before."""

    name: str
    run: Callable[[Path], object]
    again: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None


def layer(index: int) -> kvtheory.Layer:
    made = synthetic.make("attention_sink", tokens=96, head_dim=16, value_dim=24, model_dim=40, queries=96, seed=index)
    return made.replace(
        keys=made.keys.astype(np.float32),
        values=made.values.astype(np.float32),
        query_positions=np.arange(96),
        index=index,
    )


def cache() -> Cache:
    return Cache([layer(3), layer(7)], meta={"model": "toy", "text": "noise"})


#: digests of our sources, as of when this process began: beside a run of tests somebody may edit files, and a resumed run would be refused
_FROZEN: dict[str, str] = {}


def _freeze(_: Path) -> None:
    if "" not in _FROZEN:
        _FROZEN[""] = ledger.source_digest()


def _freeze_tasks(folder: Path) -> None:
    _freeze(folder)
    for claim in proofs_checks.claims().values():
        if claim.id.startswith("trie/") and claim.id not in _FROZEN:
            _FROZEN[claim.id] = tasks.version(claim)


def _cli(*arguments: object) -> None:
    """In a process of its own, which it alters."""
    from reference.compare import versions

    versions._source = lambda _: b""
    versions.of_modules.cache_clear()
    if _FROZEN:
        true = tasks.version
        tasks.version = lambda claim: _FROZEN.get(claim.id) or true(claim)
        ledger.source_digest = lambda *_: _FROZEN[""]
    app([str(one) for one in arguments])


def save(folder: Path) -> None:
    cache().save(folder / "cache.safetensors")


def _stub() -> tuple[Any, Any]:
    """What a capture imports: here once, before processes are made."""
    from kvtheory import models
    from tests.models import tiny

    return models, tiny


def _capture(inputs: Path, folder: Path) -> None:
    """With a model of two random layers in the place of a real one; in a process of its own, which it alters."""
    models, tiny = _stub()
    models.load = lambda *_: (None, tiny.llama())
    models.encode = lambda _, __, count: tiny.tokens(count)
    _cli("capture", "--text", inputs / "text.txt", "--tokens", 24, "--out", folder / "captured.safetensors")


def _compare(inputs: Path, jobs: int, folder: Path) -> None:
    _cli("compare", "--cache", inputs / "cache.safetensors", "--codecs", "Full,KIVI,SnapKV(keep=.5)", "--bits", "2,4",
         "--no-figures", "--jobs", jobs, "--out", folder)  # fmt: skip


_CLAIMS = ("verify", "--claim", "trie/*", "--no-figures")


def _verify(folder: Path, *more: object) -> None:
    _cli(*_CLAIMS, "--out", folder, *more)


def _verify_again(folder: Path, *more: object) -> None:
    _cli(*_CLAIMS, "--resume" if (folder / "claims").is_dir() else "--out", folder, *more)


def _here(run: Callable[..., None], folder: Path) -> None:
    run(folder, "--scheduler", "here")


def _figures(folder: Path) -> None:
    _cli("figures", "trie-distances", "--results", folder, "--format", "png,svg")


def commands(inputs: Path) -> dict[str, Command]:
    """By name. inputs: a folder of the caller's, for what several of them read. Imports here what they import, once for all processes."""
    import figures  # noqa: F401
    import reference.compare.tables  # noqa: F401

    _stub()
    proofs_checks.claims()
    if not (inputs / "cache.safetensors").is_file():
        inputs.mkdir(parents=True, exist_ok=True)
        (inputs / "text.txt").write_text("not read by the stub\n")
        save(inputs)
    results = inputs / "results"

    def prepared(folder: Path) -> None:
        if not results.is_dir():
            done = run(partial(_verify, results), inputs / "log", results)
            assert done.status == 0, done.said
        shutil.copytree(results, folder, dirs_exist_ok=True)

    compare, capture = partial(_compare, inputs, 1), partial(_capture, inputs)
    return {
        one.name: one
        for one in (
            Command("save", save, save),
            Command("capture", capture, capture),
            Command("compare", compare, compare),
            Command("verify", _verify, _verify_again, _freeze),
            Command("verify --scheduler", partial(_here, _verify), partial(_here, _verify_again), _freeze_tasks),
            Command("figures", _figures, _figures, prepared),
        )
    }


def _slow_capture(inputs: Path, folder: Path) -> None:
    """A capture whose model takes a minute."""
    models, tiny = _stub()
    model = tiny.llama()

    def slowly(*_: object) -> None:
        for _ in range(600):
            time.sleep(0.1)

    for module in model.modules():
        module.register_forward_pre_hook(slowly)
    models.load = lambda *_: (None, model)
    models.encode = lambda _, __, count: tiny.tokens(count)
    _cli("capture", "--text", inputs / "text.txt", "--tokens", 24, "--out", folder / "captured.safetensors")


def _long_verify(folder: Path, *more: object) -> None:
    _cli("verify", "--claim", "risk/*", "--claim", "quantizers/*", "--no-figures", "--out", folder, *more)


def to_interrupt(inputs: Path) -> list[tuple[Command, tuple[int, ...], int]]:
    """(command, after how many events, processes that it has by then at least)."""
    made = commands(inputs)

    def compare(folder: Path) -> None:
        _cli("compare", "--cache", inputs / "cache.safetensors", "--codecs", "TurboQuant,KIVI,MergeReduce(keep=.5)", "--bits", "1,2,3,4",
             "--seeds", 4, "--no-figures", "--jobs", 2, "--out", folder)  # fmt: skip

    return [
        (Command("verify", _long_verify, _verify_again), (1, 20, 40), 1),
        (Command("verify --jobs 2", lambda f: _long_verify(f, "--jobs", 2), _verify_again), (1, 20), 3),
        (
            Command("verify --scheduler", lambda f: _long_verify(f, "--scheduler", "here", "--jobs", 2), _verify_again),
            (6, 20),
            3,
        ),
        (Command("compare", compare, compare), (8, 60), 3),
        (Command("capture", partial(_slow_capture, inputs), partial(_slow_capture, inputs)), (1,), 1),
        (made["figures"], (1, 4), 1),
    ]
