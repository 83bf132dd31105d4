"""Theorem 1 of arXiv 2608.14191 and the order after it: the key, the value and the remainder term of one head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.distortion import head

__all__ = ["key_term", "remainder_term", "value_term"]

Float = NDArray[np.float64]


def key_term(
    q: Any, k: Any, v: Any, w_o: Any, variance: Any,
    scale: float | None = None, *, visible: Any = None,
) -> Float:  # fmt: skip
    """D_K of each query, (m,): sum_i a_i^2 ||v_i W_O - o||^2 scale^2 sum_c q_c^2 sigma_ic^2.

    One head: q (m, d), k (n, d), v (n, dv), w_o (dv, D), variance (n, d) of the key noise, >= 0. scale: default 1/sqrt(d).
    visible (m, n): which tokens each query sees, default all. First order in the variance. arXiv 2608.14191, Theorem 1.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    sigma2 = head.noise(variance, k)
    a, scale = head.weights(q, k, scale, visible)
    s2 = scale**2 * (q**2 @ sigma2.T)  # (m, n): variance of each logit
    out = np.empty(len(q))
    for block, u in head.deviations(a, v, w_o):
        out[block] = (a[block] ** 2 * s2[block] * head.squares(u)).sum(axis=1)
    return out


def value_term(
    q: Any, k: Any, v: Any, w_o: Any, variance: Any,
    scale: float | None = None, *, visible: Any = None,
) -> Float:  # fmt: skip
    """D_V of each query, (m,): sum_i a_i^2 sum_c sigma_ic^2 ||W_O,c||^2, exact at any noise.

    One head as in `key_term`, but variance (n, dv) of the value noise. arXiv 2608.14191, Theorem 1.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    sigma2 = head.noise(variance, v, "dv")
    a, _ = head.weights(q, k, scale, visible)
    return (a**2 * (sigma2 @ (w_o**2).sum(axis=1))[None, :]).sum(axis=1)


def remainder_term(
    q: Any, k: Any, v: Any, w_o: Any, key_variance: Any, value_variance: Any | None = None,
    scale: float | None = None, *, visible: Any = None,
) -> Float:  # fmt: skip
    """R of each query, (m,): the sigma^4 term of E||do||^2 = D_K + D_V + R + O(sigma^6), for Gaussian noise. It may be negative.

    With u_i = v_i W_O - o, s_i^2 = scale^2 sum_c q_c^2 sigma_ic^2 (variance of logit i), t_i^2 = sum_c tau_ic^2 ||W_O,c||^2 (tau^2: of
    the values), S = sum_i a_i s_i^2, Q = sum_i a_i^2 s_i^2, M = sum_i a_i s_i^2 u_i, m = sum_i a_i^2 s_i^2 u_i:

        R = D_K (3 Q - S) + (3/2) sum_i a_i^2 s_i^4 |u_i|^2 - 6 sum_i a_i^3 s_i^4 |u_i|^2 + |M|^2/4 - 2 M.m + 6 |m|^2
            + sum_i a_i^2 t_i^2 (2 s_i^2 (1 - 2 a_i) - S + 3 Q)

    |M|^2/4 is coherent over tokens: the Jensen shift of tokens that are noisier than others. For equal s_i it is 0 and

        R_K = c s^2 D_K,   c = 1/2 + 3 sum_i a_i^2 - 6 Var_a(x) / sum_i |x_i|^2,   x_i = a_i u_i,   -7/4 <= c <= 7/2:

    near 1/2 where attention is diffuse, 7/2 where one token has nearly all of it. Proof of the bounds: above, Var >= 0 and
    sum a^2 <= 1. Below, Var_a(x) <= L sum |x_i|^2 with L the top eigenvalue of diag(a) - a a^T, which is at most p = a_max and, by
    Gershgorin, at most 2 p (1 - p) where p >= 1/2; sum a^2 >= p^2; so c >= 1/2 + 3 p^2 - 6 L >= -7/4, at p = 1/2.
    One head as in `key_term`; value_variance None: exact values. Derived here: the order after theorem 1 of arXiv 2608.14191.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    sigma2 = head.noise(key_variance, k)
    a, scale = head.weights(q, k, scale, visible)
    s2 = scale**2 * (q**2 @ sigma2.T)
    big_s, big_q = (a * s2).sum(axis=1), (a**2 * s2).sum(axis=1)
    out = np.empty(len(q))
    for block, u in head.deviations(a, v, w_o):
        p, s, u2 = a[block], s2[block], head.squares(u)
        d_k = (p**2 * s * u2).sum(axis=1)
        big_m, small_m = (np.einsum("mn,mnr->mr", x, u) for x in (p * s, p**2 * s))
        out[block] = (
            d_k * (3 * big_q[block] - big_s[block])
            + ((1.5 * p**2 - 6 * p**3) * s**2 * u2).sum(axis=1)
            + head.squares(big_m) / 4
            - 2 * (big_m * small_m).sum(axis=1)
            + 6 * head.squares(small_m)
        )
    if value_variance is not None:
        tau2 = head.noise(value_variance, v, "dv")
        t2 = tau2 @ (w_o**2).sum(axis=1)
        out += (a**2 * t2 * (2 * s2 * (1 - 2 * a) - big_s[:, None] + 3 * big_q[:, None])).sum(axis=1)
    return out
