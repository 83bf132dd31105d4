"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first few tokens, which attention rests on, and a window of the latest ones.

Algorithm. Of n tokens the first `sinks` and the last keep - sinks are left. The paper gives tokens positions *within the cache*: keys are
held before RoPE and rotated by their place in it, so that the distance from a query to the sinks never exceeds the cache. Distances within
the window do not change by that, so here the sinks alone are turned, to end right before the window (positions="cache"): with sinks at
positions p_i and a window from position w on,

    k_i <- R(w - sinks + i - p_i) k_i,        R(w - sinks + i) = R(w - sinks + i - p_i) R(p_i)

What is left is the same for every later query, and nothing is learned from queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer, Rope
from reference.arguments import whole, word
from reference.codec import Appender
from reference.kept import MOST_TOKENS
from reference.reducer import Selector, budget, check_finite, check_keep, chosen, parts_of, split_budget
from reference.rotary import Rotary
from reference.shape import Shape
from reference.stream import Part
from reference.vectors import largest

__all__ = ["StreamingLLM"]

Index = NDArray[np.int64]


@dataclass(frozen=True)
class StreamingLLM(Selector):
    """keep: tokens left of each head (int), or their share of the prompt (float; then it cannot append). sinks: first tokens among them.

    window: recent tokens among them, None for all that the sinks leave. positions: "cache" turns the sinks' keys to positions right before
    the window, where the layer has a RoPE and tokens between are gone; "original" leaves them. `Decoded.positions` are the original ones in
    both. Turned keys are at most the largest number of their type. Defaults: 4 + 1020, the paper's cache of 1024 (its code has 4 + 512).

    Streams: as for all reducers (reference.reducer). streaming: tokens that leave the window are forgotten, one by one as at once.
    Pitfalls: what the window has passed cannot be found again; without sinks attention breaks down. With positions="cache" a stage behind
    it that undoes RoPE undoes it by the sinks' original positions.
    """

    keep: int | float = 1024
    sinks: int = 4
    window: int | None = None
    positions: Literal["cache", "original"] = "cache"

    streaming = True  # not where keep is a share

    def __post_init__(self) -> None:
        check_keep(self.keep)
        whole("sinks", self.sinks, 0, MOST_TOKENS)
        if self.window is not None:
            whole("window", self.window, 0, MOST_TOKENS)
        word("positions", self.positions, ("cache", "original"))
        object.__setattr__(self, "streaming", not isinstance(self.keep, float))

    def places(self, layer: Layer) -> list[Index]:
        check_finite(layer)
        first, last = self._places(layer.tokens)
        index = np.concatenate([np.arange(first), np.arange(layer.tokens - last, layer.tokens)])
        return [index] * layer.kv_heads

    def reduce(self, layer: Layer) -> Decoded:
        decoded = chosen(layer, self.places(layer))
        first, last = self._places(layer.tokens)
        if first + last == layer.tokens:
            return decoded
        return self._turned(decoded, first, int(layer.positions[-1]), layer.rope)

    def _turned(self, decoded: Decoded, first: int, newest: int, rope: Rope | None) -> Decoded:
        """With the keys of the `first` tokens right before those of the others, or of what comes behind position `newest`."""
        by = self._steps(decoded.positions[0, : decoded.kept[0]], first, newest, rope)
        if rope is None or by is None:
            return decoded
        keys = decoded.keys.copy()
        # a rotation alone: its scaling is in the keys already
        with np.errstate(over="ignore"):  # of float64
            turned = Rotary(with_fields(rope, attention_scaling=1.0)).apply(keys[:, :first], by)
        most = _most(keys.dtype)
        keys[:, :first] = np.clip(turned, -most, most)
        return with_fields(decoded, keys=keys)

    def _steps(self, positions: Index, first: int, newest: int, rope: Rope | None) -> Index | None:
        """By how many positions each of the `first` of the tokens at `positions` is turned; None if they stay."""
        if self.positions == "original" or rope is None or not first:
            return None
        window = int(positions[first]) if len(positions) > first else newest + 1
        return window - first + np.arange(first, dtype=np.int64) - positions[:first]

    def _places(self, tokens: int) -> tuple[int, int]:
        """How many of the first tokens are left, how many of the last."""
        total = budget(self.keep, tokens)
        first, _, last = split_budget(total, self.sinks, total if self.window is None else self.window)
        return first, last

    def start(self, layer: Layer) -> Appender:
        if isinstance(self.keep, float):
            raise TypeError(f"keep: expected a number of tokens to append to, got the share {self.keep}")
        return _Rolling(self, layer)


def _most(dtype: np.dtype[Any]) -> float:
    """The largest number of an element type."""
    return float(np.finfo(np.float64).max) if dtype == np.float64 else largest(dtype)


class _Rolling(Appender):
    """Holds sinks and window only."""

    codec: StreamingLLM

    def __init__(self, codec: StreamingLLM, layer: Layer) -> None:
        super().__init__(codec, Shape.of(layer))
        check_finite(layer)
        self._rope = layer.rope
        self._held = (layer.keys[:, :0], layer.values[:, :0], layer.positions[:0])
        self._seen = 0
        self._take(layer.keys, layer.values, layer.positions)

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        raise NotImplementedError  # take_at is what is called

    def take_at(self, keys: NDArray[Any], values: NDArray[Any], positions: Index) -> None:
        self._take(keys, values, positions)

    def _take(self, keys: NDArray[Any], values: NDArray[Any], positions: Index) -> None:
        self._seen += len(positions)
        held = [
            np.concatenate([a, b], axis=-2 if a.ndim == 3 else 0) for a, b in zip(self._held, (keys, values, positions))
        ]
        first, last = self.codec._places(self._seen)
        count = len(held[2])
        left = np.concatenate([np.arange(first), np.arange(max(first, count - last), count)])
        self._held = (held[0][:, left], held[1][:, left], held[2][left])  # copies: the caller's arrays may change

    def parts(self) -> list[Part]:
        keys, values, positions = self._held
        decoded = Decoded.of(keys, values, positions)
        first, last = self.codec._places(self._seen)
        if first + last < self._seen:
            decoded = self.codec._turned(decoded, first, int(self.shape.positions[-1]), self._rope)
        return parts_of(self.shape, decoded)
