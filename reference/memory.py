"""Memory for decoded arrays, kept between decodes.

Fresh pages cost more than decoding into them: the kernel fills them with zeros first, which takes a third of a decode of KIVI. As
CuPy's memory pool does on a GPU, memory of arrays that nobody refers to any more is therefore given out again. Nobody else ever
sees it: a block comes back when the last array that looks into it, views included, is gone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEAST", "MOST", "Pool", "empty"]

#: smaller arrays come from NumPy: their memory is in the process already
LEAST = 1 << 20
#: bytes kept at most
MOST = 128 << 20


class Pool:
    """Blocks of memory of the sizes last asked for, `most` bytes at most; safe among threads (each step on the list is atomic)."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._free: list[NDArray[np.uint8]] = []

    @property
    def held(self) -> int:
        """Bytes that are kept and that nobody uses."""
        return sum(block.size for block in tuple(self._free))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """As np.empty: C-contiguous, contents arbitrary, writeable."""
        size = math.prod(shape) * dtype.itemsize
        if not LEAST <= size <= self.most:
            return np.empty(shape, dtype)
        return np.asarray(_Lease(self, self._taken(size))).view(dtype).reshape(shape)

    def _taken(self, size: int) -> NDArray[np.uint8]:
        kept: list[NDArray[np.uint8]] = []
        try:
            while True:
                block = self._free.pop()
                if block.size == size:
                    self._free.extend(kept)
                    return block
                kept.append(block)
        except IndexError:
            # other sizes are asked for now: what is kept of the old ones goes
            return np.empty(size, np.uint8)

    def back(self, block: NDArray[np.uint8]) -> None:
        """A block that nobody refers to any more."""
        if self.held + block.size <= self.most:
            self._free.append(block)


class _Lease:
    """What the array and each view of it refer to. Not an array itself: NumPy lets views refer to the block behind an array."""

    def __init__(self, pool: Pool, block: NDArray[np.uint8]) -> None:
        self._pool, self._block = pool, block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._pool.back(self._block)


_pool = Pool()
empty = _pool.empty
