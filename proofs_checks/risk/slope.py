"""The rate of sampling, and what balance makes of it: slopes of the risk in K, and the ratio of the two by tail over trace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from kvtheory import risk
from kvtheory.statistics import mean_interval, slope_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, statistical
from proofs_checks.risk.heads import Float, One, dense, energies, factor, gram, groups, outputs


def _budgets(n: int) -> list[int]:
    """Doubling budgets up to 3n/4."""
    found = [4]
    while 2 * found[-1] <= 3 * n // 4:
        found.append(2 * found[-1])
    return found


def _gram(context: Context, one: One) -> Float:
    return context.memo(("gram", one.label), partial(gram, one, np.full(one.n, 1 / one.n)))


def _draws(sample: Function, n: int, budgets: list[int], draws: int) -> Float:
    """Weights (draws, budgets, n)."""
    zero = np.zeros((n, 1))
    return np.stack([[dense(n, *sample(zero, K, "srs", seed=r)) for K in budgets] for r in range(draws)])


def _other(method: str) -> Any:
    return lambda true: (
        lambda x, K, _, m=0, seed=0, **more: true(x, K, method, m if method == "spectral" else 0, seed, **more)
    )


def _root(true: Function) -> Function:
    """A sampler whose error falls as K^(-1/2): K^2/n in place of K tokens."""
    return lambda x, K, method, m=0, seed=0, **more: true(
        x, max(2 * m + 2, int(K * K / len(x)) or 1), method, m, seed, **more
    )


@claim(
    id="risk/sampling-rate", paper="2607.01520", section="Section 4 (rates in K), under our reading; linear risk of the centred profile, the true one reported",
    statement="The mean linear risk of random sampling without replacement falls as 1/K, once its finite population factor (n − K)/(n − 1) is divided out: slope −1 in log-log. "
    "The spectral walk is below it by 2 tail_m K (n − 1) (1 − (K − 2m)/n) / (tr Σ (K − 2m)(n − K)) at most, the proved ratio of tail to trace.",
    formula="d log(E‖∫ Γ dP̂_srs‖² (n − 1)/(n − K)) / d log K = −1;   E‖∫ Γ dP̂_walk‖² / E‖∫ Γ dP̂_srs‖² ≤ 2 (tail_m/tr Σ) · K/(K − 2m) · (n − 1)(n − K + 2m)/(n (n − K))",
    expected=Verdict.HOLDS,
    functions={"sample": "kvtheory.balancing.sample", "trace_bound": "kvtheory.risk.trace_bound", "spectral_bound": "kvtheory.risk.spectral_bound"},
    mutants=[
        Mutant("draws with replacement", "sample", _other("iid")),
        Mutant("K²/n tokens", "sample", _root),
        Mutant("half of the budget", "sample", lambda true: lambda x, K, method, m=0, seed=0, **more: true(x, K if method == "srs" else max(2 * m + 1, K // 4), method, m, seed, **more) if method == "srs" else true(x, K, "srs", 0, seed)),
        Mutant("no finite population factor", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, True)),
        Mutant("factor 1 − K/n doubled", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, replace) * (s.n - K) / s.n),
        *systematic.square_dropped("trace_bound"),
        Mutant("a tenth of the bound", "spectral_bound", lambda true: lambda s, K, m=None: 0.1 * true(s, K, m)),
        Mutant("tail of m + K/3", "spectral_bound", lambda true: lambda s, K, m=None: 2 * s.tail(m + K // 3) / (K - 2 * m)),
    ],
)  # fmt: skip
def sampling_rate(
    context: Context, *, sample: Function, trace_bound: Function, spectral_bound: Function
) -> Iterator[Evidence]:
    heads = groups(context, context.size(48, 242), context.size(8, 32))
    comparisons = 2 * len(heads)
    for group, ones in heads:
        n = ones[0].n
        budgets, draws = _budgets(n), context.size(2500, 6000)
        grams = [_gram(context, one) for one in ones]
        # draws do not depend on the profiles, so one n has one set; kept for other mutants, never across samplers: the sampler is in the key
        w = context.memo(("draws", n, draws, sample), partial(_draws, sample, n, budgets, draws))
        predicted = np.array(
            [
                [
                    trace_bound(
                        risk.Spectrum(float(np.trace(g)) / n, np.zeros(0), n, 0.0, complete=False), K, replace=False
                    )
                    for K in budgets
                ]
                for g in grams
            ]
        )
        # each draw's risk over tr Sigma, without the factor that the function predicts for it: 1/K in the mean
        over = np.stack([np.einsum("rki,ij,rkj->rk", w, g, w, optimize=True) / p for g, p in zip(grams, predicted)])
        mean = over.mean(axis=0)
        # 20 batches: the logarithm of a batch's mean is near that of the mean
        batches = mean.reshape(20, -1, len(budgets)).mean(axis=1)
        slopes = slope_interval(np.log(budgets), np.log(batches) - np.log(budgets), 1 - context.alpha(comparisons))
        yield statistical(
            what="slope of log(linear risk × tr Σ/K over its predicted mean) against log K: −1 within 15 %", ran_on=f"{group}, {len(ones)} heads, n = {n}, K = {budgets[0]}..{budgets[-1]}, {draws} draws each",
            interval=slopes, predicted=-1.0, margin=0.15, note="half way to draws with replacement, or no factor (n − K)/(n − 1), which bend it by .3 and more",
        )  # fmt: skip
        # the same slope of the true risk, reported
        one = ones[0]
        few = w[: context.size(60, 400)]
        truth = outputs(one, np.full((1, n), 1 / n))
        true = np.stack([energies(outputs(one, few[:, i]) - truth) for i in range(len(budgets))], axis=1).mean(axis=0)
        finite = np.array([(n - 1) / (n - K) for K in budgets])
        slope = float(np.polyfit(np.log(budgets), np.log(true * finite), 1)[0])
        yield numerical(what="slope of the true risk, finite population factor divided out, = −1 within 25 %", ran_on=f"{one.label}, {len(few)} draws", observed=slope, predicted=-1.0, tolerance=0.25,
                        because="a mean of few draws, reported only: softmax renormalises", role="assumption")  # fmt: skip
    for group, ones in heads:
        n = ones[0].n
        K, seeds = n // 2, context.size(10, 30)
        m = K // 6
        ratios = []
        some = ones[:: context.size(2, 1)]
        for one in some:
            g, x = _gram(context, one), context.memo(("factor", one.label), partial(factor, one, _gram(context, one)))
            s = context.memo(("spectrum", one.label), partial(risk.spectrum, one.q, one.k, one.v, None, one.scale))
            w = np.stack([dense(n, *sample(x, K, "spectral", m, seed=r)) for r in range(seeds)])
            random = trace_bound(s, K, replace=False)
            promised = spectral_bound(s, K, m) * (1 - (K - 2 * m) / n) / random
            ratios.append(np.einsum("ri,ij,rj->r", w, g, w, optimize=True) / random / promised)
        means = {one.label: float(r.mean()) for one, r in zip(some, ratios)}
        worst = max(means, key=lambda label: means[label])
        yield statistical(
            what="(walk over random sampling, mean linear risk) over the proved ratio of tail to trace, mean of the heads, ≤ 1", ran_on=f"{group}; n = {n}, K = n/2, m = {m}, {seeds} walks a head",
            interval=mean_interval(np.mean(ratios, axis=0), 1 - context.alpha(comparisons)), predicted=1.0, relation="<=", worst_case=f"{worst}: {means[worst]:.3f}",
            details={"over the proved ratio": means}, tightness=max(means.values()),
        )  # fmt: skip
