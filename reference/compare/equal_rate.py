"""Codecs at equal held bits or kept tokens: log2 of the error interpolated between two points, its ratio to a baseline with a paired interval.

    log2 e(r) = (1 - t) log2 e_1 + t log2 e_2,   t = (r - r_1) / (r_2 - r_1),   r_1 <= r <= r_2 neighbours among a curve's held rates

r: held bits per number, or log2 of the share of tokens that is kept (or allowed), since errors fall like a power of it.

A curve is one codec with one set of options. Nothing is extrapolated: outside a curve's rates there is no number, and `why` says what was
measured. The same formula in every replicate of the bootstrap gives the intervals; replicates of two curves stand on the same segments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory import files
from kvtheory.statistics import Interval, expanded_percentiles
from reference.compare.specs import POINT, specs

__all__ = [
    "EQUAL_KEPT_COLUMNS",
    "EQUAL_RATE_COLUMNS",
    "UNITS",
    "Curve",
    "EqualRate",
    "at_rates",
    "baseline_of",
    "kept_row",
    "knots",
    "row",
    "write_equal_kept",
    "write_equal_rates",
]

Float = NDArray[np.float64]
Row = dict[str, Any]


#: what the places on an axis are called
UNITS = {"bits": "bits per number", "kept": "of the tokens kept", "budget": "of the tokens as budget"}


class Curve(NamedTuple):
    """One codec with one set of options, by held rate. logs, replicates: log2 of its measure, (points,) and (points, draws).

    axis: what `held` is, ascending: "bits" held per number, "kept": share of the tokens that is left, "budget": share that may be left.
    """

    label: str
    codec: str
    parameters: Mapping[str, Any]
    held: Sequence[float]
    bits: Sequence[float | None]
    amortised: Sequence[float]
    logs: Float
    replicates: Float
    axis: str = "bits"

    def missing(self, held_bits: float) -> str:
        """Why there is no number at a held rate; empty where there is one."""
        if not self.held[0] <= held_bits <= self.held[-1]:
            ends = (
                f"from {self.held[0]:.4g} to {self.held[-1]:.4g}"
                if len(self.held) > 1
                else f"at {self.held[0]:.4g} only,"
            )
            return f"was measured {ends} {UNITS[self.axis]}"
        pair = list(self._pair(held_bits))
        if not (np.isfinite(self.logs[pair]).all() and np.isfinite(self.replicates[pair]).all()):
            return "has an error of 0 there, which has no logarithm"
        return ""

    def _pair(self, held_bits: float) -> tuple[int, int]:
        last = len(self.held) - 1
        above = int(np.clip(np.searchsorted(self.held, held_bits), min(1, last), last))
        return max(above - 1, 0), above

    def between(self, held_bits: float) -> tuple[int, int, float]:
        """Neighbours and t. ValueError outside the rates and where an error is 0."""
        if why := self.missing(held_bits):
            raise ValueError(f"held_bits: {self.label} {why}, got {held_bits:g}")
        below, above = self._pair(held_bits)
        x0, x1, x = (
            r if self.axis == "bits" else float(np.log2(r)) for r in (self.held[below], self.held[above], held_bits)
        )
        return below, above, (x - x0) / (x1 - x0) if x1 != x0 else 0.0

    def at(self, held_bits: float) -> tuple[float, Float]:
        """log2 at a held rate and its replicates (draws,)."""
        below, above, t = self.between(held_bits)
        mix = np.array([1 - t, t])
        return float(mix @ self.logs[[below, above]]), mix @ self.replicates[[below, above]]


@dataclass(frozen=True)
class EqualRate:
    """A curve at a held rate. measure: "attention" (layers), "attention by head", "kl", "perplexity"; error: its value, ratio: over the baseline's.

    below, above: (nominal, held) bits of the two points between which it lies. why: what is missing where error or ratio is None.
    axis: as of Curve; where it is not "bits", held_bits, below and above are shares of the tokens.
    """

    measure: str
    label: str
    codec: str
    parameters: Mapping[str, Any]
    held_bits: float
    below: tuple[float | None, float] | None = None
    above: tuple[float | None, float] | None = None
    amortised_bits: float | None = None
    error: Interval | None = None
    baseline: str | None = None
    ratio: Interval | None = None
    why: str = ""
    axis: str = "bits"


def at_rates(
    curves: Sequence[Curve],
    held_bits: Sequence[float],
    measure: str,
    segments: int,
    level: float,
    baseline: str | None = None,
) -> list[EqualRate]:
    """Every curve at every held rate, and over the curve labelled `baseline`."""
    base = next((c for c in curves if c.label == baseline), None)
    if baseline is not None and base is None:
        raise ValueError(f"baseline: no curve {baseline!r}; there are {', '.join(c.label for c in curves)}")

    def interval(log: float, draws: Float) -> Interval:
        low, high = expanded_percentiles(draws, segments, level)
        return Interval(float(np.exp2(log)), float(np.exp2(low)), float(np.exp2(high)), level)

    found = []
    for held in held_bits:
        missing = "" if base is None else base.missing(held)
        against = None if base is None or missing else base.at(held)
        for curve in curves:
            fixed: Row = {
                "measure": measure, "label": curve.label, "codec": curve.codec, "parameters": dict(curve.parameters), "held_bits": held,
                "baseline": baseline, "axis": curve.axis,
            }  # fmt: skip
            if why := curve.missing(held):
                found.append(EqualRate(**fixed, why=why))
                continue
            i, j, t = curve.between(held)
            log, draws = curve.at(held)
            found.append(
                EqualRate(
                    **fixed,
                    below=(curve.bits[i], curve.held[i]),
                    above=(curve.bits[j], curve.held[j]),
                    amortised_bits=(1 - t) * curve.amortised[i] + t * curve.amortised[j],
                    error=interval(log, draws),
                    ratio=None if against is None else interval(log - against[0], draws - against[1]),
                    why=f"{baseline}: {missing}" if missing else "",
                )
            )
    return found


def knots(curves: Sequence[Curve]) -> list[float]:
    """Held rates of all curves, in the range that all of them cover; its ends among them. Empty where there is none."""
    low, high = max(c.held[0] for c in curves), min(c.held[-1] for c in curves)
    if low > high:
        return []
    return sorted({low, high, *(r for c in curves for r in c.held if low <= r <= high)})


def baseline_of(text: str, among: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Which label a label or a spec means. among: label, codec and parameters of each curve.

    What a spec leaves out is the default, or, where `fit` chose another value, what the only curve with its options has. ValueError for
    none, or for several codecs.
    """
    known = [label for label, _, _ in among]
    if text in known:
        return text
    found = specs(text)
    if len(found) != 1:
        raise ValueError(f"baseline: expected one codec, got {text!r}")
    own = [(label, parameters) for label, codec, parameters in among if codec == found[0].name]
    for label, parameters in own:
        if same_curve(found[0].curve(), parameters):
            return label
    stated = json.loads(json.dumps(found[0].options, default=repr))
    close = [
        label for label, parameters in own if all(parameters.get(k) == v for k, v in stated.items() if k not in POINT)
    ]
    if len(close) == 1:
        return close[0]
    raise ValueError(f"baseline: {text} is not among the codecs compared: {', '.join(dict.fromkeys(known))}")


