"""Balanced walks: the cube method (Deville and Tille) and the spectral walk, whose error is proved below.

Inclusion weights w start at pi_i = K' p_i and move, unbiased, until all but a few are 0 or 1, always inside

    { w : sum_i (w_i - pi_i) = 0,  sum_i (w_i - pi_i) Pi Gamma_i = 0 },        Pi = projection on the m leading directions.

One step takes s fractional coordinates, a vector u in the null space of the m + 1 constraints on them, and goes to w + t+ u with
probability t- / (t+ + t-), else to w - t- u, where t+ and t- are how far [0, 1] lets it go: one coordinate at least is settled.

    cube:      s = m + 2, u is the null vector. Stops with <= m + 1 fractional coordinates; K' = K - m, since sum w = K' whole.
    spectral:  s = 2 (m + 1), so that the null space has dimension >= m + 1, and u minimises
                   || sum_i u_i T_i ||^2 / sum_i u_i^2 r_i^2,       T_i = Gamma_i - Pi Gamma_i, r_i = ||T_i||.
               In coordinates y_i = r_i u_i the mean of that ratio over an orthonormal basis of the null space is at most
               tr(G) / (m + 1) = s / (m + 1) = 2, G the Gram matrix of T_i / r_i; so the least ratio is at most 2, and
                   phi(w) = || sum_i (w_i - pi_i) T_i ||^2 + 2 sum_i r_i^2 w_i (1 - w_i)
               is a supermartingale: E || error ||^2 <= 2 sum_i r_i^2 pi_i (1 - pi_i). Of the two ends one has phi no larger
               than before: always taking the better one bounds the error surely. Stops with <= 2m + 1 fractional, K' = K - 2m.

Floating point: the coordinate that ends a step is set exactly; others within 1e-9 of 0 or 1 are snapped, since a fraction of 1e-16
would be kept as a token, and what the snap takes from the constraints is put back by a least-squares move of coordinates still free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, lapack

from kvtheory.risk import krylov, spectra

Float = NDArray[np.float64]
#: Coin(p) is True with probability p. Injected, so that tests can follow every path of a walk with its probability.
Coin = Callable[[float], bool]

_SNAP = 1e-9
#: a component of u below this sets no limit to the step
_NO_MOVE = 1e-300


class Split(NamedTuple):
    """Profiles x (n, size) in their leading directions: coordinates (n, m) in an orthonormal basis, and what these leave, (n, size)."""

    leading: Float
    tail: Float


def split(x: Float, p: Float, m: int) -> Split:
    """Coordinates in the m leading eigendirections of sum_i p_i x_i x_i^T, and what they leave of x. Fewer where the rank is.

    Where min(n, size) > spectra.LARGEST_GRAM the directions are Ritz vectors (`krylov`): a walk still makes no error in them, but
    they may leave more than tail_m, the excess being at most what the Krylov space misses of the trace.
    """
    if m == 0:
        return Split(np.zeros((len(x), 0)), x)
    weighted = np.sqrt(p)[:, None] * x
    n, size = x.shape
    if min(n, size) > spectra.LARGEST_GRAM:
        trace = float((weighted**2).sum())
        found = krylov.leading(lambda y: weighted @ y, lambda y: weighted.T @ y, x.shape, m, trace)
        values, directions = found.eigenvalues, weighted.T @ found.vectors
    else:
        gram = weighted @ weighted.T if n <= size else weighted.T @ weighted
        low = max(len(gram) - m, 0)
        values, vectors = eigh(gram, subset_by_index=[low, len(gram) - 1])
        values, vectors = values[::-1], vectors[:, ::-1]
        directions = weighted.T @ vectors if n <= size else vectors
    # directions beyond the rank are rounding, and would spend budget on constraining nothing
    alive = values > 1e-14 * len(x) * max(values.max(initial=0), np.finfo(float).tiny)
    directions = np.linalg.qr(directions[:, alive])[0]
    leading = x @ directions
    return Split(leading, x - leading @ directions.T)


def balance(x: Float, p: Float, K: int, m: int, method: str, coin: Coin, derandomise: bool = False) -> Float:
    """Weights (n,) of sum 1 with at most K < n above 0; x (n, size), p (n,) positive of sum 1; method "cube" or "spectral"."""
    leading, tail = split(x, p, m)
    m = leading.shape[1]
    whole = K - m if method == "cube" else K - 2 * m
    # a token with pi_i >= 1 is kept with its own weight, and the budget it leaves is spread over the rest
    pi, kept = whole * p, np.zeros(len(p), dtype=bool)
    while True:
        over = ~kept & (pi >= 1)
        if not over.any():
            break
        kept |= over
        rest = whole - int(kept.sum())
        pi = np.where(kept, 1.0, rest * p / p[~kept].sum() if rest > 0 else 0.0)
    free = np.flatnonzero(~kept)
    walk = spectral_walk if method == "spectral" else cube_walk
    w = np.ones(len(p))
    w[free] = walk(pi[free], leading[free], tail[free], coin, derandomise)
    return np.where(kept, p, w * (p[free].sum() / (whole - int(kept.sum()))))


def cube_walk(pi: Float, leading: Float, tail: Float, coin: Coin, derandomise: bool = False) -> Float:
    """The plain walk; w (n,) from pi (n,) in (0, 1). The tail plays no part."""

    def direction(active: NDArray[np.intp], constraints: Float) -> Float:
        return null_space(constraints)[:, 0]

    return _walk(pi, leading, leading.shape[1] + 2, direction, coin, None)


def spectral_walk(pi: Float, leading: Float, tail: Float, coin: Coin, derandomise: bool = False) -> Float:
    """The spectral walk of the module's docstring; w (n,) from pi (n,) in (0, 1)."""
    r2 = (tail**2).sum(axis=1)
    # a token without tail error would divide 0 by 0; raising its r^2 leaves the ratio's bound of 2 and adds 1e-12 to the error's
    r = np.sqrt(np.maximum(r2, 1e-12 * r2.mean())) if r2.any() else np.ones(len(pi))
    s = 2 * (leading.shape[1] + 1)
    gram, rows, members = np.zeros((s, s)), np.zeros((s, tail.shape[1])), np.full(s, -1)

    def direction(active: NDArray[np.intp], constraints: Float) -> Float:
        # G of the active set: only places whose token has changed since the last step are new
        new = np.flatnonzero(members != active)
        members[new] = active[new]
        rows[new] = tail[active[new]] / r[active[new], None]
        gram[new] = rows[new] @ rows.T
        gram[:, new] = gram[new].T
        y = null_space(constraints / r[active])
        best = lapack.dsyevr(y.T @ gram @ y, range="I", il=1, iu=1)[1][:, 0]
        return (y @ best) / r[active]

    return _walk(pi, leading, s, direction, coin, (tail, r2) if derandomise else None)


