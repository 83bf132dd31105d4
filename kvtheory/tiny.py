"""Transformers small enough to enumerate: every prefix, every cache, every entropy.

`RationalTransformer` computes in exact rationals: its caches are equal or different beyond doubt, and counterexamples
need no tolerance.  Attention is hard: the mean over the positions of the largest logit, the limit of softmax at a large
scale; like softmax its weights sum to 1.

`TernaryTransformer` has softmax attention and a cache rounded to {-1, 0, 1}, as coarse as a cache gets, so that caches
of different tokens collide.  It computes in float64 and reports how near a number came to a rounding threshold.

Both write KV_t = (k, v) of every layer at position t.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RationalLayer", "RationalTransformer", "TernaryCaches", "TernaryTransformer", "collision_model"]

Number = int | Fraction
Vector = tuple[Number, ...]
Matrix = tuple[Vector, ...]


def _times(vector: Sequence[Number], matrix: Matrix) -> Vector:
    """Row vector (m,) times matrix (m, d)."""
    return tuple(sum(x * row[c] for x, row in zip(vector, matrix)) for c in range(len(matrix[0])))


class RationalLayer(NamedTuple):
    """W_Q, W_K, W_V (m, d) and W_O (d, m) of one layer with one head; rows are tuples of ints or Fractions."""

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix


@dataclass(frozen=True)
class RationalTransformer:
    """x_t = e(t_t);  k, v, q = x W_K, x W_V, x W_Q;  x <- x + (mean of v over the largest logits q.k, causal) W_O.

    embedding: {token: vector (m,)}; layers: `RationalLayer`s, bottom first. No positions, no BOS, no quantiser.
    """

    embedding: dict[Any, Vector]
    layers: tuple[RationalLayer, ...]

    def kv(self, prefix: tuple[Any, ...]) -> tuple[tuple[Vector, Vector], ...]:
        """KV_t of the prefix's last position: one (key (d,), value (d,)) pair per layer, exact."""
        stream = [self.embedding[token] for token in prefix]
        written = []
        for depth, layer in enumerate(self.layers):
            keys = [_times(x, layer.key) for x in stream]
            values = [_times(x, layer.value) for x in stream]
            written.append((keys[-1], values[-1]))
            if depth + 1 < len(self.layers):
                stream = [
                    tuple(
                        a + b
                        for a, b in zip(x, _times(_hard(_times(x, layer.query), keys[: i + 1], values), layer.output))
                    )
                    for i, x in enumerate(stream)
                ]
        return tuple(written)


