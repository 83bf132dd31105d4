"""What the rows of a comparison say: geometric means with paired intervals, and codecs at equal held bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtheory.statistics import Interval, RatioBootstrap, bootstrap_ratios
from reference.codec import codec_class
from reference.compare.equal_rate import UNITS, Curve, EqualRate, at_rates, baseline_of
from reference.compare.specs import POINT

__all__ = [
    "Point",
    "Summary",
    "at_equal_kept",
    "at_equal_rate",
    "at_held_bits",
    "error_curves",
    "labels",
    "picture",
    "place",
    "summarise",
    "without_seed",
]

Row = dict[str, Any]
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A codec at one nominal rate on one source.

    error: geometric mean of the layers' errors (and over seeds). head_error: alike over all KV heads of all layers. by_layer: index ->
    error, geometric mean over seeds. held_bits: of all layers; amortised_bits: with the state shared by the table's layers. keep: the
    codec's, tokens or a share of them; kept: share of the tokens that is left, mean over layers and KV heads (None in files that do not
    say); law: the queries that it was given.
    """

    codec: str
    label: str
    parameters: Mapping[str, Any]
    bits: float | None
    held_bits: float
    amortised_bits: float
    state_bytes: int
    error: Interval
    head_error: Interval
    by_layer: Mapping[int, float]
    keep: int | float | None = None
    kept: float | None = None
    law: str = "prompt"


@dataclass(frozen=True)
class Summary:
    """All points on one source. `bootstrap` has their paired replicates over layers, in the order of `points`; `head_bootstrap` over KV heads."""

    model: str
    text: str
    cache: str
    prefix: int
    held: int
    dtype: str
    queries: int
    segments: int
    layers: tuple[int, ...]
    windowed: tuple[int, ...]
    points: tuple[Point, ...]
    bootstrap: RatioBootstrap = field(repr=False)
    head_bootstrap: RatioBootstrap = field(repr=False)

    def curves(self) -> dict[str, list[int]]:
        """Label -> numbers of its points, by held bits."""
        found: dict[str, list[int]] = {}
        for i, point in enumerate(self.points):
            found.setdefault(point.label, []).append(i)
        return {label: sorted(own, key=lambda i: self.points[i].held_bits) for label, own in found.items()}


def summarise(rows: Sequence[Row], level: float = 0.95, seed: int = 0, draws: int = 5000) -> list[Summary]:
    """A Summary for each source in the rows of a sweep, in their order.

    All codecs of a source must have been measured on the same layers; ValueError if not.
    """
    sources: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        sources.setdefault(tuple(row[n] for n in ("model", "text", "cache", "prefix", "held", "dtype")), []).append(row)
    return [_summary(key, own, level, seed, draws) for key, own in sources.items()]


def _summary(key: tuple[Any, ...], rows: list[Row], level: float, seed: int, draws: int) -> Summary:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        law = row.get("law", "prompt")  # older files have no such column
        groups.setdefault((row["codec"], without_seed(row), row["state"], law), []).append(row)
    names = list(groups)
    units, numerators, denominators = _tensor(groups, lambda r: r["head"] is None)
    by_layer = bootstrap_ratios(numerators, denominators, level, seed=seed, draws=draws)
    by_head = bootstrap_ratios(*_tensor(groups, lambda r: r["head"] is not None)[1:], level, seed=seed, draws=draws)
    layers = tuple(dict.fromkeys(layer for layer, _, _ in units))
    with np.errstate(divide="ignore"):  # an error of 0
        logs = np.log(numerators.sum(axis=2)) - np.log(denominators.sum(axis=2))
    points = []
    for p, (name, label) in enumerate(zip(names, labels([(codec, said, state) for codec, said, state, _ in names]))):
        own = list({(r["layer"], r["seed"]): r for r in groups[name]}.values())
        numbers = sum(r["numbers"] for r in own)
        held = sum(r["held_bits"] * r["numbers"] for r in own) / numbers
        state_bytes = own[0]["state_bytes"]
        points.append(
            Point(
                codec=name[0],
                label=label if name[3] == "prompt" else f"{label}, oracle",
                parameters=json.loads(name[1]),
                bits=own[0]["bits"],
                held_bits=held,
                amortised_bits=held + 8 * state_bytes * len({r["seed"] for r in own}) / numbers,
                state_bytes=state_bytes,
                error=by_layer.interval(p),
                head_error=by_head.interval(p),
                by_layer={
                    layer: float(np.exp(np.mean([logs[p, u] for u, unit in enumerate(units) if unit[0] == layer])))
                    for layer in layers
                },
                keep=json.loads(name[1]).get("keep"),
                kept=float(np.mean([r["kept"] for r in own])) if "kept" in own[0] else None,
                law=name[3],
            )
        )
    one = {r["segment"]: r["queries"] for r in rows if r["layer"] == layers[0]}
    windowed = {r["layer"] for r in rows if r["window"] is not None}
    model, text, cache, prefix, held_positions, dtype = key
    return Summary(
        model=model,
        text=text,
        cache=cache,
        prefix=prefix,
        held=held_positions,
        dtype=dtype,
        queries=sum(one.values()),
        segments=len(one),
        layers=layers,
        windowed=tuple(layer for layer in layers if layer in windowed),
        points=tuple(points),
        bootstrap=by_layer,
        head_bootstrap=by_head,
    )


