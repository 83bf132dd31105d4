"""turboquant-py 0.1.0, TurboQuant for the least error. It takes rows."""

import numpy as np
from turboquant import TurboQuant


class Codec:
    requirement, claims = "turboquant-py==0.1.0", ("turboquant-mse",)

    def __init__(self, dim, bits=3, seed=0):
        self.bits, self.coder = bits, TurboQuant(dim, bits, mode="mse", seed=seed)

    def encode(self, x):
        return self.coder.quantize(x.reshape(-1, x.shape[-1])), x.shape

    def decode(self, held):
        return np.asarray(self.coder.dequantize(held[0])).reshape(held[1])
