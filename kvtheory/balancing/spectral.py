"""The spectral walk (theory C-T2'): every step moves s or more fractional coordinates, s > c, c = m + 1 the number of constraints.

Let T_i be what the protected directions leave of token i, r_i = ||T_i||, y_i = r_i u_i, G the Gram matrix of T_i / r_i (tr G <= s'
on s' coordinates), B an orthonormal basis (s', d) of the constraints' null space in y, H = B^T G B, d >= s' - c.

Claim: with W = (H + delta)^-1 and i the place of its largest diagonal entry, u = B W e_i / r has

    || sum_i u_i T_i ||^2 / sum_i u_i^2 r_i^2  <=  1 / W_ii - delta  <=  d / tr W - delta  <=  tr H / d  <=  s' / (s' - c).

Proof. The ratio plus delta is that of H + delta at W e_i: W_ii / ||W e_i||^2 <= 1 / W_ii. A largest entry is at least the mean, and
tr W tr (H + delta) >= d^2 (Cauchy-Schwarz). Multiplying by W again never raises the ratio (moments of a positive matrix are
log-convex). The last step: y is spread over ALL null vectors, so tr H <= tr G <= s', and s'/d falls in d.

Hence with C = s / (s - c) >= s' / (s' - c),

    phi(w) = || sum_i (w_i - pi_i) T_i ||^2 + C sum_i r_i^2 w_i (1 - w_i)

is a supermartingale, and E || error ||^2 <= C sum_i r_i^2 pi_i (1 - pi_i). Of the two ends of a step one has phi no larger than
before: always taking the better one bounds the error surely. Fewer than s coordinates stay fractional; as sum w = K' is whole they
take the place of at least one kept token, so that K = K' + s - 2 tokens are enough. s = 2c: C = 2, K' = K - 2m.

Cost: O(s^2) a settled token. B and W are formed once for s + s/2 coordinates, O(s^3); a settled one is taken out of them by a
Householder reflection of the columns of B that leaves its row in a single column, which goes, and by one step of elimination on W.
Reflections keep B orthonormal and its settled rows 0 to rounding, so what rounding does to W touches no constraint, only quality.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas, lapack

from kvtheory.balancing.moves import Coin, Float, constraints, ends, move, null_space, repay

#: delta: H may be singular, and W loses what it exceeds 1 by
_DELTA = 1e-8
#: times that W is applied to its best column
_POWERS = 2
#: windows up to this are formed anew at each step, as that costs no more than the updates
_SMALL = 16


class Window:
    """The null space of c constraints on s' coordinates y, and W on it."""

    def __init__(self, constraints: Float, gram: Float) -> None:
        """constraints (c, s') on y, gram (s', s') of T_i / r_i."""
        self.basis = np.asfortranarray(null_space(constraints))
        h = self.basis.T @ gram @ self.basis
        d = len(h)
        h[np.diag_indices(d)] += _DELTA
        factor, info = lapack.dpotrf(h, lower=1)
        inverse, _ = lapack.dpotri(factor, lower=1)
        if info:  # H is positive up to the rounding of G, far below delta
            raise ArithmeticError(f"spectral walk: the Gram matrix of {d} null directions is not positive")
        self.inverse = np.asfortranarray(np.tril(inverse) + np.tril(inverse, -1).T)
        self.dimension = d

    def direction(self) -> Float:
        """y (s',) in the null space, of norm 1, with ratio at most that of the module's docstring."""
        z = self.inverse[:, self.inverse.diagonal().argmax()]
        for _ in range(_POWERS):
            z = self.inverse @ (z / np.sqrt(z @ z))
        y = self.basis @ z
        return np.asarray(y / np.sqrt(y @ y))

    def settle(self, place: int) -> None:
        """Leave only null vectors with y[place] = 0."""
        v = self.basis[place].copy()
        size = np.sqrt(v @ v)
        if size > 1e-14:  # else no null vector moves it, and there is nothing to take out
            # P = 1 - beta v v^T takes the row to -+e_last
            last = self.dimension - 1
            v /= size
            v[last] += np.copysign(1.0, v[last])
            beta = 2 / (v @ v)
            blas.dger(-beta, self.basis @ v, v, a=self.basis, overwrite_a=1)
            # P W P = W - v x^T - x v^T, x = beta W v - (beta^2/2) (v^T W v) v; then the Schur complement of its last entry
            x = beta * (self.inverse @ v)
            x -= 0.5 * beta * (x @ v) * v
            blas.dger(-1.0, v, x, a=self.inverse, overwrite_a=1)
            blas.dger(-1.0, x, v, a=self.inverse, overwrite_a=1)
            column = self.inverse[:, last].copy()
            blas.dger(-1 / column[last], column, column, a=self.inverse, overwrite_a=1)
            self.inverse[last] = self.inverse[:, last] = self.basis[:, last] = 0
            self.dimension -= 1
        self.basis[place] = 0


