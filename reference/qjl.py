"""QJL (Zandieh, Daliri, Han, arXiv 2406.03482): one bit a coordinate of a Gaussian sketch of each key. Nothing is fitted to data.

The paper, for a key k in R^d and S in R^{m x d} with independent standard normal entries (Definition 3.1, Lemma 3.2):

    stored: sign(S k), ||k||;     <q, k> ~ sqrt(pi/2)/m ||k|| <S q, sign(S k)>     unbiased for every q

that is <q, k_hat> with the vector k_hat = sqrt(pi/2)/m ||k|| S^T sign(S k), which `decode` gives. For a unit key the variance is
((pi/2) ||q||^2 - <q, k>^2) / m exactly, and so E ||k - k_hat||^2 = ((pi/2) d - 1)/m ||k||^2: more than ||k||^2 itself at m = d.

Here S holds integers (sketch.py: sigma times a normal, rounded), and no rounding of a float decides a bit:

    2^{e-1} <= max_i |k_i| < 2^e                       k in float32; e = 0 for k = 0
    n_i   = round_half_even(k_i 2^{a-e})               |n_i| <= 2^a with (row sum of |S|) 2^a <= 2^24
    bit j = [ (S n)_j < 0 ]                            exact in float32
    norm  = 2^{e-a} sqrt(sum_i n_i^2)                  rounded to 8 significant bits (vectors.py), 2 bytes

and back, exact up to the last two roundings, with q_j = -1 where bit j is set, else 1:

    k_hat_i = G (S^T q)_i,   G = sqrt(pi/2) / sigma / m * norm

Rounding the norm multiplies all estimates of a key by one number within 2^-8 of 1.
Values are quantised by token, one asymmetric min/max group a vector, with max(bits, 2) bits a number (minmax.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from reference import arguments, hadamard, memory, packing
from reference.codec import Appender, Codec
from reference.minmax import Groups, Stored
from reference.shape import Shape
from reference.sketch import PAIR, SIGMA, sketch
from reference.stream import Part, Reader
from reference.vectors import (
    Float32,
    Scratch,
    blocks,
    gained,
    integers,
    largest,
    magnitudes,
    norm_codes,
    norms,
    read_norms,
    refuse,
    take_block,
)

__all__ = ["QJL"]

MANTISSA_BITS = 7


@dataclass(frozen=True)
class QJL(Codec):
    """QJL with m = bits * head_dim signs a key, bits 1 to 8. Dimensions 1 to 1024, keys and values may differ.

    seed: of the sketch, 0 <= seed < 2^63; data drawn from the same seed get other random numbers. Values: max(bits, 2) bits each,
    between the minimum and the maximum of their vector.

    Numbers are taken in float32 and come back in the element type they came in, at most its largest number. `encode` raises
    ValueError for NaN, inf, and float64 numbers that float32 cannot hold, with head, token and channel.

    Held: bits + 16/d a number of a key; max(bits, 2) + 32/d a number of a value (48/d for float32 and float64, whose minima are
    float32), and a header. Parts, token-major, so that a growing stream grows at the ends of its parts:

        "shape"         reference.shape
        "key norms"     tokens x kv_heads norms, 2 bytes each
        "key signs"     tokens x kv_heads x m bits, packed densely
        "value zeros"   tokens x kv_heads minima, float16, bfloat16 (that of the values) or else float32
        "value scales"  tokens x kv_heads, 2 bytes each (minmax.py)
        "value codes"   tokens x kv_heads x value_dim codes, packed densely

    Pitfalls: the estimate is unbiased and noisy, its error does not shrink with the angle between query and key, and exp of a noisy
    logit is biased upwards: for attention TurboQuant at equal bits is better. The authors' program sketches channels of large
    numbers apart and makes the rows of S orthogonal; the paper's statement, and this codec, do neither.
    """

    bits: int = 1
    seed: int = 0

    streaming = True
    part_names = ("shape", "key norms", "key signs", "value zeros", "value scales", "value codes")

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, 1, 8)
        arguments.seed(self.seed)

    @property
    def value_bits(self) -> int:
        """Bits of a value's code."""
        return max(self.bits, 2)

    def encode_parts(self, data: Layer) -> list[Part]:
        return self.start(data).parts()

    def start(self, layer: Layer) -> Appender:
        for name, dim in (("keys", layer.head_dim), ("values", layer.value_dim)):
            if dim > hadamard.LARGEST:
                raise ValueError(f"{name}: QJL takes up to {hadamard.LARGEST} channels, got {dim}")
        appender = _QJLAppender(self, Shape.of(layer))
        appender.take(layer.keys, layer.values)
        return appender

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape, groups = self._read_coded(parts)
        heads = shape.kv_heads
        keys = memory.empty((heads, shape.tokens, shape.head_dim), shape.key_dtype)
        values = memory.empty((heads, shape.tokens, shape.value_dim), shape.value_dtype)
        stored = read_norms(parts[1], shape.rows, MANTISSA_BITS, "key norms")
        zeros, scales, rows = Stored.read(groups, shape.rows, parts[3:], "value")
        if shape.rows:  # no sketch is made for nothing: a header alone could ask for a large one
            plan = _Plan(self, shape.head_dim)
            bits = plan.read(parts[2], shape.rows)
            key_limit, value_limit = largest(shape.key_dtype), largest(shape.value_dtype)
            for block in blocks(shape.tokens, heads):
                own = slice(block.start * heads, block.stop * heads)
                plan.decode(bits[own], stored[own], key_limit, keys[:, block].transpose(1, 0, 2))
            groups.decode_tokens(zeros, scales, rows, value_limit, values)
        return shape.decoded(keys, values, checked=True)

    def _read_coded(self, parts: list[Reader]) -> tuple[Shape, Groups]:
        """The shape, and the groups of its values; CorruptStream unless the other parts have their sizes. Nothing is allocated."""
        shape = Shape.read(parts[0])
        for side, dim in (("keys", shape.head_dim), ("values", shape.value_dim)):
            if dim > hadamard.LARGEST:
                parts[0].fail(f"{side}: expected at most {hadamard.LARGEST} channels, got {dim}")
        signs = packing.packed_size(shape.rows * self.bits * shape.head_dim, 1)
        for reader, size, what in zip(parts[1:3], (2 * shape.rows, signs), ("norms", "signs"), strict=True):
            if reader.remaining != size:
                reader.fail(f"key {what}: expected {size} bytes, got {reader.remaining}")
        groups = Groups(shape.value_dim, shape.value_dim, self.value_bits, shape.value_dtype)
        Stored.check(groups, shape.rows, parts[3:], "value")
        return shape, groups

    def decode_flops(self, stream: bytes) -> int:
        """Per key 2 m d for S^T q and d for the gain; 2 for each value: c s, and + z."""
        from reference.inspection import inspect

        total = 0
        for shape in inspect(stream).shapes:
            dim = shape.head_dim
            total += shape.rows * (2 * self.bits * dim * dim + dim + 2 * shape.value_dim)
        return total


