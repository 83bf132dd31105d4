"""Which tokens a cache holds: positions, log-weights, and how many of them each head has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.kept import Kept
from reference.shape import Positions, Shape

__all__ = ["Where"]


@dataclass(frozen=True)
class Where:
    """Of all tokens of a cache, as `kvtheory.Decoded` has them.

    positions: (tokens,), or by head (kv_heads, tokens). log_weights: None (all 0), or (kv_heads, tokens or 1) float32. counts: None (all), or
    (kv_heads,): a head has the first ones.
    """

    positions: Positions
    log_weights: NDArray[np.float32] | None = None
    counts: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, shape: Shape, kept: Kept | None) -> Where:
        """Of a layer alone, or of what a reducer left (`Kept.restore`)."""
        if kept is None:
            return cls(shape.positions)
        counts = None
        positions: Positions = shape.positions
        if kept.places is not None:
            counts, positions = (
                np.array(kept.counts(shape.kv_heads, shape.tokens), np.int64),
                kept.positions(shape.tokens),
            )
        weights = None
        if kept.weights is not None:
            weights = np.zeros((shape.kv_heads, shape.tokens), np.float32)
            there = np.broadcast_to(
                np.arange(shape.tokens) < (shape.tokens if counts is None else counts[:, None]), weights.shape
            )
            weights[there] = kept.weights
        return cls(positions, weights, counts)

    def weighed(self, log_weights: NDArray[np.float32]) -> Where:
        """With log-weights (kv_heads,) of a codec's own, where no others are given."""
        if self.log_weights is not None or not log_weights.any():
            return self
        return Where(self.positions, log_weights.astype(np.float32)[:, None], self.counts)

    def at(self, index: slice | NDArray[np.int64]) -> dict[str, Any]:
        """What a Segment of some tokens is given; index ascends."""
        positions, counts, weights = self.positions, self.counts, self.log_weights
        if isinstance(index, slice):
            own: Positions = positions[index] if isinstance(positions, range) else positions[..., index]
            if counts is not None:
                counts = np.clip(counts - index.start, 0, index.stop - index.start)
        else:
            every = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
            own = every[..., index]
            if counts is not None:
                counts = np.searchsorted(index, counts).astype(np.int64)
        if weights is not None and weights.shape[1] > 1:
            weights = weights[:, index]
        return {"positions": own, "log_weights": weights, "counts": counts, "index": index}
