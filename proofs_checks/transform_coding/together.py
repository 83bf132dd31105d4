"""Theorem 1 with noise on keys and values at once: energies add, and the remainder falls with the square of the noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Layer
from kvtheory.statistics import mean_interval, slope_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, statistical
from proofs_checks.transform_coding import noise
from proofs_checks.transform_coding.instances import (
    MARGIN,
    MEDIUM_SIZES,
    PAPER,
    WHITE,
    Float,
    all_within,
    balanced,
    medium,
    real_heads,
    stated_by,
)  # fmt: skip
from proofs_checks.transform_coding.wrong_terms import KEY_MUTANTS, VALUE_MUTANTS, rewritten

#: the ladder of mean logit variances of the figure
LADDER = (0.005, 0.02, 0.08, 0.32, 1.29)
#: mean logit variances of the ladder on which the remainder must fall; the values' noise costs as much as the keys'
RUNGS = (1e-3, 1e-4, 1e-5)


@claim(
    id="transform-coding/additivity",
    paper=PAPER,
    section="Theorem 1",
    statement="With noise on keys and values together the energies add, and what is left over, relative to them, falls with the square"
    " of the noise.",
    formula="E‖do‖² = (D_K + D_V)(1 + O(σ²))",
    assumptions=(WHITE, "noise of keys and values independent of each other, with vanishing third moments (else O(σ))"),
    expected=Verdict.HOLDS_UNDER,
    functions={"key_term": "kvtheory.distortion.key_term", "value_term": "kvtheory.distortion.value_term"},
    mutants=[
        *(
            m
            for m in KEY_MUTANTS
            if m.name in ("1/d dropped", "a_i for a_i²", "‖v_i W_O‖ for ‖v_i W_O − o‖", "causality ignored")
        ),
        *(
            replace(m, name=f"value_term: {m.name}")
            for m in VALUE_MUTANTS
            if m.name in ("a_i for a_i²", "row norm of W_O without its square")
        ),
        Mutant("D_V left out", "value_term", rewritten(lambda p: np.zeros(len(p.q)))),
        Mutant("D_K left out", "key_term", rewritten(lambda p: np.zeros(len(p.q)))),
        *systematic.scales("key_term"),
        *systematic.scales("value_term"),
    ],
    figure="distortion-prediction",
)
def additivity(context: Context, *, key_term: Function, value_term: Function) -> Iterator[Evidence | Picture]:
    real = real_heads(context)
    comparisons = 3 * len(context.synthetic_kinds) + sum(r.layer.query_heads + 1 for r in real)
    level = 1 - context.alpha(comparisons)
    levels = np.sqrt(RUNGS)

    def compare(label: str, layer: Layer, chosen: NDArray[np.int64], draws: int, ran_on: str) -> list[Evidence]:
        def sampled() -> list[tuple[noise.Group, Float, Float, noise.Sample]]:
            rng = context.rng(f"joint noise {label}")
            found = []
            for kv in range(layer.kv_heads):
                group = noise.Group(layer, kv, chosen)
                keys, values = balanced(group, rng)
                found.append((group, keys, values, group.sample(keys, values, levels, draws, rng)))
            return found

        ratios = np.concatenate(
            [
                sample.ratios(stated_by(key_term, group, keys) + stated_by(value_term, group, values))
                for group, keys, values, sample in context.memo(label, sampled)
            ],
            axis=2,
        )
        remainders = np.sqrt(np.mean((ratios - 1) ** 2, axis=2))
        shown = {
            "mean_logit_variance": list(RUNGS),
            "mean_ratio": ratios.mean(axis=(0, 2)).tolist(),
            "rms_remainder": remainders.mean(axis=0).tolist(),
        }
        return [
            all_within(
                {f"head {h}": mean_interval(r, level) for h, r in enumerate(ratios[:, -1].T)},
                what=f"measured E‖do‖² / (D_K + D_V) at mean logit variance {RUNGS[-1]}, worst head: 1 within {100 * MARGIN:g} %",
                ran_on=ran_on,
                predicted=1.0,
                margin=MARGIN,
            ),
            statistical(
                what="slope of log |E‖do‖²/(D_K + D_V) − 1| against log of the noise: 2 within 5 % (root mean square over heads; each draw of the"
                " noise is used at all three sizes, and gives one slope)",
                ran_on=f"{ran_on}, mean logit variance {', '.join(map(str, RUNGS))}",
                interval=slope_interval(np.log(levels), np.log(remainders), level),
                predicted=2.0,
                margin=0.05,
                details=shown,
            ),
        ]

    draws = context.size(8, 48)
    for kind in context.synthetic_kinds:
        layer = medium(context, kind)
        yield from compare(
            kind,
            layer,
            noise.rows(layer, 8),
            draws,
            f"{kind}, {MEDIUM_SIZES}, seed {context.seed}, {draws} pairs of draws",
        )
    for r in real:
        yield from compare(r.label, r.layer, r.chosen, draws, r.ran_on(f"{draws} pairs of draws"))
    yield Picture("distortion-prediction", _joint_ladder(context, level))


def _joint_ladder(context: Context, level: float) -> dict[str, Any]:
    """E||do||^2 / (D_K + D_V) with keys and values noisy, on LADDER, for the gaussian kind."""

    def measure() -> dict[str, Any]:
        layer = medium(context, "gaussian")
        rng = context.rng("ladder")
        group = noise.Group(layer, 0, noise.rows(layer, 8))
        keys, values = balanced(group, rng)
        sample = group.sample(keys, values, np.sqrt(LADDER), context.size(24, 200), rng)
        ratios = sample.ratios(group.key_part(keys) + group.value_part(values)).mean(axis=2)
        bands = [mean_interval(r, level) for r in ratios.T]
        return {
            "curves": [
                {
                    "label": "gaussian, keys and values", "source": "synthetic", "mean_logit_variance": list(LADDER),
                    "ratio": [b.estimate for b in bands], "low": [b.low for b in bands], "high": [b.high for b in bands],
                }
            ]
        }  # fmt: skip

    return context.memo("ladder", measure)