def _hard(query: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> Vector:
    """Mean of the values whose key has the largest inner product with the query."""
    logits = [sum(a * b for a, b in zip(query, key)) for key in keys]
    top = max(logits)
    chosen = [value for logit, value in zip(logits, values) if logit == top]
    return tuple(Fraction(sum(column), len(chosen)) for column in zip(*chosen))


def collision_model() -> RationalTransformer:
    """The smallest counterexample to the per-step entropy bound: tokens a and b write one KV, c another.

    |V| = 3, one layer, one head, m = 2, d = 1: e_a = (0,1), e_b = (0,-1), e_c = (1,0), W_K = W_V = (1,0)^T, so that
    KV(a) = KV(b) = (0,0) and KV(c) = (1,1).  With the language "ac", "ba", each 1/2: H(t_2|t_1) = 0 and
    H(KV_2|KV_1) = 1 bit: against arXiv 2604.15356, theorem 1.
    """
    first: Matrix = ((1,), (0,))
    none: Matrix = ((0,), (0,))
    return RationalTransformer(
        {"a": (0, 1), "b": (0, -1), "c": (1, 0)}, (RationalLayer(query=none, key=first, value=first, output=((0, 0),)),)
    )


class TernaryCaches(NamedTuple):
    """Every prefix of 1..n tokens over 0..V-1 with the codes it writes, hashable; and the smallest rounding margin."""

    codes: dict[tuple[int, ...], bytes]
    margin: float
    """Smallest distance of a number to a rounding threshold (+-1/2): far above float64 error, the codes are those of
    real arithmetic."""

    def kv(self, prefix: tuple[int, ...]) -> bytes:
        return self.codes[prefix]


@dataclass(frozen=True)
class TernaryTransformer:
    """Softmax attention on a cache of which only round(k), round(v), clipped to {-1, 0, 1}, are stored.

    embedding (V, m); query, key, value (layers, m, d); output (layers, d, m), all float64.
    loop: "closed": attention reads what is stored, as a decoder must; "open": it reads the exact numbers.
    The rest is off by default and takes the model out of the class for which two tokens never break the per-step bound:
    rotation: angle per position by which queries and keys are turned (d = 2) before keys are rounded;
    start (m,): input of a first position before all tokens, whose KV every prefix shares; sink: a logit without a value.
    """

    embedding: NDArray[np.float64]
    query: NDArray[np.float64]
    key: NDArray[np.float64]
    value: NDArray[np.float64]
    output: NDArray[np.float64]
    loop: str = "closed"
    rotation: float = 0.0
    start: NDArray[np.float64] | None = None
    sink: float | None = None

    def __post_init__(self) -> None:
        if self.loop not in ("closed", "open"):
            raise ValueError(f"loop: expected 'closed' or 'open', got {self.loop!r}")
        if self.rotation and self.key.shape[2] != 2:
            raise ValueError(f"rotation: expected head dimension 2, got {self.key.shape[2]}")

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        vocabulary: int,
        layers: int = 2,
        model_dim: int = 4,
        head_dim: int = 2,
        **options: Any,
    ) -> TernaryTransformer:
        """Standard normal embeddings, W_Q, W_K, W_V ~ N(0, 1/m), W_O ~ N(0, 1/d)."""
        into = rng.standard_normal((3, layers, model_dim, head_dim)) / np.sqrt(model_dim)
        out = rng.standard_normal((layers, head_dim, model_dim)) / np.sqrt(head_dim)
        return cls(rng.standard_normal((vocabulary, model_dim)), into[0], into[1], into[2], out, **options)

    def caches(self, length: int) -> TernaryCaches:
        """The codes written at the last position of every prefix of 1..length tokens: V^length strings at once."""
        vocabulary = self.embedding.shape[0]
        strings = np.array(list(itertools.product(range(vocabulary), repeat=length)))
        x = self.embedding[strings]  # (strings, positions, m)
        if self.start is not None:
            x = np.concatenate([np.broadcast_to(self.start, (len(strings), 1, x.shape[2])), x], axis=1)
        positions = x.shape[1]
        visible = np.tril(np.ones((positions, positions), bool))
        margin = np.inf
        codes = []
        for w_q, w_k, w_v, w_o in zip(self.query, self.key, self.value, self.output):
            q, k, v = self._turn(x @ w_q), self._turn(x @ w_k), x @ w_v
            k_code, v_code = (np.clip(np.rint(z), -1, 1) for z in (k, v))
            margin = min(margin, *(float(np.abs(np.abs(z) - 0.5).min()) for z in (k, v)))
            codes.append(np.concatenate([k_code, v_code], axis=2))
            read_k, read_v = (k_code, v_code) if self.loop == "closed" else (k, v)
            logits = np.where(visible, q @ read_k.transpose(0, 2, 1) / np.sqrt(q.shape[2]), -np.inf)
            top = logits.max(axis=2, keepdims=True)
            weights = np.exp(logits - top)
            total = weights.sum(axis=2, keepdims=True)
            if self.sink is not None:
                total = total + np.exp(self.sink - top)
            x = x + (weights / total) @ read_v @ w_o
        # one byte a number; int8 has no -0
        written = np.concatenate(codes, axis=2).astype(np.int8)[:, positions - length :]
        table: dict[tuple[int, ...], bytes] = {}
        for row, string in enumerate(itertools.product(range(vocabulary), repeat=length)):
            for end in range(1, length + 1):
                if string[:end] not in table:
                    table[string[:end]] = written[row, end - 1].tobytes()
        return TernaryCaches(table, margin)

    def _turn(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rotary positions: R_(i * rotation) z_i for head dimension 2."""
        if not self.rotation:
            return z
        angle = self.rotation * np.arange(z.shape[1])
        cos, sin = np.cos(angle), np.sin(angle)
        return np.stack([cos * z[..., 0] - sin * z[..., 1], sin * z[..., 0] + cos * z[..., 1]], axis=-1)
