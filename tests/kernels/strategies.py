"""What kernel tests draw: data that hurt, odd shapes, element types, strides, and the order of threads and blocks.

@kernel_settings
@given(case=layers(dtypes=ELEMENTS), order=orders())
def test_same_bytes(backend, case, order):
    with backend.running(order):
        assert gpu.X().encode(case) == reference.X().encode(case)
"""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtheory.layer import Layer

__all__ = [
    "ELEMENTS",
    "KINDS",
    "SIZES",
    "arrays",
    "bits",
    "elements",
    "kernel_settings",
    "layers",
    "numbers",
    "often",
    "orders",
    "sizes",
    "strided",
]

#: float64 layers are rounded to float32 on the host, as the references do
ELEMENTS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
#: odd on purpose: one, around a warp, around two, no multiple of anything, a block, more than a block's worth
SIZES = (1, 2, 31, 32, 33, 63, 65, 99, 128, 129, 999)
#: "normal", and what breaks quantisers: see `numbers`
KINDS = (
    "normal",
    "zeros",
    "constant",
    "subnormal",
    "huge",
    "outliers",
    "ties",
    "sparse",
    "negative zeros",
    "mixed scales",
)

#: a kernel's property test runs at least 100 examples, whatever the profile; KVTHEORY_KERNEL_EXAMPLES asks for another number
_ASKED = int(os.environ.get("KVTHEORY_KERNEL_EXAMPLES", "0"))
kernel_settings = settings(
    max_examples=_ASKED or max(100, settings.default.max_examples if settings.default else 0),
    # who asks breaks kernels on purpose (mutate.py): that a test fails is enough, nobody reads the example
    phases=[Phase.explicit, Phase.generate] if _ASKED else settings().phases,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

#: where some of what is drawn leads a kernel nothing to do (no token, no outlier, no rope): so that 100 examples launch it all the same
often = settings(kernel_settings, max_examples=3 * kernel_settings.max_examples)


def orders() -> st.SearchStrategy[int]:
    """Seed of the order in which threads and blocks run; 0 is ascending, which failing examples shrink to."""
    return st.integers(0, 2**32 - 1)


def sizes(most: int = 999, least: int = 1) -> st.SearchStrategy[int]:
    """A size within [least, most]: mostly of SIZES, sometimes any."""
    chosen = [n for n in SIZES if least <= n <= most]
    anything = st.integers(least, most)
    return st.one_of(st.sampled_from(chosen), anything) if chosen else anything


def elements() -> st.SearchStrategy[np.dtype[Any]]:
    """An element type that the kernels take."""
    return st.sampled_from(ELEMENTS)


def bits(low: int, high: int) -> st.SearchStrategy[int]:
    """A number of bits within [low, high]."""
    return st.integers(low, high)


def numbers(kind: str, shape: tuple[int, ...], dtype: Any, seed: int) -> NDArray[Any]:
    """An array of a KIND, finite in `dtype`. The last axis are channels, the one before tokens.

    subnormal: below the smallest normal number of the type, and its neighbours; huge: up to the largest; outliers: a few channels
    a hundred times larger; ties: multiples of 1/4, so that quantisers meet halves exactly; mixed scales: each token a power of two.
    """
    dtype = np.dtype(dtype)
    info = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    # of float64: what a key may be of which transform coders undo RoPE, of a scaling of .8 too (what is beyond has tests of its own)
    most = min(float(info.max), 2.0**1009)
    if kind == "zeros":
        x = np.zeros(shape)
    elif kind == "negative zeros":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    elif kind == "constant":
        x = np.full(shape, x.flat[0] if x.size else 0.0)
    elif kind == "subnormal":
        x = np.round(rng.uniform(-3, 3, shape) * 2.0 ** rng.integers(0, 6, shape)) * float(info.smallest_subnormal)
    elif kind == "huge":
        x = np.clip(x / 3, -1, 1) * most
    elif kind == "outliers" and x.size:
        x[..., rng.integers(0, shape[-1], 1 + shape[-1] // 32)] *= 100.0
    elif kind == "ties":
        x = np.round(x * 8) / 4
    elif kind == "sparse":
        x = np.where(rng.random(shape) < 0.9, 0.0, x)
    elif kind == "mixed scales" and x.size:
        x *= 2.0 ** rng.integers(-12, 10, (*shape[:-1], 1))
    elif kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    return np.clip(x, -most, most).astype(dtype)


def strided(x: NDArray[Any], how: str) -> NDArray[Any]:
    """The same numbers in other memory: "as is", "transposed" (last two axes), "spaced" (every second place), "reversed" (negative)."""
    if how == "transposed" and x.ndim >= 2:
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "spaced":
        room = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        room[..., ::2] = x
        return room[..., ::2]
    if how == "reversed":
        return x[..., ::-1].copy()[..., ::-1]
    return x


STRIDES = ("as is", "transposed", "spaced", "reversed")


@st.composite
def arrays(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: Any = np.float32, kinds: tuple[str, ...] = KINDS
) -> NDArray[Any]:
    """A C-contiguous array of a drawn kind."""
    return numbers(draw(st.sampled_from(kinds)), shape, dtype, draw(st.integers(0, 2**32 - 1)))


@st.composite
def layers(
    draw: st.DrawFn,
    dtypes: tuple[Any, ...] = ELEMENTS,
    heads: int = 3,
    tokens: int = 129,
    channels: int = 129,
    least_tokens: int = 0,
    kinds: tuple[str, ...] = KINDS,
    dims: tuple[int, ...] = (),
) -> Layer:
    """A layer whose keys and values differ in kind, strides and head_dim.

    Args:
        dtypes: element types to draw from.
        heads, tokens, channels: the largest kv_heads, tokens and head_dim or value_dim.
        least_tokens: 0 draws empty layers too.
        kinds: of numbers.
        dims: where not empty, head_dim and value_dim are drawn from these only.
    """
    dtype = draw(st.sampled_from(dtypes))
    kv_heads = draw(st.integers(1, heads))
    n = draw(sizes(tokens, max(least_tokens, 1)))
    if least_tokens == 0 and draw(st.integers(0, 19)) == 19:
        n = 0
    widths = [draw(st.sampled_from(dims) if dims else sizes(channels)) for _ in range(2)]
    parts = []
    for d in widths:
        kind, how, seed = draw(st.sampled_from(kinds)), draw(st.sampled_from(STRIDES)), draw(st.integers(0, 2**32 - 1))
        parts.append(strided(numbers(kind, (kv_heads, n, d), dtype, seed), how))
    return Layer(*parts)
