"""turboquant-torch 0.4.0, TurboQuant for the least error."""

from turboquant import TurboQuantMSE


class Codec:
    requirement, claims, arrays = "turboquant-torch==0.4.0", ("turboquant-mse",), "torch"

    def __init__(self, dim, bits=3, seed=0):
        self.bits, self.coder = bits, TurboQuantMSE(dim, bits, seed=seed)

    def encode(self, x):
        return self.coder.quantize(x)

    def decode(self, held):
        return self.coder.dequantize(held)
