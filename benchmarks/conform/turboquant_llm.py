"""turboquant-llm 0.1.0, the only decoder that its compressor has."""

from turboquant_llm import TurboQuantCompressor, TurboQuantConfig


class Codec:
    requirement, claims = "turboquant-llm==0.1.0", ("turboquant-mse",)

    def __init__(self, dim, bits=3, seed=0):
        self.bits, self.coder = bits, TurboQuantCompressor(dim, TurboQuantConfig(bits_main=bits, seed=seed))

    def encode(self, x):
        return self.coder.compress(x)

    def decode(self, held):
        return self.coder.reconstruct_first_stage(held)
