"""A CuPy of NumPy arrays, as strict as CuPy: so that code for GPU arrays runs where there is no GPU, and its slips are seen.

What it holds to: no implicit conversion to NumPy (`np.asarray(x)` raises), no arithmetic with NumPy arrays, 0-d arrays where NumPy gives scalars,
CuPy's signatures where the real CuPy is installed, subnormal numbers of float32 flushed by arithmetic and casts (CuPy compiles its own kernels
with -ftz=true), no Python integer beyond an array's type, and `RawModule`, whose kernels run in the simulator. What it is not: CuPy's memory, streams,
index clipping, or its results in the last bit of a sum.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from gpu.module import sources
from gpu.simt import machine

__all__ = ["RawModule", "install", "ndarray"]

_SCALARS = (int, float, bool, np.generic)


def _refuse(what: str) -> TypeError:
    return TypeError(f"CuPy: {what}")


def _out(x: Any) -> Any:
    """What CuPy gives where NumPy gives x."""
    if isinstance(x, np.ndarray | np.generic):
        return ndarray(np.asarray(x))
    if isinstance(x, tuple):  # named ones too
        return tuple(_out(y) for y in x)
    if isinstance(x, list):
        return [_out(y) for y in x]
    return x


def _in(x: Any, where: str, numpy_too: bool = False) -> Any:
    if isinstance(x, ndarray):
        return x._data
    if isinstance(x, np.ndarray):
        if numpy_too:
            return x
        raise _refuse(f"{where}: Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, tuple | list):
        return type(x)(_in(y, where, numpy_too) for y in x)
    if isinstance(x, slice):
        return slice(*(None if p is None else int(p) for p in (x.start, x.stop, x.step)))
    return x


def _flushed(data: Any) -> Any:
    """As CuPy's arithmetic reads and writes float32: a number below the least normal one is 0."""
    if not isinstance(data, np.ndarray) or data.dtype != np.float32:
        return data
    return np.where(np.abs(data) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), data), data)


def _empty(shape: Any, dtype: Any = float, order: str = "C") -> Any:
    """As on a GPU: whatever was there."""
    from tests.kernels.conftest import fill

    return _out(fill(np.zeros(shape, dtype, order)))


class _Flags:
    def __init__(self, data: np.ndarray) -> None:
        self.c_contiguous, self.f_contiguous = data.flags.c_contiguous, data.flags.f_contiguous


class ndarray:
    """An array "on the GPU"."""

    def __init__(self, data: np.ndarray) -> None:
        if data.dtype.kind not in "biufc" and data.dtype != ml_dtypes.bfloat16:  # CuPy 14 knows bfloat16
            raise _refuse(f"Unsupported dtype {data.dtype}")
        self._data = data

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _refuse(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly"
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **how: Any) -> Any:
        if method != "__call__" or how.get("out") is not None:
            return NotImplemented
        return _function(ufunc.__name__)(*args, **how)

    def __array_function__(self, function: Any, _types: Any, args: Any, how: Any) -> Any:
        return _function(function.__name__)(*args, **how)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self._data.dtype.str,
            "data": (self._data.ctypes.data, False),
        }

    shape = property(lambda self: self._data.shape)
    dtype = property(lambda self: self._data.dtype)
    device = property(lambda self: types.SimpleNamespace(id=0))
    ndim = property(lambda self: self._data.ndim)
    size = property(lambda self: self._data.size)
    nbytes = property(lambda self: self._data.nbytes)
    itemsize = property(lambda self: self._data.itemsize)
    strides = property(lambda self: self._data.strides)
    data = property(lambda self: types.SimpleNamespace(ptr=self._data.ctypes.data))
    flags = property(lambda self: _Flags(self._data))
    base = property(lambda self: None if self._data.base is None else ndarray(np.asarray(self._data.base)))
    T = property(lambda self: ndarray(self._data.T))

    def get(self) -> np.ndarray:
        return self._data.copy()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, key: Any) -> Any:
        return _out(self._data[_in(key, "index", numpy_too=True)])

    def __setitem__(self, key: Any, value: Any) -> None:
        given = _in(value, "assignment")
        if isinstance(given, np.ndarray) and given.dtype != self._data.dtype:
            given = _flushed(_flushed(given).astype(self._data.dtype))
        self._data[_in(key, "index", numpy_too=True)] = given

    def __iter__(self) -> Any:
        return (_out(x) for x in self._data)

    def __int__(self) -> int:
        return int(self._data)

    def __float__(self) -> float:
        return float(self._data)

    def __bool__(self) -> bool:
        return bool(self._data)

    def __index__(self) -> int:
        return int(self._data.__index__())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not callable(getattr(np.ndarray, name, None)):
            raise AttributeError(f"CuPy's ndarray has no {name}")
        return functools.partial(_method, self, name)


def _method(self: ndarray, name: str, *args: Any, **how: Any) -> Any:
    if _real is not None:
        if not hasattr(_real.ndarray, name):
            raise AttributeError(f"CuPy's ndarray has no {name}")
        head = (getattr(_real.ndarray, name).__doc__ or "").splitlines()[:1]
        unknown = [k for k in how if head and "(" in head[0] and k not in head[0]]
        if unknown:
            raise _refuse(f"ndarray.{name} knows no {unknown}: {head[0]}")
    data = self._data
    if name == "astype" and np.dtype(args[0] if args else how["dtype"]) != data.dtype:
        return _out(_flushed(np.asarray(_flushed(data).astype(*args, **how))))
    return _out(getattr(data, name)(*_in(args, name), **{k: _in(v, name) for k, v in how.items()}))


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ndarray, *others: Any) -> Any:
        for other in others:
            if type(other) is int and self._data.dtype.kind in "iu":
                own = np.iinfo(self._data.dtype)
                if not own.min <= other <= own.max:  # NumPy lets comparisons pass
                    raise OverflowError(f"CuPy: Python integer {other} out of bounds for {self._data.dtype}")
            if not isinstance(other, (ndarray, *_SCALARS)):
                if isinstance(other, np.ndarray) and other.ndim == 0:
                    continue
                raise _refuse(f"{name}: Unsupported type {type(other)}")
        result = getattr(_flushed(self._data), name)(
            *(_flushed(o._data) if isinstance(o, ndarray) else o for o in others)
        )
        return result if result is NotImplemented else _out(_flushed(result))

    return operate


