"""What a basis costs, in bits per component, under the high-rate law and under measured ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.transform import matrices
from kvtheory.transform.basis import Transform, pca

__all__ = ["basis_loss_bits", "coded_distortion", "pca_loss_bits"]

Float = NDArray[np.float64]

_DEFINITE = "the high-rate product is 0 for a singular one"


def _inverse(basis: Any, d: int) -> tuple[Float, Float]:
    """(T, T^{-1})."""
    if isinstance(basis, Transform):
        return basis.analysis, basis.synthesis
    t = np.asarray(basis, dtype=np.float64)
    checks.shape("basis", t, ("d", "d"), {"d": d})
    checks.finite("basis", t, ("row", "column"))
    try:
        return t, np.asarray(np.linalg.inv(t), dtype=np.float64)
    except np.linalg.LinAlgError:
        raise ValueError("basis: expected an invertible matrix, got a singular one") from None


def basis_loss_bits(covariance: Any, metric: Any, basis: Any) -> float:
    """Bits per component that coding y = T x costs beyond the best transform, at high rate and optimal bits in both:

        (1/2d) log2 prod_c (T Sigma T^T)_cc (T^{-T} M T^{-1})_cc / det(Sigma M)  >=  0

    covariance, metric (d, d), positive definite both. basis: T (d, d) invertible, or a `Transform`. Computed as the Hadamard ratios of
    T Sigma T^T and of T^{-T} M T^{-1}, each log2 of the pivots of a correlation matrix: >= 0 to rounding. It does not depend on the
    scaling or order of T's rows. ValueError for a singular matrix.
    """
    m = matrices.symmetric("metric", metric)
    sigma = matrices.symmetric("covariance", covariance, len(m))
    for name, matrix in (("covariance", sigma), ("metric", m)):
        matrices.cholesky(name, matrix, _DEFINITE)
    t, inverse = _inverse(basis, len(m))
    coefficients, prices = t @ sigma @ t.T, inverse.T @ m @ inverse
    pivots = [
        matrices.cholesky(name, 0.5 * x + 0.5 * x.T, "the basis is too ill-conditioned for float64")[1]
        for name, x in (("basis", coefficients), ("basis", prices))
    ]
    return float(-(pivots[0].sum() + pivots[1].sum()) / (2 * len(m)))


def pca_loss_bits(covariance: Any, metric: Any) -> float:
    """`basis_loss_bits` of PCA's basis with optimal bits for the weights w_c = (U^T M U)_cc (as AATC): in closed form

        (1/2d) log2( prod_c (U^T M U)_cc / det M ),   Sigma = U diag(lambda) U^T

    0 if and only if M is diagonal in U. covariance (d, d) positive semi-definite: equal eigenvalues, 0 among them, leave U free, and
    the loss is that of the U which the eigensolver returns. metric (d, d) positive definite, or ValueError.
    """
    m = matrices.symmetric("metric", metric)
    u = pca(matrices.symmetric("covariance", covariance, len(m))).synthesis
    rotated = u.T @ m @ u
    _, pivots = matrices.cholesky("metric", 0.5 * rotated + 0.5 * rotated.T, "use shrink(metric, amount) first")
    return float(-pivots.sum() / (2 * len(m)))


def coded_distortion(
    basis: Any, covariance: Any, metric: Any, bits: ArrayLike, law: Callable[[Float], Any] | ArrayLike | None = None
) -> float:
    """sum_c w_c s_c g(b_c): the expected e^T M e of coefficients y = T x coded with b_c bits each and uncorrelated errors.

    s_c = (T Sigma T^T)_cc, w_c = (T^{-T} M T^{-1})_cc. basis: T (d, d) or a `Transform`; bits (d,) >= 0. law: g, the distortion of a
    unit-variance coefficient: None for 4^{-b}; a function of bits (d,); or a table (levels,) for integer bits, g(b) = law[b], such as
    `kvtheory.rate.gaussian_table`. Exact for T = Q L^T with M = L L^T and Q orthogonal, where the weighted error is the plain error
    of y; for any other T only if the errors of different coefficients are uncorrelated, which a coefficient of no bits breaks: its
    error is the coefficient itself. ValueError, or TypeError for real bits into a table.
    """
    m = matrices.symmetric("metric", metric)
    sigma = matrices.symmetric("covariance", covariance, len(m))
    t, inverse = _inverse(basis, len(m))
    b = np.asarray(bits)
    checks.shape("bits", b, ("d",), {"d": len(m)})
    checks.finite("bits", b.astype(np.float64), ("component",))
    if (b < 0).any():
        raise ValueError(f"bits: expected numbers >= 0, got {b.min()}")
    if law is None:
        g = 4.0 ** -b.astype(np.float64)
    elif callable(law):
        g = np.asarray(law(b.astype(np.float64)), dtype=np.float64)
        checks.shape("law", g, ("d",), {"d": len(m)})
    else:
        table = np.asarray(law, dtype=np.float64)
        checks.shape("law", table, ("levels",))
        if b.dtype.kind not in "iu":
            raise TypeError(f"bits: expected integers for a table, got {b.dtype}")
        if b.max() >= table.size:
            raise ValueError(f"bits: expected at most {table.size - 1}, the table's last level, got {b.max()}")
        g = table[b]
    s = np.einsum("ci,ij,cj->c", t, sigma, t, optimize=True)
    w = np.einsum("ic,ij,jc->c", inverse, m, inverse, optimize=True)
    return float((w * s * g).sum())
