"""What codecs with kernels share: layers, and bare arrays on the host or a GPU, go through the same code over an array namespace."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.module import namespace, require_gpu
from gpu.resident import host
from kvtheory import checks
from kvtheory.layer import Decoded, Layer
from reference import codec, stream
from reference.errors import CorruptStream
from reference.shape import MOST_CHANNELS, MOST_HEADS, Shape, _number
from reference.stream import Kind, Part, Reader

__all__ = ["ArrayCodec", "little", "shape_of", "words"]


class ArrayCodec(codec.Codec):
    """A codec of scope "layer" whose numerical core runs on arrays of one namespace. Put it before the reference's class among the bases.

    A subclass defines `_encoded` and `_decoded`; layers, which hold NumPy arrays, then run on the simulator.
    """

    def _encoded(self, shape: Shape, keys: Any, values: Any) -> list[Part]:
        """The parts of keys and values (kv_heads, tokens, d), any strides, in one namespace; its arrays may hold NaN or inf."""
        raise NotImplementedError

    def _decoded(self, parts: list[Reader], xp: Any) -> tuple[Shape, Any, Any]:
        """Shape, and keys and values in namespace `xp`. Hostile bytes: CorruptStream only."""
        raise NotImplementedError

    def encode_parts(self, data: Layer) -> list[Part]:
        return self._encoded(Shape.of(data), data.keys, data.values)

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape, keys, values = self._decoded(parts, np)
        return shape.decoded(keys, values)

    def encode_arrays(self, keys: Any, values: Any, index: int | None = None) -> bytes:
        """The stream of keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim) at positions 0, 1, 2, ...

        Both NumPy or both CuPy, of any strides. index: number of the layer in its model. ValueError, TypeError as for a Layer and `encode`.
        """
        shape = shape_of(keys, values, index)
        return stream.write(self._header(Kind.LAYER), [self._encoded(shape, keys, values)])

    def decode_arrays(self, data: bytes, xp: Any = None) -> tuple[Any, Any]:
        """Keys and values of a layer's stream, as arrays of namespace `xp`: numpy or cupy; default cupy. Errors as for `decode`.

        gpu.Unavailable without CuPy or a GPU where `xp` is not given.
        """
        xp = require_gpu() if xp is None else xp
        header, groups = codec._read(data)
        own = self._like(header)
        if header.kind is not Kind.LAYER:
            raise CorruptStream(f"kind: expected LAYER, got {header.kind.name}", len(stream.MAGIC) + 1)
        assert isinstance(own, ArrayCodec)
        _, keys, values = own._decoded(own._named(groups[0]), xp)
        return keys, values


def shape_of(keys: Any, values: Any, index: int | None = None) -> Shape:
    """The Shape of bare arrays at positions 0, 1, 2, ...; ValueError or TypeError naming the argument that does not fit."""
    namespace(keys, values)
    for name, array in (("keys", keys), ("values", values)):
        checks.floating(name, array)
    sizes = checks.shape("keys", keys, ("kv_heads", "tokens", "head_dim"))
    sizes = checks.shape("values", values, ("kv_heads", "tokens", "value_dim"), sizes)
    heads, tokens, head_dim, value_dim = (sizes[axis] for axis in ("kv_heads", "tokens", "head_dim", "value_dim"))
    if not (0 < heads <= MOST_HEADS and 0 < head_dim <= MOST_CHANNELS and 0 < value_dim <= MOST_CHANNELS):
        raise ValueError(
            f"keys, values: expected 1 to {MOST_HEADS} heads and 1 to {MOST_CHANNELS} channels, "
            f"got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    return Shape(heads, tokens, head_dim, value_dim, _number(keys), _number(values), index, range(tokens))


def little(array: Any) -> bytes:
    """The bytes of an array in C order, little-endian, whatever machine it is on."""
    own = host(array)
    return np.ascontiguousarray(own, own.dtype.newbyteorder("<")).tobytes()


def words(data: Any) -> NDArray[np.uint32]:
    """Bytes, or an array of uint8, as the 32-bit words that kernels read them in, little-endian, zeros behind."""
    flat = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray, memoryview)) else data
    out = np.zeros(-(-flat.size // 4), "<u4")
    out.view(np.uint8)[: flat.size] = flat
    return out.astype(np.uint32, copy=False)
