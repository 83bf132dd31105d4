"""Places of few numbers among many, as gaps of one byte each: what a dense-and-sparse codec says of its outliers.

Places ascend. Byte g < 255 passes over g numbers and names the next one; byte 255 passes over 255 and names none. At a share p of
outliers a place takes 8 / (1 - (1 - p)^255) bits: 8.7 at 1 %, where its entropy is 8.1. No count is kept: it is the number of bytes
below 255. The bytes of a growing list only grow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.stream import Reader

__all__ = ["Places", "read_places"]

SKIP = 255


class Places:
    """Ascending places that grow at the end; `bytes` holds those of all numbers so far."""

    def __init__(self) -> None:
        self._bytes: list[bytes] = []
        #: numbers behind the last place
        self._passed = 0

    def append(self, chosen: NDArray[np.bool_]) -> None:
        """More numbers, in C order: which of them are named."""
        flat = chosen.reshape(-1)
        at = np.flatnonzero(flat)
        if at.size:
            gaps = np.diff(at, prepend=-1) - 1
            gaps[0] += self._passed
            skips, rest = np.divmod(gaps, SKIP)
            out = np.full(at.size + int(skips.sum()), SKIP, np.uint8)
            out[np.arange(at.size) + np.cumsum(skips)] = rest
            self._bytes.append(out.tobytes())
            self._passed = flat.size - 1 - int(at[-1])
        else:
            self._passed += flat.size

    def bytes(self) -> bytes:
        return b"".join(self._bytes)


def read_places(reader: Reader, count: int, what: str) -> NDArray[np.int64]:
    """The places among `count` numbers, from all of `reader`; CorruptStream if the last one is not below it or names nothing."""
    start = reader.offset
    gaps = reader.array(np.uint8, reader.remaining, what)
    if gaps.size and gaps[-1] == SKIP:
        reader.fail(f"{what}: the last byte names no number", start + gaps.size - 1)
    steps = gaps.astype(np.int64)
    steps += gaps != SKIP
    ends = np.cumsum(steps)
    if gaps.size and int(ends[-1]) > count:
        beyond = int(np.argmax(ends > count))
        reader.fail(f"{what}: expected places below {count}, got {int(ends[beyond]) - 1}", start + beyond)
    return ends[gaps != SKIP] - 1
