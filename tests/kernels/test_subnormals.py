"""Were subnormal numbers of float32 flushed to 0, as by -ftz=true, the tests of every codec would see it: they are planted, and make other bytes.

What flushes is the simulator (`simulator(flush=True)`, which flushes float64 too); the kernels themselves are compiled with -ftz=false.
"""

import functools

import numpy as np
import pytest

import gpu
import reference
from gpu.casts import cast
from gpu.module import simulator
from kvtheory.layer import Layer
from tests.kernels.strategies import numbers
from tests.reference.strategies import text

CODECS = {
    "TurboQuant": {}, "TurboQuant 7": {"bits": 7}, "TurboQuant prod": {"kind": "prod"}, "QJL": {"bits": 2}, "PolarQuant": {}, "KIVI": {"group": 4, "window": 4},
}  # fmt: skip
FITTED = {
    "KVQuant": {"bits": 3, "sinks": 1}, "AATC": {"bits": 3, "protected": 0, "window": 0}, "PALU": {"bits": 3}, "MetricKLT": {"bits": 2, "window": 0},
    "MetricKLT fixed": {"bits": 2, "coding": "fixed", "window": 0}, "KVTC": {"bits": 3, "window": 0},
}  # fmt: skip


@functools.cache
def case(name, dtype):
    """A codec, its kernels, and data whose numbers are subnormal as float32, or become so."""
    kind = name.partition(" ")[0]
    if name in CODECS:
        keys, values = (numbers("subnormal", (2, 12, 8), np.float32, seed).astype(dtype) for seed in (1, 2))
        return getattr(reference, kind)(**CODECS[name]), getattr(gpu, kind)(**CODECS[name]), Layer(keys, values)
    small = 2.0**-140
    own = getattr(reference, kind).fit(text("A", 96, "float32", scale=small), **FITTED[name])
    data = text("B", 24, dtype, scale=small)
    return own, getattr(gpu, kind).of(own), data if own.scope == "cache" else data[0]


def arrays(decoded):
    every = decoded if isinstance(decoded, list) else [decoded]
    return [array.tobytes() for one in every for array in (one.keys, one.values)]


# (Of float64 keys a transform coder makes no float32 number that is subnormal)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, t) for name in CODECS for t in ("float32", "float64")), *((name, "float32") for name in FITTED)],
)
def test_flushing_would_be_seen(name, dtype):
    own, kernels, data = case(name, dtype)
    stream = own.encode(data)
    with simulator("check"):
        assert arrays(kernels.decode(stream)) == arrays(own.decode(stream))
        assert name in FITTED or kernels.encode(data) == stream
    with simulator("check", flush=True):
        seen = [kernels.encode(data) != stream, arrays(kernels.decode(stream)) != arrays(own.decode(stream))]
    assert any(seen), "neither the bytes nor the numbers are others"


def test_casts_would_show_it():
    """As CuPy's own casts would: numbers below 2^-126 are lost in float32, there and back."""
    x = np.array([2.0**-130, -(2.0**-149), 1.0])
    with simulator("check", flush=True):
        assert cast(x, np.float32).tolist() == [0.0, 0.0, 1.0] and cast(x.astype(np.float32), np.float64).tolist() == [
            0.0,
            0.0,
            1.0,
        ]
    with simulator("check"):
        assert cast(x, np.float32).tolist() == x.tolist() == cast(x.astype(np.float32), np.float64).tolist()
