"""python -m gpu.bench: the whole path of a GPU on the strict stand-in for CuPy, and the prediction."""

from __future__ import annotations

import json
import re
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu
import reference
from gpu.bench import __main__ as command
from gpu.bench import cases, clock, measure, model, plain, record, sass
from gpu.bench.cards import CARDS, occupancy
from gpu.module import Unavailable, simulator, sources
from tests.kernels import fake_cupy


class Event:
    """CUDA's events on a clock that ticks at each record: the time between two is one millisecond."""

    now = 0

    def __init__(self) -> None:
        self.at: int | None = None

    def record(self) -> None:
        Event.now += 1
        self.at = Event.now

    def synchronize(self) -> None:
        assert self.at is not None, "an event that was never recorded"


def elapsed(start: Event, stop: Event) -> float:
    assert start.at is not None and stop.at is not None
    return float(stop.at - start.at)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    command._load_all()
    fake = fake_cupy.install(monkeypatch)
    fake.cuda.Event, fake.cuda.get_elapsed_time = Event, elapsed
    fake.cuda.runtime.driverGetVersion, fake.cuda.runtime.runtimeGetVersion = lambda: 13000, lambda: 13000
    fake.copyto = lambda to, source: to.__setitem__(slice(None), source)
    freed: list[int] = []
    fake.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: freed.append(1))
    yield fake
    for source in sources():
        source._modules.clear()


SMALL = measure.Settings(
    heads=1, dim=32, group=2, tokens=(192,), checked=(65,), seconds=1e6, share=0.0, repeats=1, copy_bytes=4096
)


def test_the_names_that_the_bench_asks_of_cupy_are_cupys() -> None:
    real = pytest.importorskip("cupy")
    for name in ("Event", "get_elapsed_time", "Device"):
        assert hasattr(real.cuda, name), name
    for name in ("record", "synchronize"):
        assert hasattr(real.cuda.Event, name), name
    for name in ("getDeviceProperties", "driverGetVersion", "runtimeGetVersion", "getDeviceCount"):
        assert hasattr(real.cuda.runtime, name), name
    for name in (
        "copyto",
        "tile",
        "stack",
        "packbits",
        "unpackbits",
        "searchsorted",
        "rint",
        "get_default_memory_pool",
    ):
        assert hasattr(real, name), name
    assert hasattr(real.get_default_memory_pool(), "free_all_blocks")
    assert hasattr(real.ndarray, "fill") and hasattr(real.RawKernel, "max_dynamic_shared_size_bytes")


def test_everything_is_checked_and_measured_as_on_a_gpu(cupy: Any, tmp_path: Path) -> None:
    said: list[str] = []
    with simulator("fast"):
        status = command.on_gpu(cupy, SMALL, said.append, tmp_path / "bench.json")
    told = "\n".join(said)
    assert status == 0, told
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["wrong"] == [] and found["errors"] == [] and found["left"] == []
    assert len(found["checked"]) == len(cases.cases())
    assert {o["operation"] for o in found["operations"]} == {c.name for c in cases.cases()}
    assert (
        found["card"]["name"] == "no GPU"
        and found["card"]["driver"] == 13000
        and found["card"]["date"].startswith("20")
    )
    # each run of a kernel is one tick: a millisecond
    for row in found["rows"]:
        assert row["seconds"] == pytest.approx(1e-3 * row["launches"]) and row["bytes"] > 0 and row["repeats"] == 1
        assert row["bytes_a_second"] == pytest.approx(row["bytes"] / row["seconds"])
    assert found["copy_bytes_a_second"] == pytest.approx(2 * 4096 / 1e-3)
    attends = [o for o in found["operations"] if o["operation"].endswith(" attend") and "Full" not in o["operation"]]
    assert {o["operation"] for o in attends} == {f"{name} attend" for name in cases.ATTENDED}
    for row in attends:
        assert row["decompress_then_attend_seconds"] > row["fp16_attend_seconds"] > 0
        assert row["target_speed_of_fp16"] == pytest.approx(0.7 * 16 / row["held bits"])
    assert sum(o["array_seconds"] is not None for o in found["operations"]) >= 10
    for name in {o["operation"] for o in found["operations"]}:
        assert f"| {name} | 192 |" in told


