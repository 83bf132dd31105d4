"""pyturboquant-cpu 0.1.0, TurboQuant for the least error."""

from pyturboquant_cpu import dequantize_mse, quantize_mse


class Codec:
    requirement, claims = "pyturboquant-cpu==0.1.0", ("turboquant-mse",)

    def __init__(self, bits=3, seed=0):
        self.bits, self.seed = bits, seed

    def encode(self, x):
        return quantize_mse(x, self.bits, seed=self.seed)

    def decode(self, held):
        return dequantize_mse(held)
