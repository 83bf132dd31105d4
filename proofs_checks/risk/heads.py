"""One-head caches that the risk claims run on, and what a summary does to their outputs, measured without response profiles.

Everything here goes through `kvtheory.attention.attend` with log-weights, on the full cache and on the summary:

    A_Phat - A_P,        Z_Phat / Z_P,        and their product, which the error identity says is int Gamma_P dPhat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer
from kvtheory.risk import Instance
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Relation, Role, numerical

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


class One(NamedTuple):
    """q (m, d), k (n, d), v (n, dv), the logit scale, and what it is called."""

    label: str
    q: Float
    k: Float
    v: Float
    scale: float

    @property
    def n(self) -> int:
        return len(self.k)


def named(label: str, instance: Instance) -> One:
    return One(label, *instance, instance.k.shape[1] ** -0.5)


def synthetic(context: Context, tokens: int, queries: int) -> list[One]:
    """One head of every synthetic kind."""
    found = []
    for kind in context.synthetic_kinds:
        head = context.synthetic(
            kind, kv_heads=1, query_heads=1, tokens=tokens, head_dim=8, value_dim=8, queries=queries
        ).head(0)
        found.append(One(kind, head.q, head.k, head.v, head.scale))
    return found


def of_layer(label: str, layer: Layer, tokens: int, queries: int) -> list[One]:
    """Every query head of a layer as its future queries see it.

    `queries` of the later half of the layer's queries, evenly spaced; of the tokens that all of them see (a causal query sees
    those at or before its position) `tokens`, evenly spaced, the first among them.
    """
    assert layer.queries is not None
    have = layer.queries.shape[1]
    rows = np.unique(np.linspace(have // 2, have - 1, min(queries, have - have // 2)).round().astype(int))
    seen = np.flatnonzero(layer.visible()[rows].all(axis=0))
    kept = seen[np.unique(np.linspace(0, len(seen) - 1, min(tokens, len(seen))).round().astype(int))]
    found = []
    for h in range(layer.query_heads):
        head = layer.head(h)
        found.append(One(f"{label} head {h}", head.q[rows], head.k[kept], head.v[kept], head.scale))
    return found


def groups(context: Context, tokens: int, queries: int) -> list[tuple[str, list[One]]]:
    """(what it is, heads): the synthetic kinds together, then each layer of the real cache with all its query heads."""
    found = [(f"{len(context.synthetic_kinds)} synthetic kinds", synthetic(context, tokens, queries))]
    return found + [(label, of_layer(label, layer, tokens, queries)) for label, layer in context.real()]


def outputs(one: One, w: Float) -> Float:
    """A of the measures w (R, n), (R, m, dv), by `attend` with log-weights ln w."""
    with np.errstate(divide="ignore"):
        bias = np.log(w)
    q, k, v = (np.broadcast_to(x, (len(w), *x.shape)) for x in (one.q, one.k, one.v))
    return attention.attend(q, k, v, scale=one.scale, log_weights=bias)


def mass_ratio(one: One, w: Float, p: Float) -> Float:
    """Z_Phat / Z_P of the measures w (R, n) against p (n,), (R, m), with exponentials shifted by each query's largest logit."""
    z = one.scale * (one.k @ one.q.T)
    e = np.exp(z - z.max(axis=0))
    return (w @ e) / (p @ e)


def deviations(one: One, w: Float, p: Float) -> Float:
    """(Z_Phat / Z_P)(A_Phat - A_P), (R, m, dv): what the error identity says is int Gamma_P dPhat, from attention itself."""
    return mass_ratio(one, w, p)[:, :, None] * (outputs(one, w) - outputs(one, p[None]))


def energies(x: Float) -> Float:
    """Mean over queries of ||x||^2: (R, m, dv) -> (R,)."""
    return (x**2).sum(axis=2).mean(axis=1)


def gram(one: One, p: Float) -> Float:
    """<Gamma_i, Gamma_l> (n, n) in H_nu from attention itself: `deviations` of the summaries that are one token each."""
    x = deviations(one, np.eye(one.n), p).reshape(one.n, -1)
    return x @ x.T / len(one.q)


def factor(one: One, g: Float) -> Float:
    """x (n, n) with x x^T = g: profiles in n coordinates, all that a sampler sees of them."""
    values, vectors = np.linalg.eigh(g)
    return vectors * np.sqrt(np.maximum(values, 0))


def dense(n: int, index: NDArray[np.int64], weight: Float) -> Float:
    """(n,) weights from a sample."""
    w = np.zeros(n)
    w[index] = weight
    return w


def rounding(one: One) -> float:
    """Bound on the rounding error of an attention output's components, for tolerances.

    A logit of d products is wrong by at most (d + 2) eps L, L = scale max||q|| max||k||; a weight by that and n + 10 roundings of
    the sum, relative; so an output, a weighted mean of values up to V, by 2 V times that, and a difference of two by twice it.
    A factor 2 of reserve for the second order.
    """
    q, k, v = (float(np.linalg.norm(x, axis=1).max()) for x in (one.q, one.k, one.v))
    return 8 * v * EPS * ((one.q.shape[1] + 2) * one.scale * q * k + one.n + 10)


SQUARE_BECAUSE = "rounding of logits, softmax sums and the difference of two outputs, times twice the root mean square"


def square_tolerance(one: One, p: Float, mean_square: float, against: float | None = None) -> float:
    """Rounding error of a mean of ||(Z_Phat/Z_P)(A_Phat - A_P)||^2, relative to `against` (default: to itself)."""
    largest = float(mass_ratio(one, np.eye(one.n), p).max())
    error = rounding(one) * max(largest, 1.0)
    against = mean_square if against is None else against
    return float((2 * error * np.sqrt(mean_square) + error**2) / against + one.n * EPS)


class Compared(NamedTuple):
    """One equality on one cache."""

    one: One
    observed: float
    predicted: float
    tolerance: float


def worst_equality(
    what: str,
    group: str,
    compared: Iterable[Compared],
    because: str,
    role: Role = "statement",
    relation: Relation = "=",
) -> Evidence:
    """The comparison of a group that comes nearest to failing, as one piece of evidence; all ratios in its details."""
    all_of = list(compared)

    def strain(c: Compared) -> float:
        gap = c.observed - c.predicted if relation == "<=" else abs(c.observed - c.predicted)
        return gap / (c.tolerance * max(abs(c.observed), abs(c.predicted)) or 1.0)

    # NaN strains most: it must not hide
    worst = max(all_of, key=lambda c: np.inf if np.isnan(strain(c)) else strain(c))
    return numerical(
        what=what, ran_on=f"{group}; n = {worst.one.n}, {len(worst.one.q)} queries, worst of {len(all_of)}", observed=worst.observed,
        predicted=worst.predicted, relation=relation, tolerance=worst.tolerance, because=because, role=role, worst_case=worst.one.label,
        details={"observed over predicted": {c.one.label: c.observed / c.predicted if c.predicted else None for c in all_of}},
    )  # fmt: skip
