"""ScissorHands (Liu et al., arXiv 2305.17118): tokens that were important stay important.

Algorithm, for each KV head. Tokens enter a buffer one by one. When it holds more than its budget B, its tokens are ranked by

    I_i = number of the last `history` queries whose attention to token i was below 1 / (tokens in the buffer)

and the drop * B with the highest counts leave it at once, never the sinks or the `window` latest; equal counts: the older first. Attention
is the softmax over what the buffer then held, 0 behind a sliding window. With grouped queries each query head of the KV head counts.

Where a layer's queries have no positions, all of them have seen all tokens: they are counted once, and exactly what exceeds B leaves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer
from reference.arguments import number, whole
from reference.kept import MOST_TOKENS
from reference.reducer import Selector, budget, check_finite, check_keep, split_budget
from reference.snapkv import latest_queries

__all__ = ["ScissorHands"]

Float = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class ScissorHands(Selector):
    """keep: the budget B of each head (int), or its share of the prompt (float; the paper's largest saving, a factor 5, by default).

    About B (1 - drop) to B tokens are left, never more than B. sinks: first tokens always among them; the paper has none. window: latest
    tokens always among them. history, drop: queries that are counted, and the share of B that leaves at once. The paper's own text could not
    be had: an independent implementation quotes a window of 10, a history of 400 and a drop of .4 from it, our notes a drop of half of B.

    needs queries, best at all positions of the prompt. Streams: as for all reducers (reference.reducer). An appender decides when it is
    made; later tokens are all kept. Pitfalls: counts below a threshold forget how far below; whole stretches leave at once.
    """

    keep: int | float = 0.2
    sinks: int = 4
    window: int = 32
    history: int = 400
    drop: float = 0.5

    needs = frozenset({"queries"})

    def __post_init__(self) -> None:
        check_keep(self.keep)
        whole("sinks", self.sinks, 0, MOST_TOKENS)
        whole("window", self.window, 0, MOST_TOKENS)
        whole("history", self.history, 1, MOST_TOKENS)
        object.__setattr__(self, "drop", number("drop", self.drop, 0, 1))

    def places(self, layer: Layer) -> list[Index]:
        check_finite(layer)
        total = budget(self.keep, layer.tokens)
        if total == layer.tokens:
            return [np.arange(total)] * layer.kv_heads
        first, _, last = split_budget(total, self.sinks, self.window)
        run = self._at_once if layer.query_positions is None else self._one_by_one
        return [run(layer, kv, total, first, last) for kv in range(layer.kv_heads)]

    def _at_once(self, layer: Layer, kv: int, total: int, first: int, last: int) -> Index:
        heads = [layer.head(h) for h in range(kv * layer.group, (kv + 1) * layer.group)]
        asked = latest_queries(layer, self.history)
        low = sum(
            (attention.weights(head.q[asked], head.k, head.scale) < 1 / layer.tokens).sum(axis=0) for head in heads
        )
        held = np.arange(layer.tokens)
        return _without(held, np.asarray(low), layer.tokens - total, first, last)

    def _one_by_one(self, layer: Layer, kv: int, total: int, first: int, last: int) -> Index:
        assert layer.queries is not None and layer.query_positions is not None
        own = range(kv * layer.group, (kv + 1) * layer.group)
        q = np.asarray(layer.queries[list(own)], np.float64)
        k = np.asarray(layer.keys[kv], np.float64)
        order = np.argsort(layer.query_positions, kind="stable")
        places = layer.query_positions[order]
        # queries that come after token t and before the next one are asked once token t is in the buffer
        ends = np.append(np.searchsorted(places, layer.positions[1:]), len(order))
        low = np.zeros(layer.tokens, np.int64)
        past: deque[Index] = deque()
        held, asked = np.arange(0), int(np.searchsorted(places, layer.positions[0]))
        for t in range(layer.tokens):
            held = np.append(held, t)
            for j in order[asked : ends[t]]:
                distance = layer.query_positions[j] - layer.positions[held]
                seen = distance < (np.inf if layer.window is None else layer.window)
                if not seen.any():
                    continue
                a = attention.softmax(np.where(seen, layer.scale * (q[:, j] @ k[held].T), -np.inf))
                few = np.repeat(held[None], len(own), axis=0)[a < 1 / len(held)]
                np.add.at(low, few, 1)
                past.append(few)
                if len(past) > self.history:
                    np.subtract.at(low, past.popleft(), 1)
            asked = max(asked, int(ends[t]))
            if len(held) > total:
                held = _without(held, low[held], max(1, int(self.drop * total)), first, last)
        return held


def _without(held: Index, low: Index, count: int, first: int, last: int) -> Index:
    """held (ascending) without the `count` highest counts `low`, sparing tokens below `first` and the `last` latest."""
    free = np.flatnonzero((held >= first) & (np.arange(len(held)) < len(held) - last))
    gone = free[np.argsort(-low[free], kind="stable")[:count]]
    return np.delete(held, gone)
