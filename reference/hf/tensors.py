"""Tensors to arrays and back, bit for bit: codecs compute in NumPy on the CPU, whatever the model runs on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtheory.layer.record import as_array

__all__ = ["to_array", "to_tensor"]


def to_array(tensor: Any) -> NDArray[Any]:
    """A copy of `tensor` in its element type; bfloat16 is ml_dtypes' one."""
    return np.array(as_array("tensor", tensor.detach().cpu().contiguous()))


def to_tensor(array: NDArray[Any], like: Any) -> Any:
    """A copy of `array` on the device of `like`. TypeError unless it has its element type: nothing is rounded on the way."""
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if array.dtype.name == "bfloat16":
        found = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(array)
    if found.dtype != like.dtype:
        raise TypeError(f"array: expected elements of {like.dtype}, got {found.dtype}")
    return found.to(like.device)
