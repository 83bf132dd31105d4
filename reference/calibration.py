"""Layers that a codec is fitted to, by their index: several texts may show the same layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Cache, Layer, Rope
from reference.codec import layers_of
from reference.errors import StateMismatch
from reference.rotary import rotary

__all__ = ["by_index", "fitted", "key_fisher", "mean_extra"]

Float64 = NDArray[np.float64]


def by_index(calibration: Any) -> Iterator[tuple[int | None, list[Layer]]]:
    """(index, its layers) of a Cache or a list of Layers, ascending, None first; of a Cache one layer in memory at a time.

    Raises TypeError for anything else; ValueError if there is none, if two layers have no index or a Cache has an index twice, or if layers of one
    index differ in heads, dimensions, or rope.
    """
    layers = layers_of(calibration)
    if isinstance(calibration, Cache):
        yield from _of_cache(calibration)
        return
    groups: dict[int | None, list[Layer]] = {}
    for i, layer in enumerate(layers):
        group = groups.setdefault(layer.index, [])
        if layer.index is None and group:
            raise ValueError(f"calibration[{i}]: expected an index, as there is another layer without one")
        if group and _kind(group[0]) != _kind(layer):
            raise ValueError(
                f"calibration[{i}]: expected {group[0]} like the layer of index {layer.index} before, got {layer}"
            )
        group.append(layer)
    if not groups:
        raise ValueError("calibration: expected at least one layer, got none")
    yield from sorted(groups.items(), key=lambda item: -1 if item[0] is None else item[0])


def _of_cache(cache: Cache) -> Iterator[tuple[int | None, list[Layer]]]:
    if len(cache) == 0:
        raise ValueError("calibration: expected at least one layer, got none")
    indices = [layer.index for layer in cache]
    for i, index in enumerate(indices):
        if index in indices[:i]:
            raise ValueError(
                f"calibration[{i}]: expected an index of its own, got {index} as before; pass a list of layers to pool them"
            )
    for i in sorted(range(len(indices)), key=lambda i: -1 if indices[i] is None else indices[i]):  # type: ignore[arg-type,return-value]
        yield indices[i], [cache[i]]


def _kind(layer: Layer) -> tuple[Any, ...]:
    return layer.kv_heads, layer.head_dim, layer.value_dim, layer.rope


def fitted(tables: dict[int | None, Any], layer: Layer, codec: str) -> Any:
    """What was fitted for this layer's index; StateMismatch if nothing was."""
    if layer.index not in tables:
        held = ", ".join("none" if i is None else str(i) for i in tables) or "no layer at all"
        raise StateMismatch(f"layer: {codec} was fitted to layers of index {held}, got one of index {layer.index}")
    return tables[layer.index]


def mean_extra(layers: list[Layer], name: str) -> Float64 | None:
    """The mean over layers of an extra, (kv_heads, d) float64; None unless all have it. ValueError if it is negative or not finite somewhere."""
    if not all(name in layer.extras for layer in layers):
        return None
    for layer in layers:
        checks.finite(f"extras[{name!r}]", layer.extras[name], ("head", "channel"))
    mean = np.mean([layer.extras[name].astype(np.float64) for layer in layers], axis=0)
    if (mean < 0).any():
        raise ValueError(f"extras[{name!r}]: expected Fisher information >= 0, got {mean.min():g}")
    return np.asarray(mean)


def key_fisher(layers: list[Layer], rope: Rope | None) -> Float64 | None:
    """Fisher information of keys as they are coded, (kv_heads, head_dim): before `rope` where there is one; None unless all layers have it."""
    if rope is None:
        return mean_extra(layers, "key_fisher")
    before = mean_extra(layers, "key_fisher_pre_rope")
    after = mean_extra(layers, "key_fisher") if before is None else None
    if after is not None:
        # a rotation by angles all around spreads both channels of a pair alike
        turn = rotary(rope)
        before = after.copy()
        before[:, turn.first] = before[:, turn.second] = (after[:, turn.first] + after[:, turn.second]) / 2
    return before
