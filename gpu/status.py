"""What of `gpu` works on this machine, and one sentence for whatever does not."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Status", "status"]


@dataclass(frozen=True)
class Status:
    """Which backends run here.

    Attributes:
        gpu: kernels run on CuPy arrays.
        simulator: kernels run on NumPy arrays.
        gpu_note, simulator_note: a sentence on each: what it found, or what is missing and what still works.
    """

    gpu: bool
    gpu_note: str
    simulator: bool
    simulator_note: str

    def __str__(self) -> str:
        return f"GPU: {self.gpu_note}\nsimulator: {self.simulator_note}"


def status() -> Status:
    """Looks for CuPy, NVRTC, a GPU with a driver, g++ and CUDA's header files. Compiles nothing, raises nothing."""
    return Status(*_gpu(), *_simulator())


def _gpu() -> tuple[bool, str]:
    from gpu.module import Unavailable, require_gpu

    try:
        cupy = require_gpu()
    except Unavailable as missing:
        return False, str(missing)
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"]
    return True, f"kernels run on {name.decode() if isinstance(name, bytes) else name} through CuPy {cupy.__version__}"


def _simulator() -> tuple[bool, str]:
    from gpu.simt.build import Unavailable, compiler, cuda_includes

    try:
        cxx, folders = compiler(), cuda_includes()
    except Unavailable as missing:
        return False, str(missing)
    return True, f"kernels run on NumPy arrays, compiled by {cxx.name} with the CUDA headers of {folders[0]}"
