"""Linearised risk of a summary of K tokens: sampling, the plain cube walk and the spectral walk, against their laws and bounds."""

from __future__ import annotations

from typing import Any

from figures import style as styles

NAME = "risk-against-budget"
CAPTION = (
    "Squared error of the summary's barycentre, relative to iid sampling (tr Σ/K = 1, dashed), against the number K of tokens kept; a "
    "panel for each synthetic kind and head measured, n tokens each, from one token to all of them: at K = n (dotted) the cache itself is left and every error is 0. Lines: means over the seeds that the legend counts, of sampling "
    "without replacement, the plain cube walk and the spectral walk; small marks: the single runs of the walks. Thin: the exact law of sampling, (n − K)/(n − 1). Dotted black, where it is not 0: the floor under the linear risk of any K own "
    "tokens, n λ (1/K − 1/n), λ the least eigenvalue but the one of the mean: what cannot be compressed. Black: the proved bound "
    "2·tailₘ/(K − 2m) on the mean of the spectral walk, at its best m; grey: the rate of the paper, tail at K/3 over K, without a "
    "constant. At the smallest K a walk can lie above sampling, and this violates nothing: hardly any direction is protected there (best m 0 "
    "or 1), so the bound itself is near twice iid sampling; and a mean of few walks spreads about as widely as the single marks."
)
_WALKS = (
    ("srs_linear", "without replacement"),
    ("cube_linear", "plain cube walk"),
    ("spectral_linear", "spectral walk"),
)
_COLUMNS = 3


def _curves(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for data in results.values() for c in data["curves"]]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _counts(curves: list[dict[str, Any]], field: str) -> str:
    counts = sorted({len(c[field]) for c in curves})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def draw(results: dict[str, Any], style: str) -> Any:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    curves = _curves(results)
    heads: dict[str, list[dict[str, Any]]] = {}
    for c in curves:
        heads.setdefault(c["head"], []).append(c)
    rows = -(-len(heads) // _COLUMNS)
    figure, panels = styles.subplots(
        style, wide=True, columns=_COLUMNS, rows=rows, ratio=1.05 if rows == 1 else 0.85, squeeze=False
    )
    handles: dict[str, Any] = {}
    for axes, (head, own) in zip(panels.flat, heads.items()):
        own.sort(key=lambda c: c["K"])
        some = [c for c in own if c["K"] < c["n"]]
        K = [c["K"] for c in some]
        for i, (field, label) in enumerate(_WALKS):
            look = styles.look(i)
            (handles[f"{label}, mean of {_counts(curves, field)}"],) = axes.plot(
                K, [_mean(c[field]) / c["iid"] for c in some], **look, ls=styles.LINES[i], zorder=3
            )  # fmt: skip
            if i:
                # beside each other, so that the runs of the two walks stay apart
                axes.plot(
                    [c["K"] * (0.96, 1.04)[i - 1] for c in some for _ in c[field]], [v / c["iid"] for c in some for v in c[field]], "_",
                    color=look["color"], ms=5, mew=1,
                )  # fmt: skip
        (handles[r"proved bound $2\,\mathrm{tail}_m/(K-2m)$"],) = axes.plot(
            K, [c["spectral_bound"] / c["iid"] for c in some], color="black"
        )
        (handles[r"paper's rate $\mathrm{tail}_{K/3}/K$"],) = axes.plot(
            K, [c["paper_rate"] / c["iid"] for c in some], color="#8a94a3", ls=(0, (1, 1))
        )
        (handles[r"its law $(n-K)/(n-1)$"],) = axes.plot(
            K, [c["without_replacement"] / c["iid"] for c in some], color=styles.COLOURS[0], lw=0.6
        )
        if any(c.get("floor", 0) > 1e-6 * c["iid"] for c in some):
            (handles["floor under any K own tokens"],) = axes.plot(
                K, [c["floor"] / c["iid"] for c in some], color="black", ls=(0, (1, 3))
            )
        handles[r"trace bound $\mathrm{tr}\,\Sigma/K$"] = axes.axhline(
            1.0, color=styles.GUIDE, ls="--", lw=0.8, zorder=1
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        # one token to all: at K = n the cache itself is left, and nothing is lost
        axes.axvline(own[0]["n"], color=styles.GUIDE, ls=":", lw=0.8)
        K = [c["K"] for c in own]
        ticks = [k for i, k in enumerate(K) if k == max(K) or k < 0.72 * K[i + 1]]
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        if axes.get_ylim()[1] < 100 * axes.get_ylim()[0]:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{head}, n = {own[0]['n']}", loc="left")
    for axes in list(panels.flat)[len(heads) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel(r"squared error / $(\mathrm{tr}\,\Sigma/K)$")
    for axes in list(panels.flat)[max(0, len(heads) - _COLUMNS) : len(heads)]:
        axes.set_xlabel("tokens kept, K")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    fields = ("head", "n", "K", "m", "iid", "without_replacement", "spectral_bound", "paper_rate")
    header = [*fields, "srs", "cube", "spectral", "srs_draws", "cube_runs", "spectral_runs"]
    walks = [field for field, _ in _WALKS]
    return header, [
        [*(c[f] for f in fields), *(_mean(c[w]) for w in walks), *(len(c[w]) for w in walks)] for c in _curves(results)
    ]  # fmt: skip
