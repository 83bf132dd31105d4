"""Predictors fitted to calibration caches: means, tables, linear maps. None runs the model on candidates.

Keys are fitted and predicted before RoPE where the layers have one: a mean over positions of rotated keys is a mean over angles.
Least squares throughout, with a small ridge: min ||Y - X A - b||^2 + ridge tr(X^T X) / columns ||A||^2, mean and offset unpenalised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.layer import Cache, Layer, Rope
from kvtheory.prediction.player import Player, TokenKV
from kvtheory.prediction.predictor import Fixed, Known, Prediction

__all__ = [
    "EmbeddingLinear",
    "Fitted",
    "LayerLinear",
    "Nothing",
    "PreviousToken",
    "TokenTable",
    "embedding_of",
    "fit_linear",
    "text_rows",
]

RIDGE = 1e-3

Arrays = Mapping[str, NDArray[Any]]
Sizes = tuple[int, int, int, int]
Ropes = tuple[Rope | None, ...]
Indices = tuple[int | None, ...]
Given = Literal["law", "token"]
GIVEN: tuple[Given, ...] = ("law", "token")


def fit_linear(x: ArrayLike, y: ArrayLike, ridge: float = RIDGE) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(A (p, q), b (q,)) of y ~ x A + b, by least squares with a ridge relative to the mean variance of x's columns. x (n, p), y (n, q)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or not len(x):
        raise ValueError(f"x, y: expected (n, p) and (n, q) with n >= 1, got {x.shape} and {y.shape}")
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    centred = x - mean_x
    gram = centred.T @ centred
    gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram) + 1e-30
    a = np.linalg.solve(gram, centred.T @ (y - mean_y))
    return a.astype(np.float32), (mean_y - mean_x @ a).astype(np.float32)


def _bare(layer: Layer) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows of keys before RoPE, (tokens, kv_heads d), and of values, (tokens, kv_heads dv), float64."""
    keys = np.asarray(layer.keys, np.float64)
    if layer.rope is not None:
        keys = layer.rope.undo(keys, layer.positions)
    values = np.asarray(layer.values, np.float64)
    return tuple(a.transpose(1, 0, 2).reshape(a.shape[1], -1) for a in (keys, values))  # type: ignore[return-value]


class Rows(NamedTuple):
    """What predictors are fitted to: of each layer rows of keys (before RoPE) and values, of all positions but a text's first.

    layers: (n, kv_heads d) and (n, kv_heads dv) of each, by ascending index; like: their sizes, ropes and indices; tokens (n,), or None.
    """

    layers: list[tuple[NDArray[Any], NDArray[Any]]]
    like: tuple[Sizes, Ropes, Indices]
    tokens: NDArray[np.int64] | None


def text_rows(texts: Cache | Iterable[Layer] | Sequence[Cache]) -> Rows:
    """Rows of texts: a Cache, several of one model, or a list of the Layers of one text.

    The first position is left out: it is coded as it is, and often an attention sink unlike all others. ValueError for layers of several
    shapes, an index twice, texts of fewer than 2 tokens.
    """
    several = isinstance(texts, (list, tuple)) and len(texts) > 0 and not isinstance(texts[0], Layer)
    caches: Sequence[Any] = list(texts) if several else [texts]  # type: ignore[arg-type]
    every = [sorted(cache, key=lambda layer: -1 if layer.index is None else layer.index) for cache in caches]
    kinds = {tuple((one.kv_heads, one.head_dim, one.value_dim, one.index) for one in layers) for layers in every}
    if len(kinds) != 1 or not every[0] or len({kind[:3] for kind in next(iter(kinds))}) != 1:
        raise ValueError(f"texts: expected caches of one model, layers of one shape, got {sorted(map(str, kinds))}")
    first = every[0]
    indices = tuple(one.index for one in first)
    named = [index for index in indices if index is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"texts: expected each index once, got {', '.join(map(str, named))}")
    if any(layers[0].tokens < 2 for layers in every):
        raise ValueError("texts: expected at least 2 tokens each")
    rows = []
    for same in zip(*every):
        each = [_bare(layer) for layer in same]
        rows.append((np.concatenate([k[1:] for k, _ in each]), np.concatenate([v[1:] for _, v in each])))
    tokens = [getattr(cache, "tokens", None) for cache in caches]
    ids = None if any(t is None for t in tokens) else np.concatenate([np.asarray(t)[1:] for t in tokens])
    sizes = (len(first), first[0].kv_heads, first[0].head_dim, first[0].value_dim)
    return Rows(rows, (sizes, tuple(one.rope for one in first), indices), ids)


