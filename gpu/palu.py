"""PALU on the GPU: `reference.PALU` with the same parameters, fit, state and streams, encoded and decoded by kernels (gpu.transform_coding)."""

from __future__ import annotations

import reference
from gpu.transform_coding.codec import Transformed

__all__ = ["PALU"]


class PALU(Transformed, reference.PALU):
    """`reference.PALU`; `PALU.of(codec)` takes one over that was fitted. Layers run in the simulator, CuPy arrays by `encode_arrays` on the GPU.

    With NumPy arrays every byte is the reference's, with CuPy arrays a coefficient next to a threshold may get the neighbouring code;
    what a stream decodes to is the reference's, bit for bit, with both.
    """
