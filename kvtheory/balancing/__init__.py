"""Choosing K weighted tokens whose mean response profile is that of all n: samplers.

Every method keeps tokens of P only, with weights of sum 1, and is unbiased: E sum_s weight_s delta_(index_s) = P.

    iid         K draws from P; a token drawn c times has weight c/K
    srs         K of n without replacement, weight 1/K (P uniform)
    stratified  one draw from each of K strata of mass 1/K, runs of tokens in their order or in a k-d order of `protect` directions
    cube        Deville-Tille walk: the `protect` leading directions kept exactly
    spectral    the walk whose error is at most 2 tail_m / (K - 2m), m = protect
    halving     pairs merged until K tokens are left, signs balanced against the error so far
    cluster     K groups in profile space, one random member of each with the group's mass

A long cache's profiles do not fit into memory: give coordinates of them instead (`risk.profile_features`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.balancing import clusters, halving, strata, walks
from kvtheory.randomness import generator
from kvtheory.risk.profiles import probabilities

__all__ = ["METHODS", "sample"]

Method = Literal["iid", "srs", "stratified", "cube", "spectral", "halving", "cluster"]

METHODS: tuple[str, ...] = ("iid", "srs", "stratified", "cube", "spectral", "halving", "cluster")
_WALKS = ("cube", "spectral")
#: the share of P in probability="norm": no weight is above 10 p_i / pi_i of P's own, and the proved bound rises by at most 1/0.9
_FLOOR = 0.1


def sample(
    profiles: ArrayLike,
    K: int,
    method: Method = "spectral",
    protect: int = 0,
    seed: int = 0,
    *,
    weights: ArrayLike | None = None,
    derandomise: bool = False,
    probability: Literal["equal", "norm"] | ArrayLike = "equal",
    window: int | None = None,
    missing: ArrayLike | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(index, weight): at most K of n tokens, index ascending without repeats, weight > 0 of sum 1 (up to rounding).

    profiles (n, ...): one profile a token, flattened; their scale does not matter. protect = m: leading eigendirections of
    sum_i p_i x_i x_i^T in which "cube" and "spectral" make no error (fewer if the profiles have a smaller rank); for "cluster"
    the number of leading directions in which distances are taken (0: all of them), for "stratified" in which tokens are ordered (0:
    the order given); no effect on the others.
    Budget: the weights of "cube" are those of K - m tokens, of "spectral" of K - 2m tokens, and m or 2m more keep fractions.
    weights (n,): P's probabilities, default uniform; "srs" takes only the default. K >= n gives P itself ("iid": a sample still).

    Of the walks only:
    probability: inclusion is proportional to p_i ("equal"), to p_i (0.1 + 0.9 ||x_i|| / sum_j p_j ||x_j||) ("norm"), or to an array
    (n,) of positive numbers. Other than "equal" needs one constraint more, so that K - m - 1 or K - 2m - 2 tokens' weights are left.
    derandomise ("spectral"): take the better end of each step; its bound then holds surely, and unbiasedness is lost.
    window ("spectral"): coordinates moved at a time, s > m + 1 (default 2 (m + 1)): constant s / (s - m - 1), K - s + 2 tokens.
    missing ("spectral") (n,): for profiles that are coordinates in some directions only, the square of what each lacks. Then "error"
    in the bound is that within these directions, and r_i^2 that of the whole profile.

    Cost, size = profile entries: iid, srs, halving O(n size), stratified O(n (size + log K)), cluster O(n size min(K, 512)), cube
    O(n m (m + size)), spectral O(n s (s + size)), and O(n size min(n, size)) for the m directions; memory O(n (m + size)).

    ValueError for unknown methods, K < 1, negative `protect`, a budget too small for it (cube K > m, spectral K > 2m), a window that
    fits neither, and options of other methods.
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
    uneven = not (isinstance(probability, str) and probability == "equal")
    for name, given, allowed in (
        ("derandomise", derandomise, ("spectral",)),
        ("window", window is not None, ("spectral",)),
        ("missing", missing is not None, ("spectral",)),
        ("probability", uneven, _WALKS),
    ):
        if given and method not in allowed:
            raise ValueError(f"{name}: only {' and '.join(allowed)} can, got method {method!r}")
    least = int(protect) + uneven
    need = {"cube": least, "spectral": 2 * least if window is None else 0}.get(method, 0)
    if need >= K:
        raise ValueError(f'K: method "{method}" with protect = {protect} expects K > {need}, got {K}')
    if window is not None and (isinstance(window, bool) or not isinstance(window, (int, np.integer))):
        raise ValueError(f"window: expected an int or None, got {window!r}")
    if window is not None and not least + 1 < window <= K + 1:
        raise ValueError(f"window: expected {least + 1} < window <= K + 1 = {K + 1}, got {window}")
    p = probabilities(weights, n)
    if method == "srs" and np.ptp(p) > 1e-12:
        raise ValueError('weights: method "srs" expects uniform probabilities (None)')
    inclusion = _inclusion(probability, x, p) if uneven else None
    lacking = None if missing is None else _missing(missing, n)
    rng = generator(seed, f"balancing {method}")

    if method == "iid":  # n draws of n tokens are still a sample, not P
        weight = rng.multinomial(int(K), p) / K
    elif n <= K:
        weight = p
    elif method == "srs":
        weight = np.zeros(n)
        weight[rng.choice(n, int(K), replace=False, shuffle=False)] = 1 / K
    elif method == "stratified":
        weight = strata.draw(x, p, int(K), int(protect), rng)
    elif method == "halving":
        weight = halving.halve(x, p, int(K), rng)
    elif method == "cluster":
        weight = clusters.stratify(x, p, int(K), int(protect), rng)
    else:
        weight = walks.balance(
            x,
            p,
            int(K),
            int(protect),
            method,
            lambda up: bool(rng.random() < up),
            derandomise,
            inclusion=inclusion,
            window=window,
            missing=lacking,
        )
    index = np.flatnonzero(weight > 0)
    return index.astype(np.int64), weight[index] / weight[index].sum()


def _inclusion(probability: str | ArrayLike, x: NDArray[np.float64], p: NDArray[np.float64]) -> NDArray[np.float64]:
    """What inclusion is proportional to, (n,), of sum 1."""
    if isinstance(probability, str):
        if probability != "norm":
            raise ValueError(f'probability: expected "equal", "norm" or numbers (n,), got {probability!r}')
        norm = np.sqrt(np.einsum("ij,ij->i", x, x))
        mean = p @ norm
        return p * (_FLOOR + (1 - _FLOOR) * norm / mean) if mean > 0 else p
    given = np.asarray(probability, dtype=np.float64)
    checks.shape("probability", given, ("n",), {"n": len(x)})
    checks.finite("probability", given, ("token",))
    if (given <= 0).any():
        raise ValueError(f"probability: expected numbers above 0, got {given.min()!r}")
    return np.asarray(given / given.sum())


def _missing(missing: ArrayLike, n: int) -> NDArray[np.float64]:
    given = np.asarray(missing, dtype=np.float64)
    checks.shape("missing", given, ("n",), {"n": n})
    checks.finite("missing", given, ("token",))
    if (given < 0).any():
        raise ValueError(f"missing: expected squares >= 0, got {given.min()!r}")
    return given
