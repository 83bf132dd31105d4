"""Softmax attention with grouped queries, log-weights and visibility, its Jacobians, in float64.

For one query q over keys k_i, values v_i with log-weights l_i:

    z_i = scale q.k_i + l_i,   a_i = exp(z_i) / sum_j exp(z_j) over the visible tokens,   o = sum_i a_i v_i W_O

and since d a_i = a_i (dz_i - sum_j a_j dz_j):

    do/dz_i = a_i (v_i W_O - o),      do/dk_i = scale a_i (v_i W_O - o) q^T,      do/dv_i = a_i W_O^T.

These three lines are what all three papers measure: arXiv 2608.14191, 2604.15356 and 2607.01520.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.layer import Decoded, Layer
from kvtheory.layer.record import as_array

__all__ = [
    "attend",
    "key_jacobian",
    "layer_outputs",
    "logit_jacobian",
    "logits",
    "softmax",
    "value_jacobian",
    "weights",
]

Float = NDArray[np.float64]

#: queries taken at once, so that a long cache never holds all its logits
_QUERY_BLOCK_ELEMENTS = 1 << 23


def softmax(z: Float) -> Float:
    """a_i = exp(z_i) / sum_j exp(z_j) along the last axis; -inf entries get exactly 0. Shift by the maximum: no overflow."""
    shifted = np.exp(z - z.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def logits(
    q: ArrayLike, k: ArrayLike, scale: float, log_weights: ArrayLike | None = None, visible: Any = None
) -> Float:
    """z = scale q k^T + log_weights, (m, n); -inf where `visible` (m, n) is False. q (m, d), k (n, d), log_weights (n,)."""
    z = scale * (np.asarray(q, dtype=np.float64) @ np.asarray(k, dtype=np.float64).T)
    if log_weights is not None:
        z = z + np.asarray(log_weights, dtype=np.float64)
    return z if visible is None else np.where(visible, z, -np.inf)


def weights(
    q: ArrayLike, k: ArrayLike, scale: float, log_weights: ArrayLike | None = None, visible: Any = None
) -> Float:
    """a = softmax(logits), (m, n), for one head."""
    return softmax(logits(q, k, scale, log_weights, visible))


def logit_jacobian(a: Float, vw: Float) -> Float:
    """do/dz_i = a_i (v_i W_O - o), (n, D): how the output of one query moves with the logit of token i. a (n,), vw = v W_O (n, D)."""
    return a[:, None] * (vw - a @ vw)


def key_jacobian(q: Float, a: Float, vw: Float, scale: float) -> Float:
    """do/dk_i = scale a_i (v_i W_O - o) q^T, (n, D, d), for one query q (d,)."""
    return scale * logit_jacobian(a, vw)[:, :, None] * q


def value_jacobian(a: Float, w_o: Float) -> Float:
    """do/dv_i = a_i W_O^T, (n, D, dv), for one query. w_o (dv, D)."""
    return a[:, None, None] * w_o.T


def attend(
    queries: Any,
    keys: Any,
    values: Any,
    *,
    scale: float | None = None,
    log_weights: Any = None,
    positions: Any = None,
    query_positions: Any = None,
    window: int | None = None,
) -> Float:
    """Attention outputs before W_O, (query_heads, queries, value_dim), float64.

    queries (query_heads, queries, head_dim), keys (kv_heads, tokens, head_dim), values (kv_heads, tokens, value_dim); query
    head h reads KV head h // (query_heads // kv_heads). scale: default 1/sqrt(head_dim). log_weights (kv_heads, tokens):
    natural logarithms added to the logits, -inf hides a token. positions (tokens,) or (kv_heads, tokens), default arange;
    query_positions (queries,): query j sees positions <= query_positions[j], of which the last `window` if one is given; None: every token.

    ValueError for shapes that do not fit, for NaN or inf, and for a query that sees no token (its softmax is undefined);
    TypeError for elements that are no floats and positions that are no integers.
    """
    q, k, v = (
        checks.floating(name, as_array(name, x)).astype(np.float64)
        for name, x in (("queries", queries), ("keys", keys), ("values", values))
    )
    sizes = checks.shape("keys", k, ("kv_heads", "tokens", "head_dim"))
    sizes |= checks.shape("values", v, ("kv_heads", "tokens", "value_dim"), sizes)
    sizes |= checks.shape("queries", q, ("query_heads", "queries", "head_dim"), sizes)
    heads, kv_heads, tokens = sizes["query_heads"], sizes["kv_heads"], sizes["tokens"]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"queries: expected query_heads to be a positive multiple of kv_heads = {kv_heads}, got {heads}"
        )
    if sizes["head_dim"] == 0:
        raise ValueError("keys: expected head_dim >= 1, got 0")
    for name, array, axes in (
        ("queries", q, ("head", "query", "channel")),
        ("keys", k, ("head", "token", "channel")),
        ("values", v, ("head", "token", "channel")),
    ):
        checks.finite(name, array, axes)
    scale = sizes["head_dim"] ** -0.5 if scale is None else checks.positive("scale", scale)
    bias = np.zeros((kv_heads, tokens))
    if log_weights is not None:
        bias = np.asarray(as_array("log_weights", log_weights), dtype=np.float64)
        checks.shape("log_weights", bias, ("kv_heads", "tokens"), sizes)
        if np.isnan(bias).any() or np.isposinf(bias).any():
            raise ValueError("log_weights: expected finite numbers or -inf, got NaN or +inf")
    where = np.arange(tokens) if positions is None else _integers("positions", positions)
    if where.ndim == 1:
        checks.shape("positions", where, ("tokens",), sizes)
        where = np.broadcast_to(where, (kv_heads, tokens))
    checks.shape("positions", where, ("kv_heads", "tokens"), sizes)
    limits = None if query_positions is None else _integers("query_positions", query_positions)
    if limits is not None:
        checks.shape("query_positions", limits, ("queries",), sizes)
    if checks.window(window) is not None and limits is None:
        raise ValueError("window: expected None where query_positions is None, since those queries see every token")

    out = np.empty((heads, sizes["queries"], sizes["value_dim"]))
    step = max(1, _QUERY_BLOCK_ELEMENTS // max(tokens, 1))
    for h in range(heads):
        kv = h // (heads // kv_heads)
        for start in range(0, sizes["queries"], step):
            block = slice(start, start + step)
            visible = None
            if limits is not None:
                before = limits[block, None] - where[kv][None, :]
                visible = (before >= 0) if window is None else (before >= 0) & (before < window)
            z = logits(q[h, block], k[kv], scale, bias[kv], visible)
            top = z.max(axis=1, initial=-np.inf)
            if not np.isfinite(top).all():
                blind = np.isneginf(top)
                if blind.any():
                    raise ValueError(
                        f"queries: expected every query to see a token, but query {start + int(np.argmax(blind))} of head {h} sees none"
                    )
                raise ValueError(
                    f"queries, keys: the logits of query {start + int(np.argmin(np.isfinite(top)))} of head {h} overflow float64"
                )
            out[h, block] = softmax(z) @ v[kv]
    return out


def _integers(name: str, value: Any) -> NDArray[Any]:
    array = as_array(name, value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    return array


def layer_outputs(layer: Layer, decoded: Decoded | None = None) -> Float:
    """sum over heads of o_h W_O^h, (queries, model_dim), float64, as the layer's queries see the cache (or `decoded` in its place).

    output_proj None: the heads' outputs side by side (W_O^h is the h-th identity block). ValueError if the layer has no
    queries or `decoded` does not fit it.
    """
    return project(layer, head_outputs(layer, decoded))


def head_outputs(layer: Layer, decoded: Decoded | None = None) -> Float:
    """`attend` on the layer's own queries, visibility and scale; (query_heads, queries, value_dim)."""
    layer.require("queries", by="layer_outputs")
    if decoded is None:
        decoded = Decoded.exact(layer)
    expected = (layer.kv_heads, layer.head_dim, layer.value_dim)
    actual = (decoded.keys.shape[0], decoded.keys.shape[2], decoded.values.shape[2])
    if expected != actual:
        raise ValueError(f"decoded: expected (kv_heads, head_dim, value_dim) = {expected}, got {actual}")
    return attend(
        layer.queries,
        decoded.keys,
        decoded.values,
        scale=layer.scale,
        log_weights=decoded.log_weights,
        positions=decoded.positions,
        query_positions=layer.query_positions,
        window=layer.window,
    )


def project(layer: Layer, outputs: Float) -> Float:
    """sum_h o_h W_O^h of outputs (query_heads, queries, value_dim); (queries, model_dim)."""
    if layer.output_proj is None:
        heads, queries, value_dim = outputs.shape
        return outputs.transpose(1, 0, 2).reshape(queries, heads * value_dim)
    return np.einsum("hmv,hvD->mD", outputs, np.asarray(layer.output_proj, dtype=np.float64), optimize=True)
