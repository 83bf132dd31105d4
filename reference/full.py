"""The full cache: every number as it came, fp16, bf16, fp32 or fp64. The rate that every ratio is against, and a decoder's control.

part "shape"    reference.shape
part "keys"     tokens x kv_heads x head_dim numbers, little-endian; token-major, so that a growing stream only grows at its end
part "values"   tokens x kv_heads x value_dim numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Decoded, Layer
from reference.codec import Appender, Codec
from reference.errors import CorruptStream
from reference.shape import Shape
from reference.stream import Part, Reader

__all__ = ["Full", "flat_numbers"]


@dataclass(frozen=True)
class Full(Codec):
    """Lossless: bits in, the same bits out, -0.0 and subnormals included. Element types of keys and values may differ."""

    streaming = True
    part_names = ("shape", "keys", "values")

    def encode_parts(self, data: Layer) -> list[Part]:
        return self.start(data).parts()

    def start(self, layer: Layer) -> Appender:
        appender = _FullAppender(self, Shape.of(layer))
        for name, array in (("keys", layer.keys), ("values", layer.values)):
            checks.finite(name, array, ("head", "token", "channel"))
        appender.take(layer.keys, layer.values)
        return appender

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape = Shape.read(parts[0])
        keys = _numbers(parts[1], "keys", shape, shape.head_dim, shape.key_dtype)
        values = _numbers(parts[2], "values", shape, shape.value_dim, shape.value_dtype)
        return shape.decoded(keys, values)

    def decode_flops(self, stream: bytes) -> int:
        """0: nothing is computed."""
        return 0


class _FullAppender(Appender):
    def __init__(self, codec: Full, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._keys: list[bytes] = []
        self._values: list[bytes] = []

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        self._keys.append(_token_major(keys))
        self._values.append(_token_major(values))

    def parts(self) -> list[Part]:
        return [self.shape.write(), b"".join(self._keys), b"".join(self._values)]


def _token_major(array: NDArray[Any]) -> bytes:
    little = np.ascontiguousarray(array.transpose(1, 0, 2), dtype=array.dtype.newbyteorder("<"))
    return little.tobytes()


def _numbers(reader: Reader, name: str, shape: Shape, dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    native = flat_numbers(reader, name, shape.rows * dim, dtype)
    return np.ascontiguousarray(native.reshape(shape.tokens, shape.kv_heads, dim).transpose(1, 0, 2))


def flat_numbers(reader: Reader, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`count` little-endian numbers, all of `reader`; CorruptStream at the first that is not finite."""
    start = reader.offset
    # bfloat16 has no byte-order mark of its own: read as integers, then viewed
    words = reader.array(f"<u{dtype.itemsize}", count, name)
    reader.end(name)
    native = words.astype(words.dtype.newbyteorder("="), copy=False).view(dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        finite = np.isfinite(native)
    if not finite.all():
        at = start + int(np.argmin(finite)) * dtype.itemsize
        raise CorruptStream(f"{name}: expected finite numbers, got {native[(at - start) // dtype.itemsize]}", at)
    return native