def _flat(rows: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[Any]:
    """(n, numbers of a position): of each layer keys, then values."""
    return np.concatenate([np.concatenate(pair, axis=1) for pair in rows], axis=1)


def _unflat(flat: NDArray[Any], sizes: Sizes, ropes: Ropes, position: int) -> list[TokenKV]:
    """Keys and values of each layer from a flat row, keys rotated to their position."""
    layers, heads, d, dv = sizes
    out = []
    for i, row in enumerate(np.asarray(flat, np.float64).reshape(layers, heads * (d + dv))):
        keys = _rotated(row[: heads * d].reshape(heads, d), ropes[i], position)
        out.append(TokenKV(keys, row[heads * d :].reshape(heads, dv)))
    return out


def _rotated(keys: NDArray[Any], rope: Rope | None, position: int) -> NDArray[Any]:
    return keys if rope is None else rope.apply(keys[:, None], np.array([position]))[:, 0]


def _unrotated(keys: NDArray[Any], rope: Rope | None, position: int) -> NDArray[Any]:
    keys = np.asarray(keys, np.float64)
    return keys if rope is None else rope.undo(keys[:, None], np.array([position]))[:, 0]


@dataclass(frozen=True, eq=False)
class Fitted:
    """sizes: layers, kv_heads, head_dim, value_dim; ropes, indices: of each layer; then what was fitted. Equal: the same in all of it."""

    sizes: Sizes
    ropes: Ropes
    indices: Indices

    needs = frozenset[str]()
    ahead = False
    candidates = 0
    forwards = 0
    law = None

    @property
    def numbers(self) -> int:
        layers, heads, d, dv = self.sizes
        return layers * heads * (d + dv)

    @property
    def flops(self) -> int:
        return 0

    @property
    def arguments(self) -> tuple[int, ...]:
        return ()

    @property
    def state_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> Arrays:
        return {}

    def _same(self) -> tuple[Any, ...]:
        ropes = tuple(None if r is None else (r.inv_freq.tobytes(), r.layout, r.attention_scaling) for r in self.ropes)
        return (self.sizes, ropes, self.indices, self.arguments, *(array.tobytes() for array in self.arrays().values()))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._same() == other._same()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._same())

    def took(self, token: int | None) -> None:
        """Nothing is remembered from one position to the next."""


@dataclass(frozen=True, eq=False)
class Nothing(Fitted):
    """The mean of the calibration at every position: what any other predictor has to beat. mean (numbers of a position,) float32."""

    mean: NDArray[np.float32]

    name: ClassVar[str] = "Nothing"

    @classmethod
    def fit(cls, texts: Any) -> Nothing:
        rows = text_rows(texts)
        return cls(*rows.like, _flat(rows.layers).mean(axis=0).astype(np.float32))

    def arrays(self) -> Arrays:
        return {"mean": self.mean}

    def start(self, player: Player | None) -> Nothing:
        return self

    def predict(self, known: Known) -> Prediction:
        return Fixed(_unflat(self.mean, self.sizes, self.ropes, known.position))


@dataclass(frozen=True, eq=False)
class PreviousToken(Fitted):
    """The reconstructed position before, its keys turned on by one position. Nothing is fitted; nothing (zero) at the first position."""

    name: ClassVar[str] = "PreviousToken"

    @classmethod
    def of(cls, texts: Any) -> PreviousToken:
        """For caches like these: their sizes, ropes and indices."""
        return cls(*text_rows(texts).like)

    def start(self, player: Player | None) -> PreviousToken:
        return self

    def predict(self, known: Known) -> Prediction:
        if known.previous is None:
            return Fixed.zero(self.sizes)
        turned = [
            TokenKV(_rotated(np.asarray(keys, np.float64), _step(rope), 1), values)
            for (keys, values), rope in zip(known.previous, self.ropes, strict=True)
        ]
        return Fixed(turned)


def _step(rope: Rope | None) -> Rope | None:
    """R_{t} = R_1 R_{t-1}; the attention scaling is in the previous key already."""
    return None if rope is None else Rope(rope.inv_freq, rope.layout)


