"""Kernels by name, and their launch: on a GPU through CuPy, or on the CPU in the simulator.

    MODULE = Source("turboquant.cu", ["encode<float, 4>", ...])
    launch(MODULE["encode<float, 4>"], grid, block, (x, codes, np.int32(n)))

The arguments choose where: CuPy arrays run on the GPU, NumPy arrays in the simulator. Nothing falls back silently.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from gpu.simt import build as _build
from gpu.simt.build import BuildError, Unavailable
from gpu.simt.machine import KernelFault
from gpu.simt.machine import launch as _simulate
from gpu.simt.machine import load as _load

__all__ = [
    "ELEMENT", "BuildError", "Kernel", "KernelFault", "Source", "Unavailable", "UnknownKernel", "element", "launch", "namespace",
    "require_gpu", "simulator", "sources",
]  # fmt: skip

FOLDER = Path(__file__).parent / "kernels"
#: NVRTC's options. No fused multiply-add: the CPU rounds twice, and both must give the same bits; subnormals are kept, and
#: divisions and roots rounded as IEEE 754 says, which are NVRTC's defaults, written out.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
#: NumPy's element types and the kernels' names for them
ELEMENT = {np.dtype(np.float32): "float", np.dtype(np.float16): "__half", np.dtype(ml_dtypes.bfloat16): "__nv_bfloat16"}
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)


class UnknownKernel(KeyError):
    """An instance that a Source does not list, and that is therefore not compiled."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Kernel:
    """One instance of a kernel, to be given to `launch`."""

    name: str
    source: Source


def _tidy(instance: str) -> str:
    return re.sub(r"\s*,\s*", ", ", instance.strip())


_SOURCES: list[Source] = []


class Source:
    """A file of kernels and the instances of them that are ever launched.

    Args:
        name: file in gpu/kernels, "turboquant.cu"; or a path (tests).
        instances: C++ name expressions, "encode<__half, 4>". All are compiled together when the first is launched.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an instance is listed twice.
    """

    def __init__(self, name: str | Path, instances: Sequence[str]) -> None:
        self.path = Path(name) if Path(name).is_absolute() else FOLDER / name
        self.name = self.path.name
        self.instances = tuple(_tidy(i) for i in instances)
        if not self.path.is_file():
            raise FileNotFoundError(f"no kernels in {self.path}")
        if len(set(self.instances)) != len(self.instances):
            raise ValueError(f"{self.name}: instances: an instance is listed twice: {self.instances}")
        self._known = frozenset(self.instances)
        self._modules: dict[str, tuple[Any, dict[str, str]]] = {}
        _SOURCES.append(self)

    def __getitem__(self, instance: str) -> Kernel:
        """The kernel of that name. Raises UnknownKernel (a KeyError) for one that is not listed."""
        tidy = _tidy(instance)
        if tidy not in self._known:
            raise UnknownKernel(f"{self.name} has no instance {instance!r}; it has {', '.join(self.instances)}")
        return Kernel(tidy, self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.instances)

    def _function(self, instance: str) -> Any:
        """The kernel for CuPy's current device."""
        from gpu.compile import stored

        cupy = _cupy()
        architecture = str(cupy.cuda.Device().compute_capability)
        if architecture not in self._modules:
            path, mangled = stored(self, architecture)
            self._modules[architecture] = cupy.RawModule(path=path), mangled
        module, mangled = self._modules[architecture]
        return module.get_function(mangled[instance])

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {len(self.instances)} instances)"


def sources() -> tuple[Source, ...]:
    """All that were made so far in gpu/kernels, in order: what the compile test and the tables of docs/gpu.md go through."""
    return tuple(s for s in _SOURCES if s.path.parent == FOLDER)


@dataclass(frozen=True)
class _Settings:
    build: str
    seed: int
    races: bool
    seconds: float
    flush: bool


_settings: contextvars.ContextVar[_Settings | None] = contextvars.ContextVar("simulator", default=None)


