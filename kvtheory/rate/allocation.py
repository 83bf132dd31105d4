"""Bit allocation: minimise the summed distortion of components under a budget of bits.

Real bits under the law s_c 4^{-b_c} (Gaussian components, ideal coding): reverse water-filling, in closed form.
Integer bits under measured tables D_c(b), convex or not: dynamic programming, exact.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.checks import finite, shape


def _variances(variances: ArrayLike) -> NDArray[np.float64]:
    s = np.asarray(variances, dtype=np.float64)
    shape("variances", s, ("components",))
    if s.size == 0:
        raise ValueError("variances: expected at least one component, got none")
    finite("variances", s, ("component",))
    if (s < 0).any():
        c = int(np.argmax(s < 0))
        raise ValueError(f"variances: expected numbers >= 0, got {s[c]} at component {c}")
    return s


def _log2_level(log2_s: NDArray[np.float64], total: float) -> float:
    """log2 theta such that sum_c max(0, (log2 s_c - log2 theta) / 2) = total > 0, for finite log2 s_c.

    With the k largest components active, log2 theta_k = (sum_{c<=k} log2 s_c - 2 total) / k. The optimum is the k for which
    exactly the k largest lie above theta_k; theta_k as a function of k peaks there, so it is the maximum over k.
    """
    descending = np.sort(log2_s)[::-1]
    return float(np.max((np.cumsum(descending) - 2.0 * total) / np.arange(1, descending.size + 1)))


def water_level(variances: ArrayLike, rate: float) -> float:
    """The level theta of reverse water-filling: the distortion is D = sum_c min(s_c, theta).

    variances (components,) float, >= 0: s_c, weights included. rate: mean bits per component, >= 0.
    At rate 0 the smallest level that drowns everything, max s_c; 0 when every variance is 0.
    Raises ValueError on NaN, inf, a negative variance or rate. Source: Cover & Thomas, section 10.3.3.
    """
    s = _variances(variances)
    rate = _rate(rate)
    if rate == 0.0 or not (s > 0).any():
        return float(s.max())
    return float(2.0 ** _log2_level(np.log2(s[s > 0]), rate * s.size))


def reverse_waterfill(variances: ArrayLike, rate: float) -> NDArray[np.float64]:
    """Real bits b_c that minimise sum_c s_c 4^{-b_c} subject to b_c >= 0 and mean_c b_c = rate.

        b_c = max(0, 1/2 log2(s_c / theta)),   theta such that the mean is `rate`      (KKT conditions, solved exactly)

    variances (components,) float, >= 0: s_c, weights included. rate: mean bits per component over *all* components.
    Returns bits (components,) float64. A component of variance 0 gets no bits; if all are 0, no bits are spent at all
    (they would buy nothing), which is the one case where the mean is below `rate`.
    Raises ValueError on NaN, inf, a negative variance or rate. Source: Cover & Thomas, section 10.3.3.
    """
    s = _variances(variances)
    rate = _rate(rate)
    bits = np.zeros(s.size)
    alive = s > 0
    if rate > 0.0 and alive.any():
        log2_s = np.log2(s[alive])
        bits[alive] = np.maximum(0.0, 0.5 * (log2_s - _log2_level(log2_s, rate * s.size)))
    return bits


def _rate(rate: float) -> float:
    value = float(rate)
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"rate: expected a finite number of bits >= 0, got {rate!r}")
    return value


def _tables(tables: ArrayLike, budget: int) -> tuple[NDArray[np.float64], int]:
    t = np.asarray(tables, dtype=np.float64)
    shape("tables", t, ("components", "levels"))
    if t.size == 0:
        raise ValueError(f"tables: expected at least one component and one level, got shape {t.shape}")
    if np.isnan(t).any() or np.isneginf(t).any():
        c, b = (int(i) for i in np.argwhere(np.isnan(t) | np.isneginf(t))[0])
        raise ValueError(f"tables: expected distortions (inf: a level not to be had), got {t[c, b]} at ({c}, {b})")
    if isinstance(budget, bool) or int(budget) != budget:
        raise TypeError(f"budget: expected a whole number of bits, got {budget!r}")
    budget = int(budget)
    most = t.shape[0] * (t.shape[1] - 1)
    if not 0 <= budget <= most:
        raise ValueError(f"budget: expected 0 <= bits <= {most} for tables of shape {t.shape}, got {budget}")
    return t, budget


def integer_bits(tables: ArrayLike, budget: int) -> NDArray[np.int64]:
    """Integer bits that minimise sum_c tables[c, b_c] subject to sum_c b_c = budget. Exact, whatever the tables' shape.

        best_c(j) = min_b best_{c-1}(j - b) + tables[c, b]                             (dynamic programming over components)

    tables (components, levels) float: tables[c, b] is the measured distortion of component c with b bits; inf marks a level
    that is not to be had. budget: total bits over all components, spent exactly. Returns bits (components,) int64; among
    optimal allocations the one with fewest bits in the last component, then in the last but one, and so on.
    Raises ValueError when the budget cannot be spent, or on NaN or -inf. Time O(components * levels * budget).
    Greedy and the lower convex hull are exact for convex tables only.
    """
    t, budget = _tables(tables, budget)
    components, levels = t.shape
    most = levels - 1
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((components, budget + 1), dtype=np.min_scalar_type(most))
    for c in range(components):
        # Only totals j that the first c+1 components can reach, and from which the others can still reach the budget.
        low = max(0, budget - (components - 1 - c) * most)
        high = min(budget, (c + 1) * most)
        # padded[most + j] = best(j), inf for j < 0; candidates[b, j - low] = best(j - b) + tables[c, b]
        padded = np.concatenate([np.full(most, np.inf), best])
        windows = np.lib.stride_tricks.sliding_window_view(padded[low : high + most + 1], high - low + 1)[::-1]
        candidates = windows + t[c][:, None]
        b = np.argmin(candidates, axis=0)
        choice[c, low : high + 1] = b
        best = np.full(budget + 1, np.inf)
        best[low : high + 1] = np.take_along_axis(candidates, b[None], axis=0)[0]
    if not np.isfinite(best[budget]):
        raise ValueError(f"budget: no allocation of available levels spends exactly {budget} bits")
    bits = np.zeros(components, dtype=np.int64)
    left = budget
    for c in range(components - 1, -1, -1):
        bits[c] = choice[c, left]
        left -= int(bits[c])
    return bits


def greedy_bits(tables: ArrayLike, budget: int) -> NDArray[np.int64]:
    """Bits given out one by one, each where it lowers the distortion most. Optimal for convex tables, and only for them.

    Arguments, result and errors as in `integer_bits`, except that inf is refused: greedy cannot step over a missing level.
    For comparison: O(budget log components).
    """
    t, budget = _tables(tables, budget)
    finite("tables", t, ("component", "bits"))
    gain = t[:, :-1] - t[:, 1:]
    bits = np.zeros(t.shape[0], dtype=np.int64)
    heap = [(-gain[c, 0], c) for c in range(t.shape[0])] if gain.shape[1] else []
    heapq.heapify(heap)
    for _ in range(budget):
        _, c = heapq.heappop(heap)
        bits[c] += 1
        if bits[c] < gain.shape[1]:
            heapq.heappush(heap, (-gain[c, bits[c]], c))
    return bits
