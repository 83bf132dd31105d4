"""The Gaussian sketch of QJL (Zandieh et al. 2024) in integers: signs of S r keep the direction of r without bias.

For S with independent standard normal entries and m rows, and any y:

    E [ sqrt(pi/2) / m ||r|| <S y, sign(S r)> ] = <y, r>,     variance ((pi/2) ||r||^2 ||y||^2 - <y, r>^2) / m

Here S holds integers: a normal times 16, rounded, from one raw 32-bit Philox word each, by inversion:

    S_ij = #{k in -128 ... 127 : word >= round(2^32 Phi((k + 1/2) / 16))} - 128

so that S r is exact in float32 for integer r with (row sum of |S|) max |r| <= 2^24, and sign(S r) the same on every machine. Rounding
adds 1/12 to the variance 256 of an entry; entries beyond 8 standard deviations are cut (their probability is below 2^-32).

S^T q of signs q holds small integers, in float32, two of which fit into one number: of two vectors p and q

    S^T (p + 2^12 q) = A + 2^12 B,     |A| < 2^11, |B| < 2^11:    B = rint((A + 2^12 B) / 2^12)

is exact, and costs half the multiplications. Where the column sums of |S| are larger, S is taken some rows at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvtheory import randomness
from reference.vectors import Scratch

__all__ = ["SIGMA", "Sketch", "sketch"]

#: standard deviation of an entry
SIGMA = float(np.sqrt(16.0**2 + 1 / 12))
#: the second of two integers in one float32 is in units of this
PAIR = 1 << 12
#: float32 numbers around this are multiples of PAIR
ROUNDER = np.float32(1.5 * 2**23 * PAIR)
#: entries made at once: no large arrays beside the matrix and its raw words
_STEP = 1 << 16


@dataclass(frozen=True, eq=False)
class Sketch:
    """matrix: S (rows, dim), integers in float32. bits: S r is exact for integers |r| <= 2^bits.

    step: rows taken at once, in which every column sum of |S| is below 2^11. full: no column of such a step is all zeros, so that a
    sum that is 0 is +0 in any order of summation (a number and its opposite meet in it, and x - x = +0).
    """

    matrix: NDArray[np.float32]
    bits: int
    step: int
    full: bool

    @classmethod
    def of(cls, matrix: NDArray[np.float32], bits: int) -> Sketch:
        """The sketch of a matrix (rows, dim) of integers, |.| <= 128."""
        rows, parts = len(matrix), 1
        magnitude = np.abs(matrix)
        while True:
            step = -(-rows // parts)
            # sums of integers below 2^24: exact
            sums = np.add.reduceat(magnitude, np.arange(0, rows, step))
            most = float(sums.max())
            if most < PAIR // 2:
                return cls(matrix, bits, step, bool((sums > 0).all()))
            parts = max(parts + 1, int(parts * most) // (PAIR // 2))

    def back(self, q: NDArray[np.float32], out: NDArray[np.float32], scratch: Scratch) -> NDArray[np.float32]:
        """S^T q, exact: signs as rows q (n, rows), +-1 in the first ceil(n / 2), +-PAIR in the others, -> out (n, dim). q is overwritten."""
        half = -(-len(q) // 2)
        first, second = out[:half], out[half:]
        pairs = q[:half]
        pairs[: len(second)] += q[half:]
        both, high = scratch("both", first.shape, np.float32), scratch("high", first.shape, np.float32)
        for start in range(0, len(self.matrix), self.step):
            rows = slice(start, start + self.step)
            np.matmul(pairs[:, rows], self.matrix[rows], out=both)
            # rounded to a multiple of 2^12, the last bit of numbers of that size
            np.add(both, ROUNDER, out=high)
            high -= ROUNDER
            if start == 0:
                np.subtract(both, high, out=first)
                np.multiply(high[: len(second)], np.float32(1 / PAIR), out=second)
            else:
                both -= high
                first += both
                high *= np.float32(1 / PAIR)
                second += high[: len(second)]
        return out


@functools.cache
def _edges() -> NDArray[np.int64]:
    return np.floor(2.0**32 * special.ndtr((np.arange(-128, 128) + 0.5) / 16) + 0.5).astype(np.int64)


@functools.cache
def _table() -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """For the high 16 bits of a word: the entry of the least such word, and whether the entry depends on the low bits."""
    starts = np.arange((1 << 16) + 1, dtype=np.int64) << 16
    below = np.searchsorted(_edges(), starts[:-1], side="right")
    return (below - 128).astype(np.float32), np.searchsorted(_edges(), starts[1:] - 1, side="right") > below


def _entries(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """#{k : word >= edge_k} - 128 of each word. A search for few of them: one cell of 2^16 words in 256 has an edge."""
    entries, split = _table()
    high = (words >> np.uint32(16)).astype(np.uint16)
    out = np.take(entries, high)
    near = np.flatnonzero(np.take(split, high))
    out[near] = np.searchsorted(_edges(), words[near].astype(np.int64), side="right") - 128
    return out


@functools.lru_cache(maxsize=8)
def sketch(seed: int, purpose: str, rows: int, dim: int) -> Sketch:
    """S for (seed, purpose); each raw 64-bit word gives two entries, its low half first. Read-only."""
    words = randomness.raw_words(seed, purpose, -(-rows * dim // 2)).astype("<u8").view("<u4")[: rows * dim]
    entries = np.empty(rows * dim, np.float32)
    for start in range(0, words.size, _STEP):
        entries[start : start + _STEP] = _entries(words[start : start + _STEP])
    matrix = entries.reshape(rows, dim)
    matrix.flags.writeable = False
    largest = int(np.abs(matrix).sum(axis=1, dtype=np.float64).max())
    return Sketch.of(matrix, min(14, ((1 << 24) // max(largest, 1)).bit_length() - 1))
