"""A small transformer with random weights in NumPy: a Player that needs no torch, for tests and for claims on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.layer import Rope
from kvtheory.prediction.player import TokenKV
from kvtheory.randomness import generator

__all__ = ["ToyPlayer"]

Float = NDArray[np.float64]


class ToyPlayer:
    """vocabulary tokens, `layers` layers of `kv_heads` KV heads read by two query heads each, RoPE, one gated MLP-free residual stream.

    sharpness: factor of the logits; the larger, the lower the entropy of the next token. noise: standard deviation of what is added to each
    logit, drawn anew in every play: a plan that does not repeat itself. All in float64; same seed, same weights.
    """

    def __init__(
        self,
        vocabulary: int = 64,
        layers: int = 2,
        kv_heads: int = 2,
        head_dim: int = 8,
        sharpness: float = 4.0,
        seed: int = 0,
        noise: float = 0.0,
    ) -> None:
        rng = generator(seed, "toy player")
        self.vocabulary, self.layers, self.kv_heads, self.head_dim = vocabulary, layers, kv_heads, head_dim
        self.sharpness, self.noise = sharpness, noise
        width = 2 * kv_heads * head_dim
        self.rope = Rope(10000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2)))

        def matrix(rows: int, columns: int) -> Float:
            return rng.normal(size=(rows, columns)) / np.sqrt(rows)

        self.embedding = rng.normal(size=(vocabulary, width))
        self.weights = [
            {
                "q": matrix(width, width),
                "k": matrix(width, kv_heads * head_dim),
                "v": matrix(width, kv_heads * head_dim),
                "o": matrix(width, width),
            }
            for _ in range(layers)
        ]
        digest = hashlib.sha256(self.embedding.tobytes())
        for layer in self.weights:
            for name in "qkvo":
                digest.update(layer[name].tobytes())
        self.digest = digest.digest()[:16]

    @property
    def plan(self) -> Mapping[str, Any]:
        return {"numpy": np.__version__, "compute": "float64", "prefill": "token by token", "noise": self.noise}

    @property
    def flops(self) -> int:
        return 2 * (self.embedding.size + sum(w.size for layer in self.weights for w in layer.values()))

    def attention_flops(self, tokens: int) -> int:
        return 4 * self.layers * 2 * self.kv_heads * self.head_dim * tokens

    def start(self) -> _ToyPlay:
        return _ToyPlay(self)


class _ToyPlay:
    def __init__(self, player: ToyPlayer) -> None:
        self.player = player
        self.past: list[list[TokenKV]] = []
        self.logits: Float | None = None
        self._noise = np.random.default_rng() if player.noise else None

    def feed(self, token: int) -> list[TokenKV]:
        kv, hidden = self._forward(int(token))
        self.past.append(kv)
        logits = self.player.sharpness * hidden @ self.player.embedding.T / np.sqrt(len(hidden))
        if self._noise is not None:
            logits = logits + self.player.noise * self._noise.normal(size=logits.shape)
        self.logits = logits
        return kv

    def put(self, kv: Sequence[TokenKV]) -> None:
        self.past.append(list(kv))
        self.logits = None

    def revise(self, kv: Sequence[TokenKV]) -> None:
        self.past[-1] = list(kv)

    def candidates(self, tokens: ArrayLike) -> list[TokenKV]:
        found = [self._forward(int(token))[0] for token in np.asarray(tokens)]
        return [
            TokenKV(np.stack([one[i].keys for one in found]), np.stack([one[i].values for one in found]))
            for i in range(self.player.layers)
        ]

    def _forward(self, token: int) -> tuple[list[TokenKV], Float]:
        its = self.player
        heads, d, position = its.kv_heads, its.head_dim, np.array([len(self.past)])
        x = its.embedding[token]
        out = []
        for i, w in enumerate(its.weights):
            h = x / np.sqrt((x**2).mean() + 1e-6)
            q = its.rope.apply((h @ w["q"]).reshape(2 * heads, 1, d), position)[:, 0]
            own = TokenKV(
                its.rope.apply((h @ w["k"]).reshape(heads, 1, d), position)[:, 0], (h @ w["v"]).reshape(heads, d)
            )
            out.append(own)
            k = np.stack([*(past[i].keys for past in self.past), own.keys], axis=1)
            v = np.stack([*(past[i].values for past in self.past), own.values], axis=1)
            z = np.einsum("hd,htd->ht", q, np.repeat(k, 2, axis=0)) / np.sqrt(d)
            a = np.exp(z - z.max(axis=1, keepdims=True))
            a /= a.sum(axis=1, keepdims=True)
            x = x + np.einsum("ht,htd->hd", a, np.repeat(v, 2, axis=0)).reshape(-1) @ w["o"]
        return out, x / np.sqrt((x**2).mean() + 1e-6)
