"""How much of what queries see a feature map holds, map by map."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "assumption-5-1"
CAPTION = (
    "Assumption 5.1 in numbers: the share of tr Σ under queries not used for it that lies in the span of a map's features (and the constant), against the number of features over that of "
    "tokens; mean over the heads of a group (columns: groups; rows: the law tested on). Black: the best features for that law. Grey, dashed: random features. Maps of the head's own earlier queries, or of a "
    "Gaussian fitted to them, come near the best; maps of keys and values alone stay near random ones where attention is spread, and the exponential kernel, which finds the sink, holds most only where there is one."
)
_LAWS = ("held out", "isotropic Gaussian")


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for data in results.values() for r in data["held"]]


def draw(results: dict[str, Any], style: str) -> Any:
    rows = _rows(results)
    groups = list(dict.fromkeys(r["group"] for r in rows))
    names = [n for n in dict.fromkeys(r["map"] for r in rows) if n not in ("best for this law", "random")]
    figure, panels = styles.subplots(
        style, wide=True, columns=len(groups), rows=len(_LAWS), ratio=0.95, squeeze=False, sharey=True
    )
    handles: dict[str, Any] = {}
    for i, law in enumerate(_LAWS):
        for j, group in enumerate(groups):
            axes = panels[i, j]
            for name in [*names, "random", "best for this law"]:
                own = sorted(
                    (r for r in rows if r["group"] == group and r["law"] == law and r["map"] == name),
                    key=lambda r: r["f"],
                )
                if not own:
                    continue
                if name == "random":
                    look: dict[str, Any] = {"color": "#8a94a3", "ls": "--"}
                elif name == "best for this law":
                    look = {"color": "black", "lw": 1.6}
                else:
                    k = names.index(name)
                    k += k >= 6  # black is the best map's
                    look = {**styles.look(k), "ls": styles.LINES[k % 6]}
                (handles[name],) = axes.plot(
                    [r["f"] / r["n"] for r in own], [sum(r["held"]) / len(r["held"]) for r in own], **look
                )
            if i == 0:
                axes.set_title(group, loc="left")
            if i == len(_LAWS) - 1:
                axes.set_xlabel("features / tokens")
            if j == 0:
                axes.set_ylabel(f"share held, {law}")
            axes.set_ylim(0, 1.02)
    labels = list(handles)
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=styles.legend_columns(labels))
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    return ["group", "law", "map", "features", "tokens", "mean", "least", "most"], [
        [r["group"], r["law"], r["map"], r["f"], r["n"], sum(r["held"]) / len(r["held"]), min(r["held"]), max(r["held"])] for r in _rows(results)
    ]  # fmt: skip
