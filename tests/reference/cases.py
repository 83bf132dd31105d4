"""The instances that the shared tests run on; a new codec adds its lines here and gets them all.

OBLIVIOUS: codecs with no state. FITTED: codecs fitted to calibration data; one line each, and test_fitted.py runs on it. Laws are what a codec promises beside its bytes: "lossless", "scale" (scaling the data by a power of
two scales what is decoded), "zero" (zero vectors come back as zeros).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import reference
from kvtheory.prediction import LayerLinear, Nothing
from tests.reference.strategies import text

OBLIVIOUS = {
    "Full": reference.Full(),
    **{f"TurboQuant {b}": reference.TurboQuant(b) for b in range(1, 9)},
    "TurboQuant 3 seed 7": reference.TurboQuant(3, seed=7),
    **{f"TurboQuant prod {b}": reference.TurboQuant(b, kind="prod") for b in (1, 2, 3, 8)},
    "TurboQuant haar": reference.TurboQuant(3, rotation="haar"),
    "TurboQuant prod haar": reference.TurboQuant(2, kind="prod", rotation="haar"),
    **{f"QJL {b}": reference.QJL(b) for b in (1, 2, 3, 8)},
    "QJL 1 seed 7": reference.QJL(1, seed=7),
    "PolarQuant": reference.PolarQuant(),
    "PolarQuant 3 2 seed 7": reference.PolarQuant((3, 2), seed=7),
    "PolarQuant 1": reference.PolarQuant((1,)),
    "PolarQuant deep": reference.PolarQuant((8, 7, 6, 5, 4, 3, 2, 1)),
    **{f"KIVI {b}": reference.KIVI(b) for b in (2, 4)},
    **{f"KIVI {b} groups of 2": reference.KIVI(b, group=2, window=2) for b in (1, 2, 8)},
    "KIVI 3 groups of 3": reference.KIVI(3, group=3, window=6),
    "KIVI 4 groups of 8": reference.KIVI(4, group=8, window=8),
    "KIVI 2 groups of 1": reference.KIVI(2, group=1, window=1),
    "StreamingLLM": reference.StreamingLLM(),
    "Pipeline": reference.Pipeline([reference.TurboQuant(3)]),
    "Pipeline StreamingLLM KIVI": reference.Pipeline([reference.StreamingLLM(), reference.KIVI(4, group=1, window=1)]),
    "Pipeline Full KIVI": reference.Pipeline([reference.Full(), reference.KIVI(4, group=1, window=1)]),
}
#: one of each code path, for tests that take their time
FEW = (
    "Full",
    "TurboQuant 1",
    "TurboQuant 3",
    "TurboQuant 6",
    "TurboQuant prod 1",
    "TurboQuant prod 3",
    "TurboQuant haar",
    "QJL 1",
    "QJL 3",
    "PolarQuant",
    "PolarQuant 3 2 seed 7",
    "KIVI 2",
    "KIVI 2 groups of 2",
    "KIVI 3 groups of 3",
)
#: StreamingLLM: of as many tokens as its cache holds; of more in REDUCERS
LOSSLESS = ("Full", "StreamingLLM")
#: the newest tokens are kept bit for bit, -0.0 included
RECENT = tuple(name for name in OBLIVIOUS if "KIVI" in name)
#: a key is coded together with those of other tokens, channel by channel: what it decodes to depends on them
TOGETHER = tuple(name for name in RECENT if "groups of" in name and "groups of 1" not in name)
#: the same bytes on every machine, whatever its floating point does
EXACT = tuple(name for name in OBLIVIOUS if "haar" not in name)


@dataclass(frozen=True)
class Fitted:
    """fit: calibration layers -> codec. sizes: of `strategies.text`, where its defaults do not do; layers() are of the same sizes."""

    fit: Callable[[list[Any]], reference.Codec]
    sizes: dict[str, Any] = field(default_factory=dict)

    def layers(self, name: str = "B", **changes: Any) -> list[Any]:
        """What it can encode, of another text than it was fitted to."""
        return text(name, **{**self.sizes, **changes})

    @cached_property
    def codec(self) -> reference.Codec:
        return self.fit(self.layers("A"))

    @cached_property
    def other(self) -> reference.Codec:
        """Fitted to the text that it encodes."""
        return self.fit(self.layers("B"))


FITTED = {
    **{f"KVQuant {b}": Fitted(lambda text, b=b: reference.KVQuant.fit(text, bits=b)) for b in (1, 2, 3, 8)},
    "KVQuant sparse": Fitted(lambda text: reference.KVQuant.fit(text, bits=2, outliers=0.1, sinks=3)),
    "KVQuant dense post-RoPE": Fitted(
        lambda text: reference.KVQuant.fit(text, 3, 0.0, 0, levels="uniform", pre_rope=False)
    ),
    **{f"AATC {b:g}": Fitted(lambda text, b=b: reference.AATC.fit(text, b, window=2)) for b in (1.5, 3)},
    "AATC factored groups of 1": Fitted(
        lambda text: reference.AATC.fit(
            text, 2.3, value_bits=3, scaling="factored", head_group=1, split="uneven", sinks=1, window=2
        )
    ),
    "AATC variance": Fitted(
        lambda text: reference.AATC.fit(
            text,
            2,
            weights="variance",
            scaling="channelwise",
            quantiser="midtread",
            split="none",
            protected=4,
            sinks=0,
            window=0,
        )
    ),
    "KVTC": Fitted(lambda text: reference.KVTC.fit(text, 2, window=3)),
    "KVTC rank": Fitted(lambda text: reference.KVTC.fit(text, 2.5, value_bits=3, rank=21, sinks=0, window=0)),
    "PALU": Fitted(reference.PALU.fit),
    "PALU energy": Fitted(
        lambda text: reference.PALU.fit(text, 5, 0.8, search="energy", hadamard=False, scale="max", sinks=1, window=3)
    ),
    "PALU uniform": Fitted(lambda text: reference.PALU.fit(text, 8, 1.0, search="uniform", head_group=1, window=2)),
    "MetricKLT": Fitted(lambda text: reference.MetricKLT.fit(text, 2)),
    "MetricKLT window": Fitted(
        lambda text: reference.MetricKLT.fit(text, 3, joint="head", window=5, classes=1, block=7, jensen=True)
    ),
    "MetricKLT variance": Fitted(
        lambda text: reference.MetricKLT.fit(text, 4, joint="none", metric="variance", classes=3)
    ),
    "MetricKLT fixed": Fitted(lambda text: reference.MetricKLT.fit(text, 2, coding="fixed", jensen=True)),
    "MetricKLT fixed channelwise": Fitted(
        lambda text: reference.MetricKLT.fit(
            text,
            2.5,
            coding="fixed",
            joint="none",
            tables="model",
            scaling="channelwise",
            window=3,
            sinks=2,
            distances="zero",
            metric="coherent",
        )
    ),
    "PredictiveDelta": Fitted(lambda text: reference.PredictiveDelta(LayerLinear.fit(text), reference.TurboQuant(3))),
    "PredictiveDelta corrected": Fitted(
        lambda text: reference.PredictiveDelta(Nothing.fit(text), reference.TurboQuant(3), "corrected")
    ),
    "Pipeline AATC": Fitted(lambda text: reference.Pipeline([reference.Full(), reference.AATC.fit(text, 4, window=2)])),
    "Pipeline KVTC": Fitted(lambda text: reference.Pipeline([reference.Full(), reference.KVTC.fit(text, 4, window=2)])),
    "Pipeline PALU": Fitted(lambda text: reference.Pipeline([reference.Full(), reference.PALU.fit(text, 4)])),
    "Pipeline MetricKLT": Fitted(lambda text: reference.Pipeline([reference.Full(), reference.MetricKLT.fit(text, 4)])),
    "Pipeline KVQuant": Fitted(
        lambda text: reference.Pipeline([reference.Full(), reference.KVQuant.fit(text, bits=4)])
    ),
}


#: what leaves fewer tokens, on layers with queries of about 40 tokens; one line each, and test_reducers.py runs on it
REDUCERS: dict[str, Any] = {
    "StreamingLLM 12": reference.StreamingLLM(12),
    "StreamingLLM share": reference.StreamingLLM(0.5, sinks=3),
    "StreamingLLM window original": reference.StreamingLLM(12, 2, 5, "original"),
    "StreamingLLM sinks only": reference.StreamingLLM(12, 4, 0),
    "StreamingLLM no sinks": reference.StreamingLLM(12, 0),
    "SnapKV 12": reference.SnapKV(12, sinks=2, window=3),
    "SnapKV max": reference.SnapKV(12, sinks=0, window=4, kernel=3, pooling="max"),
    "SnapKV share": reference.SnapKV(0.4, window=5, kernel=1),
    "ScissorHands 12": reference.ScissorHands(12, sinks=2, window=3),
    "ScissorHands short history": reference.ScissorHands(12, sinks=0, window=0, history=3, drop=0.1),
    "ScissorHands share": reference.ScissorHands(0.4, sinks=1, window=4, drop=1.0),
    **{
        f"MergeReduce {name}": reference.MergeReduce(12, name, sinks=2, window=3)
        for name in reference.merge_reduce.REDUCERS
    },
    "MergeReduce leaves of 16": reference.MergeReduce(12, "random", sinks=0, window=0, block=16),
    "MergeReduce share": reference.MergeReduce(0.4, "refit", sinks=1, window=4),
}
#: they keep tokens as they are, with weight 1
EVICTORS = tuple(
    name
    for name, codec in REDUCERS.items()
    if isinstance(codec, (reference.StreamingLLM, reference.SnapKV, reference.ScissorHands))
)
