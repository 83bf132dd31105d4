"""pyturboquant-cpu 0.1.0, TurboQuant without bias."""

from pyturboquant_cpu import dequantize_prod, quantize_prod


class Codec:
    requirement, claims = "pyturboquant-cpu==0.1.0", ("turboquant-prod",)

    def __init__(self, bits=3, seed=0):
        self.bits, self.seed = bits, seed

    def encode(self, x):
        return quantize_prod(x, self.bits, seed=self.seed)

    def decode(self, held):
        return dequantize_prod(held)