class _Plan:
    """The sketch of keys of one dimension, and the signs of a block of them."""

    def __init__(self, codec: QJL, dim: int) -> None:
        self.dim, self.signs = dim, codec.bits * dim
        self._sketch = sketch(codec.seed, "reference.QJL key sketch", self.signs, dim)
        #: the signs of a key fill whole bytes
        self.bytewise = self.signs % 8 == 0
        self._scratch = Scratch()

    def encode(self, x: Float32) -> tuple[bytes, NDArray[np.uint8]]:
        """Rows x (n, d) -> norms as bytes, and signs: packed (n, m / 8) where they fill whole bytes, else (n, m) of 0 and 1."""
        magnitude = self._scratch("n", x.shape, np.float32)
        most = magnitudes(x, magnitude)
        n, exponent = integers(x, most, self._sketch.bits, axis=1, out=magnitude)
        wide = self._scratch("wide", n.shape, np.float64)
        np.copyto(wide, n)
        squares = np.vecdot(wide, wide)  # integers below 2^53, exact
        stored = norm_codes(squares, exponent - self._sketch.bits, MANTISSA_BITS)
        rows = np.matmul(n, self._sketch.matrix.T, out=self._scratch("signs", (len(n), self.signs), np.float32))
        bits: NDArray[Any] = np.less(rows, 0, out=self._scratch("bits", rows.shape, np.bool_))
        if self.bytewise:
            bits = np.packbits(bits.reshape(-1), bitorder="little")
        return stored.astype("<u2").tobytes(), bits.reshape(len(n), -1).astype(np.uint8)

    def read(self, reader: Reader, rows: int) -> NDArray[np.uint8]:
        """(rows, m / 8) packed signs, or (rows, m) of 0 and 1."""
        if self.bytewise:
            return reader.array(np.uint8, reader.remaining, "key signs").reshape(rows, self.signs // 8)
        return packing.unpack(reader, rows * self.signs, 1).reshape(rows, self.signs)

    def decode(self, signs: NDArray[np.uint8], stored: NDArray[np.int64], limit: float, out: NDArray[Any]) -> None:
        """Signs as `read` gives them and norm codes (n,) -> out (n / h, h, d)."""
        ones = self._scratch("signs", (len(signs), self.signs), np.float32)
        half = -(-len(signs) // 2)
        for own, one in ((slice(half), 1.0), (slice(half, None), float(PAIR))):
            if self.bytewise:
                packing.look_up(signs[own], (one, -one), ones[own])
            else:
                np.multiply(signs[own], np.float32(-2 * one), out=ones[own])
                ones[own] += np.float32(one)
        rows = self._sketch.back(ones, self._scratch("rows", (len(signs), self.dim), np.float32), self._scratch)
        gain = np.sqrt(np.pi / 2) / SIGMA / self.signs * norms(stored, MANTISSA_BITS)
        # |S^T q| <= 128 m <= 2^20
        gained(rows, gain, 128.0 * self.signs, limit, out, signed_zeros=not self._sketch.full)


class _QJLAppender(Appender):
    def __init__(self, codec: QJL, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._plan = _Plan(codec, shape.head_dim)
        self._norms: list[bytes] = []
        self._signs = packing.Packer(1)
        self._values = Stored(Groups(shape.value_dim, shape.value_dim, codec.value_bits, shape.value_dtype))

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        scratch = Scratch()
        key_pieces: list[tuple[bytes, NDArray[np.uint8]]] = []
        for block in blocks(keys.shape[1], len(keys)):
            try:
                key_pieces.append(self._plan.encode(take_block(keys, block, scratch)))
            except FloatingPointError:
                refuse("keys", keys, "QJL")
                raise
        try:
            value_piece = self._values.groups.encode(values.transpose(1, 0, 2))
        except FloatingPointError:
            refuse("values", values, "QJL")
            raise
        for norm_bytes, signs in key_pieces:
            self._norms.append(norm_bytes)
            if self._plan.bytewise:
                self._signs.append_packed(signs.tobytes())
            else:
                self._signs.append(signs)
        self._values.keep(value_piece)

    def parts(self) -> list[Part]:
        return [self.shape.write(), b"".join(self._norms), self._signs.bytes(), *self._values.parts()]