def null_space(constraints: Float) -> Float:
    """Orthonormal null vectors (s, s - c) of constraints (c, s), s > c: the columns of Q beyond c in the full QR of their transpose.

    They are orthogonal to every constraint also where the constraints are dependent.
    """
    c, s = constraints.shape
    reflectors, tau, _, _ = lapack.dgeqrf(constraints.T)
    beyond = np.zeros((s, s - c), order="F")
    beyond[c:] = np.eye(s - c)
    return lapack.dormqr("L", "N", reflectors, tau, beyond, 64 * s, overwrite_c=True)[0]


def _walk(
    pi: Float,
    leading: Float,
    s: int,
    direction: Callable[[NDArray[np.intp], Float], Float],
    coin: Coin,
    better_end: tuple[Float, Float] | None,
) -> Float:
    """Steps on s coordinates, in index order, until fewer than s are fractional. better_end: (tail, r^2) to derandomise."""
    n = len(pi)
    w = pi.copy()
    # each constraint scaled to mean square 1: the null space is the same, its condition better
    spread = np.sqrt((leading**2).mean(axis=0))
    features = np.column_stack([np.ones(n), leading / np.where(spread > 0, spread, 1)])
    active = np.arange(min(s, n))
    next_token = len(active)
    error = np.zeros(0 if better_end is None else better_end[0].shape[1])
    rows = features[active]
    while len(active) == s:
        u = direction(active, rows.T)
        here, rising = w[active], u > 0
        length = np.maximum(np.abs(u), _NO_MOVE)
        up = np.where(rising, 1 - here, here) / length
        down = np.where(rising, here, 1 - here) / length
        t_up, t_down = float(up.min()), float(down.min())
        if better_end is None:
            forward = coin(t_down / (t_up + t_down))
        else:
            tail, r2 = better_end
            move = u @ tail[active]
            drift = 2 * float(error @ move) + 2 * float((r2[active] * (1 - 2 * here)) @ u)
            square = float(move @ move) - 2 * float(r2[active] @ u**2)
            # phi(w + t u) - phi(w) = t drift + t^2 square
            forward = t_up * drift + t_up**2 * square <= -t_down * drift + t_down**2 * square
            error = error + (t_up if forward else -t_down) * move
        there = here + (t_up if forward else -t_down) * u
        stop = int((up if forward else down).argmin())
        there[stop] = float(rising[stop] == forward)
        settled = (there < _SNAP) | (there > 1 - _SNAP)
        places = settled.nonzero()[0]
        owed = None
        if len(places) > 1:  # more than the one that is exact
            snapped = np.where(settled, there.round(), there)
            owed = (there - snapped) @ rows
            there = snapped
        w[active] = there
        if owed is not None and len(places) < s and np.abs(owed).max() > 1e-15:
            _repay(w, active[~settled], features, owed)
        # settled places are refilled, so that the others keep theirs (and their rows of the Gram matrix)
        fill = min(len(places), n - next_token)
        active[places[:fill]] = np.arange(next_token, next_token + fill)
        rows[places[:fill]] = features[next_token : next_token + fill]
        next_token += fill
        if fill < len(places):
            active = np.delete(active, places[fill:])
    return w


def _repay(w: Float, still: NDArray[np.intp], features: Float, owed: Float) -> None:
    """Move the free coordinates by the least change that restores the constraints, unless that would leave [0, 1]."""
    move = np.linalg.lstsq(features[still].T, owed, rcond=None)[0]
    moved = w[still] + move
    if (moved > 0).all() and (moved < 1).all():
        w[still] = moved
