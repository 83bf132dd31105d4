"""Symmetric matrices as arguments: symmetric to rounding, and positive definite or semi-definite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks

__all__ = ["cholesky", "correlation", "eigenvectors", "symmetric"]

Float = NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)
#: asymmetry that passes for rounding, relative to sqrt(A_ii A_jj): a float32 sum's
ASYMMETRY = 1e-5


def symmetric(name: str, matrix: Any, d: int | None = None) -> Float:
    """(A + A^T)/2 in float64, (d, d). ValueError unless square, d >= 1, finite, symmetric to 1e-5 and with a diagonal >= 0."""
    a = np.asarray(matrix, dtype=np.float64)
    sizes = checks.shape(name, a, ("d", "d"), None if d is None else {"d": d})
    if sizes["d"] == 0:
        raise ValueError(f"{name}: expected d >= 1, got 0")
    checks.finite(name, a, ("row", "column"))
    diagonal = np.diagonal(a)
    if (diagonal < 0).any():
        c = int(np.argmin(diagonal))
        raise ValueError(f"{name}: expected a diagonal >= 0, got {diagonal[c]} at {c}")
    size = np.sqrt(diagonal)
    off = np.abs(a - a.T) > ASYMMETRY * size[:, None] * size[None, :]
    if off.any():
        i, j = (int(x) for x in np.argwhere(off)[0])
        raise ValueError(
            f"{name}: expected a symmetric matrix, got {a[i, j]} at ({i}, {j}) and {a[j, i]} at ({j}, {i})"
        )
    return 0.5 * a + 0.5 * a.T


def correlation(a: Float) -> tuple[Float, Float]:
    """(s, R) with A = diag(s) R diag(s) and R_cc = 1; where A_cc = 0, s_c = 1 and R_cc = 0."""
    s = np.sqrt(np.diagonal(a))
    s = np.where(s > 0, s, 1.0)
    return s, a / s[:, None] / s[None, :]


def cholesky(name: str, a: Float, advice: str) -> tuple[Float, Float]:
    """(L, log2 of R's pivots): A = L L^T and the correlation matrix R of A, whose pivots L_cc^2 / A_cc are at most 1.

    Definiteness is judged on R, so that units of the channels do not count: ValueError, ending in `advice`, where a pivot is no
    larger than the rounding of d numbers of size 1.
    """
    s, r = correlation(a)
    try:
        if (np.diagonal(a) == 0).any():
            raise np.linalg.LinAlgError
        factor = np.linalg.cholesky(r)
        pivots = np.diagonal(factor) ** 2
        least = float(pivots.min())
    except np.linalg.LinAlgError:
        least = 0.0
    if least <= 4 * len(a) * EPS:
        raise ValueError(f"{name}: expected a positive definite matrix, got a singular or indefinite one; {advice}")
    return s[:, None] * factor, np.log2(pivots)


def eigenvectors(a: Float) -> tuple[Float, Float]:
    """(eigenvalues descending, eigenvectors in columns), each column's entry of largest magnitude positive."""
    values, vectors = np.linalg.eigh(a)
    values, vectors = values[::-1], vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return values, vectors * np.where(largest < 0, -1.0, 1.0)
