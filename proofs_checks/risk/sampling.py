"""C-T1: what random sampling costs, with and without replacement. Equalities, for the linear risk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, statistical
from proofs_checks.risk.heads import (
    EPS,
    SQUARE_BECAUSE,
    Compared,
    Float,
    One,
    dense,
    deviations,
    energies,
    factor,
    gram,
    groups,
    square_tolerance,
    synthetic,
    worst_equality,
)

_STATES = {
    "trace_bound": "kvtheory.risk.trace_bound",
    "spectrum": "kvtheory.risk.spectrum",
    "sample": "kvtheory.balancing.sample",
}


def _uneven(context: Context, one: One) -> Float:
    rng = context.rng(f"law {one.label}")
    return rng.dirichlet(np.full(one.n, 2.0)) * 0.9 + 0.1 / one.n


def _law_forgotten(true: Function) -> Function:
    return lambda q, k, v, weights=None, scale=None, kind="centred", rank=None: true(q, k, v, None, scale, kind, rank)


def _augmented(true: Function) -> Function:
    """The other profile: its trace counts the denominator's error too."""
    return lambda q, k, v, weights=None, scale=None, kind="centred", rank=None: true(
        q, k, v, weights, scale, "augmented", rank
    )


def _other_method(method: str) -> Any:
    return lambda true: lambda profiles, K, *_, seed=0, **more: true(profiles, K, method, seed=seed, **more)


def _equal_weights(true: Function) -> Function:
    """Repeated draws dropped instead of added up."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        index, _ = true(*args, **kwargs)
        return index, np.full(len(index), 1 / len(index))

    return wrong


def _gram(context: Context, one: One) -> Float:
    return context.memo(("gram", one.label), lambda: gram(one, np.full(one.n, 1 / one.n)))


def _monte_carlo(
    context: Context,
    sample: Function,
    method: str,
    budget: Any,
    predict: Any,
    heads: list[tuple[str, list[One]]],
    draws: int,
    margin: float,
) -> Iterator[Evidence]:
    """Linear risks of the sampler's own draws. They do not depend on the profiles, so the heads of a group share them."""
    for group, ones in heads:
        n = ones[0].n
        K = budget(n)
        grams = [_gram(context, one) for one in ones]
        x = factor(ones[0], grams[0])
        w = np.stack([dense(n, *sample(x, K, method, seed=context.seed + r)) for r in range(draws)])
        ratios = np.stack([np.einsum("ri,ri->r", w @ g, w) / predict(one, K) for one, g in zip(ones, grams)])
        means = ratios.mean(axis=1)
        worst = int(np.argmax(np.abs(means - 1)))
        yield statistical(
            what="mean over the heads of measured linear risk / predicted, draws of balancing.sample",
            ran_on=f"{group}; n = {n}, K = {K}, {draws} draws, {len(ones)} heads",
            interval=mean_interval(ratios.mean(axis=0), 1 - context.alpha(len(heads))), predicted=1.0, margin=margin,
            worst_case=f"{ones[worst].label}: mean ratio {means[worst]:.3f}",
            details={"mean ratio": {one.label: float(m) for one, m in zip(ones, means)}},
        )  # fmt: skip


@claim(
    id="risk/sampling-iid", paper="2607.01520", section="Section 4 (upper bounds); theory C-T1",
    statement="K independent draws from the cache, each with weight 1/K, have mean linear risk tr Σ / K exactly, with the centred "
    "profile (C-D1): the error of the output times the ratio of the denominators. The true risk is another matter: "
    "risk/retrieval-regime.",
    formula="E ‖∫ Γ_P dP̂‖² = tr Σ_{P,ν} / K,   tr Σ = E_ν Σᵢ (aᵢ²/pᵢ) ‖vᵢ − A_P‖²",
    expected=Verdict.HOLDS, functions=_STATES,
    mutants=[
        *systematic.scales("trace_bound"),
        *systematic.square_dropped("trace_bound"),
        *systematic.scales("spectrum", fields=("trace",)),
        Mutant("finite population factor where draws are independent", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, False)),
        Mutant("tr Σ / (K - 1)", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, replace) * K / (K - 1)),
        Mutant("P's probabilities forgotten", "spectrum", _law_forgotten),
        Mutant("augmented profile for the centred one", "spectrum", _augmented),
        Mutant("draws without replacement", "sample", _other_method("srs")),
        Mutant("repeated draws dropped", "sample", _equal_weights),
    ],
)  # fmt: skip
def sampling_iid(
    context: Context, *, trace_bound: Function, spectrum: Function, sample: Function
) -> Iterator[Evidence]:
    K, n = 3, 5
    draws = np.array(list(itertools.product(range(n), repeat=K)))
    counts = np.stack([np.bincount(draw, minlength=n) for draw in draws]) / K

    def enumerated(one: One) -> Compared:
        p = _uneven(context, one)

        def truth() -> float:
            return float(p[draws].prod(axis=1) @ energies(deviations(one, counts, p)))

        mean = context.memo(("enumerated", one.label), truth)
        return Compared(
            one, mean, trace_bound(spectrum(one.q, one.k, one.v, p, one.scale), K), square_tolerance(one, p, mean)
        )

    yield worst_equality(
        f"mean over all {n}^{K} draws against tr Σ / K, uneven P",
        "8 synthetic kinds",
        map(enumerated, synthetic(context, n, 6)),
        SQUARE_BECAUSE,
    )

    heads = groups(context, context.size(64, 242), context.size(8, 32))

    def second_moment(one: One) -> Compared:
        """E w w^T = diag(p)/K + (1 - 1/K) p p^T for w = counts / K of K draws from p, so E ||int Gamma dPhat||^2 = <G, E w w^T>."""
        K, p = one.n // 4, _uneven(context, one)

        def truth() -> float:
            g = gram(one, p)
            return float(p @ np.diag(g)) / K + (1 - 1 / K) * float(p @ g @ p)

        mean = context.memo(("second moment", one.label), truth)
        return Compared(
            one, mean, trace_bound(spectrum(one.q, one.k, one.v, p, one.scale), K), square_tolerance(one, p, mean)
        )

    for group, ones in heads:
        yield worst_equality(
            "exact second moment of K = n/4 draws against tr Σ / K, uneven P",
            group,
            map(second_moment, ones),
            SQUARE_BECAUSE,
        )
    yield from _monte_carlo(
        context, sample, "iid", lambda n: n, lambda one, K: trace_bound(spectrum(one.q, one.k, one.v, None, one.scale), K), heads,
        context.size(2000, 30000), context.size(0.25, 0.1),
    )  # fmt: skip


