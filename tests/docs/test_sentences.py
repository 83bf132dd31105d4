"""docs/sentences.md: each sentence of the three summaries has its row, each claim is in the ledger, each verdict is the registered one."""

import re

import pytest

import proofs_checks
from tests.docs import book

PAGE = book.DOCS / "sentences.md"
CLAIMS = proofs_checks.claims()
#: sentences of each summary, counted on the summaries themselves
SENTENCES = {"Sequential compression": 39, "Transform coding": 34, "The risk of compression": 37}
REASONS = ("no claim: ", "not checkable by computation: ")


def rows(section):
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    (table,) = book.tables(text)
    assert table[0] == ["no.", "what it says", "claims and verdicts", "remark"]
    return table[1:]


def verdicts(cell):
    """[(claim id, verdict)] of a cell; [] for one that gives a reason."""
    if cell.startswith(REASONS):
        assert len(cell.split(": ", 1)[1]) >= 10, f"no reason: {cell!r}"
        return []
    found = [re.fullmatch(r"`([a-z0-9/.-]+)` ([a-z ]+)", part) for part in cell.split("; ")]
    assert all(found), f"expected `claim` verdict, or a reason, got {cell!r}"
    return [(match[1], match[2]) for match in found]


@pytest.mark.parametrize("section", SENTENCES)
def test_no_sentence_is_skipped(section):
    assert [row[0] for row in rows(section)] == [str(n) for n in range(1, SENTENCES[section] + 1)]
    assert all(len(row[1]) > 10 for row in rows(section))


@pytest.mark.parametrize("section", SENTENCES)
def test_claims_exist_and_verdicts_are_the_registered_ones(section):
    for row in rows(section):
        for claim_id, verdict in verdicts(row[2]):
            assert claim_id in CLAIMS, f"{section} {row[0]}: no claim {claim_id}"
            assert verdict == CLAIMS[claim_id].expected.value, f"{section} {row[0]}: {claim_id}"


def test_a_failure_stands_beside_what_holds():
    """A row that shows a statement failing also shows its correction, here or as another claim that holds."""
    for section in SENTENCES:
        for row in rows(section):
            found = [v for _, v in verdicts(row[2])]
            assert not found or set(found) != {"fails as stated"}, f"{section} {row[0]}"


def test_the_counts_above_the_tables():
    (summary,) = book.tables(PAGE.read_text(encoding="utf-8").split("\n## ")[0])
    for row in summary[1:]:
        section = re.match(r"\[(.+?)\]", row[0])[1]
        cells = [r[2] for r in rows(section)]
        unchecked, without = (sum(cell.startswith(reason) for cell in cells) for reason in reversed(REASONS))
        assert [int(x) for x in row[1:]] == [len(cells), len(cells) - unchecked - without, unchecked, without]


#: of the quantisers' claims the pages of the codecs speak
@pytest.mark.parametrize(
    "paper, section",
    [
        ("2604.15356", "Sequential compression"),
        ("2608.14191", "Transform coding"),
        ("2607.01520", "The risk of compression"),
    ],
)
def test_claims_about_a_paper_are_met_in_its_sentences_or_on_its_page(paper, section):
    page = {"2604.15356": "sequential.md", "2608.14191": "transform-coding.md", "2607.01520": "risk.md"}[paper]
    told = {claim_id for row in rows(section) for claim_id, _ in verdicts(row[2])}
    text = (book.DOCS / page).read_text(encoding="utf-8") + (book.DOCS / "findings.md").read_text(encoding="utf-8")
    missing = [
        c
        for c, claim in CLAIMS.items()
        if claim.paper == paper and c not in told and f"`{c.split('/')[1]}`" not in text and f"`{c}`" not in text
    ]
    assert missing == []
