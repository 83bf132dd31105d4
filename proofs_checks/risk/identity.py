"""The error of a summary is the integral of the response profile, over the ratio of the denominators. An exact identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical
from proofs_checks.risk.heads import Float, One, groups, outputs, rounding


def _inverse_temperature(true: Function) -> Function:
    """The 1/sqrt(d) of the logits forgotten."""
    return lambda q, k, v, weights=None, scale=None, kind="centred": true(q, k, v, weights, 1.0, kind)


def _law_forgotten(true: Function) -> Function:
    """P taken as uniform."""
    return lambda q, k, v, weights=None, scale=None, kind="centred": true(q, k, v, None, scale, kind)


def _attention_for_density(true: Function) -> Function:
    """a_i for a_i / p_i."""

    def wrong(q: Any, k: Any, v: Any, weights: Any = None, scale: Any = None, kind: str = "centred") -> Float:
        p = np.full(len(k), 1 / len(k)) if weights is None else np.asarray(weights)
        return true(q, k, v, weights, scale, kind) * p[:, None, None]

    return wrong


def _mean_value(true: Function) -> Function:
    """v - int v dP for v - A_P(q): the plain mean for the attention output."""

    def wrong(q: Any, k: Any, v: Any, weights: Any = None, scale: Any = None, kind: str = "centred") -> Float:
        if kind == "augmented":
            return true(q, k, v, weights, scale, kind)
        p = np.full(len(k), 1 / len(k)) if weights is None else np.asarray(weights)
        shift = true(q, k, np.ones((len(k), 1)), weights, scale, "augmented")[..., :1] + 1  # b
        return shift * (v - p @ v)[:, None, :]

    return wrong


def _summaries(rng: np.random.Generator, n: int, count: int) -> Float:
    """Random summaries (count, n) of about n/4 tokens with uneven weights."""
    w = rng.exponential(size=(count, n)) * (rng.random((count, n)) < 0.25)
    w[:, 0] += 1e-3
    return w / w.sum(axis=1, keepdims=True)


@claim(
    id="risk/error-identity", paper="2607.01520", section="Section 3 (measure formalisation)",
    statement="Replacing a cache P by any weighted summary of its tokens moves the attention output by exactly the summary's mean "
    "response profile, divided by the ratio of the two softmax denominators. Under our reading of the profile: stated for "
    "the centred one, Γ(q) = (e_q(k)/Z_P(q)) (v − A_P(q)) with e_q(k) = exp(scale q·k), and in the form that it takes for the augmented one, "
    "Γ⁺(q) = (e_q(k)/Z_P(q)) (v, c) − (A_P(q), c).",
    formula="A_P̂(q) − A_P(q) = (Z_P/Z_P̂) ∫ Γ_P dP̂;  augmented: [∫ Γ⁺_v dP̂ − A_P ∫ Γ⁺_c dP̂ / c] / (1 + ∫ Γ⁺_c dP̂ / c)",
    expected=Verdict.HOLDS, functions={"profiles": "kvtheory.risk.response_profiles", "density": "kvtheory.risk.density"},
    mutants=[
        *systematic.scales("profiles"),
        *systematic.swapped("profiles", "k", "v"),
        Mutant("attention weight for density a/p", "profiles", _attention_for_density),
        Mutant("mean value for attention output", "profiles", _mean_value),
        Mutant("logit scale forgotten", "profiles", _inverse_temperature),
        Mutant("P's probabilities forgotten", "profiles", _law_forgotten),
        *systematic.scales("density"),
        Mutant("denominators taken as equal (linearised)", "density", lambda true: lambda *a, **k: np.ones_like(true(*a, **k))),
    ],
)  # fmt: skip
def error_identity(context: Context, *, profiles: Function, density: Function) -> Iterator[Evidence]:
    count = context.size(4, 32)

    def compare(one: One, kind: str) -> tuple[float, float, float]:
        """(largest gap between the sides, its rounding bound, largest error of a summary)."""
        rng = context.rng(f"summaries {one.label}")
        p = rng.dirichlet(np.full(one.n, 2.0)) * 0.9 + 0.1 / one.n
        w = _summaries(rng, one.n, count)
        o = outputs(one, p[None])[0]
        error = outputs(one, w) - o
        gamma = np.tensordot(w, profiles(one.q, one.k, one.v, p, one.scale, kind), axes=1)
        if kind == "centred":
            predicted = gamma / (w @ density(one.q, one.k, p, one.scale))[:, :, None]
        else:
            c = np.sqrt(p @ (one.v**2).sum(axis=1))
            mass = gamma[..., -1:] / c
            predicted = (gamma[..., :-1] - o * mass) / (1 + mass)
        # the augmented form subtracts o where the centred profile has done so already: its rounding is divided by Z_Phat/Z_P
        amplified = 1.0 if kind == "centred" else float((1 / (w @ density(one.q, one.k, p, one.scale))).max()) + 1
        return float(np.abs(predicted - error).max()), rounding(one) * amplified, float(np.abs(error).max())

    for kind in ("centred", "augmented"):
        for group, heads in groups(context, context.size(48, 192), context.size(8, 48)):
            found = [(one, *compare(one, kind)) for one in heads]
            one, gap, bound, error = max(found, key=lambda f: np.inf if np.isnan(f[1]) else f[1] / f[2])
            yield numerical(
                what=f"largest difference of the two sides, {kind} profile, at most its rounding; uneven P, summaries of n/4 tokens",
                ran_on=f"{group}; n = {one.n}, {len(one.q)} queries, {count} summaries each, worst of {len(heads)} heads",
                observed=gap, predicted=bound, relation="<=", tolerance=0.0,
                because="predicted is the rounding of logits, softmax sums and outputs, 8 V eps ((d + 2) L + n + 10)",
                worst_case=one.label, note=f"the errors themselves are up to {error:.2g}",
            )  # fmt: skip
