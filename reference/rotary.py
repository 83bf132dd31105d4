"""RoPE taken off and put on again with the same bits on every machine: codecs that quantise keys before it depend on them.

`numpy.cos` is good to the last bit or two, not the same in it everywhere. Here an angle is a fraction of a turn in 64-bit integers,

    F_j = round(inv_freq_j 2^64 / (2 pi)) mod 2^64,     u = position F_j mod 2^64                    exact, whatever the position
    q = round(u / 2^62) mod 4,     x = (u - q 2^62) as a signed number, times 2 pi / 2^64            |x| <= pi/4

and cos x, sin x are Taylor polynomials of degree 16 and 17 by Horner's rule in float64, where +, -, * round as IEEE 754 says; q turns
them by quarters. The angle is within position 2^-65 turns of position inv_freq, for positions below 2^40 within 2^-25 turns of it: nearer
than a product in float64. A processor that fuses a * b + c must not do so here.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Rope
from reference.stream import Reader, varint

__all__ = ["Rotary", "read_rope", "write_rope"]

#: floor(2^256 / (2 pi) + 1/2)
INVERSE_TURN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E4107F9458EAF7AEF158
#: frequencies and scalings outside are refused, so that nothing overflows
MOST_FREQUENCY, MOST_SCALING = 2.0**32, 2.0**32
#: more pairs than a vector of the format's largest dimension has
MOST_PAIRS = 1 << 19
UNIT = 2 * np.pi * 2.0**-64

Float64 = NDArray[np.float64]


def _turns(inv_freq: float) -> int:
    """F of one frequency: a float64 is m 2^e, and the product with 1/(2 pi) is rounded once, half up."""
    m, e = math.frexp(inv_freq)
    product, shift = int(m * 2.0**53) * INVERSE_TURN, 256 - 64 + 53 - e
    return ((product + (1 << (shift - 1))) >> shift) % (1 << 64)


def _polynomial(square: Float64, odd: bool) -> Float64:
    """sum_k (-1)^k s^k / (2k + odd)!, k = 0 ... 8."""
    total = np.full_like(square, 1.0 / math.factorial(16 + odd))
    for k in range(7, -1, -1):
        total = (-1.0) ** k / math.factorial(2 * k + odd) + square * total
    return total


class Rotary:
    """The rotation of a Rope, for keys (..., d) at positions (...), 0 <= position < 2^62. ValueError for extreme frequencies or scalings."""

    def __init__(self, rope: Rope) -> None:
        if not (np.abs(rope.inv_freq) <= MOST_FREQUENCY).all():
            raise ValueError(f"rope: expected frequencies of at most 2^32, got {np.abs(rope.inv_freq).max():g}")
        if not 1 / MOST_SCALING <= rope.attention_scaling <= MOST_SCALING:
            raise ValueError(f"rope: expected attention_scaling from 2^-32 to 2^32, got {rope.attention_scaling:g}")
        r = rope.rotated
        self.scaling = rope.attention_scaling
        self.first: slice
        self.second: slice
        self.first, self.second = (
            (slice(0, r // 2), slice(r // 2, r)) if rope.layout == "half" else (slice(0, r, 2), slice(1, r, 2))
        )
        self.turns = np.array([_turns(f) for f in rope.inv_freq.tolist()], np.uint64)

    def tables(self, positions: NDArray[np.int64]) -> tuple[Float64, Float64]:
        """cos and sin, (..., r/2), of the angles at positions (...)."""
        angle = positions[..., None].astype(np.uint64) * self.turns  # modulo 2^64, as unsigned products are
        quarter = (angle + np.uint64(1 << 61)) >> np.uint64(62)
        x = (angle - (quarter << np.uint64(62))).view(np.int64).astype(np.float64) * UNIT
        square = x * x
        cos, sin = _polynomial(square, False), x * _polynomial(square, True)
        cos, sin = np.where(quarter & np.uint64(1), -sin, cos), np.where(quarter & np.uint64(1), cos, sin)
        sign = 1.0 - 2.0 * (quarter >> np.uint64(1)).astype(np.float64)
        return sign * cos, sign * sin

    def apply(self, x: NDArray[Any], positions: NDArray[np.int64]) -> Float64:
        """s R_p x in float64; positions broadcast against x (..., d) without its last axis."""
        cos, sin = self.tables(positions)
        out = x.astype(np.float64)
        a, b = out[..., self.first].copy(), out[..., self.second].copy()
        out[..., self.first] = (a * cos - b * sin) * self.scaling
        out[..., self.second] = (b * cos + a * sin) * self.scaling
        return out

    def undo(self, x: NDArray[Any], positions: NDArray[np.int64]) -> Float64:
        """R_p^T x / s in float64."""
        cos, sin = self.tables(positions)
        out = x.astype(np.float64)
        a, b = out[..., self.first].copy(), out[..., self.second].copy()
        out[..., self.first] = (a * cos + b * sin) / self.scaling
        out[..., self.second] = (b * cos - a * sin) / self.scaling
        return out


@functools.lru_cache(maxsize=64)
def rotary(rope: Rope) -> Rotary:
    """`Rotary(rope)`, kept: the layers of a model share one."""
    return Rotary(rope)


def write_rope(rope: Rope) -> bytes:
    """Layout (u8, 0 half, 1 interleaved), attention_scaling (binary64), varint pairs, their frequencies (binary64)."""
    layout = bytes([rope.layout == "interleaved"])
    return (
        layout
        + struct.pack("<d", rope.attention_scaling)
        + varint(rope.inv_freq.size)
        + rope.inv_freq.astype("<f8").tobytes()
    )


def read_rope(reader: Reader, dim: int) -> Rope:
    """A Rope of keys with `dim` channels; CorruptStream for one that `Rotary` or `Rope` would refuse."""
    start = reader.offset
    layout = reader.u8("layout of the rope")
    if layout > 1:
        reader.fail(f"layout of the rope: expected 0 or 1, got {layout}", start)
    (scaling,) = struct.unpack("<d", reader.take(8, "scaling of the rope"))
    pairs = reader.varint("pairs of the rope", most=min(MOST_PAIRS, dim // 2))
    inv_freq = reader.array("<f8", pairs, "frequencies of the rope").astype(np.float64)
    if not np.isfinite(inv_freq).all():
        reader.fail("frequencies of the rope: expected finite numbers", start)
    try:
        rope = Rope(inv_freq, "interleaved" if layout else "half", scaling)
        rotary(rope)
    except ValueError as problem:
        reader.fail(str(problem), start)
    return rope
