"""The per-step entropy bound's smallest counterexample as a graph, and random models beside it."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "per-step-counterexample"
CAPTION = (
    "Left: the smallest counterexample to H(KV_t | KV_<t) <= H(t_t | t_<t). Tokens a and b write the same KV, so the cache forgets "
    "which of the two came first: the second token is certain given the first (0 bits), its KV given the first KV is not (1 bit). "
    "The totals agree (1 bit each). Right: per-step entropies of random small transformers whose KV is quantised to three levels; "
    "points above the diagonal violate the per-step bound. No total ever does. Cross: four fixed models of two tokens only, with an "
    "open-loop store, rotary keys, a BOS or an attention sink; without it none of the four violates the bound."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["sequential/per-step-entropy"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.86, width_ratios=[1.25, 1])
    left.set_axis_off()
    left.set_xlim(-0.35, 3.5)
    left.set_ylim(-1.5, 2.0)
    left.text(-0.3, 1.85, "two strings, tokens above, what the model writes below", ha="left", va="top", size="small")
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": styles.COLOURS[0]}
    kv_box = {"boxstyle": "square,pad=0.35", "facecolor": "#f5f7fa", "edgecolor": styles.COLOURS[5]}
    kv_ids: dict[str, str] = {}
    for string in data["strings"]:
        for kv in string["kv"]:
            kv_ids.setdefault(kv, f"KV {len(kv_ids)}")
    for row, string in enumerate(data["strings"]):
        y = 1.2 - 1.5 * row
        for step, (token, kv) in enumerate(zip(string["tokens"], string["kv"])):
            x = 0.35 + 1.5 * step
            left.text(x, y, token, bbox=box, ha="center", va="center", family="DejaVu Sans Mono")
            left.text(x, y - 0.62, kv_ids[kv], bbox=kv_box, ha="center", va="center", size="small")
            left.annotate("", (x, y - 0.45), (x, y - 0.17), arrowprops={"arrowstyle": "->", "color": "#5b6678"})
            if step:
                left.annotate("", (x - 0.2, y), (x - 1.3, y), arrowprops={"arrowstyle": "->", "color": "#1c2330"})
        left.text(2.3, y, f"probability {string['probability']}", va="center", size="small")
    numbers = f"step 2:  H(token | tokens) = {data['tokens_bits'][1]:g},  H(KV | KV) = {data['kv_bits'][1]:g} bit\n"
    left.text(
        -0.3,
        -1.45,
        numbers + f"total:  {data['total_tokens']:g} and {data['total_kv']:g} bit",
        va="bottom",
        size="small",
    )
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
    fixed = data["two_token_models"]
    step = next(iter(fixed.values()))
    right.plot(
        step["tokens_bits"][1],
        step["kv_bits"][1],
        "x",
        color="#1c2330",
        clip_on=False,
        zorder=4,
        label=f"|V| = 2, {len(fixed)} models (step 2)",
    )
    right.set(xlabel="H(token | earlier tokens), bits", ylabel="H(KV | earlier KV), bits", xlim=(0, top), ylim=(0, top))
    right.legend(loc="upper left")
    return figure


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
