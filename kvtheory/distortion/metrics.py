"""Metrics of noise: matrices M such that noise of covariance S, alike for all tokens of a KV head, costs tr(M S) at the output.

One stored vector feeds all query heads h of its group, so its error is coherent over them. With u_hi = v_i W_O^h - o_h, first order:

    M_K = scale^2 E_q sum_i sum_{h,h'} a_hi a_h'i <u_hi, u_h'i> q_h q_h'^T        M_V = E_q sum_i A_i A_i^T,   A_i = sum_h a_hi W_O^h

A key before RoPE meets R_i^T q, q as it stands after RoPE (logit = q^T R_i k_i), so there q_h becomes R_i^T q_h = R_{m-i} q_h^pre, m the
query's position, inside the sum over i: distances are weighted by a_i^2 ||u_i||^2, jointly with q, and are never negative. Noise is
independent over tokens; independent noise on keys and values adds tr(M_K S_K) + tr(M_V S_V).
arXiv 2608.14191, theorem 1, for one head and one query; over a group and over distances: derived here.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer

__all__ = ["key_metric", "query_metric", "value_metric"]

Float = NDArray[np.float64]

#: numbers of one block of rotated queries
_BLOCK_ELEMENTS = 1 << 22


def key_metric(
    layer: Layer, *, pre_rope: bool | Literal["own"] = False, coherent: bool = True, tokens: int | None = None
) -> Float:
    """M_K, (kv_heads, d, d): symmetric, positive semidefinite; mean over queries, sum over the tokens they see, scale^2 included.

    pre_rope: for noise on keys before RoPE; "own": as if every key stood at the query's own position, distance 0, which is a wrong
    metric, for comparison. coherent=False drops the terms h != h', as if each query head had noise of its own: a wrong
    metric, for comparison. tokens: of each query only its so many heaviest tokens, scaled up to the weight of all, which is an
    estimate; None: exact, in O(queries tokens G^2 d^2). ValueError: no queries, or pre_rope without a rope.
    """
    needs = [] if pre_rope is False else ["rope"] if pre_rope is True else ["rope", "query_positions"]
    layer.require("queries", *needs, by="key_metric")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens: expected at least 1, got {tokens}")
    return np.stack([_key_metric(layer, kv, pre_rope, coherent, tokens) for kv in range(layer.kv_heads)])


def _group(layer: Layer, kv: int) -> tuple[Float, Float, Float, Float]:
    """q (G, m, d), v (n, dv), W_O (G, dv, D), a (G, m, n) of one KV head."""
    heads = [layer.head(h) for h in range(kv * layer.group, (kv + 1) * layer.group)]
    a = np.stack([attention.weights(h.q, h.k, h.scale, visible=h.visible) for h in heads])
    return np.stack([h.q for h in heads]), heads[0].v, np.stack([h.w_o for h in heads]), a


def _key_metric(layer: Layer, kv: int, pre_rope: bool | Literal["own"], coherent: bool, tokens: int | None) -> Float:
    q, v, w_o, a = _group(layer, kv)
    group, queries, d = q.shape
    # outputs move alike with a shift common to all values: relative to the heaviest token the deviations of a sink head keep their digits
    v = v - v[a.sum(axis=(0, 1)).argmax()]
    o = a @ v  # (G, m, dv)
    product = np.einsum("gvD,hwD->ghvw", w_o, w_o, optimize=True)
    everything = tokens is None or tokens >= len(v)
    size = len(v) if tokens is None else min(tokens, len(v))
    out = np.zeros((d, d))
    step = max(1, _BLOCK_ELEMENTS // max(1, group * size * max(d, v.shape[1])))
    for start in range(0, queries, step):
        block = slice(start, start + step)
        rows = np.arange(len(q[0, block]))[:, None]
        if everything:
            at, scale_up = np.broadcast_to(np.arange(len(v)), (len(rows), len(v))), np.ones(len(rows))
        else:
            at, scale_up = _heaviest(q[:, block], v, a[:, block], o[:, block], product, size)
        u = v[at] - o[:, block, None]  # (G, m, S, dv)
        u *= a[:, block][:, rows, at][..., None]
        r = np.broadcast_to(q[:, block, None], (group, len(rows), size, d))
        if pre_rope:
            assert layer.rope is not None
            # R_p^T and the scaling s: undo divides by s, the logit multiplies by it
            if pre_rope == "own":
                assert layer.query_positions is not None
                places = np.broadcast_to(layer.query_positions[block, None], at.shape)
            else:
                places = layer.positions[at]
            r = layer.rope.undo(r, places)
            r[..., : layer.rope.rotated] *= layer.rope.attention_scaling**2
        for g in range(group):
            for h in range(g, group) if coherent else (g,):
                inner = np.einsum("msv,msv->ms", u[g] @ product[g, h], u[h]) * scale_up[:, None]
                part = (r[g] * inner[..., None]).reshape(-1, d).T @ r[h].reshape(-1, d)
                out += part if g == h else part + part.T
    out *= layer.scale**2 / queries
    return 0.5 * (out + out.T)


def _heaviest(q: Float, v: Float, a: Float, o: Float, product: Float, size: int) -> tuple[NDArray[np.int64], Float]:
    """(tokens (m, S) of most sum_h a_hi^2 ||u_hi||^2 ||q_h||^2, weight of all over theirs (m,))."""
    weight: Float = np.zeros((a.shape[1], a.shape[2]))
    for g in range(len(q)):
        square = np.einsum("nv,nv->n", v @ product[g, g], v)
        cross = (o[g] @ product[g, g]) @ v.T
        own = np.einsum("mv,mv->m", o[g] @ product[g, g], o[g])
        weight += a[g] ** 2 * np.maximum(square - 2 * cross + own[:, None], 0) * (q[g] ** 2).sum(axis=1)[:, None]
    at = np.argpartition(weight, weight.shape[1] - size, axis=1)[:, -size:]
    kept, total = np.take_along_axis(weight, at, axis=1).sum(axis=1), weight.sum(axis=1)
    return at, np.where(kept > 0, total / np.where(kept > 0, kept, 1.0), 1.0)


def query_metric(layer: Layer, *, pre_rope: bool = False) -> Float:
    """scale^2 sum_h E[q_h q_h^T] over the query heads of each KV head, (kv_heads, d, d): what the paper's channel weights are diagonals of.

    pre_rope: of queries before RoPE, by their own positions, which stands for distance 0 to every key; scaled by s^2 as logits are.
    It is M_K up to a factor where the token factor sum_i a_i^2 ||u_i||^2 is uncorrelated with q q^T, and distances do not matter.
    """
    layer.require("queries", *(["rope", "query_positions"] if pre_rope else []), by="query_metric")
    assert layer.queries is not None
    q: Any = layer.queries.astype(np.float64)
    if pre_rope:
        assert layer.rope is not None and layer.query_positions is not None
        q = layer.rope.undo(q, layer.query_positions)
        q[..., : layer.rope.rotated] *= layer.rope.attention_scaling**2
    d = q.shape[-1]
    q = q.reshape(layer.kv_heads, -1, d)
    return layer.scale**2 * (q.transpose(0, 2, 1) @ q) / layer.queries.shape[1]


def value_metric(layer: Layer, *, coherent: bool = True) -> Float:
    """M_V, (kv_heads, dv, dv): exact at any noise. coherent=False drops the terms h != h', for comparison."""
    layer.require("queries", by="value_metric")
    out = []
    for kv in range(layer.kv_heads):
        q, _, w_o, a = _group(layer, kv)
        together = np.einsum("gmn,hmn->gh", a, a, optimize=True) / q.shape[1]
        if not coherent:
            together = np.diag(np.diag(together))
        m = np.einsum("gh,gvD,hwD->vw", together, w_o, w_o, optimize=True)
        out.append(0.5 * (m + m.T))
    return np.stack(out)
