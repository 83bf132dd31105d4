"""Random streams keyed by (seed, purpose), so that data and codec given one integer seed never share a stream.

A package that draws its data and its rotation from the same seeded stream aligns the two and misreports distortion;
here every user of randomness says what it is for, and Philox is keyed by the hash of both.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def _philox(seed: int, purpose: str) -> np.random.Philox:
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
    digest = hashlib.sha256(f"{int(seed)}\x00{purpose}".encode()).digest()
    return np.random.Philox(key=np.frombuffer(digest[:16], "<u8"))


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A Generator for (seed, purpose). For data and experiments: NumPy may change its distributions between versions."""
    return np.random.Generator(_philox(seed, purpose))


def raw_words(seed: int, purpose: str, count: int) -> NDArray[np.uint64]:
    """`count` raw 64-bit Philox words for (seed, purpose): the same in every NumPy version, so bytes may depend on them."""
    return _philox(seed, purpose).random_raw(count)
