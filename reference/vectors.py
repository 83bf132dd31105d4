"""Blocks of vectors in binary32: how codecs that compute in it take keys and values in, and give them back.

Norms that a codec stores, 2 bytes at 7 bits mu or 4 bytes at 23: code 0 is the norm 0, any other E 2^mu + F the norm
(1 + F / 2^mu) 2^(E - 256), so that every vector of float32 numbers has one, whatever its scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from reference.stream import Reader

__all__ = [
    "Float32",
    "Float64",
    "Scratch",
    "blocks",
    "gained",
    "integers",
    "largest",
    "magnitudes",
    "norm_codes",
    "norms",
    "read_norms",
    "refuse",
    "take_block",
]

#: vectors taken at once: a block of float32 coordinates stays in the cache
BLOCK = 1024
#: exponent of a stored norm is biased by this; 0 stands for the norm 0
BIAS = 256
#: no float32 vector of at most 1024 coordinates has a norm of 2^134
LARGEST_EXPONENT = 134

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Scratch:
    """Arrays that one block after another is worked out in: memory of this size, asked for anew, would come back unmapped."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array for `name`, its contents arbitrary; valid until the next call for that name."""
        count = math.prod(shape)
        held = self._buffers.get(name)
        if held is None or held.size < count or held.dtype != dtype:
            held = self._buffers[name] = np.empty(count, dtype)
        return held[:count].reshape(shape)


