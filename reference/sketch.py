"""The Gaussian sketch of QJL (Zandieh et al. 2024) in integers: signs of S r keep the direction of r without bias.

For S with independent standard normal entries and m rows, and any y:

    E [ sqrt(pi/2) / m ||r|| <S y, sign(S r)> ] = <y, r>,     variance ((pi/2) ||r||^2 ||y||^2 - <y, r>^2) / m

Here S holds integers: a normal times 16, rounded, from one raw 32-bit Philox word each, by inversion:

    S_ij = #{k in -128 ... 127 : word >= round(2^32 Phi((k + 1/2) / 16))} - 128

so that S r is exact in float32 for integer r with (row sum of |S|) max |r| <= 2^24, and sign(S r) the same on every machine. Rounding
adds 1/12 to the variance 256 of an entry; entries beyond 8 standard deviations are cut (their probability is below 2^-32).

S^T q of signs q holds small integers, in float32, two of which fit into one number: with the left and the right half of S's columns

    q^T (L + 2^12 R) = A + 2^12 B,     |A| < 2^11, |B| < 2^11:    B = rint((A + 2^12 B) / 2^12)

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
#: the right half of two integers in one float32 is in units of this
PAIR = 1 << 12
#: float32 numbers around this are multiples of PAIR
ROUNDER = np.float32(1.5 * 2**23 * PAIR)
#: entries made at once: no large arrays beside the matrix and its raw words
_STEP = 1 << 16


@dataclass(frozen=True, eq=False)
class Sketch:
    """matrix: S (rows, dim), integers in float32. bits: S r is exact for integers |r| <= 2^bits.

    paired: L + 2^12 R (rows, dim / 2), and how many of its rows are taken at once; None where dim is odd.
    """

    matrix: NDArray[np.float32]
    bits: int
    paired: tuple[NDArray[np.float32], int] | None = None

    def back(self, q: NDArray[np.float32], out: NDArray[np.float32], scratch: Scratch) -> NDArray[np.float32]:
        """S^T q, exact: vectors of signs +-1 as rows q (n, rows) -> out (n, dim)."""
        if self.paired is None:
            return np.matmul(q, self.matrix, out=out)
        paired, step = self.paired
        half = paired.shape[1]
        left, right = out[:, :half], out[:, half:]
        both, high = scratch("both", left.shape, np.float32), scratch("high", left.shape, np.float32)
        for start in range(0, len(paired), step):
            np.matmul(q[:, start : start + step], paired[start : start + step], out=both)
            # rounded to a multiple of 2^12, the last bit of numbers of that size
            np.add(both, ROUNDER, out=high)
            np.subtract(high, ROUNDER, out=high)
            if start == 0:
                np.subtract(both, high, out=left)
                np.multiply(high, np.float32(1 / PAIR), out=right)
            else:
                left += np.subtract(both, high, out=both)
                right += np.multiply(high, np.float32(1 / PAIR), out=high)
        return out


def _paired(matrix: NDArray[np.float32]) -> tuple[NDArray[np.float32], int] | None:
    rows, dim = matrix.shape
    if dim % 2:
        return None
    magnitude, parts = np.abs(matrix), 1
    while True:
        step = -(-rows // parts)
        # sums of integers below 2^24: exact
        most = max(float(magnitude[start : start + step].sum(axis=0).max()) for start in range(0, rows, step))
        if most < PAIR // 2:
            break
        parts = max(parts + 1, int(parts * most) // (PAIR // 2))
    paired = matrix[:, : dim // 2] + np.float32(PAIR) * matrix[:, dim // 2 :]
    paired.flags.writeable = False
    return paired, step


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
    return Sketch(matrix, min(14, ((1 << 24) // max(largest, 1)).bit_length() - 1), _paired(matrix))
