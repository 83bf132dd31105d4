"""What the first tokens hold of the trace, and what keeping them is worth."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "sinks"
CAPTION = (
    "Attention sinks. Left: share of tr Σ that the first four tokens hold, against the attention they get, for every synthetic kind and every head of "
    "the real cache; filled marks: the centred profile, hollow: the augmented one, which counts a lost softmax mass and puts nearly all of its trace there. Right: squared attention error over the "
    "output's energy of a quarter of the tokens, chosen without sinks (horizontal) and with four sinks kept exactly in the same budget (vertical), a mark for "
    "each head; below the diagonal keeping them helps. StreamingLLM and random sampling need it where a sink is; the spectral walk, which sees the queries, finds the sinks by itself."
)


def _rows(results: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [row for data in results.values() for row in data.get(part, [])]


def draw(results: dict[str, Any], style: str) -> Any:
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.85)
    shares, reducers = _rows(results, "shares"), _rows(results, "reducers")
    for i, group in enumerate(dict.fromkeys(r["group"] for r in shares)):
        own = [r for r in shares if r["group"] == group]
        colour = styles.COLOURS[i]
        mark = styles.MARKERS[i]
        left.plot([r["attention"] for r in own], [r["centred"] for r in own], mark, color=colour, label=group)
        left.plot([r["attention"] for r in own], [r["augmented"] for r in own], mark, color=colour, mfc="white")
    left.axhline(0.5, color=styles.GUIDE, ls="--", lw=0.8)
    left.set_xlabel("attention on the first 4 tokens")
    left.set_ylabel("their share of tr Σ")
    left.legend()
    values = []
    for i, name in enumerate(("StreamingLLM", "random", "spectral walk")):
        x, y = ([max(r[f"{name}, {s} sinks"], 1e-14) for r in reducers] for s in (0, 4))
        values += x + y
        right.plot(x, y, styles.MARKERS[i], color=styles.COLOURS[i], label=name)
    if values:
        right.plot([min(values), max(values)], [min(values), max(values)], color=styles.GUIDE, ls="--", lw=0.8)
        right.set_xscale("log")
        right.set_yscale("log")
        right.legend()
    right.set_xlabel("relative squared error without sinks")
    right.set_ylabel("with 4 sinks")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows: list[list[Any]] = [
        ["share", r["head"], r["attention"], r["centred"], r["augmented"]] for r in _rows(results, "shares")
    ]
    for r in _rows(results, "reducers"):
        rows += [
            [name, r["head"], r["attention"], r[f"{name}, 0 sinks"], r[f"{name}, 4 sinks"]]
            for name in ("StreamingLLM", "random", "spectral walk")
        ]
    return ["what", "head", "attention", "centred or without", "augmented or with"], rows
