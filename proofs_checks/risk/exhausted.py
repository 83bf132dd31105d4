"""Best summaries of small caches by routes of their own: all subsets through attention, all supports through their linear systems."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from proofs_checks.claim import Mutant
from proofs_checks.context import Context
from proofs_checks.risk.heads import (
    Float,
    One,
    deviations,
    energies,
    gram,
    groups,
    outputs,
    square_tolerance,
)


def uniform(one: One) -> Float:
    return np.full(one.n, 1 / one.n)


def small_heads(context: Context, tokens: int, queries: int, most: int) -> list[tuple[str, list[One]]]:
    """The groups of `groups`, of each layer only every so many heads that at most `most` are left."""
    return [(label, ones[:: -(-len(ones) // most)]) for label, ones in groups(context, tokens, queries)]


@cache
def subsets(n: int, K: int) -> Float:
    """Equal weights on every non-empty subset of at most K of n tokens, (r, n)."""
    rows = [np.isin(np.arange(n), S) / len(S) for s in range(1, K + 1) for S in combinations(range(n), s)]
    return np.stack(rows)


def true_risks(one: One, w: Float, law: Float | None = None) -> Float:
    """(r,) of summaries w (r, n), by attention."""
    squares = ((outputs(one, w) - outputs(one, uniform(one)[None])) ** 2).sum(axis=2)
    return squares.mean(axis=1) if law is None else np.asarray(squares @ law)


def linear_risks(one: One, w: Float) -> Float:
    """(r,) of summaries w (r, n): the mean of ||(Z_Phat/Z_P)(A_Phat - A_P)||^2, by attention."""
    return energies(deviations(one, w, uniform(one)))


def best_by_systems(g: Float, K: int) -> float:
    """min w^T g w over w >= 0 of sum 1 on at most K tokens, g (n, n) positive semidefinite: by all supports' linear systems.

    On the smallest support of an optimum all weights are positive, so g w = lambda 1 and 1^T w = 1 there; and where such a system has
    no unique solution a smaller support does as well. No quadratic programme is solved, and no inequality but w >= 0 is looked at.
    """
    n, best = len(g), np.inf
    unit = float(np.trace(g)) / n or 1.0
    for size in range(1, min(K, n) + 1):
        S = np.array(list(combinations(range(n), size)))
        system = np.ones((len(S), size + 1, size + 1))
        system[:, :size, :size] = g[S[:, :, None], S[:, None, :]] / unit
        system[:, size, size] = 0
        w = np.linalg.pinv(system, rcond=1e-13, hermitian=True)[:, :size, size]
        inside = (w >= -1e-12).all(axis=1) & (np.abs(w.sum(axis=1) - 1) < 1e-6)
        S, w = S[inside], np.maximum(w[inside], 0)
        w /= w.sum(axis=1, keepdims=True)
        values = np.einsum("rs,rst,rt->r", w, g[S[:, :, None], S[:, None, :]], w)
        best = min(best, float(values.min(initial=np.inf)))
    return best


def best_by_descent(x: Float, K: int) -> float:
    """min over w >= 0 of sum 1 on K tokens of max_j ||sum_i w_i x_ij||^2, x (n, m, c): by SLSQP on every support, in epigraph form."""
    from scipy import optimize

    minimize: Any = optimize.minimize  # its stubs know no bounds given as pairs
    best = np.inf
    for kept in combinations(range(len(x)), K):
        y = x[list(kept)]

        def squares(z: Float, y: Float = y) -> Float:
            return np.asarray((np.tensordot(z[:-1], y, 1) ** 2).sum(axis=1))

        def slopes(z: Float, y: Float = y) -> Float:
            return np.asarray(
                np.hstack([-2 * np.einsum("ijc,jc->ji", y, np.tensordot(z[:-1], y, 1)), np.ones((y.shape[1], 1))])
            )

        start = np.full(K + 1, 1 / K)
        start[-1] = squares(start).max()
        z = minimize(
            lambda z: z[-1], start, jac=lambda z: np.append(np.zeros(K), 1.0), bounds=[(0, 1)] * K + [(0, None)], method="SLSQP",
            constraints=[
                {"type": "eq", "fun": lambda z: z[:-1].sum() - 1, "jac": lambda z: np.append(np.ones(K), 0.0)},
                {"type": "ineq", "fun": lambda z, f=squares: z[-1] - f(z), "jac": slopes},
            ], options={"maxiter": 200, "ftol": 1e-10},
        ).x  # fmt: skip
        w = np.maximum(z, 0)
        w[:-1] /= w[:-1].sum()
        best = min(best, float(squares(w).max()))
    return best


def optimum(context: Context, one: One, K: int) -> float:
    """The least linear risk of at most K own tokens, weights free: by linear systems on a Gram matrix that attention gives."""
    return context.memo(
        ("optimum", one.label, one.n, len(one.q), K), lambda: best_by_systems(gram(one, uniform(one)), K)
    )


def dropped(context: Context, one: One, K: int, true: bool) -> float:
    """The least true or linear risk of at most K own tokens with equal weights: all subsets, by attention."""
    risks = true_risks if true else linear_risks
    return context.memo(
        ("dropped", one.label, one.n, len(one.q), K, true), lambda: float(risks(one, subsets(one.n, K)).min())
    )


def rounding_of(context: Context, one: One, value: float) -> float:
    """Relative tolerance of a linear risk `value` that is reached by cancellation from profiles of mean square tr Sigma."""
    trace = context.memo(
        ("trace", one.label, one.n, len(one.q)), lambda: float(np.trace(gram(one, uniform(one)))) / one.n
    )
    return one.n * square_tolerance(one, uniform(one), trace, max(value, 1e-300))


def output_room(one: One) -> Callable[[float], float]:
    """Relative tolerance of a true risk `value`, given that outputs are rounded at the size of the values about their mean."""
    size = float(energies(outputs(one, uniform(one)[None]) - one.v.mean(axis=0))[0]) + float(one.v.var(axis=0).sum())
    return lambda value: one.n * square_tolerance(one, uniform(one), size, max(value, 1e-300))


def other_budget(role: str, change: int) -> Mutant:
    """A token more, or less, than the budget."""
    return Mutant(
        f"{role}: K {'+' if change > 0 else '−'} {abs(change)}", role,
        lambda true: lambda *a, **k: true(*(max(1, x + change) if type(x) is int else x for x in a), **k),
    )  # fmt: skip


def forced_equal(role: str) -> Mutant:
    """Weights never free."""
    return Mutant(f"{role}: equal weights only", role, lambda true: lambda *a, **k: true(*a, **{**k, "equal": True}))
