"""The best composition at equal bits: chosen on one text, judged on another; and whether the gains of its parts multiply.

    choice    at a held rate r, of a kind of codecs the curve of least error on the text that is chosen on
    judged    the error of that curve at r on the other text, over that of the other kinds' choices, paired by segments

so that a winner among many is not found on the test. Errors are geometric means over layers. `regret` is its error over that of the curve that would have been best there. With R > C
a chain of stages, B a codec that parts are measured against, e(.) errors at one held rate r:

    gain of reduction = e(B) / e(R > B),   gain of the coder = e(B) / e(C),   joint gain = e(B) / e(R > C)

Gains multiply where joint = product. And without equal rates, of each layer at one nominal rate b, with kappa the share of tokens that R leaves:

    sum of errors = e(R) + e(C at b)  beside  e(R > C at b),     product of rates = kappa held(C at b)  beside  held(R > C at b)
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import files
from kvtheory.statistics import Interval, expanded_percentiles
from reference.compare.equal_rate import Curve
from reference.compare.summary import Point, Summary, error_curves

__all__ = ["KINDS", "Choice", "Gain", "Parts", "choose", "gains", "kind_of", "parts", "picture_of", "write_composition"]

Float = NDArray[np.float64]

#: what a choice is made among, in the order of tables
KINDS = {
    "layerwise": "of each layer the best",
    "composition": "chains of stages",
    "own": "single codecs of kvtheory",
    "paper": "single systems of the papers",
}


def kind_of(codec: str, parameters: Mapping[str, Any]) -> str:
    """The kind of a codec: a chain; MetricKLT and MergeReduce with a reducer of ours; everything else, which a paper has."""
    if codec == "Pipeline":
        return "composition"
    # the papers' reducers are random sampling and clustering
    ours = codec == "MetricKLT" or (codec == "MergeReduce" and parameters.get("reducer") not in ("random", "cluster"))
    return "own" if ours else "paper"


@dataclass(frozen=True)
class Choice:
    """What was chosen of a kind at a held rate, and what it is worth on the text that it was not chosen on.

    chosen_error: on the text of the choice. error: on the judged one. best, regret: the curve that is best there in hindsight, error over its.
    against: kind -> error over that of this kind's choice, paired. state_bytes: of the fitted state. candidates: curves measured at that rate on
    both texts. Kind "layerwise": each layer takes the curve that is best for it, of any kind, at the same rate; label and best say them by
    layer, state_bytes is the sum over all codecs that some layer takes, of all layers each: more than is needed.
    """

    kind: str
    held_bits: float
    label: str
    chosen_error: float
    error: Interval
    best: str
    regret: Interval
    against: Mapping[str, Interval]
    state_bytes: int
    candidates: int


def _curves(summary: Summary) -> dict[str, Curve]:
    return {c.label: c for c in error_curves(summary) if not c.label.endswith(", oracle")}


def _interval(summary: Summary, log: float, draws: Float) -> Interval:
    level = summary.bootstrap.level
    low, high = expanded_percentiles(draws, summary.bootstrap.segments, level)
    return Interval(float(np.exp2(log)), float(np.exp2(low)), float(np.exp2(high)), level)


def choose(
    chosen_on: Summary,
    judged: Summary,
    held_bits: Sequence[float],
    by_layer: tuple[Sequence[Summary], Sequence[Summary]] | None = None,
) -> list[Choice]:
    """Of each kind, at each held rate, the curve of least error on `chosen_on`, judged on `judged`.

    by_layer: summaries of each layer alone, of both texts, in the same order and with the same seed; None: no kind "layerwise". Curves that were
    not measured around the rate on both texts are no candidates; a kind without any has no row. ValueError for summaries of different
    models or layers, and of one text.
    """
    for name in ("model", "layers"):
        if (own := getattr(chosen_on, name)) != (its := getattr(judged, name)):
            raise ValueError(f"judged: expected the same {name} as what is chosen on, {own}, got {its}")
    if chosen_on.cache == judged.cache or (chosen_on.text and chosen_on.text == judged.text):
        raise ValueError(f"judged: expected another text than what is chosen on, {chosen_on.text or chosen_on.cache}")
    states: dict[str, int] = {}
    for p in judged.points:
        states[p.label] = max(states.get(p.label, 0), p.state_bytes)
    found = []
    for target in map(float, held_bits):
        picks: dict[str, _Pick] = {}
        kinds: dict[str, list[str]] = {}
        first, second = _able(chosen_on, judged, target)
        for name in second:
            kinds.setdefault(kind_of(second[name].codec, second[name].parameters), []).append(name)
        for kind, names in kinds.items():
            picks[kind] = _pick(first, second, names, target)
        each = [_able(*pair, target) for pair in zip(*by_layer, strict=True)] if by_layer else []
        if each and all(second for _, second in each):
            picks["layerwise"] = _together(judged.layers, [_pick(*pair, list(pair[1]), target) for pair in each])
        for kind in (kind for kind in KINDS if kind in picks):
            one = picks[kind]
            against = {k: _over(judged, one.at, its.at) for k, its in picks.items() if k != kind}
            found.append(
                Choice(
                    kind, target, one.label, one.chosen_error, _interval(judged, *one.at), one.best, _over(judged, one.at, one.best_at),
                    against, sum(states[n] for n in one.labels), one.candidates,
                )
            )  # fmt: skip
    return found


@dataclass(frozen=True)
class _Pick:
    """at, best_at: log2 of the error on the judged text and its replicates, of what was chosen and of what would have been best."""

    label: str
    labels: frozenset[str]
    chosen_error: float
    at: tuple[float, Float]
    best: str
    best_at: tuple[float, Float]
    candidates: int


def _able(chosen_on: Summary, judged: Summary, target: float) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """The curves that have a number at the target on both."""
    first, second = _curves(chosen_on), _curves(judged)
    names = [n for n in first if n in second and not first[n].missing(target) and not second[n].missing(target)]
    return {n: first[n] for n in names}, {n: second[n] for n in names}


def _pick(first: Mapping[str, Curve], second: Mapping[str, Curve], names: Sequence[str], target: float) -> _Pick:
    logs = {n: first[n].at(target)[0] for n in names}
    name = min(names, key=lambda n: logs[n])
    best = min(names, key=lambda n: second[n].at(target)[0])
    own, its = second[name].at(target), second[best].at(target)
    return _Pick(name, frozenset({name}), float(np.exp2(logs[name])), own, best, its, len(names))


def _together(layers: Sequence[int], picks: Sequence[_Pick]) -> _Pick:
    """Of picks of single layers: geometric means over the layers. Replicates are of the same draws of segments."""

    def mean(pairs: Sequence[tuple[float, Float]]) -> tuple[float, Float]:
        return float(np.mean([log for log, _ in pairs])), np.mean([draws for _, draws in pairs], axis=0)

    def said(names: Sequence[str]) -> str:
        return "; ".join(f"{layer}: {name}" for layer, name in zip(layers, names, strict=True))

    return _Pick(
        said([one.label for one in picks]), frozenset(one.label for one in picks),
        float(np.exp2(np.mean([np.log2(one.chosen_error) for one in picks]))), mean([one.at for one in picks]),
        said([one.best for one in picks]), mean([one.best_at for one in picks]), min(one.candidates for one in picks),
    )  # fmt: skip


def _over(summary: Summary, one: tuple[float, Float], other: tuple[float, Float]) -> Interval:
    return _interval(summary, one[0] - other[0], one[1] - other[1])


@dataclass(frozen=True)
class Gain:
    """Gains of reduction and of the coder over `base` at one held rate, their product, the joint gain, and joint / product; paired intervals."""

    held_bits: float
    base: str
    reduced: str
    coder: str
    joint_label: str
    reduction: Interval
    coding: Interval
    product: Interval
    joint: Interval
    excess: Interval


def gains(summary: Summary, held_bits: Sequence[float], base: str) -> list[Gain]:
    """For each chain R > C of a summary for which R > base and C were measured around the rate too. base: a label, of a single codec.

    ValueError for a base that was not measured.
    """
    curves = _curves(summary)
    if base not in curves:
        raise ValueError(f"base: no curve {base!r}; there are {', '.join(curves)}")
    found = []
    for label, coder, reduced in _chains(curves, base):
        for target in map(float, held_bits):
            four = [curves[n] for n in (base, reduced, coder, label)]
            if any(curve.missing(target) for curve in four):
                continue
            (b, bs), (r, rs), (c, cs), (j, js) = (curve.at(target) for curve in four)
            terms = [
                (b - r, bs - rs), (b - c, bs - cs), (2 * b - r - c, 2 * bs - rs - cs), (b - j, bs - js),
                (r + c - b - j, rs + cs - bs - js),
            ]  # fmt: skip
            found.append(Gain(target, base, reduced, coder, label, *(_interval(summary, *term) for term in terms)))
    return found


def _chains(curves: Mapping[str, Curve], base: str) -> list[tuple[str, str, str]]:
    """(R > C, C, R > base) of all chains for which the other two are there; C is not the base."""
    found = []
    for label in curves:
        front, mark, coder = label.rpartition(" > ")
        # a chain names its last stage as a single codec of these options is named
        if mark and coder != base and coder in curves and f"{front} > {base}" in curves:
            found.append((label, coder, f"{front} > {base}"))
    return found


@dataclass(frozen=True)
class Parts:
    """A chain beside its parts at one nominal rate. Of each, least and most over layers; `error` and `sum` are geometric means over them.

    ratio: error of the chain over the sum of its parts' errors. kept: share of tokens, rate: that of the coder alone, held: that of the chain;
    held / (kept rate) - 1 is what positions, padding and headers take.
    """

    label: str
    bits: float | None
    kept: float
    rate: float
    held: float
    error: float
    reduction_error: float
    coder_error: float
    ratio: float
    least: float
    most: float


def parts(summary: Summary) -> list[Parts]:
    """Every point of every chain R > C of two stages that stands beside a point of R alone and one of C alone at the same nominal rate."""
    singles: dict[tuple[str, float | None], Point] = {}
    for p in summary.points:
        if p.codec != "Pipeline" and p.law == "prompt":
            singles[_said(p), p.bits] = p
    found = []
    for p in summary.points:
        front, mark, coder = p.label.rpartition(" > ")
        if p.codec != "Pipeline" or not mark or p.law != "prompt":
            continue
        r, c = singles.get((front, None)), singles.get((coder, p.bits))
        if r is None or c is None or p.kept is None:
            continue
        ratios = [p.by_layer[i] / (r.by_layer[i] + c.by_layer[i]) for i in summary.layers]
        found.append(
            Parts(
                p.label, p.bits, p.kept, c.held_bits, p.held_bits, p.error.estimate, r.error.estimate, c.error.estimate,
                float(np.exp(np.mean(np.log(ratios)))), min(ratios), max(ratios),
            )
        )  # fmt: skip
    return found


def _said(point: Point) -> str:
    """A single codec as a chain says it: with its `keep`."""
    if point.keep is None:
        return point.label
    name, mark, rest = point.label.partition("(")
    return f"{name}(keep={point.keep}{', ' + rest if mark else ')'}"


def picture_of(
    chosen_on: Summary, judged: Summary, choices: Sequence[Choice], multiplied: Sequence[Gain]
) -> dict[str, Any]:
    """The data of figure "composition": curves of the judged text, choices, gains."""
    level = judged.bootstrap.level
    shown = {one.label for one in choices} | {one.best for one in choices}
    shown |= {n for g in multiplied for n in (g.base, g.reduced, g.coder, g.joint_label)}
    return {
        "model": judged.model,
        "text": judged.text,
        "chosen_on": chosen_on.text or chosen_on.cache,
        "prefix": judged.prefix,
        "layers": list(judged.layers),
        "level": level,
        "points": [
            {
                "label": p.label,
                "kind": kind_of(p.codec, p.parameters),
                "shown": p.label in shown,
                "bits": p.bits,
                "held_bits": p.held_bits,
                "state_bytes": p.state_bytes,
                "error": p.error.estimate,
                "low": p.error.low,
                "high": p.error.high,
            }
            for p in judged.points
            if p.law == "prompt"
        ],
        "choices": [_plain(one) for one in choices],
        "gains": [_plain(one) for one in multiplied],
    }


def _plain(one: Any) -> dict[str, Any]:
    """A record with intervals as [estimate, low, high, level]."""
    out = {}
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if isinstance(value, Mapping):
            value = {k: list(v) for k, v in value.items()}
        out[field.name] = list(value) if isinstance(value, Interval) else value
    return out


def write_composition(folder: str | os.PathLike[str], found: Sequence[Mapping[str, Any]]) -> Path:
    """composition.json in `folder`, whole or not at all: of each judged text `about`, choices, gains, parts.

    found: {"about": plain values, "choices": Choices, "gains": Gains, "parts": Parts} of each.
    """
    path = Path(folder) / "composition.json"
    every = [
        {"about": one["about"], **{n: [_plain(x) for x in one[n]] for n in ("choices", "gains", "parts")}}
        for one in found
    ]
    with files.replacing(path) as scratch:
        scratch.write_text(json.dumps(every, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
