"""A smaller (or quantised) model as predictor: it reads the tokens, and its keys and values are mapped linearly to the target's.

Its cache is its own and exact, so that nothing drifts; its law codes the tokens. Compare arXiv 2604.15356's vocabulary mean, which runs the
target model itself. Idea: a cheap predictor model and a code of the residual ("speculative KV coding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Rope
from kvtheory.prediction.fitted import RIDGE, Arrays, Fitted, _unflat, _unrotated, fit_linear, text_rows
from kvtheory.prediction.player import Player, TokenKV, law_weights
from kvtheory.prediction.predictor import Fixed, Known, Prediction

__all__ = ["SmallerModel"]


@dataclass(frozen=True, eq=False)
class SmallerModel(Fitted):
    """Layer l from the smaller model's layer of the same depth, round(l (L' - 1) / (L - 1)): its keys (before RoPE) and values together.

    Tokens are in the stream, under the smaller model's law; no pass of the target. small_sizes: the smaller model's (layers, kv_heads,
    head_dim, value_dim); digest: its 16 bytes; small_rope: of all its layers. maps: of each layer a matrix (p, numbers) and an offset,
    float32. player: the smaller model itself, no part of the state; `with_player` gives it back to a predictor that was loaded.
    """

    small_sizes: tuple[int, int, int, int]
    digest: bytes
    small_rope: Rope | None
    maps: NDArray[np.float32]
    player: Player | None = field(default=None, repr=False)

    name: ClassVar[str] = "SmallerModel"
    needs = frozenset({"token"})

    @classmethod
    def fit(
        cls, texts: Any, player: Player, small_rope: Rope | None = None, ridges: Sequence[float] = (RIDGE,)
    ) -> SmallerModel:
        """texts: caches of the target model with tokens. small_rope: default the player's own `rope`, where it says one.

        ridges: of several the one is taken, layer by layer, whose map of the first three quarters of the rows is best on the last quarter; maps
        of a few hundred tokens, fewer than a layer has numbers, need more than the default. ValueError for none, or one below 0.
        """
        if not len(ridges) or min(ridges) < 0:
            raise ValueError(f"ridges: expected at least one number >= 0, got {tuple(ridges)}")
        caches = list(texts) if isinstance(texts, (list, tuple)) else [texts]
        rows, like, tokens = text_rows(caches)
        sizes = like[0]
        if tokens is None:
            raise ValueError("texts: SmallerModel needs cache.tokens, got none")
        rope = getattr(player, "rope", None) if small_rope is None else small_rope
        inputs: list[list[NDArray[Any]]] = [[] for _ in range(sizes[0])]
        small_sizes = (player.layers, 0, 0, 0)
        for cache in caches:
            play = player.start()
            for position, token in enumerate(np.asarray(cache.tokens).tolist()):
                kv = play.feed(token)
                small_sizes = (len(kv), *kv[0].keys.shape, kv[0].values.shape[1])
                if position:
                    for layer, its in enumerate(inputs):
                        its.append(_input(kv[_source(layer, sizes[0], len(kv))], rope, position))
        pieces = []
        for its, (keys, values) in zip(inputs, rows):
            x, y = np.stack(its), np.concatenate([keys, values], axis=1)
            a, b = fit_linear(x, y, _best(x, y, ridges))
            pieces += [a.reshape(-1), b]
        return cls(*like, small_sizes, player.digest, rope, np.concatenate(pieces), player)

    @property
    def small_numbers(self) -> int:
        """Keys and values of one of its layers."""
        _, heads, d, dv = self.small_sizes
        return heads * (d + dv)

    @property
    def flops(self) -> int:
        """Of the maps, and of the smaller model's pass where it is there to ask."""
        return 2 * self.maps.size + (self.player.flops if self.player is not None else 0)

    def _same(self) -> tuple[Any, ...]:
        return (*super()._same(), self.digest)

    @property
    def arguments(self) -> tuple[int, ...]:
        return self.small_sizes

    def arrays(self) -> Arrays:
        return {"maps": self.maps}

    def with_player(self, player: Player) -> SmallerModel:
        """ValueError if it is another model than the one it was fitted to."""
        if player.digest != self.digest:
            raise ValueError(f"player: expected the model {self.digest.hex()}, got {player.digest.hex()}")
        return replace(self, player=player)

    def start(self, player: Player | None) -> _Beside:
        if self.player is None:
            raise ValueError("player: SmallerModel needs the smaller model; give it with with_player(player)")
        return _Beside(self, self.player)


def _best(x: NDArray[Any], y: NDArray[Any], ridges: Sequence[float]) -> float:
    """The ridge whose map, fitted to the first three quarters of the rows, leaves least of the last."""
    if len(ridges) == 1 or len(x) < 4:
        return float(ridges[0])
    n = 3 * len(x) // 4
    left = []
    for ridge in ridges:
        a, b = fit_linear(x[:n], y[:n], ridge)
        left.append(float(((x[n:] @ a + b - y[n:]) ** 2).sum()))
    return float(ridges[int(np.argmin(left))])


def _source(layer: int, layers: int, small_layers: int) -> int:
    return round(layer * (small_layers - 1) / max(layers - 1, 1))


def _input(kv: TokenKV, rope: Rope | None, position: int) -> NDArray[Any]:
    return np.concatenate(
        [_unrotated(kv.keys, rope, position).reshape(-1), np.asarray(kv.values, np.float64).reshape(-1)]
    )


class _Beside:
    def __init__(self, its: SmallerModel, player: Player) -> None:
        self._its, self._play = its, player.start()
        self.law: NDArray[np.int64] | None = None
        p, q = its.small_numbers, its.numbers // its.sizes[0]
        self._maps = [(m[: p * q].reshape(p, q), m[p * q :]) for m in its.maps.reshape(its.sizes[0], (p + 1) * q)]

    def predict(self, known: Known) -> Prediction:
        assert known.token is not None
        its, kv = self._its, self._play.feed(known.token)
        self.law = None if self._play.logits is None else law_weights(self._play.logits)
        flat: Sequence[Any] = [
            _input(kv[_source(i, its.sizes[0], len(kv))], its.small_rope, known.position) @ a + b
            for i, (a, b) in enumerate(self._maps)
        ]
        return Fixed(_unflat(np.concatenate(flat), its.sizes, its.ropes, known.position))

    def took(self, token: int | None) -> None:
        """The token was read when its position was predicted."""
