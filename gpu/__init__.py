"""The codecs of `reference` as CuPy kernels: the same streams, byte for byte.

    import gpu
    gpu.codecs()                     # name -> class, each a subclass of the reference codec of that name
    print(gpu.status())              # what runs here: the kernels on a GPU, and in the simulator

Kernels take CuPy arrays to the GPU, and NumPy arrays to a simulator on the CPU (`gpu.simulator`), which needs g++ and CUDA's
header files but no GPU. Importing this package needs neither; whatever is missing is said when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvtheory import __version__

if TYPE_CHECKING:
    from gpu.device_cache import DeviceCache
    from gpu.module import KernelFault, Unavailable, launch, simulator
    from gpu.status import Status, status

__kvtheory__ = __version__

#: codec -> its module here; the class has the name of the reference codec
_CODECS: dict[str, str] = {
    "AATC": "gpu.aatc",
    "KIVI": "gpu.kivi",
    "KVQuant": "gpu.kvquant",
    "KVTC": "gpu.kvtc",
    "MergeReduce": "gpu.reducers",
    "MetricKLT": "gpu.metric_klt",
    "PALU": "gpu.palu",
    "PolarQuant": "gpu.polarquant",
    "QJL": "gpu.qjl",
    "ScissorHands": "gpu.reducers",
    "SnapKV": "gpu.reducers",
    "StreamingLLM": "gpu.reducers",
    "TurboQuant": "gpu.turboquant",
}
_NAMES = {
    "DeviceCache": "gpu.device_cache",
    "KernelFault": "gpu.module",
    "Status": "gpu.status",
    "Unavailable": "gpu.module",
    "launch": "gpu.module",
    "simulator": "gpu.module",
    "status": "gpu.status",
}

__all__ = ["DeviceCache", "KernelFault", "Status", "Unavailable", "codecs", "launch", "simulator", "status"]


def codecs() -> dict[str, type]:
    """Name -> class of each codec that has kernels here; mirrors `reference.codecs()`."""
    return {name: getattr(importlib.import_module(module), name) for name, module in _CODECS.items()}


def __getattr__(name: str) -> Any:
    module = _CODECS.get(name) or _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'gpu' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_CODECS})
