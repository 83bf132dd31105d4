"""The relative error of the attention output: the unit in which every codec is scored."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Decoded, Layer

__all__ = ["attention_error"]

Float = NDArray[np.float64]


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
