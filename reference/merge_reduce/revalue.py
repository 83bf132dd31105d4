"""Values of the kept atoms by least squares: what their keys and weights cannot say, their values may (theory 3.5, "merged or refit atoms").

With the keys k_i and weights w'_i of the support S settled, the outputs are linear in its values. For the queries q of the law,

    a'_i(q) = w'_i e_q(k_i) / Z'(q),        Z'(q) = sum_S w'_i e_q(k_i) + sum_s e_q(k_s)         s: sinks, kept as they are

    min over v' of  mean_q | sum_S a'_i(q) v'_i + sum_s a'_s(q) v_s - o(q) |^2  +  ridge sum_S mean_q a'_i(q)^2 |v'_i - v_i|^2

o(q) the output of all atoms. The ridge pulls each value towards its own, relative to what its own change would cost. What leaves the box of the
values that went in (no output can) is put back on its side: few queries say little of an atom, and a number must fit its element type.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["revalued"]

Float = NDArray[np.float64]

#: pull towards an atom's own value, relative to what its change would cost
RIDGE = 0.3


def revalued(
    keys: Float, weight: Float, values: Float, kept: NDArray[np.int64], kept_weight: Float, q: Float, scale: float,
    sink_keys: Float, sink_values: Float, ridge: float = RIDGE,
) -> Float:  # fmt: skip
    """v' (K, dv) of the atoms `kept` (K,) with weights w' (K,), out of all (s, d), (s,), (s, dv); q (m, d); sinks (t, d), (t, dv)."""
    z, beside = scale * (keys @ q.T), scale * (sink_keys @ q.T)
    top = np.maximum(z.max(axis=0), beside.max(axis=0, initial=-np.inf))
    e, s = np.exp(z - top), np.exp(beside - top)
    every = weight[:, None] * e
    o = (every.T @ values + s.T @ sink_values) / (every.sum(axis=0) + s.sum(axis=0))[:, None]

    own = kept_weight[:, None] * e[kept]
    total = own.sum(axis=0) + s.sum(axis=0)
    # a query that sees next to nothing of what is kept says nothing of its values
    a = np.divide(own, total, out=np.zeros_like(own), where=total > 0) / np.sqrt(q.shape[0])
    beside = np.divide(s, total, out=np.zeros_like(s), where=total > 0)
    missing = o - np.sqrt(q.shape[0]) * (a.T @ values[kept]) - beside.T @ sink_values
    # in units of each atom's own cost the ridge is a number: (C + ridge I) x = b
    cost = np.sqrt((a**2).sum(axis=1))
    unit = np.where(cost > 0, cost, 1.0)
    scaled = a / unit[:, None]
    change = (
        np.linalg.solve(scaled @ scaled.T + ridge * np.eye(len(kept)), scaled @ missing / np.sqrt(q.shape[0]))
        / unit[:, None]
    )
    return np.asarray(np.clip(values[kept] + change, values.min(axis=0), values.max(axis=0)))