def without_seed(row: Row) -> str:
    """A row's parameters but the seed, JSON."""
    return json.dumps({k: v for k, v in json.loads(row["parameters"]).items() if k != "seed"}, sort_keys=True)


def _tensor(
    groups: Mapping[tuple[str, ...], list[Row]], wanted: Callable[[Row], bool]
) -> tuple[list[tuple[int, int, int]], Float, Float]:
    """Units (layer, head or -1, number of the seed) that all points share; numerators and denominators (points, units, segments).

    A point with fewer seeds than another (a codec that draws nothing has one) has its units repeated: all stand on the same layers.
    """
    found: list[tuple[int, dict[tuple[int, int, int], dict[int, tuple[float, float]]]]] = []
    for rows in groups.values():
        seeds = list(dict.fromkeys(r["seed"] for r in rows))
        cells: dict[tuple[int, int, int], dict[int, tuple[float, float]]] = {}
        for r in filter(wanted, rows):
            unit = (r["layer"], -1 if r["head"] is None else r["head"], seeds.index(r["seed"]))
            cells.setdefault(unit, {})[r["segment"]] = (r["numerator"], r["denominator"])
        found.append((len(seeds), cells))
    most = max(count for count, _ in found)
    places = list(dict.fromkeys((layer, head) for _, cells in found for layer, head, _ in cells))
    units = [(layer, head, seed) for layer, head in places for seed in range(most)]
    segments = 1 + max(segment for _, cells in found for cell in cells.values() for segment in cell)
    out = np.empty((2, len(groups), len(units), segments))
    for p, (name, (count, cells)) in enumerate(zip(groups, found)):
        if most % count:
            raise ValueError(f"rows: expected numbers of seeds that divide {most}, {name[0]} has {count}")
        for u, (layer, head, seed) in enumerate(units):
            cell = cells.get((layer, head, seed % count), {})
            if sorted(cell) != list(range(segments)):
                raise ValueError(f"rows: {name[0]} {name[1]} was not measured on all of layer {layer}, as others were")
            for segment, pair in cell.items():
                out[:, p, u, segment] = pair
    return units, out[0], out[1]


def labels(names: Sequence[tuple[str, str, str]]) -> list[str]:
    """Names of points (codec, parameters as JSON, state): the parameters that are not the codec's defaults, and the state where only it differs.

    Bits and `keep` are left out: they make the points of one curve. Of a codec that is not known, the parameters in which its points differ.
    """
    found = []
    for codec, parameters, state in names:
        own = json.loads(parameters)
        if codec == "Pipeline" and "stages" in own:  # its stages name it
            found.append(own["stages"])
            continue
        usual = _defaults(codec)
        if usual is None:
            others = [json.loads(p) for c, p, _ in names if c == codec]
            said = [
                f"{k}={_short(own[k])}"
                for k in own
                if k not in POINT and len({json.dumps(p.get(k)) for p in others}) > 1
            ]
        else:
            said = [
                f"{k}={_short(own[k])}"
                for k in _in_order(own, usual)
                if k not in ("bits", "keep") and (k not in usual or own[k] != usual[k])
            ]
        if len({s for c, p, s in names if (c, p) == (codec, parameters)}) > 1:
            said.append(f"state={state[:6]}")
        found.append(codec + (f"({', '.join(said)})" if said else ""))
    return found


def _in_order(own: Row, usual: Row) -> list[str]:
    return [*(k for k in usual if k in own), *(k for k in own if k not in usual)]


def _short(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)


def _defaults(codec: str) -> Row | None:
    """Parameters of a codec's constructor that have a default, as rows have them."""
    try:
        fields = dataclasses.fields(codec_class(codec))  # type: ignore[arg-type]
    except (LookupError, TypeError):
        return None
    usual = {
        f.name: f.default
        for f in fields
        if f.init and f.default is not dataclasses.MISSING and "state" not in f.metadata
    }
    return dict(json.loads(json.dumps(usual, default=repr)))


def at_held_bits(summary: Summary, label: str, held_bits: float) -> tuple[float, Float]:
    """log2 of a curve's error at a held rate between two of its points, and its replicates (draws,).

    log2 error is taken as linear in held bits between neighbours (it is -2 a bit for a fine quantiser). Nothing is extrapolated:
    ValueError outside the curve's points, and where an error is 0. Differences of two curves' replicates are paired.
    """
    own = {curve.label: curve for curve in error_curves(summary)}
    if label not in own:
        raise ValueError(f"label: no curve {label!r}; there are {', '.join(own)}")
    return own[label].at(held_bits)


