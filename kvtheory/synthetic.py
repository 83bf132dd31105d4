"""Synthetic layers, each kind isolating one property that a bound or a codec may depend on.

All kinds start from independent standard normal keys, values and queries (so that logits have variance 1 under the default
scale) and W_O of variance 1/(query_heads value_dim), then change one thing. Queries are future queries: they see every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer
from kvtheory.randomness import generator

__all__ = ["KINDS", "make"]

Float = NDArray[np.float64]


@dataclass
class _Draft:
    """What a kind may change: keys (kv_heads, n, d), values (kv_heads, n, dv), queries (query_heads, m, d)."""

    keys: Float
    values: Float
    queries: Float
    rng: np.random.Generator

    def group(self) -> int:
        return len(self.queries) // len(self.keys)


def _gaussian(x: _Draft) -> None:
    """No structure: independent normal keys, values and queries; attention is diffuse and nothing can be exploited."""


def _low_rank(x: _Draft) -> None:
    """Keys and values lie within 1 % of a subspace of an eighth of the dimensions: the covariance spectrum has a cliff."""
    for array in (x.keys, x.values):
        d = array.shape[-1]
        rank = max(1, d // 8)
        basis = x.rng.standard_normal((len(array), rank, d)) / np.sqrt(rank)
        array[:] = array[..., :rank] @ basis + 0.01 * array


def _outlier_channels(x: _Draft) -> None:
    """One key channel in 32 (at least one) has a mean of 20 and a standard deviation of 4: per-channel scales and centring matter."""
    d = x.keys.shape[-1]
    for head in x.keys:
        channels = x.rng.choice(d, size=max(1, d // 32), replace=False)
        head[:, channels] = 20 + 4 * head[:, channels]


def _attention_sink(x: _Draft) -> None:
    """Token 0 draws most of the attention of every query and has a value near zero: it must be kept, and hardly shows in sum a v."""
    direction = x.rng.standard_normal((len(x.keys), x.keys.shape[-1]))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    d, n = x.keys.shape[-1], x.keys.shape[1]
    x.queries += 2 * np.sqrt(d) * np.repeat(direction, x.group(), axis=0)[:, None, :]
    # along the common direction of the queries every ordinary key is flat, so the sink alone meets it
    x.keys -= (x.keys @ direction[:, :, None]) * direction[:, None, :]
    if n:
        x.keys[:, 0] = (np.log(max(n, 2)) + 2) / 2 * direction
        x.values[:, 0] *= 0.01


def _clustered(x: _Draft) -> None:
    """Tokens come in one cluster per 16, with a scatter of 5 %: few weighted representatives summarise the cache."""
    heads, n, _ = x.keys.shape
    count = max(1, n // 16)
    member = x.rng.integers(count, size=(heads, n))
    for array in (x.keys, x.values):
        centres = x.rng.standard_normal((heads, count, array.shape[-1]))
        array[:] = np.take_along_axis(centres, member[..., None], axis=1) + 0.05 * array


def _search(x: _Draft) -> None:
    """Query j puts exactly half its mass on token j (mod tokens): every token is somebody's answer (a search instance of arXiv 2607.01520). Values: signs / sqrt(dv)."""
    n, d = x.keys.shape[1:]
    if n < 2 or d < 2:
        raise ValueError(f"tokens, head_dim: kind 'search' expects at least 2 of each, got {n} and {d}")
    x.values[:] = np.where(x.values < 0, -1.0, 1.0) / np.sqrt(x.values.shape[-1])
    x.keys /= np.linalg.norm(x.keys, axis=-1, keepdims=True)
    own = np.arange(x.queries.shape[1]) % n
    for h in range(len(x.queries)):
        k = x.keys[h // x.group()]
        x.queries[h] = _half_mass(k[own] @ k.T, own)[:, None] * np.sqrt(d) * k[own]


def _half_mass(cosine: Float, own: NDArray[np.int64]) -> Float:
    """(queries,) beta with sum_{i != own} exp(beta (cosine_i - 1)) = 1, i.e. half of the mass on `own`; by bisection."""
    rest = np.arange(cosine.shape[1])[None, :] != own[:, None]

    def others(beta: Float) -> Float:
        return np.where(rest, np.exp(beta[:, None] * (cosine - 1)), 0).sum(axis=1)

    low, high = np.zeros(len(own)), np.full(len(own), 4.0)
    while (others(high) > 1).any():
        high = np.where(others(high) > 1, 2 * high, high)
        if high.max() > 1e12:
            raise ValueError("tokens: kind 'search' expects distinct keys; use a larger head_dim for so many tokens")
    for _ in range(80):
        middle = (low + high) / 2
        above = others(middle) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return high


def _needle(x: _Draft) -> None:
    """One query in eight puts about 95 % of its mass on one hidden token, the others none: rare, critical, invisible to averages."""
    heads, n, d = x.keys.shape
    if n == 0 or d < 2:
        raise ValueError(f"tokens, head_dim: kind 'needle' expects tokens >= 1 and head_dim >= 2, got {n} and {d}")
    x.keys[..., 0] = 0.0
    hidden = x.rng.integers(n, size=heads)
    x.keys[np.arange(heads), hidden] = 0.0
    x.keys[np.arange(heads), hidden, 0] = np.sqrt(d)
    x.queries[..., 0] = -np.log(n) - 4
    x.queries[:, ::8, 0] = np.log(max(n, 2)) + 0.5 + np.log(19)


def _heavy_tail(x: _Draft) -> None:
    """Keys and values have Student t entries with 3 degrees of freedom (unit variance): Gaussian codebooks overload."""
    for array in (x.keys, x.values):
        array[:] = x.rng.standard_t(3, size=array.shape) / np.sqrt(3)


_MAKERS: dict[str, Callable[[_Draft], None]] = {
    "gaussian": _gaussian,
    "low_rank": _low_rank,
    "outlier_channels": _outlier_channels,
    "attention_sink": _attention_sink,
    "clustered": _clustered,
    "search": _search,
    "needle": _needle,
    "heavy_tail": _heavy_tail,
}

#: kind -> the property it isolates
KINDS: dict[str, str] = {kind: (maker.__doc__ or "").strip() for kind, maker in _MAKERS.items()}


def make(
    kind: str,
    kv_heads: int = 2,
    query_heads: int = 4,
    tokens: int = 256,
    head_dim: int = 64,
    value_dim: int | None = None,
    model_dim: int | None = None,
    queries: int = 128,
    seed: int = 0,
) -> Layer:
    """A float64 Layer of one of the KINDS, with queries (query_positions None) and an output projection.

    value_dim defaults to head_dim, model_dim to query_heads * value_dim. Same arguments, same bits on one NumPy version.
    ValueError for an unknown kind or sizes that the kind cannot have.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind: expected one of {', '.join(_MAKERS)}, got {kind!r}")
    value_dim = head_dim if value_dim is None else value_dim
    model_dim = query_heads * value_dim if model_dim is None else model_dim
    sizes = {
        "kv_heads": kv_heads, "query_heads": query_heads, "tokens": tokens, "head_dim": head_dim,
        "value_dim": value_dim, "model_dim": model_dim, "queries": queries,
    }  # fmt: skip
    for name, size in sizes.items():
        least = 0 if name in ("tokens", "queries") else 1
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name}: expected an int >= {least}, got {size!r}")
    if query_heads % kv_heads:
        raise ValueError(f"query_heads: expected a multiple of kv_heads = {kv_heads}, got {query_heads}")
    rng = generator(seed, f"synthetic {kind}")
    draft = _Draft(
        rng.standard_normal((kv_heads, tokens, head_dim)),
        rng.standard_normal((kv_heads, tokens, value_dim)),
        rng.standard_normal((query_heads, queries, head_dim)),
        rng,
    )
    output_proj = rng.standard_normal((query_heads, value_dim, model_dim)) / np.sqrt(query_heads * value_dim)
    _MAKERS[kind](draft)
    return Layer(draft.keys, draft.values, draft.queries, output_proj)


def attention_mass(layer: Layer, query_head: int) -> Float:
    """(queries, tokens) attention weights of one head: to see that a kind does what it says."""
    head = layer.head(query_head)
    return attention.weights(head.q, head.k, head.scale, visible=head.visible)
