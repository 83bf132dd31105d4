"""What is assumed of later queries: the latest ones of the prompt, moved behind the tokens that are to be summarised.

With RoPE a query asked at position m meets a key at i as R_{m-i} q, so a query of the past, taken as it is, would look at later tokens
from before. Its unrotated form is therefore turned to the positions that follow. Queries without positions are taken as they are: they are
said to see everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Layer, Rope

__all__ = ["QueryLaw"]

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class QueryLaw:
    """Queries of one KV head: q (m, d), all query heads of it; offsets (m,): how far behind the first of them each stands."""

    q: Float
    scale: float
    offsets: NDArray[np.int64]
    rope: Rope | None

    @classmethod
    def of(cls, layer: Layer, kv: int, most: int) -> QueryLaw:
        """The latest `most` query positions of a layer (of queries without positions: as many, spread evenly)."""
        assert layer.queries is not None
        total = layer.queries.shape[1]
        if layer.query_positions is None:
            used = np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))
            where = np.zeros(len(used), np.int64)
        else:
            used = np.argsort(layer.query_positions, kind="stable")[-most:]
            where = layer.query_positions[used]
        own = range(kv * layer.group, (kv + 1) * layer.group)
        q = np.asarray(layer.queries[list(own)][:, used], np.float64)
        rope = layer.rope if layer.query_positions is not None else None
        if rope is not None:
            q = rope.undo(q, where)
        offsets = np.tile(where - where[0], len(own))
        return cls(q.reshape(-1, q.shape[-1]), layer.scale, offsets, rope)

    def after(self, position: int) -> Float:
        """The queries (m, d) as they would be asked from `position` + 1 on."""
        return self.q if self.rope is None else self.rope.apply(self.q, position + 1 + self.offsets)
