"""The embedded real cache: two layers of SmolLM2-135M on 384 tokens of Northanger Abbey. Offline, base dependencies only."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Cache

__all__ = ["SAMPLE", "sample_cache", "sample_text", "ulps"]

SAMPLE = "smollm2-135m-sample.safetensors"
TEXT = "northanger-abbey.txt"


def sample_cache() -> Cache:
    """A real captured cache: SmolLM2-135M-Instruct (Q4_1 weights dequantised), 384 tokens of Jane Austen, layers 2 and 18.

    Each layer has all 3 KV heads and 9 query heads of 64: keys and values (3, 384, 64), queries (9, 192, 64) with their positions,
    output_proj (9, 64, 576), rope. Layer 2 attends diffusely, without a sink; layer 18 sharply, mostly to token 0. Captured in
    float32, stored in float16. `cache.meta` has the plan, the source and licence, and what was measured of the layers' character.
    `scripts/make_sample_cache.py` remakes the file.
    """
    with resources.as_file(resources.files("kvtheory") / "data" / SAMPLE) as path:
        cache = Cache.load(path)
        # read now: inside a zipped package the path ends with this block
        return Cache(list(cache), cache.tokens, cache.surprisal_bits, cache.meta)


def sample_text() -> str:
    """The text of `sample_cache`, and somewhat more of it: the opening of Northanger Abbey, chapter 1 (public domain)."""
    return (resources.files("kvtheory") / "data" / TEXT).read_text(encoding="utf-8")


def ulps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """How many float16 numbers lie from a to b, elementwise: 0 for equal (also +0 and -0), 1 for neighbours. Arrays of float16."""

    def rank(x: NDArray[Any]) -> NDArray[np.int64]:
        # float16 is sign and magnitude; as integers the magnitudes are in order, so the negative ones are mirrored
        bits = x.astype(np.float16, copy=False).view(np.uint16).astype(np.int64)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    return np.abs(rank(np.asarray(a)) - rank(np.asarray(b)))
