"""Power of the ledger: which wrong formulas would its checks notice?

    python -m proofs_checks.power                    # all claims x all mutants; the table, the totals
    python -m proofs_checks.power --share 8          # a fixed eighth of the systematic ones (what `make verify` adds to a quick run)
    python -m proofs_checks.power --claim 'risk/*'

A claim's authors write its own mutants (`Claim.mutants`). Here every function that a claim states is also put through the same list of slips,
whoever wrote it: the check is run once with the functions watched, and what they took and gave says which slips apply.

- of every number that a function gives (a value, an array, each field of a record that the check reads): factor 2, factor 1/2, factor d and 1/d (d: the last axis
  of its first array, the head's dimension, or an argument called so), square where there is none, square dropped, nats for bits, sign; of a
  whole number also one more; of a truth value, its opposite
- of every whole number that it takes: one more and one fewer (a rank, a budget, a number of bits); of every real number: twice
- of two arrays alike in shape: exchanged; of a square one: transposed

A slip is *refuted* when the same check gives another verdict than expected, *raised* when the check ends in an exception (which a run reports
as not settled), *void* when it changed no answer that the check asked for, *survived* otherwise. What is void or survives is
in power.md beside this file: with a proof that the statement, as checked, does not depend on it, or in its list of open ones. Exit status 1 for
one in neither list, for a name in them that is no survivor, and for a mutant of the claims' own that survives.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import fnmatch
import functools
import hashlib
import inspect
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import proofs_checks
from proofs_checks.claim import Claim, Function, Mutant
from proofs_checks.context import Context
from proofs_checks.evidence import NotRun
from proofs_checks.run import run_mutant

NOTES = Path(__file__).with_name("power.md")
#: calls of each function that are looked at, and arguments that no formula counts
LOOKED_AT = 4
NOT_COUNTED = frozenset({"seed", "index", "axis", "jobs", "batch"})
DIMENSIONS = ("d", "dim", "head_dim", "dimension")


class Watched:
    """A function that remembers its first calls, and which fields of its records were read; everything else of it is the function's own."""

    def __init__(self, true: Function) -> None:
        self.true = true
        self.calls: list[tuple[dict[str, Any], Any]] = []
        self.read: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.true(*args, **kwargs)
        if len(self.calls) < LOOKED_AT and (bound := _bound(self.true, args, kwargs)) is not None:
            self.calls.append(
                (dict(bound.arguments), copy.copy(result) if dataclasses.is_dataclass(result) else result)
            )
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return self._named(result)
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            return self._record(result)
        return result

    def _named(self, result: Any) -> Any:
        names, read = result._fields, self.read
        known: Any = type(result)

        def look(this: Any, name: str) -> Any:
            if name in names:
                read.add(name)
            return known.__getattribute__(this, name)

        def item(this: Any, at: Any) -> Any:
            read.update(names[at] if isinstance(at, slice) else [names[at]])
            return known.__getitem__(this, at)

        def walk(this: Any) -> Any:
            read.update(names)
            return known.__iter__(this)

        body = {"__getattribute__": look, "__getitem__": item, "__iter__": walk}
        return tuple.__new__(type(known.__name__, (known,), body), tuple(result))

    def _record(self, result: Any) -> Any:
        names, read = {f.name for f in dataclasses.fields(result)}, self.read

        def look(this: Any, name: str) -> Any:
            if name in names:
                read.add(name)
            return object.__getattribute__(this, name)

        known = type(result)
        try:
            object.__setattr__(result, "__class__", type(known.__name__, (known,), {"__getattribute__": look}))
        except TypeError:  # __slots__: it cannot be watched
            self.read |= names
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.true, name)


class Changed:
    """`wrong(true, bound arguments)` in place of `true`; `differs` once an answer was another one."""

    def __init__(self, true: Function, wrong: Callable[[Function, inspect.BoundArguments], Any]) -> None:
        self.true, self.wrong, self.differs = true, wrong, False
        functools.update_wrapper(self, true, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = _bound(self.true, args, kwargs)
        if bound is None:
            return self.true(*args, **kwargs)
        result = self.wrong(self.true, bound)
        self.differs = self.differs or not _same(result, self.true(*args, **kwargs))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.true, name)


def _bound(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments | None:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    return bound


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind in "fc")
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (bool, str, bytes, Real, type(None), dict, frozenset, set)):
        return bool(a == b)
    return False  # objects: taken to differ


def _whole(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, (bool, np.bool_))


def _real(x: Any) -> bool:
    return isinstance(x, (float, np.floating, Fraction)) or _whole(x)


