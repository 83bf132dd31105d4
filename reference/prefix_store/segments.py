"""A run of tokens with the keys and values that each layer holds of them; what a store is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Layer
from reference import stream
from reference.codec import Codec

__all__ = ["KV", "LayerKind", "Segment", "coded", "common_prefix", "cut"]

Tokens = NDArray[np.int64]


class KV(NamedTuple):
    """Of one layer: keys (kv_heads, tokens, head_dim), values (kv_heads, tokens, value_dim)."""

    keys: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True)
class LayerKind:
    """What all sessions of a store have alike in one layer; index: of the layer in its model."""

    kv_heads: int
    head_dim: int
    value_dim: int
    key_dtype: np.dtype[Any]
    value_dtype: np.dtype[Any]
    index: int | None

    @classmethod
    def of(cls, layer: Layer) -> LayerKind:
        keys, values = (array.dtype.newbyteorder("=") for array in (layer.keys, layer.values))
        return cls(layer.kv_heads, layer.head_dim, layer.value_dim, keys, values, layer.index)

    def __str__(self) -> str:
        index = "" if self.index is None else f" of layer {self.index}"
        return (
            f"{self.kv_heads} heads x ({self.head_dim} {self.key_dtype} + {self.value_dim} {self.value_dtype}){index}"
        )


def cut(kv: KV, start: int, end: int) -> KV:
    """Tokens start to end - 1, copied: a store keeps no more alive than it holds."""
    return KV(*(np.array(x[:, start:end], x.dtype.newbyteorder("="), order="C") for x in kv))


def common_prefix(s: Tokens, t: Tokens) -> int:
    """Length in tokens of the longest common prefix."""
    n = min(len(s), len(t))
    apart = np.flatnonzero(s[:n] != t[:n])
    return int(apart[0]) if apart.size else n


def coded(inner: Codec, layers: Sequence[KV], kinds: Sequence[LayerKind], start: int) -> list[bytes]:
    """Each layer's tokens, the first at position `start`, as a group of the inner codec's parts."""
    out = []
    for kv, kind in zip(layers, kinds):
        positions = np.arange(start, start + kv.keys.shape[1])
        layer = Layer(kv.keys, kv.values, index=kind.index, positions=positions)
        out.append(stream.join(inner.encode_parts(inner._require(layer))))
    return out


class Segment:
    """Tokens `start` to `end` - 1 of every session that goes through it, behind those of `parent`.

    refs: sessions that end here or below, and leases. last_use: time of the last one that went through. A segment is dropped only at refs 0.
    """

    __slots__ = ("children", "coded", "hash", "key", "last_use", "layers", "parent", "refs", "salt", "start", "tokens")

    def __init__(self, parent: Segment | None, tokens: Tokens, layers: Sequence[KV], salt: bytes) -> None:
        self.parent, self.tokens, self.layers, self.salt = parent, tokens, list(layers), salt
        self.start: int = parent.end if parent is not None else 0
        self.children: dict[int, Segment] = {}
        self.key = 0  # of this segment among its parent's children
        self.hash = b""  # of all tokens up to its end, where the policy has one
        self.refs = self.last_use = 0
        self.coded: list[bytes] | None = None  # what a stream holds of its layers, once asked for

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self) -> list[Segment]:
        """From the first token on, without the root."""
        return list(self.upwards())[::-1]

    def upwards(self) -> Iterator[Segment]:
        step: Segment | None = self
        while step is not None and step.parent is not None:
            yield step
            step = step.parent
