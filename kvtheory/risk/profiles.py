"""Response profiles (arXiv 2607.01520 has one; which of these two could not be established), and the risk of a summary: exact, and linearised.

For one query q and P = sum_i p_i delta_(k_i, v_i), with e_q(k) = exp(scale q.k), Z_P(q) = int e_q dP, A_P(q) = int e_q v dP / Z_P(q):

    b_i(q)      = e_q(k_i) / Z_P(q) = a_i(q) / p_i,         a = softmax(scale k q + ln p)
    Gamma_i(q)  = b_i(q) (v_i - A_P(q))                      centred
    Gamma+_i(q) = (b_i(q) v_i - A_P(q),  c (b_i(q) - 1))     augmented; c a value-norm scale

Both have barycentre 0: sum_i p_i Gamma_i = 0. The error identity: for any weights w >= 0 of sum 1 on atoms of P, exactly,

    A_Phat(q) - A_P(q) = sum_i w_i Gamma_i(q) / sum_i w_i b_i(q),        sum_i w_i b_i(q) = Z_Phat(q) / Z_P(q).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.namespaces import host, namespace

Float = NDArray[np.float64]
Kind = Literal["centred", "augmented"]


def probabilities(weights: ArrayLike | None, n: int, xp: Any = np) -> Float:
    """P's probabilities p (n,): uniform for None; ValueError unless all are above 0 and they sum to 1 within 1e-9. In namespace `xp`."""
    if weights is None:
        return xp.full(n, 1 / n)
    p = np.asarray(host(weights), dtype=np.float64)
    checks.shape("weights", p, ("n",), {"n": n})
    checks.finite("weights", p, ("token",))
    if (p <= 0).any():
        i = int(np.argmax(p <= 0))
        raise ValueError(
            f"weights: expected probabilities above 0 (drop tokens of probability 0), got {p[i]} for token {i}"
        )
    if abs(p.sum() - 1) > 1e-9:
        raise ValueError(f"weights: expected probabilities that sum to 1, got a sum of {p.sum()!r}")
    return xp.asarray(p / p.sum())


def one_head(q: ArrayLike, k: ArrayLike, v: ArrayLike | None, scale: float | None) -> tuple[Float, Float, Float, float]:
    """q (m, d), k (n, d), v (n, dv) in float64 and the logit scale (default 1/sqrt(d)); refuses misfits, NaN, inf, emptiness."""
    xp: Any = namespace(q, k, v)
    q64: Float = xp.asarray(q, dtype=np.float64)
    k64: Float = xp.asarray(k, dtype=np.float64)
    v64: Float = xp.zeros((len(k64), 1)) if v is None else xp.asarray(v, dtype=np.float64)
    sizes = checks.shape("q", q64, ("m", "d"))
    sizes |= checks.shape("k", k64, ("n", "d"), sizes)
    sizes |= checks.shape("v", v64, ("n", "dv"), sizes)
    for name, axis in (("q", "m"), ("k", "n"), ("v", "dv"), ("q", "d")):
        if sizes[axis] == 0:
            raise ValueError(f"{name}: expected {axis} >= 1, got 0")
    for name, array, axes in (
        ("q", q64, ("query", "channel")),
        ("k", k64, ("token", "channel")),
        ("v", v64, ("token", "channel")),
    ):
        checks.finite(name, array, axes)
    return q64, k64, v64, sizes["d"] ** -0.5 if scale is None else checks.positive("scale", scale)