def blocks(tokens: int, heads: int) -> Iterator[slice]:
    """Slices of tokens of about BLOCK vectors."""
    step = max(1, BLOCK // heads)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def take_block(array: NDArray[Any], block: slice, scratch: Scratch) -> Float32:
    """array (heads, tokens, d) -> the vectors of a block of tokens, token-major, (n, d) in float32; inf what it cannot hold."""
    heads, _, dim = array.shape
    size = block.stop - block.start
    x = scratch("x", (size, heads, dim), np.float32)
    with np.errstate(over="ignore"):
        np.copyto(x, array[:, block].transpose(1, 0, 2), casting="same_kind")
    return x.reshape(size * heads, dim)


def refuse(name: str, array: NDArray[Any], codec: str) -> None:
    """ValueError naming head, token and channel of the first NaN, inf, or number that float32 cannot hold."""
    checks.finite(name, array, ("head", "token", "channel"))
    if array.dtype.itemsize < 8:
        return
    with np.errstate(over="ignore"):
        beyond = np.isinf(array.astype(np.float32))
    if beyond.any():
        where = np.unravel_index(int(np.argmax(beyond)), array.shape)
        head, token, channel = (int(i) for i in where)
        raise ValueError(
            f"{name}: expected numbers that float32 can hold, in which {codec} computes, got {float(array[where])} "
            f"at (head {head}, token {token}, channel {channel})"
        )


def magnitudes(x: Float32, out: Float32) -> Float32:
    """Rows x (n, d >= 1) -> |x| in `out` (contiguous), and the largest of each row (n,). FloatingPointError: x is not finite."""
    np.abs(x, out=out)
    # floats without sign are in the order of their bits, inf and NaN above all; integers reduce several times as fast by row
    most = np.maximum.reduceat(out.view(np.int32).reshape(-1), np.arange(0, out.size, out.shape[1])).view(np.float32)
    if not np.isfinite(most).all():
        raise FloatingPointError
    return most


def integers(
    x: NDArray[Any], most: NDArray[Any], bits: int, axis: int, out: NDArray[Any] | None = None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """round_half_even(x 2^{bits - e}), |.| <= 2^bits, with 2^{e-1} <= most < 2^e along `axis`; and e. Exact but for that rounding."""
    exponent = np.frexp(most)[1].astype(np.int64)
    shift = bits - exponent
    one = x.dtype.type(1)
    n = np.multiply(x, np.expand_dims(np.ldexp(one, np.minimum(shift, 127)), axis), out=out)
    if (shift > 127).any():  # subnormal vectors: 2^shift itself is no float32
        n *= np.expand_dims(np.ldexp(one, np.maximum(shift - 127, 0)), axis)
    return np.rint(n, out=n), exponent


def norm_codes(squares: Float64, exponents: NDArray[np.int64], mantissa_bits: int) -> NDArray[np.int64]:
    """The stored form of 2^exponents sqrt(squares), squares integers >= 0 below 2^53: biased exponent and fraction, 0 for 0.

    (1 + fraction / 2^mu) 2^(biased - 256) is sqrt, itself rounded to float64 as IEEE 754 has it, rounded half up to mu + 1 bits.
    """
    words = np.sqrt(squares).view(
        np.int64
    )  # exponent and fraction, of which mu bits are kept; the carry goes where it belongs
    codes = (words + (1 << 51 - mantissa_bits)) >> 52 - mantissa_bits
    codes += (exponents + (BIAS - 1023)) << mantissa_bits
    return np.where(squares > 0, codes, 0)


def norms(codes: NDArray[np.int64], mantissa_bits: int) -> Float64:
    """The norms that `norm_codes` stored, exact in float64."""
    words = (codes + ((1023 - BIAS) << mantissa_bits)) << 52 - mantissa_bits
    return np.where(codes > 0, words.view(np.float64), 0.0)


def read_norms(reader: Reader, count: int, mantissa_bits: int, what: str) -> NDArray[np.int64]:
    """`count` norm codes, 2 bytes each for 7 bits and 4 for 23. CorruptStream at one that no float32 vector has."""
    start = reader.offset
    dtype = np.dtype("<u2" if mantissa_bits <= 7 else "<u4")
    stored = reader.array(dtype, count, what).astype(np.int64)
    exponent = stored >> mantissa_bits
    wrong = (exponent >= LARGEST_EXPONENT + BIAS) | ((exponent == 0) & (stored != 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        reader.fail(f"{what}: {stored[at]:#x} is no norm of float32 numbers", start + at * dtype.itemsize)
    return stored


def gained(
    rows: Float32, gain: Float64, most: float, limit: float, out: NDArray[Any], signed_zeros: bool = True
) -> None:
    """Integers rows (n, d), |.| <= most <= 2^24, times gain (n,) >= 0 -> out (n / h, h, d), of magnitude <= limit. rows are overwritten.

    gain is rounded to 24 bits, as float32 has them, whatever its exponent; the product is rounded once to float32 (then to the
    element type of `out`). A zero is +0, however its sum was ordered; signed_zeros: whether rows may hold -0.
    """
    # with room for rounding; then float32 rounds to 24 bits, and only a zero to zero
    normal = float(gain.max(initial=0.0)) * most <= limit / 2 and float(gain.min(initial=np.inf)) >= 2.0**-126
    if normal and out.dtype == np.float32:
        if signed_zeros:
            rows += np.float32(0)
        np.multiply(rows.reshape(out.shape), gain.astype(np.float32).reshape(*out.shape[:2], 1), out=out)
        return
    f, k = np.frexp(gain)
    gain = np.ldexp(np.rint(f * 2.0**24), k - 24)
    with np.errstate(over="ignore"):
        # a gain may be no normal float32, but its product with an integer below 2^24 is exact in float64
        rows = (rows * gain[:, None]).astype(np.float32)
    rows = np.clip(rows, -limit, limit)
    rows += np.float32(0)
    out[...] = rows.reshape(out.shape)


def largest(dtype: np.dtype[Any]) -> float:
    """The largest number of an element type that float32 can hold."""
    if dtype == np.float64:
        return float(np.finfo(np.float32).max)
    if dtype.name == "bfloat16":
        import ml_dtypes

        return float(ml_dtypes.finfo(dtype).max)
    return float(np.finfo(dtype).max)
