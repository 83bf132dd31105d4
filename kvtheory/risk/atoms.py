"""Summaries whose tokens are made up: merged, refitted, anything. What K of them cannot beat, and K that reach it.

The output of a summary of K atoms is a mean of their K values, so for every query it lies in one affine space of dimension K - 1:
whatever keys, values and weights, no summary of K atoms has a true risk below

    tail_(K-1)(Cov_nu A_P) = the sum of all but the K - 1 largest eigenvalues of the covariance of the outputs A_P(q), q ~ nu,

the least squares distance of the outputs from such a space (Eckart-Young). Where the queries are linearly independent it is
reached: a regular simplex of values in that space, wide enough to hold the projected outputs, and keys by which query j gives
vertex k its barycentric weight. K = dv + 1 atoms then have no risk at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.risk.bounds import budget
from kvtheory.risk.profiles import means, one_head

Float = NDArray[np.float64]


def any_atoms_floor(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, K: int, law: ArrayLike | None = None, scale: float | None = None
) -> float:
    """tail_(K-1)(Cov_nu A_P): below the true risk of every measure with K atoms, the cache's own or not (proved). P uniform.

    q (m, d), k (n, d), v (n, dv); law (m,): the queries' probabilities, default 1/m. Attained by `refitted_atoms` where the queries
    are linearly independent. ValueError for K < 1 and what does not fit.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    K, p = budget(K), _law(law, len(q))
    _, singular, _ = _principal(means(q, k, v, np.full(len(k), 1 / len(k)), scale)[0], p)
    return float((singular[K - 1 :] ** 2).sum())


def refitted_atoms(
    q: ArrayLike, o: ArrayLike, K: int, law: ArrayLike | None = None, scale: float | None = None
) -> tuple[Float, Float]:
    """Keys (K, d) and values (K, dv) of K equally weighted made-up tokens that are nearest to the outputs o (m, dv) at the queries q (m, d).

    Their squared error, mean under the law, is tail_(K-1) of the covariance of o (see the module). With principal coordinates y_j of
    o_j, unit vectors u_k to the corners of a regular simplex, <u_k, u_l> = -1/(K - 1), and R = 2 (K - 1) max ||y_j||:

        values mean + R u_k,     softmax weights p_jk = 1/K + (K - 1)/K <y_j, u_k>/R in [1/(2K), 3/(2K)],     scale q_j.k_k = ln p_jk.

    ValueError unless the q are linearly independent (m <= d).
    """
    q, o = np.asarray(q, dtype=np.float64), np.asarray(o, dtype=np.float64)
    sizes = checks.shape("q", q, ("m", "d"))
    checks.shape("o", o, ("m", "dv"), sizes)
    checks.finite("q", q, ("query", "channel"))
    checks.finite("o", o, ("query", "channel"))
    K, p, scale = budget(K), _law(law, len(q)), sizes["d"] ** -0.5 if scale is None else checks.positive("scale", scale)
    if np.linalg.matrix_rank(q) < sizes["m"]:
        raise ValueError(
            f"q: expected linearly independent queries, got {sizes['m']} of rank {np.linalg.matrix_rank(q)}"
        )
    mean, _, directions = _principal(o, p)
    directions = directions[: K - 1]
    corners = _corners(K)[:, : len(directions)]
    y = (o - mean) @ directions.T
    R = 2 * (K - 1) * float(np.linalg.norm(y, axis=1).max(initial=0)) or 1.0
    weights = 1 / K + (K - 1) / K * (y @ corners.T) / R
    keys = np.linalg.lstsq(scale * q, np.log(weights), rcond=None)[0].T
    return np.asarray(keys, dtype=np.float64), mean + R * corners @ directions


def _law(law: ArrayLike | None, queries: int) -> Float:
    if law is None:
        return np.full(queries, 1 / queries)
    p = np.asarray(law, dtype=np.float64)
    checks.shape("law", p, ("m",), {"m": queries})
    checks.finite("law", p, ("query",))
    if (p < 0).any() or abs(p.sum() - 1) > 1e-9:
        raise ValueError(
            f"law: expected probabilities that sum to 1, got a least of {p.min()!r} and a sum of {p.sum()!r}"
        )
    return p


def _principal(o: Float, p: Float) -> tuple[Float, Float, Float]:
    """(mean, singular values, directions (r, dv)) of sqrt(p) (o - mean): their squares are the covariance's eigenvalues."""
    mean = p @ o
    _, singular, directions = np.linalg.svd(np.sqrt(p)[:, None] * (o - mean), full_matrices=False)
    return mean, singular, directions


def _corners(K: int) -> Float:
    """Unit vectors (K, K - 1) to the corners of a regular simplex about 0."""
    if K == 1:
        return np.zeros((1, 0))
    # orthonormal coordinates of the hyperplane of sum 0, where e_k - 1/K has length sqrt(1 - 1/K)
    basis = np.linalg.qr(np.column_stack([np.ones(K), np.eye(K)[:, : K - 1]]))[0][:, 1:]
    return np.asarray(basis / np.sqrt(1 - 1 / K))