def _numbers(x: Any) -> bool:
    """Whether x is a value of a formula: a number, an array of real ones, or a sequence of these (indices are none)."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind == "f" and x.size > 0
    if isinstance(x, (tuple, list)):
        return len(x) > 0 and not hasattr(x, "_fields") and all(_numbers(v) for v in x)
    return _real(x)


def _exact(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return any(_exact(v) for v in x)
    return isinstance(x, Fraction)


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    return type(x)(_each(v, change) for v in x) if isinstance(x, (tuple, list)) else change(x)


def _times(factor: int | Fraction | float) -> Callable[[Any], Any]:
    def change(x: Any) -> Any:
        if isinstance(x, Fraction) and isinstance(factor, (int, Fraction)):
            return x * factor
        if _whole(x) and isinstance(factor, Fraction):
            return int(x * factor) if (x * factor).denominator == 1 else float(x * factor)
        return x * (factor if isinstance(factor, int) else float(factor))

    return change


def _root(x: Any) -> Any:
    return (
        np.sign(x) * np.sqrt(np.abs(x))
        if isinstance(x, np.ndarray)
        else float(np.sign(float(x)) * abs(float(x)) ** 0.5)
    )


def _dimension(arguments: Mapping[str, Any]) -> int | None:
    for name in DIMENSIONS:
        if _whole(arguments.get(name)):
            return int(arguments[name])
    for value in arguments.values():
        if isinstance(value, np.ndarray) and value.ndim:
            return int(value.shape[-1])
        if isinstance(value, kvtheory.Layer):
            return int(value.keys.shape[-1])
    return None


Change = Callable[[Any, Mapping[str, Any]], Any]
Put = Callable[[Any, Any], Any]


def _scaled(factor: Any) -> Change:
    return lambda x, _: _each(x, _times(factor))


def _put(name: str) -> Put:
    """A record with another value in that field."""
    return lambda r, v: r._replace(**{name: v}) if hasattr(r, "_replace") else replace(r, **{name: v})


def _put_at(i: int) -> Put:
    return lambda r, v: (*r[:i], v, *r[i + 1 :])


def _slips(value: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Change]]:
    """The slips that a value of a formula suffers."""
    if isinstance(value, (bool, np.bool_)):
        yield "the opposite", lambda x, _: not x
        return
    if not _numbers(value):
        return
    for name, factor in (("factor 2", 2), ("factor 1/2", Fraction(1, 2)), ("sign", -1)):
        yield name, _scaled(factor)
    yield "squared", lambda x, _: _each(x, lambda v: v * v)
    if not _exact(value):
        yield "square dropped", lambda x, _: _each(x, _root)
        yield "natural for binary logarithm", lambda x, _: _each(x, _times(float(np.log(2))))
    if (_dimension(arguments) or 1) > 1:
        yield "factor d", lambda x, a: _each(x, _times(_dimension(a) or 1))
        yield "factor 1/d", lambda x, a: _each(x, _times(Fraction(1, _dimension(a) or 1)))
    if _whole(value):
        yield "one more", lambda x, _: x + 1


def _fields(result: Any) -> Iterator[tuple[str, Any, Put]]:
    """(name, value, put(result, new value)) of each number that a function gives."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            if field.init and field.name not in NOT_COUNTED:
                yield field.name, getattr(result, field.name), _put(field.name)
    elif hasattr(result, "_fields"):
        for name in result._fields:
            yield name, getattr(result, name), _put(name)
    elif isinstance(result, tuple) and not _numbers(result):
        for i, value in enumerate(result):
            yield f"[{i}]", value, _put_at(i)
    else:
        yield "", result, lambda r, v: v


def _of_results(role: str, calls: list[tuple[dict[str, Any], Any]], read: set[str]) -> Iterator[Mutant]:
    for arguments, result in calls:
        for field, value, put in _fields(result):
            if (dataclasses.is_dataclass(result) or hasattr(result, "_fields")) and field not in read:
                continue
            for name, change in _slips(value, arguments):

                def wrong(
                    true: Function,
                    bound: inspect.BoundArguments,
                    field: str = field,
                    change: Change = change,
                    put: Any = put,
                ) -> Any:
                    given = true(*bound.args, **bound.kwargs)
                    now = next((v for n, v, _ in _fields(given) if n == field), None)
                    return put(given, change(now, bound.arguments)) if now is not None else given

                yield _mutant(role, f"{name} in {field}" if field else name, wrong)


