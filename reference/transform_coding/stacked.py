"""A token as one vector: keys before RoPE of head 0, 1, ..., then values of head 0, 1, ...: (tokens, kv_heads (head_dim + value_dim)).

Transform coders take linear combinations of its entries: of one head's keys, of all of a layer's keys and values, as each says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Layer, Rope
from reference.rotary import rotary

__all__ = ["calibration", "columns", "exact_tokens", "finite", "head_groups", "most_key", "stack", "unstack"]

Float64 = NDArray[np.float64]


def exact_tokens(tokens: int, sinks: int, window: int) -> tuple[int, int]:
    """(first, last): tokens first ... last - 1 are coded, those before and behind stay exact: `sinks` at the start, `window` at the end."""
    first = min(sinks, tokens)
    return first, max(first, tokens - window)


def columns(layer: Any, side: str, heads: Any) -> NDArray[np.int64]:
    """Where the "keys" or "values" of `heads` stand in a stacked vector; layer: anything with kv_heads, head_dim and value_dim."""
    dim = layer.head_dim if side == "keys" else layer.value_dim
    start = 0 if side == "keys" else layer.kv_heads * layer.head_dim
    return np.concatenate([start + h * dim + np.arange(dim) for h in heads]).astype(np.int64)


def head_groups(kv_heads: int, size: int) -> list[range]:
    """KV heads coded together: `size` each, the last ones fewer."""
    return [range(start, min(start + size, kv_heads)) for start in range(0, kv_heads, size)]


def most_key(rope: Rope | None) -> float:
    """Of a float64 key, in magnitude, so that undoing RoPE (sqrt(2) over the rope's scaling at most) and sums of some thousand of them are finite."""
    return np.inf if rope is None else 2.0**1010 * min(1.0, rope.attention_scaling)


def finite(keys: NDArray[Any], values: NDArray[Any], rope: Rope | None = None) -> None:
    """ValueError for NaN and inf, with their places; and, where there is a rope, for float64 keys beyond `most_key`."""
    for name, array in (("keys", keys), ("values", values)):
        checks.finite(name, array, ("head", "token", "channel"))
    most = most_key(rope)
    if keys.dtype != np.float64 or not (large := np.abs(keys) > most).any():
        return
    head, token, channel = (int(i) for i in np.unravel_index(int(large.argmax()), keys.shape))
    raise ValueError(
        f"keys: expected at most 2^{np.log2(most):g} in magnitude, beyond which undoing RoPE may overflow, got {float(keys[head, token, channel]):g} "
        f"at (head {head}, token {token}, channel {channel})"
    )


def stack(keys: NDArray[Any], values: NDArray[Any], rope: Rope | None, positions: NDArray[np.int64]) -> Float64:
    """keys (heads, n, d), values (heads, n, dv) -> (n, heads (d + dv)), RoPE undone; positions (n,) or (heads, n). ValueError as `finite`."""
    finite(keys, values, rope)
    k = keys.astype(np.float64) if rope is None else rotary(rope).undo(keys, np.broadcast_to(positions, keys.shape[:2]))
    v = values.astype(np.float64)
    return np.concatenate([a.transpose(1, 0, 2).reshape(a.shape[1], a.shape[0] * a.shape[2]) for a in (k, v)], axis=1)


def calibration(layers: list[Layer], sinks: int) -> Float64:
    """Stacked vectors of the tokens behind the sinks of all these layers of one index, (n, entries). ValueError if there is none."""
    for one in layers:
        # here, as what is behind the sinks counts its tokens from there
        finite(one.keys, one.values, one.rope)
    x = np.concatenate(
        [stack(one.keys[:, sinks:], one.values[:, sinks:], one.rope, one.positions[sinks:]) for one in layers]
    )
    if len(x) == 0:
        raise ValueError(f"calibration: expected a token behind the {sinks} sinks in layer {layers[0].index}, got none")
    return x


def unstack(
    x: Float64,
    heads: int,
    dims: tuple[int, int],
    dtypes: tuple[Any, Any],
    rope: Rope | None,
    positions: NDArray[np.int64],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The inverse, rounded to the element types: at most their largest number, a zero as +0."""
    n, split = len(x), heads * dims[0]
    k = x[:, :split].reshape(n, heads, dims[0]).transpose(1, 0, 2)
    v = x[:, split:].reshape(n, heads, dims[1]).transpose(1, 0, 2)
    if rope is not None:
        k = rotary(rope).apply(k, np.broadcast_to(positions, (heads, n)))
    return _rounded(k, dtypes[0]), _rounded(v, dtypes[1])


def _rounded(x: Float64, dtype: Any) -> NDArray[Any]:
    import ml_dtypes

    limit = float(ml_dtypes.finfo(dtype).max)
    # through float32, as a kernel's last registers are; float64 keeps what it has
    single = np.clip(x, -limit, limit) if dtype == np.float64 else np.clip(x, -limit, limit).astype(np.float32)
    return np.ascontiguousarray(single.astype(dtype) + dtype.type(0))
