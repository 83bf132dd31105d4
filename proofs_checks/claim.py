"""A claim: a statement of a paper, the functions that state it, a check that could refute it, and wrong variants that it must refute.

The check is a generator of Evidence. It takes the statement's functions as keyword arguments; the runner looks the true ones up
in kvtheory by name each time it runs, so that replacing `kvtheory.distortion.key_term` by a wrong one turns the verdict. A mutant
runs through the same check with one of them replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, NotRun, Picture

Check = Callable[..., Iterator[Evidence | Picture | NotRun]]
Function = Callable[..., Any]


class Verdict(StrEnum):
    HOLDS = "holds"
    HOLDS_UNDER = "holds under assumptions"
    FAILS = "fails as stated"
    NOT_SETTLED = "not settled"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Mutant:
    """The statement made wrong in a plausible way: `role` names the function replaced, `wrong(true function)` is the replacement."""

    name: str
    role: str
    wrong: Callable[[Function], Function]


@dataclass(frozen=True)
class Claim:
    """One statement and how it is checked. `functions` maps the check's keyword arguments to dotted names in kvtheory or reference."""

    id: str
    paper: str
    section: str
    statement: str
    formula: str
    assumptions: tuple[str, ...]
    expected: Verdict
    functions: Mapping[str, str]
    mutants: tuple[Mutant, ...]
    check: Check
    figure: str | None = None
    correction: str | None = None  # the id of the claim that states it rightly, for a statement that fails

    def look_up(self) -> dict[str, Function]:
        """The true functions, by name, now."""
        found = {}
        for role, name in self.functions.items():
            module, _, attribute = name.rpartition(".")
            found[role] = getattr(importlib.import_module(module), attribute)
        return found

    def run(
        self, context: Context, functions: Mapping[str, Function] | None = None
    ) -> Iterator[Evidence | Picture | NotRun]:
        return self.check(context, **(self.look_up() if functions is None else functions))

    def judge(self, evidence: Sequence[Evidence]) -> Verdict:
        """The verdict that this evidence supports."""
        if not any(e.role == "statement" for e in evidence) or any(
            e.agrees is not True for e in evidence if e.role == "control"
        ):
            return Verdict.NOT_SETTLED
        agreement = [e.agrees for e in evidence if e.role == "statement"]
        if False in agreement:
            return Verdict.FAILS
        if None in agreement:
            return Verdict.NOT_SETTLED
        return Verdict.HOLDS_UNDER if self.assumptions else Verdict.HOLDS

    def cannot_recover(self, evidence: Evidence) -> bool:
        """Whether this one piece already rules the expected verdict out, whatever comes after it."""
        if evidence.role == "control":
            return evidence.agrees is not True
        return evidence.role == "statement" and self.expected is not Verdict.FAILS and evidence.agrees is not True


def claim(
    *, id: str, paper: str, section: str, statement: str, formula: str, assumptions: Sequence[str] = (), expected: Verdict,
    functions: Mapping[str, str], mutants: Sequence[Mutant], figure: str | None = None, correction: str | None = None,
) -> Callable[[Check], Claim]:  # fmt: skip
    """Turn a check into a Claim. ValueError for a claim that could not fail: fewer than two mutants, or a mutant of no function."""

    def make(check: Check) -> Claim:
        names = [m.name for m in mutants]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"{id}: expected at least two mutants with names of their own, got {names}")
        for mutant in mutants:
            if mutant.role not in functions:
                raise ValueError(
                    f"{id}: mutant {mutant.name!r} replaces {mutant.role!r}, expected one of {', '.join(functions)}"
                )
        return Claim(
            id, paper, section, statement, formula, tuple(assumptions), expected, dict(functions), tuple(mutants), check, figure,
            correction,
        )  # fmt: skip

    return make