def error_curves(summary: Summary, over: str = "layers", axis: str = "bits") -> list[Curve]:
    """The curves of a summary; over: "layers" or "heads", what their geometric means are over.

    axis: "bits" held; "kept", share of the tokens that is left; "budget", the share that `keep` allows. On the last two, curves of what
    has a `keep` only.
    """
    if over not in ("layers", "heads"):
        raise ValueError(f'over: expected "layers" or "heads", got {over!r}')
    if axis not in UNITS:
        raise ValueError(f"axis: expected one of {', '.join(UNITS)}, got {axis!r}")
    boot = summary.bootstrap if over == "layers" else summary.head_bootstrap
    found = []
    for label, group in summary.curves().items():
        at = {i: place(summary.points[i], axis, summary.prefix) for i in group}
        own = sorted((i for i in group if at[i] is not None), key=lambda i: at[i] or 0.0)
        if not own:
            continue
        points = [summary.points[i] for i in own]
        found.append(
            Curve(
                label, points[0].codec, points[0].parameters, [at[i] or 0.0 for i in own], [p.bits for p in points],
                [p.amortised_bits for p in points], boot.log_estimates[own] / np.log(2), boot.log_replicates[own] / np.log(2), axis,
            )
        )  # fmt: skip
    return found


class Placed(Protocol):
    """What has a place on every axis."""

    @property
    def held_bits(self) -> float: ...
    @property
    def keep(self) -> int | float | None: ...
    @property
    def kept(self) -> float | None: ...


def place(point: Placed, axis: str, tokens: int) -> float | None:
    """Where a point stands on an axis; None for what has no `keep` on the axes of tokens. budget: min(1, keep / tokens) of an int."""
    if axis == "bits":
        return point.held_bits
    if point.keep is None:
        return None
    if axis == "kept":
        return point.kept
    return point.keep if isinstance(point.keep, float) else min(1.0, point.keep / tokens)


def at_equal_kept(
    summary: Summary, shares: Sequence[float], baseline: str | None = None, over: str = "layers"
) -> list[EqualRate]:
    """Every codec with a `keep` at each share of the tokens, over the codec that `baseline` names: at that budget, then at that many kept.

    A codec may leave fewer tokens than it is allowed (atoms of weight 0; evictions of several at once). At equal budget it is compared as it
    is; at equal kept tokens log2 of its error is interpolated in log2 of what it left, never extrapolated.
    """
    found = []
    for axis in ("budget", "kept"):
        curves = error_curves(summary, over, axis)
        label = None if baseline is None else baseline_of(baseline, [(c.label, c.codec, c.parameters) for c in curves])
        measure = "attention" if over == "layers" else "attention by head"
        found += at_rates(curves, shares, measure, summary.segments, summary.bootstrap.level, label)
    return found


def at_equal_rate(
    summary: Summary, target_bits: float | Sequence[float], baseline: str | None = None, over: str = "layers"
) -> list[EqualRate]:
    """Every codec of a summary at each target, held bits per number, and over the codec that the spec `baseline` names.

    Geometric means over layers, or over all KV heads (over="heads"). A codec that was not measured on both sides of a target has
    no number there, and `why`. ValueError for a baseline that is not among the codecs.
    """
    targets = [float(target_bits)] if isinstance(target_bits, (int, float)) else [float(t) for t in target_bits]
    curves = error_curves(summary, over)
    label = None if baseline is None else baseline_of(baseline, [(c.label, c.codec, c.parameters) for c in curves])
    measure = "attention" if over == "layers" else "attention by head"
    return at_rates(curves, targets, measure, summary.segments, summary.bootstrap.level, label)


def picture(summary: Summary) -> dict[str, Any]:
    """The data of figure "pareto" for one source, as figures.book reads them."""
    return {
        "model": summary.model,
        "text": summary.text,
        "prefix": summary.prefix,
        "held": summary.held,
        "dtype": summary.dtype,
        "queries": summary.queries,
        "segments": summary.segments,
        "layers": list(summary.layers),
        "windowed": list(summary.windowed),
        "level": summary.bootstrap.level,
        "points": [
            {
                "codec": p.codec,
                "label": p.label,
                "parameters": dict(p.parameters),
                "bits": p.bits,
                "keep": p.keep,
                "kept": p.kept,
                "law": p.law,
                "held_bits": p.held_bits,
                "amortised_bits": p.amortised_bits,
                "state_bytes": p.state_bytes,
                "error": p.error.estimate,
                "low": p.error.low,
                "high": p.error.high,
                "head_error": p.head_error.estimate,
                "head_low": p.head_error.low,
                "head_high": p.head_error.high,
                "by_layer": [p.by_layer[layer] for layer in summary.layers],
            }
            for p in summary.points
        ],
    }
