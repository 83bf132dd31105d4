"""`Layer`: one layer of a KV cache, with the queries and the output projection that give its error a meaning."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer.rope import Rope

Array = NDArray[Any]

#: Axes of each named extra; what a fitted method may need beside the cache itself.
EXTRA_AXES: Mapping[str, tuple[str, ...]] = {
    "inputs": ("tokens", "model_dim"),
    "key_weight": ("kv_heads", "head_dim", "model_dim"),
    "value_weight": ("kv_heads", "value_dim", "model_dim"),
    "key_fisher": ("kv_heads", "head_dim"),
    "value_fisher": ("kv_heads", "value_dim"),
    "key_fisher_pre_rope": ("kv_heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "value_dim"),
}


def as_array(name: str, value: Any) -> Array:
    """`value` as a NumPy array without copy or cast where that can be; anything with __array__ or __dlpack__ is taken.

    A torch tensor of bfloat16 has no NumPy counterpart; it is reread as ml_dtypes.bfloat16, bit for bit.
    """
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.partition(".")[0] == "torch":
        value = value.detach()
        if value.device.type != "cpu":
            raise TypeError(f"{name}: expected a tensor on the CPU, got one on {value.device}; call .cpu() first")
        if str(value.dtype) == "torch.bfloat16":
            import ml_dtypes

            torch = sys.modules["torch"]  # it made the tensor; this package never imports it here
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    if isinstance(value, (list, tuple)):
        return np.asarray(value)
    raise TypeError(f"{name}: expected an array (or anything with __array__ or __dlpack__), got {type(value).__name__}")


def _positions(name: str, value: Any, axis: str, size: int) -> NDArray[np.int64]:
    positions = as_array(name, value)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {positions.dtype}")
    checks.shape(name, positions, (axis,), {axis: size})
    return positions.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Head:
    """One query head of a layer in float64, as the theory takes it: q (m, d), k (n, d), v (n, dv), w_o (dv, D).

    visible (m, n): which tokens each query sees. `scale` multiplies q.k to give the logit.
    """

    q: NDArray[np.float64]
    k: NDArray[np.float64]
    v: NDArray[np.float64]
    w_o: NDArray[np.float64]
    visible: NDArray[np.bool_]
    scale: float


class Layer:
    """Keys and values of one layer with the queries that read them; a frozen record, arrays kept as given.

    keys: (kv_heads, tokens, head_dim), after RoPE. values: (kv_heads, tokens, value_dim).
    queries: (query_heads, queries, head_dim), after RoPE, or None; query head h reads KV head h // (query_heads // kv_heads).
    output_proj: (query_heads, value_dim, model_dim), W_O split by head, or None: heads are concatenated.
    rope: the rotation that the keys carry, or None. scale: factor of the logits, default 1/sqrt(head_dim).
    index: number of the layer in its model. positions: (tokens,) int64, default arange.
    query_positions: (queries,) int64: query j sees the tokens with position <= query_positions[j]; None: every query sees every token.
    window: with query_positions, query j sees only the last `window` of them, positions > query_positions[j] - window; None: all.
    extras: named arrays that only some methods need, see EXTRA_AXES.

    Elements are float16, bfloat16 (ml_dtypes), float32 or float64. Raises TypeError for other elements and ValueError for
    shapes that do not fit and for NaN or inf, naming the argument and the first index.
    """

    __slots__ = (
        "extras",
        "index",
        "keys",
        "output_proj",
        "positions",
        "queries",
        "query_positions",
        "rope",
        "scale",
        "values",
        "window",
    )  # fmt: skip

    keys: Array
    values: Array
    queries: Array | None
    output_proj: Array | None
    rope: Rope | None
    scale: float
    index: int | None
    positions: NDArray[np.int64]
    query_positions: NDArray[np.int64] | None
    window: int | None
    extras: dict[str, Array]

    def __init__(
        self,
        keys: Any,
        values: Any,
        queries: Any = None,
        output_proj: Any = None,
        *,
        rope: Rope | None = None,
        scale: float | None = None,
        index: int | None = None,
        positions: Any = None,
        query_positions: Any = None,
        window: int | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        def numbers(name: str, value: Any, axes: tuple[str, ...]) -> Array:
            array = checks.floating(name, as_array(name, value))
            sizes.update(checks.shape(name, array, axes, sizes))
            readable = tuple(
                {"kv_heads": "head", "query_heads": "head", "tokens": "token", "queries": "query"}.get(a, a)
                for a in axes
            )
            readable = tuple(a.replace("_dim", " channel").replace("head channel", "channel") for a in readable)
            return checks.finite(name, array, readable)

        sizes: dict[str, int] = {}
        put("keys", numbers("keys", keys, ("kv_heads", "tokens", "head_dim")))
        put("values", numbers("values", values, ("kv_heads", "tokens", "value_dim")))
        for axis in ("kv_heads", "head_dim", "value_dim"):
            if sizes[axis] == 0:
                raise ValueError(f"{'values' if axis == 'value_dim' else 'keys'}: expected {axis} >= 1, got 0")
        put("queries", None if queries is None else numbers("queries", queries, ("query_heads", "queries", "head_dim")))
        heads = sizes.get("query_heads")
        if heads is not None and (heads == 0 or heads % sizes["kv_heads"]):
            raise ValueError(
                f"queries: expected query_heads to be a positive multiple of kv_heads = {sizes['kv_heads']}, got {heads}"
            )
        put(
            "output_proj",
            None
            if output_proj is None
            else numbers("output_proj", output_proj, ("query_heads", "value_dim", "model_dim")),
        )
        if sizes.get("query_heads", 1) == 0 or sizes.get("query_heads", 0) % sizes["kv_heads"]:
            raise ValueError(
                f"output_proj: expected query_heads to be a positive multiple of kv_heads = {sizes['kv_heads']}, "
                f"got {sizes['query_heads']}"
            )
        if rope is not None and not isinstance(rope, Rope):
            raise TypeError(f"rope: expected a kvtheory.Rope or None, got {type(rope).__name__}")
        if rope is not None and rope.rotated > sizes["head_dim"]:
            raise ValueError(
                f"rope: expected at most head_dim = {sizes['head_dim']} rotated channels, got {rope.rotated}"
            )
        put("rope", rope)
        put("scale", sizes["head_dim"] ** -0.5 if scale is None else checks.positive("scale", scale))
        if index is not None and (not isinstance(index, (int, np.integer)) or isinstance(index, bool) or index < 0):
            raise ValueError(f"index: expected an int >= 0 or None, got {index!r}")
        put("index", None if index is None else int(index))
        put(
            "positions",
            np.arange(sizes["tokens"], dtype=np.int64)
            if positions is None
            else _positions("positions", positions, "tokens", sizes["tokens"]),
        )
        if query_positions is not None and queries is None:
            raise ValueError("query_positions: expected None where queries is None, got an array")
        put(
            "query_positions",
            None
            if query_positions is None
            else _positions("query_positions", query_positions, "queries", sizes["queries"]),
        )
        put("window", checks.window(window))
        if window is not None and query_positions is None:
            raise ValueError("window: expected None where query_positions is None, since those queries see every token")
        named: dict[str, Array] = {}
        for name, value in (extras or {}).items():
            if name in EXTRA_AXES:
                named[name] = numbers(f"extras[{name!r}]", value, EXTRA_AXES[name])
            else:
                named[name] = as_array(f"extras[{name!r}]", value)
        put("extras", named)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Layer is frozen: cannot set {name!r}; use layer.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Layer is frozen: cannot delete {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, ({name: getattr(self, name) for name in self.__slots__},)

    def __repr__(self) -> str:
        parts = [f"keys {self.keys.shape} {self.keys.dtype}", f"values {self.values.shape}"]
        if self.queries is not None:
            parts.append(f"queries {self.queries.shape}" + ("" if self.query_positions is None else " causal"))
        if self.output_proj is not None:
            parts.append(f"output_proj {self.output_proj.shape}")
        if self.index is not None:
            parts.insert(0, f"index {self.index}")
        return f"Layer({', '.join(parts)})"

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.keys.shape[2])

    @property
    def value_dim(self) -> int:
        return int(self.values.shape[2])

    @property
    def query_heads(self) -> int:
        """Number of query heads; that of the output projection, else of the KV heads, where there are no queries."""
        for array in (self.queries, self.output_proj):
            if array is not None:
                return int(array.shape[0])
        return self.kv_heads

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    def require(self, *names: str, by: str) -> None:
        """ValueError if one of the optional parts is missing, saying which and who needs it ("extras:inputs" for an extra)."""
        for name in names:
            extra = name.removeprefix("extras:")
            missing = extra not in self.extras if extra != name else getattr(self, name) is None
            if missing:
                raise ValueError(f"{name}: {by} needs it, and this layer has none")

    def replace(self, **changes: Any) -> Layer:
        """A new Layer with some fields changed; the same checks apply."""
        unknown = set(changes) - set(self.__slots__)
        if unknown:
            raise TypeError(f"replace: Layer has no field {sorted(unknown)[0]!r}")
        return _rebuild({name: getattr(self, name) for name in self.__slots__} | changes)

    def visible(self) -> NDArray[np.bool_]:
        """(queries, tokens): whether query j sees token i (all True where query_positions is None).

        That is positions[i] <= query_positions[j], and positions[i] > query_positions[j] - window where there is a window.
        """
        self.require("queries", by="visible")
        assert self.queries is not None
        if self.query_positions is None:
            return np.ones((self.queries.shape[1], self.tokens), dtype=bool)
        before = self.query_positions[:, None] - self.positions[None, :]
        return (before >= 0) if self.window is None else (before >= 0) & (before < self.window)

    def projection(self, head: int) -> NDArray[np.float64]:
        """W_O of query head `head`, (value_dim, model_dim) float64; the head's identity block where output_proj is None."""
        if self.output_proj is not None:
            return np.asarray(self.output_proj[head], dtype=np.float64)
        block = np.zeros((self.value_dim, self.query_heads * self.value_dim))
        block[:, head * self.value_dim : (head + 1) * self.value_dim] = np.eye(self.value_dim)
        return block

    def head(self, query_head: int) -> Head:
        """Query head `query_head` with the KV head it reads, in float64."""
        self.require("queries", by="head")
        assert self.queries is not None
        if not 0 <= query_head < self.query_heads:
            raise IndexError(f"query_head: expected 0 <= query_head < {self.query_heads}, got {query_head}")
        kv = query_head // self.group
        q, k, v = (np.asarray(x, dtype=np.float64) for x in (self.queries[query_head], self.keys[kv], self.values[kv]))
        return Head(q, k, v, self.projection(query_head), self.visible(), self.scale)

    def keys_pre_rope(self) -> NDArray[np.float64]:
        """(kv_heads, tokens, head_dim) float64: the keys with their rotation undone; the keys themselves where rope is None."""
        if self.rope is None:
            return np.asarray(self.keys, dtype=np.float64)
        return self.rope.undo(self.keys, self.positions)

    @classmethod
    def from_hf(cls, past_key_values: Any, i: int, batch: int = 0) -> Layer:
        """Layer `i` of a transformers cache (`.layers[i].keys/.values`, or the older tuple of pairs), for one batch row."""
        layers = getattr(past_key_values, "layers", past_key_values)
        try:
            entry = layers[i]
        except (IndexError, KeyError, TypeError):
            raise ValueError(
                f"past_key_values: expected a cache with a layer {i}, got {type(past_key_values).__name__}"
            ) from None
        keys, values = (entry.keys, entry.values) if hasattr(entry, "values") and hasattr(entry, "keys") else entry[:2]
        if not 0 <= batch < len(keys):
            raise ValueError(f"batch: expected 0 <= batch < {len(keys)}, got {batch}")
        return cls(keys[batch], values[batch], index=i)


def _rebuild(fields: dict[str, Any]) -> Layer:
    keys, values = fields.pop("keys"), fields.pop("values")
    return Layer(keys, values, fields.pop("queries"), fields.pop("output_proj"), **fields)
