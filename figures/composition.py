"""Compositions: error against held bits of what was chosen, its interval at each rate; and joint gains against the product of their parts."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "composition"
CAPTION = (
    "Left: attention error on the judged text against held bits per original number, of every curve that was chosen there, on another text, as the best of "
    "its kind at some rate: chains of stages (lines), single codecs of kvtheory (dashed), single systems of the papers (dotted). Rings: the choice of each kind at "
    "each rate, in grey of each layer the best of all, log2 interpolated between two measured points; bars: bootstrap intervals over segments. Right: at equal held bits, gain of a chain over the baseline (its "
    "error over theirs) against the product of the gains of its parts, reduction and coder; on the line gains multiply. Fitted states are in no rate."
)

LINES = {"composition": "-", "own": "--", "paper": ":"}


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.lines import Line2D

    sources = [results[name] for name in sorted(results)]
    gains = any(source["gains"] for source in sources)
    figure, axes = styles.subplots(style, columns=1 + gains, rows=len(sources), wide=True, ratio=0.85, squeeze=False)
    labels = _labels(sources)
    looks = {label: styles.look(i) for i, label in enumerate(labels)}
    for source, row in zip(sources, axes):
        _curves(row[0], source, looks)
        row[0].set_title(f"{source['model']}: {source['text']}, chosen on {source['chosen_on']}", loc="left")
        if gains:
            _gains(row[1], source, looks)
    kinds = {p["label"]: p["kind"] for source in sources for p in source["points"]}
    handles = [Line2D([], [], label=n, **{**looks[n], "ls": LINES[kinds[n]]}) for n in labels]
    columns = styles.legend_columns([str(h.get_label()) for h in handles])
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + -(-len(handles) // columns) * 0.024 * width)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _labels(sources: list[dict[str, Any]]) -> list[str]:
    """Curves that were chosen somewhere, chains first, then other chains whose gains are shown."""
    chosen = [
        (list(LINES).index(c["kind"]), c["label"])
        for source in sources
        for c in source["choices"]
        if c["kind"] in LINES
    ]
    gained = [g["joint_label"] for source in sources for g in source["gains"]]
    return list(dict.fromkeys([label for _, label in sorted(chosen, key=lambda one: one[0])] + gained))


def _curves(panel: Any, source: dict[str, Any], looks: dict[str, Any]) -> None:
    chosen = {c["label"] for c in source["choices"]}
    for label, look in looks.items():
        own = sorted((p for p in source["points"] if p["label"] == label), key=lambda p: p["held_bits"])
        if label not in chosen or not own:
            continue
        x, y = [p["held_bits"] for p in own], [p["error"] for p in own]
        panel.plot(x, y, **{**look, "ls": LINES[own[0]["kind"]]}, ms=2.5, alpha=0.8)
    for c in source["choices"]:
        estimate, low, high, _ = c["error"]
        panel.errorbar(
            c["held_bits"], estimate, yerr=[[estimate - low], [high - estimate]], fmt="o", ms=6, mfc="none",
            color=looks[c["label"]]["color"] if c["label"] in looks else styles.GUIDE, capsize=2,
        )  # fmt: skip
    rates = sorted({c["held_bits"] for c in source["choices"]})
    panel.set_yscale("log")
    if rates:
        panel.set_xlim(rates[0] - 0.5, rates[-1] + 0.5)
        panel.set_xticks(rates)
        # a curve goes on beyond the rates that are compared
        ends = [e for c in source["choices"] for e in c["error"][1:3]]
        panel.set_ylim(min(ends) / 2, max(ends) * 2)
    panel.set_xlabel("held bits per original number")
    panel.set_ylabel("attention error")


def _gains(panel: Any, source: dict[str, Any], looks: dict[str, Any]) -> None:
    own = source["gains"]
    for g in own:
        estimate, low, high, _ = g["joint"]
        panel.errorbar(
            g["product"][0], estimate, yerr=[[estimate - low], [high - estimate]], capsize=2,
            **{**looks[g["joint_label"]], "ls": "none"},
        )  # fmt: skip
    if own:
        ends = [
            min(min(g["product"][0], g["joint"][1]) for g in own),
            max(max(g["product"][0], g["joint"][2]) for g in own),
        ]
        panel.plot(ends, ends, color=styles.GUIDE, lw=0.8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("product of the parts' gains")
    panel.set_ylabel("joint gain")


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """A row for each choice, then for each gain."""
    header = [
        "model", "text", "chosen_on", "row", "held_bits", "kind", "label", "error_or_joint_gain", "low", "high", "over_papers_best_or_product", "state_bytes",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for name in sorted(results):
        source = results[name]
        about = [source["model"], source["text"], source["chosen_on"]]
        for c in source["choices"]:
            over = c["against"].get("paper")
            rows.append(
                [
                    *about,
                    "choice",
                    c["held_bits"],
                    c["kind"],
                    c["label"],
                    *c["error"][:3],
                    "" if over is None else over[0],
                    c["state_bytes"],
                ]
            )
        for g in source["gains"]:
            rows.append([*about, "gain", g["held_bits"], "", g["joint_label"], *g["joint"][:3], g["product"][0], ""])
    return header, rows
