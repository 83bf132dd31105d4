"""The paper's d_T beside the true tree distance D: one grows with what strings share, the other with what they do not."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "trie-distances"
CAPTION = (
    "Left: the paper's d_T of all pairs of binary strings of at most four symbols against the number of symbols that they share; it "
    "grows with the shared prefix, and a string is at distance d_T > 0 from itself (crosses). It measures similarity. Right: the path "
    "length D in the probability tree, in bits, against d_T; D is 0 from a string to itself and is a metric."
)


def _data(results: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = results["trie/metric"]
    return data


def draw(results: dict[str, Any], style: str) -> Any:
    data = _data(results)
    figure, (left, right) = styles.subplots(style, wide=True, columns=2, ratio=0.8)
    for wanted, marker, colour, label in (
        (False, "o", styles.COLOURS[4], "two strings"),
        (True, "x", styles.COLOURS[5], "a string and itself"),
    ):
        rows = [i for i, same in enumerate(data["same"]) if same is wanted]
        d_t = [data["similarity_bits"][i] for i in rows]
        # a fixed sideways spread, so that equal points show as many
        shared = [data["shared_tokens"][i] + (0.12 if wanted else -0.12 + 0.02 * (i % 9)) for i in rows]
        left.plot(shared, d_t, marker, color=colour, label=label, alpha=0.8, mew=1.2 if wanted else 0)
        right.plot(
            d_t,
            [data["tree_distance_bits"][i] for i in rows],
            marker,
            color=colour,
            alpha=0.8,
            mew=1.2 if wanted else 0,
        )
    left.set(xlabel="symbols shared", ylabel=r"$d_T = -\log_2 P(\mathrm{common\ prefix})$, bits")
    left.set_xticks(range(max(data["shared_tokens"]) + 1))
    left.legend(loc="upper left")
    right.set(xlabel="$d_T$, bits", ylabel="tree distance $D$, bits")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    data = _data(results)
    rows = [
        [*pair, shared, d_t, d]
        for pair, shared, d_t, d in zip(
            data["pairs"], data["shared_tokens"], data["similarity_bits"], data["tree_distance_bits"]
        )
    ]
    return ["s", "t", "shared symbols", "d_T bits", "D bits"], rows
