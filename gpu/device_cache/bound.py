"""How far `DeviceCache.attend` may be from float64 attention on the decoded cache: a forward error bound, derived in docs/attention.md.

    |o^ - o| <= (sum_t a_t (e^{eta_t} - 1) |v_t - o| + sum_t a_t e^{eta_t} (g M_t + dv_t + g' |o|)) / ((1 - g') sum_t a_t e^{-eta_t})

a: exact weights, o: exact output. eta_t: what a logit is off by, and an exponent on top. M_t: sums of magnitudes in the frame of values; dv_t:
what a value is off by. g, g': roundings of the numerator's terms and the denominator's. Everything here is float64, on the host, from what a
decoder holds; no kernel is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpu.resident import host
from kvtheory.layer import Decoded

if TYPE_CHECKING:
    from gpu.device_cache.cache import DeviceCache

__all__ = ["EXP", "UNIT", "Magnitudes", "error_bound", "gamma", "rounding"]

Float64 = NDArray[np.float64]

#: of float32: a rounded number is within this share of the exact one
UNIT = 2.0**-24
#: of expf, in roundings: CUDA promises 2 ulp at most (1 in later versions), the C library less than 1; 2 ulp are 4 units
EXP = 4
#: what underflow may cost a logit or an output, with numbers of a cache in the normal range of float32
TINY = 2.0**-100
#: a logit that may be off by more says nothing: the bound is infinite
MOST_EXPONENT = 300.0


@dataclass(frozen=True)
class Magnitudes:
    """Of a segment's tokens: sums of absolute products in the frames that the kernel computes in, and roundings ahead of them.

    logits (query_heads, queries, tokens): at least scale sum_c |q'_c k'_c| and the offset's magnitude. values (kv_heads, tokens, value_dim): at least
    sum_c |S_ic v'_c| + |mean_i|. key_roundings, value_roundings: of k' and v' themselves, as codes are made into numbers.
    """

    logits: Float64
    values: Float64
    key_roundings: int
    value_roundings: int


def gamma(count: float) -> float:
    """n u / (1 - n u): the relative error of n roundings. ValueError where they leave nothing."""
    share = count * UNIT
    if share >= 0.5:
        raise ValueError(f"roundings: expected fewer than 2^23 in a row, got {count}")
    return share / (1 - share)


def rounding(dtype: Any) -> tuple[float, float]:
    """(relative, absolute) error of rounding to an element type: half a unit in the last place, half the smallest subnormal number."""
    info = ml_dtypes.finfo(dtype)
    return 2.0 ** -(info.nmant + 1), float(info.smallest_subnormal) / 2


def error_bound(
    cache: DeviceCache, decoded: Decoded, queries: Any, query_positions: Any = None, *, parts: bool = False
) -> Any:
    """(query_heads, queries, value_dim) float64: |cache.attend(queries, query_positions) - exact| is at most this, number by number.

    exact: kvtheory.attention.attend in float64 on `decoded`, what the stream of `cache` decodes to (tokens that were appended behind it). queries: as
    they were given, finite. parts: a dict as well, of the shares of it: "logits", "decoder", "values", "sums" (docs/attention.md).

    Assumes that no number of the cache, no logit and no accumulator leaves the range of float32's normal numbers, and that the decoder clips none.
    """
    given = host(queries)
    q = given.astype(np.float32).astype(np.float64)
    heads, count, _ = q.shape
    group = heads // cache.kv_heads
    owner = np.arange(heads) // group
    keys, values = decoded.keys.astype(np.float64), decoded.values.astype(np.float64)
    scale, tokens = cache.scale, keys.shape[1]
    weights = decoded.log_weights

    z = scale * np.einsum("hqd,htd->hqt", q, keys[owner]) + weights[owner][:, None]
    if query_positions is not None:
        seen = decoded.positions[owner][:, None] <= host(np.asarray(query_positions))[None, :, None]
        z = np.where(seen, z, -np.inf)
    top = z.max(axis=2, keepdims=True)
    a = np.exp(z - top)
    a /= a.sum(axis=2, keepdims=True)
    o = np.einsum("hqt,htv->hqv", a, values[owner])

    logit_error, decoder_error = np.zeros(z.shape), np.zeros(z.shape)
    spread, value_error = np.zeros(values.shape), np.zeros(values.shape)
    longest = tiles = slots = 0
    finite_weights = np.where(np.isneginf(weights), 0.0, np.abs(weights))
    for one in cache.segments:
        own = one.index
        k, v = keys[:, own], values[:, own]
        found = one.magnitudes(q, scale, k, v)
        roundings = -(-one.key_width // 4) * 4 + 12 + found.key_roundings
        # float64 queries were rounded to float32 first
        logit_error[..., own] = (
            gamma(roundings + 1) * found.logits
            + 3 * UNIT * (finite_weights[owner][:, None, own] + found.logits)
            + TINY * (1 + scale * np.abs(q).sum(axis=2))[..., None]
        )
        spread[:, own] = found.values
        value_error[:, own] = gamma(found.value_roundings + 1) * found.values + TINY
        if one.rounded is not None:
            (key_unit, key_least), (value_unit, value_least) = map(rounding, one.rounded)
            share = scale * np.einsum("hqd,htd->hqt", np.abs(q), key_unit * np.abs(k[owner]) + key_least)
            decoder_error[..., own] = share / (1 - key_unit)
            value_error[:, own] += (value_unit * np.abs(v) + value_least) / (1 - value_unit)
        work = one.work(group * count, cache.split)
        longest, tiles, slots = (max(before, now) for before, now in zip((longest, tiles, slots), work))
    if given.dtype == np.float64:
        # the exact output is that of the queries as given
        logit_error += UNIT * scale * np.einsum("hqd,htd->hqt", np.abs(q), np.abs(keys[owner]))

    segments = len(cache.segments)
    numerator = gamma(longest + tiles + slots + segments + 6 + EXP * (tiles + 3))
    denominator = gamma(5 + tiles + slots + segments + EXP * (tiles + 3))
    epsilon = logit_error + decoder_error
    visible = np.isfinite(z)
    most = np.where(visible, epsilon, 0.0).max(axis=2, keepdims=True)
    with np.errstate(invalid="ignore"):
        eta = np.where(visible, epsilon + UNIT * (np.abs(top - z) + 2 * most), 0.0)
    beyond = eta.max(axis=2, initial=0.0)[..., None] > MOST_EXPONENT
    eta = np.minimum(eta, MOST_EXPONENT)
    away = np.abs(
        values[owner][:, :, None].transpose(0, 2, 1, 3) - o[:, :, None]
    )  # (heads, queries, tokens, value_dim)
    shares = {
        "logits": np.einsum("hqt,hqtv->hqv", a * np.expm1(np.where(visible, eta - decoder_error, 0.0)), away),
        "values": np.einsum("hqt,htv->hqv", a * np.exp(eta), value_error[owner]),
        "sums": np.einsum("hqt,htv->hqv", a * np.exp(eta), numerator * spread[owner])
        + denominator * np.abs(o) * (a * np.exp(eta)).sum(axis=2)[..., None],
    }
    everything = np.einsum("hqt,hqtv->hqv", a * np.expm1(eta), away)
    shares["decoder"] = everything - shares["logits"]
    under = (1 - denominator) * (a * np.exp(-eta)).sum(axis=2)[..., None]
    # weights below the normal numbers of float32 may be lost whole
    lost = tokens * TINY * (1 + spread.max(initial=0.0))
    total = np.where(beyond, np.inf, sum(shares.values()) / under + lost + UNIT * np.abs(o))
    return (total, {name: share / under for name, share in shares.items()}) if parts else total
