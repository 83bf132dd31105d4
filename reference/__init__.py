"""Reference codecs in NumPy on one bit-exact stream format: clear before fast, and what every other implementation is tested against.

    import reference
    codec = reference.TurboQuant(bits=3)
    stream = codec.encode(layer)                    # bytes: self-describing, checksummed, every bit counted
    decoded = reference.decode(stream)
    reference.held_bits(stream, layer)              # 8 len(stream) / numbers

Libraries write `from kvtheory import reference`: the same module, under a name that no other package can take.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import kvtheory

__version__ = kvtheory.__version__
__kvtheory__ = __version__

if TYPE_CHECKING:
    from reference.aatc import AATC
    from reference.codec import Appender, Codec, codecs, decode, decode_cache, encode_cache, load, register
    from reference.errors import CorruptStream, StateMismatch
    from reference.full import Full
    from reference.inspection import Inspection, inspect
    from reference.kivi import KIVI
    from reference.kvquant import KVQuant
    from reference.kvtc import KVTC
    from reference.merge_reduce import MergeReduce
    from reference.metric_klt import MetricKLT
    from reference.palu import PALU
    from reference.pipeline import Pipeline
    from reference.polarquant import PolarQuant
    from reference.predictive_delta import PredictiveDelta
    from reference.prefix_store import PrefixStore
    from reference.qjl import QJL
    from reference.rates import AtRate, at_rate, held_bits, roundtrip
    from reference.scissorhands import ScissorHands
    from reference.snapkv import SnapKV
    from reference.streaming_llm import StreamingLLM
    from reference.token_replay import TokenReplay
    from reference.turboquant import TurboQuant

#: codec id -> its module. A line here makes a codec part of `codecs()` and `decode`; name it above and in __all__ as well.
_CODECS = {
    "Full": "reference.full",
    "TurboQuant": "reference.turboquant",
    "QJL": "reference.qjl",
    "PolarQuant": "reference.polarquant",
    "KIVI": "reference.kivi",
    "KVQuant": "reference.kvquant",
    "AATC": "reference.aatc",
    "KVTC": "reference.kvtc",
    "PALU": "reference.palu",
    "MetricKLT": "reference.metric_klt",
    "StreamingLLM": "reference.streaming_llm",
    "SnapKV": "reference.snapkv",
    "ScissorHands": "reference.scissorhands",
    "MergeReduce": "reference.merge_reduce",
    "TokenReplay": "reference.token_replay",
    "PrefixStore": "reference.prefix_store",
    "PredictiveDelta": "reference.predictive_delta",
    "Pipeline": "reference.pipeline",
}
_NAMES = {
    "Appender": "reference.codec",
    "AtRate": "reference.rates",
    "Codec": "reference.codec",
    "CorruptStream": "reference.errors",
    "Inspection": "reference.inspection",
    "StateMismatch": "reference.errors",
    "at_rate": "reference.rates",
    "codecs": "reference.codec",
    "decode": "reference.codec",
    "decode_cache": "reference.codec",
    "encode_cache": "reference.codec",
    "held_bits": "reference.rates",
    "inspect": "reference.inspection",
    "load": "reference.codec",
    "register": "reference.codec",
    "roundtrip": "reference.rates",
}
_MODULES = (
    "calibration",
    "codec",
    "compare",
    "entropy_coding",
    "errors",
    "hadamard",
    "hf",
    "kept",
    "memory",
    "merge_reduce",
    "merging",
    "minmax",
    "nuq",
    "packing",
    "parameters",
    "places",
    "prefix_deltas",
    "prefix_store",
    "rans",
    "rates",
    "reducer",
    "rotary",
    "shape",
    "stream",
    "vectors",
)

__all__ = [
    "AATC",
    "Appender",
    "AtRate",
    "Codec",
    "CorruptStream",
    "Full",
    "Inspection",
    "KIVI",
    "KVQuant",
    "KVTC",
    "Pipeline",
    "MergeReduce",
    "MetricKLT",
    "PALU",
    "PolarQuant",
    "PredictiveDelta",
    "PrefixStore",
    "QJL",
    "ScissorHands",
    "SnapKV",
    "StateMismatch",
    "StreamingLLM",
    "TokenReplay",
    "TurboQuant",
    "__version__",
    "at_rate",
    "codecs",
    "decode",
    "decode_cache",
    "encode_cache",
    "held_bits",
    "inspect",
    "load",
    "register",
    "roundtrip",
]


def __getattr__(name: str) -> Any:
    if name in _CODECS or name in _NAMES:
        value = getattr(importlib.import_module(_CODECS.get(name) or _NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"reference.{name}")
    else:
        raise AttributeError(f"module 'reference' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