def _current() -> _Settings:
    chosen = _settings.get()
    if chosen is not None:
        return chosen
    build = os.environ.get("KVTHEORY_SIMT") or "fast"
    if build not in _build.BUILDS:
        raise ValueError(f"KVTHEORY_SIMT: expected one of {', '.join(_build.BUILDS)}, got {build!r}")
    return _Settings(build, 0, True, 60.0, False)


@contextlib.contextmanager
def simulator(
    build: str = "fast", seed: int = 0, races: bool = True, seconds: float = 60.0, flush: bool = False
) -> Iterator[None]:
    """How kernels on NumPy arrays run inside the `with`; elsewhere: fast, or what $KVTHEORY_SIMT says, in order.

    Args:
        build: "fast", or "check", which looks at every access to memory.
        seed: order of threads and blocks; 0: ascending, else shuffled. A right kernel gives the same bytes for every seed.
        races: whether two unordered accesses of one address are a fault (in the checked build).
        seconds: of processor time, after which a launch counts as endless.
        flush: subnormal numbers are 0, in float and double: what a GPU would do with float by -ftz=true, which the kernels are not
            compiled with. For tests: numbers that would show it make other bytes.

    Raises:
        ValueError: `build` is neither.
    """
    if build not in _build.BUILDS:
        raise ValueError(f"build: expected one of {', '.join(_build.BUILDS)}, got {build!r}")
    token = _settings.set(_Settings(build, int(seed), bool(races), float(seconds), bool(flush)))
    try:
        yield
    finally:
        _settings.reset(token)


def element(dtype: Any) -> str:
    """The kernels' name of an element type: float16 -> "__half".

    Raises:
        TypeError: none of float16, bfloat16, float32 (float64 layers are rounded to float32 before, as the reference does).
    """
    found = ELEMENT.get(np.dtype(dtype))
    if found is None:
        raise TypeError(f"dtype: the kernels take float16, bfloat16 or float32, got {np.dtype(dtype)}")
    return found


def _is_cupy(a: Any) -> bool:
    return type(a).__module__.split(".")[0] == "cupy" and hasattr(a, "__cuda_array_interface__")


def namespace(*arrays: Any) -> ModuleType:
    """numpy or cupy, whichever all the arrays are of.

    Raises:
        TypeError: a mix of both, or something else.
    """
    if arrays and all(isinstance(a, np.ndarray) for a in arrays):
        return np
    if arrays and all(_is_cupy(a) for a in arrays):
        return sys.modules["cupy"]
    raise TypeError(
        f"expected NumPy arrays only or CuPy arrays only, got {', '.join(type(a).__name__ for a in arrays) or 'nothing'}"
    )


_STILL = "the kernels still run on NumPy arrays in the simulator, and the codecs of `reference` always"


def _cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise Unavailable(
            f"kernels on a GPU need CuPy, which cannot be imported ({error}): `pip install 'kvtheory[gpu]'`; {_STILL}"
        ) from error
    return cupy  # type: ignore[no-any-return]


def require_gpu() -> ModuleType:
    """CuPy, once it has been seen to reach a GPU and its compiler.

    Raises:
        Unavailable: one sentence on what is missing: CuPy, a driver that is new enough, a GPU, or NVRTC.
    """
    cupy = _cupy()
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError, or whatever the loader of the driver's library raises
        raise Unavailable(
            f"CuPy is installed, but the NVIDIA driver does not answer ({_first_line(error)}); {_STILL}"
        ) from error
    if not found:
        raise Unavailable(f"CuPy is installed, but this machine has no NVIDIA GPU; {_STILL}")
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        raise Unavailable(
            f"CuPy finds no NVRTC to compile kernels with ({_first_line(error)}): `pip install nvidia-cuda-nvrtc`; {_STILL}"
        ) from error
    return cupy


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _size(what: str, given: Any, most: tuple[int, int, int]) -> tuple[int, int, int]:
    size = (given,) if not isinstance(given, Sequence) else tuple(given)
    if not 1 <= len(size) <= 3 or not all(isinstance(n, int | np.integer) for n in size):
        raise TypeError(f"{what}: expected one to three integers, got {given!r}")
    x, y, z = (*(int(n) for n in size), 1, 1)[:3]
    for n, m in zip((x, y, z), most):
        if not 1 <= n <= m:
            raise ValueError(f"{what}: expected 1 to {most} along each axis, got {given!r}")
    return x, y, z


