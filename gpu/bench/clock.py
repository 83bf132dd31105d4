"""Times on a GPU by CUDA events, each run from a cold L2, and the bandwidth of a copy in the same minutes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Clock", "Timing", "copy_bandwidth"]


@dataclass(frozen=True)
class Timing:
    """Of `repeats` runs: the median, the fastest and the slowest, in seconds."""

    median: float
    least: float
    most: float
    repeats: int


class Clock:
    """Times what is launched on CuPy's current stream.

    Args:
        xp: cupy.
        flush: bytes that are written before each run, so that nothing of the run's data is in L2; twice the L2 are enough.
        seconds: that the runs of one thing may take together, about.
        least: runs of one thing at least.
    """

    def __init__(self, xp: Any, flush: int, seconds: float = 0.2, least: int = 5) -> None:
        self.xp, self.seconds, self.least = xp, seconds, least
        self._room = xp.zeros(max(1, flush // 4), np.int32)

    def once(self, run: Callable[[], Any]) -> float:
        """Seconds of one run on the device, launches queued beforehand."""
        cuda = self.xp.cuda
        self._room.fill(1)
        start, stop = cuda.Event(), cuda.Event()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(cuda.get_elapsed_time(start, stop)) * 1e-3

    def time(self, run: Callable[[], Any], most: int = 30) -> Timing:
        """Two runs to warm up, then from `least` to `most` as time allows."""
        self.once(run)
        first = self.once(run)
        repeats = self.least if first <= 0 else max(self.least, min(most, math.floor(self.seconds / first)))
        found = sorted(self.once(run) for _ in range(repeats))
        return Timing(float(np.median(found)), found[0], found[-1], repeats)


def copy_bandwidth(clock: Clock, nbytes: int) -> float:
    """Bytes a second that a copy of `nbytes` from device memory to device memory reads and writes together, by the median."""
    xp = clock.xp
    source, target = (xp.zeros(nbytes // 4, np.int32) for _ in range(2))
    timing = clock.time(lambda: xp.copyto(target, source))
    return 2 * int(source.nbytes) / timing.median
