"""The codecs around transform coders on the GPU: streams, states and checks are the reference's, numbers go through kernels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import shape_of
from gpu.module import namespace, require_gpu
from gpu.resident import device, host
from gpu.transform_coding import entropy, fixed, stacked
from kvtheory.layer import Decoded
from reference import codec, stream
from reference.errors import CorruptStream
from reference.full import _token_major
from reference.kept import Kept
from reference.shape import Shape, _array, in_order
from reference.stream import Kind, Part, Reader
from reference.transform_coding.codec import LayerCoder, TransformCodec
from reference.transform_coding.entropy import EntropyCoder
from reference.transform_coding.fixed import FixedCoder
from reference.transform_coding.stacked import exact_tokens

__all__ = ["Transformed", "between", "coder_decode", "coder_encode", "exact_bytes"]


def coder_encode(coder: Any, x: Any) -> list[Part]:
    """The parts of stacked vectors x (n, entries). TypeError for a coder without kernels."""
    if isinstance(coder, EntropyCoder):
        return entropy.encode(coder, x)
    if isinstance(coder, FixedCoder):
        return fixed.encode(coder, x)
    raise TypeError(f"coder: expected an EntropyCoder or a FixedCoder, got {type(coder).__name__}")


def coder_decode(coder: Any, parts: list[Reader], tokens: int, width: int, xp: Any) -> Any:
    """Stacked vectors (tokens, width) in namespace `xp`. CorruptStream for parts that do not fit; TypeError for a coder without kernels."""
    if isinstance(coder, EntropyCoder):
        return entropy.decode(coder, parts, tokens, width, xp)
    if isinstance(coder, FixedCoder):
        return fixed.decode(coder, parts, tokens, width, xp)
    raise TypeError(f"coder: expected an EntropyCoder or a FixedCoder, got {type(coder).__name__}")


def exact_bytes(array: Any, first: int, last: int) -> bytes:
    """Tokens before `first` and from `last` on of array (heads, tokens, d), as streams have them."""
    return _token_major(np.concatenate([host(array[:, :first]), host(array[:, last:])], axis=1))


def between(exact: NDArray[Any], first: int, tokens: int, xp: Any) -> Any:
    """An array (heads, tokens, d) in namespace `xp` with the exact tokens at both ends, and room for the coded ones from `first` on."""
    heads, apart, dim = exact.shape
    out = xp.empty((heads, tokens, dim), exact.dtype)
    out[:, :first] = device(exact[:, :first], xp)
    out[:, tokens - (apart - first) :] = device(exact[:, first:], xp)
    return out


class Transformed(TransformCodec):
    """The reference's streams by kernels. Put it before the reference's class among the bases."""

    @classmethod
    def of(cls, fitted: TransformCodec) -> Self:
        """This codec with the parameters and the state of the reference's `fitted`."""
        return cls(**{one.name: getattr(fitted, one.name) for one in dataclasses.fields(fitted)})  # type: ignore[arg-type]

    def _coded(
        self, shape: Shape, keys: Any, values: Any, fitted: LayerCoder, positions: NDArray[np.int64]
    ) -> list[Part]:
        stacked.finite(keys, values, fitted.rope)
        first, last = exact_tokens(shape.tokens, self.sinks, self.window)
        x = stacked.stack(keys, values, fitted.rope, positions, first, last)
        exact = [exact_bytes(array, first, last) for array in (keys, values)]
        parts = coder_encode(fitted.coder, x)
        return [shape.write(), *exact, *parts, *[b""] * (len(self.coder_parts) - len(parts))]

    def _decoded(self, parts: list[Reader], kept: Kept | None) -> Decoded:
        shape, fitted, first, last, keys, values = self._arrays(parts, kept, np)
        return self._weighed(shape, fitted, first, last, keys, values)

    def _arrays(self, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, LayerCoder, int, int, Any, Any]:
        """Shape, what was fitted, first and last coded token, keys and values in namespace `xp`."""
        shape, fitted, first, last, keys, values = self._opened(parts, kept)
        x = coder_decode(fitted.coder, parts[3:], last - first, fitted.width, xp)
        positions = _array(shape.positions) if kept is None else kept.positions(shape.tokens)
        keys, values = (between(exact, first, shape.tokens, xp) for exact in (keys, values))
        stacked.unstack(x, keys, values, fitted.rope, positions, first)
        return shape, fitted, first, last, keys, values

    def encode_arrays(self, keys: Any, values: Any, index: int | None = None, positions: Any = None) -> bytes:
        """The stream of keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim), both NumPy or both CuPy, of any strides.

        index: number of the layer in its model, one that was fitted. positions (tokens,) in time order, on the host, default 0, 1, 2, ...
        ValueError, TypeError, StateMismatch as for a Layer and `encode`.
        """
        namespace(keys, values)
        shape = shape_of(keys, values, index)
        if positions is not None:
            at = np.asarray(positions, np.int64)
            if at.shape != (shape.tokens,):
                raise ValueError(f"positions: expected shape (tokens={shape.tokens},), got {at.shape}")
            shape = dataclasses.replace(shape, positions=in_order(at))
        named = next((one for one in self.layers if one.index == index), None)
        layer: Any = SimpleNamespace(
            index=index, kv_heads=shape.kv_heads, head_dim=shape.head_dim, value_dim=shape.value_dim, rope=named and named.rope
        )  # fmt: skip
        parts = self._coded(shape, keys, values, self._fitted(layer), _array(shape.positions))
        return stream.write(self._header(Kind.LAYER), [parts])

    def decode_arrays(self, data: bytes, xp: Any = None) -> tuple[Any, Any]:
        """Keys and values of a layer's stream, as arrays of namespace `xp`: numpy or cupy; default cupy. Errors as for `decode`.

        gpu.Unavailable without CuPy or a GPU where `xp` is not given.
        """
        xp = require_gpu() if xp is None else xp
        header, groups = codec._read(data)
        own: Any = self._like(header)
        if header.kind is not Kind.LAYER:
            raise CorruptStream(f"kind: expected LAYER, got {header.kind.name}", len(stream.MAGIC) + 1)
        *_, keys, values = own._arrays(own._named(groups[0]), None, xp)
        return keys, values
