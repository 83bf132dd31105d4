"""What the spectrum of a cache promises about K kept tokens, and the rate that arXiv 2607.01520 states."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from kvtheory.risk.profiles import density, one_head
from kvtheory.risk.spectra import Spectrum


def trace_bound(spectrum: Spectrum, K: int, replace: bool = True) -> float:
    """E || int Gamma dPhat ||^2 of random sampling: an equality for the linear risk.

    replace=True: K independent draws from P, weights 1/K:          tr Sigma / K
    replace=False: K of n tokens without replacement, P uniform:    (tr Sigma / K) (n - K) / (n - 1)

    ValueError for K < 1 and, without replacement, for K > n.
    """
    K = budget(K)
    if replace:
        return spectrum.trace / K
    if spectrum.n < K:
        raise ValueError(f"K: expected at most n = {spectrum.n} without replacement, got {K}")
    return spectrum.trace / K * ((spectrum.n - K) / max(spectrum.n - 1, 1))


def spectral_bound(spectrum: Spectrum, K: int, m: int | None = None, window: int | None = None) -> float:
    """2 tail_m / (K - 2m): what the balanced walk with m protected directions stays below in mean linear risk (proved in `balancing.spectral`).

    m None: the best m among those with 2m < K whose tail is known. ValueError unless 0 <= 2m < K.

    window s, m + 1 < s <= K + 1: the same walk moving s coordinates at a time, for which the same proof gives

        s / (s - m - 1)  tail_m / (K - s + 2),        s = 2 (m + 1) being the formula above, and s = m + 2 `cube_bound`.

    Over real s it is least at s^2 = (m + 1)(K + 2), where it is tail_m / (sqrt(K + 2) - sqrt(m + 1))^2: never above the formula above,
    and tail_m / K (1 + o(1)) for m << K. `spectral_window` gives the best whole s. A window needs an m. ValueError for what does not fit.
    """
    K = budget(K)
    if m is None:
        if window is not None:
            raise ValueError(f"m: expected an int where a window is given, got None and window = {window!r}")
        last = (K - 1) // 2 if spectrum.complete else min((K - 1) // 2, len(spectrum.eigenvalues))
        return min(spectral_bound(spectrum, K, m) for m in range(last + 1))
    if window is not None:
        m = _protected(m, K)
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or not m + 1 < window <= K + 1:
            raise ValueError(
                f"window: expected an int with m + 1 = {m + 1} < window <= K + 1 = {K + 1}, got {window!r}"
            )
        return int(window) / (int(window) - m - 1) * spectrum.tail(m) / (K - int(window) + 2)
    if isinstance(m, bool) or not isinstance(m, (int, np.integer)) or not 0 <= 2 * m < K:
        raise ValueError(f"m: expected an int with 0 <= 2 m < K = {K}, got {m!r}")
    return 2 * spectrum.tail(int(m)) / (K - 2 * int(m))


def spectral_window(K: int, m: int) -> int:
    """The whole s, m + 1 < s <= K + 1, least in s / ((s - m - 1)(K - s + 2)): the window of the lowest `spectral_bound`. 0 <= m < K."""
    K = budget(K)
    m = _protected(m, K)
    # one minimum, at sqrt((m + 1)(K + 2)): the whole numbers beside it
    near = math.isqrt((m + 1) * (K + 2))
    return min(
        (s for s in (near, near + 1) if m + 1 < s <= K + 1), key=lambda s: Fraction(s, (s - m - 1) * (K - s + 2))
    )


def cube_bound(spectrum: Spectrum, K: int, m: int) -> float:
    """(m + 2) tail_m / (K - m): what the plain cube walk with m protected directions stays below in mean linear risk (proved).

    The constant m + 2 is attained against sum r_i^2 pi_i (1 - pi_i) / K'^2, K' = K - m (`coherent_block`), so this is no rate
    tail_m / K. ValueError unless 0 <= m < K.
    """
    K = budget(K)
    m = _protected(m, K)
    return (m + 2) * spectrum.tail(m) / (K - m)


def paper_bound(spectrum: Spectrum, K: int) -> float:
    """tail_{K/3} / K (K/3 rounded down): the query-aware rate as the paper states it, constant 1. A rate, not a proved bound."""
    K = budget(K)
    return spectrum.tail(K // 3) / K


def safe_bound(q: ArrayLike, k: ArrayLike, v: ArrayLike, K: int, scale: float | None = None) -> float:
    """4 B^2 rho / K, rho = E_nu [n sum_i a_i^2], B = max ||v_i - mean v||: bounds the TRUE mean risk of random sampling (proved).

    For K draws with or without replacement, P uniform. No assumption on the cache. Loose where attention is a look-up or
    spread out evenly; 0.826 of it is reached at n = 10^4 (`faint_needle`), more is not proved here; `augmented_bound` is never above it.
    q (m, d), k (n, d), v (n, dv). Self-normalised importance sampling: Agapiou et al., Statist. Sci. 32 (2017), theorem 2.1.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    b = density(q, k, scale=scale)
    rho = float((b**2).mean(axis=0).mean())  # n sum a^2 = (1/n) sum b^2
    radius2 = float(((v - v.mean(axis=0)) ** 2).sum(axis=1).max())
    return 4 * radius2 * rho / budget(K)


