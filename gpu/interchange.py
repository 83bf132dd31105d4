"""Arrays of other libraries as the kernels take them, without a copy: torch tensors, and whatever speaks DLPack or __cuda_array_interface__.

    keys, values = (gpu.interchange.borrowed(t) for t in (torch_keys, torch_values))
    stream = gpu.KIVI().encode_arrays(keys, values)
    back = gpu.interchange.as_torch(gpu.KIVI().decode_arrays(stream)[0])

What is borrowed is memory of its owner: it stays valid as long as that lives, and writes are seen on both sides.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from gpu.module import _is_cupy, require_gpu

__all__ = ["as_torch", "borrowed"]

#: DLPack's numbers of kinds of memory
_CPU, _CUDA, _CUDA_MANAGED = 1, 2, 13
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def borrowed(value: Any) -> Any:
    """A NumPy array (memory of the host) or a CuPy array (of a GPU) on the memory of `value`; NumPy and CuPy arrays as they are.

    Any strides, any element type that both libraries know; torch's bfloat16 becomes ml_dtypes', bit for bit. CuPy waits for what torch has
    launched on its current stream, as DLPack asks.

    TypeError for what neither is an array nor speaks a protocol, or lies in other memory; gpu.Unavailable for memory of a GPU without CuPy.
    """
    if isinstance(value, np.ndarray) or _is_cupy(value):
        return value
    if _is_torch(value):
        value = value.detach()
        torch = sys.modules["torch"]  # it made the tensor; nothing here imports it
        if str(value.dtype) == "torch.bfloat16":  # NumPy's DLPack has no such type, nor has __cuda_array_interface__
            return borrowed(value.view(torch.int16)).view(_BFLOAT16)
    if hasattr(value, "__dlpack_device__") and hasattr(value, "__dlpack__"):
        kind = int(value.__dlpack_device__()[0])
        if kind == _CPU:
            return np.from_dlpack(value)
        if kind in (_CUDA, _CUDA_MANAGED):
            return require_gpu().from_dlpack(value)
        raise TypeError(f"value: expected memory of the host or of an NVIDIA GPU, got DLPack's device {kind}")
    if hasattr(value, "__cuda_array_interface__"):
        return require_gpu().asarray(value)
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise TypeError(
        f"value: expected an array with __dlpack__, __cuda_array_interface__ or __array__, got {type(value).__name__}"
    )


def as_torch(array: Any) -> Any:
    """A torch tensor on the memory of a NumPy or CuPy array. ImportError without torch; NumPy's read-only arrays are torch's to complain of."""
    import torch

    if array.dtype == _BFLOAT16:
        return as_torch(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
