"""Which numbers of a cache come back as other bits when it is computed another way, layer by layer; and what noting them costs."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "recompute-differences"
CAPTION = (
    "Keys and values computed anew from the same tokens, against one pass over the whole text on one thread. Left: share of numbers with other bits, by layer of the first model, computed "
    "and stored in float32 (solid) or bfloat16 (dashed); plans that are not drawn gave the same bits everywhere. Right: bits a number that a lossless store spends on the "
    "differences (entropy of their steps in the format, mean over layers), a mark for each plan, filled for the first model and hollow for the second; vertical lines: what the tokens take. Computed in float32 and kept as bfloat16 or float16, few numbers "
    "differ, and even these cost more than the tokens."
)


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results["sequential/recompute-is-bit-exact"]["rows"]
    return rows


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def draw(results: dict[str, Any], style: str) -> Any:
    rows = _rows(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.86)
    models = list(dict.fromkeys(r["model"] for r in rows))
    plans = list(dict.fromkeys(r["plan"] for r in rows if any(r["differing"])))
    for i, plan in enumerate(plans):
        for compute, line in (("float32", "-"), ("bfloat16", "--")):
            for r in rows:
                if (r["model"], r["compute"], r["stored"], r["plan"]) == (models[0], compute, compute, plan):
                    left.plot(
                        range(len(r["differing"])),
                        r["differing"],
                        line,
                        marker=styles.MARKERS[i],
                        markevery=(2 + i, 6),
                        color=styles.COLOURS[i],
                        label=plan if line == "-" else None,
                    )
    left.set(xlabel=f"layer, {models[0].split(',')[0]}", ylabel="share of numbers with other bits", ylim=(-0.02, 1.02))
    formats = list(dict.fromkeys((r["compute"], r["stored"]) for r in rows))
    names = [c if c == s else f"{c},\nkept as {s}" for c, s in formats]
    for j, model in enumerate(models):
        for i, plan in enumerate(plans):
            for y, pair in enumerate(formats):
                for r in rows:
                    bits = _mean(r["entropy_bits"])
                    if (r["model"], r["plan"], (r["compute"], r["stored"])) == (model, plan, pair) and bits > 0:
                        right.plot(
                            bits, y + 0.16 * (j - (len(models) - 1) / 2), styles.MARKERS[i], color=styles.COLOURS[i], mfc=styles.COLOURS[i] if j == 0 else "white"
                        )  # fmt: skip
        tokens = results["sequential/recompute-is-bit-exact"]["tokens_bits"][model]
        right.axvline(tokens, color=styles.GUIDE, ls="-" if j == 0 else "--", lw=1)
    for j, model in enumerate(models):
        right.plot(
            [],
            [],
            "h",
            color=styles.GUIDE,
            mfc=styles.GUIDE if j == 0 else "white",
            ls="-" if j == 0 else "--",
            label=model.split(",")[0].removesuffix("-Instruct"),
        )
    right.set_xscale("log")
    right.set_yticks(range(len(formats)), names)
    right.set_ylim(len(formats) - 0.5, -0.5)
    right.set_xlabel("bits a number")
    figure.legend(*_legend(left, right), loc="outside lower center", ncols=4)
    return figure


def _legend(left: Any, right: Any) -> tuple[list[Any], list[str]]:
    handles, labels = left.get_legend_handles_labels()
    more, names = right.get_legend_handles_labels()
    return handles + more, labels + names


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["model", "computed in", "stored in", "plan", "layer", "share that differs", "bits a number"]
    return header, [
        [r["model"], r["compute"], r["stored"], r["plan"], i, share, bits]
        for r in _rows(results)
        for i, (share, bits) in enumerate(zip(r["differing"], r["entropy_bits"]))
    ]
