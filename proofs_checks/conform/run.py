"""All properties against one codec, one after the other, and what they found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kvtheory
from proofs_checks.conform import arithmetic, laws, shapes
from proofs_checks.conform.instances import Instance
from proofs_checks.conform.registry import ALPHA, CLAIMS, FAMILY_LEVEL, PROPERTIES, Asked, NotSettled, Property
from proofs_checks.conform.search import Skip, Violation
from proofs_checks.conform.subject import ForeignError, Subject

FORMAT, VERSION = "kvtheory-conform", 1
#: order of the report: what a codec takes, its numbers, its statistics
MODULES = (shapes, arithmetic, laws)
VERDICTS = ("holds", "fails", "not settled", "skipped")


def ordered() -> list[Property]:
    """All properties, in the order of the report."""
    return sorted(PROPERTIES.values(), key=lambda p: [m.__name__ for m in MODULES].index(p.check.__module__))


@dataclass(frozen=True)
class Finding:
    """One property: verdict (of VERDICTS), what was seen, and the least input that breaks it (an Instance, or text) or None."""

    name: str
    statement: str
    verdict: str
    seen: str
    instance: Any = None
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        instance = self.instance
        return {
            "property": self.name,
            "statement": self.statement,
            "verdict": self.verdict,
            "seen": self.seen,
            "input": None
            if instance is None
            else instance.record()
            if isinstance(instance, Instance)
            else {"text": str(instance)},
            "seconds": round(self.seconds, 3),
        }


@dataclass
class Report:
    """What a run found."""

    codec: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)

    def count(self, verdict: str) -> int:
        return sum(finding.verdict == verdict for finding in self.findings)

    @property
    def conforms(self) -> bool:
        """Whether nothing fails."""
        return not self.count("fails")

    def record(self) -> dict[str, Any]:
        """For JSON; the schema is proofs_checks/conform/conform.schema.json."""
        return {
            "format": FORMAT, "version": VERSION, "kvtheory": kvtheory.__version__, "codec": self.codec, "sizes": self.sizes,
            "level": {"family": FAMILY_LEVEL, "comparison": ALPHA}, "conforms": self.conforms,
            "summary": {verdict: self.count(verdict) for verdict in VERDICTS},
            "properties": [finding.record() for finding in self.findings],
            "measured": {name: x if not isinstance(x, float) or math.isfinite(x) else str(x) for name, x in self.measured.items()},
        }  # fmt: skip


def run(
    subject: Subject,
    *,
    bits: float | None = None,
    claims: Sequence[str] = (),
    only: Sequence[str] = (),
    examples: int = 40,
    seconds: float = 20.0,
    ledger: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    found: Callable[[Finding], None] = lambda finding: None,
) -> Report:
    """Every property (or those named in `only`) of the codec; its process is ended at the end.

    bits: a number, that the codec claims to hold; default what it says itself (its attribute or argument `bits`). claims: of CLAIMS, beside its own.
    examples, seconds: the most that one search draws and takes. ledger: the ledger's claims about its algorithm, too. progress, found: called before and
    after each property. ValueError for an unknown claim or property; ForeignError where the codec cannot be loaded or built at all.
    """
    for name, given, known in (("claims", claims, CLAIMS), ("only", only, tuple(PROPERTIES))):
        for one in given:
            if one not in known:
                raise ValueError(f"{name}: expected some of {', '.join(known)}, got {one!r}")
    with subject:
        subject.ask("seeded", library="default_rng", shape=[1], seed=0)  # starts it: what cannot be loaded says so here
        about = subject.about
        report = Report({"spec": subject.spec, "arguments": subject.arguments, "fit": subject.fit, "requirement": about["requirement"],
                         "python": about["python"], "numpy": about["numpy"]})  # fmt: skip
        progress("survey")
        start = time.perf_counter()
        try:
            sizes, refused = shapes.survey(subject)
            said = subject.ask("describe", dim=sizes.usual, heads=sizes.heads[0])[0]
        except (RuntimeError, ForeignError) as problem:
            finding = Finding(
                "codes", "some layer of 2 heads, 17 to 128 tokens and 16 to 128 channels is coded", "fails", str(problem), None,
                time.perf_counter() - start,
            )  # fmt: skip
            report.findings.append(finding)
            found(finding)
            return report
        own = {**about["defaults"], **subject.arguments}.get("bits")
        claimed = next(
            (
                b
                for b in (bits, said["bits"], about["bits"], own if isinstance(own, (int, float)) else None)
                if b is not None
            ),
            None,
        )
        every = tuple(dict.fromkeys([*claims, *said["claims"], *about["claims"]]))
        for one in every:
            if one not in CLAIMS:
                raise ValueError(f"claims: {subject.spec} claims {one!r}; expected some of {', '.join(CLAIMS)}")
        report.codec |= {
            "takes": said["takes"], "bits": claimed, "claims": list(every), "state_bytes": said["state_bytes"],
            "requirement": about["requirement"] or said["requirement"],
        }  # fmt: skip
        report.sizes = {
            "heads": sizes.heads, "tokens": sizes.tokens, "dims": sizes.dims, "dtypes": sizes.dtypes, "own_value_dim": sizes.own_value_dim,
            "troubles": refused,
        }  # fmt: skip
        asked = Asked(
            subject, sizes, claimed, every, said["takes"], said["state_bytes"], said["says_bits"], refused, examples, seconds,
            report.measured,
        )  # fmt: skip
        for wanted in ordered():
            if only and wanted.name not in only:
                continue
            progress(wanted.name)
            finding = _ask(wanted, asked)
            report.findings.append(finding)
            found(finding)
        if ledger:
            from proofs_checks.conform.ledger import findings

            for finding in findings(asked, progress):
                report.findings.append(finding)
                found(finding)
        report.codec["deaths"] = subject.deaths
    return report


def _ask(one: Property, asked: Asked) -> Finding:
    start = time.perf_counter()
    instance: Any = None
    try:
        verdict, seen = "holds", one.check(asked)
    except Violation as violation:
        verdict, seen, instance = "fails", violation.seen, violation.instance
    except Skip as skip:
        verdict, seen = "skipped", str(skip)
    except NotSettled as open_:
        verdict, seen = "not settled", str(open_)
    except LookupError as none:
        verdict, seen = "skipped", str(none)
    except ForeignError as problem:  # its process died between two requests of a check
        verdict, seen = "fails", str(problem)
    return Finding(one.name, one.statement, verdict, seen, instance, time.perf_counter() - start)
