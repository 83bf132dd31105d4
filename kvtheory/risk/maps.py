"""Feature maps Phi of a head's tokens, and how much of what queries see they hold (Assumption 5.1 of arXiv 2607.01520).

A summary w that is exact on Phi and on the mass, Phi^T (w - p) = 0 and sum w = 1, errs by X^T (w - p) = ((1 - Pi) X)^T (w - p) only, with
X (n, .) the response profiles under the queries that come and Pi the projection of R^n on the columns of [1, Phi]. So what a map holds is

    held = ||Pi X||^2 / ||X||^2,        at best 1 - tail_f / tr Sigma for f columns, about f/n for f random ones.

Every map here is (n, f) for n tokens, P uniform.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.randomness import generator
from kvtheory.risk.gram import centred_gram
from kvtheory.risk.profiles import Kind, density, one_head, value_scale
from kvtheory.risk.spectra import Spectrum

__all__ = [
    "effective_rank",
    "held_energy",
    "kernel_map",
    "keys_pca",
    "linear_map",
    "profile_gram",
    "profile_map",
    "protected_bound",
    "quadratic_map",
    "token_energy",
]

Float = NDArray[np.float64]


def profile_gram(q: ArrayLike, k: ArrayLike, v: ArrayLike, scale: float | None = None, kind: Kind = "centred") -> Float:
    """G_il = <Gamma_i, Gamma_l> in H_nu, (n, n), without the profiles themselves: O(n^2 (m + dv)) operations.

        centred      mean_j b_i b_l (v_i - o).(v_l - o)
        augmented    mean_j (b_i v_i - o).(b_l v_l - o) + c^2 (b_i - 1)(b_l - 1)

    q (m, d), k (n, d), v (n, dv); P uniform; scale, kind as in `response_profiles`. tr Sigma = tr G / n. Rounding is that of n numbers
    of the size of G's largest entry, also where v_i - o cancels.
    """
    if kind not in ("centred", "augmented"):
        raise ValueError(f'kind: expected "centred" or "augmented", got {kind!r}')
    q, k, v, scale = one_head(q, k, v, scale)
    n, m = len(k), len(q)
    if kind == "centred":
        v = _centred(v)  # which the centred profile does not see; v_i - o cancels less without it
    b = density(q, k, scale=scale)
    o = b.T @ v / n
    if kind == "centred":
        return centred_gram(b, v, o)
    c2 = value_scale(v, np.full(n, 1 / n)) ** 2
    cross = (b * (v @ o.T)).sum(axis=1)  # b_i v_i.o
    gram = (b @ b.T) * (v @ v.T) - cross[:, None] - cross + (o**2).sum() + c2 * ((b - 1) @ (b - 1).T)
    return np.asarray(0.5 * (gram + gram.T) / m)


def profile_map(gram: ArrayLike, f: int) -> Float:
    """The f leading eigenvectors of a Gram matrix (n, n) of profiles, such as `profile_gram` under the queries at hand: best for these."""
    g = np.asarray(gram, dtype=np.float64)
    checks.shape("gram", g, ("n", "n"))
    checks.finite("gram", g, ("token", "token"))
    from scipy.linalg import eigh

    return np.asarray(eigh(g, subset_by_index=[max(0, len(g) - _features(f)), len(g) - 1])[1][:, ::-1])


def keys_pca(k: ArrayLike, f: int) -> Float:
    """The f leading principal components of the keys (n, d); all d, where f is more."""
    k = _tokens("k", k)
    return np.asarray(np.linalg.svd(k - k.mean(axis=0), full_matrices=False)[0][:, : _features(f)])


def linear_map(k: ArrayLike, v: ArrayLike, f: int) -> Float:
    """The f leading principal components of (k, v), each part scaled to a mean square of 1 a channel; all d + dv, where f is more."""
    return keys_pca(np.hstack([_scaled("k", k), _scaled("v", v)]), f)


def quadratic_map(k: ArrayLike, v: ArrayLike, f: int) -> Float:
    """The f leading eigenvectors of the kernel (1 + <x_i, x_l>)^2 of x = (k, v), each part scaled to mean ||.||^2 = 1/2: products of two channels."""
    x = np.hstack([y / np.sqrt(2 * y.shape[1]) for y in (_scaled("k", k), _scaled("v", v))])
    return profile_map((1 + x @ x.T) ** 2, f)


def kernel_map(k: ArrayLike, v: ArrayLike, f: int, features: int = 0, size: float = 1.0, seed: int = 0) -> Float:
    """The f leading eigenvectors of E_w[e_w(k_i) e_w(k_l)] <(v_i, c), (v_l, c)>, w ~ N(0, size^2 I / d): the exponential kernel, without Z.

    What isotropic queries of root mean square norm `size` would see if all had the same Z. features = 0: the exact kernel, by
    E_w exp(w.x) = exp(size^2 ||x||^2 / (2 d)), x = scale (k_i + k_l), scale = 1/sqrt(d); otherwise `features` positive random features
    exp(scale w.k) (Choromanski et al., arXiv 2009.14794). Keys and values about their means.
    """
    k, v = _tokens("k", k), _tokens("v", v)
    size, d = checks.positive("size", size), k.shape[1]
    keys, v = _centred(k) / np.sqrt(d), _centred(v)
    values = v @ v.T + value_scale(v, np.full(len(v), 1 / len(v))) ** 2
    if features:
        w = size / np.sqrt(d) * generator(seed, "positive random features").standard_normal((features, d))
        logits = keys @ w.T
        # each w has its own scale, that of its largest logit: a query's Z would take it away
        e = np.exp(logits - logits.max(axis=0))
        kernel = e @ e.T / features
    else:
        norm = (keys**2).sum(axis=1)
        exponent = size**2 / (2 * d) * (norm[:, None] + norm + 2 * keys @ keys.T)
        kernel = np.exp(exponent - exponent.max())
    return profile_map(kernel * values, f)


def held_energy(gram: ArrayLike, features: ArrayLike) -> float:
    """||Pi X||^2 / ||X||^2 in [0, 1] with X X^T = gram (n, n), Pi the projection on the columns of [1, features], features (n, f).

    gram: `profile_gram` under the queries that come. ValueError for a gram of trace 0.
    """
    g, phi = np.asarray(gram, dtype=np.float64), np.asarray(features, dtype=np.float64)
    sizes = checks.shape("gram", g, ("n", "n"))
    checks.shape("features", phi, ("n", "f"), {"n": sizes["n"]})
    checks.finite("gram", g, ("token", "token"))
    checks.finite("features", phi, ("token", "feature"))
    trace = float(np.trace(g))
    if trace <= 0:
        raise ValueError(f"gram: expected a trace above 0, got {trace!r}")
    columns = np.column_stack([np.ones(len(g)), phi])
    columns = columns / np.linalg.norm(columns, axis=0).clip(np.finfo(np.float64).tiny)
    left, singular, _ = np.linalg.svd(columns, full_matrices=False)
    # columns that depend on others hold nothing new, and their direction is rounding
    basis = left[:, singular > 1e-10 * singular[0]]
    return float(np.clip((basis * (g @ basis)).sum() / trace, 0, 1))


def protected_bound(gram: ArrayLike, features: ArrayLike, K: int) -> float:
    """2 (1 - held) tr Sigma / (K - 2f): what the balanced walk that protects the f columns of `features` stays below in mean linear risk.

    `risk.spectral_bound` with Phi in place of the leading directions, by the same proof: exact on Phi and the mass, the walk errs by the
    rows of (1 - Pi) X only, whose mean square is (1 - held) tr Sigma. ValueError unless 2f < K.
    """
    g = np.asarray(gram, dtype=np.float64)
    held, f = held_energy(g, features), np.shape(features)[1]
    if isinstance(K, bool) or not isinstance(K, (int, np.integer)) or 2 * f >= K:
        raise ValueError(f"K: expected an int above 2 f = {2 * f}, got {K!r}")
    return 2 * (1 - held) * float(np.trace(g)) / len(g) / (int(K) - 2 * f)


def token_energy(q: ArrayLike, k: ArrayLike, v: ArrayLike, scale: float | None = None, kind: Kind = "centred") -> Float:
    """||Gamma_i||^2 / n, (n,): what each token adds to tr Sigma; of the centred profile n E_nu a_i^2 ||v_i - o||^2. P uniform."""
    if kind not in ("centred", "augmented"):
        raise ValueError(f'kind: expected "centred" or "augmented", got {kind!r}')
    q, k, v, scale = one_head(q, k, v, scale)
    n = len(k)
    b = density(q, k, scale=scale)
    energy = np.zeros(n)
    c2 = value_scale(v, np.full(n, 1 / n)) ** 2
    for own in b.T:  # one query at a time: v_i - o itself, so that nothing cancels
        o = own @ v / n
        if kind == "centred":
            energy += own**2 * ((v - o) ** 2).sum(axis=1)
        else:
            energy += ((own[:, None] * v - o) ** 2).sum(axis=1) + c2 * (own - 1) ** 2
    return np.asarray(energy / (n * len(q)))


def effective_rank(spectrum: Spectrum) -> float:
    """(tr Sigma)^2 / sum lambda^2, between 1 and the rank: how many equal directions would have this trace and this sum of squares.

    ValueError for an incomplete spectrum and for a trace of 0.
    """
    if not spectrum.complete:
        raise ValueError("spectrum: expected all eigenvalues (rank None)")
    squares = float((spectrum.eigenvalues**2).sum())
    if squares <= 0:
        raise ValueError("spectrum: expected a trace above 0, got 0")
    return float(spectrum.eigenvalues.sum()) ** 2 / squares


def _centred(x: Float) -> Float:
    return np.asarray(x - x.mean(axis=0))


def _scaled(name: str, x: ArrayLike) -> Float:
    about = _centred(_tokens(name, x))
    return np.asarray(about / (np.sqrt((about**2).mean()) or 1.0))


def _tokens(name: str, x: ArrayLike) -> Float:
    array = np.asarray(x, dtype=np.float64)
    checks.shape(name, array, ("n", "d"))
    checks.finite(name, array, ("token", "channel"))
    if array.size == 0:
        raise ValueError(f"{name}: expected at least one token of one channel, got shape {array.shape}")
    return array


def _features(f: int) -> int:
    if isinstance(f, bool) or not isinstance(f, (int, np.integer)) or f < 1:
        raise ValueError(f"f: expected an int >= 1, got {f!r}")
    return int(f)
