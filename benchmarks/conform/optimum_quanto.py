"""optimum-quanto 0.2.7 as KIVI has it: groups of 64 tokens of a key channel, of 64 channels of a value vector."""

from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight


class Codec:
    requirement, arrays = "optimum-quanto==0.2.7", "torch"

    def __init__(self, bits=2):
        if bits not in (2, 4):
            raise ValueError(f"bits: expected 2 or 4, got {bits}")
        self.bits, self.kind = bits, qint2 if bits == 2 else qint4

    def one(self, x, axis):
        scale, shift = MaxOptimizer()(x, self.kind, axis, 64)
        return quantize_weight(x, self.kind, axis, scale, shift, 64)

    def encode(self, keys, values):
        if keys.shape[1] % 64 or values.shape[2] % 64:
            raise ValueError(
                f"tokens, value channels: expected multiples of the group of 64, got {keys.shape[1]}, {values.shape[2]}"
            )
        return self.one(keys, -1), self.one(values, 0)

    def decode(self, held):
        return held[0].dequantize(), held[1].dequantize()
