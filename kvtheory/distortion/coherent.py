"""Errors that are known given the cache: they add up over tokens before they are squared.

A centroid quantiser (Lloyd-Max: E[x | x_hat] = x_hat) leaves an error e = x_hat - x that is no noise independent of x:

    E[e x] = -E e^2 = -D sigma^2,   so   e = -D (x - mean) + r,   E[r x] = 0,   E r^2 = D (1 - D) sigma^2

It shrinks what it stores, all tokens alike. The shrinkage moves the output by `coherent_term`, and only the rest r is left for the sums
of squares of arXiv 2608.14191, theorem 1. There D_K falls with the number of tokens that share the attention; the shrinkage does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.distortion import head

__all__ = ["coherent_term"]

Float = NDArray[np.float64]


def coherent_term(
    q: Any, k: Any, v: Any, w_o: Any, key_error: Any, scale: float | None = None, *, visible: Any = None
) -> Float:
    """||sum_i a_i (v_i W_O - o) scale q.e_i||^2 of each query, (m,): what errors e_i of the keys do together, to first order.

    One head: q (m, d), k (n, d), v (n, dv), w_o (dv, D). key_error (n, d): e_i, of either sign; of a centroid quantiser
    -D_c (k_ic - mean_c), with D_c its distortion relative to the channel's variance. scale: default 1/sqrt(d). visible (m, n): which
    tokens each query sees, default all. An error common to all tokens costs nothing. Derived here.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    e = np.asarray(key_error, dtype=np.float64)
    checks.shape("key_error", e, ("n", "d"), {"n": k.shape[0], "d": k.shape[1]})
    checks.finite("key_error", e)
    a, scale = head.weights(q, k, scale, visible)
    dz = scale * (q @ e.T)
    out = np.empty(len(q))
    for block, u in head.deviations(a, v, w_o):
        out[block] = head.squares(np.einsum("mn,mnr->mr", a[block] * dz[block], u))
    return out
