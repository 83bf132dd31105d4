"""Texts that a toy transformer writes itself, with their caches, queries and surprisals: what claims about prediction run on.

The text is drawn from the model's own law, so that the paper's assumption (tokens distributed as P_M) holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Cache, Layer
from kvtheory.prediction import ToyPlayer, law_weights

__all__ = ["player_of", "text", "write"]

#: chosen for its entropy alone, about that of the paper's operating point: 4.3 bits
SHARPNESS = 0.55


def player_of(layers: int = 3, seed: int = 0) -> ToyPlayer:
    """64 tokens, one KV head of 32 channels read by two query heads."""
    return ToyPlayer(vocabulary=64, layers=layers, kv_heads=1, head_dim=32, sharpness=SHARPNESS, seed=seed)


class _Recorder:
    """A rope that notes the queries which pass through it: twice as many heads as keys have."""

    def __init__(self, rope: Any, heads: int) -> None:
        self._rope, self._heads = rope, heads
        self.queries: list[NDArray[np.float64]] = []

    def apply(self, x: Any, positions: Any) -> NDArray[np.float64]:
        turned: NDArray[np.float64] = self._rope.apply(x, positions)
        if len(x) == self._heads:
            self.queries.append(turned[:, 0])
        return turned


def text(player: ToyPlayer, length: int, rng: np.random.Generator) -> Cache:
    """`length` tokens drawn from the player's law, float32; queries of all positions, causal."""
    return write(player, None, length, rng)


def write(
    player: ToyPlayer, tokens: NDArray[np.int64] | None, length: int, rng: np.random.Generator | None = None
) -> Cache:
    """The cache of given tokens (surprisals under the player's law), or of drawn ones."""
    rope, heads = player.rope, 2 * player.kv_heads
    recorder = _Recorder(rope, heads)
    play = player.start()
    chosen, surprisals, kvs = [], [], []
    player.rope = recorder  # type: ignore[assignment]
    try:
        for t in range(length):
            weights = np.ones(player.vocabulary) if play.logits is None else law_weights(play.logits).astype(np.float64)
            p = weights / weights.sum()
            if tokens is None:
                assert rng is not None
                token = int(rng.choice(player.vocabulary, p=p))
            else:
                token = int(tokens[t])
            chosen.append(token)
            surprisals.append(-np.log2(p[token]))
            kvs.append(play.feed(token))
    finally:
        player.rope = rope
    layers = []
    for i in range(player.layers):
        keys, values = (
            np.stack([getattr(kv[i], name) for kv in kvs], axis=1).astype(np.float32) for name in ("keys", "values")
        )
        queries = np.stack(recorder.queries[i :: player.layers], axis=1).astype(np.float32)
        projection = player.weights[i]["o"].reshape(heads, player.head_dim, -1).astype(np.float32)
        layers.append(Layer(keys, values, queries, projection, rope=rope, index=i, query_positions=np.arange(length)))
    return Cache(layers, np.array(chosen), np.array(surprisals), {"model": "toy"})
