"""Rotary position embedding: k_i -> s R_i k_i, with R_i a rotation by angle i * inv_freq in each channel pair (Su et al. 2021).

The logit of a query at position m and a key at position i depends on m - i only:
    (R_m q) . (R_i k) = q^T R_m^T R_i k = (R_{m-i} q)^T k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation of the first r channels of keys and queries; the other channels pass unchanged.

    inv_freq: (r/2,) float64, radians per position of each channel pair. Linear, llama3 and YaRN scaling are expressed in it.
    layout: "half" pairs channel c with c + r/2 (llama, as transformers does it); "interleaved" pairs 2c with 2c + 1.
    attention_scaling: factor s on the rotated channels (YaRN); logits carry s^2.
    """

    inv_freq: NDArray[np.float64]
    layout: Literal["half", "interleaved"] = "half"
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        inv_freq = np.asarray(self.inv_freq, dtype=np.float64)
        checks.shape("inv_freq", inv_freq, ("pairs",))
        checks.finite("inv_freq", inv_freq, ("pair",))
        if inv_freq.size == 0:
            raise ValueError("inv_freq: expected at least one frequency, got none; pass rope=None for no rotation")
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f'layout: expected "half" or "interleaved", got {self.layout!r}')
        object.__setattr__(self, "inv_freq", inv_freq)
        object.__setattr__(self, "attention_scaling", checks.positive("attention_scaling", self.attention_scaling))

    @property
    def rotated(self) -> int:
        """r: how many leading channels are rotated."""
        return 2 * self.inv_freq.size

    def apply(self, x: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
        """s R_p x for x (..., n, d) and positions broadcastable to (..., n); float64."""
        return self._rotate(x, positions, 1.0)

    def undo(self, x: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
        """R_p^T x / s, the inverse of `apply`; float64."""
        return self._rotate(x, positions, -1.0)

    def _rotate(self, x: ArrayLike, positions: ArrayLike, sign: float) -> NDArray[np.float64]:
        x = np.array(x, dtype=np.float64)
        r = self.rotated
        if x.ndim < 2 or x.shape[-1] < r:
            raise ValueError(f"x: expected shape (..., tokens, d) with d >= {r} rotated channels, got {x.shape}")
        positions = np.asarray(positions)
        if positions.shape[-1:] != x.shape[-2:-1]:
            raise ValueError(f"positions: expected shape (..., {x.shape[-2]}), got {positions.shape}")
        angle = sign * positions[..., None].astype(np.float64) * self.inv_freq
        cos, sin = (self.attention_scaling**sign * f(angle) for f in (np.cos, np.sin))
        first, second = (
            (slice(0, r // 2), slice(r // 2, r)) if self.layout == "half" else (slice(0, r, 2), slice(1, r, 2))
        )
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first] = a * cos - b * sin
        x[..., second] = b * cos + a * sin
        return x

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for a file header; Python prints float64 so that it reads back exactly."""
        return {
            "inv_freq": self.inv_freq.tolist(),
            "layout": self.layout,
            "attention_scaling": self.attention_scaling,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Rope:
        return cls(np.asarray(record["inv_freq"], dtype=np.float64), record["layout"], record["attention_scaling"])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Rope)
            and np.array_equal(self.inv_freq, other.inv_freq)
            and (self.layout, self.attention_scaling) == (other.layout, other.attention_scaling)
        )

    def __hash__(self) -> int:
        return hash((self.inv_freq.tobytes(), self.layout, self.attention_scaling))
