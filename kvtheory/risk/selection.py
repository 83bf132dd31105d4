"""What keeping the most attended tokens costs, and the best weights of a support.

Kept tokens S with the weights they had (StreamingLLM, SnapKV, ScissorHands), D the dropped ones, a(S)(q) the attention S had before, and
A_S, A_D the outputs of either part alone: A_P = a(S) A_S + (1 - a(S)) A_D, so exactly

    A_S - A_P = (1 - a(S)) (A_S - A_D),        r(S) <= diameter^2 E_nu (1 - a(S))^2.

The square of the attention dropped: nothing is balanced, and yet where a(S) is near 1 this is below what balance promises (tail_m / K),
since the linear risk of a selection, E (n a(S)/K)^2 ||A_S - A_P||^2, is (n a(S)/K)^2 times its true one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.risk.gram import centred_gram
from kvtheory.risk.profiles import density, one_head, value_scale

__all__ = ["refit_weights", "selection_bound"]

Float = NDArray[np.float64]


def selection_bound(q: ArrayLike, k: ArrayLike, v: ArrayLike, index: ArrayLike, scale: float | None = None) -> float:
    """4 R^2 E_nu (1 - a(S))^2, R = max ||v_i - mean v||: bounds the true risk of keeping the tokens `index` with equal weights (proved).

    q (m, d), k (n, d), v (n, dv), P uniform; index (kept,) integers without repeats. TypeError, ValueError for what does not fit.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    kept = _support(index, len(k))
    dropped = np.delete(density(q, k, scale=scale), kept, axis=0).sum(axis=0) / len(k)
    radius2 = float(((v - v.mean(axis=0)) ** 2).sum(axis=1).max())
    return 4 * radius2 * float((dropped**2).mean())


def refit_weights(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    index: ArrayLike,
    scale: float | None = None,
    *,
    ridge: float = 1e-3,
) -> Float:
    """Weights (kept,) >= 0 of sum 1 under which the tokens `index` (kept,) stand for all n, for the queries q (m, d): non-negative least squares

        min_w  E_nu || sum_{i in S} w_i b_i (v_i - o) ||^2 + c^2 E_nu (sum_{i in S} w_i b_i - 1)^2 + ridge sum_{i in S} ||x_i||^2 (w_i - 1/n)^2

    numerator and denominator of the error identity, c the value scale of the augmented profile, ||x_i||^2 = E b_i^2 (||v_i - o||^2 + c^2).
    The total of w is free, as softmax divides by it, and made 1 in the end. k (n, d), v (n, dv), P uniform. ridge > 0: pull to the weight had.
    """
    from scipy.optimize import nnls

    q, k, v, scale = one_head(q, k, v, scale)
    n = len(k)
    kept, ridge = _support(index, n), checks.positive("ridge", ridge)
    b = density(q, k, scale=scale)
    o = b.T @ v / n
    c2 = value_scale(v, np.full(n, 1 / n)) ** 2
    own, values = b[kept], v[kept]
    gram = centred_gram(own, values, o, c2)
    pull = ridge * np.maximum(np.diag(gram), np.finfo(np.float64).tiny)
    target = c2 * own.mean(axis=1) + pull / n
    # the normal equations as least squares: R^T R = gram + diag(pull), by eigenvalues as gram may be singular up to rounding
    values2, vectors = np.linalg.eigh(gram + np.diag(pull))
    root = np.sqrt(np.maximum(values2, values2[-1] * len(values2) * np.finfo(np.float64).eps))
    found, _ = nnls((vectors * root).T, (vectors.T @ target) / root, maxiter=30 * len(kept))
    total = float(found.sum())
    return np.asarray(found / total if total > 0 else np.full(len(kept), 1 / len(kept)))


def _support(index: ArrayLike, n: int) -> NDArray[np.intp]:
    kept = np.asarray(index)
    if kept.dtype.kind not in "iu":
        raise TypeError(f"index: expected integers, got {kept.dtype}")
    checks.shape("index", kept, ("kept",))
    if kept.size == 0 or kept.min() < 0 or kept.max() >= n or len(np.unique(kept)) < len(kept):
        raise ValueError(f"index: expected different tokens in 0..{n - 1}, at least one, got {kept.tolist()[:8]}")
    return kept.astype(np.intp)
