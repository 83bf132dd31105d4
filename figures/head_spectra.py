"""Which heads are compressible: the spectrum of each head's response covariance."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "head-spectra"
CAPTION = (
    "Share of the trace of the response covariance Σ that is left after the m leading directions, for each synthetic kind (left) and "
    "each head of the real cache (right), against m over the number of tokens. A curve that drops at once belongs to a head of which "
    "few balanced tokens keep the answer; a straight line to one that no summary of the cache's own tokens serves."
)


def _heads(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [h for data in results.values() for h in data["heads"]]


def _tail(shares: list[float]) -> list[float]:
    left, tails = 1.0, [1.0]
    for share in shares:
        left -= share
        tails.append(max(left, 1e-6))
    return tails


def draw(results: dict[str, Any], style: str) -> Any:
    import matplotlib

    width = matplotlib.rcParams["lines.linewidth"]
    heads = _heads(results)
    figure, panels = styles.subplots(style, wide=True, columns=2, ratio=0.98, sharey=True)
    for axes, real in zip(panels, (False, True)):
        chosen = [h for h in heads if ("layer" in h["head"]) is real]
        groups = list(dict.fromkeys(h["head"].split(" head")[0] for h in chosen))
        for h in chosen:
            group = groups.index(h["head"].split(" head")[0])
            first = h is next(g for g in chosen if g["head"].split(" head")[0] == groups[group])
            tails = _tail(h["eigenvalue_share"])
            axes.plot(
                [m / h["n"] for m in range(len(tails))], tails, **styles.look(group), ls=styles.LINES[group % 6], lw=0.75 * width,
                # a few markers, shifted from group to group, so that the kinds stay apart in grey
                markevery=(0.03 + 0.015 * (group % 8), 0.15), label=groups[group] if first else None,
            )  # fmt: skip
        axes.set(
            xlabel="$m / n$", title="real cache" if real else "synthetic", xlim=(0, 1), ylim=(1e-4, 1.1), yscale="log"
        )
        if chosen:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, columnspacing=1.2)
        else:
            axes.text(0.5, 0.5, "no real cache in this run", transform=axes.transAxes, ha="center")
    panels[0].set_ylabel(r"$\mathrm{tail}_m\,/\,\mathrm{tr}\,\Sigma$")
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [h["head"], h["n"], h["trace"], i + 1, share]
        for h in _heads(results)
        for i, share in enumerate(h["eigenvalue_share"])
    ]
    return ["head", "n", "trace", "direction", "share of the trace"], rows
