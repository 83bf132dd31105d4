"""The instances that the shared tests run on; a new codec adds its lines here and gets them all.

OBLIVIOUS: codecs with no state. FITTED: codecs fitted to calibration data; one line each, and test_fitted.py runs on it. Laws are what a codec promises beside its bytes: "lossless", "scale" (scaling the data by a power of
two scales what is decoded), "zero" (zero vectors come back as zeros).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import reference
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
    "Pipeline": reference.Pipeline([reference.TurboQuant(3)]),
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
LOSSLESS = ("Full",)
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


FITTED = {
    **{f"KVQuant {b}": Fitted(lambda text, b=b: reference.KVQuant.fit(text, bits=b)) for b in (1, 2, 3, 8)},
    "KVQuant sparse": Fitted(lambda text: reference.KVQuant.fit(text, bits=2, outliers=0.1, sinks=3)),
    "KVQuant dense post-RoPE": Fitted(
        lambda text: reference.KVQuant.fit(text, 3, 0.0, 0, levels="uniform", pre_rope=False)
    ),
    "Pipeline KVQuant": Fitted(
        lambda text: reference.Pipeline([reference.Full(), reference.KVQuant.fit(text, bits=4)])
    ),
}
