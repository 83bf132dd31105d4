"""Linearised risk of a summary of K tokens: sampling, the plain cube walk and the spectral walk, against their laws and bounds."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "risk-against-budget"
CAPTION = (
    "Squared error of the summary's barycentre, relative to iid sampling (tr Sigma / K = 1), for each synthetic kind and head "
    "measured: sampling without replacement, the plain cube walk and the spectral walk (means over seeds; ticks: the single runs of "
    "the spectral walk). Black bars: the proved bound 2 tail_m / (K - 2m); grey bars: the rate tail_{K/3} / K of the paper without a "
    "constant."
)


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for data in results.values() for c in data["curves"]]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(results: dict[str, Any], style: str) -> Any:
    curves = _curves(results)
    figure, axes = styles.subplots(style, wide=True, ratio=0.035 * len(curves) + 0.1)
    rows = (
        ("srs_linear", "without replacement", 0),
        ("cube_linear", "plain cube walk", 1),
        ("spectral_linear", "spectral walk", 2),
    )
    for y, c in enumerate(curves):
        unit = c["iid"]
        for field, label, i in rows:
            axes.plot(
                _mean(c[field]) / unit, y, styles.MARKERS[i], color=styles.COLOURS[i], ms=5, label=label if y == 0 else None
            )  # fmt: skip
        axes.plot(
            [v / unit for v in c["spectral_linear"]],
            [y] * len(c["spectral_linear"]),
            "|",
            color=styles.COLOURS[2],
            ms=5,
        )
        axes.plot(
            c["spectral_bound"] / unit, y, "|", color="black", ms=11, mew=1.6, label="proved bound" if y == 0 else None
        )
        axes.plot(
            c["paper_rate"] / unit, y, "|", color="#999999", ms=11, mew=1.6, label="tail_{K/3} / K" if y == 0 else None
        )
    axes.axvline(1.0, color="#5b6678", ls="--", lw=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(curves)), [f"{c['head']}  (n {c['n']}, K {c['K']}, m {c['m']})" for c in curves])
    axes.invert_yaxis()
    axes.set_xlabel("squared barycentre error / (tr Sigma / K)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.08), ncols=5)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = [
        "head",
        "n",
        "K",
        "m",
        "iid",
        "without_replacement",
        "spectral_bound",
        "paper_rate",
        "srs",
        "cube",
        "spectral",
    ]
    return header, [
        [*(c[h] for h in header[:8]), _mean(c["srs_linear"]), _mean(c["cube_linear"]), _mean(c["spectral_linear"])]
        for c in _curves(results)
    ]
