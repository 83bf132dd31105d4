"""How each public package, and ours, is asked to encode and to decode; nothing here is measured."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

DIM = 128
#: numbers that share a scale in KIVI's table, as in the caches of transformers
GROUP = 64


def held_bytes(thing: Any) -> int:
    """Bytes of all arrays, tensors and numbers that an encoded object holds."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, (bytes, bytearray)):
        return len(thing)
    if isinstance(thing, float):
        return 8
    if hasattr(thing, "_data") and hasattr(
        thing, "_scale"
    ):  # a tensor of optimum-quanto, which seems to hold what it stands for
        return sum(map(held_bytes, (thing._data._data, thing._scale, thing._shift)))
    if hasattr(thing, "element_size"):  # a tensor
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(map(held_bytes, thing.values()))
    if isinstance(thing, (tuple, list)):
        return sum(map(held_bytes, thing))
    return held_bytes(vars(thing)) if hasattr(thing, "__dict__") else 0


@dataclasses.dataclass(frozen=True)
class Coder:
    """prepare: what is given -> what the package takes (not timed); encode, decode; held: bytes of what encode gives.

    share: how often the numbers that are given are coded at once.
    """

    prepare: Callable[[Any], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    held: Callable[[Any], int] = held_bytes
    share: int = 1


def _torch(x: Any) -> Any:
    import torch

    return tuple(map(torch.from_numpy, x)) if isinstance(x, tuple) else torch.from_numpy(x)


# -- ours ------------------------------------------------------------------------------------------------------------------


def _layer(x: Any) -> Any:
    """x as keys, and as much again as values; or (keys, values)."""
    import kvtheory

    if isinstance(x, tuple):
        return kvtheory.Layer(*x)
    return kvtheory.Layer(x, np.ascontiguousarray(x[:, ::-1]))


def our_turboquant(kind: str) -> Callable[[int, int], Coder]:
    def build(bits: int, seed: int) -> Coder:
        import reference

        codec = reference.TurboQuant(bits=bits, kind=kind, seed=seed)
        return Coder(_layer, codec.encode, lambda stream: codec.decode(stream).keys, share=2)

    return build


def our_qjl(bits: int, seed: int) -> Coder:
    """Keys, and values of one channel, which are not counted but timed."""
    import kvtheory
    import reference

    codec = reference.QJL(bits=bits, seed=seed)

    def held(stream: bytes) -> int:
        parts = reference.stream.read(stream)[1][0]
        return len(stream) - sum(part.remaining for part, name in zip(parts, codec.part_names) if "value" in name)

    return Coder(
        lambda x: kvtheory.Layer(x, np.ascontiguousarray(x[..., :1])),
        codec.encode,
        lambda stream: codec.decode(stream).keys,
        held,
    )


def our_kivi(bits: int, seed: int) -> Coder:
    import reference

    codec = reference.KIVI(bits=bits, group=GROUP, window=GROUP)

    def decode(stream: bytes) -> Any:
        decoded = codec.decode(stream)
        return decoded.keys, decoded.values

    return Coder(_layer, codec.encode, decode)


# -- TurboQuant for the least error ------------------------------------------------------------------------------------------


def pyturboquant_cpu_mse(bits: int, seed: int) -> Coder:
    from pyturboquant_cpu import dequantize_mse, quantize_mse

    return Coder(lambda x: x, lambda x: quantize_mse(x, bits, seed=seed), dequantize_mse)


def pyturboquant_mse(bits: int, seed: int) -> Coder:
    from pyturboquant.core import MSEQuantizer

    codec = MSEQuantizer(DIM, bits, seed=seed)
    return Coder(_torch, codec.quantize, codec.dequantize)


def turboquant_py_mse(bits: int, seed: int) -> Coder:
    from turboquant import TurboQuant

    codec = TurboQuant(DIM, bits, mode="mse", seed=seed)
    return Coder(lambda x: x.reshape(-1, DIM), codec.quantize, codec.dequantize)


def turboquant_torch_mse(bits: int, seed: int) -> Coder:
    from turboquant import TurboQuantMSE

    codec = TurboQuantMSE(DIM, bits, seed=seed)
    return Coder(_torch, codec.quantize, codec.dequantize)


def _turboquant() -> Any:
    setattr(np, "trapz", np.trapezoid)  # noqa: B010 it calls a function that NumPy 2 dropped
    sys.modules["turboquant.cache"] = type(sys)("turboquant.cache")  # which needs transformers
    sys.modules["turboquant.cache"].TurboQuantCache = None
    import turboquant.core

    return turboquant.core


def turboquant_mse(bits: int, seed: int) -> Coder:
    codec = _turboquant().TurboQuantMSE(DIM, bits, device="cpu", seed=seed)
    return Coder(_torch, codec.quantize, lambda held: codec.dequantize(*held))


def turboquant_llm_mse(bits: int, seed: int) -> Coder:
    from turboquant_llm import TurboQuantCompressor, TurboQuantConfig

    codec = TurboQuantCompressor(DIM, TurboQuantConfig(bits_main=bits, seed=seed))
    return Coder(lambda x: x, codec.compress, codec.reconstruct_first_stage)


# -- TurboQuant without bias -------------------------------------------------------------------------------------------------


def pyturboquant_cpu_prod(bits: int, seed: int) -> Coder:
    from pyturboquant_cpu import dequantize_prod, quantize_prod

    return Coder(lambda x: x, lambda x: quantize_prod(x, bits, seed=seed), dequantize_prod)


def _estimates(sketch: Any, signs: Any, norms: Any) -> Any:
    """The vectors that pyturboquant's estimates of inner products stand for: those with the unit vectors, all at once."""
    import torch

    return sketch.estimate_inner_product_batch_queries(
        signs.reshape(-1, signs.shape[-1]), torch.eye(DIM), norms.reshape(-1)
    ).T


def pyturboquant_prod(bits: int, seed: int) -> Coder:
    from pyturboquant.core import InnerProductQuantizer

    codec = InnerProductQuantizer(DIM, bits, seed=seed)

    def decode(held: Any) -> Any:
        sketched = _estimates(codec.qjl_transform, held.qjl_bits, held.residual_norms)
        return codec.dequantize(held).reshape(sketched.shape) + sketched

    return Coder(_torch, codec.quantize, decode)


def turboquant_py_prod(bits: int, seed: int) -> Coder:
    from turboquant import TurboQuant

    codec = TurboQuant(DIM, bits, mode="inner_product", seed=seed)
    return Coder(lambda x: x.reshape(-1, DIM), codec.quantize, codec.dequantize)


def turboquant_torch_prod(bits: int, seed: int) -> Coder:
    from turboquant.core import TurboQuant

    codec = TurboQuant(DIM, bits, unbiased=True, seed=seed)
    return Coder(_torch, codec.quantize, codec.dequantize)


def turboquant_prod(bits: int, seed: int) -> Coder:
    module = _turboquant()
    codec = module.TurboQuantIP(DIM, bits, device="cpu", seed=seed)
    return Coder(_torch, codec.quantize, lambda held: codec.dequantize(*held))


# -- QJL -----------------------------------------------------------------------------------------------------------------------


def pyturboquant_qjl(bits: int, seed: int) -> Coder:
    import torch
    from pyturboquant.core.qjl import QJLTransform

    codec = QJLTransform(DIM, bits * DIM, seed=seed)
    return Coder(
        _torch,
        lambda x: (codec.quantize(x), torch.linalg.norm(x, dim=-1)),
        lambda held: _estimates(codec, *held).contiguous(),
    )


def turboquant_torch_qjl(bits: int, seed: int) -> Coder:
    """With its own functions that pack signs, which its QJL does not call."""
    from turboquant.qjl import QJL, QJLOutput, pack_bits, unpack_bits

    codec = QJL(DIM, bits * DIM, seed=seed)

    def encode(x: Any) -> Any:
        output = codec.quantize(x)
        return pack_bits(output.sign_bits), output.norms

    def decode(held: Any) -> Any:
        return codec.dequantize_for_dot(QJLOutput(unpack_bits(held[0], bits * DIM), held[1]))

    return Coder(_torch, encode, decode)


def turboquant_py_qjl(bits: int, seed: int) -> Coder:
    """It gives no vectors: its estimates of the inner products with the unit vectors, one after the other."""
    from turboquant import QJL

    codec = QJL(DIM, bits * DIM, seed=seed)
    return Coder(
        lambda x: x.reshape(-1, DIM),
        codec.quantize,
        lambda held: np.stack([codec.inner_product(unit, held) for unit in np.eye(DIM)], axis=1),
    )


def pyturboquant_cpu_qjl(bits: int, seed: int) -> Coder:
    """Its functions as quantize_prod calls them: signs packed and unpacked vector by vector."""
    from pyturboquant_cpu.packing import pack_signs, unpack_signs
    from pyturboquant_cpu.qjl import generate_qjl_matrix, qjl_dequantize, qjl_quantize

    if bits > 1:
        raise ValueError("its sketch has as many rows as columns")
    sketch = generate_qjl_matrix(DIM, seed)

    def encode(x: Any) -> Any:
        return [pack_signs(one) for one in qjl_quantize(x, sketch)], np.linalg.norm(x, axis=1)

    def decode(held: Any) -> Any:
        signs = np.stack([unpack_signs(one, DIM) for one in held[0]])
        return held[1][:, None] * qjl_dequantize(signs, sketch)

    return Coder(lambda x: x.reshape(-1, DIM), encode, decode)


# -- KIVI ----------------------------------------------------------------------------------------------------------------------


def quanto(key_axis: int) -> Callable[[int, int], Coder]:
    """Groups of GROUP numbers: axis -1 of one channel, axis 0 of one token."""

    def build(bits: int, seed: int) -> Coder:
        from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight

        kind = {2: qint2, 4: qint4}.get(bits)
        if kind is None:
            raise ValueError("it has 2 and 4 bits")
        optimizer = MaxOptimizer()

        def one(x: Any, axis: int) -> Any:
            scale, shift = optimizer(x, kind, axis, GROUP)
            return quantize_weight(x, kind, axis, scale, shift, GROUP)

        return Coder(
            _torch,
            lambda x: (one(x[0], key_axis), one(x[1], 0)),
            lambda held: tuple(side.dequantize() for side in held),
        )

    return build


def hqq(bits: int, seed: int) -> Coder:
    """Keys are transposed so that a group has one channel, and back."""
    import torch
    from hqq.core.quantize import Quantizer

    def one(x: Any) -> Any:
        packed, meta = Quantizer.quantize(
            x.reshape(-1, x.shape[-1]), nbits=bits, group_size=GROUP, optimize=False, axis=1, device="cpu"
        )
        meta["compute_dtype"] = torch.float32
        return packed, meta, x.shape

    def back(held: Any) -> Any:
        return Quantizer.dequantize(held[0], held[1]).reshape(held[2])

    return Coder(
        _torch,
        lambda x: (one(x[0].transpose(1, 2)), one(x[1])),
        lambda held: (back(held[0]).transpose(1, 2).contiguous(), back(held[1])),
    )


def tiny_turboquant(bits: int, seed: int) -> Coder:
    """The layer of its cache, without a window."""
    for name in ("transformers", "transformers.cache_utils"):
        sys.modules[name] = type(sys)(name)
    kind = type("Layer", (), {"__init__": lambda self: None, "is_initialized": False})
    sys.modules["transformers.cache_utils"].DynamicCache = sys.modules["transformers.cache_utils"].DynamicLayer = kind
    from tiny_turboquant.cache import TinyKVLayer

    def encode(x: Any) -> Any:
        layer = TinyKVLayer(bits, bits, residual_len=0, block_size=GROUP, value_group_size=GROUP)
        layer.ingest(x[0][None], x[1][None])
        return layer

    return Coder(_torch, encode, lambda layer: layer._materialize_full())
