"""Transforms that decorrelate: the Karhunen-Loeve transform under a metric, and PCA as its case M = I."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_triangular

from kvtheory import checks
from kvtheory.namespaces import namespace
from kvtheory.transform import matrices

__all__ = ["Transform", "metric_klt", "pca", "shrink"]

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Transform:
    """y = analysis @ x and x = synthesis @ y, each (d, d), inverse to one another; variances (d,) of y, descending. float64, read-only."""

    analysis: Float
    synthesis: Float
    variances: Float

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, axes in (("analysis", ("d", "d")), ("synthesis", ("d", "d")), ("variances", ("d",))):
            array = np.array(getattr(self, name), dtype=np.float64)
            sizes |= checks.shape(name, array, axes, sizes)
            checks.finite(name, array)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def forward(self, x: ArrayLike) -> Float:
        """Coefficients of rows x (..., d); same shape, and where x is: NumPy or CuPy."""
        xp = namespace(x)
        return xp.asarray(x, dtype=np.float64) @ xp.asarray(self.analysis).T

    def inverse(self, y: ArrayLike) -> Float:
        """Rows back from coefficients y (..., d); same shape, and where y is."""
        xp = namespace(y)
        return xp.asarray(y, dtype=np.float64) @ xp.asarray(self.synthesis).T

    def weights(self, metric: Any) -> Float:
        """w_c = (synthesis^T M synthesis)_cc, (d,): what a unit error of coefficient c costs. metric (d, d). All 1 for M's own KLT."""
        m = matrices.symmetric("metric", metric, len(self.variances))
        return np.einsum("ic,ij,jc->c", self.synthesis, m, self.synthesis, optimize=True)


def metric_klt(covariance: Any, metric: Any) -> Transform:
    """The transform that diagonalises covariance Sigma and metric M together:

        analysis Sigma analysis^T = diag(variances),      synthesis^T M synthesis = I

    so that the weighted error of x is the plain squared error of y, e^T M e = ||analysis e||^2, and water-filling goes by the
    variances alone. With M = L L^T and L^T Sigma L = U diag(variances) U^T:  analysis = U^T L^T,  synthesis = L^{-T} U.

    covariance (d, d) positive semi-definite: a mean square, centred or not; where it is singular the last variances are exactly 0
    (all below d eps of the largest are). metric (d, d) positive definite. Optimal for the high-rate law among all invertible
    transforms, for Gaussian x and any quantiser among T = Q L^T with Q orthogonal; not for every other law of x.

    ValueError unless both are symmetric and of one shape, for an indefinite covariance, and for a singular metric: `shrink` it.
    Source: Hadamard's inequality, derived here; the same transform is NOVA-KV's (arXiv 2608.04074).
    """
    m = matrices.symmetric("metric", metric)
    sigma = matrices.symmetric("covariance", covariance, len(m))
    factor, _ = matrices.cholesky("metric", m, "use shrink(metric, amount) first")
    s = factor.T @ sigma @ factor
    variances, u = matrices.eigenvectors(0.5 * s + 0.5 * s.T)
    # Rounding of Sigma in the units that make M's diagonal 1 is what may pass for a negative eigenvalue.
    d = len(m)
    rounding = 64 * d * d * matrices.EPS * float(np.diagonal(m) @ np.diagonal(sigma))
    if variances[-1] < -rounding:
        raise ValueError(
            f"covariance: expected a positive semi-definite matrix, got an eigenvalue {variances[-1]} in the metric"
        )
    variances = np.where(variances > d * matrices.EPS * variances[0], variances, 0.0)
    return Transform(u.T @ factor.T, solve_triangular(factor.T, u, lower=False), variances)


def pca(covariance: Any) -> Transform:
    """`metric_klt` with M = I: analysis = U^T, synthesis = U with Sigma = U diag(variances) U^T. covariance (d, d)."""
    sigma = matrices.symmetric("covariance", covariance)
    return metric_klt(sigma, np.eye(len(sigma)))


def shrink(metric: Any, amount: float) -> Float:
    """M + amount tr(M)/d I, (..., d, d), float64: definite for amount > 0 unless M is 0, and the less spread the larger the amount.

    amount >= 0, relative to the mean eigenvalue. Stacks of metrics are shrunk one by one. ValueError for a negative amount or trace.
    """
    m = np.asarray(metric, dtype=np.float64)
    if m.ndim < 2 or m.shape[-1] != m.shape[-2] or m.shape[-1] == 0:
        raise ValueError(f"metric: expected shape (..., d, d), got {m.shape}")
    checks.finite("metric", m)
    if not (np.isfinite(amount) and amount >= 0):
        raise ValueError(f"amount: expected a finite number >= 0, got {amount!r}")
    trace = np.trace(m, axis1=-2, axis2=-1)
    if (trace < 0).any():
        raise ValueError(f"metric: expected a trace >= 0, got {trace.min()}")
    d = m.shape[-1]
    return m + (amount / d * trace)[..., None, None] * np.eye(d)
