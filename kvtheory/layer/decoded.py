"""`Decoded`: what the receiver of a compressed layer holds. Heads may keep different numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer.record import Layer, as_array

#: position and log-weight of a padding token
PADDING_POSITION = -1


@dataclass(frozen=True, eq=False)
class Decoded:
    """keys (kv_heads, tokens, head_dim), values (kv_heads, tokens, value_dim), log_weights and positions (kv_heads, tokens), kept (kv_heads,).

    Head h keeps kept[h] tokens in time order; the rest of its row is padding: keys = values = 0, log_weight = -inf,
    position = -1. log_weights are natural logarithms, added to the logits; 0 for an ordinary token.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    log_weights: NDArray[np.float64]
    positions: NDArray[np.int64]
    kept: NDArray[np.int64]

    def __post_init__(self) -> None:
        arrays = {name: as_array(name, getattr(self, name)) for name in self.__dataclass_fields__}
        sizes = checks.shape("keys", checks.floating("keys", arrays["keys"]), ("kv_heads", "tokens", "head_dim"))
        sizes |= checks.shape(
            "values", checks.floating("values", arrays["values"]), ("kv_heads", "tokens", "value_dim"), sizes
        )
        for name in ("log_weights", "positions"):
            checks.shape(name, arrays[name], ("kv_heads", "tokens"), sizes)
        checks.shape("kept", arrays["kept"], ("kv_heads",), sizes)
        for name in ("positions", "kept"):
            if arrays[name].dtype.kind not in "iu":
                raise TypeError(f"{name}: expected integers, got {arrays[name].dtype}")
        for name in ("keys", "values"):
            checks.finite(name, arrays[name], ("head", "token", "channel"))
        arrays["log_weights"] = arrays["log_weights"].astype(np.float64, copy=False)
        arrays["positions"] = arrays["positions"].astype(np.int64, copy=False)
        arrays["kept"] = arrays["kept"].astype(np.int64, copy=False)
        kept, tokens = arrays["kept"], sizes["tokens"]
        if ((kept < 0) | (kept > tokens)).any():
            raise ValueError(f"kept: expected numbers from 0 to {tokens}, got {kept.tolist()}")
        padding = np.arange(tokens)[None, :] >= kept[:, None]
        weights = arrays["log_weights"]
        if np.isnan(weights).any() or np.isposinf(weights).any():
            raise ValueError("log_weights: expected finite numbers (or -inf for padding), got NaN or +inf")
        if not (np.isneginf(weights) == padding).all():
            raise ValueError("log_weights: expected -inf exactly at the padding behind kept[h] tokens of each head")
        if not ((arrays["positions"] == PADDING_POSITION) == padding).all():
            raise ValueError("positions: expected -1 exactly at the padding behind kept[h] tokens of each head")
        if arrays["keys"][padding].any() or arrays["values"][padding].any():
            raise ValueError("keys, values: expected 0 at the padding behind kept[h] tokens of each head")
        if tokens > 1 and ((np.diff(arrays["positions"], axis=1) < 0) & ~padding[:, 1:]).any():
            raise ValueError("positions: expected time order (ascending) in each head")
        for name, array in arrays.items():
            object.__setattr__(self, name, array)

    @classmethod
    def of(cls, keys: Any, values: Any, positions: Any = None, *, checked: bool = False) -> Decoded:
        """Every token kept with weight 1: keys (kv_heads, tokens, d), values (kv_heads, tokens, dv), positions (tokens,) or None.

        checked: positions ascend, and all numbers are finite, as those of a decoder that clips: they are not looked at again.
        """
        keys, values = as_array("keys", keys), as_array("values", values)
        heads, tokens = keys.shape[:2]
        positions = np.arange(tokens) if positions is None else as_array("positions", positions)
        arrays = (
            keys,
            values,
            np.zeros((heads, tokens)),
            np.broadcast_to(positions.astype(np.int64), (heads, tokens)),
            np.full(heads, tokens, dtype=np.int64),
        )
        if not checked:
            return cls(*arrays)
        made = object.__new__(cls)
        for name, array in zip(cls.__dataclass_fields__, arrays, strict=True):
            object.__setattr__(made, name, array)
        return made

    @classmethod
    def exact(cls, layer: Layer) -> Decoded:
        """The layer itself, as a lossless receiver would hold it."""
        return cls.of(layer.keys, layer.values, layer.positions)
