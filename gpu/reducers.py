"""SnapKV, ScissorHands, StreamingLLM and MergeReduce with the tokens themselves on the GPU.

Which tokens are left, and with which weights, the reference decides on the host: its softmax, eigenvectors and least squares are float64
through libm and LAPACK, whose last bits no kernel could match. Kernels then gather what is left, and StreamingLLM's turn the sinks
(gpu/tokens.py), with the same bits; so streams are the reference's. Log-weights go along: `reduce_arrays` gives what attention needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu.module import namespace, require_gpu
from gpu.resident import device, host
from gpu.tokens import gather, turn_first
from kvtheory.layer import Decoded, Layer
from reference import merge_reduce, reducer, scissorhands, snapkv, stream, streaming_llm
from reference.shape import Shape
from reference.stream import Kind

__all__ = ["Left", "MergeReduce", "ScissorHands", "SnapKV", "StreamingLLM"]

Index = NDArray[np.int64]


class Left(NamedTuple):
    """What is left of a layer, as `kvtheory.Decoded`, whose fields these are, but in NumPy or CuPy arrays."""

    keys: Any
    values: Any
    log_weights: Any
    positions: Any
    kept: Any


class _OnDevice(reducer.Reducer):
    """A reducer whose numbers are moved by kernels. Put it before the reference's class among the bases."""

    def _left(self, layer: Layer, keys: Any, values: Any) -> Left:
        """What is left of `layer`, whose keys and values are `keys` and `values`, in their namespace."""
        raise NotImplementedError

    def reduce(self, layer: Layer) -> Decoded:
        return Decoded(*self._left(layer, layer.keys, layer.values))

    def reduce_arrays(self, keys: Any, values: Any, **fields: Any) -> Left:
        """What is left of keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim), both NumPy or both CuPy.

        fields: the others of a Layer, on the host: queries, query_positions, positions, rope, scale, ... Errors as for `Layer` and `reduce`.
        """
        layer = self._require(Layer(host(keys), host(values), **fields))
        return self._left(layer, keys, values)

    def encode_arrays(self, keys: Any, values: Any, index: int | None = None, **fields: Any) -> bytes:
        """The stream of what is left of arrays, as `reduce_arrays` takes them. index: number of the layer in its model."""
        layer = self._require(Layer(host(keys), host(values), index=index, **fields))
        shape = Shape.of(layer)
        reducer.check_finite(layer)
        left = self._left(layer, keys, values)
        parts = reducer.parts_of(shape, Decoded(*(host(one) for one in left)))
        return stream.write(self._header(Kind.LAYER), [parts])

    def decode_arrays(self, data: bytes, xp: Any = None) -> Left:
        """What a layer's stream holds, as arrays of namespace `xp`: numpy or cupy; default cupy. Errors as for `decode`.

        gpu.Unavailable without CuPy or a GPU where `xp` is not given.
        """
        xp = require_gpu() if xp is None else xp
        decoded = self.decode(data)
        fields = (decoded.keys, decoded.values, decoded.log_weights, decoded.positions, decoded.kept)
        return Left(*(device(one, xp) for one in fields))


class _Selecting(_OnDevice, reducer.Selector):
    """Of the tokens that the reference's `places` leaves, of weight 1."""

    def _left(self, layer: Layer, keys: Any, values: Any) -> Left:
        index = self.places(layer)
        return _with_weights(layer, index, gather(keys, index), gather(values, index), None)


def _with_weights(layer: Layer, index: list[Index], keys: Any, values: Any, log_weights: Any) -> Left:
    """Gathered keys and values with log-weights (default 0), positions and numbers of tokens, in their namespace."""
    kept = np.array([len(own) for own in index], np.int64)
    padding = np.arange(keys.shape[1]) >= kept[:, None]
    positions = np.full(padding.shape, -1, np.int64)
    for h, own in enumerate(index):
        positions[h, : len(own)] = layer.positions[own]
    weights = np.where(padding, -np.inf, 0.0) if log_weights is None else log_weights
    xp = namespace(keys)
    return Left(keys, values, *(device(one, xp) for one in (weights, positions, kept)))


class SnapKV(_Selecting, snapkv.SnapKV):
    """`reference.SnapKV`: scores on the host, tokens gathered by a kernel. Same constructor, same streams."""


class ScissorHands(_Selecting, scissorhands.ScissorHands):
    """`reference.ScissorHands`: counts on the host, tokens gathered by a kernel. Same constructor, same streams."""


class StreamingLLM(_Selecting, streaming_llm.StreamingLLM):
    """`reference.StreamingLLM`: tokens gathered and sinks turned by kernels. Same constructor, same streams."""

    def _left(self, layer: Layer, keys: Any, values: Any) -> Left:
        left = super()._left(layer, keys, values)
        first, last = self._places(layer.tokens)
        if layer.rope is not None and first + last < layer.tokens:
            own = host(left.positions)[0, : first + last]
            by = self._steps(own, first, int(layer.positions[-1]), layer.rope)
            if by is not None:
                turn_first(left.keys, by, layer.rope, streaming_llm._most(layer.keys.dtype))
        return left


class MergeReduce(_OnDevice, merge_reduce.MergeReduce):
    """`reference.MergeReduce`: atoms and weights on the host, tokens gathered by a kernel; values that "refit-values" fits are sent along."""

    def _left(self, layer: Layer, keys: Any, values: Any) -> Left:
        decoded = merge_reduce.MergeReduce.reduce(self, layer)
        fitted = self.reducer == "refit-values"
        index = _tokens_of(decoded, layer, fitted)
        xp = namespace(keys, values)
        own = device(decoded.values, xp) if fitted else gather(values, index)
        return _with_weights(layer, index, gather(keys, index), own, decoded.log_weights)


def _tokens_of(decoded: Decoded, layer: Layer, fitted: bool) -> list[Index]:
    """Which tokens of the layer the kept ones are. Of tokens at one position the first that has the same numbers.

    fitted: the values are not the layer's.
    """
    out = []
    for h, count in enumerate(decoded.kept):
        own = decoded.positions[h, :count]
        first, end = (np.searchsorted(layer.positions, own, side) for side in ("left", "right"))
        index = np.array(first, np.int64)
        for j in np.flatnonzero(end - first > 1):
            start = int(index[j - 1]) + 1 if j and own[j] == own[j - 1] else int(first[j])
            index[j] = next(
                i
                for i in range(start, int(end[j]))
                if _alike(layer.keys[h, i], decoded.keys[h, j])
                and (fitted or _alike(layer.values[h, i], decoded.values[h, j]))
            )
        out.append(index)
    return out


def _alike(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.astype(other.dtype).tobytes() == other.tobytes()
