"""The most attended tokens against balanced samples of the same size, head by head."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "selection-against-balance"
CAPTION = (
    "Squared attention error of a quarter of the tokens, over the output's energy, by queries held out, against the attention that the most attended quarter leaves out; a mark "
    "for each synthetic kind and each head of the real cache, of four ways to choose. Selection without weights falls with the square of the attention dropped (dashed: slope 2), as softmax "
    "renormalises what is left, and so wins where little is dropped; where attention is spread it is no better than balance. Refit weights on the same tokens win against it "
    "nearly everywhere."
)
_WAYS = ("random", "spectral walk", "top mass", "top mass, refit")


def _heads(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [h for data in results.values() for h in data["heads"]]


def draw(results: dict[str, Any], style: str) -> Any:
    heads = _heads(results)
    figure, axes = styles.subplots(style, wide=True, ratio=0.52)
    for i, way in enumerate(_WAYS):
        for real in (False, True):
            own = [h for h in heads if ("layer" in h["head"]) is real]
            look = styles.look(i)
            axes.plot(
                [max(h["attention dropped"], 1e-8) for h in own], [max(h[way], 1e-14) for h in own], look["marker"], color=look["color"],
                mfc=look["color"] if real else "white", label=way if real or not any("layer" in h["head"] for h in heads) else None,
            )  # fmt: skip
    dropped = [max(h["attention dropped"], 1e-8) for h in heads]
    low, high = min(dropped), max(dropped)
    axes.plot([low, high], [3 * low**2, 3 * high**2], color=styles.GUIDE, ls="--", lw=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("attention that the most attended quarter leaves out, 1 − E a(S) (filled: real heads)")
    axes.set_ylabel("squared error / output energy")
    axes.legend()
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    fields = (
        "head",
        "n",
        "K",
        *_WAYS,
        "attention dropped",
        "mass ratio squared",
        "trace share of the top K/2",
        "surely kept by norm",
    )
    return list(fields), [[h[f] for f in fields] for h in _heads(results)]