def same_curve(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether parameters differ in nominal bits, `keep` and seed at most."""
    own, its = (
        {name: value for name, value in json.loads(json.dumps(dict(p), default=repr)).items() if name not in POINT}
        for p in (one, other)
    )
    return bool(own == its)


#: equal-rate.parquet: name -> (type of pyarrow, may be null, meaning)
EQUAL_RATE_COLUMNS: dict[str, tuple[str, bool, str]] = {
    "model": ("string", False, "model of the capture"),
    "text": ("string", False, "text of the capture"),
    "cache": ("string", False, "first 16 hex digits of the SHA-256 of the captured cache's file"),
    "prefix": ("int32", False, "tokens coded"),
    "layers": ("string", False, "indices of the layers"),
    "measure": (
        "string",
        False,
        "attention: error, geometric mean over layers; attention by head: over KV heads of all layers; kl: bits; perplexity",
    ),
    "label": ("string", False, "codec with the options that are not its defaults"),
    "codec": ("string", False, "codec id"),
    "parameters": ("string", False, "constructor arguments but bits, keep and seed, JSON with sorted names"),
    "target_bits": ("double", False, "held bits per number at which the codecs are compared"),
    "below_bits": ("double", True, "held bits of the point below"),
    "above_bits": ("double", True, "held bits of the point above"),
    "below_nominal": ("double", True, "nominal bits of the point below"),
    "above_nominal": ("double", True, "nominal bits of the point above"),
    "target_amortised_bits": ("double", True, "amortised bits there, linear between the two points"),
    "error": (
        "double",
        True,
        "of the codec, log2 linear in held bits between the two points; null where not measured on both sides",
    ),
    "error_low": ("double", True, "lower end of its interval"),
    "error_high": ("double", True, "upper end of its interval"),
    "baseline": ("string", True, "label of the codec that `ratio` is over"),
    "ratio": ("double", True, "error over that of the baseline"),
    "ratio_low": ("double", True, "lower end of its interval, paired by segments"),
    "ratio_high": ("double", True, "upper end of its interval"),
    "level": ("double", True, "level of the intervals"),
    "why": ("string", False, "what is missing where there is no number; else empty"),
}


def row(one: EqualRate, about: Mapping[str, Any]) -> Row:
    """As a row of equal-rate.parquet; about: model, text, cache, prefix, layers."""
    error, ratio = one.error or (None,) * 4, one.ratio or (None,) * 4
    below, above = one.below or (None, None), one.above or (None, None)
    parameters = {k: v for k, v in one.parameters.items() if k not in POINT}
    return {
        **about,
        "measure": one.measure,
        "label": one.label,
        "codec": one.codec,
        "parameters": json.dumps(parameters, sort_keys=True),
        "target_bits": one.held_bits,
        "below_bits": below[1],
        "above_bits": above[1],
        "below_nominal": below[0],
        "above_nominal": above[0],
        "target_amortised_bits": one.amortised_bits,
        "error": error[0],
        "error_low": error[1],
        "error_high": error[2],
        "baseline": one.baseline,
        "ratio": ratio[0],
        "ratio_low": ratio[1],
        "ratio_high": ratio[2],
        "level": error[3],
        "why": one.why,
    }


#: equal-kept.parquet: name -> (type of pyarrow, may be null, meaning)
EQUAL_KEPT_COLUMNS: dict[str, tuple[str, bool, str]] = {
    **{n: EQUAL_RATE_COLUMNS[n] for n in ("model", "text", "cache", "prefix", "layers", "measure", "label", "codec", "parameters")},
    "axis": ("string", False, "budget: share of the tokens that the codec may keep; kept: share that it keeps, mean over layers and heads"),
    "target": ("double", False, "share at which the codecs are compared"),
    "below": ("double", True, "share of the point below"),
    "above": ("double", True, "share of the point above"),
    **{n: EQUAL_RATE_COLUMNS[n] for n in ("error", "error_low", "error_high", "baseline", "ratio", "ratio_low", "ratio_high", "level", "why")},
}  # fmt: skip


def kept_row(one: EqualRate, about: Mapping[str, Any]) -> Row:
    """As a row of equal-kept.parquet; about: as `row`."""
    own = row(one, about)
    places = {"axis": one.axis, "target": one.held_bits, "below": own["below_bits"], "above": own["above_bits"]}
    return {name: places[name] if name in places else own[name] for name in EQUAL_KEPT_COLUMNS}


def write_equal_kept(folder: str | os.PathLike[str], rows: Sequence[Row]) -> tuple[Path, Path]:
    """equal-kept.parquet and equal-kept.json in `folder`, each whole or not at all."""
    return _write(folder, "equal-kept", EQUAL_KEPT_COLUMNS, rows)


def write_equal_rates(folder: str | os.PathLike[str], rows: Sequence[Row]) -> tuple[Path, Path]:
    """equal-rate.parquet and equal-rate.json in `folder`, each whole or not at all."""
    return _write(folder, "equal-rate", EQUAL_RATE_COLUMNS, rows)


def _write(
    folder: str | os.PathLike[str], name: str, columns: Mapping[str, tuple[str, bool, str]], rows: Sequence[Row]
) -> tuple[Path, Path]:
    from reference.compare.tables import parquet

    paths = Path(folder) / f"{name}.parquet", Path(folder) / f"{name}.json"
    parquet(paths[0], columns, rows)
    with files.replacing(paths[1]) as scratch:
        scratch.write_text(json.dumps(list(rows), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return paths
