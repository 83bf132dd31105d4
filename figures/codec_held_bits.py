"""What the codecs' names say and what their streams hold, and where those bits went."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "codec-held-bits"
CAPTION = (
    "Bits a number that each codec's stream holds at its defaults, by what they are for: 8 times the length of the stream over "
    "the numbers of "
    "keys and values. Dashed lines: the bits that its name or its paper says (QJL: the mean of 1 for keys and 2 for values). "
    "Above a short cache of "
    "float16 numbers, below 8,192 tokens: KIVI's window of 128 newest tokens is most of what it holds for the short one. "
    "KVQuant's fitted tables are "
    "apart from its streams; the table beside this figure has their bits, and those of the full cache, 16."
)
_COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#999999")
#: so that the parts stay apart in grey
_HATCHES = ("", "", "////", "....", "xxxx")


def _panels(results: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    data = results["quantizers/held-bits"]
    return data["panels"], data["kinds"]


def draw(results: dict[str, Any], style: str) -> Any:
    panels, kinds = _panels(results)
    figure, axes = styles.subplots(style, rows=len(panels), wide=True, ratio=0.3, sharex=True)
    for panel, ax in zip(panels, axes):
        rows = [row for row in panel["codecs"] if row["codec"] != "Full"][::-1]
        left = [0.0] * len(rows)
        for kind, colour, hatch in zip(kinds, _COLOURS, _HATCHES):
            widths = [row["parts"][kind] for row in rows]
            ax.barh(
                range(len(rows)),
                widths,
                left=left,
                color=colour,
                label=kind,
                height=0.66,
                edgecolor="white",
                lw=0.6,
                hatch=hatch,
            )
            left = [a + b for a, b in zip(left, widths)]
        for i, row in enumerate(rows):
            ax.plot([row["claimed"]] * 2, [i - 0.33, i + 0.33], color="white", lw=2.4)
            ax.plot([row["claimed"]] * 2, [i - 0.33, i + 0.33], color="black", lw=1, ls=(0, (2, 1.5)))
            ax.annotate(f"{row['held']:.2f}", (left[i], i), xytext=(4, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(rows)), [row["codec"] for row in rows])
        ax.set_title(panel["data"], loc="left")
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, 6)
    axes[-1].set_xlabel("bits a number")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    panels, kinds = _panels(results)
    header = ["data", "codec", "claimed", "held", *kinds, "state"]
    return header, [
        [panel["data"], row["codec"], row["claimed"], row["held"], *(row["parts"][k] for k in kinds), row["state"]]
        for panel in panels
        for row in panel["codecs"]
    ]
