"""The path of CuPy arrays, without a GPU: on a stand-in as strict as CuPy, whose kernels run in the simulator."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu
import kvtheory
import reference
from gpu import packing
from gpu.module import launch, namespace, require_gpu, simulator, sources
from gpu.resident import kept
from kvtheory.risk import spectra
from tests.kernels import fake_cupy
from tests.kernels.transforms import sums_in_order
from tests.simt.test_semantics import SOURCE

OBLIVIOUS = {
    "TurboQuant": {}, "TurboQuant prod": {"kind": "prod"}, "TurboQuant 7": {"bits": 7}, "QJL": {}, "QJL 3": {"bits": 3}, "PolarQuant": {},
    "KIVI": {}, "KIVI 4": {"bits": 4, "group": 8, "window": 8},
}  # fmt: skip


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    gpu.codecs()
    fake = fake_cupy.install(monkeypatch)
    yield fake
    for source in sources():
        source._modules.clear()


def test_the_stand_in_is_as_strict_as_cupy(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6.0).reshape(2, 3))
    assert type(x.sum()) is cupy.ndarray and float(x.sum()) == 15 and (np.exp(x) * 0 == 0).all()
    for slip in (
        lambda: np.asarray(x), lambda: x + np.ones(3), lambda: np.ones(3) @ x.T, lambda: cupy.concatenate([x, np.ones((1, 3))]),
        lambda: x.__setitem__(0, np.ones(3)), lambda: cupy.asarray(np.array(["a"])),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="CuPy"):
            slip()
    assert namespace(x) is cupy and require_gpu() is cupy


def test_what_cupy_knows_and_numpy_does_not(cupy: Any) -> None:
    """bfloat16 has kind "V" in NumPy; memory is not 0; a Python integer beyond an array's type is refused."""
    assert cupy.asarray(np.ones(3, ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    small = cupy.asarray(np.array([2.0**-140, 1.0]))
    assert small.astype(np.float32).get().tolist() == [0.0, 1.0] == (small.astype(np.float32) * 1).get().tolist()
    assert set(cupy.empty(9, np.uint8).get().tolist()) == {0xA5}
    with pytest.raises(OverflowError, match="65536 out of bounds for uint16"):
        operator.ge(cupy.asarray(np.ones(3, np.uint16)), 1 << 16)
    with pytest.raises(TypeError, match="Unsupported dtype"):
        cupy.asarray(np.zeros(3, [("a", int)]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int64, np.uint64])
@pytest.mark.parametrize("bits", [1, 7, 8, 9, 16])
def test_codes_of_every_integer_type_are_packed(cupy: Any, dtype: Any, bits: int) -> None:
    most = min((1 << bits) - 1, int(np.iinfo(dtype).max))
    codes = np.array([0, 1, most, most // 2], dtype)
    with simulator("check"):
        assert packing.pack(cupy.asarray(codes), bits) == reference.packing.pack(codes, bits)
        if most < np.iinfo(dtype).max:
            codes[2] = most + 1
            with pytest.raises(ValueError, match=f"expected 0 <= code < 2\\^{bits}, got {most + 1} at 2"):
                packing.pack(cupy.asarray(codes), bits)


def test_a_table_is_there_for_every_stream(cupy: Any) -> None:
    """It is made on the stream that is current when it is first asked for: whoever asks next may be on another, and must not be ahead."""
    waits = cupy.cuda.synchronised

    class Owner:
        """By identity."""

    owner = Owner()
    for _ in range(2):
        kept(owner, "a", cupy, lambda: np.arange(3))
        assert len(waits) == 1
    kept(owner, "a", np, lambda: np.arange(3))
    assert len(waits) == 1


def test_a_kernel_is_launched_through_rawmodule(cupy: Any) -> None:
    # a Source outside gpu/kernels is not among `sources()`
    with pytest.raises(StopIteration):
        launch(SOURCE["add_one"], 1, 4, (cupy.zeros(4, np.int32), cupy.zeros(4, np.int32), np.int32(4)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("name", OBLIVIOUS)
def test_arrays_on_the_gpu_are_coded_like_layers(cupy: Any, name: str, dtype: Any) -> None:
    kind = name.partition(" ")[0]
    made = kvtheory.synthetic.make(
        "outlier_channels", kv_heads=2, query_heads=2, tokens=45, head_dim=32, value_dim=24, queries=2, seed=3
    )
    # one head of numbers that float32 holds as subnormal ones, which CuPy's own casts would lose
    keys, values = (np.concatenate([x[:1], x[1:] * 2.0**-140]).astype(dtype) for x in (made.keys, made.values))
    want = getattr(reference, kind)(**OBLIVIOUS[name]).encode(kvtheory.Layer(keys, values))
    codec = getattr(gpu, kind)(**OBLIVIOUS[name])
    with simulator("check", seed=5):
        # any strides: tokens first in memory, as a model's cache may have them
        there = [cupy.asarray(x.swapaxes(0, 1).copy()).swapaxes(0, 1) for x in (keys, values)]
        stream = codec.encode_arrays(*there)
        assert stream == want
        back = codec.decode_arrays(stream)
    known = reference.decode(want)
    for got, ours in zip(back, (known.keys, known.values)):
        assert type(got) is cupy.ndarray and got.dtype == ours.dtype
        np.testing.assert_array_equal(got.get().view(np.uint8), np.ascontiguousarray(ours).view(np.uint8))


def one_layer(seed: int, tokens: int) -> kvtheory.Layer:
    made = kvtheory.synthetic.make(
        "low_rank", kv_heads=2, query_heads=4, tokens=tokens, head_dim=16, queries=8, seed=seed
    )
    rope = kvtheory.Rope(10000.0 ** -(np.arange(8) / 8))
    arrays = (np.asarray(x, np.float32) for x in (made.keys, made.values, made.queries, made.output_proj))
    return kvtheory.Layer(*arrays, rope=rope, index=0, query_positions=np.arange(tokens - 8, tokens))


FITTED: dict[str, Callable[[Any, list[kvtheory.Layer]], Any]] = {
    "AATC": lambda of, data: of.AATC.fit(data, 3),
    "MetricKLT": lambda of, data: of.MetricKLT.fit(data, 3),
    "MetricKLT entropy": lambda of, data: of.MetricKLT.fit(data, 2, coding="entropy"),
    "PALU": lambda of, data: of.PALU.fit(data, 4),
    "KVQuant": lambda of, data: of.KVQuant.fit(data, 3),
    "KVTC": lambda of, data: of.KVTC.fit(data, 3, window=4),
}


@pytest.mark.parametrize("name", FITTED)
def test_fitted_codecs_on_the_gpu_too(cupy: Any, name: str) -> None:
    calibration, layer = [one_layer(1, 96)], one_layer(2, 45)
    known = FITTED[name](reference, calibration)
    codec = FITTED[name](gpu, calibration)
    assert codec.state == known.state
    there = cupy.asarray(layer.keys), cupy.asarray(layer.values)
    with sums_in_order():  # as the kernels sum
        want = known.encode([layer] if name == "KVTC" else layer)
    with simulator("check", seed=9):
        stream = codec.encode_arrays([there], [0]) if name == "KVTC" else codec.encode_arrays(*there, index=0)
        back = codec.decode_arrays(stream)
    ours = known.decode(stream)
    assert stream == want
    if name == "KVTC":
        back, ours = back[0], ours[0]
    for got, expected in zip(back, (ours.keys, ours.values)):
        assert type(got) is cupy.ndarray
        np.testing.assert_array_equal(got.get(), expected)


@pytest.mark.parametrize("name", ["StreamingLLM", "SnapKV", "ScissorHands", "MergeReduce"])
def test_reducers_on_the_gpu_too(cupy: Any, name: str) -> None:
    layer = one_layer(2, 60)
    how = {"keep": 40, "sinks": 4, "window": 16}
    codec, known = getattr(gpu, name)(**how), getattr(reference, name)(**how)
    with simulator("check", seed=2):
        fields = {n: getattr(layer, n) for n in ("queries", "output_proj", "rope", "query_positions")}
        stream = codec.encode_arrays(cupy.asarray(layer.keys), cupy.asarray(layer.values), index=0, **fields)
    assert stream == known.encode(layer)


@pytest.mark.parametrize("name", OBLIVIOUS)
def test_nan_on_the_gpu_is_refused_in_the_words_of_the_reference(cupy: Any, name: str) -> None:
    kind = name.partition(" ")[0]
    keys, values = np.ones((2, 3, 8), np.float32), np.ones((2, 3, 8), np.float32)
    values[1, 2, 5] = np.nan
    with (
        pytest.raises(ValueError, match=r"values: expected finite numbers, got nan at \(head 1, token 2, channel 5\)"),
        simulator("check"),
    ):
        getattr(gpu, kind)(**OBLIVIOUS[name]).encode_arrays(cupy.asarray(keys), cupy.asarray(values))


def test_mixed_arrays_are_refused(cupy: Any) -> None:
    keys = np.ones((1, 3, 8), np.float32)
    with pytest.raises(TypeError):
        gpu.TurboQuant().encode_arrays(cupy.asarray(keys), keys)


@pytest.mark.parametrize("kind", ["centred", "augmented"])
@pytest.mark.parametrize("rank", [None, 2, 12])
@pytest.mark.parametrize(("tokens", "queries"), [(90, 8), (40, 30)])
def test_spectra_on_the_gpu_are_the_same_code(
    cupy: Any, kind: Any, rank: int | None, tokens: int, queries: int
) -> None:
    made = kvtheory.synthetic.make(
        "clustered", kv_heads=1, query_heads=1, tokens=tokens, head_dim=8, queries=queries, seed=4
    )
    head = [np.asarray(x[0], np.float64) for x in (made.queries, made.keys, made.values)]
    there = [cupy.asarray(x) for x in head]
    weights = np.linspace(1, 2, tokens) / np.linspace(1, 2, tokens).sum()
    known = kvtheory.risk.spectrum(*head, weights=weights, kind=kind, rank=rank)
    found = kvtheory.risk.spectrum(*there, weights=weights, kind=kind, rank=rank)
    assert type(found.eigenvalues) is np.ndarray and found.complete == known.complete
    np.testing.assert_array_equal(found.eigenvalues, known.eigenvalues)
    assert (found.trace, found.error) == (known.trace, known.error)
    profiles = kvtheory.risk.response_profiles(*there, kind=kind)
    assert type(profiles) is cupy.ndarray
    np.testing.assert_array_equal(profiles.get(), kvtheory.risk.response_profiles(*head, kind=kind))


def test_profiles_and_transforms_on_the_gpu_are_the_same_code(cupy: Any) -> None:
    made = kvtheory.synthetic.make("clustered", kv_heads=1, query_heads=1, tokens=70, head_dim=8, queries=9, seed=4)
    head = [np.asarray(x[0], np.float64) for x in (made.queries, made.keys, made.values)]
    known = spectra.profile_features(*head, 6)
    found = spectra.profile_features(*(cupy.asarray(x) for x in head), 6)
    np.testing.assert_array_equal(found.coordinates, known.coordinates)
    np.testing.assert_array_equal(found.missing, known.missing)
    basis = kvtheory.transform.pca(np.cov(head[1].T))
    y = basis.forward(cupy.asarray(head[1]))
    assert type(y) is cupy.ndarray
    np.testing.assert_array_equal(y.get(), basis.forward(head[1]))
    np.testing.assert_array_equal(basis.inverse(y).get(), basis.inverse(y.get()))
    with pytest.raises(ValueError, match="v: expected finite numbers, got nan"):
        kvtheory.risk.spectrum(*(cupy.asarray(x) for x in head[:2]), cupy.asarray(head[2] * np.nan))


def test_an_array_of_another_device_is_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = cupy.zeros(4, np.uint8)
    monkeypatch.setattr(type(there), "device", property(lambda self: types.SimpleNamespace(id=1)))
    with pytest.raises(ValueError, match=r"args\[0\].*expected an array of the current device, 0, got one of device 1"):
        packing.pack(there, 4)
