"""The whole ledger at a glance: one row per claim, its verdict, and how many wrong variants the same check refuted."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "ledger"
CAPTION = (
    "The ledger: every claim with its verdict (colour and word), the kinds of evidence behind it, and how many deliberately wrong "
    "variants of the statement the same check refuted (a full bar: all of them)."
)
_KINDS = ("exact", "certified", "numerical", "statistical", "search")


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results["ledger"]["claims"]
    return rows


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.patches import Rectangle

    records = _rows(results)
    figure, axes = styles.subplots(style, wide=True, ratio=0.028 * len(records) + 0.08)
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(len(records) + 0.2, -1.3)
    for x, text in ((0, "claim"), (37, "verdict"), (56.5, "evidence"), (83, "variants refuted")):
        axes.text(x, -0.75, text, weight="bold", va="center")
    paper = None
    for y, record in enumerate(records):
        if record["paper"] != paper:
            paper = record["paper"]
            axes.axhline(y - 0.5, color="#1c2330", lw=0.8)
        colour = styles.VERDICTS[record["verdict"]]
        axes.text(0, y, record["id"], va="center", family="DejaVu Sans Mono", size="small")
        axes.add_patch(Rectangle((36.5, y - 0.36), 19, 0.72, color=colour))
        axes.text(
            37.2,
            y,
            record["verdict"] + ("" if record["as_expected"] else "  (!)"),
            va="center",
            color="white",
            size="small",
        )
        present = {e["kind"] for e in record["evidence"]}
        axes.text(56.5, y, ", ".join(k for k in _KINDS if k in present), va="center", size="small", color="#1c2330")
        refuted = sum(m["refuted"] is True for m in record["mutants"])
        total = len(record["mutants"])
        axes.add_patch(Rectangle((83, y - 0.25), 9, 0.5, facecolor="#e3e6ea"))
        axes.add_patch(Rectangle((83, y - 0.25), 9 * refuted / total, 0.5, facecolor="#5b6678"))
        axes.text(93, y, f"{refuted} of {total}", va="center", size="small")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["claim", "paper", "verdict", "expected", "evidence", "mutants refuted", "mutants"]
    return header, [
        [
            r["id"], r["paper"], r["verdict"], r["expected"], len(r["evidence"]),
            sum(m["refuted"] is True for m in r["mutants"]), len(r["mutants"]),
        ]
        for r in _rows(results)
    ]  # fmt: skip
