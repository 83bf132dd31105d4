"""The token's side of the distortion: the factor a_i^2 ||v_i W_O - o||^2 of the key term, and what removing tokens costs.

With A_E = sum_{i in E} a_i the attention of the removed set E, o_E and o' the outputs of the removed and of the kept tokens alone,

    do = o' - o = A_E (o' - o_E) = -sum_{i in E} a_i (v_i W_O - o) / (1 - A_E)                                     (exact)

For one token a_j / (1 - a_j) ||v_j W_O - o||, the score of CAOTE (arXiv 2504.14051); the sum of token factors over E leaves out
the cross terms and 1 - A_E, and is right for a few tokens of little attention each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention, checks
from kvtheory.distortion import head

__all__ = ["eviction_error", "eviction_surrogate", "single_eviction_error", "token_factor"]

Float = NDArray[np.float64]


def token_factor(q: Any, k: Any, v: Any, w_o: Any, scale: float | None = None, *, visible: Any = None) -> Float:
    """a_i^2 ||v_i W_O - o||^2 of every query and token, (m, n): squared length of do/dz_i.

    One head: q (m, d), k (n, d), v (n, dv), w_o (dv, D). scale: default 1/sqrt(d). visible (m, n): which tokens each query sees,
    default all; 0 for the others. arXiv 2608.14191, Theorem 1: times the logit's variance and summed over i it is D_K.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    a, _ = head.weights(q, k, scale, visible)
    out = np.empty(a.shape)
    for block, u in head.deviations(a, v, w_o):
        out[block] = a[block] ** 2 * head.squares(u)
    return out


def eviction_error(
    q: Any, k: Any, v: Any, w_o: Any, removed: Any, scale: float | None = None, *, visible: Any = None
) -> Float:
    """||do||^2 of each query, (m,), exact: (A_E ||o' - o_E||)^2, E the removed tokens.

    One head as in `token_factor`. removed (n,) bool, or (m, n), one set a query. Both outputs are weighted means over their own set,
    so that neither a small A_E nor a small 1 - A_E costs digits. ValueError where a query sees no token that is kept.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    z, _ = head.logits(q, k, scale, visible)
    gone = _removed(removed, z)
    kept = ~gone & np.isfinite(z)
    if not kept.any(axis=1).all():
        raise ValueError(
            f"removed: expected every query to keep a token, query {int(np.argmin(kept.any(axis=1)))} keeps none"
        )
    a = attention.softmax(z)
    touched = (gone & np.isfinite(z)).any(axis=1)  # the others lose nothing
    out = np.zeros(len(q))
    if touched.any():
        vw = head.in_coordinates(v, w_o)
        kept_mean, removed_mean = (
            attention.softmax(np.where(part[touched], z[touched], -np.inf)) @ vw for part in (kept, gone)
        )
        mass = np.where(gone, a, 0.0).sum(axis=1)[touched]
        out[touched] = mass**2 * head.squares(kept_mean - removed_mean)
    return out


def single_eviction_error(
    q: Any, k: Any, v: Any, w_o: Any, scale: float | None = None, *, visible: Any = None
) -> Float:
    """||do||^2 of removing token j alone, for every query and token, (m, n): (a_j / (1 - a_j) ||v_j W_O - o||)^2, exact.

    One head as in `token_factor`. 0 for tokens that a query does not see, inf for the only one that it does. CAOTE's score, squared.
    """
    q, k, v, w_o = head.checked(q, k, v, w_o)
    z, _ = head.logits(q, k, scale, visible)
    a = attention.softmax(z)
    rows, top = np.arange(len(a)), a.argmax(axis=1)
    rest = 1 - a  # to rounding for all but the heaviest token, whose rest may be tiny and is summed
    rest[rows, top] = 1.0
    out = np.empty(a.shape)
    for block, u in head.deviations(a, v, w_o):
        out[block] = (a / rest)[block] ** 2 * head.squares(u)
    alone = np.isfinite(z).sum(axis=1) == 1
    heaviest = np.zeros(a.shape, dtype=bool)
    heaviest[rows, top] = True
    several = np.flatnonzero(~alone)
    if several.size:
        error = eviction_error(
            q[several], k, v, w_o, heaviest[several], scale,
            visible=None if visible is None else np.asarray(visible, dtype=bool)[several],
        )  # fmt: skip
        out[several, top[several]] = error
    out[alone, top[alone]] = np.inf
    return out


def eviction_surrogate(
    q: Any, k: Any, v: Any, w_o: Any, removed: Any, scale: float | None = None, *, visible: Any = None
) -> Float:
    """sum over removed tokens of a_i^2 ||v_i W_O - o||^2, (m,): `eviction_error` without its cross terms and without 1/(1 - A_E)^2.

    Arguments as there. Neither an upper nor a lower bound: for equal v_i the true error grows as the square of their number.
    """
    factor = token_factor(q, k, v, w_o, scale, visible=visible)
    return np.where(_removed(removed, factor), factor, 0.0).sum(axis=1)


def _removed(removed: Any, like: Float) -> NDArray[np.bool_]:
    mask = np.asarray(removed)
    if mask.dtype != np.bool_:
        raise TypeError(f"removed: expected booleans, got {mask.dtype}")
    sizes = {"m": like.shape[0], "n": like.shape[1]}
    checks.shape("removed", mask, ("n",) if mask.ndim == 1 else ("m", "n"), sizes)
    return np.broadcast_to(mask, like.shape)
