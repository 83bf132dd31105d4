"""The spectrum of Sigma = int Gamma (x) Gamma dP in H_nu = L^2(nu), nu the law of queries: trace, eigenvalues, tails.

Sigma's non-zero eigenvalues are the squared singular values of the (tokens) x (queries * channels) matrix

    X[i, (j, c)] = sqrt(p_i / m) Gamma_i(q_j)_c,        tr Sigma = E_nu sum_i (a_i^2 / p_i) ||v_i - A_P||^2 = ||X||_F^2.

Exact: eigenvalues of the smaller of X X^T and X^T X, summed up in blocks. With a rank: block Krylov, which only multiplies by
blocks of rows of X, formed and forgotten, so that memory is O(min(n, m dv) rank) beside the head's own arrays where m dv < n, and
O((n + m dv) rank) otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.namespaces import host, namespace
from kvtheory.risk import krylov
from kvtheory.risk.profiles import Kind, log_mass, means, one_head, probabilities, profile_block

Float = NDArray[np.float64]

#: no Gram matrix larger than this on a side
LARGEST_GRAM = 8192
_BLOCK = 1 << 23


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of Sigma, descending; (r,) float64, all of them or the r leading ones.

    trace: tr Sigma, exact in either case. n: tokens. error: by how much a tail may exceed the true one (see `tail`).
    """

    trace: float
    eigenvalues: Float
    n: int
    error: float
    complete: bool = True

    def tail(self, m: int) -> float:
        """tail_m = sum of the eigenvalues after the m largest.

        Complete spectrum: that sum. Leading eigenvalues only: trace minus the m leading Ritz values, which is never below the
        true tail, as Ritz values are never above the eigenvalues; `error` says by how much it may be above.
        ValueError for m < 0 or, in an incomplete spectrum, m beyond the eigenvalues computed.
        """
        if isinstance(m, bool) or not isinstance(m, (int, np.integer)) or m < 0:
            raise ValueError(f"m: expected an int >= 0, got {m!r}")
        if self.complete:
            return float(self.eigenvalues[m:].sum())
        if m > len(self.eigenvalues):
            raise ValueError(
                f"m: expected at most the {len(self.eigenvalues)} eigenvalues computed, got {m}; ask spectrum for rank={m}"
            )
        return max(self.trace - float(self.eigenvalues[:m].sum()), 0.0)