def log_mass(q: Float, k: Float, p: Float, scale: float, block: int = 1 << 22) -> Float:
    """ln Z_P(q_j) = ln sum_i p_i exp(scale q_j.k_i), (m,), in blocks of tokens, shifted by the running maximum: no overflow."""
    xp = namespace(q)
    top, total = xp.full(len(q), -np.inf), xp.zeros(len(q))
    step = max(1, block // len(q))
    for start in range(0, len(k), step):
        z = scale * (k[start : start + step] @ q.T) + xp.log(p[start : start + step, None])
        new = xp.maximum(top, z.max(axis=0))
        total = total * xp.exp(top - new) + xp.exp(z - new).sum(axis=0)
        top = new
    return top + xp.log(total)


def density(q: ArrayLike, k: ArrayLike, weights: ArrayLike | None = None, scale: float | None = None) -> Float:
    """b_i(q_j) = e_q(k_i) / Z_P(q) = a_i / p_i, (n, m): the likelihood ratio of attention against P; sum_i p_i b_i(q) = 1.

    q (m, d), k (n, d); weights: P's probabilities (n,), default uniform (then b = n a). scale: default 1/sqrt(d).
    """
    q, k, _, scale = one_head(q, k, None, scale)
    xp = namespace(q)
    p = probabilities(weights, len(k), xp)
    return xp.exp(scale * (k @ q.T) - log_mass(q, k, p, scale))


def value_scale(v: Float, p: Float) -> float:
    """c of the augmented profile: sqrt(sum_i p_i ||v_i||^2), so that numerator and denominator count alike; 1 where all v are 0."""
    return float(np.sqrt(float(p @ (v**2).sum(axis=1)))) or 1.0


def response_profiles(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weights: ArrayLike | None = None,
    scale: float | None = None,
    kind: Kind = "centred",
) -> Float:
    """Gamma_i(q_j), (n, m, dv) for kind="centred", or Gamma+_i(q_j), (n, m, dv + 1) for kind="augmented".

    q (m, d): a sample of the query law nu, each query with probability 1/m; k (n, d), v (n, dv); weights (n,): P's probabilities,
    default uniform; scale: default 1/sqrt(d). The augmented profile's last channel is c (b - 1), c = sqrt(sum_i p_i ||v_i||^2).

    Entries are the functions' values at q_j, with no factor of m: sum_i w_i Gamma_i is (Z_Phat/Z_P) (A_Phat - A_P) as it stands.
    The 1/m belongs to the inner product of H_nu = L^2(nu): <Gamma, Gamma'> = (1/m) sum_jc Gamma_jc Gamma'_jc, and enters in
    `linear_risk` and `spectrum`.
    """
    if kind not in ("centred", "augmented"):
        raise ValueError(f'kind: expected "centred" or "augmented", got {kind!r}')
    q, k, v, scale = one_head(q, k, v, scale)
    xp = namespace(q)
    p = probabilities(weights, len(k), xp)
    return profile_block(xp.exp(scale * (k @ q.T) - log_mass(q, k, p, scale)), v, *means(q, k, v, p, scale), kind)


def means(q: Float, k: Float, v: Float, p: Float, scale: float, block: int = 1 << 22) -> tuple[Float, float]:
    """A_P(q_j) (m, dv) and the value scale c, in blocks of tokens."""
    log_z = log_mass(q, k, p, scale)
    xp = namespace(q)
    out = xp.zeros((len(q), v.shape[1]))
    step = max(1, block // len(q))
    for start in range(0, len(k), step):
        part = slice(start, start + step)
        out += (p[part] * xp.exp(scale * (q @ k[part].T) - log_z[:, None])) @ v[part]
    return out, value_scale(v, p)


def profile_block(b: Float, v: Float, o: Float, c: float, kind: Kind) -> Float:
    """Profiles of the tokens whose densities b (n, m) and values v (n, dv) are given; o = A_P (m, dv), c the value scale."""
    if kind == "centred":
        return b[:, :, None] * (v[:, None, :] - o)
    out = namespace(b).empty((*b.shape, v.shape[1] + 1))
    out[..., :-1] = b[:, :, None] * v[:, None, :] - o
    out[..., -1] = c * (b - 1)
    return out


def summary(index: ArrayLike, weight: ArrayLike, n: int) -> tuple[NDArray[np.intp], Float]:
    """The atoms (index, weight) of a summary of n tokens, checked: integers in range, weights >= 0 that sum to 1 within 1e-6."""
    raw = np.asarray(index)
    if raw.dtype.kind not in "iu":
        raise TypeError(f"index: expected integers, got {raw.dtype}")
    sizes = checks.shape("index", raw, ("kept",))
    w = np.asarray(weight, dtype=np.float64)
    checks.shape("weight", w, ("kept",), sizes)
    checks.finite("weight", w, ("atom",))
    if raw.size == 0:
        raise ValueError("index: expected at least one kept token, got none")
    if raw.min() < 0 or raw.max() >= n:
        raise ValueError(f"index: expected tokens in 0..{n - 1}, got {raw.min()}..{raw.max()}")
    if (w < 0).any() or abs(w.sum() - 1) > 1e-6:
        raise ValueError(
            f"weight: expected numbers >= 0 that sum to 1, got a minimum of {w.min()!r} and a sum of {w.sum()!r}"
        )
    return raw.astype(np.intp), w / w.sum()


def attention_risk(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    index: ArrayLike,
    weight: ArrayLike,
    scale: float | None = None,
    *,
    weights: ArrayLike | None = None,
) -> float:
    """r(Phat) = mean over queries of ||A_Phat(q) - A_P(q)||^2, exact (softmax on both sides, nothing linearised).

    q (m, d), k (n, d), v (n, dv). Phat has weight[s] on token index[s]: index (kept,) integers, weight (kept,) >= 0 of sum 1;
    a token may recur. weights: P's probabilities, default uniform. ValueError or TypeError for what does not fit.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    p = probabilities(weights, len(k))
    kept, w = summary(index, weight, len(k))
    kept, w = kept[w > 0], w[w > 0]
    difference = means(q, k[kept], v[kept], w, scale)[0] - means(q, k, v, p, scale)[0]
    return float((difference**2).sum(axis=1).mean())


def linear_risk(profiles: ArrayLike, index: ArrayLike, weight: ArrayLike) -> float:
    """|| int Gamma dPhat ||^2 in H_nu = (1/m) sum_jc (sum_s weight[s] profiles[index[s], j, c])^2: the risk where Z_Phat = Z_P.

    profiles (n, m, c) as `response_profiles` gives them; index, weight as in `attention_risk`.
    """
    gamma = np.asarray(profiles, dtype=np.float64)
    checks.shape("profiles", gamma, ("n", "m", "c"))
    kept, w = summary(index, weight, len(gamma))
    return float((np.tensordot(w, gamma[kept], axes=1) ** 2).sum(axis=1).mean())
