"""The ledger as one self-contained HTML page: no network, pictures inline, formulas as MathML, one small script for filters.

Without the script everything is there and can be opened; the page forbids itself every request (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import re
import shlex
from pathlib import Path
from typing import Any

from kvtheory import files
from proofs_checks.ledger import order_for_reading
from proofs_checks.papers import OWN
from proofs_checks.report.formulas import rendered
from proofs_checks.terminal import headline, mutants_line, number, pair


def _inline(path: Path) -> str:
    """An SVG as markup with ids of its own, a PNG as a data URL."""
    if path.suffix == ".svg":
        svg = re.sub(r"^.*?(?=<svg)", "", path.read_text(encoding="utf-8"), flags=re.S)
        # ids must stay unique on a page that holds several figures
        prefix = re.sub(r"\W", "-", path.stem)
        svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
        svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{prefix}-\2"', svg)
        return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    return f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


#: comparisons shown before "more", and of those that share their wording
_SHOWN, _ALIKE = 8, 2


def grouped(evidence: list[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]], int]:
    """(groups shown at once, groups behind "more", how many comparisons those hold).

    Comparisons that differ only in what they ran on stand in one group, their wording said once. What does not agree is always
    shown, and first; of what agrees, a few of each group.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for e in sorted(evidence, key=lambda e: e["role"] == "statement" and e["agrees"] is True):
        groups.setdefault(
            tuple(str(e.get(k)) for k in ("what", "role", "kind", "because", "relation", "margin", "note")), []
        ).append(e)
    ordered = sorted(groups.values(), key=lambda g: all(e["agrees"] is True or e["role"] == "assumption" for e in g))
    first, rest, shown = [], [], 0
    for group in ordered:
        decided = [e for e in group if e["agrees"] is not True]
        agreeing = [e for e in group if e["agrees"] is True]
        room = max(0, min(_ALIKE, _SHOWN - shown))
        now, later = decided + agreeing[:room], agreeing[room:]
        shown += len(now)
        first += [now] if now else []
        rest += [later] if later else []
    return first, rest, sum(map(len, rest))


def relation(e: dict[str, Any]) -> str:
    """The relation that was found: "not <=" where the comparison disagrees."""
    return f"not {e['relation']}" if e["agrees"] is False else str(e["relation"])


def command(ledger: dict[str, Any], record: dict[str, Any]) -> str:
    """The command that checks one claim again as this run did."""
    run = ledger["run"]
    words = [
        "--claim",
        record["id"],
        "--budget",
        run["budget"],
        "--seed",
        str(run["seed"]),
        "--cache",
        ledger["cache_name"],
    ]
    return shlex.join(["kvtheory", "verify", *words])


def overview(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The claims of one paper by what the first screen says of them: "fails", "holds" and "open" (not run, not settled)."""
    groups: dict[str, list[dict[str, Any]]] = {"fails": [], "holds": [], "open": []}
    for r in records:
        kind = {"fails as stated": "fails", "holds": "holds", "holds under assumptions": "holds"}.get(
            r["verdict"], "open"
        )
        groups[kind].append(r)
    return groups


def render(ledger: dict[str, Any], figures: dict[str, tuple[Path, str]]) -> str:
    """HTML of the ledger. figures: name -> (file, caption), those that were drawn."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("proofs_checks", "report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(
        number=number,
        pair=pair,
        grouped=grouped,
        relation=relation,
        headline=headline,
        mutants=mutants_line,
        rendered=rendered,
        overview=overview,
        command=lambda record: command(ledger, record),
    )
    pictures = {name: (_inline(path), caption) for name, (path, caption) in figures.items()}
    records = order_for_reading(ledger["claims"])
    of_claims = {r["figure"] for r in records}
    keys = sorted(dict.fromkeys(r["paper"] for r in ledger["claims"]), key=lambda key: key == OWN)
    by_paper = {key: [r for r in ledger["claims"] if r["paper"] == key] for key in keys}
    return environment.get_template("ledger.html").render(
        ledger=ledger, records=records, own=OWN, by_paper=by_paper, pictures=pictures,
        # the figure of the ledger itself says what this page says
        others=[name for name in pictures if name not in of_claims and name != "ledger"],
    )  # fmt: skip


def write(path: Path, ledger: dict[str, Any], figures: dict[str, tuple[Path, str]]) -> None:
    """Render to `path`, whole or not at all."""
    with files.replacing(path) as scratch:
        scratch.write_text(render(ledger, figures), encoding="utf-8")
