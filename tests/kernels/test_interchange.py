"""Tensors of torch and foreign arrays reach the kernels without a copy, and the examples run as they are printed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu
import kvtheory
import reference
from gpu.interchange import as_torch, borrowed
from gpu.module import simulator
from tests.kernels import fake_cupy

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "uint8"])
def test_a_tensor_is_borrowed_and_given_back_without_a_copy(dtype: str) -> None:
    tensor = (torch.arange(24).reshape(2, 3, 4) % 7).to(getattr(torch, dtype))
    array = borrowed(tensor)
    assert type(array) is np.ndarray and array.ctypes.data == tensor.data_ptr()
    assert array.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
    np.testing.assert_array_equal(array.astype(np.float64), tensor.double().numpy())
    tensor[0, 0, 0] = 5
    assert float(array[0, 0, 0]) == 5
    back = as_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_strides_and_gradients_are_no_reason_for_a_copy() -> None:
    tensor = torch.randn(5, 2, 8, requires_grad=True).transpose(0, 1)[:, ::2]
    array = borrowed(tensor)
    assert array.shape == (2, 3, 8) and array.ctypes.data == tensor.data_ptr()
    assert array.strides == tuple(4 * s for s in tensor.stride())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_are_coded_like_their_numbers(dtype: str) -> None:
    keys, values = (torch.randn(2, 70, 32).to(getattr(torch, dtype)) for _ in range(2))
    with simulator("check"):
        stream = gpu.TurboQuant().encode_arrays(borrowed(keys), borrowed(values))
    assert stream == reference.TurboQuant().encode(kvtheory.Layer(keys, values))


class Foreign:
    """Memory of a GPU by DLPack, or by __cuda_array_interface__ alone."""

    def __init__(self, array: Any, dlpack: int | None) -> None:
        self.array = array
        if dlpack is None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__
        else:
            self.__dlpack_device__ = lambda: (dlpack, 0)
            self.__dlpack__ = lambda **_: array


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = fake_cupy.install(monkeypatch)
    fake.from_dlpack = lambda value: value.__dlpack__()
    genuine = fake.asarray
    fake.asarray = lambda value: value.array if isinstance(value, Foreign) else genuine(value)
    return fake


@pytest.mark.parametrize("kind", [2, 13, None])
def test_memory_of_a_gpu_becomes_cupys(cupy: Any, kind: int | None) -> None:
    own = cupy.asarray(np.arange(6.0, dtype=np.float32))
    assert borrowed(Foreign(own, kind)) is own
    assert borrowed(own) is own


def test_what_is_no_array_is_refused(cupy: Any) -> None:
    for value in (3, "keys", object()):
        with pytest.raises(TypeError, match="value: expected an array with __dlpack__"):
            borrowed(value)
    with pytest.raises(TypeError, match="got DLPack's device 10"):  # ROCm
        borrowed(Foreign(None, 10))


@pytest.mark.parametrize(
    "arguments",
    [[], ["--codec", "KIVI", "--bits", "4", "--dtype", "float16", "--tokens", "200"], ["--dtype", "float16", "--tokens", "33"]],
)  # fmt: skip
def test_gpu_encode_runs_on_a_cpu(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with simulator("check"):
        example("gpu_encode").main(arguments)
    told = capsys.readouterr().out
    assert "numpy array on the tensor's own memory: True" in told
    assert "decoded as the reference decodes: True" in told
    assert "attention on" in told and "torch.float32 on cpu" in told


def test_gpu_scores_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with simulator("check"):
        example("gpu_scores").main(["--tokens", "150"])
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 and all("keys (2, 38, 32)" in line for line in told)
    assert told[1].endswith("certain: True") and told[3].endswith("certain: True")
