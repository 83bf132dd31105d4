"""Where arrays are: namespaces, transfers, and tables that kernels read again and again, made once for each device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["device", "host", "kept"]

_TABLES: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def host(array: Any) -> NDArray[Any]:
    """A NumPy array of what a NumPy or CuPy array holds; CuPy's waits for the kernels that write it."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def device(array: Any, xp: Any) -> Any:
    """A NumPy array as a contiguous one of namespace `xp`: itself where that is NumPy and it is contiguous, else a copy."""
    return np.ascontiguousarray(array) if xp is np else xp.asarray(np.ascontiguousarray(array))


def kept(owner: Any, name: str, xp: Any, make: Callable[[], NDArray[Any]]) -> Any:
    """The array `make()` in namespace `xp`, made once for this owner, name and device, as long as the owner lives; for any stream.

    owner: an immutable object that is compared by identity, and all that `make` depends on beside the name.
    """
    own = _TABLES.setdefault(owner, {})
    key = name, xp.__name__, 0 if xp is np else int(xp.cuda.runtime.getDevice())
    if key not in own:
        own[key] = device(make(), xp)
        if xp is not np:  # another stream may be the first to read it
            xp.cuda.get_current_stream().synchronize()
    return own[key]
