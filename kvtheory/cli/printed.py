"""The tables of `kvtheory compare`: points, the model itself, the passkey, equal rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtheory.cli.captured import short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtheory.cli.find_key import Found
    from kvtheory.cli.on_model import OnModels
    from reference.compare import EqualRate, Summary

__all__ = ["equal_table", "lines_at_equal_rates", "model_table", "passkey_table", "points_table", "show"]

#: axis of EqualRate -> its column, that of its neighbours, what is said of interpolation
AXES = {
    "bits": ("held\nbits", "between\nheld rates", "; log2 interpolated between the two nearest held rates"),
    "kept": ("kept\ntokens", "between\nkept", "; log2 interpolated in log2 of what is kept"),
    "budget": ("budget\nof tokens", "between\nbudgets", "; what is kept may be less"),
}


def _at(place: float, axis: str) -> str:
    return f"{place:g}" if axis == "bits" else f"{100 * place:g}%"


def _between(below: float, above: float, axis: str) -> str:
    if axis == "bits":
        return f"{below:.3f} .. {above:.3f}"
    return f"{100 * below:.3g}%" if below == above else f"{100 * below:.3g} .. {100 * above:.3g}%"


def _keep(keep: int | float | None) -> str:
    return "-" if keep is None else f"{100 * keep:g}%" if isinstance(keep, float) else f"{keep:,}"


def _kept(kept: float | None) -> str:
    return "-" if kept is None else f"{100 * kept:.1f}%"


#: of EqualRate.measure
HEADINGS = {
    "attention": "attention error, geometric mean over layers",
    "attention by head": "attention error, geometric mean over KV heads",
    "kl": "the model itself: KL, bits",
    "perplexity": "the model itself: perplexity",
}


def equal_table(console: Console, equal: Sequence[EqualRate]) -> None:
    from rich.table import Table

    for measure, axis in dict.fromkeys((one.measure, one.axis) for one in equal):
        if axis == "kept" and measure not in ("attention", "kl"):
            continue  # in the file
        own = [one for one in equal if (one.measure, one.axis) == (measure, axis)]
        where, between, interpolated = AXES[axis]
        there = [one for one in own if one.error is not None]
        baseline = own[0].baseline
        over = f", and over that of {baseline}" if baseline else ""
        table = Table(
            title=f"{HEADINGS[measure]}, at equal {where.replace(chr(10), ' ')}{over}{interpolated}",
            title_justify="left", box=None, pad_edge=False,
        )  # fmt: skip
        table.add_column(where, justify="right")
        table.add_column("codec")
        headings = [between, "value", f"{there[0].error.level:.0%}" if there and there[0].error else ""]
        for heading in [*headings, *(["ratio", "paired\ninterval"] if baseline else [])]:
            table.add_column(heading, justify="right")
        for one in there:
            table.add_row(_at(one.held_bits, axis), one.label, *_cells(one))
        if there:
            show(console, table)
        if measure in ("attention", "kl") and axis != "kept":
            missing: dict[tuple[str, str], list[str]] = {}
            for one in own:
                if one.why:
                    missing.setdefault((one.label, one.why), []).append(_at(one.held_bits, axis))
            for (label, why), at in missing.items():
                console.print(f"{label} at {', '.join(at)}: {why}; nothing is extrapolated", markup=False)


def show(console: Console, table: Table) -> None:
    """A table as wide as it is: a narrow terminal wraps its lines, a file has them whole."""
    from rich.measure import Measurement

    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=1000), table).maximum)
    try:
        console.print(table)
    finally:
        console.width = width


def _cells(one: EqualRate) -> list[str]:
    assert one.below is not None and one.above is not None and one.error is not None
    cells = [
        _between(one.below[1], one.above[1], one.axis),
        f"{one.error.estimate:.3g}",
        f"[{one.error.low:.3g}, {one.error.high:.3g}]",
    ]
    if one.baseline is None:
        return cells
    if one.ratio is None:
        return [*cells, "-", "-"]
    return [*cells, f"{one.ratio.estimate:.3f}", f"[{one.ratio.low:.3f}, {one.ratio.high:.3f}]"]


def points_table(console: Console, summary: Summary, equal_rates: bool) -> None:
    from rich.table import Table

    level = f"{summary.bootstrap.level:.0%}"
    layers = f"{len(summary.layers)} layer{'s' if len(summary.layers) > 1 else ''}"
    table = Table(
        title=f"{short(summary.model)}{', ' if summary.text else ''}{summary.text}: {layers}, {summary.prefix:,} tokens as {summary.dtype}, "
        f"{summary.queries} held-out queries in {summary.segments} segments",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec")
    reduce = any(p.keep is not None for p in summary.points)
    for heading in (
        "nominal\nbits",
        *(("budget", "kept") if reduce else ()),
        "held\nbits",
        "ratio",
        "state\nbytes",
        "attention\nerror",
        level,
    ):
        table.add_column(heading, justify="right")
    for p in summary.points:
        state = f"{p.state_bytes:,}" + (f" (+{p.amortised_bits - p.held_bits:.3f} bits)" if p.state_bytes else "")
        table.add_row(
            p.label, "-" if p.bits is None else f"{p.bits:g}", *((_keep(p.keep), _kept(p.kept)) if reduce else ()),
            f"{p.held_bits:.4f}", f"{16 / p.held_bits:.2f}", state,
            f"{p.error.estimate:.3g}", f"[{p.error.low:.3g}, {p.error.high:.3g}]",
        )  # fmt: skip
    show(console, table)
    for line in [] if equal_rates else lines_at_equal_rates(summary):
        console.print(line, markup=False)
    if summary.windowed:
        console.print(
            f"layers {', '.join(map(str, summary.windowed))} have a sliding window: their true queries see less than the whole prefix",
            markup=False,
        )


def model_table(console: Console, summary: Summary, on: OnModels | None) -> None:
    from rich.table import Table

    if on is None:
        return
    runs = on.points
    table = Table(
        title=f"{short(summary.model)} itself, the same layers replaced (perplexity {runs[0].plain_perplexity:.3f} without)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec")
    reduce = any(run.keep is not None for run in runs)
    for heading in (
        "nominal\nbits",
        *(("budget", "kept") if reduce else ()),
        "held\nbits",
        "KL,\nbits",
        f"{summary.bootstrap.level:.0%}",
        "same\ntop-1",
        "perplexity",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        kl = run.kl_bits
        table.add_row(
            run.label, "-" if run.bits is None else f"{run.bits:g}", *((_keep(run.keep), _kept(run.kept)) if reduce else ()),
            f"{run.held_bits:.4f}", f"{kl.estimate:.3g}",
            f"[{kl.low:.3g}, {kl.high:.3g}]", f"{run.agreement:.1%}", f"{run.perplexity:.3f}",
        )  # fmt: skip
    show(console, table)


def passkey_table(console: Console, found: Sequence[Found]) -> None:
    """Right answers and log2 P(key) of each codec, paired over samples with the full cache and with the baseline."""
    from rich.table import Table

    if not found:
        return
    one = found[0]
    over = any(f.gain_bits is not None for f in found)
    table = Table(
        title=f"passkey, {one.samples} samples, question {one.question}: the full cache finds {one.full_right} of {one.samples}, "
        f"log2 P(key) {one.full_log2_p:.3f}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec")
    headings = [
        "nominal\nbits",
        "budget",
        "kept",
        "held\nbits",
        "found",
        "95%",
        "log2\nP(key)",
        "bits lost to\nthe full cache",
        "paired\n95%",
    ]
    for heading in [*headings, *(["bits gained on\nthe baseline", "paired\n95%"] if over else [])]:
        table.add_column(heading, justify="right")
    for f in found:
        exact = "-" if f.accuracy is None else f"[{f.accuracy.low:.2f}, {f.accuracy.high:.2f}]"
        ends = [
            cell
            for i in (f.loss_bits, *((f.gain_bits,) if over else ()))
            for cell in (("-", "-") if i is None else (f"{i.estimate:.3f}", f"[{i.low:.3f}, {i.high:.3f}]"))
        ]
        table.add_row(
            f.label, "-" if f.bits is None else f"{f.bits:g}", _keep(f.keep), _kept(f.kept), f"{f.held_bits:.4f}",
            f"{f.right:.2f}", exact, f"{f.log2_p:.3f}", *ends,
        )  # fmt: skip
    show(console, table)
    if one.full_right < one.samples:
        console.print(
            f"the full cache misses {one.samples - one.full_right} of {one.samples} keys: what a codec misses there says nothing of it",
            markup=False,
        )


def lines_at_equal_rates(summary: Summary) -> list[str]:
    """Curves against the first one, where both were measured around the same held rate."""
    import numpy as np

    from kvtheory.statistics import expanded_percentiles
    from reference.compare import at_held_bits

    curves = {label: own for label, own in summary.curves().items() if len(own) > 1}
    lines = []
    for label, own in list(curves.items())[1:]:
        first = next(iter(curves))
        ends = [[summary.points[i].held_bits for i in points] for points in (curves[first], own)]
        low, high = max(e[0] for e in ends), min(e[-1] for e in ends)
        if low > high:
            continue
        held = 0.5 * (low + high)
        try:
            (a, a_draws), (b, b_draws) = at_held_bits(summary, first, held), at_held_bits(summary, label, held)
        except ValueError:  # an error of 0
            continue
        edges = expanded_percentiles(b_draws - a_draws, summary.segments, summary.bootstrap.level)
        ratio, least, most = (float(np.exp2(x)) for x in (b - a, *edges))
        lines.append(
            f"at {held:.3f} held bits (log2 error interpolated): error of {label} / {first} = {ratio:.3g} [{least:.3g}, {most:.3g}]"
        )
    return lines
