"""hqq 0.2.8 as KIVI has it, its optimiser off: groups of 64 tokens of a key channel, of 64 channels of a value vector."""

from hqq.core.quantize import Quantizer


class Codec:
    requirement, arrays = "hqq==0.2.8.post1", "torch"

    def __init__(self, bits=2):
        self.bits = bits

    def one(self, x):
        packed, meta = Quantizer.quantize(
            x.reshape(-1, x.shape[-1]), nbits=self.bits, group_size=64, optimize=False, axis=1, device="cpu"
        )
        meta["compute_dtype"] = x.dtype
        return packed, meta, tuple(x.shape)

    def back(self, held):
        return Quantizer.dequantize(held[0], held[1]).reshape(held[2])

    def encode(self, keys, values):
        if keys.shape[1] % 64 or values.shape[2] % 64:
            raise ValueError(
                f"tokens, value channels: expected multiples of the group of 64, got {keys.shape[1]}, {values.shape[2]}"
            )
        return self.one(keys.transpose(1, 2).contiguous()), self.one(values)

    def decode(self, held):
        return self.back(held[0]).transpose(1, 2), self.back(held[1])
