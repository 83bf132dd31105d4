"""One step of a walk on inclusion weights, unbiased, and what rounding takes from its constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

Float = NDArray[np.float64]
#: Coin(p) is True with probability p. Injected, so that tests can follow every path of a walk with its probability.
Coin = Callable[[float], bool]

_SNAP = 1e-9
#: a component of u below this sets no limit to the step
_NO_MOVE = 1e-300


class Ends(NamedTuple):
    """How far [0, 1]^s lets w go along u, and along -u; and the coordinate that stops it there."""

    up: float
    down: float
    up_stop: int
    down_stop: int


def ends(here: Float, u: Float) -> Ends:
    """here, u (s,), 0 < here < 1."""
    rising, length = u > 0, np.maximum(np.abs(u), _NO_MOVE)
    up = np.where(rising, 1 - here, here) / length
    down = np.where(rising, here, 1 - here) / length
    a, b = int(up.argmin()), int(down.argmin())
    return Ends(float(up[a]), float(down[b]), a, b)


def move(here: Float, u: Float, reach: Ends, forward: bool) -> tuple[Float, NDArray[np.intp], Float]:
    """(there, settled places, what the snap of settled coordinates took: there before less there after, (settled,))."""
    there = here + (reach.up if forward else -reach.down) * u
    stop = reach.up_stop if forward else reach.down_stop
    there[stop] = float((u[stop] > 0) == forward)  # exactly
    places = ((there < _SNAP) | (there > 1 - _SNAP)).nonzero()[0]
    snapped = there[places].round()
    taken = there[places] - snapped
    there[places] = snapped
    return there, places, taken


def constraints(leading: Float) -> Float:
    """Rows (n, m + 1) of what a walk keeps: a 1 for the total, and leading (n, m), each column scaled to mean square 1.

    The scale leaves the null space as it is, and improves its condition.
    """
    spread = np.sqrt((leading**2).mean(axis=0))
    return np.column_stack([np.ones(len(leading)), leading / np.where(spread > 0, spread, 1)])


def null_space(constraints: Float) -> Float:
    """Orthonormal null vectors (s, s - c) of constraints (c, s), s > c: the columns of Q beyond c in the full QR of their transpose.

    They are orthogonal to every constraint also where the constraints are dependent.
    """
    c, s = constraints.shape
    reflectors, tau, _, _ = lapack.dgeqrf(constraints.T)
    beyond = np.zeros((s, s - c), order="F")
    beyond[c:] = np.eye(s - c)
    return lapack.dormqr("L", "N", reflectors, tau, beyond, 64 * s, overwrite_c=True)[0]


def repay(w: Float, rows: Float, owed: Float) -> tuple[Float, Float]:
    """(w, what is still owed): w (s,) moved by the least change with rows^T change = owed, if it stays inside (0, 1)."""
    if len(w) == 0 or np.abs(owed).max() <= 1e-15:
        return w, owed
    change = np.linalg.lstsq(rows.T, owed, rcond=None)[0]
    moved = w + change
    if (moved > 0).all() and (moved < 1).all():
        return moved, owed - change @ rows
    return w, owed