def spectral_walk(
    pi: Float,
    leading: Float,
    tail: Float,
    coin: Coin,
    derandomise: bool = False,
    missing: Float | None = None,
    window: int | None = None,
) -> Float:
    """w (n,) from pi (n,) in (0, 1): total and leading (n, m) kept, fewer than s coordinates fractional; s = window, default 2 (m + 1).

    tail (n, size): T_i, or their leading coordinates, and then missing (n,) what these lack of ||T_i||^2; G takes what is missing
    as orthogonal from token to token.
    """
    n, c = len(pi), leading.shape[1] + 1
    s = 2 * c if window is None else window
    most = s + s // 2 if s > _SMALL else s
    r2 = (tail**2).sum(axis=1) + (0 if missing is None else missing)
    # a token without tail error would divide 0 by 0; raising its r^2 keeps the ratio's bound and adds 1e-12 to the error's
    r = np.sqrt(np.maximum(r2, 1e-12 * r2.mean())) if r2.any() else np.ones(n)
    features, w = constraints(leading), pi.copy()
    error, owed = np.zeros(tail.shape[1]), np.zeros(c)
    active, rows = np.zeros(0, dtype=np.intp), np.zeros((0, tail.shape[1]))
    gram = np.zeros((0, 0))
    taken = 0
    while True:
        new = np.arange(taken, min(n, taken + most - len(active)))
        taken += len(new)
        if len(active) + len(new) < s:
            break
        active, rows, gram = _enlarge(active, rows, gram, new, tail[new] / r[new, None])
        if missing is not None:
            gram[np.diag_indices(len(gram))] = r2[active] / r[active] ** 2
        free = Window(features[active].T / r[active], gram)
        here, alive, left = w[active], np.ones(len(active), dtype=bool), len(active)
        while left >= s:
            u = free.direction() / r[active]
            reach = ends(here, u)
            if derandomise:
                step = u @ tail[active]
                drift = 2 * float(error @ step) + s / (s - c) * float((r2[active] * (1 - 2 * here)) @ u)
                square = float(step @ step) - s / (s - c) * float(r2[active] @ u**2)
                # phi(w + t u) - phi(w) = t drift + t^2 square
                forward = reach.up * drift + reach.up**2 * square <= -reach.down * drift + reach.down**2 * square
                error = error + (reach.up if forward else -reach.down) * step
            else:
                forward = coin(reach.down / (reach.up + reach.down))
            here, places, snapped = move(here, u, reach, forward)
            owed = owed + snapped @ features[active[places]]
            w[active[places]] = here[places]
            here[places] = 0.5  # no limit to later steps, which have u = 0 there
            alive[places] = False
            left -= len(places)
            if left >= s:
                for place in places:
                    free.settle(int(place))
        keep = alive.nonzero()[0]
        w[active[keep]] = here[keep]
        active, rows, gram = active[keep], rows[keep], gram[np.ix_(keep, keep)]
        w[active], owed = repay(w[active], features[active], owed)
    return w


def _enlarge(
    active: NDArray[np.intp], rows: Float, gram: Float, new: NDArray[np.intp], more: Float
) -> tuple[NDArray[np.intp], Float, Float]:
    """The active tokens, their T_i / r_i and Gram matrix with those of the new tokens."""
    old = len(active)
    rows = np.concatenate([rows, more])
    larger = np.empty((len(rows), len(rows)))
    larger[:old, :old] = gram
    larger[old:] = more @ rows.T
    larger[:old, old:] = larger[old:, :old].T
    return np.concatenate([active, new]), rows, larger
