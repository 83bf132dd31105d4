"""Stacked vectors on the GPU: `reference.transform_coding.stacked`, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.module import Source, element, launch, namespace
from gpu.resident import device, host, kept
from kvtheory.layer import Rope
from reference.rotary import rotary
from reference.transform_coding import stacked

__all__ = ["SOURCE", "finite", "stack", "unstack", "warps"]

ELEMENTS = ("float", "__half", "__nv_bfloat16", "double")
SOURCE = Source(
    "transform.cu",
    [f"{kernel}<{kind}>" for kernel in ("any_bad", "stack", "unstack") for kind in ELEMENTS]
    + ["project", "product<int>", "product<long long>"],
)
#: threads of a block whose warps each have a token, or a job, of their own
WARPS = 4
#: numbers that a thread of any_bad looks at, about, and blocks at most
LOOKS, MOST_BLOCKS = 16, 2048


def warps(jobs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid and block of one warp a job."""
    return (-(-jobs // WARPS),), (32 * WARPS,)


def _kind(dtype: np.dtype[Any]) -> str:
    """Kernels' name of an element type."""
    return "double" if dtype == np.float64 else element(dtype.newbyteorder("="))


def native(array: Any) -> Any:
    """An array as kernels take it: contiguous, of this machine's byte order."""
    xp = namespace(array)
    return xp.ascontiguousarray(array, array.dtype.newbyteorder("=") if xp is np else None)


def finite(keys: Any, values: Any, rope: Rope | None = None) -> None:
    """ValueError for NaN and inf, with their places, and for keys of which the rope cannot be undone: the reference's."""
    xp = namespace(keys, values)
    for array, most in ((native(keys), stacked.most_key(rope)), (native(values), np.inf)):
        if not array.size:
            continue
        bad = xp.zeros(1, np.uint32)
        blocks = min(MOST_BLOCKS, -(-array.size // (256 * LOOKS)))
        arguments = array, bad, np.float64(most), np.uint64(array.size)
        launch(SOURCE[f"any_bad<{_kind(array.dtype)}>"], (blocks,), (256,), arguments)
        if int(host(bad)[0]):
            stacked.finite(host(keys), host(values), rope)
            raise AssertionError("keys, values: a kernel met a number that is refused, the reference does not")


def _turned(rope: Rope | None, positions: NDArray[np.int64], first: int, count: int, xp: Any) -> tuple[Any, ...]:
    """(turns, positions, scaling), (pairs, interleaved, own positions) of kernels; positions (tokens,) or (heads, tokens) of all tokens."""
    if rope is None:
        none = xp.zeros(1, np.uint64), xp.zeros(1, np.int64), np.float64(1)
        return none, (np.uint32(0), np.bool_(False), np.bool_(False))
    turn = rotary(rope)
    own = positions.ndim == 2
    at = device(np.ascontiguousarray(positions[..., first : first + count], np.int64), xp)
    turns = kept(turn, "turns", xp, lambda: turn.turns)
    return (turns, at, np.float64(turn.scaling)), (
        np.uint32(len(turn.turns)), np.bool_(rope.layout == "interleaved"), np.bool_(own)
    )  # fmt: skip


def stack(
    keys: Any, values: Any, rope: Rope | None, positions: NDArray[np.int64], first: int, last: int
) -> Any:  # fmt: skip
    """Tokens first ... last - 1 of keys (heads, tokens, d), values (heads, tokens, dv) -> (last - first, heads (d + dv)) binary64, RoPE undone.

    positions: of all tokens, (tokens,) or (heads, tokens), on the host. Numbers must be finite.
    """
    xp = namespace(keys, values)
    heads, tokens, dim = keys.shape
    width, count = heads * (dim + values.shape[2]), last - first
    x = xp.empty((count, width), np.float64)
    if not count:
        return x
    for array, turn, column in ((keys, rope, 0), (values, None, heads * dim)):
        own = native(array)
        arrays, pairs = _turned(turn, positions, first, count, xp)
        launch(
            SOURCE[f"stack<{_kind(own.dtype)}>"], *warps(count),
            (own, x, *arrays, np.uint64(tokens), np.uint64(first), np.uint64(count), np.uint32(heads), np.uint32(own.shape[2]),
             np.uint32(width), np.uint32(column), *pairs),
        )  # fmt: skip
    return x


def unstack(x: Any, keys: Any, values: Any, rope: Rope | None, positions: NDArray[np.int64], first: int) -> None:
    """The inverse, into tokens first ... of keys and values, rounded to their element types; columns of x (count, width) as `stack` gives them."""
    import ml_dtypes

    xp = namespace(x, keys, values)
    count, width = x.shape
    heads, tokens, dim = keys.shape
    if not count:
        return
    for array, turn, column in ((keys, rope, 0), (values, None, heads * dim)):
        arrays, pairs = _turned(turn, positions, first, count, xp)
        kind = _kind(array.dtype)
        largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16 if kind == "__nv_bfloat16" else array.dtype).max)
        launch(
            SOURCE[f"unstack<{kind}>"], *warps(count),
            (x, array, *arrays, np.float64(largest), np.uint64(tokens), np.uint64(first), np.uint64(count), np.uint32(heads),
             np.uint32(array.shape[2]), np.uint32(width), np.uint32(column), *pairs),
        )  # fmt: skip
