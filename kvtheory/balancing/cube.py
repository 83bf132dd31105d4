"""The cube method (Deville and Tille, Biometrika 91 (2004)): its flight phase, in O(c^2) a token, c = m + 1 the number of constraints.

A basis of independent constraint columns a_i of fractional tokens is kept, with its QR factors. The next token e either extends it,
or depends on it: sum_i x_i a_i = a_e. Then u = (-x, 1) is a null vector on at most c + 1 = m + 2 coordinates; a step along it
settles one of them at least, and if that is one of the basis, e takes its place. When the tokens are used up the basis is left:
at most m + 1 fractional tokens, so K' = K - m (sum w = K' is whole).

For independent columns u is the only null vector of the m + 2 earliest fractional coordinates. Triangular factors are updated by
Givens rotations, backward stable, and formed anew every c updates.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack, qr, qr_delete, qr_insert

from kvtheory.balancing.moves import Coin, Float, constraints, ends, move

#: a column whose part outside the basis is below this, relative to it, depends on the basis
_DEPENDENT = 1e-12


class Basis:
    """Independent columns a_i of tokens, in the order of their coming: A = Q R, Q (c, c) orthogonal, R (c, k)."""

    def __init__(self, features: Float) -> None:
        """features (n, c): row i is a_i."""
        self.features = features
        self.tokens: list[int] = []
        self.updates = 0
        self._form()

    def _form(self) -> None:
        c = self.features.shape[1]
        self.updates = 0
        if self.tokens:
            self.q, self.r = qr(self.features[self.tokens].T)
        else:
            self.q, self.r = np.eye(c), np.zeros((c, 0))

    def coordinates(self, a: Float) -> tuple[Float, float]:
        """(x, distance): the x (k,) with sum_i x_i a_i nearest to a, and how far that is from a."""
        k = len(self.tokens)
        y = self.q.T @ a
        x = lapack.dtrtrs(self.r[:k], y[:k])[0] if k else y[:0]
        return x, float(np.sqrt(y[k:] @ y[k:]))

    def add(self, token: int) -> None:
        k = len(self.tokens)
        self.tokens.append(token)
        self._count()
        if self.updates:
            self.q, self.r = qr_insert(self.q, self.r, self.features[token], k, which="col", check_finite=False)

    def remove(self, place: int) -> None:
        del self.tokens[place]
        self._count()
        if self.updates:
            self.q, self.r = qr_delete(self.q, self.r, place, which="col", check_finite=False)

    def _count(self) -> None:
        self.updates += 1
        if self.updates > self.features.shape[1] or not self.tokens:
            self._form()


def cube_walk(pi: Float, leading: Float, coin: Coin) -> Float:
    """w (n,) from pi (n,) in (0, 1): total and leading (n, m) kept, at most m + 1 coordinates fractional."""
    features, w = constraints(leading), pi.copy()
    basis, owed = Basis(features), np.zeros(features.shape[1])
    size = np.sqrt((features**2).sum(axis=1))
    for token in range(len(pi)):
        while 0 < w[token] < 1:
            x, distance = basis.coordinates(features[token])
            if distance > _DEPENDENT * size[token]:
                basis.add(token)
                break
            active, u = [*basis.tokens, token], np.append(-x, 1.0)
            here = w[active]
            reach = ends(here, u)
            there, places, snapped = move(here, u, reach, coin(reach.down / (reach.up + reach.down)))
            w[active] = there
            if len(places) > 1:  # more than the one that is exact
                owed += snapped @ features[[active[i] for i in places]]
            for place in places[::-1]:
                if place < len(basis.tokens):
                    basis.remove(int(place))
        if basis.tokens and np.abs(owed).max() > 1e-15:
            back, _ = basis.coordinates(owed)
            moved = w[basis.tokens] + back
            if (moved > 0).all() and (moved < 1).all():
                owed -= back @ features[basis.tokens]
                w[basis.tokens] = moved
    return w
