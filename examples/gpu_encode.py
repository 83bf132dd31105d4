"""A cache from torch to compressed bytes and back by the kernels: no copy on the way in, none on the way out.

    python examples/gpu_encode.py                        # torch tensors on the CPU; kernels run in the simulator
    python examples/gpu_encode.py --device cuda          # torch tensors and kernels on the GPU
    python examples/gpu_encode.py --codec KIVI --bits 4 --tokens 4096

Encodes where the tensors lie, brings the bytes to the host, brings them back, decodes there, and attends to the codes without decoding.
"""

from __future__ import annotations

import argparse

import torch

import gpu
import reference
from gpu.interchange import as_torch, borrowed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--codec", choices=("KIVI", "TurboQuant"), default="TurboQuant")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    given = parser.parse_args(arguments)

    # as transformers keeps a layer: (batch, kv_heads, tokens, head_dim)
    made = torch.Generator().manual_seed(0)
    shape = (1, 2, given.tokens, 64)
    keys, values = (torch.randn(shape, generator=made).to(given.device, getattr(torch, given.dtype)) for _ in range(2))

    codec = getattr(gpu, given.codec)(bits=given.bits)
    k, v = borrowed(keys[0]), borrowed(values[0])
    print(f"{type(k).__module__} array on the tensor's own memory: {_address(k) == keys.data_ptr()}")

    stream = codec.encode_arrays(k, v)
    rate = 8 * len(stream) / (keys.numel() + values.numel())
    print(f"{given.codec}, {given.bits} bits: {len(stream)} bytes on the host, {rate:.2f} bits a number")

    import numpy as np

    namespace = np if given.device == "cpu" else gpu.module.require_gpu()
    back_keys, back_values = (as_torch(one) for one in codec.decode_arrays(stream, xp=namespace))
    for name, ours, exact in (("keys", back_keys, keys[0]), ("values", back_values, values[0])):
        error = ((ours.float() - exact.float()) ** 2).sum() / (exact.float() ** 2).sum()
        print(f"{name}: {ours.dtype} on {ours.device}, relative squared error {float(error):.4f}")

    # the reference reads the same bytes, to the same numbers
    known = reference.decode(stream)
    same = torch.equal(back_keys.cpu(), as_torch(np.ascontiguousarray(known.keys)))
    print(f"decoded as the reference decodes: {same}")

    queries = torch.randn((4, 1, 64), generator=made).to(given.device)
    cache = gpu.DeviceCache(stream, codec.state, namespace)
    out = as_torch(cache.attend(borrowed(queries)))
    print(f"attention on {cache.nbytes} bytes of codes: {tuple(out.shape)} {out.dtype} on {out.device}")


def _address(array: object) -> int:
    """Where an array begins in memory."""
    pointer = getattr(array, "ctypes", None)
    return int(pointer.data if pointer is not None else array.data.ptr)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