def test_every_kernel_is_in_the_bench(cupy: Any) -> None:
    """By name, so that none is forgotten; those that no operation of the bench launches, and why."""
    apart = {
        # of positions with holes, few queries' worth; of RoPE, one angle a pair of channels; of kept sinks, four tokens
        ("attention.cu", "places"), ("kvquant.cu", "turns"), ("tokens.cu", "turn_first"),
        # outliers of values, and low bits of escaped coefficients, which this data has next to none of
        ("kvquant.cu", "place_values"), ("entropy.cu", "residue"),
    }  # fmt: skip
    seen: set[tuple[str, str]] = set()
    with simulator("fast"):
        data = cases.Data(np, 1, 192, 32, 2)
        for case in cases.cases():
            with record.recording() as calls:
                case.make(data).run()
            seen |= {(one.file, one.kernel) for one in calls}
    known = {(s.name, i.split("<")[0]) for s in sources() for i in s.instances}
    assert known - seen <= apart, f"no operation of the bench launches {sorted(known - seen - apart)}"


def test_a_wrong_kernel_stops_the_bench(cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    encode = gpu.KIVI.encode_arrays

    def wrong(self: Any, *given: Any, **how: Any) -> bytes:
        stream = bytearray(encode(self, *given, **how))
        stream[-9] ^= 1
        return bytes(stream)

    monkeypatch.setattr(gpu.KIVI, "encode_arrays", wrong)
    said: list[str] = []
    only = measure.Settings(**{**SMALL.__dict__, "only": "^KIVI 2 encode"})
    with simulator("fast"):
        assert command.on_gpu(cupy, only, said.append, tmp_path / "b.json") == 1
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["rows"] == [] and "differs from the reference's" in found["wrong"][0]["error"]
    assert any("nothing is measured" in line for line in said)


def test_what_cannot_run_is_an_error_in_the_table_and_the_rest_is_measured(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise AttributeError("module 'gpu' has no attribute 'DeviceCache'")

    monkeypatch.setattr(gpu, "DeviceCache", missing, raising=False)
    only = measure.Settings(**{**SMALL.__dict__, "only": "^KIVI 2"})
    said: list[str] = []
    with simulator("fast"):
        assert command.on_gpu(cupy, only, said.append) == 2
    assert "no attribute 'DeviceCache'" in said[-1] and "- KIVI 2 attend" in said[-1]
    assert "| KIVI 2 decode | 192 |" in said[-1]


def test_a_budget_that_is_spent_is_said(cupy: Any) -> None:
    only = measure.Settings(**{**SMALL.__dict__, "only": "pack 3", "seconds": 0.0})
    said: list[str] = []
    with simulator("fast"):
        assert command.on_gpu(cupy, only, said.append) == 0
    assert "Not measured, for want of time" in said[-1] and "- unpack 3, 192 tokens" in said[-1]


def test_matrix_products_without_cublas_are_said(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ImportError("libcublas.so.13: cannot open shared object file")

    assert plain.blas(cupy) == ""
    monkeypatch.setattr(fake_cupy.ndarray, "__matmul__", missing)
    assert re.search("cuBLAS, which the extra.*libcublas.so.13", plain.blas(cupy))
    only = measure.Settings(**{**SMALL.__dict__, "only": "^SnapKV mass$"})
    result = measure.Result(measure.card(cupy))
    with simulator("fast"):
        assert measure.check(cupy, only, result, lambda _: None)
        measure.measure(cupy, only, result, lambda _: None)
    assert result.operations[0]["array_seconds"] is None and "cuBLAS" in result.operations[0]["note"]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_array_versions_do_the_job(bits: int) -> None:
    """Decoded by the array version, an error of the size of the codec's: what is timed is no other work."""
    data = cases.Data(np, 2, 96, 32)
    encode, decode = cases._turbo(bits)
    rows = data.keys.reshape(-1, 32).astype(float)
    assert len(encode(data)()[0][0]) == -(-rows.size * bits // 8)
    back = decode(data)()[0].reshape(rows.shape).astype(float)
    # rotated numbers are nearly normal: the error is that of the codebook, 2^bits quantiles, on normal numbers
    normal = np.sort(np.random.default_rng(0).standard_normal(1 << 14))
    points = normal[(1 << 14 >> bits) // 2 :: 1 << 14 >> bits]
    own = np.abs(normal[:, None] - points).min(axis=1)
    assert ((back - rows) ** 2).sum() / (rows**2).sum() < 1.25 * (own**2).mean()
    for axis in (1, 2):
        packed = plain.kivi_encode(data.keys, bits, 32, axis, np)
        again = plain.kivi_decode(packed, bits, 32, axis, data.keys.shape, np)
        scale = packed[1].astype(np.float32)
        apart = np.abs(again.astype(np.float32) - data.keys.astype(np.float32))
        assert apart.max() <= scale.max() * 0.51 + 0.02
    codes = np.random.default_rng(0).integers(0, 1 << bits, 37).astype(np.uint8)
    assert plain.pack(codes, bits, np).tobytes() == reference.packing.pack(codes, bits)
    np.testing.assert_array_equal(plain.unpack(plain.pack(codes, bits, np), 37, bits, np), codes)


def test_recorded_launches_say_what_must_move() -> None:
    from gpu import packing, tokens

    with simulator("fast"), record.recording() as calls:
        packing.pack_words(np.zeros(1000, np.uint8), 3)
        tokens.gather(np.zeros((2, 50, 8), np.float32), [np.arange(10), np.arange(10)])
    assert [(c.file, c.kernel) for c in calls] == [("packing.cu", "pack"), ("tokens.cu", "gather")]
    assert calls[0].nbytes == 1000 + 4 * 94 + 8
    # 20 of 100 tokens of 32 bytes, read and written, and where they are
    assert calls[1].nbytes == 2 * 20 * 32 + 20 * 8
    assert calls[0].threads == calls[0].blocks * 256
    # the codes are read; packed words and the place of a wrong one are written
    assert calls[0].written == 4 * 94 + 8


def test_a_clock_takes_medians_of_as_many_runs_as_time_allows(cupy: Any) -> None:
    own = clock.Clock(cupy, 64, seconds=0.02)
    runs: list[int] = []
    timing = own.time(lambda: runs.append(1))
    assert (timing.median, timing.least, timing.most) == (1e-3, 1e-3, 1e-3)
    assert timing.repeats == 20 and len(runs) == 22


# -- the prediction ------------------------------------------------------------------------------------------------------------------


def test_resident_warps_are_the_occupancy_calculators() -> None:
    # by hand: 65536 registers / (64 x 32 a warp) = 32 warps; 48 registers: 42 warps in blocks of 4
    assert occupancy("90", 64, 0, 128) == (32, "registers")
    assert occupancy("90", 48, 0, 128) == (40, "registers")
    assert occupancy("90", 32, 0, 1024) == (64, "warps")
    assert occupancy("120", 32, 0, 256) == (48, "warps")
    assert occupancy("80", 32, 48 << 10, 128)[1] == "shared memory"
    assert occupancy("80", 32, 48 << 10, 128)[0] == 4 * (164 // 49)
    assert occupancy("90", 16, 0, 32) == (32, "blocks")


def test_instructions_are_told_apart() -> None:
    text = """
        /*0000*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0010*/              @!P0 FFMA R1, R2, R3, R1 ;
        /*0020*/                   LDS.128 R4, [R9] ;
        /*0030*/                   DFMA R6, R2, R4, R6 ;
        /*0040*/               @P0 BRA 0x10 ;
        /*0050*/                   MUFU.RCP R0, R0 ;
        /*0060*/                   STG.E.U8 desc[UR4][R2.64], R0 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
        /*0090*/                   NOP;
    """
    code = sass._sass(text)
    assert code.once == {
        "all": 9,
        "global bytes": 9,
        "stored bytes": 1,
        "multiply": 1,
        "shared bytes": 16,
        "float64": 1,
        "slow": 1,
    }
    assert code.looped == {"all": 4, "multiply": 1, "shared bytes": 16, "float64": 1}


def work(**change: Any) -> model.Work:
    return model.Work(**{
        "operation": "x", "file": "x.cu", "kernel": "x", "instances": ("x",), "launches": 1, "nbytes": 1e9, "blocks": 1e6, "block": 128,
        "shared_mem": 0, "multiply_adds": 0.0, "written": 0.0, **change,
    })  # fmt: skip


def test_what_bounds_a_kernel_is_what_takes_longest() -> None:
    card = next(c for c in CARDS if c.name.startswith("H200"))
    few = model.bounds(work(), {"all": 100.0}, card)
    assert max(few, key=lambda n: few[n]) == "issue" and few["issue"] == pytest.approx(4e8 / (4 * 132 * 1.98e9))
    assert few["memory"] == pytest.approx(1e9 / (0.9 * 4.8e12))
    slow = model.bounds(work(), {"all": 10.0, "float64": 9.0}, CARDS[-1])
    assert max(slow, key=lambda n: slow[n]) == "float64"
    small = model.bounds(work(blocks=1, nbytes=1000), {"all": 10.0}, card)
    assert max(small, key=lambda n: small[n]) == "latency"


def test_loops_are_counted_as_often_as_bytes_and_products_ask() -> None:
    code = sass.Code(
        Counter({"all": 100, "global bytes": 8, "multiply": 20}),
        Counter({"all": 60, "global bytes": 8, "multiply": 10}),
    )
    once = model._executed(work(nbytes=1.0), code)
    assert once["all"] == 100
    # 4e6 warps of 32 lanes and 8 bytes move 1.024e9 bytes once through
    assert model._executed(work(nbytes=3 * 1.024e9), code)["all"] == pytest.approx(100 + 60 * 2)
    stores = sass.Code(code.once + Counter({"stored bytes": 4}), code.looped + Counter({"stored bytes": 4}))
    assert model._executed(work(written=7 * 4 * 4e6 * 32), stores)["all"] == pytest.approx(100 + 60 * 6)
    assert model._executed(work(multiply_adds=5 * 10 * 4e6 * 32), code)["all"] == pytest.approx(100 + 60 * 4)


def test_a_prediction_is_made_of_recorded_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, from PTX where there is no disassembler: bytes of `pack` are those of the shapes."""
    pytest.importorskip("cupy")
    try:
        command._load_all()
        found = model.predictions(model.works("^pack 3", heads=2, dim=32, say=lambda _: None), lambda _: None)
    except Unavailable as missing:
        pytest.skip(str(missing))
    numbers = model.TOKENS * 2 * 32
    assert [p.work.kernel for p in found] == ["pack"]
    assert found[0].work.nbytes == pytest.approx(numbers * 11 / 8, rel=1e-4)
    assert found[0].work.warps == pytest.approx(-(-numbers * 3 // 32) / 32, rel=0.01)
    assert set(found[0].seconds) == {c.name for c in CARDS} and min(found[0].seconds.values()) > 0
    assert re.search(r"\| pack 3 \| packing.cu `pack` \|", model.table(found))


def test_the_page_holds_what_the_installed_compiler_predicts() -> None:
    """The table was made from the sources as they are; for another NVRTC it says which it was made by."""
    pytest.importorskip("cupy")
    command._load_all()
    page = model.PAGE.read_text(encoding="utf-8")
    own = page.split(model.MARKS[0])[1].split(model.MARKS[1])[0]
    made = json.loads(re.findall(r"<!-- made from: (.*?) -->", own)[0])
    remake = "run `python -m gpu.bench --write`"
    files = set(re.findall(r"\| (\w+\.cu) `", own))
    now = json.loads(re.findall(r"made from: (.*?) -->", model.stamp(files))[0])
    assert made["sources"] == now["sources"], remake
    assert f"by {made['nvrtc']}." in own and "Predicted, not measured" in own and "SASS by cuobjdump" in own
    # every operation is there, and each of its kernels says what bounds it
    assert set(re.findall(r"^\| ([^|]+?) \| \w+\.cu", own, re.M)) == {c.name for c in cases.cases()}, remake
    for file, kernel in set(re.findall(r"\| (\w+\.cu) `(\w+)` \|", own)):
        assert re.search(
            rf"^- {file} `{kernel}` \([^)]*\): (memory|issue slots|latency|float64|shared memory|conversions)",
            own,
            re.M,
        )


def test_without_a_gpu_the_command_predicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise Unavailable("no GPU here")

    told: list[dict[str, Any]] = []
    monkeypatch.setattr("gpu.module.require_gpu", missing)
    monkeypatch.setattr(model, "main", lambda **how: told.append(how) or 0)
    assert command.main(["--only", "pack"]) == 0
    assert told[0]["only"] == "pack" and not told[0]["write"]
    said = capsys.readouterr().out
    assert "no GPU here" in said and "NOT measured" in said


def test_a_cubin_is_whole() -> None:
    """A driver and a disassembler open the file: its last program header is in it (CuPy's getCUBIN leaves a byte out)."""
    from gpu import packing
    from gpu.compile import compile_source

    try:
        data = compile_source(packing._SOURCE, "90").data
    except Unavailable as missing:
        pytest.skip(str(missing))
    start, size, count = (int.from_bytes(data[at:to], "little") for at, to in ((32, 40), (54, 56), (56, 58)))
    sections, each, many = (int.from_bytes(data[at:to], "little") for at, to in ((40, 48), (58, 60), (60, 62)))
    assert len(data) == max(start + size * count, sections + each * many)
