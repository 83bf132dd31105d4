"""Removing tokens inside the same picture: the exact error, the separable sum that stands for it, and why no bits is not removal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import attention
from kvtheory.layer import Head
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding import noise
from proofs_checks.transform_coding.instances import PAPER
from proofs_checks.transform_coding.parts import SINKS, Float, real_kv_heads


def removed_energy(head: Head, removed: Float) -> Float:
    """||o' - o||^2 of each query, (m,): attention over the kept tokens, computed without the others."""
    kept = ~np.asarray(removed, dtype=bool)
    o = attention.weights(head.q, head.k, head.scale, visible=head.visible) @ head.v
    without = attention.weights(head.q, head.k[kept], head.scale, visible=head.visible[:, kept]) @ head.v[kept]
    return np.asarray((((without - o) @ head.w_o) ** 2).sum(axis=1))


def _from_pieces(by: Callable[[Float, Float, Float], Float]) -> Callable[[Function], Function]:
    """eviction_error from a (m, n), v W_O (n, D) and the removed tokens (n,)."""

    def wrong(true: Function) -> Function:
        def mutated(q: Float, k: Float, v: Float, w_o: Float, removed: Float, scale: float | None = None, *, visible: Any = None) -> Float:  # fmt: skip
            a = attention.weights(q, k, q.shape[1] ** -0.5 if scale is None else scale, visible=visible)
            return by(a, v @ w_o, np.asarray(removed, dtype=float))

        return mutated

    return wrong


def _first_order(a: Float, y: Float, gone: Float) -> Float:
    return ((((a * gone) @ y) - (a * gone).sum(axis=1, keepdims=True) * (a @ y)) ** 2).sum(axis=1)


def _squares_first(a: Float, y: Float, gone: Float) -> Float:
    u2 = ((y[None] - (a @ y)[:, None]) ** 2).sum(axis=2)
    return (a**2 * gone * u2).sum(axis=1) / (1 - a @ gone) ** 2


_EVICTION_MUTANTS = [
    Mutant("1/(1 − A) left out", "eviction_error", _from_pieces(_first_order)),
    Mutant("squared before it is added up", "eviction_error", _from_pieces(_squares_first)),
    Mutant("‖v W_O‖ for ‖v W_O − o‖", "eviction_error", _from_pieces(lambda a, y, gone: (((a * gone) @ y) ** 2).sum(axis=1) / (1 - a @ gone) ** 2)),
    Mutant("the kept tokens for the removed", "eviction_error", _from_pieces(lambda a, y, gone: _first_order(a, y, 1 - gone) / (a @ gone) ** 2)),
    *systematic.scales("eviction_error"),
    *systematic.square_dropped("eviction_error"),
]  # fmt: skip


