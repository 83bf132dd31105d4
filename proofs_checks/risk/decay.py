"""How fast the spectrum of Sigma decays: what a summary of a head's own tokens could gain, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvtheory import risk
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, numerical
from proofs_checks.risk.heads import (
    SQUARE_BECAUSE,
    Compared,
    One,
    gram,
    groups,
    named,
    of_layer,
    square_tolerance,
    worst_equality,
)


def _ascending(true: Function) -> Function:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        s = true(*args, **kwargs)
        return replace(s, eigenvalues=s.eigenvalues[::-1])

    return wrong


def _eigenvalues(context: Context, one: One) -> Any:
    return context.memo(
        ("eigenvalues", one.label, one.n),
        lambda: np.linalg.eigvalsh(gram(one, np.full(one.n, 1 / one.n)) / one.n).clip(0)[::-1],
    )


@claim(
    id="risk/spectral-decay", paper="2607.01520", section="Section 4 and experiments (fast spectral decay), under our reading; centred profile",
    statement="Fast spectral decay: on every head of the embedded cache the query-aware rate tail_{K/3}(Σ)/K is less than half of the query-agnostic tr Σ/K at K = n/4, that is, n/12 directions hold more than "
    "half of tr Σ; while a search instance, of n directions alike, keeps 1 − m/(n − 1) of its trace in the tail, and there the two rates are one. Heads differ by orders of magnitude; which, is reported, and of all heads of two models by benchmarks/spectra.py.",
    formula="tail_{n/12}(Σ) < tr Σ / 2;   tail_m = tr Σ (1 − m/(n − 1)) on n directions alike;   effective rank (tr Σ)²/Σ λ²",
    expected=Verdict.HOLDS,
    functions={"spectrum": "kvtheory.risk.spectrum", "effective_rank": "kvtheory.risk.effective_rank", "paper_bound": "kvtheory.risk.paper_bound"},
    mutants=[
        *systematic.scales("spectrum", fields=("eigenvalues",)), *systematic.square_dropped("spectrum", fields=("eigenvalues",)),
        Mutant("smallest eigenvalues first", "spectrum", _ascending),
        Mutant("augmented profile for the centred one", "spectrum", lambda true: lambda q, k, v, weights=None, scale=None, kind="centred", rank=None: true(q, k, v, weights, scale, "augmented", rank)),
        *systematic.scales("effective_rank"), *systematic.square_dropped("effective_rank"),
        *systematic.scales("paper_bound"),
        Mutant("tail beyond K", "paper_bound", lambda true: lambda s, K: s.tail(K) / K),
    ],
    figure="head-spectra",
)  # fmt: skip
def spectral_decay(
    context: Context, *, spectrum: Function, effective_rank: Function, paper_bound: Function
) -> Iterator[Evidence | Picture]:
    for n in (13, 48):
        one = named(f"simplex of {n} values", risk.flat_cache(np.eye(n)))
        s = spectrum(one.q, one.k, one.v, None, one.scale)
        for m in (1, n // 2):
            yield numerical(what=f"share of the tail after {m} of {n - 1} directions alike = 1 − m/(n − 1)", ran_on=one.label, observed=s.tail(m) / s.trace, predicted=1 - m / (n - 1),
                            tolerance=1e-12 * n, because="eigenvalues of a Gram matrix of size n")  # fmt: skip
        yield numerical(
            what="effective rank = n − 1",
            ran_on=one.label,
            observed=effective_rank(s),
            predicted=n - 1,
            tolerance=1e-12 * n,
            because="the same",
        )
        K = 3 * (n // 4)
        yield numerical(what="query-aware rate over tr Σ/K = 1 − (K/3)/(n − 1)", ran_on=f"{one.label}, K = {K}", observed=paper_bound(s, K) * K / s.trace, predicted=1 - (K // 3) / (n - 1),
                        tolerance=1e-12 * n, because="the same")  # fmt: skip
    for group, ones in groups(context, context.size(48, 242), context.size(8, 32)):
        tails, ranks = [], []
        for one in ones:
            values, s = _eigenvalues(context, one), spectrum(one.q, one.k, one.v, None, one.scale)
            m, total = one.n // 12, float(values.sum())
            room = one.n * square_tolerance(one, np.full(one.n, 1 / one.n), total, float(values[m:].sum()))
            tails.append(Compared(one, s.tail(m), float(values[m:].sum()), room))
            room = one.n * square_tolerance(one, np.full(one.n, 1 / one.n), total)
            ranks.append(Compared(one, effective_rank(s), total**2 / float((values**2).sum()), 4 * room))
        yield worst_equality(
            "tail_{n/12} by the function = from the Gram matrix that attention gives",
            group,
            tails,
            SQUARE_BECAUSE,
            role="control",
        )
        yield worst_equality(
            "effective rank by the function = from the Gram matrix that attention gives",
            group,
            ranks,
            SQUARE_BECAUSE,
            role="control",
        )
    rows = []
    for label, layer in context.real():
        shares, ranks_of = {}, {}
        for one in of_layer(label, layer, 242, context.size(24, 96)):
            s = spectrum(one.q, one.k, one.v, None, one.scale)
            K = one.n // 4
            shares[one.label] = paper_bound(s, K) * K / s.trace
            ranks_of[one.label] = effective_rank(s)
            rows.append(
                {
                    "head": one.label,
                    "n": one.n,
                    "trace": s.trace,
                    "tail": shares[one.label],
                    "effective_rank": ranks_of[one.label],
                    "eigenvalue_share": (s.eigenvalues / s.trace)[:64].tolist(),
                }
            )
        worst = max(shares, key=lambda h: shares[h])
        yield numerical(what="tail_{K/3}/tr Σ at K = n/4, largest of the heads, < 1/2", ran_on=f"{label}, {len(shares)} heads, n = {rows[-1]['n']}", observed=shares[worst], predicted=0.5, relation="<",
                        tolerance=1e-9, because="eigenvalues of a Gram matrix", worst_case=worst, note=f"from {min(shares.values()):.2g} to {shares[worst]:.2g}; effective rank from {min(ranks_of.values()):.3g} "
                        f"to {max(ranks_of.values()):.3g}", details={"tail share": shares, "effective rank": ranks_of})  # fmt: skip
    if rows:
        yield Picture(
            "head-spectra", {"heads": [{k: r[k] for k in ("head", "n", "trace", "eigenvalue_share")} for r in rows]}
        )
