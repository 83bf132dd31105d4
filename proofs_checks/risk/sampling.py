"""What random sampling costs, with and without replacement. Equalities, for the linear risk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical, statistical
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


def _fewer(change: int) -> Any:
    """A sampler that takes K + change tokens."""
    return lambda true: lambda x, K, *a, **k: true(x, max(K + change, 1), *a, **k)


def _first_half(true: Function) -> Function:
    """The first half of the tokens gets 10% more weight."""

    def wrong(x: Any, K: int, *args: Any, **kwargs: Any) -> Any:
        index, weight = true(x, K, *args, **kwargs)
        weight = weight * np.where(index < len(x) // 2, 1.1, 1.0)
        return index, weight / weight.sum()

    return wrong


def _first_half_likelier(true: Function) -> Function:
    """A token drawn from the second half is moved to the first with probability 1/20, if it is not there yet: weights stay 1/K."""

    def wrong(x: Any, K: int, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
        index, weight = true(x, K, *args, seed=seed, **kwargs)
        half, rng = len(x) // 2, np.random.default_rng(seed)
        w = dense(len(x), index, weight)
        for i in index[index >= half]:
            if rng.random() < 0.05 and w[i - half] == 0:
                w[i - half], w[i] = w[i], 0.0
        return np.flatnonzero(w), w[w > 0]

    return wrong


def _never_first(true: Function) -> Function:
    """Token 0 is never drawn."""

    def wrong(x: Any, K: int, *args: Any, **kwargs: Any) -> Any:
        index, weight = true(x[1:], min(K, len(x) - 1), *args, **kwargs)
        return index + 1, weight

    return wrong


#: wrong samplers that both claims must tell from the true one
_WRONG_SAMPLERS = (
    Mutant("K - 1 tokens", "sample", _fewer(-1)),
    Mutant("K + 1 tokens", "sample", _fewer(1)),
    Mutant("a quarter of the budget unused", "sample", lambda true: lambda x, K, *a, **k: true(x, 3 * K // 4, *a, **k)),
    Mutant("first half of the tokens weighs 10% more", "sample", _first_half),
    Mutant("first half of the tokens drawn more often", "sample", _first_half_likelier),
    Mutant("token 0 never drawn", "sample", _never_first),
)


_NAMES = {"iid": "with replacement", "srs": "without replacement"}


class _Draws:
    """Draws of one sampler as weights (R, n), made as they are asked for: most wrong samplers are found out by the first few."""

    def __init__(self, context: Context, sample: Function, method: str, x: Float, K: int) -> None:
        self.n, self.K, self.method = len(x), K, method
        self._draw = lambda r: dense(len(x), *sample(x, K, method, seed=context.seed + r))
        self._rows: list[Float] = []

    def first(self, count: int) -> Float:
        self._rows += [self._draw(r) for r in range(len(self._rows), count)]
        return np.stack(self._rows[:count])

    def ran_on(self, count: int) -> str:
        return f"{count} draws of kvtheory.balancing.sample, {_NAMES.get(self.method, self.method)}, n = {self.n}, K = {self.K}"


#: the first draws, on which what holds of every draw is checked
_FEW = 100


def _law(context: Context, draws: _Draws, count: int, comparisons: int) -> Iterator[Evidence]:
    """P uniform: every draw has weights c/K with whole c of sum K, and every token the mean weight 1/n."""
    n, K = draws.n, draws.K
    w = draws.first(_FEW)
    counts = np.rint(w * K)
    yield numerical(
        what="largest distance of K times a token's weight from a whole number, but for rounding 0", ran_on=draws.ran_on(_FEW), observed=float(np.abs(w * K - counts).max()),
        predicted=4 * K * EPS, relation="<=", tolerance=0.0, because="a weight is c/K divided by a sum that is 1 within K eps",
    )  # fmt: skip
    totals = counts.sum(axis=1)
    yield exact(
        what="draws whose weights do not add up to K tokens", ran_on=draws.ran_on(_FEW), observed=int((totals != K).sum()), predicted=0,
    )  # fmt: skip
    if draws.method == "srs":
        kept = (w > 0).sum(axis=1)
        yield exact(
            what="draws that do not keep K different tokens", ran_on=draws.ran_on(_FEW), observed=int((kept != K).sum()), predicted=0,
        )  # fmt: skip
    w = draws.first(count)
    alpha = context.alpha(comparisons) / (n + 1)
    yield statistical(
        what="mean weight of the first half of the tokens, over 1/2: 1 within 3 %", ran_on=draws.ran_on(count),
        interval=mean_interval(2 * w[:, : n // 2].sum(axis=1), 1 - alpha), predicted=1.0, margin=0.03,
        note="a first half favoured by 10% is 4.8% too heavy",
    )  # fmt: skip
    intervals = [mean_interval(n * x, 1 - alpha) for x in w.T]
    worst = max(range(n), key=lambda i: max(intervals[i].high - 1, 1 - intervals[i].low))
    yield statistical(
        what="mean weight of a token over 1/n: 1 within 50 %, for the token whose interval reaches furthest", ran_on=draws.ran_on(count),
        interval=intervals[worst], predicted=1.0, margin=0.5, worst_case=f"token {worst}",
        note="half way to a token that is never drawn; what all the tokens of a half have in common is judged above, closer",
    )  # fmt: skip


def _monte_carlo(
    context: Context,
    sample: Function,
    method: str,
    predict: Any,
    heads: list[tuple[str, list[One]]],
    counts: tuple[int, int],
    margin: float,
    apart: str,
) -> Iterator[Evidence]:
    """The sampler's own draws of n/2 tokens: their law, and their linear risks. counts: how many draws for the one and the other.

    The draws do not depend on the profiles, so all heads of one n share them (and heads of a layer share keys): ratios are averaged
    over the heads within a draw, and only the draws are taken as independent.
    """
    by_size: dict[int, _Draws] = {}
    comparisons = len(heads) + len({ones[0].n for _, ones in heads})
    for group, ones in heads:
        n = ones[0].n
        K = n // 2
        grams = [_gram(context, one) for one in ones]
        if n not in by_size:
            x = context.memo(("factor", ones[0].label), lambda one=ones[0], g=grams[0]: factor(one, g))  # type: ignore[misc]
            by_size[n] = _Draws(context, sample, method, x, K)
            yield from _law(context, by_size[n], counts[0], comparisons)
        w = by_size[n].first(counts[1])
        ratios = np.stack([((w @ g) * w).sum(axis=1) / predict(one, K) for one, g in zip(ones, grams)])
        means = ratios.mean(axis=1)
        worst = int(np.argmax(np.abs(means - 1)))
        yield statistical(
            what=f"measured linear risk over the predicted one, mean of the heads, draws of kvtheory.balancing.sample: 1 within {100 * margin:g} %",
            ran_on=f"{group}; n = {n}, K = {K}, {counts[1]} draws, {len(ones)} heads",
            interval=mean_interval(ratios.mean(axis=0), 1 - context.alpha(comparisons)), predicted=1.0, margin=margin,
            worst_case=f"{ones[worst].label}: mean ratio {means[worst]:.3f}", note=apart,
            details={"mean ratio": {one.label: float(m) for one, m in zip(ones, means)}},
        )  # fmt: skip


@claim(
    id="risk/sampling-iid", paper="2607.01520", section="Section 4 (upper bounds), under our reading of the profile",
    statement="K independent draws from the cache, each with weight 1/K, have mean linear risk E ‖∫ Γ_P dP̂‖² = tr Σ / K exactly, with "
    "the centred profile Γ(q) = (e_q(k)/Z_P(q)) (v − A_P(q)) and Σ = E_P Γ⊗Γ. Its ∫ Γ_P dP̂ is the error of the output times the ratio "
    "Z_P̂/Z_P of the softmax denominators; the true risk is another matter: risk/retrieval-regime.",
    formula="E ‖∫ Γ_P dP̂‖² = tr Σ_{P,ν} / K,   tr Σ = E_ν Σᵢ (aᵢ²/pᵢ) ‖vᵢ − A_P‖²",
    expected=Verdict.HOLDS, functions=_STATES,
    mutants=[
        *systematic.scales("trace_bound"),
        *systematic.square_dropped("trace_bound"),
        *systematic.scales("spectrum", fields=("trace",)),
        Mutant("finite population factor where draws are independent", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, False)),
        Mutant("tr Σ / (K − 1)", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, replace) * K / (K - 1)),
        Mutant("P's probabilities forgotten", "spectrum", _law_forgotten),
        Mutant("augmented profile for the centred one", "spectrum", _augmented),
        Mutant("draws without replacement", "sample", _other_method("srs")),
        Mutant("repeated draws dropped", "sample", _equal_weights),
        *_WRONG_SAMPLERS,
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
        f"linear risk, mean over all {n}^{K} draws = tr Σ / K, uneven P",
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
            "linear risk of K = n/4 draws, from the exact second moment of their weights, = tr Σ / K, uneven P",
            group,
            map(second_moment, ones),
            SQUARE_BECAUSE,
        )
    # What must be told apart, at K = n/2: sampling without replacement has (n - K)/(n - 1) = .51 of the risk, and dropping repeats
    # leaves n (1 - e^(-1/2)) equally weighted tokens, (K/n)/(e^(1/2) - 1) = .77 of it. The margin is half of the lesser distance.
    yield from _monte_carlo(
        context, sample, "iid", lambda one, K: trace_bound(spectrum(one.q, one.k, one.v, None, one.scale), K), heads,
        context.size((2000, 5000), (10000, 30000)), 0.11,
        "to be told from sampling without replacement (.51) and from repeats dropped (.77): half way to the nearer",
    )  # fmt: skip


@claim(
    id="risk/sampling-without-replacement", paper="2607.01520", section="Section 4 (upper bounds), under our reading of the profile",
    statement="K of n tokens drawn without replacement, each with weight 1/K, have mean linear risk (tr Σ / K)(n − K)/(n − 1) exactly, "
    "with the centred profile Γ(q) = (e_q(k)/Z_P(q)) (v − A_P(q)), Σ = E_P Γ⊗Γ and P uniform.",
    formula="E ‖∫ Γ_P dP̂‖² = (tr Σ_{P,ν} / K) (n − K)/(n − 1)",
    expected=Verdict.HOLDS, functions=_STATES,
    mutants=[
        *systematic.scales("trace_bound"),
        *systematic.square_dropped("trace_bound"),
        *systematic.scales("spectrum", fields=("trace",)),
        Mutant("no finite population factor", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, True)),
        Mutant("(n − K)/n", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, replace) * (s.n - 1) / s.n),
        Mutant("augmented profile for the centred one", "spectrum", _augmented),
        Mutant("draws with replacement", "sample", _other_method("iid")),
        *_WRONG_SAMPLERS,
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
            f"linear risk, mean over all {len(w)} subsets of {K} of {n} tokens, = (tr Σ / K)(n − K)/(n − 1)",
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
        yield worst_equality(
            "linear risk of K = n/4 tokens, from the exact second moment of their weights, = (tr Σ / K)(n − K)/(n − 1)",
            group,
            map(second_moment, ones),
            SQUARE_BECAUSE,
        )
    yield from _monte_carlo(
        context, sample, "srs", predict, heads, context.size((1500, 1500), (10000, 10000)), 0.1,
        "to be told from draws with replacement (1.97); one token more or less is told above, exactly",
    )  # fmt: skip
    whole = synthetic(context, n, 6)[0]
    yield numerical(
        what="predicted linear risk where all tokens are kept", ran_on="gaussian, K = n = 7", observed=predict(whole, 7), predicted=0.0, tolerance=EPS,
        because="(n - K) is 0 in integers",
    )  # fmt: skip