@dataclass(frozen=True)
class _Matrix:
    """X of one head, by blocks."""

    q: Float
    k: Float
    v: Float
    p: Float
    scale: float
    kind: Kind
    log_z: Float
    o: Float
    c: float

    @classmethod
    def of(cls, q: Float, k: Float, v: Float, p: Float, scale: float, kind: Kind) -> _Matrix:
        o, c = means(q, k, v, p, scale)
        return cls(q, k, v, p, scale, kind, log_mass(q, k, p, scale), o, c)

    @property
    def channels(self) -> int:
        return self.v.shape[1] + (self.kind == "augmented")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.k), len(self.q) * self.channels

    def block(self, tokens: slice, queries: slice = slice(None)) -> Float:
        xp = namespace(self.q)
        b = xp.exp(self.scale * (self.k[tokens] @ self.q[queries].T) - self.log_z[queries])
        root = xp.sqrt(self.p[tokens] / len(self.q))[:, None]
        if self.kind == "centred":  # profile_block(b, ...) root, without its temporaries: this is most of the time
            gamma = self.v[tokens][:, None, :] - self.o[queries]
            gamma *= (root * b)[:, :, None]
        else:
            gamma = profile_block(b, self.v[tokens], self.o[queries], self.c, self.kind)
            gamma *= root[:, :, None]
        return gamma.reshape(len(b), -1)

    def row_blocks(self) -> list[slice]:
        step = max(1, _BLOCK // self.shape[1])
        return [slice(start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step)]

    def trace(self) -> float:
        return float(sum((self.block(rows) ** 2).sum() for rows in self.row_blocks()))

    def forward(self, y: Float) -> Float:
        return namespace(y).concatenate([self.block(rows) @ y for rows in self.row_blocks()])

    def adjoint(self, y: Float) -> Float:
        out = namespace(y).zeros((self.shape[1], y.shape[1]))
        for rows in self.row_blocks():
            out += self.block(rows).T @ y[rows]
        return out

    def normal(self, y: Float) -> Float:
        """X^T X y, each block formed once."""
        out = namespace(y).zeros((self.shape[1], y.shape[1]))
        for rows in self.row_blocks():
            block = self.block(rows)
            out += block.T @ (block @ y)
        return out

    def smaller_gram(self) -> Float:
        n, width = self.shape
        gram = namespace(self.q).zeros((min(n, width),) * 2)
        if width < n:
            for rows in self.row_blocks():
                x = self.block(rows)
                gram += x.T @ x
        else:
            step = max(1, _BLOCK // (n * self.channels))
            for start in range(0, len(self.q), step):
                x = self.block(slice(None), slice(start, start + step))
                gram += x @ x.T
        return gram


def spectrum(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weights: ArrayLike | None = None,
    scale: float | None = None,
    kind: Kind = "centred",
    rank: int | None = None,
) -> Spectrum:
    """Spectrum of Sigma for one head: q (m, d), k (n, d), v (n, dv); weights, scale, kind as in `response_profiles`.

    rank None: all eigenvalues, exact up to rounding; needs min(n, m channels) <= 8192, else ValueError.
    rank r: the r largest by block Krylov, O(n m dv r) operations and, for n > m dv, O(m dv r) memory beside the arrays; the trace is exact, `error` is what
    the Krylov space misses of it: an upper bound on every tail's excess (Ky Fan), coarse where the
    spectrum is flat.
    CuPy arrays are worked on where they are; what is returned lies in NumPy's memory. Last bits depend on the machine.
    """
    if kind not in ("centred", "augmented"):
        raise ValueError(f'kind: expected "centred" or "augmented", got {kind!r}')
    q, k, v, scale = one_head(q, k, v, scale)
    p = probabilities(weights, len(k), namespace(q))
    x = _Matrix.of(q, k, v, p, scale, kind)
    smaller = min(x.shape)
    if rank is None:
        if smaller > LARGEST_GRAM:
            raise ValueError(
                f"rank: expected a number, as the exact spectrum of {x.shape[0]} tokens needs a Gram matrix of {smaller} > {LARGEST_GRAM}"
            )
        return _exact(x.smaller_gram(), x.trace(), len(k))
    rank = _rank(rank)
    if krylov.columns(rank) >= smaller and smaller <= LARGEST_GRAM:
        whole = _exact(x.smaller_gram(), x.trace(), len(k))
        return Spectrum(whole.trace, whole.eigenvalues[:rank], whole.n, whole.error, complete=rank >= smaller)
    trace = x.trace()
    if x.shape[1] < x.shape[0]:
        found = krylov.symmetric(x.normal, x.shape[1], rank, trace, namespace(q))
    else:
        found = krylov.leading(x.forward, x.adjoint, x.shape, rank, trace, namespace(q))
    # where the rank is below `rank`, 0 is a Ritz value as good as any: never above an eigenvalue
    eigenvalues = np.zeros(min(rank, smaller))
    eigenvalues[: len(found.eigenvalues)] = found.eigenvalues
    rounding = krylov.columns(rank) * float(np.finfo(np.float64).eps) * trace
    return Spectrum(trace, eigenvalues, len(k), max(trace - found.captured, 0.0) + rounding, complete=False)


class Features(NamedTuple):
    """coordinates (n, r) of each token's profile in r orthonormal directions of H_nu, and missing (n,): the square of what these leave.

    <F_i, F_j> = <Pi Gamma_i, Pi Gamma_j> for one projection Pi, and ||F_i||^2 + missing_i = ||Gamma_i||^2, both up to rounding.
    """

    coordinates: Float
    missing: Float


def profile_features(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    rank: int,
    weights: ArrayLike | None = None,
    scale: float | None = None,
    kind: Kind = "centred",
) -> Features:
    """Profiles of a head too long to hold them, in the leading `rank` directions that block Krylov finds (all, if there are no more).

    q (m, d), k (n, d), v (n, dv); weights, scale, kind as in `response_profiles`. O(n m dv r) operations, O((n + m dv) r) memory.
    What `balancing.sample` makes of them is exact about the directions: protected ones are among them. See its `missing`.
    """
    if kind not in ("centred", "augmented"):
        raise ValueError(f'kind: expected "centred" or "augmented", got {kind!r}')
    q, k, v, scale = one_head(q, k, v, scale)
    p = probabilities(weights, len(k), namespace(q))
    x = _Matrix.of(q, k, v, p, scale, kind)
    rank, width = _rank(rank), x.shape[1]
    xp = namespace(q)
    directions = xp.eye(width) if rank >= width else krylov.symmetric(x.normal, width, rank, xp=xp).vectors
    coordinates, missing = xp.empty((len(k), directions.shape[1])), xp.empty(len(k))
    for rows in x.row_blocks():
        block = x.block(rows) / xp.sqrt(p[rows])[:, None]
        coordinates[rows] = block @ directions
        missing[rows] = xp.maximum((block**2).sum(axis=1) - (coordinates[rows] ** 2).sum(axis=1), 0)
    return Features(host(coordinates), host(missing))


def profile_spectrum(profiles: ArrayLike, weights: ArrayLike | None = None) -> Spectrum:
    """The complete Spectrum of Sigma = sum_i p_i Gamma_i (x) Gamma_i for profiles (n, m, c), of which <.,.> is the mean over m."""
    gamma = np.asarray(profiles, dtype=np.float64)
    sizes = checks.shape("profiles", gamma, ("n", "m", "c"))
    checks.finite("profiles", gamma, ("token", "query", "channel"))
    if gamma.size == 0:
        raise ValueError(f"profiles: expected at least one of each axis, got shape {gamma.shape}")
    p = probabilities(weights, sizes["n"])
    x = (gamma * np.sqrt(p / sizes["m"])[:, None, None]).reshape(sizes["n"], -1)
    if min(x.shape) > LARGEST_GRAM:
        raise ValueError(
            f"profiles: expected min(n, m c) <= {LARGEST_GRAM}, got shape {gamma.shape}; use spectrum with a rank"
        )
    return _exact(x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x, float((x**2).sum()), sizes["n"])


def _exact(gram: Float, trace: float, n: int) -> Spectrum:
    eigenvalues = np.maximum(host(namespace(gram).linalg.eigvalsh(gram))[::-1], 0)
    # backward error of the symmetric eigensolver and of the summed Gram matrix: a few units in the last place of its norm
    return Spectrum(trace, eigenvalues, n, len(gram) * float(np.finfo(np.float64).eps) * trace)


def _rank(rank: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 1:
        raise ValueError(f"rank: expected an int >= 1 or None, got {rank!r}")
    return int(rank)
