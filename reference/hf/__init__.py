"""Generate with compressed caches: `CompressedCache` is a transformers Cache whose older tokens are the streams of a reference codec.

    import reference
    from kvtheory import models
    tokenizer, model = models.load("smol")
    reference.hf.attach(model)
    cache = reference.hf.CompressedCache(reference.TurboQuant(bits=3), sinks=4, window=64)
    model.generate(**tokenizer("Once upon a time", return_tensors="pt"), past_key_values=cache, max_new_tokens=100)
    cache.held().per_number

Needs the extra `real`; nothing else in `reference` imports torch.
"""

from __future__ import annotations

from kvtheory import checks

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"reference.hf needs {error.name}: {checks.install('real')}") from error

from kvtheory.models.inside import UnsupportedModel
from reference.hf.attach import attach, detach
from reference.hf.cache import CompressedCache, Held, Request

__all__ = ["CompressedCache", "Held", "Request", "UnsupportedModel", "attach", "detach"]
