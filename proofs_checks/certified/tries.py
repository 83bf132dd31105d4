"""Tries and their prefixes, with exact probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from flint import arb, fmpq

from proofs_checks.certified.balls import Certificate, log2
from proofs_checks.certified.entropies import Language, drawn


def _shared(s: tuple[int, ...], t: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(s, t)) if a != b), min(len(s), len(t)))


def _prefix(law: Language, s: tuple[int, ...], t: tuple[int, ...]) -> fmpq:
    """P(s ^ t)."""
    length = _shared(s, t)
    return sum((p for u, p in law.items() if u[:length] == s[:length]), fmpq(0))


def certificates() -> Iterator[Certificate]:
    law = drawn(4, 2, 3)
    strings = list(law)
    where = "8 strings, rational weights, all triples"
    worst = max(
        _prefix(law, s, u) / max(_prefix(law, s, t), _prefix(law, t, u))
        for s, t, u in itertools.product(strings, repeat=3)
    )
    yield Certificate(
        "trie/similarity-ultrametric",
        "P(s^u) <= max(P(s^t), P(t^u))",
        where,
        worst,
        "<=",
        fmpq(1),
        {
            "min for max": (
                max(
                    _prefix(law, s, u) / min(_prefix(law, s, t), _prefix(law, t, u))
                    for s, t, u in itertools.product(strings, repeat=3)
                ),
                fmpq(1),
            )
        },
    )
    yield Certificate(
        "trie/metric",
        "counterexample: 0 < d_T(s, s)",
        "a string of probability below 1",
        arb(0),
        "<",
        -log2(law[strings[0]]),
        {"of the root": (arb(0), -log2(fmpq(1)))},
    )

    # D(s,t) + D(t,u) - D(s,u) = 2 log2 of P(s^t) P(t^u) / (P(s^u) P(t)): a comparison of rationals
    triples = [
        (_prefix(law, s, u), _prefix(law, s, t) * _prefix(law, t, u), law[t])
        for s, t, u in itertools.product(strings, repeat=3)
    ]
    yield Certificate(
        "trie/tree-distance", "P(s^u) P(t) <= P(s^t) P(t^u), that is D(s,u) <= D(s,t) + D(t,u)", where, max(a * c / b for a, b, c in triples), "<=", fmpq(1),
        {"P(t) lost": (max(a / b for a, b, _ in triples), fmpq(1))},
    )  # fmt: skip
    for p, T in ((fmpq(1, 10), 5), (fmpq(1, 100), 40), (fmpq(1, 3), 2)):
        stays, union = (1 - p) ** T, 1 - T * p
        yield Certificate(
            "trie/swap-time-corrected",
            "1 - T p <= (1 - p)^T",
            f"p = {p}, T = {T}",
            union,
            "<=",
            stays,
            {"exchanged": (stays, union)},
        )
        yield Certificate(
            "trie/swap-time",
            "counterexample: (1 - p)^T < 1 - T p/K",
            f"p = {p}, T = {T}, K = 8",
            stays,
            "<",
            1 - T * p / 8,
            {"K lost": (stays, union)},
        )
