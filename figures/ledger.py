"""The whole ledger at a glance: one row per claim under its paper, its verdict, the mutants refuted and the figure that decides."""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import Any

from figures import style as styles

NAME = "ledger"
CAPTION = (
    "The ledger: every claim under its paper, with its verdict (colour and word), how many deliberately wrong variants of the statement "
    "the same check refuted, and one deciding comparison in short: the first that speaks against the statement, else the tightest bound, "
    "else the last. '!' marks a verdict other than the expected one. The comparisons in full are in ledger.json."
)
_NEGATED = {"=": "≠", "≈": "≠", "<=": "≰", ">=": "≱", "<": "≮", ">": "≯", "!=": "="}
_PLAIN = {"<=": "≤", ">=": "≥", "!=": "≠"}
#: where the columns start (_END: where the verdict ends), in hundredths of the width
_VERDICT, _END, _WHAT, _FIGURES = 27.5, 43.0, 50.5, 88.0


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results["ledger"]["claims"]
    return rows


def _deciding(record: dict[str, Any]) -> dict[str, Any] | None:
    statements = [e for e in record["evidence"] if e["role"] == "statement"]
    against = [e for e in statements if e["agrees"] is not True]
    bounds = [e for e in statements if isinstance(e.get("tightness"), float)]
    if against:
        return against[0]
    if bounds:
        return max(bounds, key=lambda e: float(e["tightness"]))
    return next((e for e in reversed(statements) if e["kind"] != "search"), statements[-1] if statements else None)


def _number(value: Any, digits: int) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_number(v, digits) for v in value) + "]"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _compared(evidence: dict[str, Any]) -> str:
    relation = evidence["relation"]
    if relation == "=" and evidence["kind"] != "exact":
        relation = "≈"
    sign = _NEGATED.get(relation, f"not {relation}") if evidence["agrees"] is False else _PLAIN.get(relation, relation)
    observed, predicted = evidence["observed"], evidence["predicted"]
    for digits in range(3, 13):
        shown = _number(observed, digits), _number(predicted, digits)
        # as many digits as it takes to tell apart what differs
        if shown[0] != shown[1] or observed == predicted or evidence["agrees"] is True:
            break
    return f"{shown[0]} {sign} {shown[1]}"


@functools.cache
def _advance(letter: str) -> float:
    """How far the pen moves for one letter, in units of the font size."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    font.set_size(100, 72)
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536 / 100


def _fitted(text: str, points: float, size: float) -> str:
    """`text` at that font size in that width, cut with an ellipsis where it is longer."""
    for ascii_, sign in (("||", "‖"), ("^2", "²")):
        text = text.replace(ascii_, sign)
    text = " ".join(text.split())
    ends = list(itertools.accumulate(_advance(letter) * size for letter in text))
    if ends and ends[-1] > points:
        room = points - _advance("…") * size
        text = text[: bisect.bisect_right(ends, room)].rstrip() + "…"
    return text.replace("$", r"\$")  # no mathtext


def draw(results: dict[str, Any], style: str) -> Any:
    import matplotlib
    from matplotlib.patches import Rectangle

    records = _rows(results)
    papers = results["ledger"].get("papers", {})
    grouped: dict[str, list[dict[str, Any]]] = {}
    # statements of our own come last
    for record in sorted(records, key=lambda r: r["paper"] == "kvtheory"):
        grouped.setdefault(record["paper"], []).append(record)
    lines = len(records) + 1.25 * len(grouped) + 1.2
    figure, axes = styles.subplots(style, wide=True, ratio=0.0222 * lines + 0.01)
    width = 72 * figure.get_figwidth()
    size = 0.8 * matplotlib.rcParams["font.size"]
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(lines, 0)
    for x, text, ha in (
        (0, "claim", "left"),
        (_VERDICT, "verdict", "left"),
        (_WHAT - 1.3, "refuted", "right"),
        (_WHAT, "deciding comparison", "left"),
    ):
        axes.text(x, 0.6, text, weight="bold", va="center", ha=ha, size=size)
    y = 1.2
    for paper, own in grouped.items():
        axes.plot([0, 100], [y, y], color="#1c2330", lw=0.7)
        title = papers.get(paper, {}).get("title", "")
        head = f"{title} (arXiv {paper})" if title and paper[:1].isdigit() else title or paper
        axes.text(
            0, y + 0.68, _fitted(head, 0.98 * width, size), va="center", size=size, style="italic", color=styles.GUIDE
        )
        y += 1.75
        for record in own:
            colour = styles.VERDICTS[record["verdict"]]
            # every letter of this font is 0.602 of its size wide, a tenth more where pixels round it; a long id is set smaller, and never cut
            room = (_VERDICT - 1.6) / 100 * width / (0.662 * len(record["id"]))
            axes.text(0, y, record["id"], va="center", family="DejaVu Sans Mono", size=min(0.85 * size, room))
            axes.add_patch(Rectangle((_VERDICT - 0.4, y - 0.4), _END - _VERDICT + 0.4, 0.8, color=colour, lw=0))
            verdict = record["verdict"] + ("" if record["as_expected"] else " !")
            axes.text(_VERDICT, y, verdict, va="center", color="white", size=0.9 * size)
            refuted = sum(m["refuted"] is True for m in record["mutants"])
            axes.text(_WHAT - 1.3, y, f"{refuted}/{len(record['mutants'])}", va="center", ha="right", size=0.9 * size)
            evidence = _deciding(record)
            if evidence:
                for start, end, text in (
                    (_WHAT, _FIGURES - 1, evidence["what"]),
                    (_FIGURES, 100, _compared(evidence)),
                ):
                    shown = _fitted(text, (end - start) / 100 * width * 0.97, 0.8 * size)
                    axes.text(start, y, shown, va="center", size=0.8 * size, color="#1c2330")
            y += 1
        y -= 0.5
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = [
        "claim", "paper", "verdict", "expected", "evidence", "mutants refuted", "mutants", "deciding comparison", "observed", "relation",
        "predicted", "agrees",
    ]  # fmt: skip
    rows = []
    for r in _rows(results):
        e = _deciding(r)
        rows.append([
            r["id"], r["paper"], r["verdict"], r["expected"], len(r["evidence"]),
            sum(m["refuted"] is True for m in r["mutants"]), len(r["mutants"]),
            *((e["what"], e["observed"], e["relation"], e["predicted"], e["agrees"]) if e else ("", "", "", "", "")),
        ])  # fmt: skip
    return header, rows
