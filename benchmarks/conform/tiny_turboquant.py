"""tiny-turboquant 0.18.0: the layer of its cache without a window; transformers left out."""

import sys
import types

for name in ("transformers", "transformers.cache_utils"):
    sys.modules[name] = types.ModuleType(name)
layer = type("Layer", (), {"__init__": lambda self: None, "is_initialized": False})
sys.modules["transformers.cache_utils"].DynamicCache = sys.modules["transformers.cache_utils"].DynamicLayer = layer
from tiny_turboquant.cache import TinyKVLayer  # noqa: E402


class Codec:
    requirement, arrays = "tiny-turboquant==0.18.0", "torch"

    def __init__(self, bits=2):
        self.bits = bits

    def encode(self, keys, values):
        held = TinyKVLayer(self.bits, self.bits, residual_len=0, block_size=64, value_group_size=64)
        held.ingest(keys[None], values[None])
        return held

    def decode(self, held):
        return tuple(x.squeeze(0) for x in held._materialize_full())