_OPERATORS = """add sub mul truediv floordiv mod pow matmul lshift rshift and or xor eq ne lt le gt ge neg pos abs invert radd rsub rmul
rtruediv rfloordiv rmod rpow rmatmul rlshift rrshift rand ror rxor"""
_IN_PLACE = "iadd isub imul itruediv ifloordiv ilshift irshift iand ior ixor"
for _name in re.findall(r"\w+", _OPERATORS):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in re.findall(r"\w+", _IN_PLACE):

    def _in_place(self: ndarray, other: Any, _name: str = f"__{_name}__") -> ndarray:
        if not isinstance(other, (ndarray, *_SCALARS)):
            raise _refuse(f"{_name}: Unsupported type {type(other)}")
        getattr(self._data, _name)(other._data if isinstance(other, ndarray) else other)
        return self

    setattr(ndarray, f"__{_name}__", _in_place)
ndarray.__module__ = "cupy"
ndarray.__hash__ = None  # type: ignore[assignment]

_real: types.ModuleType | None = None
#: functions that take NumPy arrays to the GPU
_TRANSFERS = ("array", "asarray", "asanyarray", "ascontiguousarray")


def _function(name: str, inside: str = "") -> Callable[..., Any]:
    """CuPy's function of this name: NumPy's on the data of its arrays, with CuPy's signature."""
    home = getattr(np, inside) if inside else np
    if name == "absolute":
        name = "abs"
    found = getattr(home, name)

    def call(*args: Any, **how: Any) -> Any:
        if _real is not None:
            genuine = getattr(getattr(_real, inside) if inside else _real, name)  # AttributeError: CuPy has none
            if isinstance(genuine, _real.ufunc):
                if set(how) - {"out", "dtype"}:
                    raise _refuse(f"{name} knows no {sorted(set(how) - {'out', 'dtype'})}")
            else:
                inspect.signature(genuine).bind(*args, **how)
        too = name in _TRANSFERS
        computes = isinstance(found, np.ufunc)
        given = [_flushed(a) if computes else a for a in _in(args, name, too)]
        result = found(*given, **{k: _in(v, name, too) for k, v in how.items()})
        return _out(_flushed(result) if computes else result)

    return call


class _Function:
    """A kernel of a RawModule: it runs in the simulator, as `gpu.simulator` says."""

    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, library: machine.Library, name: str) -> None:
        self.library, self.name = library, name

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        from gpu.module import _current

        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: more dynamic shared memory than was asked for")
        how = _current()
        data = [a._data if isinstance(a, ndarray) else a for a in args]
        machine.launch(
            self.library,
            self.name,
            grid,
            block,
            data,
            shared_mem,
            seed=how.seed,
            races=how.races,
            seconds=how.seconds,
            flush=how.flush,
        )


class RawModule:
    """Of a file's path, which `gpu.compile.stored` would have given that of a cubin."""

    def __init__(self, *, path: str) -> None:
        self.source = next(s for s in sources() if str(s.path) == path)

    def get_function(self, name: str) -> _Function:
        if name not in self.source.instances:
            raise KeyError(name)
        return _Function(machine.load(self.source.path, self.source.instances, "check"), name)


def install(patch: Any) -> types.ModuleType:
    """Puts this CuPy where `import cupy` finds it, for as long as pytest's monkeypatch `patch` lasts."""
    global _real
    try:
        import cupy as real

        _real = real if hasattr(real, "_core") else _real
    except ImportError:
        _real = None
    fake = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: 1, getDeviceProperties=lambda i: {"name": b"no GPU"}
    )
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime, cuda.Device = runtime, lambda: types.SimpleNamespace(id=0, compute_capability="90")  # type: ignore[attr-defined]
    cuda.synchronised = []  # type: ignore[attr-defined]
    cuda.get_current_stream = lambda: types.SimpleNamespace(synchronize=lambda: cuda.synchronised.append(1))  # type: ignore[attr-defined]
    cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: (0, 0))  # type: ignore[attr-defined]
    fake.cuda = cuda  # type: ignore[attr-defined]
    fake.ndarray, fake.RawModule, fake.__version__ = ndarray, RawModule, "fake"  # type: ignore[attr-defined]

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(getattr(np, name, None), types.ModuleType):
            return types.SimpleNamespace(
                **{n: _function(n, name) for n in dir(getattr(np, name)) if callable(getattr(getattr(np, name), n))}
            )
        if name == "empty":
            return _empty
        found = getattr(np, name)
        return found if isinstance(found, type) or not callable(found) else _function(name)

    fake.__getattr__ = attribute  # type: ignore[method-assign]
    patch.setitem(sys.modules, "cupy", fake)
    patch.setitem(sys.modules, "cupy.cuda", cuda)
    for source in sources():
        patch.setattr(source, "_modules", {})
    # what NVRTC compiles has tests of its own: here the name of a kernel is that of its instance
    patch.setattr("gpu.compile.stored", lambda source, _: (str(source.path), {i: i for i in source.instances}))
    return fake
