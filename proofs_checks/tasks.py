"""Claims as independent, content-addressed tasks (kvtheory.sweep), for an executor of many machines: `kvtheory verify --scheduler`.

A task is one claim with all its mutants. Its rows are one: {"record": the claim as the ledger has it, without its seconds, "pictures": figure
data}. Its name is the hash of the claim's id, seed, budget, the numbers of the real cache, how many claims share the error level, and the
*version* of the claim: its own sources, what they import, the functions that it states, and the versions of the libraries behind them
(reference.compare.versions). A changed file is another version of the claims that depend on it, and of no others.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import proofs_checks
from kvtheory import sweep
from kvtheory.layer import Cache
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.ledger import cache_digest, claim_record, plain
from proofs_checks.run import run_claim
from reference.compare import versions

#: what every claim goes through, whatever its module imports
MACHINERY = ("proofs_checks.ledger", "proofs_checks.run", "proofs_checks.tasks")


def modules(claim: Claim) -> tuple[str, ...]:
    """Names of the modules that a claim begins in: its check's, its mutants', and those of the functions it states."""
    found = {claim.check.__module__, *(mutant.wrong.__module__ for mutant in claim.mutants)}
    for name in claim.functions.values():
        found.add(name.rpartition(".")[0])
    for function in claim.look_up().values():
        found.add(getattr(function, "__module__", None) or "")
    tops = {"kvtheory", "reference", "proofs_checks", claim.check.__module__.partition(".")[0]}
    return tuple(sorted(name for name in found if name.partition(".")[0] in tops))


def version(claim: Claim) -> str:
    """32 hex digits: of the sources and libraries that the claim's verdict, evidence and pictures depend on, and of the data files beside them."""
    return versions.of_modules(*modules(claim), *MACHINERY) + _data()


@functools.cache
def _data() -> str:
    """16 hex digits of the files that are no modules (measured numbers, embedded caches), which no import names."""
    digest = hashlib.sha256()
    for package in ("kvtheory", "reference", "proofs_checks"):
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".json", ".safetensors", ".txt") and p.is_file()):
            digest.update(f"{package}/{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def plan(claims: Sequence[Claim], context: Context) -> list[sweep.Task]:
    """One task a claim. The cache travels as context.cache_name, a path that every machine must see (or "sample", "none")."""
    common = {
        "seed": context.seed,
        "budget": context.budget,
        "cache": _numbers(context.cache, context.cache_name),
        "claims": context.claims,
    }
    found = []
    for claim in claims:
        of, key = version(claim), {"claim": claim.id, **common}
        found.append(sweep.Task(key, check, (of, context.cache_name, *key.values()), of))
    return found


def _numbers(cache: Cache | None, name: str) -> str | None:
    """SHA-256 of all that a claim can read of the real cache, its labels too; None without one."""
    if cache is None:
        return None
    digest = hashlib.sha256(str(cache_digest(Context(cache=cache))).encode())
    meta = {"model": name, **plain(cache.meta)}
    digest.update(json.dumps(meta, sort_keys=True).encode())
    arrays = [cache.tokens, cache.surprisal_bits]
    for layer in cache:
        digest.update(repr((layer.scale, layer.index, layer.window, layer.keys.dtype.name)).encode())
        if layer.rope is not None:
            digest.update(repr((layer.rope.layout, layer.rope.attention_scaling)).encode())
            arrays.append(layer.rope.inv_freq)
        arrays += [layer.positions, *(array for _, array in sorted((layer.extras or {}).items()))]
    for array in arrays:
        data = b"" if array is None else np.ascontiguousarray(array).tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def check(
    of: str, cache_name: str, claim_id: str, seed: int, budget: Any, numbers: str | None, claims: int
) -> list[dict[str, Any]]:
    """The task, on whatever machine. RuntimeError where that has other sources, libraries or another cache than the one that asks."""
    claim = proofs_checks.claims().get(claim_id)
    if claim is None or version(claim) != of:
        raise RuntimeError(
            f"{claim_id}: this worker has other sources or libraries than the client (kvtheory {kvtheory.__version__} here); give both the same"
        )
    cache, own = _cache(cache_name)
    if own != numbers:
        raise RuntimeError(f"cache: {cache_name} holds other numbers on this worker than on the client")
    outcome = run_claim(claim, Context(seed=seed, budget=budget, cache=cache, cache_name=cache_name, claims=claims))
    record = claim_record(replace(outcome, seconds=0.0))
    del record["seconds"]  # a time is no result: it is in the task's timing
    return [{"record": record, "pictures": [[p.figure, plain(p.data)] for p in outcome.pictures]}]


@functools.lru_cache(maxsize=1)
def _cache(name: str) -> tuple[Cache | None, str | None]:
    cache = None if name == "none" else kvtheory.sample_cache() if name == "sample" else Cache.load(name)
    return cache, _numbers(cache, name)


def kept(folder: Path, task: sweep.Task) -> tuple[dict[str, Any], list[tuple[str, Any]]] | None:
    """(record, its pictures) of a task finished in `folder`; None for one that is not, or that lacked something: what it lacked may be there now."""
    found = sweep.finished(folder, task)
    if found is None:
        return None
    (row,) = found["rows"]
    record = {**row["record"], "seconds": round(found["timing"]["seconds"], 3)}
    return record, [(figure, data) for figure, data in row["pictures"]]


def forget_unsettled(folder: Path, tasks: Sequence[sweep.Task]) -> None:
    """Remove finished tasks of claims that were not run or that crashed: both may be otherwise today, with the same sources."""
    for task in tasks:
        found = kept(folder, task)
        if found is not None and (found[0]["verdict"] == Verdict.NOT_RUN or found[0]["error"] is not None):
            (folder / "tasks" / f"{task.name}.json").unlink()
