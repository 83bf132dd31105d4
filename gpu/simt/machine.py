"""Loads the libraries of build.py and launches their kernels on NumPy arrays."""

from __future__ import annotations

import ctypes as c
import functools
import platform
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gpu.simt import build as _build

__all__ = ["KernelFault", "launch", "load"]

_ONE_AT_A_TIME = threading.Lock()  # one set of stacks and fibers; ctypes lets other threads in
_ROOM = 1000
_MAX_PARAMETERS = 64


class KernelFault(RuntimeError):
    """A kernel did what CUDA forbids.

    Attributes:
        kernel: the instance, "encode<float, 4>".
        fault: the rule: "out of bounds", "misaligned", "data race", "uninitialised", "read-only", "divergent barrier",
            "divergent warp operation", "deadlock", "mask", "inactive lane", "width", "arithmetic", "stack overflow",
            "endless", "trap", "unspecified".
        detail: what happened, in a sentence.
        places: "file:line" of the access at fault, and of the one that it conflicts with, as far as known.
        thread, block: indices (x, y, z).
    """

    def __init__(
        self,
        kernel: str,
        fault: str,
        detail: str,
        places: Sequence[str] = (),
        thread: tuple[int, ...] = (),
        block: tuple[int, ...] = (),
    ) -> None:
        self.kernel, self.fault, self.detail, self.places = kernel, fault, detail, tuple(places)
        self.thread, self.block = thread, block
        where = " against ".join(self.places)
        who = f" [thread {thread} of block {block}]" if thread else ""
        super().__init__(f"{kernel}: {fault}{' at ' + where if where else ''}: {detail}{who}")


class _Parameter(c.Structure):
    _fields_ = [("kind", c.c_char), ("pointer", c.c_bool), ("constant", c.c_bool), ("size", c.c_uint32)]


class _Buffer(c.Structure):
    _fields_ = [
        ("host", c.c_void_p),
        ("bytes", c.c_size_t),
        ("name", c.c_char_p),
        ("writable", c.c_uint8),
        ("tail", c.c_uint8),
    ]


class _Variable(c.Structure):
    _fields_ = [("offset", c.c_size_t), ("bytes", c.c_size_t), ("name", c.c_char_p)]


class _Launch(c.Structure):
    _fields_ = [
        ("grid", c.c_uint32 * 3), ("block", c.c_uint32 * 3), ("shared_bytes", c.c_size_t),
        ("buffers", c.POINTER(_Buffer)), ("n_buffers", c.c_uint32), ("buffer_of", c.POINTER(c.c_int32)),
        ("values", c.POINTER(c.c_void_p)), ("value_bytes", c.POINTER(c.c_size_t)), ("n_values", c.c_uint32),
        ("variables", c.POINTER(_Variable)), ("n_variables", c.c_uint32),
        ("stacks", c.c_void_p), ("seed", c.c_uint64), ("seconds", c.c_double), ("races", c.c_uint32), ("flush", c.c_uint32),
        ("fault", c.c_char_p), ("text", c.c_char_p), ("room", c.c_uint32),
        ("code", c.c_void_p * 2), ("file", c.c_char_p), ("line", c.c_int32),
        ("thread", c.c_uint32 * 3), ("at_block", c.c_uint32 * 3),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    """One instance in a loaded library."""

    call: Any
    parameters: tuple[_Parameter, ...]
    names: tuple[str, ...]
    variables: c.Array[_Variable]


class Library:
    """One source in one build, loaded."""

    def __init__(self, source: Path, instances: Sequence[str], build: str, portable: bool = False) -> None:
        self.path, symbols = _build.library(source, instances, build, portable)
        self._library = c.CDLL(str(self.path))
        functions = dict(symbols["functions"])
        self.base = self._address("simt_address") - next(a for a, m in functions.items() if m == "simt_address")
        symbol = [functions[self._address(f"kernel_{i}") - self.base] for i in range(len(instances))]
        texts = "\n".join(_build.with_includes(source).values())
        self._places: dict[int, str | None] = {}
        self.entries: dict[str, _Entry] = {}
        for i, name in enumerate(instances):
            # a static variable is named after its function; what other kernels own is not for this one to touch
            others = tuple("_ZZ" + s.removeprefix("_Z") + "E" for s in symbol if s != symbol[i])
            chosen = [v for v in symbols["variables"] if not v[2].startswith(others)]
            variables = (_Variable * len(chosen))(
                *(_Variable(v[0], v[1], _variable_name(v[3]).encode()) for v in chosen)
            )
            described = (_Parameter * _MAX_PARAMETERS)()
            n = getattr(self._library, f"describe_{i}")(described)
            call = getattr(self._library, f"launch_{i}")
            self.entries[name] = _Entry(call, tuple(described[:n]), _parameter_names(texts, name, n), variables)

    def _address(self, function: str) -> int:
        get = getattr(self._library, function)
        get.restype = c.c_void_p
        return int(get())

    def place(self, code: int) -> str | None:
        """ "file:line" of the kernel's source for an address in the library."""
        if code not in self._places:  # a shrinking test meets the same fault many times
            self._places[code] = self._look_up(code)
        return self._places[code]

    def _look_up(self, code: int) -> str | None:
        if not self.base <= code:
            return None
        command = ["addr2line", "-Cie", str(self.path), hex(code - self.base - 1)]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError):
            return None
        for line in lines:
            path, _, number = line.split(" (")[0].rpartition(":")
            if path.endswith((".cu", ".cuh")) and number.isdigit():
                return f"{Path(path).name}:{number}"
        return None

    @functools.cached_property
    def stacks(self) -> int:
        return _stacks(self)