@dataclass(frozen=True, eq=False)
class TokenTable(Fitted):
    """E[KV | t]: a mean for each token id that the calibration has, the mean of all for others; in no context at all.

    given: "token": this position's token is in the stream (uniform code: log2 |V| bits); "law": the mean over the model's law, which takes
    a forward pass a position. vocabulary: how many ids there are. ids (seen,) int32 ascending, means (seen, numbers), mean (numbers,) float32.
    """

    ids: NDArray[np.int32]
    means: NDArray[np.float32]
    mean: NDArray[np.float32]
    vocabulary: int
    given: Given = "token"

    name: ClassVar[str] = "TokenTable"

    @classmethod
    def fit(cls, texts: Any, vocabulary: int, given: Given = "token") -> TokenTable:
        rows, like, tokens = text_rows(texts)
        if tokens is None:
            raise ValueError("texts: TokenTable needs cache.tokens, got none")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(f"tokens: expected 0 to {vocabulary - 1}, got {int(tokens.min())} to {int(tokens.max())}")
        flat = _flat(rows)
        ids, where = np.unique(tokens, return_inverse=True)
        sums = np.zeros((len(ids), flat.shape[1]))
        np.add.at(sums, where, flat)
        means = sums / np.bincount(where)[:, None]
        return cls(
            *like,
            ids.astype(np.int32),
            means.astype(np.float32),
            flat.mean(axis=0).astype(np.float32),
            vocabulary,
            _word(given),
        )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"token"} if self.given == "token" else {"player", "law"})

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return int(self.given == "law")

    @property
    def flops(self) -> int:
        return 0 if self.given == "token" else 2 * len(self.ids) * self.numbers

    @property
    def arguments(self) -> tuple[int, ...]:
        return (GIVEN.index(self.given), self.vocabulary)

    def arrays(self) -> Arrays:
        return {"ids": self.ids, "means": self.means, "mean": self.mean}

    def start(self, player: Player | None) -> TokenTable:
        if self.given == "law" and (player is None or player.vocabulary != self.vocabulary):
            raise ValueError(f"player: expected one with a vocabulary of {self.vocabulary}, got {player}")
        return self

    def predict(self, known: Known) -> Prediction:
        if self.given == "token":
            assert known.token is not None
            at = int(np.searchsorted(self.ids, known.token))
            seen = at < len(self.ids) and int(self.ids[at]) == known.token
            flat = self.means[at] if seen else self.mean
        elif known.law is None:
            flat = self.mean
        else:
            p = known.law[self.ids] / int(known.law.sum())
            flat = p @ self.means.astype(np.float64) + (1 - p.sum()) * self.mean
        return Fixed(_unflat(flat, self.sizes, self.ropes, known.position))


def embedding_of(player: Player) -> NDArray[Any]:
    """(vocabulary, width) input embeddings of a player that says them: `embedding`, or a torch model's. TypeError for others."""
    if hasattr(player, "embedding"):
        return np.asarray(player.embedding)
    model = getattr(player, "model", None)
    if model is None:
        raise TypeError(f"player: expected one with an embedding table, got {type(player).__name__}")
    return np.asarray(model.get_input_embeddings().weight.detach().float().numpy())


@dataclass(frozen=True, eq=False)
class EmbeddingLinear(Fitted):
    """offset + matrix . e: the paper's linearised map, e the token's embedding ("token") or its mean over the law ("law").

    The paper gives no method for the fit; here least squares on the embeddings of the calibration's tokens. The embedding table is the
    model's, no part of the state. matrix (width, numbers), offset (numbers,) float32.
    """

    matrix: NDArray[np.float32]
    offset: NDArray[np.float32]
    given: Given = "law"

    name: ClassVar[str] = "EmbeddingLinear"

    @classmethod
    def fit(cls, texts: Any, player: Player, given: Given = "law") -> EmbeddingLinear:
        rows, like, tokens = text_rows(texts)
        if tokens is None:
            raise ValueError("texts: EmbeddingLinear needs cache.tokens, got none")
        matrix, offset = fit_linear(embedding_of(player)[tokens], _flat(rows))
        return cls(*like, matrix, offset, _word(given))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"player", "token"} if self.given == "token" else {"player", "law"})

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return int(self.given == "law")

    @property
    def flops(self) -> int:
        return 2 * self.matrix.size

    @property
    def arguments(self) -> tuple[int, ...]:
        return (GIVEN.index(self.given),)

    def arrays(self) -> Arrays:
        return {"matrix": self.matrix, "offset": self.offset}

    def start(self, player: Player | None) -> _OfEmbedding:
        if player is None:
            raise ValueError("player: EmbeddingLinear reads the model's embeddings, got none")
        table = embedding_of(player)
        if table.shape[1] != len(self.matrix):
            raise ValueError(f"player: expected embeddings of width {len(self.matrix)}, got {table.shape[1]}")
        return _OfEmbedding(self, table)


class _OfEmbedding:
    law = None

    def __init__(self, its: EmbeddingLinear, table: NDArray[Any]) -> None:
        self._its, self._table = its, table

    def predict(self, known: Known) -> Prediction:
        its = self._its
        if its.given == "token":
            assert known.token is not None
            expected = self._table[known.token]
        elif known.law is None:
            expected = self._table.mean(axis=0)
        else:
            expected = _mean(known.law / int(known.law.sum()), self._table)
        flat = np.asarray(expected, np.float64) @ its.matrix + its.offset
        return Fixed(_unflat(flat, its.sizes, its.ropes, known.position))

    def took(self, token: int | None) -> None:
        pass


