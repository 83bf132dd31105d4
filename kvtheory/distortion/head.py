"""One head seen from its queries: checked arrays, attention weights and the deviations v_i W_O - o, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention, checks

__all__ = ["checked", "deviations", "in_coordinates", "logits", "noise", "squares", "weights"]

Float = NDArray[np.float64]

#: numbers of one block of deviations v_i W_O - o
BLOCK_ELEMENTS = 1 << 21


def checked(q: Any, k: Any, v: Any, w_o: Any) -> tuple[Float, Float, Float, Float]:
    """q (m, d), k (n, d), v (n, dv), w_o (dv, D) as float64. ValueError for shapes that do not fit, d = 0, NaN or inf."""
    q, k, v, w_o = (np.asarray(x, dtype=np.float64) for x in (q, k, v, w_o))
    sizes = checks.shape("q", q, ("m", "d"))
    if sizes["d"] == 0:
        raise ValueError("q: expected d >= 1 channels, got 0")
    sizes |= checks.shape("k", k, ("n", "d"), sizes)
    sizes |= checks.shape("v", v, ("n", "dv"), sizes)
    checks.shape("w_o", w_o, ("dv", "D"), sizes)
    for name, array in (("q", q), ("k", k), ("v", v), ("w_o", w_o)):
        checks.finite(name, array)
    return q, k, v, w_o


def noise(variance: Any, noisy: Float, channels: str = "d") -> Float:
    """Noise variances of the shape of `noisy`, keys (n, d) or values (n, dv). ValueError unless finite and >= 0."""
    sigma2 = np.asarray(variance, dtype=np.float64)
    checks.shape("variance", sigma2, ("n", channels), {"n": noisy.shape[0], channels: noisy.shape[1]})
    checks.finite("variance", sigma2)
    if (sigma2 < 0).any():
        raise ValueError(f"variance: expected numbers >= 0, got {sigma2.min()}")
    return sigma2


def logits(q: Float, k: Float, scale: float | None, visible: Any) -> tuple[Float, float]:
    """(z (m, n), scale): -inf where a token is not visible. ValueError where a query sees no token."""
    scale = q.shape[1] ** -0.5 if scale is None else checks.positive("scale", scale)
    if visible is not None:
        visible = np.asarray(visible, dtype=bool)
        checks.shape("visible", visible, ("m", "n"), {"m": len(q), "n": len(k)})
        if not visible.any(axis=1).all():
            raise ValueError(
                f"visible: expected every query to see a token, query {int(np.argmin(visible.any(axis=1)))} sees none"
            )
    elif len(k) == 0:
        raise ValueError("k: expected at least one token, got none")
    return attention.logits(q, k, scale, visible=visible), scale


def weights(q: Float, k: Float, scale: float | None, visible: Any) -> tuple[Float, float]:
    """(a = softmax(z) (m, n), scale)."""
    z, scale = logits(q, k, scale, visible)
    return attention.softmax(z), scale


def in_coordinates(v: Float, w_o: Float) -> Float:
    """Values after W_O up to one common shift, in coordinates that keep lengths: (n, min(dv, D)).

    w_o^T = Q R, so ||x W_O|| = ||x R^T||. Relative to their mean, so that what varies beside a large common offset keeps its digits.
    """
    return (v - v.mean(axis=0)) @ np.asarray(np.linalg.qr(w_o.T, mode="r")).T


def deviations(a: Float, v: Float, w_o: Float) -> Iterator[tuple[slice, Float]]:
    """Blocks of queries with u_i = v_i W_O - o in coordinates that keep lengths: (queries of the block, n, min(dv, D)).

    Values are taken relative to that of the query's heaviest token: with a_max near 1 its own u_i is of size 1 - a_max, which
    ||v||^2 - 2 v.o + ||o||^2 would lose to cancellation.
    """
    vw = in_coordinates(v, w_o)
    step = max(1, BLOCK_ELEMENTS // max(1, vw.size))
    for start in range(0, len(a), step):
        block = slice(start, start + step)
        heaviest = vw[a[block].argmax(axis=1)]
        u = vw[None, :, :] - heaviest[:, None, :]
        u -= a[block, None, :] @ u
        yield block, u


def squares(u: Float) -> Float:
    """||u_i||^2 along the last axis."""
    return np.einsum("...r,...r->...", u, u)
