"""Kernel tests run in the checked simulator; `pytest tests/kernels --backend gpu` runs the same tests on a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import control

from gpu import module
from gpu.module import Unavailable, simulator
from gpu.simt import build


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=("simulator", "gpu"),
        default="simulator",
        help="where kernels run (default: the CPU simulator)",
    )
    parser.addoption(
        "--count-examples",
        action="store_true",
        help="say how many examples of hypothesis have launched each kernel (in one process: -p no:xdist)",
    )


_examples: dict[str, dict[int, object]] = {}


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--count-examples", default=False):
        return
    simulate = module._simulate

    def counted(library: Any, name: str, *args: Any, **how: Any) -> None:
        if control.currently_in_test_context():
            own = _examples.setdefault(f"{library.path.name.split('-')[0]}.cu {name.split('<', maxsplit=1)[0]}", {})
            data = control.current_build_context().data
            own[id(data)] = data  # kept, lest another gets its number
        simulate(library, name, *args, **how)

    module._simulate = counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kernel, own in sorted(_examples.items()):
        terminalreporter.write_line(f"{len(own):6} examples  {kernel}")


def fill(array: np.ndarray) -> np.ndarray:
    """The array, all of its bytes 0xA5: what nothing has been written to looks like nothing that is right."""
    if array.size and not array.dtype.hasobject:
        array.ravel(order="K").view(np.uint8)[...] = 0xA5
    return array


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """numpy.empty gives bytes 0xA5 inside the `with`: memory that a fresh process gets is often 0, which hides what a kernel leaves out."""
    empty = np.empty

    def filled(*args: Any, **how: Any) -> np.ndarray:
        return fill(empty(*args, **how))

    np.empty = filled  # type: ignore[assignment]
    try:
        yield
    finally:
        np.empty = empty  # type: ignore[assignment]


class Backend:
    """Where the kernels of a test run, and how arrays get there."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def xp(self) -> Any:
        """The array namespace of this backend."""
        if self.name == "gpu":
            import cupy

            return cupy
        return np

    def put(self, array: np.ndarray) -> Any:
        """A NumPy array as an argument of `launch` here; a copy on the GPU."""
        return self.xp.asarray(array) if self.name == "gpu" else array

    def get(self, array: Any) -> np.ndarray:
        """An argument of `launch` back as a NumPy array."""
        return np.asarray(array.get() if self.name == "gpu" else array)

    @contextlib.contextmanager
    def running(self, order: int = 0, build: str = "check", races: bool = True) -> Iterator[None]:
        """Kernels inside the `with` run checked, threads and blocks in this order, into arrays of rubbish; on a GPU as the GPU likes."""
        if self.name == "gpu":
            yield
            return
        seconds = float(os.environ.get("KVTHEORY_KERNEL_SECONDS", "60"))
        with simulator(build, seed=order, races=races, seconds=seconds), unwritten():
            yield

    def with_layers(self, order: int) -> bool:
        """Whether a test in this order gives a codec layers, which hold NumPy arrays, or bare arrays, as it always does on a GPU."""
        return self.name == "simulator" and order % 2 == 0


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    name = request.config.getoption("--backend", default="simulator")
    if name == "simulator":
        try:
            build.compiler()
            build.cuda_includes()
        except Unavailable as missing:
            if os.environ.get("KVTHEORY_REQUIRE_KERNELS"):
                pytest.fail(str(missing))
            pytest.skip(str(missing))
    return Backend(name)
