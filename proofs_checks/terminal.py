"""The ledger in the terminal: a line per claim as it finishes, then what was not run, what differs, and the count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape

from proofs_checks.ledger import order_for_reading
from proofs_checks.papers import OWN

_STYLE = {
    "holds": "green",
    "holds under assumptions": "cyan",
    "fails as stated": "magenta",
    "not settled": "yellow",
    "not run": "yellow",
}


def number(value: Any, digits: int = 4) -> str:
    """A figure as a reader wants it: a few significant digits, fractions and words as they are."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return f"[{number(value[0], digits)}, {number(value[1], digits)}]"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.{max(digits - 4, 0)}f}" if 1e4 <= abs(value) < 1e15 else f"{value:.{digits}g}"
    return str(value)


def pair(evidence: dict[str, Any]) -> tuple[str, str]:
    """Observed and predicted with as many digits as it takes to tell them apart, where they differ."""
    observed, predicted = evidence["observed"], evidence["predicted"]
    for digits in range(4, 13):
        shown = number(observed, digits), number(predicted, digits)
        if shown[0] != shown[1] or observed == predicted or evidence["agrees"] is True:
            break
    return shown


def headline(record: dict[str, Any]) -> str:
    """The one piece of evidence to show: what decided against the statement, else the tightest bound, else the last comparison."""
    statements = [e for e in record["evidence"] if e["role"] == "statement"]
    if not statements:
        return (
            record["not_run"][0]["missing"]
            if record["not_run"]
            else (record.get("error") or "no evidence").strip().splitlines()[-1]
        )
    against = [e for e in statements if e["agrees"] is not True]
    bounds = [e for e in statements if isinstance(e.get("tightness"), float)]
    if against:
        shown = against[0]
    elif bounds:
        shown = max(bounds, key=lambda e: e["tightness"])
    else:
        shown = next((e for e in reversed(statements) if e["kind"] != "search"), statements[-1])
    relation = shown["relation"] if shown["agrees"] is not False else f"not {shown['relation']}"
    observed, predicted = pair(shown)
    return f"{shown['what']}: {observed} {relation} {predicted}"


def mutants_line(record: dict[str, Any]) -> str:
    refuted = [m["refuted"] for m in record["mutants"]]
    return f"{refuted.count(True)}/{len(refuted)}" if None not in refuted else f"-/{len(refuted)}"


def line(record: dict[str, Any]) -> str:
    """One finished claim as a rich markup line."""
    mark = (
        "[green]✓[/]"
        if record["as_expected"] and record["verdict"] != "not run"
        else ("[yellow]–[/]" if record["as_expected"] else "[bold red]✗[/]")
    )
    verdict = f"[{_STYLE[record['verdict']]}]{record['verdict']:<24}[/]"
    start = f"{mark} {record['id']:<46} "
    tail = f" mutants refuted {mutants_line(record):>6} {record['seconds']:>6.1f} s"
    return f"{start}{verdict}{tail}"


def summary(console: Console, ledger: dict[str, Any]) -> None:
    """Each claim with the figure that decides it (not run first, then what differs), then what is wrong, then the count."""
    paper = None
    for r in order_for_reading(ledger["claims"]):
        if r["paper"] != paper:
            paper = r["paper"]
            source = "" if paper == OWN else f" [dim](arXiv {paper})[/]"
            console.print(f"\n[bold]{ledger['papers'][paper]['title']}[/]{source}")
        expected = "" if r["as_expected"] else f" [bold red](expected: {r['expected']})[/]"
        console.print(f"  [{_STYLE[r['verdict']]}]{r['verdict']:<24}[/] {escape(r['id'])}{expected}")
        console.print(f"  {'':<24} [dim]{escape(headline(r))}[/]")
        if r.get("correction"):
            console.print(f"  {'':<24} [dim]stated rightly in {r['correction']}[/]")
    console.print()
    for text in problems(ledger["claims"]):
        console.print(text)
    console.print(count_line(ledger))


def problems(records: Iterable[dict[str, Any]]) -> list[str]:
    """One markup line per thing that is not as it should be, not-run claims first."""
    lines = []
    for r in records:
        for n in r["not_run"]:
            lines.append(f"[yellow]not run[/] {r['id']}: {escape(n['missing'])}. To get it: {escape(n['how'])}")
        if r.get("error"):
            lines.append(f"[bold red]error[/] {r['id']}: {escape(r['error'].strip().splitlines()[-1])}")
        elif not r["as_expected"] and r["verdict"] != r["expected"]:
            lines.append(f"[bold red]differs[/] {r['id']}: expected `{r['expected']}`, found `{r['verdict']}`")
        for m in r["mutants"]:
            if m["refuted"] is False:
                lines.append(f"[bold red]survives[/] {r['id']}: mutant {escape(m['name'])} ({escape(str(m['by']))})")
    return lines


def count_line(ledger: dict[str, Any]) -> str:
    records = ledger["claims"]
    counts = {v: sum(r["verdict"] == v for r in records) for v in _STYLE}
    mutants = [m["refuted"] for r in records for m in r["mutants"]]
    parts = [f"{n} {v}" for v, n in counts.items() if n]
    wrong = sum(not r["as_expected"] for r in records)
    own = sum(r["paper"] == OWN for r in records)
    return (
        f"{len(records)} claims{f' ({own} of our own)' if own else ''}: {', '.join(parts)}; {mutants.count(True)} of {len(mutants)} mutants refuted; "
        + ("all as expected" if not wrong else f"[bold red]{wrong} not as expected[/]")
    )
