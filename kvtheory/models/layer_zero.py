"""Keys and values of a model's first layer, from its weights alone: before rotation they are a function of the token and nothing else.

    x = E[t] (times a constant in Gemma),   n = g x / sqrt(mean(x^2) + eps),   K(t) = W_K n + b_K (QK-norm where there is one),   V(t) = W_V n + b_V

No position and no context enters, so that a vocabulary has just |V| such rows, and whether the cache tells two tokens apart at the first
layer (the injectivity that arXiv 2604.15356 assumes) is a finite question. NumPy only: torch is needed to convert the weights
(`kvtheory models fetch`), not here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.models.fetch import MODELS, ModelUnavailable, cache_folder
from kvtheory.models.inside import UnsupportedModel

__all__ = ["LayerZero", "collisions", "key_value_rows", "read", "stored", "weights_folder"]

Float = NDArray[np.float64]

#: model types whose first layer is the formula above; of Gemma the norms multiply by 1 + g and the embedding is scaled
_LLAMA_LIKE, _GEMMA_LIKE = ("llama", "qwen2", "mistral"), ("gemma3_text",)
#: rows projected at once
_ROWS = 4096


@dataclass(frozen=True)
class LayerZero:
    """What K and V of the first layer are made of; E is `embedding`, g is `gain`.

    embedding (|V|, D), gain (D,), key_weight (kv_heads, d, D), value_weight (kv_heads, dv, D), key_bias (kv_heads, d) or None, value_bias
    likewise, key_gain (d,): gain of the QK-norm, or None without one. float32 or float64.
    """

    embedding: NDArray[Any]
    gain: NDArray[Any]
    key_weight: NDArray[Any]
    value_weight: NDArray[Any]
    eps: float
    embedding_scale: float = 1.0
    key_bias: NDArray[Any] | None = None
    value_bias: NDArray[Any] | None = None
    key_gain: NDArray[Any] | None = None


def weights_folder(name: str) -> Path:
    """The folder of model `name` (a key of MODELS) as float32 safetensors, where it is on this machine; never downloads, never converts.

    ValueError for an unknown name, ModelUnavailable where it is not here.
    """
    if name not in MODELS:
        raise ValueError(f"model: no model {name!r}; there are {', '.join(MODELS)}")
    home = cache_folder() / "models" / f"{name}-{MODELS[name].sha256[:8]}"
    found = sorted(home.glob("float32-v*/kvtheory-origin.json"))
    if not found:
        raise ModelUnavailable(
            f"{name}: no converted weights in {home}; `kvtheory models fetch {name}` puts them there"
        )
    return found[-1].parent


def read(folder: str | os.PathLike[str]) -> LayerZero:
    """The first layer of the model in `folder` (config.json, model.safetensors). UnsupportedModel for one that is not of a known formula."""
    from safetensors import safe_open

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    if kind not in (*_LLAMA_LIKE, *_GEMMA_LIKE):
        raise UnsupportedModel(f"model: expected one of {', '.join((*_LLAMA_LIKE, *_GEMMA_LIKE))}, got {kind}")
    heads = int(config["num_key_value_heads"])
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = set(file.keys())

        def get(name: str) -> NDArray[Any] | None:
            return file.get_tensor(name) if name in names else None

        def by_head(name: str) -> NDArray[Any] | None:
            found = get(f"model.layers.0.self_attn.{name}")
            return None if found is None else found.reshape(heads, -1, *found.shape[1:])

        more = 1.0 if kind in _GEMMA_LIKE else 0.0
        gain, key_gain = get("model.layers.0.input_layernorm.weight"), get("model.layers.0.self_attn.k_norm.weight")
        embedding, key_weight, value_weight = (
            get("model.embed_tokens.weight"),
            by_head("k_proj.weight"),
            by_head("v_proj.weight"),
        )
        if embedding is None or gain is None or key_weight is None or value_weight is None:
            raise UnsupportedModel(f"model: {folder} lacks the embedding, or the norm or the projections of layer 0")
        return LayerZero(
            embedding,
            gain + np.float32(more),
            key_weight,
            value_weight,
            eps=float(config["rms_norm_eps"]),
            embedding_scale=float(np.float32(embedding.shape[1]) ** 0.5) if more else 1.0,
            key_bias=by_head("k_proj.bias"),
            value_bias=by_head("v_proj.bias"),
            key_gain=None if key_gain is None else key_gain + np.float32(more),
        )


def key_value_rows(first: LayerZero) -> NDArray[np.float32]:
    """K(t) before rotation and V(t) of all KV heads side by side, (|V|, kv_heads (d + dv)), keys first: float64, rounded once to float32.

    Equal embeddings give equal rows, whatever the order in which a BLAS adds: each different embedding is projected once.
    """
    groups = collisions(first.embedding)
    distinct, which = groups.representatives, groups.group_of
    heads, d, _ = first.key_weight.shape
    # K = W (g x) / rms: the gain goes into the weights, the norm divides at the end
    gain = first.gain.astype(np.float64)
    weights = np.concatenate(
        [w.reshape(-1, w.shape[2]).astype(np.float64) * gain for w in (first.key_weight, first.value_weight)]
    )
    rows = np.empty((len(distinct), len(weights)), np.float32)
    for start in range(0, len(distinct), _ROWS):
        x = first.embedding[distinct[start : start + _ROWS]].astype(np.float64) * first.embedding_scale
        made = (x @ weights.T) / np.sqrt((x * x).mean(axis=1) + first.eps)[:, None]
        keys, values = made[:, : heads * d], made[:, heads * d :]
        if first.key_bias is not None:
            keys += first.key_bias.reshape(-1)
        if first.value_bias is not None:
            values += first.value_bias.reshape(-1)
        if first.key_gain is not None:
            by_head = keys.reshape(len(x), heads, d)
            by_head *= first.key_gain / np.sqrt((by_head * by_head).mean(axis=2, keepdims=True) + first.eps)
        rows[start : start + _ROWS] = made
    return rows[which]


def stored(rows: NDArray[Any], bits: int | str) -> NDArray[Any]:
    """`rows` as a cache would store them. bits: "float32", "float16" or "bfloat16", or a number b from 1 to 8: codes of a uniform quantiser.

    The quantiser of channel c has 2^b levels from its least to its greatest value over all rows: round((x - low) / (high - low) (2^b - 1)).
    """
    if isinstance(bits, str):
        import ml_dtypes

        kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
        if bits not in kinds:
            raise ValueError(f"bits: expected one of {', '.join(kinds)} or a number from 1 to 8, got {bits!r}")
        return rows.astype(kinds[bits])
    if not 1 <= bits <= 8:
        raise ValueError(f"bits: expected a number from 1 to 8, got {bits!r}")
    low, high = rows.min(axis=0).astype(np.float64), rows.max(axis=0).astype(np.float64)
    step = np.where(high > low, high - low, 1.0) / (2**bits - 1)
    codes = np.empty(rows.shape, np.uint8)
    for start in range(0, len(rows), _ROWS):
        codes[start : start + _ROWS] = np.rint((rows[start : start + _ROWS] - low) / step)
    return codes


@dataclass(frozen=True)
class Collisions:
    """Which rows are equal. group_of (n,): the group of each row, 0 to distinct - 1; representatives (distinct,): its first row."""

    group_of: NDArray[np.int64]
    representatives: NDArray[np.int64]

    @property
    def distinct(self) -> int:
        return len(self.representatives)

    @property
    def lost(self) -> int:
        """Rows that some other row already stands for: n - distinct."""
        return len(self.group_of) - self.distinct

    @property
    def shared(self) -> list[list[int]]:
        """The rows of each group of two or more, in order of their first."""
        sizes = np.bincount(self.group_of, minlength=self.distinct)
        return [np.flatnonzero(self.group_of == g).tolist() for g in np.flatnonzero(sizes > 1)]


def collisions(rows: NDArray[Any]) -> Collisions:
    """Groups of equal rows of (n, c), exactly: compared as bits, -0.0 being 0.0. Groups are numbered by their first row.

    ValueError for NaN, which equals nothing.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2:
        raise ValueError(f"rows: expected shape (n, c), got {rows.shape}")
    if rows.dtype.kind in "iub":
        plain = np.ascontiguousarray(rows)
    else:
        if np.isnan(rows).any():
            raise ValueError("rows: expected numbers, got NaN")
        plain = np.ascontiguousarray(rows + rows.dtype.type(0))  # -0.0 + 0.0 = 0.0
    if plain.size == 0:
        return Collisions(np.zeros(len(plain), np.int64), np.arange(min(1, len(plain))))
    octets = plain.view(np.uint8).reshape(len(plain), -1)
    words = (np.pad(octets, ((0, 0), (0, -octets.shape[1] % 8))) if octets.shape[1] % 8 else octets).view(np.uint64)
    # equal rows have equal sums; rows that share a sum are then compared word by word, so that no accident counts as a collision
    factors = np.random.Philox(key=words.shape[1]).random_raw(words.shape[1]) | np.uint64(1)
    sums = words @ factors  # modulo 2^64
    first, group = np.unique(sums, return_index=True, return_inverse=True)[1:]
    follows = np.flatnonzero(first[group] != np.arange(len(words)))
    if not (words[follows] == words[first[group[follows]]]).all():
        first, group = np.unique(words, axis=0, return_index=True, return_inverse=True)[1:]
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return Collisions(rank[group.reshape(-1)], first[order])
