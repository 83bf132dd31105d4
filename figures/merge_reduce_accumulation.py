"""What the errors of a tree of REDUCEs add up to, against its depth."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "merge-reduce-accumulation"
CAPTION = (
    "Mean squared error of the root of a tree of REDUCEs, in units of that of its lowest level (n/K = 2), against n/K. Left: vectors in general "
    "position, and heads of the real cache in the order of their tokens, where levels are not alike; black, the law of equal levels, 2 − 2K/n, which never exceeds 2. Filled marks: unbiased REDUCEs (of "
    "the walk, levels are not alike: its atoms differ in weight); the biased one keeps the greatest first coordinates. Right: the staircase, on which "
    "a REDUCE that keeps the greater of two atoms errs by the same vector at every level, so that errors add up to log2²(n/K); one fair coin for all REDUCEs, each of "
    "them unbiased by itself, pays the same. The dashed line is the logarithm itself, which unbiased and independent REDUCEs do not pay."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    return next(iter(results.values()))  # type: ignore[no-any-return]


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.75)
    for i, c in enumerate(data["curves"]):
        ratio = [p["ratio"] for p in c["points"]]
        first = c["points"][0]["total"]
        name = c["reducer"] if "normal" in c["where"] else f"{c['where']}, {c['reducer']}"
        look = styles.look(i)
        filled = {} if "biased" not in name else {"mfc": "white"}
        left.plot(
            ratio, [p["total"] / first for p in c["points"]], **look, **filled, ls=styles.LINES[i % 6], label=name
        )
    most = max(p["ratio"] for c in data["curves"] for p in c["points"])
    ratio = [2**j for j in range(1, most.bit_length())]
    left.plot(ratio, [2 - 2 / r for r in ratio], color="black", lw=0.8, label="2 − 2K/n")
    steps = data["staircase"]
    ratio = [s["ratio"] for s in steps]
    right.plot(ratio, [s["greater"] for s in steps], **styles.look(0), mfc="white", label="greater kept")
    right.plot(
        ratio, [s["one coin"] for s in steps], color=styles.COLOURS[5], marker="x", ls=":", label="one coin for all"
    )
    right.plot(ratio, [s["bound"] for s in steps], color="black", lw=0.8, label=r"$\log_2^2(n/K)$")
    right.plot(ratio, [r.bit_length() - 1 for r in ratio], color=styles.GUIDE, ls="--", lw=0.8, label=r"$\log_2(n/K)$")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("n/K")
        styles.plain_ticks(axes.yaxis)
        axes.xaxis.set_major_formatter("{x:g}")
    right.legend()
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=styles.legend_columns(labels))
    left.set_ylabel("relative squared error")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    rows = [
        [c["where"], c["reducer"], c["K"], c["trees"], p["ratio"], p["V"], p["total"]]
        for c in data["curves"]
        for p in c["points"]
    ]
    for name in ("greater", "one coin", "bound"):
        rows += [["staircase", name, 1, 1, s["ratio"], 1, s[name]] for s in data["staircase"]]
    return ["where", "reducer", "K", "trees", "ratio", "V", "total"], rows
