"""The per-step entropy bound's smallest counterexample as a graph, and random models beside it."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "per-step-counterexample"
CAPTION = (
    "Left: the smallest counterexample to H(KVₜ | KV before it) ≤ H(tokenₜ | tokens before it). Tokens a and b write the same KV, so the "
    "cache forgets which of the two came first: the second token is certain given the first (0 bits), its KV given the first KV is not "
    "(1 bit). The totals agree, 1 bit each. Right: per-step entropies of random small transformers whose KV is quantised to three "
    "levels; points above the diagonal violate the per-step bound. No total ever does. Crosses: second steps of fixed models of two "
    "tokens only, with an open-loop store, rotary keys, a BOS or an attention sink; all lie on one point, the one "
    "of the counterexample, and are drawn side by side around it. Without its feature none of the four violates the bound."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["sequential/per-step-entropy"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.86, width_ratios=[1.1, 1])
    _strings(left, data)
    random = data["random_models"]
    x, y = random["tokens_bits"], random["kv_bits"]
    above = [b > a + 1e-9 for a, b in zip(x, y)]
    top = 1.05 * max([*x, *y, 1e-9])
    right.plot([0, top], [0, top], color="#5b6678", lw=0.8)
    for colour, marker, wanted, label in (
        (styles.COLOURS[4], "o", False, "within the bound"),
        (styles.COLOURS[5], "D", True, "violates it"),
    ):
        points = [(a, b) for a, b, up in zip(x, y, above) if up is wanted]
        if points:
            right.plot(
                *zip(*points), marker, color=colour, mec="white", mew=0.4, label=f"{label} ({len(points)} steps)"
            )
    at: dict[tuple[float, float], list[str]] = {}
    for name, model in data["two_token_models"].items():
        at.setdefault((model["tokens_bits"][1], model["kv_bits"][1]), []).append(name)
    gap = 0.045 * top
    for (x2, y2), names in at.items():
        # side by side around the point that they share, which one marker would hide
        places = [x2 + gap * (i - (len(names) - 1) / 2) for i in range(len(names))]
        right.plot(
            places, [y2] * len(names), "x", color="#1c2330", mew=1.4, clip_on=False, zorder=4,
            label=f"$|V| = 2$, step 2: {len(names)} models at ({x2:g}, {y2:g})",
        )  # fmt: skip
    low = -2.2 * gap
    right.set(
        xlabel=r"$H(\mathrm{token}_t \mid \mathrm{tokens}_{<t})$, bits", ylabel=r"$H(\mathrm{KV}_t \mid \mathrm{KV}_{<t})$, bits",
        xlim=(low, top), ylim=(low, top),
    )  # fmt: skip
    right.legend(loc="upper left")
    return figure


def _strings(axes: Any, data: dict[str, Any]) -> None:
    """The two strings, what they write, and the entropies of both, step by step and in all."""
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(10, 0)
    columns = (4.3, 6.5, 8.9)
    for x, text in zip(columns, ("step 1", "step 2", "probability")):
        axes.text(x, 0.3, text, ha="center", va="center", weight="bold")
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": styles.COLOURS[0]}
    kv_box = {"boxstyle": "square,pad=0.35", "facecolor": "#f5f7fa", "edgecolor": styles.COLOURS[5]}
    arrow = {"arrowstyle": "->", "color": styles.GUIDE, "shrinkA": 0, "shrinkB": 0}
    kv_ids: dict[str, str] = {}
    for string in data["strings"]:
        for kv in string["kv"]:
            kv_ids.setdefault(kv, f"KV {len(kv_ids)}")
    for row, string in enumerate(data["strings"]):
        y = 1.6 + 3.0 * row
        axes.text(0, y, "tokens", va="center")
        axes.text(0, y + 1.5, "written", va="center")
        for x, token, kv in zip(columns, string["tokens"], string["kv"]):
            axes.text(x, y, token, bbox=box, ha="center", va="center", family="DejaVu Sans Mono")
            axes.text(x, y + 1.5, kv_ids[kv], bbox=kv_box, ha="center", va="center", size="small")
            axes.annotate("", (x, y + 1.0), (x, y + 0.45), arrowprops=arrow)
        axes.annotate("", (columns[1] - 0.5, y), (columns[0] + 0.5, y), arrowprops=arrow)
        axes.text(columns[2], y, string["probability"], ha="center", va="center")
    y = 7.6
    axes.plot([0, 10], [y - 0.65, y - 0.65], color="#1c2330", lw=0.7)
    for x, text in zip(columns, ("step 1", "step 2", "all")):
        axes.text(x, y - 0.1, text, ha="center", va="center", weight="bold")
    for offset, symbol, bits, name, total in (
        (
            0.75,
            r"$H(\mathrm{token}_t\mid\mathrm{tokens}_{<t})$",
            data["tokens_bits"],
            "H(all tokens)",
            data["total_tokens"],
        ),
        (1.5, r"$H(\mathrm{KV}_t\mid\mathrm{KV}_{<t})$", data["kv_bits"], "H(all KV)", data["total_kv"]),
    ):
        axes.text(0, y + offset, symbol, va="center", size="small")
        for x, value in zip(columns, bits):
            axes.text(x, y + offset, f"{value:g} bit", ha="center", va="center", size="small")
        axes.text(columns[2], y + offset, f"{name} = {total:g}", ha="center", va="center", size="small")


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    rows = [["counterexample", t + 1, a, b] for t, (a, b) in enumerate(zip(data["tokens_bits"], data["kv_bits"]))]
    random = data["random_models"]
    rows += [["random models", "", a, b] for a, b in zip(random["tokens_bits"], random["kv_bits"])]
    for name, model in data["two_token_models"].items():
        rows += [
            [f"|V|=2, {name}: {model['model']}", t + 1, a, b]
            for t, (a, b) in enumerate(zip(model["tokens_bits"], model["kv_bits"]))
        ]
    return ["source", "step", "H(token|tokens) bits", "H(KV|KV) bits"], rows
