"""The data of the figures "kept-pareto", "transform-pareto" and "ablation" for one source, as figures.book reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvtheory.statistics import Interval
from reference.compare.equal_rate import EqualRate, at_rates, baseline_of, knots
from reference.compare.summary import Summary, error_curves

__all__ = ["ablation", "kept_pareto", "transform_pareto"]


def transform_pareto(summary: Summary, baseline: str | None) -> dict[str, Any]:
    """Each codec of at least two rates: error and interval by held rate; with a baseline also the ratio where both were measured."""
    curves = [curve for curve in error_curves(summary) if len(curve.held) > 1 and np.isfinite(curve.replicates).all()]
    base = None
    if baseline is not None and curves:
        every = error_curves(summary)
        label = baseline_of(baseline, [(c.label, c.codec, c.parameters) for c in every])
        base = next((c for c in curves if c.label == label), None)
    drawn = []
    for curve in curves:
        rates = knots([curve, base]) if base is not None and curve is not base else []
        ratios = (
            at_rates([curve, base], rates, "attention", summary.segments, summary.bootstrap.level, base.label)
            if rates and base
            else []
        )
        own = at_rates([curve], curve.held, "attention", summary.segments, summary.bootstrap.level)
        drawn.append(
            {
                "label": curve.label,
                "codec": curve.codec,
                "bits": list(curve.bits),
                "amortised_bits": list(curve.amortised),
                "error": _ends(curve.held, [one.error for one in own]),
                "ratio": _ends(rates, [one.ratio for one in ratios if one.label == curve.label]),
            }
        )
    return {**_about(summary), "baseline": base.label if base is not None else None, "curves": drawn}


def kept_pareto(
    summary: Summary, on_model: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Error, KL and passkey against the share of tokens that is kept, of codecs with a `keep`. on_model: points of figure "pareto"."""
    points = [
        {
            "label": p.label, "budget": p.keep, "kept": p.kept, "error": p.error.estimate, "low": p.error.low, "high": p.error.high,
            "held_bits": p.held_bits,
        }
        for p in summary.points if p.keep is not None and p.kept is not None
    ]  # fmt: skip
    its_runs = [
        {
            "label": p["label"], "budget": p["keep"], "kept": p["kept"], "error": p["error"], "low": p["low"], "high": p["high"],
            "held_bits": p["held_bits"], "perplexity": p["perplexity"], "plain_perplexity": p["plain_perplexity"],
        }
        for p in on_model if p["keep"] is not None and p["kept"] is not None
    ]  # fmt: skip
    its_keys = [
        {
            "label": f["label"], "budget": f["keep"], "kept": f["kept"], "question": f["question"], "samples": f["samples"],
            "right": f["right"], "log2_p": f["log2_p"], "full_log2_p": f["full_log2_p"], "loss_bits": f["loss_bits"],
            "held_bits": f["held_bits"],
        }
        for f in found if f["keep"] is not None
    ]  # fmt: skip
    return {**_about(summary), "points": points, "on_model": its_runs, "passkey": its_keys}


def ablation(summary: Summary, equal: Sequence[EqualRate]) -> dict[str, Any]:
    """Ratios to the baseline of every other codec at each target, over layers and over KV heads; on the model where it ran."""
    lines = [
        {
            "label": one.label,
            "measure": one.measure,
            "held_bits": one.held_bits,
            "ratio": one.ratio.estimate,
            "low": one.ratio.low,
            "high": one.ratio.high,
        }
        for one in equal
        if one.ratio is not None and one.label != one.baseline
    ]
    return {**_about(summary), "baseline": next((one.baseline for one in equal), None), "lines": lines}


def _about(summary: Summary) -> dict[str, Any]:
    return {
        "model": summary.model,
        "text": summary.text,
        "prefix": summary.prefix,
        "held": summary.held,
        "dtype": summary.dtype,
        "segments": summary.segments,
        "layers": list(summary.layers),
        "level": summary.bootstrap.level,
    }


def _ends(held: Sequence[float], intervals: Sequence[Interval | None]) -> list[dict[str, float]]:
    return [
        {"held_bits": h, "estimate": i.estimate, "low": i.low, "high": i.high}
        for h, i in zip(held, intervals, strict=True)
        if i is not None
    ]
