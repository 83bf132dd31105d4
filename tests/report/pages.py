"""A ledger as large as a real one, made without running a check: every registered claim as if it had come out as expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import proofs_checks
from proofs_checks import report
from proofs_checks.claim import Claim
from proofs_checks.papers import PAPERS

_SVG = '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="600" height="200"><g id="a"/><use href="#a"/></svg>'


def record(claim: Claim) -> dict[str, Any]:
    fails = str(claim.expected) == "fails as stated"
    evidence: list[dict[str, Any]] = [
        {"kind": "exact", "role": "statement", "what": f"number {i} of the comparisons of {claim.id}", "ran_on": "a long list of synthetic kinds, seed 0",
         "observed": 1310720, "relation": "<=", "predicted": 4300 if fails and not i else 1310721, "agrees": not (fails and not i)}
        for i in range(12)
    ]  # fmt: skip
    evidence.append({"kind": "numerical", "role": "control", "what": "a value known independently", "ran_on": "gaussian", "observed": 0.5, "relation": "=",
                     "predicted": 0.5, "agrees": True, "tolerance": 1e-9, "because": "rounding of sums"})  # fmt: skip
    return {
        "id": claim.id, "paper": claim.paper, "section": claim.section, "statement": claim.statement, "formula": claim.formula,
        "assumptions": list(claim.assumptions), "functions": dict(claim.functions), "correction": claim.correction, "figure": claim.figure,
        "expected": str(claim.expected), "verdict": str(claim.expected), "as_expected": True, "evidence": evidence, "not_run": [],
        "mutants": [{"name": m.name, "refuted": True, "verdict": "not settled", "by": "number 0 of the comparisons"} for m in claim.mutants],
        "error": None, "seconds": 1.25,
    }  # fmt: skip


def ledger(cache_name: str = "sample") -> dict[str, Any]:
    claims = proofs_checks.claims()
    return {
        "schema": 1, "kvtheory": "0", "run": {"seed": 7, "budget": "quick", "cache": "a" * 64, "sources": "b" * 64}, "cache_name": cache_name,
        "cache_meta": {"model": "smol"}, "family_level": 1e-3, "registered_claims": len(claims), "versions": {"python": "3"},
        "papers": {key: dict(paper._asdict()) for key, paper in PAPERS.items()}, "claims": [record(c) for c in claims.values()],
    }  # fmt: skip


def write(folder: Path) -> Path:
    """index.html of that ledger, a picture for each figure of a claim."""
    picture = folder / "picture.svg"
    picture.write_text(_SVG)
    names = {c.figure for c in proofs_checks.claims().values() if c.figure}
    page = folder / "index.html"
    report.write(page, ledger(), {name: (picture, f"The caption of {name}.") for name in names})
    return page
