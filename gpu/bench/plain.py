"""The straightforward array versions that kernels are measured against: what a careful user writes in NumPy or CuPy, one operation after another.

They do the same job, not to the same bit: what is compared is time. Written once over the namespace; tests hold each against the
reference's quality. `@` is cuBLAS's on a GPU: without it these say so by `blas`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = [
    "attend",
    "blas",
    "kivi_decode",
    "kivi_encode",
    "mass",
    "pack",
    "turboquant_decode",
    "turboquant_encode",
    "unpack",
]

Pair = tuple[Any, Any]


def blas(xp: Any) -> str:
    """ "" where matrix products of arrays work, else one sentence on why not."""
    try:
        one = xp.ones((2, 2), np.float32)
        return "" if float((one @ one)[0, 0]) == 2 else "a product of two matrices came out wrong"
    except Exception as error:
        return f"`@` of CuPy arrays needs cuBLAS, which the extra `gpu` does not bring ({(str(error).splitlines() or [type(error).__name__])[0]})"


def pack(codes: Any, bits: int, xp: Any) -> Any:
    """Codes (n,) uint8 as bytes, least significant bit first: through one byte a bit."""
    shifts = xp.arange(bits, dtype=np.uint8)
    flat = ((codes[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1)
    return xp.packbits(flat, bitorder="little")


def unpack(data: Any, count: int, bits: int, xp: Any) -> Any:
    flat = xp.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
    weights = xp.left_shift(xp.ones(bits, np.uint8), xp.arange(bits, dtype=np.uint8))
    return (flat * weights).sum(axis=1).astype(np.uint8)


def _walsh(x: Any, xp: Any) -> Any:
    """Walsh-Hadamard transform along the last axis, a power of two long, orthonormal."""
    d, step = x.shape[-1], 1
    while step < d:
        y = x.reshape(*x.shape[:-1], d // (2 * step), 2, step)
        a, b = y[..., 0, :], y[..., 1, :]
        x = xp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    return x * np.float32(1 / math.sqrt(d))


def turboquant_encode(x: Any, signs: Any, points: Any, bits: int, xp: Any) -> Pair:
    """x (rows, d) float16 -> packed codes and norms (rows,) float16; points (2^bits,) float32 of unit variance / d, ascending."""
    full = x.astype(np.float32)
    norms = xp.sqrt((full * full).sum(axis=1))
    y = _walsh(full * signs, xp) / xp.maximum(norms, np.float32(1e-20))[:, None]
    thresholds = (points[1:] + points[:-1]) / 2
    codes = xp.searchsorted(thresholds, y.reshape(-1)).astype(np.uint8)
    return pack(codes, bits, xp), norms.astype(np.float16)


def turboquant_decode(data: Pair, signs: Any, points: Any, bits: int, rows: int, xp: Any) -> Any:
    packed, norms = data
    d = len(signs)
    y = points[unpack(packed, rows * d, bits, xp)].reshape(rows, d)
    return (_walsh(y, xp) * signs * norms.astype(np.float32)[:, None]).astype(np.float16)


def kivi_encode(x: Any, bits: int, group: int, axis: int, xp: Any) -> tuple[Any, Any, Any]:
    """x (heads, tokens, d) float16 in groups along `axis`: packed codes, scales and minima; tokens a multiple of the group."""
    heads, tokens, d = x.shape
    shape = (heads, tokens // group, group, d) if axis == 1 else (heads, tokens, d // group, group)
    along = 2 if axis == 1 else 3
    y = x.astype(np.float32).reshape(shape)
    low = y.min(axis=along, keepdims=True)
    scale = (y.max(axis=along, keepdims=True) - low) / np.float32((1 << bits) - 1)
    codes = xp.rint((y - low) / xp.maximum(scale, np.float32(1e-20))).astype(np.uint8)
    return pack(codes.reshape(-1), bits, xp), scale.astype(np.float16), low.astype(np.float16)


def kivi_decode(data: tuple[Any, Any, Any], bits: int, group: int, axis: int, shape: tuple[int, ...], xp: Any) -> Any:
    packed, scale, low = data
    heads, tokens, d = shape
    grouped = (heads, tokens // group, group, d) if axis == 1 else (heads, tokens, d // group, group)
    codes = unpack(packed, heads * tokens * d, bits, xp).reshape(grouped)
    return (codes * scale.astype(np.float32) + low.astype(np.float32)).astype(np.float16).reshape(shape)


def mass(queries: Any, keys: Any, scale: float, xp: Any) -> Any:
    """SnapKV's sums of attention by matrix products and a softmax: (kv_heads, tokens); queries x tokens of a head lie in memory."""
    kv_heads = len(keys)
    rows = queries.reshape(kv_heads, -1, keys.shape[2])
    out = []
    for own, k in zip(rows, keys):
        z = (own @ k.T).astype(np.float32) * np.float32(scale)
        a = xp.exp(z - z.max(axis=1, keepdims=True))
        out.append((a / a.sum(axis=1, keepdims=True)).sum(axis=0))
    return xp.stack(out)


def attend(queries: Any, keys: Any, values: Any, scale: float, xp: Any) -> Any:
    """Attention of queries (query_heads, m, d) on fp16 keys and values by matrix products, float32 softmax: (query_heads, m, dv)."""
    kv_heads = len(keys)
    rows = queries.reshape(kv_heads, -1, keys.shape[2])
    out = []
    for own, k, v in zip(rows, keys, values):
        z = (own @ k.T).astype(np.float32) * np.float32(scale)
        a = xp.exp(z - z.max(axis=1, keepdims=True))
        out.append((a / a.sum(axis=1, keepdims=True)).astype(np.float16) @ v)
    return xp.stack(out).reshape(*queries.shape[:2], values.shape[2])
