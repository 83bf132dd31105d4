"""What the tests of attention kernels share: queries, the comparison with float64 attention on the decoded cache, and how near the bound it comes.

python -m tests.kernels.attention_cases        # the table of docs/attention.md: measured error over its bound, codec by codec
"""

import functools

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import reference
from gpu.device_cache import DeviceCache, error_bound
from kvtheory import attention
from kvtheory.layer import Decoded
from reference.vectors import largest
from tests.kernels.strategies import numbers
from tests.reference.strategies import DTYPES, text

__all__ = ["EXAMPLES", "KINDS", "TOKENS", "asked", "compared", "queries", "within"]

#: numbers at the ends of a type's range leave float32 when they are multiplied, which the bound excludes
KINDS = ("normal", "zeros", "constant", "subnormal", "outliers", "ties", "sparse", "negative zeros", "mixed scales")
TOKENS = (1, 31, 33, 99, 128, 999)


@st.composite
def asked(draw, most_group=5, most_count=7):
    """How a cache is asked: query heads to a KV head, queries, element type, kind, seed, whether causal, tokens of a split."""
    return {
        "group": draw(st.integers(1, most_group)), "count": draw(st.integers(1, most_count)),
        "dtype": draw(st.sampled_from(("float32", "float16", "bfloat16", "float64"))),
        "kind": draw(st.sampled_from(("normal", "normal", "outliers", "ties", "zeros"))),
        "seed": draw(st.integers(0, 1 << 30)), "causal": draw(st.booleans()), "split": draw(st.sampled_from((None, 1, 32, 64, 200))),
    }  # fmt: skip


def queries(how, kv_heads, dim, decoded: Decoded):
    """Queries and their positions (or None), so that each sees a token."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if how["dtype"] == "bfloat16" else how["dtype"])
    kind = numbers(how["kind"], (how["group"] * kv_heads, how["count"], dim), np.float32, how["seed"])
    if not how["causal"]:
        return kind.astype(dtype), None
    there = np.isfinite(decoded.log_weights)
    first = max(int(own[seen].min()) for own, seen in zip(decoded.positions, there))
    last = int(decoded.positions.max())
    rng = np.random.default_rng(how["seed"])
    return kind.astype(dtype), rng.integers(first, max(first, last) + 2, how["count"])


def compared(backend, cache, decoded, q, positions, order):
    """(found, exact, bound) of a cache that was made already."""
    with backend.running(order):
        found = backend.get(cache.attend(backend.put(q), positions)).astype(np.float64)
    exact = attention.attend(
        q, decoded.keys, decoded.values, scale=cache.scale, log_weights=decoded.log_weights, positions=decoded.positions,
        query_positions=positions,
    )  # fmt: skip
    return found, exact, error_bound(cache, decoded, q, positions)


def within(backend, codec, layer, how, order):
    """The largest share of the bound that attention on a layer's stream takes; AssertionError if it takes more than all."""
    stream = codec.encode(layer)
    decoded = reference.decode(stream, codec.state)
    # a decoder clips what leaves its element type, attention does not: excluded by the bound
    assume(
        all(
            not array.size or float(np.abs(array.astype(np.float64)).max()) < largest(array.dtype)
            for array in (decoded.keys, decoded.values)
        )
    )
    q, positions = queries(how, layer.kv_heads, layer.head_dim, decoded)
    with backend.running(order):
        cache = DeviceCache(stream, codec.state, backend.xp, split=how["split"])
    found, exact, bound = compared(backend, cache, decoded, q, positions, order)
    assert found.shape == exact.shape == bound.shape and np.isfinite(found).all()
    error = np.abs(found - exact)
    assert (error <= bound).all(), (
        f"{codec.codec_id}: {error.max():.3g} beyond the bound {bound.flat[int((error - bound).argmax())]:.3g}"
    )
    return float((error / bound).max())


def _fixed_rate_without_rope():
    """Values with means, and no RoPE: queries and outputs are transformed, and no key is made."""
    data = text("A", 96)[0].replace(rope=None)
    return reference.MetricKLT.fit([data], 3.0, coding="fixed", joint="head"), data.replace(
        values=data.values + np.float32(2)
    )


#: codec, and a layer of float32 numbers
EXAMPLES = {
    "Full": functools.cache(lambda: (reference.Full(), text("B", 77)[0])),
    "MergeReduce": functools.cache(lambda: (reference.MergeReduce(keep=30, sinks=2, window=4), text("B", 77)[0])),
    "TurboQuant": functools.cache(lambda: (reference.TurboQuant(3), text("B", 77)[0])),
    "TurboQuant prod": functools.cache(lambda: (reference.TurboQuant(3, kind="prod"), text("B", 77)[0])),
    "KIVI": functools.cache(lambda: (reference.KIVI(2, 8, 32), text("B", 96)[0])),
    "KVQuant": functools.cache(lambda: (reference.KVQuant.fit(text("A", 96), 3, 0.05), text("B", 77)[0])),
    "AATC": functools.cache(
        lambda: (reference.AATC.fit(text("A", 96), bits=3, protected=0, window=16), text("B", 77)[0])
    ),
    "AATC-like means": functools.cache(_fixed_rate_without_rope),
    "PALU": functools.cache(lambda: (reference.PALU.fit(text("A", 96), bits=3), text("B", 77)[0])),
    "MetricKLT fixed": functools.cache(
        lambda: (reference.MetricKLT.fit(text("A", 96), 2, coding="fixed", jensen=True), text("B", 77)[0])
    ),
    "MetricKLT entropy": functools.cache(
        lambda: (reference.MetricKLT.fit(text("A", 96), 2, block=16), text("B", 77)[0])
    ),
    "MetricKLT low bits": functools.cache(
        lambda: (reference.MetricKLT.fit(text("A", 96), 7, block=16), text("B", 77)[0])
    ),
}


def main() -> None:
    """The largest share of the bound that a codec takes, over element types, seeds and ways to ask."""
    import contextlib

    from gpu.module import simulator

    class Here:
        xp = np
        put = get = staticmethod(lambda array: array)
        running = staticmethod(lambda order: contextlib.nullcontext())

    print(
        "| codec | layer of | error, largest | its bound there | share, largest | median |\n|---|---|---|---|---|---|"
    )
    for name, make in EXAMPLES.items():
        codec, data = make()
        for dtype in ("float32", "float16", "bfloat16"):
            kind = DTYPES[dtype]
            layer = data.replace(keys=data.keys.astype(kind), values=data.values.astype(kind))
            stream = codec.encode(layer)
            decoded = reference.decode(stream, codec.state)
            shares, worst = [], (0.0, 0.0)
            for seed in range(20):
                q = (
                    np.random.default_rng(seed)
                    .standard_normal((2 * layer.kv_heads, 4, layer.head_dim))
                    .astype(np.float32)
                    * (1, 4)[seed % 2]
                )
                with simulator("fast"):
                    cache = DeviceCache(stream, codec.state, np, split=64)
                    found, exact, bound = compared(Here(), cache, decoded, q, None, 0)
                error = np.abs(found - exact)
                at = int(error.argmax())
                worst = max(worst, (float(error.flat[at]), float(bound.flat[at])))
                shares.append(error / bound)
            every = np.concatenate([share.ravel() for share in shares])
            print(
                f"| {name} | {dtype} | {worst[0]:.1e} | {worst[1]:.1e} | {every.max():.3f} | {np.median(every):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
