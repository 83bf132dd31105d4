"""The ledger on disk: one JSON record per claim as it finishes, `ledger.json` of them all, figure data beside them.

Layout of the output folder: `ledger.json`, `claims/<id>.json` (what `--resume` continues from), `data/<figure>/<claim>.json`
(what `kvtheory figures` draws from). Every file is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import platform
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
from kvtheory import files
from kvtheory.statistics import Interval
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import FAMILY_LEVEL, Context
from proofs_checks.evidence import Evidence
from proofs_checks.papers import OWN, PAPERS
from proofs_checks.run import Outcome

SCHEMA_VERSION = 1


def plain(value: Any) -> Any:
    """`value` as JSON has it: fractions as text, NumPy as numbers and lists, NaN and infinities as text."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Interval):
        return {
            "estimate": plain(value.estimate),
            "low": plain(value.low),
            "high": plain(value.high),
            "level": value.level,
        }
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, the whole file or the old one."""
    with files.replacing(path) as scratch:
        scratch.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def source_digest(packages: Sequence[str] = ("kvtheory", "reference", "proofs_checks")) -> str:
    """SHA-256 of all source files of these packages: a run is continued only under the same sources."""
    digest = hashlib.sha256()
    for package in map(importlib.import_module, packages):
        root = Path(str(package.__file__)).parent
        for path in sorted(
            p for p in root.rglob("*") if p.suffix in (".py", ".html", ".json", ".safetensors") and p.is_file()
        ):
            digest.update(f"{package.__name__}/{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def cache_digest(context: Context) -> str | None:
    """SHA-256 of the real cache's numbers, or None: the same file under another name is the same cache."""
    if context.cache is None:
        return None
    digest = hashlib.sha256()
    for layer in context.cache:
        for array in (layer.keys, layer.values, layer.queries, layer.output_proj, layer.query_positions):
            if array is not None:
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def run_key(context: Context) -> dict[str, Any]:
    """What must be equal for two runs to give the same ledger."""
    return {"seed": context.seed, "budget": context.budget, "cache": cache_digest(context), "sources": source_digest()}


def _evidence(e: Evidence) -> dict[str, Any]:
    record = {name: plain(getattr(e, name)) for name in e.__dataclass_fields__}
    return {name: value for name, value in record.items() if value is not None or name == "agrees"} | (
        {"details": record["details"]} if e.details else {}
    )


def claim_record(outcome: Outcome) -> dict[str, Any]:
    """One claim as the ledger has it; schema in proofs_checks/ledger.schema.json."""
    claim = outcome.claim
    return {
        "id": claim.id,
        "paper": claim.paper,
        "section": claim.section,
        "statement": claim.statement,
        "formula": claim.formula,
        "assumptions": list(claim.assumptions),
        "functions": dict(claim.functions),
        "correction": claim.correction,
        "figure": claim.figure,
        "expected": str(claim.expected),
        "verdict": str(outcome.verdict),
        "as_expected": outcome.as_expected,
        "evidence": [_evidence(e) for e in outcome.evidence],
        "not_run": [{"missing": n.missing, "how": n.how} for n in outcome.not_run],
        "mutants": [
            {"name": m.name, "refuted": m.refuted, "verdict": None if m.verdict is None else str(m.verdict), "by": m.by}
            for m in outcome.mutants
        ],
        "error": outcome.error,
        "seconds": round(outcome.seconds, 3),
    }


def _file(claim_id: str) -> str:
    return claim_id.replace("/", "--") + ".json"


def _saved(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(run, claim record) of a file of claims/; ValueError naming the file for anything else."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        run, record = saved["run"], saved["claim"]
        if not isinstance(run, dict) or _file(record["id"]) != path.name or not isinstance(record["as_expected"], bool):
            raise ValueError("another claim's name, or no verdict")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(
            f"--resume: {path} is no claim of a run ({type(problem).__name__}: {problem}); remove it"
        ) from None
    return run, record


class Store:
    """The output folder of one run.

    resume: continue the run in it; ValueError where that ran on another cache, seed, budget or, but for by_claim, other sources. by_claim: other
    sources are no hindrance (`proofs_checks.tasks` knows which claims they touch); what was recorded under them is removed here.
    """

    def __init__(self, out: Path, context: Context, *, resume: bool, by_claim: bool = False) -> None:
        self.out, self.context, self.key = out, context, run_key(context)
        self.records: dict[str, dict[str, Any]] = {}
        started = out / "claims"
        if resume:
            if not started.is_dir():
                raise ValueError(f"--resume {out}: no interrupted run there (it has no claims/ folder)")
            for path in sorted(started.glob("*.json")):
                run, record = _saved(path)
                changed = [k for k in self.key if run.get(k) != self.key[k]]
                if by_claim and changed == ["sources"]:
                    for stale in (path, *(out / "data").glob(f"*/{path.name}")):
                        stale.unlink()
                elif changed:
                    raise ValueError(
                        f"--resume {out}: {', '.join(changed)} changed since that run; start anew without --resume"
                    )
                else:
                    self.records[record["id"]] = record
        else:
            # nothing is remembered between runs
            (out / "ledger.json").unlink(missing_ok=True)  # first: what is left of a run without it is no result
            for path in [
                *started.glob("*.json"),
                *(out / "data").glob("*/*.json"),
                *(out / "finished").rglob("*.json"),
            ]:
                path.unlink()
        started.mkdir(parents=True, exist_ok=True)

    def add(self, outcome: Outcome) -> dict[str, Any]:
        """Keep one finished claim and the data of its pictures."""
        return self.keep(claim_record(outcome), [(picture.figure, plain(picture.data)) for picture in outcome.pictures])

    def keep(self, record: dict[str, Any], pictures: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """The same of a record as the ledger has it, and (figure, plain data) of its pictures."""
        file = _file(record["id"])
        for figure, data in pictures:
            write_json(
                self.out / "data" / figure / file,
                {"claim": record["id"], "figure": figure, "run": self.key, "data": data},
            )
        write_json(self.out / "claims" / file, {"run": self.key, "claim": record})
        self.records[record["id"]] = record
        return record

    def finish(self, claims: Sequence[Claim], registered: int) -> dict[str, Any]:
        """Write ledger.json; what was not run and what differs stand first in no list of it, but `claims` keeps the ledger's order."""
        import scipy

        records = [self.records[c.id] for c in claims if c.id in self.records]
        ledger = {
            "schema": SCHEMA_VERSION,
            "kvtheory": kvtheory.__version__,
            "run": self.key,
            "cache_name": self.context.cache_name,
            "cache_meta": plain(self.context.cache.meta) if self.context.cache is not None else {},
            "family_level": FAMILY_LEVEL,
            "registered_claims": registered,
            "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
            "papers": {key: dict(paper._asdict()) for key, paper in PAPERS.items()},
            "claims": records,
        }
        write_json(self.out / "ledger.json", ledger)
        return ledger


def succeeded(ledger: dict[str, Any]) -> bool:
    """Whether every verdict is the expected one (or not run) and no mutant survived."""
    return all(record["as_expected"] for record in ledger["claims"])


def order_for_reading(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Not run first, then what differs from expectation, then the rest; each paper's together, our own statements last."""
    papers = list(dict.fromkeys(r["paper"] for r in records if r["paper"] != OWN)) + [OWN]

    def rank(record: dict[str, Any]) -> tuple[int, int]:
        first = 0 if record["verdict"] == Verdict.NOT_RUN else (2 if record["as_expected"] else 1)
        return first, papers.index(record["paper"])

    return sorted(records, key=rank)
