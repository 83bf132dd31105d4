"""Checks of codecs' parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["number", "seed", "whole", "word"]


def whole(name: str, value: Any, least: int, most: int) -> None:
    """TypeError, ValueError unless value is an int from least to most."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}")


def number(name: str, value: Any, above: float, most: float) -> float:
    """value as a float; TypeError, ValueError unless above < value <= most."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not above < value <= most:
        raise ValueError(f"{name}: expected {above:g} < {name} <= {most:g}, got {value}")
    return float(value)


def word(name: str, value: Any, known: Sequence[str]) -> None:
    """ValueError unless value is one of `known`."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def seed(value: Any) -> None:
    """TypeError, ValueError unless value is an int from 0 to 2^63 - 1."""
    whole("seed", value, 0, (1 << 63) - 1)
