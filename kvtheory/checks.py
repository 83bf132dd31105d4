"""Refusals: what is wrong with an argument, said with its name, what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT_KINDS = {"float16", "bfloat16", "float32", "float64"}


def floating(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """`array` if its element type is one of float16, bfloat16, float32, float64 (any byte order); TypeError if not."""
    if array.dtype.newbyteorder("=").name not in FLOAT_KINDS:
        raise TypeError(f"{name}: expected elements of {', '.join(sorted(FLOAT_KINDS))}, got {array.dtype}")
    return array


def finite(name: str, array: NDArray[Any], axes: tuple[str, ...] = ()) -> NDArray[Any]:
    """`array` if it holds neither NaN nor inf; ValueError naming the first offender's value and index if it does."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=None if array.dtype.itemsize >= 4 else np.float32)
    if np.isfinite(total):  # NaN and inf survive any sum: one pass and no mask in the common case
        return array
    with np.errstate(invalid="ignore"):  # a signalling NaN of bfloat16
        bad = ~np.isfinite(array)
    if bad.any():
        where = np.unravel_index(int(np.argmax(bad)), bad.shape)
        value = float(array[where])
        index = ", ".join(f"{axis} {i}" for axis, i in zip(axes or (f"axis {a}" for a in range(len(where))), where))
        raise ValueError(f"{name}: expected finite numbers, got {value} at ({index}); {int(bad.sum())} such in all")
    return array


def shape(
    name: str, array: NDArray[Any], expected: tuple[str | int, ...], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Match `array.shape` with `expected`, a tuple of names and numbers; names bind to sizes, and a bound name must recur alike.

    Returns the sizes bound so far. ValueError says the expected and the actual shape.
    """
    bound = dict(sizes or {})
    fits = array.ndim == len(expected)
    if fits:
        for axis, actual in zip(expected, array.shape):
            want = bound.setdefault(axis, actual) if isinstance(axis, str) else axis
            fits = fits and want == actual
    if not fits:
        want_text = ", ".join(
            f"{axis}={sizes[axis]}" if isinstance(axis, str) and sizes and axis in sizes else str(axis)
            for axis in expected
        )
        raise ValueError(f"{name}: expected shape ({want_text}), got {tuple(array.shape)}")
    return bound


def positive(name: str, value: float) -> float:
    """`value` as a float if it is a finite number above 0; ValueError if not."""
    number = float(value)
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return number


def window(value: int | None) -> int | None:
    """`value` if it is an int >= 1 or None; ValueError if not."""
    if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
        raise ValueError(f"window: expected an int >= 1 or None, got {value!r}")
    return None if value is None else int(value)


def install(extra: str) -> str:
    """How to get an optional extra, for the message that says it is missing."""
    return f"pip install 'kvtheory[{extra}]' (in a checkout: pip install -e '.[{extra}]')"