_shared_stacks: int | None = None


def _stacks(library: Library) -> int:
    global _shared_stacks
    if _shared_stacks is None:
        make = library._library.simt_stacks
        make.restype = c.c_void_p
        _shared_stacks = make()
        if not _shared_stacks:
            _shared_stacks = None
            raise MemoryError("no address space for the stacks of 1024 threads")
    return _shared_stacks


def _variable_name(demangled: str) -> str:
    """ "void k<float>(float*)::tile" -> "shared memory tile"."""
    if demangled == "smem":
        return "dynamic shared memory"
    return f"shared memory {demangled.rsplit('::', 1)[-1]}"


def _parameter_names(texts: str, instance: str, n: int) -> tuple[str, ...]:
    """Names of a kernel's parameters out of its source; empty strings where the text cannot be read so simply."""
    kernel = instance.partition("<")[0].rpartition("::")[2].strip()
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", texts, flags=re.S)
    for found in re.finditer(rf"__global__[^;{{}}]*?\b{re.escape(kernel)}\s*\(([^)]*)\)\s*\{{", text):
        names = [p.split("=")[0].split()[-1].lstrip("*&") for p in found[1].split(",") if p.split()]
        if len(names) == n:
            return tuple(names)
    return ("",) * n


@functools.cache
def _load(source: Path, instances: tuple[str, ...], build: str, portable: bool) -> Library | _build.BuildError:
    try:
        return Library(source, instances, build, portable)
    except _build.BuildError as error:
        return error


def load(source: Path, instances: tuple[str, ...], build: str, portable: bool = False) -> Library:
    """The library of a source, compiled and loaded once in a process; what does not compile is not tried again either."""
    library = _load(source, instances, build, portable)
    if isinstance(library, _build.BuildError):
        raise _build.BuildError(str(library))
    return library


_KINDS = {"f": "f", "h": "f", "i": "i", "u": "u", "b": "V", "?": "b"}
_SPOKEN = {"f": "float", "i": "int", "u": "uint", "h": "float", "b": "bfloat", "?": "bool"}


def _spoken(p: _Parameter) -> str:
    kind = p.kind.decode()
    return "bool" if kind == "?" else f"{_SPOKEN[kind]}{8 * p.size}"


def _fits(dtype: np.dtype[Any], p: _Parameter) -> bool:
    kind = p.kind.decode()
    if kind == "b":
        return dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16))
    return dtype.kind == _KINDS[kind] and dtype.itemsize == p.size


