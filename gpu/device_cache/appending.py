"""What becomes of appended tokens: exact at first, then coded, a chunk at a time, as the codec of the cache codes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

import reference
from gpu.device_cache import kivi
from gpu.device_cache.opening import opened
from gpu.device_cache.segment import Segment
from gpu.device_cache.where import Where
from gpu.resident import host
from kvtheory.layer import Layer
from reference.shape import Shape
from reference.stream import Reader
from reference.transform_coding.codec import TransformCodec

__all__ = ["chunk_of", "coded_chunk"]


def chunk_of(codec: Any, fold: int) -> int:
    """Tokens that are coded at once: `fold`, or as many more as whole groups and blocks of the codec need. 0: they stay exact."""
    if isinstance(codec, reference.KIVI):
        unit = int(np.lcm(codec.group, 32))
    elif isinstance(codec, TransformCodec):
        unit = int(np.lcm(getattr(codec, "block", 32), 32))
    elif isinstance(codec, (reference.TurboQuant, reference.KVQuant)):
        unit = 32
    else:  # Full keeps tokens as they are, reducers what comes after the prompt, and a Pipeline what its reducer has not seen
        return 0
    return -(-fold // unit) * unit


def coded_chunk(
    codec: Any, keys: Any, values: Any, positions: NDArray[np.int64], index: int | None, first: int, xp: Any
) -> Segment:
    """Tokens (kv_heads, n, dim) as a segment of codes: what `codec` makes of a layer of them alone, without sinks or window.

    The reference codes them, on the host: a chunk is copied there and its codes back. first: of the tokens in a decoded cache.
    """
    rope = None
    if isinstance(codec, reference.KVQuant):
        rope = next(one.rope for one in codec.tables if one.index == index)
        codec = dataclasses.replace(codec, sinks=0)
    if isinstance(codec, TransformCodec):
        rope = next(one.rope for one in codec.layers if one.index == index)
        codec = dataclasses.replace(codec, sinks=0, window=0)  # type: ignore[type-var]
    layer = Layer(
        np.ascontiguousarray(host(keys)),
        np.ascontiguousarray(host(values)),
        index=index,
        rope=rope,
        positions=positions,
    )
    if isinstance(codec, reference.KIVI):
        own = kivi.chunk(codec, layer, Where(Shape.of(layer).positions).at(slice(0, layer.tokens)), xp)
    else:
        parts = [Reader(bytes(part)) for part in codec.encode_parts(layer)]
        (own,) = (one for one in opened(codec, parts, None, xp)[1] if one.tokens)
    own.index = slice(first, first + layer.tokens)
    return own
