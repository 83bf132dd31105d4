"""What a run found, on the terminal and as a row of a Markdown table."""

from __future__ import annotations

import textwrap
from typing import Any

from proofs_checks.conform.run import Finding, Report

MARKS = {"holds": "holds", "fails": "FAILS", "not settled": "open ", "skipped": "  -  "}


def line(finding: Finding) -> str:
    """One finding; for a failure also the least input that shows it."""
    text = f"{MARKS[finding.verdict]}  {finding.name:<14} {finding.seen}"
    if finding.verdict == "fails":
        text += f"\n       {'':<14} must hold: {finding.statement}"
        if finding.instance is not None:
            text += f"\n       {'':<14} least input: {finding.instance}"
    return text


def summary(report: Report) -> str:
    """The last line."""
    counts = ", ".join(
        f"{report.count(v)} {v}" for v in ("holds", "fails", "not settled", "skipped") if report.count(v)
    )
    failed = [f.name for f in report.findings if f.verdict == "fails"]
    return f"{report.codec['spec']}: {counts}" + (f" ({', '.join(failed)})" if failed else "")


def rows(records: list[dict[str, Any]]) -> str:
    """Markdown: package, property, what was seen, least input, of every failure in several JSON reports."""
    out = ["| package | codec | property | what was seen | least failing input |", "|--|--|--|--|--|"]
    for record in records:
        codec = record["codec"]
        name = codec["spec"].rpartition("/")[2].partition(".py")[0] if "/" in codec["spec"] else codec["spec"]
        for found in record["properties"]:
            if found["verdict"] == "fails":
                text = (found["input"] or {}).get("text", "")
                cells = (
                    codec.get("requirement") or codec["spec"],
                    name,
                    found["property"],
                    _cell(found["seen"]),
                    _cell(text),
                )
                out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _cell(text: str) -> str:
    return textwrap.shorten(text.replace("|", "\\|"), 220, placeholder=" ...")