@claim(
    id="risk/sampling-without-replacement", paper="2607.01520", section="Section 4 (upper bounds); theory C-T1",
    statement="K of n tokens drawn without replacement, each with weight 1/K, have mean linear risk (tr Σ / K)(n − K)/(n − 1) exactly, "
    "with the centred profile (C-D1) and P uniform.",
    formula="E ‖∫ Γ_P dP̂‖² = (tr Σ_{P,ν} / K) (n − K)/(n − 1)",
    expected=Verdict.HOLDS, functions=_STATES,
    mutants=[
        *systematic.scales("trace_bound"),
        *systematic.square_dropped("trace_bound"),
        *systematic.scales("spectrum", fields=("trace",)),
        Mutant("no finite population factor", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, True)),
        Mutant("(n - K)/n", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, replace) * (s.n - 1) / s.n),
        Mutant("augmented profile for the centred one", "spectrum", _augmented),
        Mutant("draws with replacement", "sample", _other_method("iid")),
        Mutant("one token less", "sample", lambda true: lambda x, K, *a, **k: true(x, 3 * K // 4, *a, **k)),
    ],
)  # fmt: skip
def sampling_without_replacement(
    context: Context, *, trace_bound: Function, spectrum: Function, sample: Function
) -> Iterator[Evidence]:
    def predict(one: One, K: int) -> float:
        return float(trace_bound(spectrum(one.q, one.k, one.v, None, one.scale), K, replace=False))

    n = 7
    for K in (2, 5):
        subsets = np.array(list(itertools.combinations(range(n), K)))
        w = np.zeros((len(subsets), n))
        np.put_along_axis(w, subsets, 1 / K, axis=1)

        def enumerated(one: One, w: Float = w, K: int = K) -> Compared:
            p = np.full(n, 1 / n)
            mean = context.memo(("enumerated", one.label, K), lambda: float(energies(deviations(one, w, p)).mean()))
            return Compared(one, mean, predict(one, K), square_tolerance(one, p, mean))

        yield worst_equality(
            f"mean over all {len(w)} subsets of {K} of {n} tokens",
            "8 synthetic kinds",
            map(enumerated, synthetic(context, n, 6)),
            SQUARE_BECAUSE,
        )

    heads = groups(context, context.size(64, 242), context.size(8, 32))

    def second_moment(one: One) -> Compared:
        """E w_i^2 = 1/(nK), E w_i w_l = (K - 1)/(K n (n - 1)) for w = 1/K on a random subset of K."""
        n, K = one.n, one.n // 4
        p = np.full(n, 1 / n)

        def truth() -> float:
            g = gram(one, p)
            together = (K - 1) / (K * n * (n - 1))
            return float(np.trace(g) * (1 / (n * K) - together) + together * g.sum())

        mean = context.memo(("second moment", one.label), truth)
        return Compared(one, mean, predict(one, K), square_tolerance(one, p, mean))

    for group, ones in heads:
        yield worst_equality("exact second moment of K = n/4 tokens", group, map(second_moment, ones), SQUARE_BECAUSE)
    yield from _monte_carlo(context, sample, "srs", lambda n: n // 2, predict, heads, context.size(1000, 10000), 0.1)
    whole = synthetic(context, n, 6)[0]
    yield numerical(
        what="all tokens kept: no risk left", ran_on="gaussian, K = n = 7", observed=predict(whole, 7), predicted=0.0, tolerance=EPS,
        because="(n - K) is 0 in integers",
    )  # fmt: skip
