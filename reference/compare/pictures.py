"""The data of the figures "transform-pareto" and "ablation" for one source, as figures.book reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtheory.statistics import Interval
from reference.compare.equal_rate import EqualRate, at_rates, baseline_of, knots
from reference.compare.summary import Summary, error_curves

__all__ = ["ablation", "transform_pareto"]


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
