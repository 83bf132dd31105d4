"""Element types of arrays, changed by a kernel: NumPy's bits wherever the array is. Kernel: gpu/kernels/cast.cu.

CuPy's `astype` is compiled by CuPy, with -ftz=true: float64 to float32 and back loses subnormal numbers there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.module import ELEMENT, Source, element, launch, namespace

__all__ = ["cast"]

THREADS = 256
_HALVES = [name for dtype, name in ELEMENT.items() if dtype.itemsize == 2]
#: To, From: float is one of the two
PAIRS = [*(("float", other) for other in ("double", *_HALVES)), *((other, "float") for other in ("double", *_HALVES))]
_SOURCE = Source("cast.cu", [f"cast<{to}, {of}>" for to, of in PAIRS])


def cast(array: Any, dtype: Any) -> Any:
    """The array, NumPy or CuPy, in element type `dtype`: itself, strides and all, where it has that type, else a contiguous copy.

    Between float32 and float64, float16 or bfloat16. TypeError for other pairs. What the type cannot hold is inf.
    """
    own, wanted = array.dtype.newbyteorder("="), np.dtype(dtype).newbyteorder("=")
    xp = namespace(array)
    if own == array.dtype == wanted:
        return array
    if own != array.dtype:  # NumPy only, on the host
        array = array.astype(own)
    if own == wanted:
        return array
    names = ["double" if one == np.float64 else element(one) for one in (wanted, own)]
    if tuple(names) not in PAIRS:
        raise TypeError(f"dtype: expected float32 on one side, got {own} to {wanted}")
    out = xp.empty(array.shape, wanted)
    if out.size:
        arguments = xp.ascontiguousarray(array), out, np.int64(out.size)
        launch(_SOURCE[f"cast<{names[0]}, {names[1]}>"], (-(-out.size // THREADS),), (THREADS,), arguments)
    return out
