"""Noisy logits beside exact ones: how much attention changes sides, and which sign the correction has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.special import expit, logit

from kvtheory import attention
from kvtheory.quantization import Gaussian
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, search, statistical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding import noise
from proofs_checks.transform_coding.parts import SINKS, Float, real_kv_heads
from proofs_checks.transform_coding.quantiser_noise import code_of, dithered

#: deviations of the noisy logits
DEVIATIONS = (0.3, 0.6, 1.0, 1.5)
#: channels and coded tokens of a made-up cache, exact tokens besides, and their mass where the coded keys are exact too
CHANNELS, TOKENS, MASS = 64, 2048, 0.3
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(60)


def _signed(by: Callable[[Float], Float]) -> Callable[[Function], Function]:
    return lambda true: (
        lambda logit_variance, noise="dither": (
            (1 if noise == "centroid" else -1) * by(np.asarray(logit_variance, dtype=float))
        )
    )


def _mass(by: Callable[[Float, Float], Float]) -> Callable[[Function], Function]:
    """exact_mass from the mass and the exponent +-s^2 of its noise."""
    return lambda true: (
        lambda mass, logit_variance, noise="dither": by(
            np.asarray(mass, dtype=float), (1 if noise == "dither" else -1) * np.asarray(logit_variance, dtype=float)
        )
    )


MASS_MUTANTS = [
    Mutant("no bias", "exact_mass", _mass(lambda m, s2: m + 0 * s2)),
    Mutant("e^{s²} for e^{s²/2}", "exact_mass", _mass(lambda m, s2: expit(logit(m) - s2))),
    Mutant("e^{s²/2} for the exact tokens", "exact_mass", _mass(lambda m, s2: expit(logit(m) + s2 / 2))),
    Mutant("m e^{−s²/2}, not divided by the sum", "exact_mass", _mass(lambda m, s2: m * np.exp(-s2 / 2))),
    Mutant("dither's formula for both", "exact_mass", _mass(lambda m, s2: expit(logit(m) - np.abs(s2) / 2))),
    *systematic.scales("exact_mass"),
]
CORRECTION_MUTANTS = [
    Mutant("s² for s²/2", "logit_correction", _signed(lambda s2: s2)),
    Mutant("s/2 for s²/2", "logit_correction", _signed(lambda s2: np.sqrt(s2) / 2)),
    Mutant(
        "subtracted whatever the quantiser",
        "logit_correction",
        lambda true: lambda logit_variance, noise="dither": -np.asarray(logit_variance) / 2,
    ),
    Mutant(
        "added whatever the quantiser",
        "logit_correction",
        lambda true: lambda logit_variance, noise="dither": np.asarray(logit_variance) / 2,
    ),
    Mutant("nothing", "logit_correction", _signed(lambda s2: 0 * s2)),
]
VARIANCE_MUTANTS = [
    Mutant("1/d dropped", "logit_variance", lambda true: lambda q, covariance, scale=None: true(q, covariance, 1.0)),
    Mutant(
        "diagonal only",
        "logit_variance",
        lambda true: lambda q, covariance, scale=None: true(q, np.diag(np.diag(covariance)), scale),
    ),
    *systematic.scales("logit_variance"),
    *systematic.square_dropped("logit_variance"),
]


@claim(
    id="transform-coding/noisy-mass",
    paper=OWN,
    section="the Jensen bias of noisy logits, derived here; compare arXiv 2605.26266",
    statement="Beside tokens whose keys are noisy, exact tokens lose attention if the noise is independent of the key (dither), and gain it if the"
    " stored key is a centroid. Adding −s²/2 to the noisy logits for the one, +s²/2 for the other, puts it right.",
    formula="E m' ≥ m/(m + (1 − m) e^{s²/2}) (dither), with e^{−s²/2} for centroids; equality for many tokens; s² = qᵀΣ_ε q/d",
    assumptions=("normal logit noise, independent over tokens", "many noisy tokens, none with most of the attention (equality)"),
    expected=Verdict.HOLDS_UNDER,
    functions={
        "exact_mass": "kvtheory.distortion.exact_mass", "logit_correction": "kvtheory.distortion.logit_correction",
        "logit_variance": "kvtheory.distortion.logit_variance",
    },
    mutants=[*MASS_MUTANTS, *CORRECTION_MUTANTS, *VARIANCE_MUTANTS],
)  # fmt: skip
def noisy_mass(
    context: Context, *, exact_mass: Function, logit_correction: Function, logit_variance: Function
) -> Iterator[Evidence]:
    rng = context.rng("covariance")
    root, q = rng.standard_normal((6, 6)), rng.standard_normal((3, 6))
    covariance = root @ root.T
    by_columns = ((q @ root) ** 2).sum(axis=1) / 6
    found = np.asarray(logit_variance(q, covariance))
    far = int(np.argmax(np.abs(found / by_columns - 1)))
    yield numerical(
        what="s² = sum of squares of q times a root of Σ_ε, over d, worst query", ran_on=f"d=6, noise correlated over channels, seed {context.seed}",
        observed=found[far], predicted=by_columns[far], tolerance=1e-13, because="sums of 36 products",
    )  # fmt: skip
    # one exact and one noisy token, by quadrature: Jensen's direction, and what is left of it
    worst, tries = np.inf, 0
    for m in (0.02, 0.2, 0.5, 0.9):
        for s in DEVIATIONS:
            mean = float((_WEIGHTS / np.sqrt(2 * np.pi)) @ expit(logit(m) - s * _NODES))
            worst, tries = min(worst, mean / float(exact_mass(m, s**2))), tries + 1
    yield search(
        what="E m' of one exact token beside one noisy one over m/(m + (1 − m) e^{s²/2}), least: at least 1", ran_on="m from .02 to .9, s from .3 to 1.5; quadrature",
        worst=worst, bound=1 - 1e-9, relation=">=", tries=tries, optimiser="grid", note="1/(M + N) is convex in N",
    )  # fmt: skip

    draws = context.size(60, 600)
    real = real_kv_heads(context)
    level = 1 - context.alpha(2 * len(DEVIATIONS) + 4 + 2 * bool(real))
    for s in DEVIATIONS:

        def masses(shift: float = 0.0, s: float = s) -> Float:
            noise_ = context.memo(
                ("logits", s), lambda: s * context.rng(f"logits {s}").standard_normal((draws, TOKENS))
            )
            z = np.concatenate(
                [np.full((draws, SINKS), np.log(MASS / SINKS)), np.log((1 - MASS) / TOKENS) + noise_ + shift], axis=1
            )
            return attention.softmax(z)[:, :SINKS].sum(axis=1)

        stated = float(exact_mass(MASS, s**2))
        # a fifth of what the noise moves, by the formula written out here
        fifth = 0.2 * (1 - 1 / (MASS + (1 - MASS) * np.exp(s**2 / 2)))
        yield statistical(
            what=f"E m' over m/(m + (1 − m) e^{{s²/2}}) = {stated:.4f}: 1 within a fifth of what the noise moves, {fifth:.1%}",
            ran_on=f"{SINKS} exact tokens of mass {MASS}, {TOKENS} noisy ones, s = {s}, {draws} draws, seed {context.seed}", interval=mean_interval(masses() / stated, level),
            predicted=1.0, margin=fifth,
        )  # fmt: skip
        yield statistical(
            what=f"E m' over m with the correction for dither added to the noisy logits: 1 within {fifth:.1%}",
            ran_on=f"{SINKS} exact tokens of mass {MASS}, {TOKENS} noisy ones, s = {s}, {draws} draws, seed {context.seed}",
            interval=mean_interval(masses(float(logit_correction(s**2, "dither"))) / MASS, level), predicted=1.0, margin=fifth,
        )  # fmt: skip

    coded = context.memo("coded", partial(_coded, context, context.size(60, 400)))
    for kind in ("dither", "centroid"):
        at = coded[kind]
        s2 = np.asarray(logit_variance(at["q"], at["error"] * np.eye(CHANNELS)))
        masses_stated = np.asarray(exact_mass(at["true"], s2, kind))
        yield statistical(
            what=f"mass of the exact tokens beside 2-bit keys ({'subtractive dither' if kind == 'dither' else 'Lloyd-Max'}), over the stated: 1 within 3 %",
            ran_on=f"{SINKS} exact and {TOKENS} coded tokens, {CHANNELS} normal channels, s² = {s2.mean():.3f}, {len(s2)} caches, seed {context.seed}",
            interval=mean_interval(at["held"] / masses_stated, level), predicted=1.0, margin=0.03,
            note=f"true {at['true'].mean():.4f}, held {at['held'].mean():.4f}",
        )  # fmt: skip
        shift = np.asarray(logit_correction(s2, kind))
        put_right = expit(logit(at["held"]) - shift)
        yield statistical(
            what=f"the same with the correction of its kind, over the true mass: 1 within 3 % ({'−' if kind == 'dither' else '+'}s²/2)",
            ran_on=f"{SINKS} exact and {TOKENS} coded tokens, {CHANNELS} normal channels, s² = {s2.mean():.3f}, {len(s2)} caches, seed {context.seed}",
            interval=mean_interval(put_right / at["true"], level), predicted=1.0, margin=0.03, note=f"corrected {put_right.mean():.4f}",
        )  # fmt: skip
    if real:
        drawn = context.memo(
            "real",
            lambda: [
                _sinks(
                    context, s, [h for head in real for h in _heads(head, context.size(12, 48))], context.size(24, 200)
                )
                for s in (0.5, 1.0)
            ],
        )
        for s, (true, noisy, corrected) in zip((0.5, 1.0), drawn):
            stated = float(np.asarray(exact_mass(true, s**2)).sum())
            yield statistical(
                what=f"summed mass of the first {SINKS} tokens, kept exact beside noisy logits of deviation {s}, over the stated: at least 1, less 1 % for the draws",
                ran_on=f"{len(true)} queries of {sum(len(h.heads) for h in real)} real heads, {len(noisy)} draws", interval=mean_interval(noisy / stated, level),
                predicted=1.0, relation=">=", margin=0.01,
                note=f"true {true.mean():.4f}, stated {stated / len(true):.4f}, as drawn {noisy.mean() / len(true):.4f}; with −s²/2 {corrected.mean() / len(true):.4f}: sharp heads"
                " leave a Jensen rest",
            )  # fmt: skip


def _heads(head: Any, count: int) -> list[Any]:
    return [noise.at_rows(head.layer.head(h), noise.rows(head.layer, count)) for h in head.heads]


def _sinks(context: Context, s: float, heads: list[Any], draws: int) -> tuple[Float, Float, Float]:
    """(mass of the first tokens of every query, its sum over queries with noisy logits (draws,), the same corrected)."""
    rng = context.rng(f"sinks {s}")
    true, noisy, corrected = [], np.zeros(draws), np.zeros(draws)
    for h in heads:
        z = attention.logits(h.q, h.k, h.scale, visible=h.visible)
        late = np.arange(z.shape[1]) >= SINKS
        true.append(np.minimum(attention.softmax(z)[:, :SINKS].sum(axis=1), 1.0))
        for j in range(draws):
            held = z + late * s * rng.standard_normal(z.shape)
            noisy[j] += attention.softmax(held)[:, :SINKS].sum()
            corrected[j] += attention.softmax(held - late * s**2 / 2)[:, :SINKS].sum()
    return np.concatenate(true), noisy, corrected


def _coded(context: Context, caches: int) -> dict[str, dict[str, Any]]:
    """2-bit keys by dither and by centroids: queries, true and held mass of the exact tokens, each (caches,); and the error's variance."""
    rng = context.rng("coded")
    code = code_of(2)
    error = code.distortion(Gaussian())
    found: dict[str, dict[str, Any]] = {
        k: {"q": [], "true": [], "held": [], "error": error} for k in ("dither", "centroid")
    }
    for _ in range(caches):
        k, q = rng.standard_normal((TOKENS, CHANNELS)), rng.standard_normal(CHANNELS)
        z = k @ q / np.sqrt(CHANNELS)
        exact = np.log(np.exp(z).sum()) + logit(MASS)
        for kind in found:
            e = dithered(rng, k, np.sqrt(error)) if kind == "dither" else code.decode(code.encode(k)) - k
            held = np.log(np.exp(z + e @ q / np.sqrt(CHANNELS)).sum())
            found[kind]["q"].append(q)
            found[kind]["true"].append(MASS)
            found[kind]["held"].append(expit(exact - held))
    return {kind: {name: x if name == "error" else np.array(x) for name, x in at.items()} for kind, at in found.items()}