def _of_arguments(role: str, calls: list[tuple[dict[str, Any], Any]]) -> Iterator[Mutant]:
    for arguments, _ in calls:
        extra = next((n for n, v in arguments.items() if isinstance(v, dict)), None)
        flat = {(n, None): v for n, v in arguments.items()} | (
            {(extra, k): v for k, v in arguments[extra].items()} if extra else {}
        )
        for (name, key), value in flat.items():
            shown = name if key is None else str(key)
            changes: list[tuple[str, Callable[[Any], Any]]] = []
            if _whole(value) and shown not in NOT_COUNTED:
                changes = [("one more", lambda x: x + 1), ("one fewer", lambda x: x - 1)]
            elif isinstance(value, (float, np.floating, Fraction)):
                changes = [("twice", lambda x: x * 2)]
            elif _square(value) and not np.array_equal(value, value.T):
                changes = [("transposed", lambda x: np.ascontiguousarray(x.T))]
            for kind, change in changes:

                def wrong(
                    true: Function,
                    bound: inspect.BoundArguments,
                    name: str = name,
                    key: Any = key,
                    change: Any = change,
                ) -> Any:
                    holder = bound.arguments if key is None else dict(bound.arguments[name])
                    at = name if key is None else key
                    if at in holder and (_real(holder[at]) or isinstance(holder[at], np.ndarray)):
                        holder[at] = change(holder[at])
                    if key is not None:
                        bound.arguments[name] = holder
                    return true(*bound.args, **bound.kwargs)

                yield _mutant(role, f"{shown} {kind}", wrong)
        arrays = [n for n, v in arguments.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"]
        for i, first in enumerate(arrays):
            for second in arrays[i + 1 :]:
                if arguments[first].shape == arguments[second].shape:

                    def wrong(true: Function, bound: inspect.BoundArguments, a: str = first, b: str = second) -> Any:  # type: ignore[misc]
                        bound.arguments[a], bound.arguments[b] = bound.arguments[b], bound.arguments[a]
                        return true(*bound.args, **bound.kwargs)

                    yield _mutant(role, f"{first} and {second} swapped", wrong)


def _square(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim == 2 and x.shape[0] == x.shape[1] > 1 and x.dtype.kind == "f"


def _mutant(role: str, name: str, wrong: Callable[[Function, inspect.BoundArguments], Any]) -> Mutant:
    return Mutant(f"{role}: {name}", role, lambda true: Changed(true, wrong))


def _watch(claim: Claim, context: Context, functions: Mapping[str, Function]) -> None:
    for item in claim.run(context, functions):
        if isinstance(item, NotRun):
            raise ValueError(item.missing)


def systematic(claim: Claim, context: Context) -> list[Mutant]:
    """The slips that apply to the functions of one claim; ValueError where the claim cannot run here (what it needs is absent)."""
    context.claim_id = claim.id
    watched = {role: Watched(true) for role, true in claim.look_up().items()}
    try:
        _watch(claim, context, watched)
    except TypeError:
        # a class that the check derives another from can only be itself: no slips of it, all of the others
        watched = {role: w for role, w in watched.items() if not isinstance(w.true, type)}
        _watch(claim, context, claim.look_up() | watched)
    found: dict[str, Mutant] = {}
    for role, function in watched.items():
        for mutant in (*_of_results(role, function.calls, function.read), *_of_arguments(role, function.calls)):
            found.setdefault(mutant.name, mutant)
    return list(found.values())


@dataclass(frozen=True)
class Trial:
    claim: str
    mutant: str
    outcome: str  # refuted, raised, void, survived
    verdict: str | None
    by: str | None


def attempt(claim: Claim, context: Context, mutant: Mutant) -> Trial:
    """One slip through the claim's own check."""
    made: list[Any] = []

    def wrong(true: Function) -> Function:
        made.append(mutant.wrong(true))
        return made[-1]

    got = run_mutant(claim, context, replace(mutant, wrong=wrong))
    if got.refuted:
        outcome = "refuted"
    elif got.verdict is None:
        outcome = "raised"
    else:
        outcome = "survived" if any(m.differs for m in made) else "void"
    return Trial(claim.id, mutant.name, outcome, None if got.verdict is None else str(got.verdict), got.by)


def drawn(claim: str, mutant: str, share: int) -> bool:
    """Whether a slip is in the fixed part of 1/share of them."""
    return int.from_bytes(hashlib.sha256(f"{claim}\0{mutant}".encode()).digest()[:4], "little") % share == 0


def open_slips() -> set[tuple[str, str]]:
    """(claim, mutant) of power.md's list of what is neither refuted nor proved harmless: lines "* `claim` · `mutant`, `mutant`"."""
    text = NOTES.read_text(encoding="utf-8") if NOTES.is_file() else ""
    lines = re.findall(r"^\* `([^`]+)` · (.+)$", text, re.MULTILINE)
    return {(claim, mutant) for claim, mutants in lines for mutant in re.findall(r"`([^`]+)`", mutants)}


def notes() -> dict[tuple[str, str], str]:
    """{(claim, mutant), either with wildcards: its proof} of power.md: lines "- `claim` · `mutant` [, `mutant`]: proof" (the proof may go on indented)."""
    found: dict[tuple[str, str], str] = {}
    text = NOTES.read_text(encoding="utf-8") if NOTES.is_file() else ""
    for claims, mutants, proof in re.findall(
        r"^- ((?:`[^`]+`,? ?)+)· ((?:`[^`]+`,? ?)+): (.+(?:\n  .+)*)", text, re.MULTILINE
    ):
        for claim in re.findall(r"`([^`]+)`", claims):
            for mutant in re.findall(r"`([^`]+)`", mutants):
                found[claim, mutant] = " ".join(proof.split())
    return found


def _matches(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def explained(trial: Trial, known: Mapping[tuple[str, str], str]) -> tuple[str, str] | None:
    """The note that is about this slip."""
    return next((k for k in known if _matches(trial.claim, k[0]) and _matches(trial.mutant, k[1])), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs_checks.power", description="Power of the ledger's checks.")
    parser.add_argument("--claim", action="append", help="only claims whose id matches this glob; repeatable")
    parser.add_argument(
        "--share", type=int, default=1, help="a fixed 1/SHARE of the systematic mutants (default 1: all)"
    )
    parser.add_argument(
        "--own", action=argparse.BooleanOptionalAction, default=True, help="also the mutants that the claims bring"
    )
    parser.add_argument("--out", type=Path, help="also write every trial there, as JSON")
    options, _ = parser.parse_known_args(arguments)
    registered = proofs_checks.claims()
    chosen = [c for c in registered.values() if any(fnmatch.fnmatch(c.id, g) for g in options.claim or ["*"])]
    context = Context(cache=kvtheory.sample_cache(), cache_name="sample", claims=len(registered))
    known, debt, used, trials, own = notes(), open_slips(), set(), [], Counter[str]()
    start = time.perf_counter()
    print(
        f"{'claim':46} {'own':>9} | {'slips':>5} {'refuted':>7} {'raised':>6} {'void':>4} {'survived':>8} {'open':>4}"
    )
    for claim in chosen:
        context.claim_id = claim.id
        try:
            slips = [m for m in systematic(claim, context) if drawn(claim.id, m.name, options.share)]
        except ValueError as absent:
            print(f"{claim.id:46} not run: {absent}")
            continue
        mine = (
            Counter(str(run_mutant(claim, context, m).refuted) for m in claim.mutants)
            if options.own
            else Counter[str]()
        )
        got = [attempt(claim, context, mutant) for mutant in slips]
        context.forget()
        own += mine
        trials += got
        count = Counter(t.outcome for t in got)
        unexplained = []
        for trial in got:
            if trial.outcome in ("void", "survived"):
                note = explained(trial, known)
                used.add(note)
                if note is None:
                    unexplained.append(trial)
        print(
            f"{claim.id:46} {mine['True']:4}/{sum(mine.values()):<4} | {len(got):5} {count['refuted']:7} {count['raised']:6} {count['void']:4}"
            f" {count['survived']:8} {len(unexplained):4}",
            flush=True,
        )
        for trial in unexplained:
            if (trial.claim, trial.mutant) not in debt:
                print(f"    {trial.outcome}, in neither list of power.md: {trial.mutant}")
    total = Counter(t.outcome for t in trials)
    left = [t for t in trials if t.outcome in ("void", "survived") and explained(t, known) is None]
    fresh = [t for t in left if (t.claim, t.mutant) not in debt]
    survivors = {(t.claim, t.mutant) for t in trials if t.outcome in ("void", "survived")}
    stale = (
        [k for k in (*known, *debt) if k not in used and k not in survivors]
        if options.share == 1 and not options.claim
        else []
    )
    if options.out:
        options.out.write_text(
            json.dumps([dataclasses.asdict(t) for t in trials], indent=0, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    if options.own:
        print(f"own mutants: {own['True']} of {sum(own.values())} refuted in {len(chosen)} claims")
    print(
        f"systematic slips: {len(trials)}; {total['refuted']} refuted, {total['raised']} raised, {total['void'] + total['survived']} unrefuted "
        f"({total['void']} void, {total['survived']} survived): {total['void'] + total['survived'] - len(left)} with a proof, {len(left)} open, "
        f"{len(fresh)} new; {time.perf_counter() - start:.0f} s"
    )
    for claim_id, mutant in stale:
        print(f"power.md names what is refuted or gone: {claim_id} · {mutant}")
    return 1 if fresh or stale or own["False"] else 0


if __name__ == "__main__":
    sys.exit(main())
