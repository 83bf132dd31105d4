"""What codecs are compared on: a captured cache that workers can open, and its split into what is coded and who asks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
from kvtheory.layer import Cache, Layer

__all__ = ["DTYPES", "Source", "Split", "as_dtype", "divide", "open_cache", "source"]

#: element types that a prefix can be cast to before it is coded
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Source:
    """A captured cache that every worker can open: the path of a file of `Cache.save`, or "sample".

    digest: SHA-256 of the file. layers: its layers by their index in the model (their number where they have none).
    """

    path: str
    digest: str
    model: str
    text: str
    tokens: int
    layers: Mapping[int, int]
    label: str = ""

    @property
    def id(self) -> str:
        return self.digest[:16]


@dataclass(frozen=True)
class Split:
    """prefix tokens are coded, the `held` positions after them ask, in `segments` segments. dtype: of the coded numbers."""

    prefix: int = 1024
    held: int = 512
    segments: int = 8
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for name, least in (("prefix", 1), ("held", 2), ("segments", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def within(self, tokens: int) -> Split:
        """This split, or, of a cache too short for it, the same segments with two thirds of the tokens as prefix."""
        if tokens >= self.prefix + self.held:
            return self
        return Split(2 * tokens // 3, tokens - 2 * tokens // 3, self.segments, self.dtype)


def source(path: str | os.PathLike[str], label: str = "") -> Source:
    """The Source in a cache file, or "sample" for the embedded one. label: what pictures call it, default its model.

    Every layer is read once. CorruptCache, FileNotFoundError, or ValueError for a cache without layers or with two of one index.
    """
    path = "sample" if str(path) == "sample" else str(Path(path).resolve())
    cache = open_cache(path)
    layers: dict[int, int] = {}
    tokens = 0
    for i, layer in enumerate(cache):
        index = i if layer.index is None else layer.index
        if index in layers:
            raise ValueError(f"path: two layers of {path} have index {index}")
        layers[index] = i
        tokens = max(tokens, int(layer.positions.max(initial=-1)) + 1)
    if not layers:
        raise ValueError(f"path: the cache {path} has no layers")
    model = str(cache.meta.get("model") or "unnamed")
    return Source(path, _digest(path), model, str(cache.meta.get("text") or ""), tokens, layers, label or model)


def open_cache(path: str) -> Cache:
    """The cache of a Source's path."""
    return kvtheory.sample_cache() if path == "sample" else Cache.load(path)


def _digest(path: str) -> str:
    if path == "sample":
        from kvtheory.sample import SAMPLE

        return hashlib.sha256((resources.files("kvtheory") / "data" / SAMPLE).read_bytes()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def divide(layer: Layer, split: Split) -> tuple[Layer, Layer]:
    """(what a codec is given, what it is judged by) of a captured layer.

    The first: prefix tokens in `dtype`, with the prefix's own queries and what `extras` say of its tokens or of the model's weights; what
    was learned from the whole text (Fisher diagonals) is left out. The second: the prefix as captured, with the held-out queries in order
    of position, each seeing all of it.
    """
    layer.require("queries", "query_positions", by="compare")
    assert layer.queries is not None and layer.query_positions is not None
    before = layer.positions < split.prefix
    if not before.any():
        raise ValueError(f"prefix: expected tokens at positions below {split.prefix}, got none")
    asked = np.argsort(layer.query_positions, kind="stable")
    where = layer.query_positions[asked]
    own = asked[where < split.prefix]
    held = asked[(where >= split.prefix) & (where < split.prefix + split.held)]
    if not held.size:
        raise ValueError(
            f"queries: expected some at positions {split.prefix} to {split.prefix + split.held - 1}, got none"
        )
    extras: dict[str, Any] = {
        name: layer.extras[name] for name in ("key_weight", "value_weight") if name in layer.extras
    }
    if "inputs" in layer.extras:
        extras["inputs"] = layer.extras["inputs"][before]
    judged = layer.replace(
        keys=layer.keys[:, before], values=layer.values[:, before], positions=layer.positions[before],
        queries=layer.queries[:, held], query_positions=None, extras={},
    )  # fmt: skip
    coded = as_dtype(
        judged.replace(
            extras=extras,
            queries=layer.queries[:, own] if own.size else None,
            query_positions=layer.query_positions[own] if own.size else None,
        ),
        split.dtype,
    )  # fmt: skip
    return coded, judged


def as_dtype(layer: Layer, dtype: str) -> Layer:
    """With keys and values as the element type that is coded, one of DTYPES."""
    as_type = _dtype(dtype)
    with np.errstate(over="ignore"):  # found as inf, with its place, by Layer
        return layer.replace(keys=layer.keys.astype(as_type), values=layer.values.astype(as_type))


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)
