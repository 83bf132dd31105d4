"""The transform of arXiv 2608.14191 as its authors build it, from a layer's weights and its input's second moment.

    C_x = E x x^T = S S^T,     W S = U diag(sigma) V^T,     A = sigma^{1/2} V^T S^{-1},     B = U sigma^{1/2}

z = A x is cached and k = B z. "Whitening" is of the input x: k = W x has the second moment W C_x W^T = U diag(sigma^2) U^T, so U
is the basis of uncentred PCA of k, and z its scores over sigma^{1/2}: decorrelated, not white.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from kvtheory import checks
from kvtheory.transform import matrices

__all__ = ["Whitened", "whitened_svd"]

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Whitened:
    """z = latent @ x, k = reconstruct @ z.

    latent (r, model_dim): A. reconstruct (d, r): B, orthogonal columns. variances (r,): E z_c^2, descending under the even split and
    1 under the uneven. singular_values (r,): sigma; sigma^2 are the variances of PCA. jitter: what was added to C_x's diagonal.
    """

    latent: Float
    reconstruct: Float
    variances: Float
    singular_values: Float
    jitter: float


def whitened_svd(weight: Any, input_moment: Any, split: Literal["even", "uneven"] = "even") -> Whitened:
    """The paper's construction: Cholesky C_x = S S^T, SVD of W S. r = min(d, model_dim).

    weight (d, model_dim): W, k = W x for column vectors. input_moment (model_dim, model_dim): C_x = E x x^T, any multiple.
    split="even": B = U sigma^{1/2}, A = sigma^{1/2} V^T S^{-1}; "uneven": B = U sigma, A = V^T S^{-1} (E z z^T = I).
    Where the Cholesky decomposition fails, (1e-3 - lambda_min) is added to C_x's diagonal first, as in the authors' code, in C_x's own
    units: the result then belongs to that matrix. ValueError for shapes that do not fit, NaN, inf, asymmetry or another split.
    """
    w = np.asarray(weight, dtype=np.float64)
    sizes = checks.shape("weight", w, ("d", "model_dim"))
    if 0 in w.shape:
        raise ValueError(f"weight: expected d >= 1 and model_dim >= 1, got shape {w.shape}")
    checks.finite("weight", w, ("row", "column"))
    c = matrices.symmetric("input_moment", input_moment, sizes["model_dim"])
    if split not in ("even", "uneven"):
        raise ValueError(f'split: expected "even" or "uneven", got {split!r}')
    jitter = 0.0
    try:
        s = np.linalg.cholesky(c)
    except np.linalg.LinAlgError:
        jitter = 1e-3 - float(np.linalg.eigvalsh(c)[0])
        s = np.linalg.cholesky(c + jitter * np.eye(len(c)))
    u, sigma, vt = np.linalg.svd(w @ s, full_matrices=False)
    largest = np.take_along_axis(u, np.abs(u).argmax(axis=0)[None], axis=0)[0]
    sign = np.where(largest < 0, -1.0, 1.0)
    white = solve_triangular(s, (sign[:, None] * vt).T, lower=True, trans="T").T  # V^T S^{-1}
    if split == "uneven":
        return Whitened(white, u * (sign * sigma), np.ones(len(sigma)), sigma, jitter)
    root = np.sqrt(sigma)
    return Whitened(root[:, None] * white, u * (sign * root), sigma, sigma, jitter)
