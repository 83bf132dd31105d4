"""SnapKV (Li et al., arXiv 2404.14469): the tokens that the last queries of the prompt attend to, and the last tokens.

Algorithm, for each KV head. The observation window is the prompt's last `window` tokens, which stay. With the queries of that window

    s_i = sum_{query heads of the KV head} sum_{queries} a_i,       a = softmax(scale K q) over what each query sees, the window too

the tokens before the window are scored by s pooled over `kernel` neighbours (mean with zeros beyond the ends, or max), so that what stands
around an important token stays with it, and the highest scores are kept, ties by age. The eviction is decided once, at the end of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer
from reference.arguments import whole, word
from reference.kept import MOST_TOKENS
from reference.reducer import Selector, budget, check_finite, check_keep, split_budget

__all__ = ["SnapKV", "latest_queries", "pooled"]

Float = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class SnapKV(Selector):
    """keep: tokens left of each head (int), or their share of the prompt (float). sinks: first tokens always among them; the paper has none.

    window: tokens at the end, and how many of the latest queries are asked. kernel, pooling: the official code's 5 and "mean" (the paper
    prints 7 and max-pooling for some runs). keep = 2048: the official code's capacity.

    needs queries: those at the prompt's last positions (`query_positions`), or, where a layer does not say where its queries stand, the last
    ones given. Streams: as for all reducers (reference.reducer). An appender decides when it is made; later tokens are all kept.
    Pitfalls: a head of grouped queries keeps one set for all of them, summed here (the official code repeats keys and keeps one for each
    query head); tokens that only later queries need are gone.
    """

    keep: int | float = 2048
    sinks: int = 4
    window: int = 32
    kernel: int = 5
    pooling: Literal["mean", "max"] = "mean"

    needs = frozenset({"queries"})

    def __post_init__(self) -> None:
        check_keep(self.keep)
        whole("sinks", self.sinks, 0, MOST_TOKENS)
        whole("window", self.window, 1, MOST_TOKENS)
        whole("kernel", self.kernel, 1, 1 << 16)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd number of neighbours, got {self.kernel}")
        word("pooling", self.pooling, ("mean", "max"))

    def places(self, layer: Layer) -> list[Index]:
        check_finite(layer)
        n = layer.tokens
        total = budget(self.keep, n)
        first, scored, last = split_budget(total, self.sinks, self.window)
        end = n - last
        if total == n or scored == 0:
            index = np.concatenate([np.arange(first), np.arange(end, n)])
            return [np.arange(n) if total == n else index] * layer.kv_heads
        mass = attention_mass(layer, latest_queries(layer, self.window))
        # the window's own tokens are not pooled into those before it
        scores = pooled(mass[:, :end], self.kernel, self.pooling)
        places = []
        for own in scores:
            order = np.argsort(-own[first:], kind="stable")[:scored] + first
            places.append(np.concatenate([np.arange(first), np.sort(order), np.arange(end, n)]))
        return places


def latest_queries(layer: Layer, count: int) -> NDArray[np.intp]:
    """The numbers of a layer's queries at its last `count` positions that have some, in order of position; of unplaced ones the last."""
    assert layer.queries is not None
    if layer.query_positions is None:
        queries = layer.queries.shape[1]
        return np.arange(max(0, queries - count), queries)
    return np.argsort(layer.query_positions, kind="stable")[-count:]


def attention_mass(layer: Layer, queries: NDArray[np.intp]) -> Float:
    """(kv_heads, tokens): attention that the given queries pay each token, summed over them and over the query heads of a KV head.

    A query that sees no token pays nothing.
    """
    assert layer.queries is not None
    places = None if layer.query_positions is None else layer.query_positions[queries]
    visible = layer.replace(queries=layer.queries[:, queries], query_positions=places).visible()
    seeing = visible.any(axis=1)
    asked = layer.queries[:, queries[seeing]]
    out = np.zeros((layer.kv_heads, layer.tokens))
    for h in range(layer.query_heads):
        a = attention.weights(asked[h], layer.keys[h // layer.group], layer.scale, visible=visible[seeing])
        out[h // layer.group] += a.sum(axis=0)
    return out


def pooled(scores: Float, kernel: int, pooling: str) -> Float:
    """Mean (zeros beyond the ends) or maximum over `kernel` neighbours along the last axis, same size."""
    half = kernel // 2
    wide = np.pad(scores, ((0, 0), (half, half)), constant_values=0.0 if pooling == "mean" else -np.inf)
    views = np.lib.stride_tricks.sliding_window_view(wide, kernel, axis=-1)
    return views.mean(axis=-1) if pooling == "mean" else views.max(axis=-1)