def augmented_bound(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, K: int, scale: float | None = None, replace: bool = True
) -> float:
    """2 tr Sigma+ / K for the augmented profile of v - mean v with c = B: bounds the TRUE mean risk of random sampling (proved).

        tr Sigma+ = E_nu [ sum_i b_i^2 ||u_i||^2 / n - ||sum_i a_i u_i||^2 + B^2 (rho - 1) ],     u_i = v_i - mean v,  B = max ||u_i||

    b = n a, rho = sum_i b_i^2 / n. replace=False: times (n - K)/(n - 1), K of n tokens without replacement. P uniform.

    Proof. With N = int b u dPhat - A_P and D = Z_Phat/Z_P - 1, for u in place of v (the error is the same): A_Phat (1 + D) = N + A_P,
    so A_Phat - A_P = N - A_Phat D, and ||A_Phat|| <= B gives ||A_Phat - A_P||^2 <= 2 (||N||^2 + B^2 D^2) = 2 ||int Gamma+ dPhat||^2,
    whose mean over the draws is 2 tr Sigma+ / K (`trace_bound`). As ||u_i|| <= B, never above `safe_bound`. 1.92 of the 2
    is reached at n = 20 (`dissenter`), 1.96 at n = 50; that it tends to 2 is a numerical trend, not proved. A smaller c, such as the root mean square of `response_profiles`, gives no bound with constant 1, nor does c = B.

    q (m, d), k (n, d), v (n, dv). ValueError for K < 1 and, without replacement, for K > n.
    """
    q, k, v, scale = one_head(q, k, v, scale)
    n, K = len(k), budget(K)
    if not replace and n < K:
        raise ValueError(f"K: expected at most n = {n} without replacement, got {K}")
    b = density(q, k, scale=scale)
    u = v - v.mean(axis=0)
    norm2 = (u**2).sum(axis=1)
    output = b.T @ u / n
    trace = (b**2).T @ norm2 / n - (output**2).sum(axis=1) + norm2.max() * ((b**2).mean(axis=0) - 1)
    return 2 * float(trace.mean()) / K * (1.0 if replace else (n - K) / max(n - 1, 1))


def search_floor(n: int, K: int, mass: float = 0.5) -> float:
    """mass^2 (1 - K/n): no K of the cache's own tokens, however weighted, do better on `lookup(n, mass)` (proved).

    The output of a summary without token j has no component along v_j (values orthonormal), and the true one has `mass`. Tokens
    made up for the purpose do better (`any_atoms_floor`). ValueError unless 1 <= K <= n and 0 < mass < 1. A Fraction gives a Fraction.
    """
    if budget(K) > n:
        raise ValueError(f"K: expected at most n = {n}, got {K}")
    if not 0 < mass < 1:
        raise ValueError(f"mass: expected a number between 0 and 1, got {mass}")
    return mass**2 * (n - K) / n


def budget(K: int) -> int:
    """K if it is an int >= 1; ValueError if not."""
    if isinstance(K, bool) or not isinstance(K, (int, np.integer)) or K < 1:
        raise ValueError(f"K: expected an int >= 1, got {K!r}")
    return int(K)


def _protected(m: int, K: int) -> int:
    if isinstance(m, bool) or not isinstance(m, (int, np.integer)) or not 0 <= m < K:
        raise ValueError(f"m: expected an int with 0 <= m < K = {K}, got {m!r}")
    return int(m)
