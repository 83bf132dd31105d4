"""kvtheory: a theory-first numerical toolkit for KV-cache compression, with verified reference codecs.

import kvtheory
cache = kvtheory.sample_cache()          # a real cache, embedded
kvtheory.distortion, kvtheory.risk, ...  # every module below is an attribute, imported when first used
kvtheory.reference is reference          # the codecs, under a name that no other package can take
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__kvtheory__ = __version__

if TYPE_CHECKING:
    from kvtheory.layer import Cache, Decoded, Layer, Rope
    from kvtheory.sample import sample_cache

_NAMES = {
    "Cache": "kvtheory.layer",
    "Decoded": "kvtheory.layer",
    "Layer": "kvtheory.layer",
    "Rope": "kvtheory.layer",
    "sample_cache": "kvtheory.sample",
}
_MODULES = (
    "accounting", "attention", "balancing", "distortion", "entropy", "layer", "models", "prediction", "quantization", "randomness", "rate",
    "risk", "sample", "statistics", "sweep", "synthetic", "tiny", "transform", "trie", "workload",
)  # fmt: skip
#: packages of this distribution with common names; another of that name may stand first on the path
_PACKAGES = ("figures", "gpu", "proofs_checks", "reference")

__all__ = ["Cache", "Decoded", "Layer", "Rope", "__version__", "sample_cache", *_MODULES, *_PACKAGES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"kvtheory.{name}")
    elif name in _PACKAGES:
        value = importlib.import_module(name)
        if getattr(value, "__kvtheory__", None) != __version__:
            found = getattr(value, "__file__", None) or list(getattr(value, "__path__", []))
            raise ImportError(f"kvtheory.{name}: another module named {name!r} stands first on the path: {found}")
    else:
        raise AttributeError(f"module 'kvtheory' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
