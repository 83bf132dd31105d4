"""Attention-aware distortion: what noise on keys and values costs at the attention output (arXiv 2608.14191, Theorem 1).

One query q, weights a = softmax(scale k q), output o = sum_i a_i v_i W_O; white noise, independent over tokens and channels,
of variance sigma_ic^2:

    E||do||^2 = D_K + D_V + higher order
    D_K = sum_i a_i^2 ||v_i W_O - o||^2 scale^2 sum_c q_c^2 sigma_ic^2        (the paper: scale^2 = 1/d)
    D_V = sum_i a_i^2 sum_c sigma_ic^2 ||W_O,c||^2                             (W_O,c = row c of W_O; exact at any noise)

The next order is `remainder_term`: for equal logit variance s^2 on all tokens it is c s^2 D_K with -7/4 <= c <= 7/2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention, checks
from kvtheory.layer import Decoded, Layer

__all__ = ["attention_error", "key_term", "remainder_term", "value_term"]

Float = NDArray[np.float64]

#: numbers of one block of deviations v_i W_O - o
_BLOCK_ELEMENTS = 1 << 21


def _one_head(q: Any, k: Any, v: Any, w_o: Any, variance: Any, like: str) -> tuple[Float, ...]:
    arrays = {name: np.asarray(x, dtype=np.float64) for name, x in (("q", q), ("k", k), ("v", v), ("w_o", w_o))}
    sizes = checks.shape("q", arrays["q"], ("m", "d"))
    if sizes["d"] == 0:
        raise ValueError("q: expected d >= 1 channels, got 0")
    sizes |= checks.shape("k", arrays["k"], ("n", "d"), sizes)
    sizes |= checks.shape("v", arrays["v"], ("n", "dv"), sizes)
    sizes |= checks.shape("w_o", arrays["w_o"], ("dv", "D"), sizes)
    arrays["variance"] = np.asarray(variance, dtype=np.float64)
    checks.shape("variance", arrays["variance"], ("n", like), sizes)
    for name, array in arrays.items():
        checks.finite(name, array)
    if (arrays["variance"] < 0).any():
        raise ValueError(f"variance: expected numbers >= 0, got {arrays['variance'].min()}")
    return tuple(arrays.values())


def _weights(q: Float, k: Float, scale: float | None, visible: Any) -> tuple[Float, float]:
    scale = q.shape[1] ** -0.5 if scale is None else checks.positive("scale", scale)
    if visible is not None:
        visible = np.asarray(visible, dtype=bool)
        checks.shape("visible", visible, ("m", "n"), {"m": len(q), "n": len(k)})
        if not visible.any(axis=1).all():
            raise ValueError(
                f"visible: expected every query to see a token, query {int(np.argmin(visible.any(axis=1)))} sees none"
            )
    elif len(k) == 0:
        raise ValueError("k: expected at least one token, got none")
    return attention.weights(q, k, scale, visible=visible), scale


def _deviations(a: Float, v: Float, w_o: Float) -> Iterator[tuple[slice, Float]]:
    """Blocks of queries with u_i = v_i W_O - o in coordinates that keep lengths: (queries of the block, n, min(dv, D)).

    w_o^T = Q R, so ||x W_O|| = ||x R^T||. Values are taken relative to their mean, then to that of the query's heaviest token: with
    a_max near 1 its own u_i is of size 1 - a_max, which ||v||^2 - 2 v.o + ||o||^2 would lose to cancellation, as it would what
    varies beside a large common offset.
    """
    vw = (v - v.mean(axis=0)) @ np.asarray(np.linalg.qr(w_o.T, mode="r")).T
    step = max(1, _BLOCK_ELEMENTS // max(1, vw.size))
    for start in range(0, len(a), step):
        block = slice(start, start + step)
        heaviest = vw[a[block].argmax(axis=1)]
        u = vw[None, :, :] - heaviest[:, None, :]
        u -= a[block, None, :] @ u
        yield block, u


def _squares(u: Float) -> Float:
    """||u_i||^2 along the last axis."""
    return np.einsum("...r,...r->...", u, u)


def key_term(
    q: Any, k: Any, v: Any, w_o: Any, variance: Any,
    scale: float | None = None, *, visible: Any = None,
) -> Float:  # fmt: skip
    """D_K of each query, (m,): sum_i a_i^2 ||v_i W_O - o||^2 scale^2 sum_c q_c^2 sigma_ic^2.

    One head: q (m, d), k (n, d), v (n, dv), w_o (dv, D), variance (n, d) of the key noise, >= 0. scale: default 1/sqrt(d).
    visible (m, n): which tokens each query sees, default all. First order in the variance. arXiv 2608.14191, Theorem 1.
    """
    q, k, v, w_o, sigma2 = _one_head(q, k, v, w_o, variance, "d")
    a, scale = _weights(q, k, scale, visible)
    s2 = scale**2 * (q**2 @ sigma2.T)  # (m, n): variance of each logit
    out = np.empty(len(q))
    for block, u in _deviations(a, v, w_o):
        out[block] = (a[block] ** 2 * s2[block] * _squares(u)).sum(axis=1)
    return out


def value_term(
    q: Any, k: Any, v: Any, w_o: Any, variance: Any,
    scale: float | None = None, *, visible: Any = None,
) -> Float:  # fmt: skip
    """D_V of each query, (m,): sum_i a_i^2 sum_c sigma_ic^2 ||W_O,c||^2, exact at any noise.

    One head as in `key_term`, but variance (n, dv) of the value noise. arXiv 2608.14191, Theorem 1.
    """
    q, k, v, w_o, sigma2 = _one_head(q, k, v, w_o, variance, "dv")
    a, _ = _weights(q, k, scale, visible)
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
    q, k, v, w_o, sigma2 = _one_head(q, k, v, w_o, key_variance, "d")
    a, scale = _weights(q, k, scale, visible)
    s2 = scale**2 * (q**2 @ sigma2.T)
    big_s, big_q = (a * s2).sum(axis=1), (a**2 * s2).sum(axis=1)
    out = np.empty(len(q))
    for block, u in _deviations(a, v, w_o):
        p, s, u2 = a[block], s2[block], _squares(u)
        d_k = (p**2 * s * u2).sum(axis=1)
        big_m, small_m = (np.einsum("mn,mnr->mr", x, u) for x in (p * s, p**2 * s))
        out[block] = (
            d_k * (3 * big_q[block] - big_s[block])
            + ((1.5 * p**2 - 6 * p**3) * s**2 * u2).sum(axis=1)
            + _squares(big_m) / 4
            - 2 * (big_m * small_m).sum(axis=1)
            + 6 * _squares(small_m)
        )
    if value_variance is not None:
        tau2 = _one_head(q, k, v, w_o, value_variance, "dv")[-1]
        t2 = tau2 @ (w_o**2).sum(axis=1)
        out += (a**2 * t2 * (2 * s2 * (1 - 2 * a) - big_s[:, None] + 3 * big_q[:, None])).sum(axis=1)
    return out


@overload
def attention_error(layer: Layer, decoded: Decoded, queries: Any = None, by: Literal["layer"] = "layer") -> float: ...
@overload
def attention_error(layer: Layer, decoded: Decoded, queries: Any = None, *, by: Literal["kv_head"]) -> Float: ...
def attention_error(layer: Layer, decoded: Decoded, queries: Any = None, by: str = "layer") -> float | Float:
    """sum ||o_hat - o||^2 / sum ||o||^2 over queries: the unit in which every codec is scored.

    queries: None takes the layer's own with their visibility; an array (query_heads, m, head_dim) is taken as future queries
    that see every token. by="layer": one float, o summed over all heads after W_O. by="kv_head": (kv_heads,) float64, o the
    sum over the query heads of that KV head only, all others exact. ValueError where sum ||o||^2 is 0.
    """
    if by not in ("layer", "kv_head"):
        raise ValueError(f'by: expected "layer" or "kv_head", got {by!r}')
    if queries is not None:
        layer = layer.replace(queries=queries, query_positions=None, window=None)
    exact = attention.head_outputs(layer)
    error = attention.head_outputs(layer, decoded) - exact
    if by == "layer":
        return _relative(attention.project(layer, error), attention.project(layer, exact))
    ratios = []
    for kv in range(layer.kv_heads):
        own = slice(kv * layer.group, (kv + 1) * layer.group)
        w_o = np.stack([layer.projection(h) for h in range(own.start, own.stop)])
        ratios.append(_relative(*(np.einsum("hmv,hvD->mD", x[own], w_o, optimize=True) for x in (error, exact))))
    return np.array(ratios)


def _relative(error: Float, exact: Float) -> float:
    energy = float((exact**2).sum())
    if energy == 0:
        raise ValueError("layer: expected a non-zero attention output to measure an error against, got sum ||o||^2 = 0")
    return float((error**2).sum()) / energy
