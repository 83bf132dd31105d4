"""Millions of mutants, in chunks that can be interrupted: `python -m tests.fuzz.run --mutants 10_000_000 --jobs 1 --out FOLDER --resume`.

FOLDER/progress.json   chunks done, counts by codec, entry and outcome, slowest decodes; rewritten after each chunk, whole or not at all
FOLDER/offences/*.json each mutant that did what none may: kind, what, entry, stream and state in hex; `--replay FILE` tries one again

Each chunk is a forked process of its own: one that dies or hangs costs a chunk's time, its mutant is found by its number and kept, and
the chunk is done again without it. Chunk i is the same mutants whenever it is made. Exit status 1 if there are offences.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz import seeds as seeds_
from tests.fuzz.check import Checker, Offence, Tally
from tests.fuzz.mutations import Mutant, Mutator, chunk_rng

CHUNK = 5000
#: a chunk whose mutant does not change for so many seconds is ended
STUCK = 120.0
FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass
class Work:
    """A chunk under way. place: number of its mutant now; without: those that ended it before."""

    chunk: int
    size: int
    without: set[int]
    process: Any
    pipe: Any
    place: Any
    seen: int = -1
    since: float = 0.0


def record(mutator: Mutator, mutant: Mutant, offence: Offence, chunk: int, place: int) -> dict[str, Any]:
    """An offence as it is kept."""
    made_of = mutator.seeds[mutant.seed].name if mutant.seed >= 0 else f"cache file {-1 - mutant.seed}"
    about = {
        "kind": offence.kind,
        "what": offence.what,
        "entry": mutant.entry,
        "seed": made_of,
        "chunk": chunk,
        "place": place,
    }
    return {**about, "data": mutant.data.hex(), "state": mutant.state.hex()}


def do_chunk(
    mutator: Mutator, seed: int, chunk: int, size: int, without: set[int], place: Any = None
) -> tuple[Tally, list[dict[str, Any]]]:
    """All mutants of a chunk, checked."""
    rng, offences = chunk_rng(seed, chunk), []
    checker = Checker(mutator.seeds, mutator.files)
    try:
        with checker.guarded():
            for i in range(size):
                mutant = mutator.mutant(rng)
                if place is not None:
                    place.value = i
                if i in without:
                    continue
                offence = checker.check(mutant)
                if offence is not None:
                    offences.append(record(mutator, mutant, offence, chunk, i))
    finally:
        checker.close()
    return checker.tally, offences


def _child(pipe: Any, *arguments: Any) -> None:
    tally, offences = do_chunk(*arguments)
    pipe.send((dataclasses.asdict(tally), offences))


def _start(mutator: Mutator, seed: int, chunk: int, size: int, without: set[int]) -> Work:
    ours, theirs = FORK.Pipe(duplex=False)
    place = FORK.Value("q", -1, lock=False)
    process = FORK.Process(target=_child, args=(theirs, mutator, seed, chunk, size, without, place))
    process.start()
    theirs.close()
    return Work(chunk, size, without, process, ours, place, since=time.monotonic())


def _write(path: Path, value: Any) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(value, indent=1))
    os.replace(scratch, path)


class Run:
    """A run in a folder: what is done, and what is left."""

    def __init__(self, out: Path, mutants: int, seed: int, resume: bool) -> None:
        self.out, self.path = out, out / "progress.json"
        (out / "offences").mkdir(parents=True, exist_ok=True)
        self.tally, self.done, self.offences, self.seconds = Tally(), set[int](), 0, 0.0
        self.about = {"seed": seed, "chunk": CHUNK, "mutants": mutants}
        if self.path.exists():
            if not resume:
                raise SystemExit(f"--out: {out} holds a run already; --resume goes on with it")
            held = json.loads(self.path.read_text())
            if (held["seed"], held["chunk"]) != (seed, CHUNK):
                raise SystemExit(f"--seed: {out} holds a run of seed {held['seed']} in chunks of {held['chunk']}")
            self.done, self.offences, self.seconds = set(held["done"]), held["offences"], held["seconds"]
            self.tally = Tally(held["counts"], held["slowest"], held["nearest"], held["expansion"], held["traced"])
        self.chunks = [(i, min(CHUNK, mutants - i * CHUNK)) for i in range(-(-mutants // CHUNK))]

    @property
    def checked(self) -> int:
        return sum(self.tally.counts.values())

    def save(self) -> None:
        # chunks are done nearly in order: short lists
        _write(self.path, {**self.about, "done": sorted(self.done), "checked": self.checked, "offences": self.offences,
                           "seconds": self.seconds, **dataclasses.asdict(self.tally)})  # fmt: skip

    def keep(self, offences: list[dict[str, Any]]) -> None:
        for one in offences:
            _write(self.out / "offences" / f"{one['kind']}-{one['chunk']}-{one['place']}.json", one)
            print(f"OFFENCE {one['kind']} in {one['seed']} {one['entry']}: {one['what']}", flush=True)
        self.offences += len(offences)

    def go(self, mutator: Mutator, jobs: int) -> None:
        todo = [one for one in self.chunks if one[0] not in self.done]
        seed, began, before, spent = self.about["seed"], time.monotonic(), self.checked, self.seconds
        at_work: list[Work] = []
        while todo or at_work:
            while todo and len(at_work) < jobs:
                at_work.append(_start(mutator, seed, *todo.pop(0), set()))
            ready = multiprocessing.connection.wait([one.pipe for one in at_work], timeout=10.0)
            for one in list(at_work):
                if one.pipe in ready:
                    self._finished(one, at_work, mutator, todo)
                elif one.place.value != one.seen:
                    one.seen, one.since = one.place.value, time.monotonic()
                elif time.monotonic() - one.since > STUCK:
                    one.process.kill()
            if not ready:
                continue
            self.seconds = spent + time.monotonic() - began
            self.save()
            rate = (self.checked - before) / max(time.monotonic() - began, 1e-9)
            left = self.about["mutants"] - self.checked
            print(f"{self.checked:,} of {self.about['mutants']:,} mutants, {self.offences} offences, {rate:.0f} a second, "
                  f"{left / max(rate, 1e-9) / 60:.0f} minutes left", flush=True)  # fmt: skip

    def _finished(self, one: Work, at_work: list[Work], mutator: Mutator, todo: list[tuple[int, int]]) -> None:
        at_work.remove(one)
        try:
            tally, offences = one.pipe.recv()
        except EOFError:
            one.process.join()
            place = one.place.value
            rng = chunk_rng(self.about["seed"], one.chunk)
            mutant = [mutator.mutant(rng) for _ in range(place + 1)][-1] if place >= 0 else None
            if mutant is None or place in one.without:
                raise RuntimeError(
                    f"chunk {one.chunk}: ended with {one.process.exitcode} outside of any mutant"
                ) from None
            offence = Offence("crash", f"process ended with {one.process.exitcode}")
            self.keep([record(mutator, mutant, offence, one.chunk, place)])
            at_work.append(_start(mutator, self.about["seed"], one.chunk, one.size, one.without | {place}))
            return
        one.process.join()
        self.tally.add(Tally(**tally))
        self.tally.counts["skipped"] = self.tally.counts.get("skipped", 0) + len(one.without)
        self.done.add(one.chunk)
        self.keep(offences)


def replay(path: Path) -> int:
    """Check one kept offence again; status 1 if it is still one."""
    held = json.loads(path.read_text())
    every, files = seeds_.load(), seeds_.cache_files()
    names = [seed.name for seed in every]
    place = names.index(held["seed"]) if held["seed"] in names else -1 - int(held["seed"].rsplit(" ", 1)[1])
    checker = Checker(every, files)
    with checker.guarded():
        offence = checker.check(Mutant(place, held["entry"], bytes.fromhex(held["data"]), bytes.fromhex(held["state"])))
    checker.close()
    print("no offence" if offence is None else f"{offence.kind}: {offence.what}")
    return int(offence is not None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=10_000_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="check one kept offence again")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        return replay(given.replay)
    if given.out is None:
        parser.error("--out: expected a folder")
    run = Run(given.out, given.mutants, given.seed, given.resume)
    run.go(Mutator(seeds_.load(), seeds_.cache_files()), given.jobs)
    return int(run.offences > 0)


if __name__ == "__main__":
    sys.exit(main())
