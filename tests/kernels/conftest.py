"""Kernel tests run in the checked simulator; `pytest tests/kernels --backend gpu` runs the same tests on a GPU."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

from gpu.module import Unavailable, simulator
from gpu.simt import build


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=("simulator", "gpu"),
        default="simulator",
        help="where kernels run (default: the CPU simulator)",
    )


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

    def running(
        self, order: int = 0, build: str = "check", races: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Kernels inside the `with` run checked, threads and blocks in this order; on a GPU as the GPU likes."""
        return contextlib.nullcontext() if self.name == "gpu" else simulator(build, seed=order, races=races)


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