@claim(
    id="transform-coding/eviction-error",
    paper=OWN,
    section="the token factor of Theorem 1 of arXiv 2608.14191, carried to removal; one token: CAOTE, arXiv 2504.14051",
    statement="Removing a set of tokens moves the output by the sum of their attention-weighted deviations over what attention is left, exactly.",
    formula="o' − o = −Σ_{i∈E} a_i (v_i W_O − o) / (1 − A_E);  one token: a_j/(1 − a_j) ‖v_j W_O − o‖",
    expected=Verdict.HOLDS,
    functions={
        "eviction_error": "kvtheory.distortion.eviction_error", "single_eviction_error": "kvtheory.distortion.single_eviction_error",
        "token_factor": "kvtheory.distortion.token_factor",
    },
    mutants=[
        *_EVICTION_MUTANTS,
        *systematic.scales("single_eviction_error"),
        *systematic.scales("token_factor"),
        *systematic.square_dropped("token_factor"),
        Mutant("single: 1/(1 − a) left out", "single_eviction_error", lambda true: lambda q, k, v, w_o, scale=None, *, visible=None: _factors(q, k, v, w_o, scale, visible)),
    ],
)  # fmt: skip
def eviction_error(
    context: Context, *, eviction_error: Function, single_eviction_error: Function, token_factor: Function
) -> Iterator[Evidence]:
    instances = [(f"{kind}, n=24, d=8, 6 queries, seed {context.seed}", context.synthetic(kind, kv_heads=1, query_heads=1, tokens=24, head_dim=8, model_dim=10, queries=6).head(0)) for kind in context.synthetic_kinds]  # fmt: skip
    instances += [
        (
            f"{h.label} (real heads), {context.size(6, 32)} causal queries",
            noise.at_rows(h.layer.head(h.heads[-1]), _late(h.layer, context.size(6, 32))),
        )
        for h in real_kv_heads(context)
    ]
    for where, head in instances:
        n = len(head.k)
        rng = context.rng(f"sets {where}")
        sets = context.memo(
            ("sets", where),
            lambda rng=rng, n=n: [_some(rng, n, count) for count in (1, n // 4, n - n // 4)],  # type: ignore[misc]
        )  # type: ignore[misc]
        options = {"visible": head.visible}
        truth = np.array(
            [context.memo((where, i), lambda s=s, head=head: removed_energy(head, s)) for i, s in enumerate(sets)]  # type: ignore[misc]
        )  # type: ignore[misc]
        stated = np.array([eviction_error(head.q, head.k, head.v, head.w_o, s, head.scale, **options) for s in sets])
        energy = float(
            (
                (
                    (
                        attention.weights(head.q, head.k, head.scale, visible=head.visible)
                        @ (head.v - head.v.mean(axis=0))
                    )
                    @ head.w_o
                )
                ** 2
            )
            .sum(axis=1)
            .max()
        )
        far = np.unravel_index(int(np.argmax(np.abs(stated - truth) - 1e-7 * truth)), truth.shape)
        yield numerical(
            what="error of removing a quarter of the tokens, one, or all but a quarter = attention over the kept tokens, computed without the others; worst query",
            ran_on=where, observed=1 + stated[far] / energy, predicted=1 + truth[far] / energy, tolerance=1e-12,
            because="outputs are known to n·2⁻⁵² of the largest, and so is their difference; in units of the largest output's energy",
        )  # fmt: skip
        big = truth > 1e-12 * energy
        ratios = stated[big] / truth[big]
        yield numerical(
            what="the same, relative, where it is above 1e-12 of the largest output's energy: farthest from 1",
            ran_on=where, observed=ratios[np.argmax(np.abs(ratios - 1))], predicted=1.0, tolerance=1e-6, because="a difference of two outputs, 1e-6 of their size at least",
        )  # fmt: skip
        alone = single_eviction_error(head.q, head.k, head.v, head.w_o, head.scale, **options)
        j = int(np.argmax(sets[0]))
        one = np.concatenate(
            [[alone[:, j]], [token_factor(head.q, head.k, head.v, head.w_o, head.scale, **options)[:, j]]]
        )
        a = attention.weights(head.q, head.k, head.scale, visible=head.visible)[:, j]
        for name, row, by in (
            ("single_eviction_error", one[0], truth[0]),
            ("token_factor over (1 − a)²", one[1] / (1 - a) ** 2, truth[0]),
        ):
            kept = by > 1e-12 * energy
            if kept.any():
                found = row[kept] / by[kept]
                yield numerical(
                    what=f"{name} of that one token over the error of removing it: farthest from 1",
                    ran_on=where, observed=found[np.argmax(np.abs(found - 1))], predicted=1.0, tolerance=1e-6, because="as above",
                )  # fmt: skip


def _late(layer: Any, count: int) -> Any:
    chosen = noise.rows(layer, 2 * count)
    return chosen[-count:]


def _some(rng: np.random.Generator, n: int, count: int) -> Any:
    """A set of so many tokens, the first two always kept, so that every query keeps one."""
    mask = np.zeros(n, dtype=bool)
    mask[2 + rng.permutation(n - 2)[: min(count, n - 2)]] = True
    return mask


def _factors(q: Float, k: Float, v: Float, w_o: Float, scale: Any, visible: Any) -> Float:
    a = attention.weights(q, k, q.shape[1] ** -0.5 if scale is None else scale, visible=visible)
    y = v @ w_o
    return a**2 * ((y[None] - (a @ y)[:, None]) ** 2).sum(axis=2)


def _by_masses(masses: list[Fraction], values: list[Fraction]) -> tuple[Head, Fraction, Fraction]:
    """A head of one query with these weights and values (D = 1); the exact error of removing all but the first, and the separable sum."""
    k = np.log(np.array([float(m) for m in masses]))[:, None]
    head = Head(
        np.ones((1, 1)),
        k,
        np.array([[float(v)] for v in values]),
        np.ones((1, 1)),
        np.ones((1, len(masses)), bool),
        1.0,
    )
    o = sum((m * v for m, v in zip(masses, values)), Fraction(0))
    separable = sum((m**2 * (v - o) ** 2 for m, v in zip(masses[1:], values[1:])), Fraction(0))
    return head, (values[0] - o) ** 2, separable


HALF = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
CASES = {
    "two tokens of one value": (HALF, [Fraction(0), Fraction(1), Fraction(1)]),
    "two tokens of opposite values": (HALF, [Fraction(0), Fraction(1), Fraction(-1)]),
    "one token": ([Fraction(1, 4), Fraction(3, 4)], [Fraction(0), Fraction(1)]),
}


@claim(
    id="transform-coding/eviction-surrogate",
    paper=OWN,
    section="the token factor summed over what is removed, as separable allocations over tokens have it",
    statement="The sum of the token factors of the removed tokens is the error of removing them.",
    formula="‖o' − o‖² = Σ_{i∈E} a_i² ‖v_i W_O − o‖²",
    expected=Verdict.FAILS,
    functions={"eviction_surrogate": "kvtheory.distortion.eviction_surrogate", "eviction_error": "kvtheory.distortion.eviction_error"},
    mutants=[
        Mutant("the exact error", "eviction_surrogate", lambda true: _exact_error),
        *systematic.scales("eviction_surrogate"),
        *systematic.square_dropped("eviction_surrogate"),
        *(m for m in _EVICTION_MUTANTS if m.name != "eviction_error: square dropped"),
    ],
    correction="transform-coding/eviction-error",
)  # fmt: skip
def eviction_surrogate(
    context: Context, *, eviction_surrogate: Function, eviction_error: Function
) -> Iterator[Evidence]:
    rounding = "logarithms of the weights, to rounding"
    for what, (masses, values) in CASES.items():
        head, truth, separable = _by_masses(masses, values)
        gone = np.array([False] + [True] * (len(masses) - 1))
        where = f"{what} removed, weights {', '.join(map(str, masses))}, values {', '.join(map(str, values))}"
        arguments = (head.q, head.k, head.v, head.w_o, gone, head.scale)
        yield numerical(
            role="control", what=f"1 + separable sum = 1 + {separable}", ran_on=where, observed=1 + float(eviction_surrogate(*arguments)[0]), predicted=1 + float(separable),
            tolerance=1e-13, because=rounding,
        )  # fmt: skip
        yield numerical(
            role="control", what=f"1 + error = 1 + {truth}", ran_on=where, observed=1 + float(eviction_error(*arguments)[0]), predicted=1 + float(truth), tolerance=1e-13,
            because=rounding,
        )  # fmt: skip
        yield exact(
            what="separable sum = error", ran_on=f"smallest counterexample: {where}", observed=separable, predicted=truth,
            note={"two tokens of one value": "8 times too small: errors of one direction add before they are squared", "two tokens of opposite values": "they cancel, the sum does not know"}.get(what, "the mass of the removed has to be made up for: 1/(1 − a)²"),
        )  # fmt: skip
        yield numerical(
            what="1 + separable sum = 1 + error, as computed", ran_on=where, observed=1 + float(eviction_surrogate(*arguments)[0]), predicted=1 + float(truth), tolerance=1e-12,
            because=rounding,
        )  # fmt: skip
    heads = real_kv_heads(context)
    if heads:
        ratios = {}
        for h in heads:
            head = noise.at_rows(h.layer.head(h.heads[0]), _late(h.layer, context.size(8, 48)))
            mass = attention.weights(head.q, head.k, head.scale, visible=head.visible).sum(axis=0)
            gone = np.ones(len(mass), dtype=bool)
            gone[np.argsort(mass)[-len(mass) // 4 :]] = False  # three quarters of least attention go
            gone[:SINKS] = False
            arguments = (head.q, head.k, head.v, head.w_o, gone, head.scale)
            ratios[h.label] = float(
                np.sum(eviction_surrogate(*arguments, visible=head.visible))
                / np.sum(eviction_error(*arguments, visible=head.visible))
            )
        far = min(ratios, key=lambda label: ratios[label])
        yield numerical(
            what="separable sum over error, three quarters of the tokens removed, those of least attention; least of all heads",
            ran_on=f"{len(heads)} real heads, late queries", observed=ratios[far], predicted=1.0, tolerance=0.1, because="the statement is one of equality", worst_case=far,
            note=f"{ratios[far]:.3f} to {max(ratios.values()):.3f}", details=ratios,
        )  # fmt: skip


def _exact_error(q: Float, k: Float, v: Float, w_o: Float, removed: Any, scale: float | None = None, *, visible: Any = None) -> Float:  # fmt: skip
    from kvtheory.distortion import eviction_error as true

    return np.asarray(true(q, k, v, w_o, removed, scale, visible=visible))


@claim(
    id="transform-coding/zero-bits",
    paper=PAPER,
    section="allocation over tokens and channels, read at zero bits",
    statement="A key without bits is a token removed: the zero-bit end of the key term is eviction.",
    formula="D_K(b = 0) = error of eviction",
    expected=Verdict.FAILS,
    functions={"single_eviction_error": "kvtheory.distortion.single_eviction_error", "key_term": "kvtheory.distortion.key_term"},
    mutants=[
        Mutant("error of the mean key for eviction's", "single_eviction_error", lambda true: lambda q, k, v, w_o, scale=None, *, visible=None: _mean_key(q, k, v, w_o, scale, visible)),
        *systematic.scales("single_eviction_error"),
        *systematic.square_dropped("single_eviction_error"),
        Mutant("eviction's error for the key term", "key_term", lambda true: lambda q, k, v, w_o, variance, scale=None, *, visible=None: _removal(q, k, v, w_o, variance, scale, visible)),
        *systematic.scales("key_term"),
    ],
    correction="transform-coding/eviction-error",
)  # fmt: skip
def zero_bits(context: Context, *, single_eviction_error: Function, key_term: Function) -> Iterator[Evidence]:
    # keys -1, 0, 1: the second is its own mean, so that no bits cost it nothing
    k, v = np.array([[-1.0], [0.0], [1.0]]), np.array([[0.0], [1.0], [0.0]])
    q = np.array([[0.0]])
    where = "keys −1, 0, 1, values 0, 1, 0, query 0: the second key is the mean"
    removed = single_eviction_error(q, k, v, np.eye(1), 1.0)[0, 1]
    yield numerical(
        role="control", what="error of removing the second token: (1/3)² = 1/9", ran_on=where, observed=float(removed), predicted=1 / 9, tolerance=1e-13,
        because="three terms",
    )  # fmt: skip
    held = float(_mean_key(q, k, v, np.eye(1), 1.0, None)[0, 1])
    yield numerical(
        role="control", what="1 + error of storing the mean for it", ran_on=where, observed=1 + held, predicted=1.0, tolerance=1e-13, because="three terms",
    )  # fmt: skip
    yield numerical(
        what="error of a key without bits, the mean in its place = error of removing the token", ran_on=f"smallest counterexample: {where}", observed=held, predicted=float(removed),
        tolerance=1e-9, because="three terms", note="the value is still there, and the weight of an average key",
    )  # fmt: skip
    # a second channel that is 0 everywhere: nothing but d and the default scale would know it
    wide, at = np.column_stack([k, np.zeros(3)]), np.array([[np.sqrt(2), 0.0]])
    variance = np.array([[0.0, 0.0], [2 / 3, 0.0], [0.0, 0.0]])
    term = float(key_term(at, wide, v, np.eye(1), variance)[0])
    a = np.exp([-1, 0, 1]) / np.exp([-1, 0, 1]).sum()
    yield numerical(
        role="control", what="key term of the second token at its channel's whole variance 2/3, query √2, scale 1/√2: a²(1 − a)² 2/3", ran_on=where, observed=term,
        predicted=float((a[1] * (1 - a[1])) ** 2 * 2 / 3), tolerance=1e-13, because="three terms",
    )  # fmt: skip
    evicted = float(single_eviction_error(at, wide, v, np.eye(1))[0, 1])
    yield numerical(
        what="key term at zero bits = error of removing the token", ran_on=f"{where.replace('query 0', 'query √2')}", observed=term, predicted=evicted, tolerance=1e-9,
        because="three terms",
    )  # fmt: skip
    heads = real_kv_heads(context)
    if heads:
        ratios = []
        for h in heads:
            head = noise.at_rows(h.layer.head(h.heads[0]), _late(h.layer, context.size(4, 24)))
            evict = single_eviction_error(head.q, head.k, head.v, head.w_o, head.scale, visible=head.visible)
            mean = context.memo(
                h.label,
                lambda head=head: _mean_key(head.q, head.k, head.v, head.w_o, head.scale, head.visible),  # type: ignore[misc]
            )  # type: ignore[misc]
            sure = np.isfinite(evict) & (evict > 0)
            ratios.append(np.log10(mean[sure] / evict[sure]))
        every = np.concatenate(ratios)
        yield numerical(
            what="share of tokens and queries where storing the mean key costs what removing the token does, within a factor 2: all",
            ran_on=f"{len(every)} pairs of token and query of {len(heads)} real heads, sinks among them", observed=float((np.abs(every) <= np.log10(2)).mean()), predicted=1.0,
            tolerance=0.05, because="the statement is one of equality, for each token",
            note=f"median of the ratio {10 ** np.median(every):.2g}; a tenth below {10 ** np.quantile(every, 0.1):.2g}, a tenth above {10 ** np.quantile(every, 0.9):.2g}: a token that"
            " no query looks at gets an average one's attention",
        )  # fmt: skip


def _mean_key(q: Float, k: Float, v: Float, w_o: Float, scale: Any, visible: Any) -> Float:
    """(m, n): ||do||^2 of storing the mean key for token j alone."""
    z = attention.logits(q, k, q.shape[1] ** -0.5 if scale is None else scale, visible=visible)
    a = attention.softmax(z)
    middle = (q.shape[1] ** -0.5 if scale is None else scale) * q @ k.mean(axis=0)
    y = (v - v.mean(axis=0)) @ w_o
    # the weight of token j is multiplied by e^{middle - z_j}, the others stay: o' - o = a (rho - 1)(v_j - o) / (1 + a (rho - 1))
    rho = np.where(np.isfinite(z), np.exp(np.minimum(middle[:, None] - z, 600)), 1.0)
    u2 = ((y[None] - (a @ y)[:, None]) ** 2).sum(axis=2)
    change = a * (rho - 1)
    return np.asarray((change / (1 + change)) ** 2 * u2)


def _removal(q: Float, k: Float, v: Float, w_o: Float, variance: Float, scale: Any, visible: Any) -> Float:
    from kvtheory.distortion import single_eviction_error as true

    noisy = (variance > 0).any(axis=1)
    return np.asarray(true(q, k, v, w_o, scale, visible=visible))[:, noisy].sum(axis=1)