def _mean(p: NDArray[np.float64], table: NDArray[Any], rows: int = 1 << 13) -> NDArray[np.float64]:
    """p @ table in float64, some rows at a time: a float32 table of 150,000 rows is not converted whole at every position."""
    total = np.zeros(table.shape[1])
    for start in range(0, len(p), rows):
        total += p[start : start + rows] @ table[start : start + rows].astype(np.float64)
    return total


@dataclass(frozen=True, eq=False)
class LayerLinear(Fitted):
    """K_l from K_{l-1}; V_l from (V_{l-1}, K_l), all heads together: linear maps of what is reconstructed below (AQUA-KV, arXiv 2501.19392).

    The lowest layer is predicted by its mean (values: from its keys). No model, no tokens. Of each layer l: key matrix (p, kv_heads d), value
    matrix (p', kv_heads dv), and offsets; one after the other in `maps` (numbers,) float32.
    """

    maps: NDArray[np.float32]

    name: ClassVar[str] = "LayerLinear"
    ahead = True

    @classmethod
    def fit(cls, texts: Any, held: Any = None) -> LayerLinear:
        """held: the same texts as a decoder will hold them, e.g. quantised: what the maps read. Default the exact ones.

        In closed loop the layer below carries the quantiser's errors; maps fitted to exact layers amplify them (AQUA-KV fits on reconstructed
        ones). ValueError where the two differ in shape.
        """
        rows, like, _ = text_rows(texts)
        read, others, _ = (rows, like, None) if held is None else text_rows(held)
        if others[0] != like[0] or others[2] != like[2] or len(read[0][0]) != len(rows[0][0]):
            raise ValueError(
                f"held: expected the same layers and tokens as texts, {like[0]} of {len(rows[0][0])} rows, got {others[0]}"
            )
        pieces = []
        for i, (keys, values) in enumerate(rows):
            below_keys, below_values = read[i - 1] if i else (keys[:, :0], values[:, :0])
            for x, y in ((below_keys, keys), (np.concatenate([below_values, read[i][0]], axis=1), values)):
                a, b = fit_linear(x, y) if x.shape[1] else (np.zeros((0, y.shape[1]), np.float32), y.mean(axis=0))
                pieces += [a.reshape(-1), b]
        return cls(*like, np.concatenate(pieces).astype(np.float32))

    @staticmethod
    def shapes(sizes: Sizes) -> list[tuple[int, int]]:
        """Rows and columns of the maps: keys and values of layer 0, of layer 1, ..."""
        layers, heads, d, dv = sizes
        k, v = heads * d, heads * dv
        return [shape for i in range(layers) for shape in ((k * (i > 0), k), (v * (i > 0) + k, v))]

    @property
    def flops(self) -> int:
        return 2 * self.maps.size

    def arrays(self) -> Arrays:
        return {"maps": self.maps}

    def start(self, player: Player | None) -> _Upwards:
        return _Upwards(self)


class _Upwards:
    law = None

    def __init__(self, its: LayerLinear) -> None:
        self._maps = []
        at = 0
        for rows, columns in LayerLinear.shapes(its.sizes):
            a = its.maps[at : at + rows * columns].reshape(rows, columns)
            at += rows * columns
            self._maps.append((a, its.maps[at : at + columns]))
            at += columns
        self._its = its

    def predict(self, known: Known) -> Prediction:
        return _FromBelow(self._maps, self._its, known.position)

    def took(self, token: int | None) -> None:
        pass


@dataclass(frozen=True, eq=False)
class _FromBelow:
    maps: list[tuple[NDArray[Any], NDArray[Any]]]
    its: LayerLinear
    position: int

    def keys(self, layer: int, below: Sequence[TokenKV]) -> NDArray[Any]:
        a, b = self.maps[2 * layer]
        _, heads, d, _ = self.its.sizes
        x = self._bare(below[-1].keys, layer - 1) if layer else np.zeros(0)
        return _rotated((x @ a + b).reshape(heads, d), self.its.ropes[layer], self.position)

    def values(self, layer: int, below: Sequence[TokenKV], keys: NDArray[Any]) -> NDArray[Any]:
        a, b = self.maps[2 * layer + 1]
        _, heads, _, dv = self.its.sizes
        under = np.asarray(below[-1].values, np.float64).reshape(-1) if layer else np.zeros(0)
        return (np.concatenate([under, self._bare(keys, layer)]) @ a + b).reshape(heads, dv)

    def _bare(self, keys: NDArray[Any], layer: int) -> NDArray[Any]:
        return _unrotated(keys, self.its.ropes[layer], self.position).reshape(-1)


def _word(given: Given) -> Given:
    if given not in GIVEN:
        raise ValueError(f"given: expected one of {', '.join(GIVEN)}, got {given!r}")
    return given
