"""Choosing K weighted tokens whose mean response profile is that of all n: samplers.

Every method keeps tokens of P only, with weights of sum 1, and is unbiased: E sum_s weight_s delta_(index_s) = P.

    iid       K draws from P; a token drawn c times has weight c/K
    srs       K of n without replacement, weight 1/K (P uniform)
    cube      Deville-Tille walk: the `protect` leading directions kept exactly
    spectral  the walk whose error is at most 2 tail_m / (K - 2m), m = protect
    halving   pairs merged until K tokens are left, signs balanced against the error so far
    cluster   K groups in profile space, one random member of each with the group's mass
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.balancing import clusters, halving, walks
from kvtheory.randomness import generator
from kvtheory.risk.profiles import probabilities

__all__ = ["METHODS", "sample"]

Method = Literal["iid", "srs", "cube", "spectral", "halving", "cluster"]

METHODS: tuple[str, ...] = ("iid", "srs", "cube", "spectral", "halving", "cluster")


def sample(
    profiles: ArrayLike,
    K: int,
    method: Method = "spectral",
    protect: int = 0,
    seed: int = 0,
    *,
    weights: ArrayLike | None = None,
    derandomise: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(index, weight): at most K of n tokens, index ascending without repeats, weight > 0 of sum 1 (up to rounding).

    profiles (n, ...): one profile a token, flattened; their scale does not matter. protect = m: leading eigendirections of
    sum_i p_i x_i x_i^T in which "cube" and "spectral" make no error (fewer if the profiles have a smaller rank); for "cluster"
    the number of leading directions in which distances are taken (0: all of them); no effect on the others.
    Budget: the weights of "cube" are those of K - m tokens, of "spectral" of K - 2m tokens, and m or 2m more keep fractions.
    weights (n,): P's probabilities, default uniform; "srs" takes only the default. derandomise ("spectral" only): take the
    better end of each step; sum r_i^2 pi_i (1 - pi_i) then bounds the error surely, and unbiasedness is lost.
    K >= n gives P itself. iid, srs, halving cost O(n size), cube and spectral O(n (m^3 + m size)), size = profile entries.

    ValueError for unknown methods, K < 1, negative `protect`, or a budget too small for it (cube K > m, spectral K > 2m).
    """
    x = np.asarray(profiles, dtype=np.float64)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"profiles: expected shape (n, ...) with at least one token and one entry, got {x.shape}")
    x = x.reshape(len(x), -1)
    checks.finite("profiles", x, ("token", "entry"))
    n = len(x)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    for name, value, least in (("K", K, 1), ("protect", protect, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")
    need = {"cube": protect, "spectral": 2 * protect}.get(method, 0)
    if need >= K:
        raise ValueError(f'K: method "{method}" with protect = {protect} expects K > {need}, got {K}')
    if derandomise and method != "spectral":
        raise ValueError(f'derandomise: only method "spectral" has it, got method {method!r}')
    p = probabilities(weights, n)
    if method == "srs" and np.ptp(p) > 1e-12:
        raise ValueError('weights: method "srs" expects uniform probabilities (None)')
    rng = generator(seed, f"balancing {method}")

    if method == "iid":  # n draws of n tokens are still a sample, not P
        weight = rng.multinomial(int(K), p) / K
    elif n <= K:
        weight = p
    elif method == "srs":
        weight = np.zeros(n)
        weight[rng.choice(n, int(K), replace=False, shuffle=False)] = 1 / K
    elif method == "halving":
        weight = halving.halve(x, p, int(K), rng)
    elif method == "cluster":
        weight = clusters.stratify(x, p, int(K), int(protect), rng)
    else:
        weight = walks.balance(x, p, int(K), int(protect), method, lambda up: bool(rng.random() < up), derandomise)
    index = np.flatnonzero(weight > 0)
    return index.astype(np.int64), weight[index] / weight[index].sum()
