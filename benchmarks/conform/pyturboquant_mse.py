"""pyturboquant 0.1.1 (asks for Python 3.12, runs on 3.11), TurboQuant for the least error."""

from pyturboquant.core import MSEQuantizer


class Codec:
    requirement, claims, arrays = "pyturboquant==0.1.1", ("turboquant-mse",), "torch"

    def __init__(self, dim, bits=3, seed=0):
        self.bits, self.coder = bits, MSEQuantizer(dim, bits, seed=seed)

    def encode(self, x):
        return self.coder.quantize(x)

    def decode(self, held):
        return self.coder.dequantize(held)
