"""QJL by kernels, the bytes of `reference.QJL`: kernels/qjl.cu. Sketches are products of integers, exact in any order."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import ArrayCodec, little
from gpu.casts import cast
from gpu.module import Source, launch, namespace
from gpu.packing import Bits, read_words
from gpu.resident import device, kept
from gpu.vectors import (
    THREADS,
    Vectors,
    blank,
    instances,
    product_grid,
    refusals,
    stored_norms,
    within,
)
from kvtheory.layer import Layer
from reference import qjl as numpy_qjl
from reference.codec import Appender
from reference.minmax import read_scales, read_zeros, zero_dtype
from reference.qjl import MANTISSA_BITS
from reference.shape import Shape
from reference.sketch import SIGMA, sketch
from reference.stream import Part, Reader
from reference.vectors import largest, read_norms

__all__ = ["QJL"]

_SOURCE = Source(
    "qjl.cu",
    [*instances("rounded"), "signs", *instances("decode", "encode_values", "decode_values", by_registers=False)],
)


class _Keys:
    """The sketch of keys of one dimension, and what its kernels are given."""

    def __init__(self, seed: int, bits: int, dim: int) -> None:
        self.dim, self.count = dim, bits * dim
        self.sketch = sketch(seed, "reference.QJL key sketch", self.count, dim)

    def encode(self, array: Any, phase: int) -> tuple[bytes, bytes]:
        """Norms of array (heads, tokens, d), and signs from bit `phase` on, token by token. ValueError: not finite."""
        xp, vectors = namespace(array), Vectors.of(array)
        if not vectors.rows:
            return b"", b""
        norms, refused = xp.empty(vectors.rows, np.uint16), blank(1, xp)
        n = xp.empty((vectors.rows, self.dim), np.int16)
        args = (*vectors.source, np.int32(self.sketch.bits), norms, n, refused)
        launch(_SOURCE[vectors.instance("rounded")], vectors.grid, THREADS, args)
        refusals(refused, "keys", array, "QJL")
        signs = blank(-(-(phase + vectors.rows * self.count) // 32), xp)
        matrix = kept(self, "transposed", xp, lambda: self.sketch.matrix.T.astype(np.int8))
        sizes = (np.int64(vectors.rows), np.int32(self.dim), np.int32(self.count))
        launch(
            _SOURCE["signs"],
            product_grid(vectors.rows, self.count),
            THREADS,
            (n, matrix, *sizes, np.uint32(phase), signs),
        )
        return little(norms), little(signs)

    def decode(
        self, shape: Shape, dtype: np.dtype[Any], norms: NDArray[np.uint16], signs: NDArray[np.uint32], xp: Any
    ) -> Any:
        out = Vectors.empty((shape.kv_heads, shape.tokens, self.dim), dtype, xp, by_registers=False)
        matrix = kept(self, "sketch", xp, lambda: self.sketch.matrix.astype(np.int8))
        factor = np.float64(np.sqrt(np.pi / 2) / SIGMA / self.count)
        limit = np.float32(largest(dtype))
        given = (device(norms, xp), device(signs, xp), matrix)
        args = (*given, *out.sizes, np.int32(self.count), factor, limit, *out.target)
        launch(_SOURCE[f"decode<{out.element}>"], product_grid(out.rows, self.dim), THREADS, args)
        return cast(out.memory, dtype)


@functools.lru_cache(maxsize=16)
def _keys(seed: int, bits: int, dim: int) -> _Keys:
    return _Keys(seed, bits, dim)


def _encode_values(array: Any, bits: int, phase: int) -> tuple[bytes, bytes, bytes]:
    """Minima, scales, and codes from bit `phase` on, of array (heads, tokens, d). ValueError: not finite."""
    xp, vectors = namespace(array), Vectors.of(array, by_registers=False)
    if not vectors.rows:
        return b"", b"", b""
    zeros, scales = xp.empty(vectors.rows, vectors.memory.dtype), xp.empty(vectors.rows, np.uint16)
    codes, refused = blank(-(-(phase + vectors.rows * vectors.dim * bits) // 32), xp), blank(1, xp)
    args = (*vectors.source, np.int32(bits), np.uint32(phase), zeros, scales, codes, refused)
    launch(_SOURCE[f"encode_values<{vectors.element}>"], vectors.grid, THREADS, args)
    refusals(refused, "values", array, "QJL")
    return little(zeros), little(scales), little(codes)


def _decode_values(
    shape: Shape, zeros: NDArray[Any], scales: NDArray[np.uint16], codes: NDArray[np.uint32], bits: int, xp: Any
) -> Any:
    dtype = shape.value_dtype
    out = Vectors.empty((shape.kv_heads, shape.tokens, shape.value_dim), dtype, xp, by_registers=False)
    given = (device(a, xp) for a in (zeros, scales, codes))
    args = (*given, *out.sizes, np.int32(bits), np.float32(largest(dtype)), *out.target)
    launch(_SOURCE[f"decode_values<{out.element}>"], out.grid, THREADS, args)
    return cast(out.memory, dtype)


class QJL(ArrayCodec, numpy_qjl.QJL):
    __doc__ = numpy_qjl.QJL.__doc__

    def start(self, layer: Layer) -> Appender:
        shape = Shape.of(layer)
        within(shape, "QJL")
        appender = _Appender(self, shape)
        appender.take(layer.keys, layer.values)
        return appender

    def _encoded(self, shape: Shape, keys: Any, values: Any) -> list[Part]:
        within(shape, "QJL")
        appender = _Appender(self, shape)
        appender.take(keys, values)
        return appender.parts()

    def _decoded(self, parts: list[Reader], xp: Any) -> tuple[Shape, Any, Any]:
        shape, _ = self._read_coded(parts)
        rows, dims = shape.rows, (shape.head_dim, shape.value_dim)
        stored = read_norms(parts[1], rows, MANTISSA_BITS, "key norms")
        zeros = read_zeros(parts[3], rows, shape.value_dtype, "value zeros")
        scales = read_scales(parts[4], rows, "value scales")
        signs = read_words(parts[2], rows * self.bits * dims[0], 1)
        codes = read_words(parts[5], rows * dims[1], self.value_bits)
        if not rows:  # no sketch is made for nothing: a header alone could ask for a large one
            empty = (xp.empty((shape.kv_heads, 0, d), t) for d, t in zip(dims, (shape.key_dtype, shape.value_dtype)))
            return shape, *empty
        plan = _keys(self.seed, self.bits, shape.head_dim)
        keys = plan.decode(shape, shape.key_dtype, stored_norms(stored, MANTISSA_BITS), signs, xp)
        native = zeros.astype(zero_dtype(shape.value_dtype))
        return shape, keys, _decode_values(shape, native, scales, codes, self.value_bits, xp)


class _Appender(Appender):
    def __init__(self, codec: QJL, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._keys, self._value_bits = _keys(codec.seed, codec.bits, shape.head_dim), codec.value_bits
        self._held: tuple[list[bytes], ...] = ([], [], [])  # norms, zeros, scales
        self._signs, self._codes = Bits(), Bits()

    def take(self, keys: Any, values: Any) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        norms, signs = self._keys.encode(keys, self._signs.phase)
        zeros, scales, codes = _encode_values(values, self._value_bits, self._codes.phase)
        for held, more in zip(self._held, (norms, zeros, scales)):
            held.append(more)
        heads, tokens, _ = keys.shape
        self._signs.append(signs, heads * tokens * self._keys.count)
        self._codes.append(codes, values.size * self._value_bits)

    def parts(self) -> list[Part]:
        norms, zeros, scales = (b"".join(held) for held in self._held)
        return [self.shape.write(), norms, self._signs.bytes(), zeros, scales, self._codes.bytes()]