@claim(
    id="transform-coding/jensen-sign",
    paper=OWN,
    section="the usual correction of noisy logits, read for every quantiser; compare arXiv 2605.26266",
    statement="Subtracting s²/2 from the logits of quantised keys restores the attention of exact tokens, whatever the quantiser.",
    formula="z' = q·k̂/√d − s²/2",
    expected=Verdict.FAILS,
    functions={"logit_correction": "kvtheory.distortion.logit_correction", "logit_variance": "kvtheory.distortion.logit_variance"},
    mutants=[m for m in (*CORRECTION_MUTANTS, *VARIANCE_MUTANTS) if "subtracted" not in m.name and "diagonal" not in m.name],
    correction="transform-coding/noisy-mass",
)  # fmt: skip
def jensen_sign(context: Context, *, logit_correction: Function, logit_variance: Function) -> Iterator[Evidence]:
    # a key of mean 0 and variance 1 stored as 0: the shortest centroid code. E e^z = e^{s²/2}, the stored token weighs e^0
    s2 = float(np.asarray(logit_variance(np.array([[1.0]]), np.eye(1), 0.8))[0])
    where = "keys N(0, 1) in one channel, q = 1, scale 0.8, stored as their mean 0 (no bits)"
    yield numerical(
        role="control", what="s² = 0.64", ran_on=where, observed=s2, predicted=0.64, tolerance=1e-13, because="two products",
    )  # fmt: skip
    weight = float((_WEIGHTS / np.sqrt(2 * np.pi)) @ np.exp(0.8 * _NODES))
    shift = {kind: float(logit_correction(s2, kind)) for kind in ("dither", "centroid")}
    yield numerical(
        role="control", what="mean weight E e^z of such a token, by quadrature = e^{0 + correction for centroids}", ran_on=where, observed=np.exp(shift["centroid"]),
        predicted=weight, tolerance=1e-10, because="60 Hermite nodes",
    )  # fmt: skip
    yield numerical(
        role="control", what="mean weight E e^{z + ε − s²/2} of independent noise over e^z", ran_on="ε N(0, .64)", observed=np.exp(shift["dither"]) * weight, predicted=1.0,
        tolerance=1e-10, because="60 Hermite nodes",
    )  # fmt: skip
    yield numerical(
        what="weight of the stored token with s²/2 subtracted = its mean weight", ran_on=f"smallest counterexample: {where}", observed=np.exp(shift["dither"]), predicted=weight,
        tolerance=1e-9, because="60 Hermite nodes", note="the stored token weighs too little already; subtracting makes it twice as wrong in the logarithm",
    )  # fmt: skip
    level = 1 - context.alpha(2)
    coded = context.memo("coded", partial(_coded, context, context.size(60, 400)))
    for kind, role in (("dither", "control"), ("centroid", "statement")):
        at = coded[kind]
        s2s = np.asarray(logit_variance(at["q"], at["error"] * np.eye(CHANNELS)))
        yield statistical(
            role=role,  # type: ignore[arg-type]
            what=f"mass of exact tokens beside 2-bit keys ({'subtractive dither' if kind == 'dither' else 'Lloyd-Max'}) with s²/2 subtracted, over the true mass: 1 within 3 %",
            ran_on=f"{SINKS} exact and {TOKENS} coded tokens, {CHANNELS} normal channels, {len(s2s)} caches, seed {context.seed}",
            interval=mean_interval(expit(logit(at["held"]) - np.asarray(logit_correction(s2s, "dither"))) / at["true"], level), predicted=1.0, margin=0.03,
        )  # fmt: skip
