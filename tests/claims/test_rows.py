"""docs/sequential.md: each row of the theory has claims that are there, each with at least two mutants, and no claim of the paper is without a row."""

from __future__ import annotations

import re
from pathlib import Path

from proofs_checks import sequential
from proofs_checks.claim import Claim

CLAIMS = {v.id: v for v in vars(sequential).values() if isinstance(v, Claim)}
PAGE = Path(__file__).parents[2] / "docs" / "sequential.md"


def rows():
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("## Which claim checks what\n")[1].split("\n## ")[0]
    found = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {name.strip(): re.findall(r"`([^`]+)`", claims) for name, claims in found[1:]}


def test_every_row_has_claims_with_mutants():
    found = rows()
    assert len(found) >= 20
    for name, ids in found.items():
        assert ids, name
        assert all(len(CLAIMS[one].mutants) >= 2 for one in ids), name


def test_every_statement_of_the_theory_has_a_row():
    text = " ".join(rows())
    assert [n for n in range(1, 13) if not re.search(rf"\bA{n}\b", text)] == []


def test_no_claim_is_without_a_row():
    named = {one for ids in rows().values() for one in ids}
    assert set(CLAIMS) - named == set()
