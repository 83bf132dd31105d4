"""Rates are lengths of streams: what a codec really holds, and codecs compared where they hold the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtheory import checks, distortion
from kvtheory.layer import Layer
from reference.codec import Codec, Layers, decode_cache, encode_cache, layers_of

__all__ = ["AtRate", "at_rate", "held_bits", "roundtrip"]


def held_bits(data: bytes, cache_or_layer: Layers | Layer) -> float:
    """The held rate, bits per number: 8 len(stream) / (keys.size + values.size), summed over the layers of a cache.

    ValueError for a cache without tokens, whose rate is undefined.
    """
    layers = [cache_or_layer] if isinstance(cache_or_layer, Layer) else layers_of(cache_or_layer)
    numbers = sum(layer.keys.size + layer.values.size for layer in layers)
    if numbers == 0:
        raise ValueError("cache_or_layer: expected at least one token, got none")
    return 8 * len(data) / numbers


def roundtrip(codec: Codec, layer: Layer | Layers) -> tuple[Any, float, float]:
    """(decoded, held bits per number, attention error) of a layer, through its bytes.

    attention error: `kvtheory.distortion.attention_error`, of a cache the geometric mean over its layers. ValueError if a layer
    has no queries.
    """
    if isinstance(layer, Layer) and codec.scope == "layer":
        data = codec.encode(layer)
        decoded = codec.decode(data)
        return decoded, held_bits(data, layer), distortion.attention_error(layer, decoded)
    cache = [layer] if isinstance(layer, Layer) else layer
    data = encode_cache(codec, cache)
    every = decode_cache(codec, data)
    errors = [distortion.attention_error(one, its) for one, its in zip(layers_of(cache), every, strict=True)]
    mean = float(np.exp(np.mean(np.log(errors)))) if all(errors) else 0.0
    return every, held_bits(data, cache), mean


@dataclass(frozen=True)
class AtRate:
    """What `at_rate` found: the codec, its nominal parameter, and the rate that it holds on the data."""

    codec: Codec
    nominal: float
    held_bits: float


def at_rate(
    make: Callable[[Any], Codec], data: Layer | Layers, held_bits: float, tolerance: float = 0.01, *, most: float = 16.0
) -> AtRate:
    """The codec make(nominal) that holds `held_bits` bits per number on `data` to a relative `tolerance`.

    make: nominal rate -> codec, whose held rate must not fall as the nominal rate rises; real nominal rates in (0, most] are
    tried by the secant rule inside a bracket that shrinks each time. Where make takes whole numbers only (it raises ValueError
    or TypeError for others), those are tried. ValueError if no nominal rate comes near enough; the message has the two nearest
    held rates, between which log2 of the error may be interpolated (say so where you do).
    """
    checks.positive("held_bits", held_bits)
    checks.positive("tolerance", tolerance)
    seen: dict[float, AtRate] = {}

    def at(nominal: float) -> AtRate:
        if nominal not in seen:
            whole = int(nominal) if float(nominal).is_integer() else nominal
            codec = make(whole)
            data_bytes = (
                codec.encode(data)
                if isinstance(data, Layer) and codec.scope == "layer"
                else encode_cache(codec, _as_layers(data))
            )
            seen[nominal] = AtRate(codec, whole, _held(data_bytes, data))
        return seen[nominal]

    def near(found: AtRate) -> bool:
        return abs(found.held_bits - held_bits) <= tolerance * held_bits

    low, high = 0.0, float(most)  # nominal rates that hold too little and too much
    guess = min(held_bits, high)
    for _ in range(40):
        try:
            found = at(guess)
        except (TypeError, ValueError):
            if float(guess).is_integer():
                raise
            return _whole_rate(at, near, held_bits, int(low), int(np.ceil(high)))
        if near(found):
            return found
        low, high = (guess, high) if found.held_bits < held_bits else (low, guess)
        if high - low < 1e-9 * high:
            break
        # most codecs hold the nominal rate and a constant more
        step = guess + (held_bits - found.held_bits)
        guess = step if low < step < high and len(seen) < 4 else 0.5 * (low + high)
    raise ValueError(_nothing_near(seen.values(), held_bits))


def _whole_rate(
    at: Callable[[float], AtRate], near: Callable[[AtRate], bool], target: float, low: int, high: int
) -> AtRate:
    tried: list[AtRate] = []
    for nominal in sorted(range(max(low, 1), high + 1), key=lambda n: abs(n - target)):
        if len(tried) >= 2 and min(f.held_bits for f in tried) < target < max(f.held_bits for f in tried):
            break
        try:
            tried.append(at(float(nominal)))
        except (TypeError, ValueError):
            continue
        if near(tried[-1]):
            return tried[-1]
    raise ValueError(_nothing_near(tried, target))


def _nothing_near(found: Iterable[AtRate], target: float) -> str:
    rates = sorted({f.held_bits for f in found})
    below = max((r for r in rates if r < target), default=None)
    above = min((r for r in rates if r > target), default=None)
    return f"held_bits: no nominal rate holds {target:g} bits per number; the nearest hold {below} and {above}"


def _as_layers(data: Layer | Layers) -> Layers:
    return [data] if isinstance(data, Layer) else data


def _held(data_bytes: bytes, data: Layer | Layers) -> float:
    return held_bits(data_bytes, data)
