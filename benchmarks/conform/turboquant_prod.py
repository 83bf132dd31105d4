"""turboquant 0.2.0, TurboQuant without bias. NumPy 2 dropped a function that it calls; its cache, which needs transformers, is left out."""

import sys
import types

import numpy as np

np.trapz = np.trapezoid  # noqa: NPY201
sys.modules["turboquant.cache"] = types.ModuleType("turboquant.cache")
sys.modules["turboquant.cache"].TurboQuantCache = None
import turboquant.core  # noqa: E402


class Codec:
    requirement, claims, arrays = "turboquant==0.2.0", ("turboquant-prod",), "torch"

    def __init__(self, dim, bits=3, seed=0):
        self.bits, self.coder = bits, turboquant.core.TurboQuantIP(dim, bits, device="cpu", seed=seed)

    def encode(self, x):
        return self.coder.quantize(x)

    def decode(self, held):
        return self.coder.dequantize(*held)
