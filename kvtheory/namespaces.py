"""Array-level code is written once: over NumPy, or over CuPy where the arrays it is given are on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["host", "namespace"]


def _on_gpu(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


def namespace(*arrays: Any) -> ModuleType:
    """cupy if any of the arrays is CuPy's, else numpy. Imports nothing: whoever has such an array has imported CuPy."""
    return sys.modules["cupy"] if any(_on_gpu(a) for a in arrays) else np


def host(array: Any) -> NDArray[Any]:
    """The array in NumPy's memory: itself, or a copy of what is on the GPU."""
    return np.asarray(array.get() if _on_gpu(array) else array)
