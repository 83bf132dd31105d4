"""Tokens gathered, merged by weight, and turned to other positions, on the host or a GPU. Kernels: gpu/kernels/tokens.cu.

A cache (kv_heads, tokens, d) becomes (kv_heads, width, d), width the most that a head keeps; behind what it keeps a head is padded with
zeros, as in `kvtheory.Decoded`, whose log-weights make attention pass over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.module import ELEMENT, Source, element, launch, namespace
from gpu.resident import device, host, kept
from kvtheory.layer import Rope
from reference.merging import Groups, Merged, log_masses, rows
from reference.rotary import rotary

__all__ = ["gather", "merge", "turn_first"]

THREADS = 256
#: bytes of what a thread moves, and its type
UNITS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short"}
_ELEMENTS = (*ELEMENT.values(), "double")
_SOURCE = Source(
    "tokens.cu",
    [f"gather<{unit}>" for unit in UNITS.values()] + [f"{do}<{t}>" for do in ("merge", "turn_first") for t in _ELEMENTS],
)  # fmt: skip

Index = NDArray[np.int64]


def gather(array: Any, index: Sequence[Index]) -> Any:
    """The tokens index[h] (n_h,) of each head h of array (kv_heads, tokens, d): (kv_heads, most n_h, d), zeros behind; the same bits.

    array: NumPy or CuPy, of any strides. ValueError for another number of heads, IndexError for a token that is not there.
    """
    xp = namespace(array)
    heads, tokens, dim = array.shape
    width = _width("index", [len(own) for own in index], heads)
    source = np.full((heads, width), -1, np.int64)
    for h, own in enumerate(index):
        source[h, : len(own)] = rows("index", own, h, tokens)
    x = _native(array)
    out = xp.empty((heads, width, dim), x.dtype)
    if out.size:
        size = dim * x.dtype.itemsize
        place = 0 if xp is np else int(x.data.ptr)  # the simulator works on aligned copies
        unit = next(u for u in UNITS if size % u == 0 and place % u == 0)
        units = size // unit
        blocks = -(-heads * width * units // THREADS)
        of, to = (a.reshape(-1).view(np.uint32 if unit >= 4 else np.uint16) for a in (x, out))
        arguments = of, device(source, xp), to, np.int64(heads * width), np.int32(units)
        launch(_SOURCE[f"gather<{UNITS[unit]}>"], (blocks,), (THREADS,), arguments)
    return out


def merge(array: Any, groups: Sequence[Sequence[Index]], weights: Sequence[Sequence[NDArray[np.float64]]]) -> Merged:
    """`reference.merging.merge` by a kernel: the same bits, the same errors. array: (kv_heads, tokens, d), NumPy or CuPy, any strides.

    tokens and log_weights come in the namespace of `array`; the logarithms are the host's.
    """
    xp = namespace(array)
    heads, tokens, dim = array.shape
    own = Groups.of(heads, tokens, groups, weights)
    x = _native(array)
    out, masses = xp.empty((heads, own.width, dim), x.dtype), xp.zeros((heads, own.width), np.float64)
    if out.size:
        tables = (device(a, xp) for a in (own.starts, own.members, own.weights))
        arguments = x, *tables, out, masses, np.int64(heads * own.width), np.int32(dim)
        launch(_SOURCE[f"merge<{_element(x)}>"], (-(-out.size // THREADS),), (THREADS,), arguments)
    return Merged(out, device(log_masses(host(masses)), xp))


def turn_first(keys: Any, by: Index, rope: Rope, limit: float) -> None:
    """Turns keys[:, :len(by)] of C-contiguous keys (kv_heads, tokens, d) by `by` positions each, in place, and limits them: |k| <= limit.

    The bits are those of reference.rotary, rounded to the element type as NumPy rounds float64. `rope.attention_scaling` plays no part.
    """
    xp = namespace(keys)
    heads, tokens, dim = keys.shape
    first, pairs = len(by), rope.rotated // 2
    count = heads * first * pairs
    if not count:
        return
    own = rotary(rope)
    frequencies = kept(own, "turns", xp, lambda: own.turns)
    sizes = np.int32(heads), np.int64(tokens), *map(np.int32, (first, dim, 2 * pairs, rope.layout == "interleaved"))
    arguments = keys, device(by.astype(np.int64, copy=False), xp), frequencies, *sizes, np.float64(limit)
    launch(_SOURCE[f"turn_first<{_element(keys)}>"], (-(-count // THREADS),), (THREADS,), arguments)


def _element(array: Any) -> str:
    return "double" if array.dtype == np.float64 else element(array.dtype)


def _native(array: Any) -> Any:
    return namespace(array).ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def _width(name: str, counts: list[int], heads: int) -> int:
    if len(counts) != heads:
        raise ValueError(f"{name}: expected one for each of {heads} heads, got {len(counts)}")
    return max(counts, default=0)