def launch(
    library: Library, instance: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int,
    *, seed: int, races: bool, seconds: float, flush: bool = False,
) -> None:  # fmt: skip
    """Runs one kernel on C-contiguous NumPy arrays and NumPy scalars, which `gpu.module.launch` has looked at.

    Raises:
        TypeError: the number of arguments or the type of one is not the kernel's.
        ValueError: arguments that overlap in memory without being the same.
        NotImplementedError: `flush` on a processor that cannot.
        KernelFault: the kernel did what CUDA forbids. Arrays then keep what they held.
    """
    entry = library.entries[instance]
    if len(args) != len(entry.parameters):
        raise TypeError(f"{instance} takes {len(entry.parameters)} arguments, got {len(args)}")
    spoken = [f"argument {i} ({name})" if name else f"argument {i}" for i, name in enumerate(entry.names)]
    buffers: list[_Buffer] = []
    seen: dict[tuple[int, int], int] = {}
    buffer_of = (c.c_int32 * max(1, len(args)))(*(-1 for _ in args))
    values: list[np.ndarray] = []
    for i, (a, p) in enumerate(zip(args, entry.parameters)):
        struct = p.kind == b"x"
        if p.pointer != isinstance(a, np.ndarray):
            raise TypeError(
                f"{instance}: {spoken[i]} is {'an array' if p.pointer else 'a scalar'} there, got {type(a).__name__}"
            )
        if not struct and not _fits(a.dtype, p):
            raise TypeError(f"{instance}: {spoken[i]} is {_spoken(p)} there, got {a.dtype}")
        if struct and (a.nbytes % p.size if p.pointer else a.nbytes != p.size):
            raise TypeError(f"{instance}: {spoken[i]} is made of {p.size} bytes each there, got {a.nbytes} bytes")
        if not p.pointer:
            values.append(np.asarray(a).reshape(1))
            continue
        writable = a.flags.writeable and not p.constant
        at = (a.ctypes.data, a.nbytes)
        if a.nbytes and at in seen:
            known = buffers[seen[at]]
            known.writable |= writable
            buffer_of[i] = seen[at]
        else:
            for (start, size), other in seen.items():
                if start < at[0] + at[1] and at[0] < start + size and (writable or buffers[other].writable):
                    raise ValueError(f"{instance}: {spoken[i]} overlaps another argument in memory")
            buffer_of[i] = seen[at] = len(buffers)
            buffers.append(_Buffer(a.ctypes.data, a.nbytes, spoken[i].encode(), writable, 0))
        values.append(np.zeros(1, np.uint64))
    fault, text = c.create_string_buffer(64), c.create_string_buffer(_ROOM)
    array_of_buffers = (_Buffer * max(1, len(buffers)))(*buffers)
    how = _Launch(
        grid=(c.c_uint32 * 3)(*grid), block=(c.c_uint32 * 3)(*block), shared_bytes=shared_mem,
        buffers=array_of_buffers, n_buffers=len(buffers), buffer_of=buffer_of,
        values=(c.c_void_p * max(1, len(values)))(*(v.ctypes.data for v in values)),
        value_bytes=(c.c_size_t * max(1, len(values)))(*(v.nbytes for v in values)), n_values=len(values),
        variables=entry.variables, n_variables=len(entry.variables), stacks=library.stacks,
        seed=seed & (2**64 - 1), seconds=seconds, races=races, flush=flush,
        fault=c.cast(fault, c.c_char_p), text=c.cast(text, c.c_char_p), room=_ROOM,
    )  # fmt: skip
    with _ONE_AT_A_TIME:
        failed = entry.call(c.byref(how))
    if failed == 3:
        raise NotImplementedError(
            f"flush: expected a processor that flushes subnormals (x86-64, aarch64), got {platform.machine()}"
        )
    if failed == 2:
        raise MemoryError(f"{instance}: no memory for copies of the arguments")
    if failed:
        places = [place for code in how.code if code and (place := library.place(code))]
        if how.file and (here := Path(how.file.decode()).name).endswith((".cu", ".cuh")):
            places[:1] = [f"{here}:{how.line}"]
        if fault.value == b"endless":  # the second is where it read last, in case the first is none of its own
            places = places[:1]
        raise KernelFault(
            instance, fault.value.decode(), text.value.decode(), places, tuple(how.thread), tuple(how.at_block)
        )
    for b in array_of_buffers[: len(buffers)]:
        if b.tail:  # seen only afterwards, so without a line: the checked build names it
            rule = "read-only" if b.tail == 3 else "out of bounds"
            what = {
                1: "bytes before the start of {} were written",
                2: "bytes behind the end of {} were written",
                3: "{} was written",
            }
            raise KernelFault(instance, rule, what[b.tail].format(b.name.decode()))
