"""Rotations by +-1 that are exact in integers, hence the same on every machine, in any order of summation.

d = m B with B the largest power of two in d and m odd. The matrix is symmetric, with orthogonal rows of integers:

    M = K_m (x) H_B,    H_B: Sylvester's +-1 Hadamard matrix,    K_1 = 1,  K_m = m I - 2 J   (J all ones)
    M M^T = m^2 B I = m d I

K_m / m is the reflection in the all-ones vector: for d = 3 2^k (96, 192, 384) its entries 1/3, -2/3, -2/3 mix the m blocks well
(the largest entry of M is within 1.2 of the ideal 1/sqrt(d)), and a Hadamard matrix is never cut to size, which would not be
orthogonal. For large m the blocks hardly mix (m = 9: the largest entry 2.3 times the ideal, m = 127: 11 times).

Every row of M has the same sum of absolute values, L = B (3m - 4), or B when m = 1. With |x_i| <= 2^a, a = 14 or as much less as
L 2^a <= 2^24 asks, every partial sum of every product below is an integer of at most 2^24: exact in float32. So a float32
GEMM computes it, on any hardware, with or without fused multiply-add.

M is applied as a Kronecker product of two factors, A (p x p) and C (q x q), d = p q: 2 (p + q) operations a number in place of 2 d,
and a block of vectors is transposed on the way (forward: rows to planes; inverse: planes to rows) for free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import randomness

__all__ = ["EXACT", "LARGEST", "Rotation", "hadamard", "rotation", "row_sum", "signs"]

#: dimensions above are refused: the integers would get too coarse
LARGEST = 1024
#: float32 holds all integers up to here
EXACT = 1 << 24

Float32 = NDArray[np.float32]
#: (name, shape, dtype) -> an array to work in
Scratch = Callable[[str, tuple[int, ...], Any], NDArray[Any]]


def _fresh(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.empty(shape, dtype)


def hadamard(size: int) -> NDArray[np.int64]:
    """Sylvester's matrix: H_1 = 1, H_2n = [[H_n, H_n], [H_n, -H_n]]. size: a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"size: expected a power of two, got {size}")
    h = np.ones((1, 1), np.int64)
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


@dataclass(frozen=True, eq=False)
class Rotation:
    """The integer matrix M of one dimension d = m B.

    m: its odd part. bits: a, the input's |x_i| <= 2^a. row_sum: L, the sum of absolute values of any row. left, right: A and C.
    M / (sqrt(m d)) is orthogonal.
    """

    dim: int
    m: int
    bits: int
    row_sum: int
    left: Float32
    right: Float32

    @property
    def gain2(self) -> int:
        """||M x||^2 / ||x||^2 = m d."""
        return self.m * self.dim

    def forward(self, x: Float32, scratch: Scratch = _fresh) -> Float32:
        """M applied to each row of x (n, d), as planes (d, n): plane i holds coordinate i of all vectors. Integers in float32."""
        n, p, q = len(x), len(self.left), len(self.right)
        inner = np.matmul(self.right, x.reshape(n * p, q).T, out=scratch("inner", (q, n * p), x.dtype))  # [q'][n][p]
        outer = np.matmul(
            self.left, inner.reshape(q * n, p).T, out=scratch("outer", (p, q * n), x.dtype)
        )  # [p'][q'][n]
        return outer.reshape(self.dim, n)

    def inverse(self, planes: Float32, scratch: Scratch = _fresh) -> Float32:
        """M^T applied to planes (d, n), as rows (n, d): inverse(forward(x)) = m d x. Integers in float32."""
        n, p, q = planes.shape[1], len(self.left), len(self.right)
        inner = np.matmul(
            planes.reshape(p, q * n).T, self.left, out=scratch("inner", (q * n, p), planes.dtype)
        )  # [q][n][p']
        outer = np.matmul(
            inner.reshape(q, n * p).T, self.right, out=scratch("outer", (n * p, q), planes.dtype)
        )  # [n][p'][q']
        return outer.reshape(n, self.dim)

    def matrix(self) -> NDArray[np.int64]:
        """M itself, (d, d)."""
        return np.kron(self.left, self.right).astype(np.int64)


def row_sum(dim: int) -> int:
    """L of dimension 1 <= dim <= 1024: B (3m - 4), or B when m = 1. ValueError for other dimensions. Builds nothing."""
    if not 1 <= dim <= LARGEST:
        raise ValueError(f"dimension: expected 1 to {LARGEST}, got {dim}")
    block = dim & -dim
    m = dim // block
    return block * (3 * m - 4 if m > 1 else 1)


@functools.lru_cache(maxsize=64)
def rotation(dim: int) -> Rotation:
    """The rotation of dimension 1 <= dim <= 1024; ValueError for others."""
    largest = row_sum(dim)
    block = dim & -dim
    m = dim // block
    # L 2^a <= 2^24; 2^14 leaves the sign a place in 16 bits
    bits = min(14, (EXACT // largest).bit_length() - 1)
    q = 1 << (block.bit_length() // 2)
    k = m * np.eye(m, dtype=np.int64) - 2 if m > 1 else np.ones((1, 1), np.int64)
    left, right = np.kron(k, hadamard(block // q)), hadamard(q)
    return Rotation(dim, m, bits, largest, *(np.ascontiguousarray(f, np.float32) for f in (left, right)))


@functools.lru_cache(maxsize=64)
def signs(seed: int, purpose: str, dim: int) -> NDArray[np.int64]:
    """(dim,) of +-1 for (seed, purpose): -1 where bit i of the raw Philox words, least significant first, is set. Read-only."""
    words = randomness.raw_words(seed, purpose, -(-dim // 64)).astype("<u8")
    flipped = np.unpackbits(words.view(np.uint8), bitorder="little")[:dim]
    out = 1 - 2 * flipped.astype(np.int64)
    out.flags.writeable = False
    return out
