"""What the tests of all codecs share: they encode, decode and refuse as the reference does, given layers or, as on a GPU, bare arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtheory.layer import Layer
from reference import CorruptStream, StateMismatch
from reference import stream as container

__all__ = ["altered", "check_refused", "check_same_outcome", "decoded", "encoded", "outcome"]

REFUSALS = (ValueError, StateMismatch, CorruptStream)


def encoded(backend: Any, codec: Any, layer: Layer, order: int) -> bytes:
    """What a codec with kernels makes of a layer at positions 0, 1, 2, ...; call it where the backend is running."""
    if backend.with_layers(order):
        return codec.encode(layer)
    return codec.encode_arrays(backend.put(layer.keys), backend.put(layer.values), layer.index)


def _bytes(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()


def decoded(backend: Any, codec: Any, stream: bytes, order: int) -> Any:
    """Keys and values of each layer that a codec with kernels decodes, to their bytes; call it where the backend is running."""
    if backend.with_layers(order):
        return of_decoded(codec.decode(stream))
    found = codec.decode_arrays(stream, backend.xp)
    pairs = found if isinstance(found, list) else [found]
    return [tuple(_bytes(backend.get(array)) for array in pair[:2]) for pair in pairs]


def of_decoded(found: Any) -> Any:
    """What the reference decodes, as `decoded` has it."""
    every = found if isinstance(found, list) else [found]
    return [(_bytes(one.keys), _bytes(one.values)) for one in every]


def outcome(call: Any) -> Any:
    """What a call gives, or the type and the words of its refusal."""
    try:
        return call()
    except REFUSALS as problem:
        return type(problem), str(problem)


def check_same_outcome(backend: Any, codec: Any, reference_codec: Any, stream: bytes, order: int) -> None:
    """Hostile bytes: the reference's numbers, or its error in its words, at its offset."""
    wanted = outcome(lambda: of_decoded(reference_codec.decode(stream)))
    with backend.running(order):
        found = outcome(lambda: decoded(backend, codec, stream, order))
    assert found == wanted


def check_refused(backend: Any, codec: Any, reference_codec: Any, layer: Layer, order: int) -> None:
    """A layer that the reference refuses, in its words."""
    with pytest.raises(ValueError, match="expected") as wanted:
        reference_codec.encode(layer)
    with backend.running(order), pytest.raises(ValueError, match="expected") as found:
        encoded(backend, codec, layer, order)
    assert str(found.value) == str(wanted.value)


def altered(stream: bytes, part: int, at: int | None, flip: int) -> bytes:
    """A stream with one byte of one part altered, or (None) the part cut by its last byte, and sealed again."""
    header, groups = container.read(stream)
    parts = [bytearray(one.rest()) for one in groups[0]]
    if at is None:
        del parts[part][-1:]
    elif parts[part]:
        parts[part][at % len(parts[part])] ^= flip
    return container.write(header, [parts])
