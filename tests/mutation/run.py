"""`make mutation`: how many wrong variants of our sources the tests find, with a 95 % interval, within a time budget.

    python -m tests.mutation.run --seconds 600                      # goes on where it stopped, package by package in turn
    python -m tests.mutation.run --package kvtheory.rate --show     # the survivors, with what they change
    python -m tests.mutation.run --seconds 0                        # the table of what ran

Results are kept under report/mutation, one line a mutant. A killed mutant is not tried again while its module is the same; a survivor
is tried again when a test of the package has changed. What survives for a reason is named in tests/mutation/justified.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from tests.mutation import sample, trial

ROOT = Path(__file__).resolve().parents[2]
JUSTIFIED = Path(__file__).with_name("justified.md")


def justified() -> dict[str, str]:
    """{name: line} of the survivors that justified.md gives a reason for."""
    if not JUSTIFIED.is_file():
        return {}
    return dict(re.findall(r"^- `([0-9a-f]{12})` (.*)$", JUSTIFIED.read_text(encoding="utf-8"), re.MULTILINE))


def digest(paths: list[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Clopper and Pearson, 95 %."""
    from scipy.stats import beta

    low = 0.0 if killed == 0 else float(beta.ppf(0.025, killed, tried - killed + 1))
    high = 1.0 if killed == tried else float(beta.ppf(0.975, killed + 1, tried - killed))
    return low, high


class Package:
    """One package: its sample, its kept results, what is still to be tried."""

    def __init__(self, name: str, size: int, out: Path) -> None:
        self.name, self.out = name, out
        self.drawn, self.population = sample.draw(ROOT, name, size)
        self.test_files = sorted(
            p
            for t in sample.PACKAGES[name][1]
            for p in ([ROOT / t] if (ROOT / t).is_file() else (ROOT / t).rglob("test_*.py"))
        )
        self.tests_digest = digest(self.test_files)
        self.file = out / f"{name}.jsonl"
        self.results: dict[str, dict[str, Any]] = {}
        if self.file.is_file():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.results[record["name"]] = record

    def valid(self, mutant: sample.Mutant, text: str) -> bool:
        record = self.results.get(mutant.name)
        if record is None or record["text"] != hashlib.sha256(text.encode()).hexdigest()[:16]:
            return False
        return record["outcome"] != "survived" or record["tests"] == self.tests_digest or mutant.name in justified()

    def todo(self) -> list[tuple[sample.Mutant, str]]:
        return [(m, text) for m, text in self.drawn if not self.valid(m, text)]

    def attempt(self, copied: Path, mutant: sample.Mutant, text: str) -> dict[str, Any]:
        where = copied / sample.PACKAGES[self.name][0]
        base = trial.baseline(
            copied,
            where,
            [p.relative_to(ROOT).as_posix() for p in self.test_files],
            self.out / f"{self.name}.{digest([*self.test_files, *sample.sources(ROOT, self.name)])}.lines.json",
        )
        start = time.monotonic()
        outcome, by = trial.attempt(copied, mutant.module, text, base, mutant.lines, self.out / f"{self.name}.log")
        record = {
            "name": mutant.name, "module": mutant.module, "line": mutant.line, "operator": mutant.operator, "was": mutant.was,
            "becomes": mutant.becomes, "outcome": outcome, "by": by, "seconds": round(time.monotonic() - start, 2),
            "text": hashlib.sha256(text.encode()).hexdigest()[:16], "tests": self.tests_digest,
        }  # fmt: skip
        self.results[mutant.name] = record
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
        return record

    def current(self) -> list[dict[str, Any]]:
        """The results of the sample as the sources now stand, in the sample's order."""
        return [self.results[m.name] for m, text in self.drawn if self.valid(m, text)]


def line(name: str, records: list[dict[str, Any]], drawn: int, population: int) -> str:
    tried = len(records)
    if not tried:
        return f"{name:22} {population:10} {drawn:6} {0:6}"
    killed = sum(r["outcome"] != "survived" for r in records)
    why = sum(r["outcome"] == "survived" and r["name"] in justified() for r in records)
    low, high = interval(killed, tried)
    return (
        f"{name:22} {population:10} {drawn:6} {tried:6} {killed:6} {100 * killed / tried:6.1f} %  [{100 * low:5.1f}, {100 * high:5.1f}] %"
        f" {why:9} {tried - killed - why:9}"
    )


def table(packages: list[Package]) -> None:
    """Killed share and interval by package, the theory's in one line, and what is neither killed nor justified."""
    print("package                   mutants sample  tried killed   share     95 % interval  justified     open")
    for package in packages:
        print(line(package.name, package.current(), len(package.drawn), package.population))
    theory = [p for p in packages if p.name in sample.THEORY]
    if len(theory) > 1:
        records = [r for p in theory for r in p.current()]
        print(
            line("theory, all together", records, sum(len(p.drawn) for p in theory), sum(p.population for p in theory))
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="stop trying after this long (default 600)")
    parser.add_argument("--sample", type=int, default=150, help="mutants a package (default 150)")
    parser.add_argument("--package", action="append", choices=list(sample.PACKAGES), help="only these; repeatable")
    parser.add_argument("--show", action="store_true", help="print survivors without a reason")
    parser.add_argument("--out", type=Path, default=ROOT / "report" / "mutation")
    options = parser.parse_args()
    os.environ["CI"] = "1"  # hypothesis draws the same examples each time
    options.out.mkdir(parents=True, exist_ok=True)
    packages = [Package(name, options.sample, options.out.resolve()) for name in options.package or sample.PACKAGES]
    end = time.monotonic() + options.seconds
    queues = [(p, p.todo()) for p in packages]
    if options.seconds > 0 and any(todo for _, todo in queues):
        trial.load()
        copied = (options.out / "tree").resolve()
        trial.copy(ROOT, copied)
        # theory first, a round of ten of each: whenever it stops, what ran is the beginning of each sample
        for group in (
            [q for q in queues if q[0].name in sample.THEORY],
            [q for q in queues if q[0].name not in sample.THEORY],
        ):
            while any(todo for _, todo in group) and time.monotonic() < end:
                for package, todo in group:
                    for mutant, text in [todo.pop(0) for _ in range(min(10, len(todo)))]:
                        if time.monotonic() >= end:
                            break
                        record = package.attempt(copied, mutant, text)
                        print(
                            f"{record['outcome']:8} {record['seconds']:6.1f} s  {mutant.module}:{mutant.line} {mutant.operator}",
                            flush=True,
                        )
    table(packages)
    open_ones = [
        r for p in packages for r in p.current() if r["outcome"] == "survived" and r["name"] not in justified()
    ]
    if options.show:
        for r in open_ones:
            print(f"\n{r['name']} {r['module']}:{r['line']} {r['operator']}\n  - {r['was']}\n  + {r['becomes']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
