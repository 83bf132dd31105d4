"""Caches on which the theory is tight, or on which an assumption breaks. Each is an actual cache: (q, k, v) for one head."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.randomness import generator

Float = NDArray[np.float64]
Number = TypeVar("Number", float, Fraction)


class Instance(NamedTuple):
    """q (m, d), k (n, d), v (n, dv) of one head under the default scale 1/sqrt(d), P uniform."""

    q: Float
    k: Float
    v: Float


def flat_cache(profiles: ArrayLike) -> Instance:
    """A cache whose centred profiles are the given vectors (n, c), centred: one query 0, which attends to all alike, and v = profiles.

    Here Z_Phat = Z_P for every summary, so linear and true risk are one.
    """
    v = np.asarray(profiles, dtype=np.float64)
    checks.shape("profiles", v, ("n", "c"))
    return Instance(np.zeros((1, 1)), np.zeros((len(v), 1)), v - v.mean(axis=0))


def lookup(n: int, mass: float, value_dim: int | None = None, seed: int = 0) -> Instance:
    """Search instance of arXiv 2607.01520 (at mass 1/2) and retrieval regime (at mass -> 1): query j puts `mass` on token j, the rest evenly.

    Keys are orthonormal (d = n). Values: orthonormal for value_dim None, so that everything about the instance is in closed form
    (`lookup_trace`, `lookup_sampling_risk`); random signs / sqrt(value_dim) otherwise. ||v_i|| = 1.
    """
    if n < 2:
        raise ValueError(f"n: expected at least 2 tokens, got {n}")
    if not 0 < mass < 1:
        raise ValueError(f"mass: expected a number between 0 and 1, got {mass}")
    # a_j = e^beta / (e^beta + n - 1) with beta = scale q_j.k_j, scale = 1/sqrt(n)
    beta = np.log(mass) + np.log(n - 1) - np.log1p(-mass)
    if value_dim is None:
        values = np.eye(n)
    else:
        values = np.where(generator(seed, "risk lookup").random((n, value_dim)) < 0.5, -1.0, 1.0) / np.sqrt(value_dim)
    return Instance(np.sqrt(n) * beta * np.eye(n), np.eye(n), values)


def lookup_trace(n: int, mass: Number) -> Number:
    """tr Sigma (centred) of `lookup(n, mass)` with orthonormal values, in closed form.

    With a = mass, b = (1-a)/(n-1), s = a^2 + (n-1) b^2 = sum_i a_i^2: ||v_i - o||^2 = 1 - 2 a_i + s, hence
    tr Sigma = n [a^2 (1 - 2a + s) + (n-1) b^2 (1 - 2b + s)]. Works for Fractions too.
    """
    a, b = mass, (1 - mass) / (n - 1)
    s = a * a + (n - 1) * b * b
    return n * (a * a * (1 - 2 * a + s) + (n - 1) * b * b * (1 - 2 * b + s))


def lookup_sampling_risk(n: int, mass: Number, K: int) -> Number:
    """True risk of keeping ANY K < n tokens of `lookup(n, mass)` (orthonormal values) with equal weights, in closed form.

    Query of a kept token: weights c = e/(e + K-1), f = 1/(e + K-1), e = mass (n-1)/(1-mass), against a, b = (1-a)/(n-1):
        (c-a)^2 + (K-1)(f-b)^2 + (n-K) b^2;        of a token not kept: a^2 + K (1/K - b)^2 + (n-K-1) b^2.
    By symmetry every subset has the same risk, so this is the mean over random subsets as well. Works for Fractions too.
    """
    a, b = mass, (1 - mass) / (n - 1)
    odds = mass * (n - 1) / (1 - mass)
    c, f = odds / (odds + K - 1), 1 / (odds + K - 1)
    kept = (c - a) ** 2 + (K - 1) * (f - b) ** 2 + (n - K) * b * b
    dropped = a * a + K * (1 / (K + 0 * a) - b) ** 2 + (n - K - 1) * b * b
    return (K * kept + (n - K) * dropped) / n


def hidden_lookup(
    n: int, hidden: int, mass: float = 0.5, value_dim: int | None = None, seed: int = 0
) -> tuple[Instance, NDArray[np.intp]]:
    """Separation of query-aware from query-agnostic: `lookup` with queries only for a random set S of `hidden` tokens; and S."""
    if not 1 <= hidden <= n:
        raise ValueError(f"hidden: expected 1 <= hidden <= n = {n}, got {hidden}")
    instance = lookup(n, mass, value_dim, seed)
    chosen = np.sort(generator(seed, "risk hidden lookup").choice(n, hidden, replace=False))
    return instance._replace(q=instance.q[chosen]), chosen


def summary_by_synthetic_tokens(q: ArrayLike, o: ArrayLike, scale: float) -> tuple[Float, Float]:
    """Keys (2 dv, d) and values (2 dv, dv) of 2 dv made-up tokens whose attention outputs at q (m, d) are exactly o (m, dv).

    The q must be linearly independent (m <= d). Values +-c e_l, c = 2 dv max|o|; output component l is c (p_l+ - p_l-), so the
    tokens' attention weights must be p_l+- = (1 +- dv o_l / c) / (2 dv), and independent queries can be given any logits ln p.
    """
    q, o = np.asarray(q, dtype=np.float64), np.asarray(o, dtype=np.float64)
    sizes = checks.shape("q", q, ("m", "d"))
    dv = checks.shape("o", o, ("m", "dv"), sizes)["dv"]
    if np.linalg.matrix_rank(q) < sizes["m"]:
        raise ValueError(
            f"q: expected linearly independent queries, got {sizes['m']} of rank {np.linalg.matrix_rank(q)}"
        )
    c = 2 * dv * (np.abs(o).max() or 1.0)
    logits = np.log(np.hstack([1 + dv * o / c, 1 - dv * o / c]) / (2 * dv))
    keys = np.asarray(np.linalg.lstsq(scale * q, logits, rcond=None)[0].T, dtype=np.float64)
    return keys, c * np.vstack([np.eye(dv), -np.eye(dv)])


def dissenter(n: int, density: Fraction | float) -> Instance:
    """Where 2 tr Sigma+ / K is nearly attained at K = 1 (`augmented_bound`): n - 1 tokens of value 1 and the given density b, and
    one of value 0 with the rest, n - (n - 1) b > 0. One query, scale 1. At b slightly above 1 the true risk of keeping one token
    is 1.39 tr Sigma+ at n = 3, 1.92 at n = 20, 1.96 at n = 50 (a numerical trend towards 2, not proved).
    """
    rest = n - (n - 1) * density
    if n < 2 or density <= 0 or rest <= 0:
        raise ValueError(f"n, density: expected n >= 2 and 0 < density < n/(n - 1), got {n} and {density}")
    keys = np.full((n, 1), np.log(float(density)))
    keys[-1] = np.log(float(rest))
    return Instance(np.ones((1, 1)), keys, np.append(np.ones(n - 1), 0.0)[:, None])


def dissenter_risk(n: int, density: Number) -> tuple[Number, Number]:
    """(true mean risk of one token at random, tr Sigma+ with c = B) of `dissenter`, in closed form. Works for Fractions too.

    A_P = (1 - 1/n) b; about the mean 1 - 1/n the values are 1/n (n - 1 times) and -(1 - 1/n), so B = 1 - 1/n.
    """
    b, rest = density, n - (n - 1) * density
    most = (n - 1) / (n + 0 * density)
    A = most * b
    true = ((n - 1) * (1 - A) ** 2 + A * A) / n
    rho = ((n - 1) * b * b + rest * rest) / n
    trace = (
        ((n - 1) * b * b * (1 - most) ** 2 + rest * rest * most * most) / n - (A - most) ** 2 + most * most * (rho - 1)
    )
    return true, trace


def faint_needle(n: int, mass: float) -> Instance:
    """Where the constant 4 of `safe_bound` is nearly attained, by K >> n independent draws: n even, n mass^2 >> 1 >> mass.

    Token 0 has value 1 and attention `mass`; n/2 tokens of value -1 share the rest evenly; n/2 - 1 tokens of value 1 get nothing
    (e^-60), and centre the values. B = 1, but the needle is 2 away from the output it disturbs. One query, scale 1.
    """
    if n < 4 or n % 2 or not 0 < mass < 1:
        raise ValueError(f"n, mass: expected an even n >= 4 and 0 < mass < 1, got {n} and {mass}")
    keys = np.full((n, 1), -60.0)
    keys[0], keys[1 : n // 2 + 1] = np.log(mass * n), np.log(2 * (1 - mass))
    values = np.ones((n, 1))
    values[1 : n // 2 + 1] = -1
    return Instance(np.ones((1, 1)), keys, values)


def faint_needle_risk(n: int, mass: float, K: int) -> float:
    """True mean risk of K independent draws from `faint_needle`, by the binomial laws of how many of each kind are drawn.

    x times the needle and y of the tokens of value -1: A_Phat = (x n a - 2 (1 - a) y) / (x n a + 2 (1 - a) y), A_P = 2 a - 1.
    Terms beyond 12 standard deviations are left out: below 1e-15 of the law.
    """
    from scipy.special import gammaln

    def law(trials: int, chance: float) -> tuple[Float, Float]:
        reach = 12 * np.sqrt(trials * chance * (1 - chance)) + 25
        x = np.arange(max(0, int(trials * chance - reach)), min(trials, int(trials * chance + reach)) + 1, dtype=float)
        log = (
            gammaln(trials + 1)
            - gammaln(x + 1)
            - gammaln(trials - x + 1)
            + x * np.log(chance)
            + (trials - x) * np.log1p(-chance)
        )
        return x, np.exp(log)

    total = 0.0
    for x, p in zip(*law(K, 1 / n)):
        y, given = law(K - int(x), (n // 2) / (n - 1))
        up, down = x * n * mass, 2 * (1 - mass) * y
        output = np.where(up + down > 0, (up - down) / np.maximum(up + down, 1e-300), 1.0)
        total += p * float(given @ (output - (2 * mass - 1)) ** 2)
    return total


def coherent_block(m: int, copies: int) -> Instance:
    """Where the plain cube walk attains its constant m + 2 (`cube_bound`), taken in index order at inclusion probability 1/2. m even.

    Each block has m + 2 tokens whose m leading coordinates have one affine dependency, u = (1, -1, 1, -1, ...), so that the walk
    must move along u; and tail profile u_i in a direction of the block's own, so that the tail errors of the block add up:
    they reach +-(m + 2)/2, against sum r_i^2 pi_i (1 - pi_i) = (m + 2)/4.
    """
    if m < 2 or m % 2 or copies < 1:
        raise ValueError(f"m, copies: expected an even m >= 2 and copies >= 1, got {m} and {copies}")
    u = np.tile([1.0, -1.0], m // 2 + 1)
    # orthonormal basis of {1, u}^perp: as features they leave exactly 1^T x = F x = 0 for x = u
    features = np.linalg.qr(np.column_stack([np.ones(m + 2), u, np.eye(m + 2)[:, :m]]))[0][:, 2:]
    # squared, a feature is 4 in the mean, and a tail direction 1/copies: the features are the m leading directions
    return flat_cache(
        np.hstack([np.tile(2 * np.sqrt(m + 2) * features, (copies, 1)), np.kron(np.eye(copies), u[:, None])])
    )


def opposed_pairs(m: int, pairs: int, seed: int = 0) -> Instance:
    """Where the spectral walk's step ratio 2 is attained for every direction it may take (`spectral_bound`), whatever m, at probability 1/2.

    Tokens 2l, 2l+1 share m generic leading coordinates and have tail profiles e_l and -e_l. Among any m + 1 pairs the constraints
    leave only the directions +1/-1 within a pair, each of ratio ||2 e_l||^2 / 2 = 2; so
    ||tail error||^2 + 2 sum r_i^2 w_i (1 - w_i) stays at its first value along every path.
    """
    if m < 0 or pairs < m + 1:
        raise ValueError(f"m, pairs: expected m >= 0 and at least m + 1 pairs, got {m} and {pairs}")
    features = generator(seed, "risk opposed pairs").standard_normal((pairs, m))
    # whitened over the pairs, so that no feature comes near the tail's variance 1/pairs
    features = np.linalg.qr(features - features.mean(axis=0))[0] * np.sqrt(pairs)
    return flat_cache(np.hstack([np.repeat(4 * features, 2, axis=0), np.kron(np.eye(pairs), [[1.0], [-1.0]])]))


def simplex(n: int, trace: float = 1.0) -> Instance:
    """The cache that is hardest for its trace: n tokens at the corners of a regular simplex, all attended to alike, tr Sigma = trace.

    All n - 1 eigenvalues are trace/(n - 1), so that `spectral_floor` = `trace_bound` without replacement: for own tokens under
    linear and true risk (one query, flat) no summary of K tokens does better than random ones, (tr Sigma/K)(n - K)/(n - 1).
    """
    if n < 2:
        raise ValueError(f"n: expected at least 2 tokens, got {n}")
    return flat_cache(np.sqrt(checks.positive("trace", trace) * n / (n - 1)) * np.eye(n))


def hidden_needles(n: int, mass: float, leak: float) -> Instance:
    """Separation of query-aware from query-agnostic, without bound: n + 1 tokens of which the law of queries asks for some.

    Token 0, the background, has value 0; needle j = 1..n has value e_j. Query j puts `mass` on needle j, `leak` evenly on the other
    needles, the rest on the background. A law on h of the queries is served by the background and their h needles, in equal weights,
    with risk O(leak^2) (`hidden_needles_risk`); without the law, needles are missing (`hidden_needles_floor`).
    """
    _needles(n, mass, leak)
    q, k = np.zeros((n, n + 1)), np.eye(n + 1)
    q[:, 0] = np.log1p(-mass - leak)
    q[:, 1:] = np.log(leak / (n - 1))
    q[np.arange(n), np.arange(1, n + 1)] = np.log(mass)
    return Instance(np.sqrt(n + 1) * q, k, np.eye(n + 1)[:, 1:])


def hidden_needles_risk(n: int, mass: Number, leak: Number, hidden: int) -> Number:
    """True risk of keeping the background and the `hidden` needles that the law asks for, equal weights, in closed form.

    With f = leak/(n - 1) and what is dropped, x = (n - hidden) f, the output is scaled by 1/(1 - x) on the kept needles and 0 on
    the others:  (mass^2 + (hidden - 1) f^2) x^2/(1 - x)^2 + (n - hidden) f^2. Works for Fractions too.
    """
    f = leak / (n - 1)
    x = (n - hidden) * f
    return (mass * mass + (hidden - 1) * f * f) * x * x / ((1 - x) * (1 - x)) + (n - hidden) * f * f


def hidden_needles_floor(n: int, mass: Number, K: int) -> Number:
    """mass^2 (1 - K/n): of any reducer that keeps K < n own tokens without knowing which h queries the law asks for, the risk under the
    worst of these laws, coins or not and whatever the weights (proved): it is at least the mean over them, the risk under all n
    queries alike, of which those without their needle err by `mass` along its value. Works for Fractions too.
    """
    return mass * mass * (n - K) / n


def _needles(n: int, mass: float, leak: float) -> None:
    if n < 2:
        raise ValueError(f"n: expected at least 2 needles, got {n}")
    if not (mass > 0 and leak > 0 and mass + leak < 1):
        raise ValueError(f"mass, leak: expected both above 0 with a sum below 1, got {mass} and {leak}")
