"""turboquant-torch 0.4.0, TurboQuant without bias."""

from turboquant.core import TurboQuant


class Codec:
    requirement, claims, arrays = "turboquant-torch==0.4.0", ("turboquant-prod",), "torch"

    def __init__(self, dim, bits=3, seed=0):
        self.bits, self.coder = bits, TurboQuant(dim, bits, unbiased=True, seed=seed)

    def encode(self, x):
        return self.coder.quantize(x)

    def decode(self, held):
        return self.coder.dequantize(held)
