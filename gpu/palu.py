"""PALU on the GPU: `reference.PALU` with the same parameters, fit, state and streams, encoded and decoded by kernels (gpu.transform_coding)."""

from __future__ import annotations

import reference
from gpu.transform_coding.codec import Transformed

__all__ = ["PALU"]


class PALU(Transformed, reference.PALU):
    """`reference.PALU`; `PALU.of(codec)` takes one over that was fitted. Layers run in the simulator, CuPy arrays by `encode_arrays` on the GPU.

    A coefficient within rounding of a threshold may get the code next to the reference's; NumPy and CuPy arrays give the same bytes, and what
    a stream decodes to is the reference's, bit for bit.
    """