def launch(kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], shared_mem: int = 0) -> None:
    """Runs a kernel: on the GPU if its arrays are CuPy's, in the simulator if they are NumPy's.

    Args:
        kernel: `source["name"]`.
        grid: number of blocks along x, y, z: an int or up to three.
        block: number of threads in a block, likewise, 1024 at most in all.
        args: C-contiguous arrays, and NumPy scalars of exactly the parameters' types. bfloat16 is ml_dtypes', which CuPy
            knows from version 14 on.
        shared_mem: bytes of dynamic shared memory of each block.

    Raises:
        TypeError: arrays of two kinds or of another library, a Python number, or (simulator) a type that is not the parameter's.
        ValueError: a size out of range, an array that is not C-contiguous, or one that overlaps another in part.
        Unavailable: no CuPy, or no g++ or CUDA headers for the simulator.
        KernelFault: (simulator) the kernel did what CUDA forbids.
    """
    size_of_grid, size_of_block = _size("grid", grid, _MAX_GRID), _size("block", block, _MAX_BLOCK)
    if int(np.prod(size_of_block)) > 1024:
        raise ValueError(f"block: expected 1024 threads at most, got {block!r}")
    if not 0 <= shared_mem <= _build.DYNAMIC_SHARED:
        raise ValueError(
            f"shared_mem: expected 0 to {_build.DYNAMIC_SHARED} bytes, which every architecture has, got {shared_mem}"
        )
    on_gpu = on_cpu = False
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray):
            on_cpu = True
        elif _is_cupy(a):
            on_gpu = True
        elif not isinstance(a, np.generic):
            raise TypeError(
                f"args[{i}] of {kernel.name}: expected a NumPy or CuPy array, or a NumPy scalar of the parameter's type, "
                f"got {type(a).__module__}.{type(a).__name__}"
            )
        if not isinstance(a, np.generic) and not a.flags.c_contiguous:
            raise ValueError(
                f"args[{i}] of {kernel.name}: expected a C-contiguous array, got strides {a.strides} for shape {a.shape}"
            )
    if on_gpu and on_cpu:
        kinds = ["NumPy" if isinstance(a, np.ndarray) else "CuPy" for a in args if not isinstance(a, np.generic)]
        raise TypeError(f"args of {kernel.name}: arrays of NumPy and of CuPy in one launch: {', '.join(kinds)}")
    if on_gpu:
        here = _cupy().cuda.Device().id
        for i, a in enumerate(args):
            if _is_cupy(a) and a.device.id != here:
                raise ValueError(
                    f"args[{i}] of {kernel.name}: expected an array of the current device, {here}, got one of device {a.device.id}"
                )
        function = kernel.source._function(kernel.name)
        if shared_mem > 48 << 10:
            function.max_dynamic_shared_size_bytes = shared_mem
        function(size_of_grid, size_of_block, tuple(args), shared_mem=shared_mem)
    elif on_cpu:
        how = _current()
        library = _load(kernel.source.path, kernel.source.instances, how.build)
        _simulate(
            library,
            kernel.name,
            size_of_grid,
            size_of_block,
            args,
            shared_mem,
            seed=how.seed,
            races=how.races,
            seconds=how.seconds,
            flush=how.flush,
        )
    else:
        raise TypeError(f"args of {kernel.name}: no array among them, so nothing says where it should run")
