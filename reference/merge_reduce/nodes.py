"""REDUCE: weighted atoms in, at most K of them out, with weights under which attention stays what it was.

For the queries q of the law, atoms i with weights w_i (tokens that each stands for), and what attention makes of them and of the sinks s,

    Z(q) = sum_i w_i e_q(k_i) + sum_s e_q(k_s),     o(q) = (sum_i w_i e_q(k_i) v_i + sum_s e_q(k_s) v_s) / Z(q)
    x_i(q) = (e_q(k_i) / Z(q)) (v_i - o(q), c)

is the response profile of an atom (theory C-D1 beside the mass of C-D3: the error of other weights w' is exactly
sum_i (w'_i - w_i) e_q(k_i)(v_i - o(q)) / Z'(q), theory C-L1, so the first part is the numerator and the last channel the denominator).
Every REDUCE looks for w' with  sum_i w'_i x_i = sum_i w_i x_i  as nearly as it can. Profiles enter through their Gram matrix

    <x_i, x_j> = mean_q a_i a_j ((v_i - o).(v_j - o) + c^2),     a_i = e_q(k_i) / Z(q)

which costs atoms^2 queries, whatever dv; its square root gives the same geometry in at most `atoms` columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import balancing
from kvtheory.risk.gram import centred_gram
from reference.merge_reduce.refit import refit
from reference.merge_reduce.revalue import revalued

__all__ = ["REDUCERS", "Atoms", "features", "reduce_atoms"]

Float = NDArray[np.float64]

REDUCERS = ("random", "halving", "cube", "spectral", "cluster", "refit", "refit-mass", "refit-values")


@dataclass(frozen=True, eq=False)
class Atoms:
    """Tokens of one head in time order: position (s,), weight (s,) > 0: how many tokens each stands for; keys (s, d), values (s, dv), float64."""

    position: NDArray[np.int64]
    weight: Float
    keys: Float
    values: Float

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, part: slice) -> Atoms:
        return self.taken(part, self.weight[part])

    def with_behind(self, later: Atoms) -> Atoms:
        """These and `later`, which come after them."""
        pairs = ((getattr(self, name), getattr(later, name)) for name in self.__dataclass_fields__)
        return Atoms(*(np.concatenate(pair) for pair in pairs))

    def taken(self, place: NDArray[Any] | slice, weight: Float) -> Atoms:
        return Atoms(self.position[place], weight, self.keys[place], self.values[place])

    @classmethod
    def none(cls, head_dim: int, value_dim: int) -> Atoms:
        return cls(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, head_dim)), np.zeros((0, value_dim)))


def features(atoms: Atoms, q: Float, scale: float, sinks: Atoms) -> Float:
    """Rows (s, r) with the inner products of the profiles of atoms for queries q (m, d); `sinks` stay, and take their part of the attention."""
    z = scale * (atoms.keys @ q.T)
    beside = scale * (sinks.keys @ q.T)
    top = np.maximum(z.max(axis=0), beside.max(axis=0, initial=-np.inf))
    e, s = np.exp(z - top), np.exp(beside - top)
    total = atoms.weight @ e + s.sum(axis=0)
    a = e / total
    o = (atoms.weight[:, None] * a).T @ atoms.values + (s / total).T @ sinks.values
    c2 = float((atoms.weight @ (atoms.values**2).sum(axis=1)) / atoms.weight.sum()) or 1.0
    values, vectors = np.linalg.eigh(centred_gram(a, atoms.values, o, c2))
    # below the rounding of the largest eigenvalue there is nothing but noise
    true = values > values[-1] * len(values) * np.finfo(np.float64).eps
    return (vectors[:, true] * np.sqrt(values[true]))[:, ::-1]


def reduce_atoms(
    atoms: Atoms, K: int, reducer: str, protect: int | None, q: Float | None, scale: float, sinks: Atoms, seed: int
) -> Atoms:
    """At most K atoms of `atoms`, of the same total weight but for "refit" and "refit-values". q (m, d): the queries; None for "random", which needs none."""
    if len(atoms) <= K:
        return atoms
    if K == 0:
        return atoms.taken(np.zeros(0, np.int64), np.zeros(0))
    total = float(atoms.weight.sum())
    p = atoms.weight / total
    if reducer == "random":
        # the walk without directions: fixed size, P(kept) proportional to the weight, heavier ones surely
        place, weight = balancing.sample(np.zeros((len(atoms), 1)), K, "cube", 0, seed, weights=p)
        return atoms.taken(place, weight * total)
    assert q is not None
    x = features(atoms, q, scale, sinks)
    if reducer.startswith("refit"):
        kept, found = refit(x, atoms.weight, K, mass=reducer == "refit-mass")
        out = atoms.taken(kept, found)
        if reducer == "refit-values":
            values = revalued(atoms.keys, atoms.weight, atoms.values, kept, found, q, scale, sinks.keys, sinks.values)
            out = replace(out, values=values)
        return out
    m = protected(reducer, protect, K)
    place, weight = balancing.sample(x, K, reducer, m, seed, weights=p)  # type: ignore[arg-type]
    return atoms.taken(place, weight * total)


def protected(reducer: str, protect: int | None, K: int) -> int:
    """Directions without error: K/4 of the cube, K/6 of the spectral walk, 64 for clusters; never more than the budget allows."""
    if reducer == "halving":
        return 0
    wanted = {"cube": K // 4, "spectral": K // 6, "cluster": 64}[reducer] if protect is None else protect
    return max(0, min(wanted, {"cube": K - 1, "spectral": (K - 1) // 2}.get(reducer, wanted)))
