"""A Haar-distributed rotation, for claims about random rotations. Floating point: its codes are not the same on every machine.

Q is the orthogonal factor of a d x d Gaussian matrix with the signs of R's diagonal absorbed (Mezzadri 2007); the Gaussians come
from raw Philox words by Box and Muller. The logarithm, the cosine and the QR factorisation are the platform's own.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from kvtheory import randomness

__all__ = ["gaussians", "orthogonal"]

Float = NDArray[np.float64]


def gaussians(seed: int, purpose: str, count: int) -> Float:
    """(count,) independent standard normals from the raw words of (seed, purpose)."""
    pairs = -(-count // 2)
    words = randomness.raw_words(seed, purpose, 2 * pairs)
    # the top 53 bits, moved into (0, 1)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@functools.lru_cache(maxsize=8)
def orthogonal(seed: int, purpose: str, dim: int) -> Float:
    """(dim, dim) orthogonal matrix of (seed, purpose), read-only."""
    q, r = np.linalg.qr(gaussians(seed, purpose, dim * dim).reshape(dim, dim))
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    q.flags.writeable = False
    return q
