"""The launches of an operation, on a GPU or in the simulator, as they happen: to be repeated, and to be counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import module

__all__ = ["Launch", "recording"]


@dataclass(frozen=True)
class Launch:
    """One launch. again: the same once more, without the checks of `gpu.launch`. written: bytes of arrays that the kernel may write, where
    the simulator knows its signature, else 0.
    """

    file: str
    instance: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Any, ...]
    shared_mem: int
    again: Callable[[], None]
    written: int = 0

    @property
    def kernel(self) -> str:
        return self.instance.split("<")[0]

    @property
    def threads(self) -> int:
        return int(np.prod(self.grid)) * int(np.prod(self.block))

    @property
    def blocks(self) -> int:
        return int(np.prod(self.grid))

    @property
    def nbytes(self) -> int:
        """Bytes that must move: each array once, or of `_MOVED` what is looked at; an array given twice counts once."""
        special = _MOVED.get((self.file, self.kernel))
        arrays = {_place(a): int(a.nbytes) for a in self.args if not isinstance(a, np.generic)}
        return sum(arrays.values()) if special is None else int(special(self.args))


def _place(array: Any) -> tuple[int, int]:
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.nbytes
    return int(array.data.ptr), int(array.nbytes)


def _sum(array: Any) -> int:
    return int(array.astype(np.int64).sum())


#: kernels that are given room which they need not fill, or arrays that they need not read whole: bytes that must move, by arguments
_MOVED: dict[tuple[str, str], Callable[[tuple[Any, ...]], int]] = {
    # every gathered token is read and written; `source` says which
    ("tokens.cu", "gather"): lambda a: 2 * a[2].nbytes + a[1].nbytes,
    # symbols, contexts, tables, words that were used of the room, their counts, states
    ("rans.cu", "encode"): lambda a: sum(x.nbytes for x in (a[0], a[1], a[2], a[4], a[5])) + 2 * _sum(a[4]),
    ("rans.cu", "gather"): lambda a: 2 * a[3].nbytes + a[1].nbytes + a[2].nbytes,
}


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects launches inside the `with`, wherever they run."""
    calls: list[Launch] = []
    function, simulate, load = module.Source._function, module._simulate, module._load
    loaded: dict[int, str] = {}

    def recorded_function(self: module.Source, instance: str) -> Any:
        return _Recorded(function(self, instance), self.name, instance, calls)

    def recorded_load(path: Any, *rest: Any) -> Any:
        library = load(path, *rest)
        loaded[id(library)] = path.name
        return library

    def recorded_simulate(
        library: Any, name: str, grid: Any, block: Any, args: Any, shared_mem: int = 0, **how: Any
    ) -> None:
        def again() -> None:
            simulate(library, name, grid, block, args, shared_mem, **how)

        again()
        given = zip(args, library.entries[name].parameters)
        written = sum(int(a.nbytes) for a, p in given if p.pointer and not p.constant)
        file = loaded.get(id(library), "?")
        calls.append(Launch(file, name, tuple(grid), tuple(block), tuple(args), shared_mem, again, written))

    module.Source._function = recorded_function  # type: ignore[method-assign]
    module._load, module._simulate = recorded_load, recorded_simulate  # type: ignore[assignment]
    try:
        yield calls
    finally:
        module.Source._function = function  # type: ignore[method-assign]
        module._load, module._simulate = load, simulate


class _Recorded:
    """A CuPy function that notes how it is called."""

    def __init__(self, function: Any, file: str, instance: str, calls: list[Launch]) -> None:
        self.__dict__.update(function=function, file=file, instance=instance, calls=calls)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["function"], name, value)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        function = self.__dict__["function"]

        def again() -> None:
            function(grid, block, args, shared_mem=shared_mem)

        again()
        own = self.__dict__
        own["calls"].append(
            Launch(own["file"], own["instance"], tuple(grid), tuple(block), tuple(args), shared_mem, again)
        )
