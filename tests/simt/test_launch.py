"""What a launch asks of its arguments, and what it does with them: in both builds, nothing but the arrays given changes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from gpu import module
from gpu.module import BuildError, KernelFault, Source, UnknownKernel, element, launch, namespace, simulator
from gpu.simt import build as building
from gpu.simt import machine
from tests.simt.test_semantics import SOURCE

BUILDS = ("fast", "check")
ADD = SOURCE["add_one"]


def ints(n: int = 4) -> np.ndarray:
    return np.zeros(n, np.int32)


class FakeCupy:
    """An array that says it is CuPy's."""

    flags = type("Flags", (), {"c_contiguous": True})
    __cuda_array_interface__: ClassVar[dict[str, int]] = {"version": 3}


FakeCupy.__module__ = "cupy"


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((ints(), ints()), TypeError, "add_one takes 3 arguments, got 2"),
        ((ints(), ints(), 4), TypeError, r"args\[2\] of add_one: .*got builtins.int"),
        ((ints(), ints(), 4.0), TypeError, r"args\[2\] of add_one: .*got builtins.float"),
        ((ints(), ints(), np.int64(4)), TypeError, r"argument 2 \(n\) is int32 there, got int64"),
        ((ints(), ints(), np.uint32(4)), TypeError, r"argument 2 \(n\) is int32 there, got uint32"),
        ((ints().astype(np.float32), ints(), np.int32(4)), TypeError, r"argument 0 \(in\) is int32 there, got float32"),
        ((np.int32(4), ints(), np.int32(4)), TypeError, r"argument 0 \(in\) is an array there"),
        ((ints(), ints(), ints(1)), TypeError, r"argument 2 \(n\) is a scalar there"),
        (
            (ints(8)[::2], ints(), np.int32(4)),
            ValueError,
            r"args\[0\] of add_one: expected a C-contiguous array, got strides \(8,\)",
        ),
        ((np.zeros((2, 2), np.int32).T.copy("F"), ints(), np.int32(4)), ValueError, "C-contiguous"),
        ((FakeCupy(), ints(), np.int32(4)), TypeError, "arrays of NumPy and of CuPy in one launch: CuPy, NumPy"),
        (([1, 2], ints(), np.int32(4)), TypeError, r"args\[0\] of add_one: .*got builtins.list"),
        ((np.int32(1), np.int32(1), np.int32(1)), TypeError, "no array among them"),
        ((), TypeError, "no array among them"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        launch(ADD, 1, 4, args)


def test_a_torch_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"args\[1\] of add_one: .*got torch.Tensor"):
        launch(ADD, 1, 4, (ints(), torch.zeros(4, dtype=torch.int32), np.int32(4)))


@pytest.mark.parametrize(
    ("grid", "block", "shared", "text"),
    [
        (0, 32, 0, "grid: expected 1 to"), (1, 0, 0, "block: expected 1 to"), ((1, 70000), 1, 0, "grid"), (1, (1, 1, 65), 0, "block"),
        (1, 1025, 0, "block"), (1, (32, 33), 0, "block: expected 1024 threads"), (1, 1, -1, "shared_mem"), (1, 1, 100 << 10, "shared_mem"),
    ],
)  # fmt: skip
def test_sizes_that_no_gpu_takes(grid: Any, block: Any, shared: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        launch(ADD, grid, block, (ints(), ints(), np.int32(4)), shared_mem=shared)


@pytest.mark.parametrize("grid", [1.5, (1, 2, 3, 4), ("a",)])
def test_sizes_that_are_none(grid: Any) -> None:
    with pytest.raises(TypeError, match="grid"):
        launch(ADD, grid, 32, (ints(), ints(), np.int32(4)))


def test_an_instance_that_is_not_listed() -> None:
    with pytest.raises(
        UnknownKernel, match=r"semantics.cu has no instance 'reverse<double>'; it has .*reverse<float>"
    ) as caught:
        SOURCE["reverse<double>"]
    assert isinstance(caught.value, KeyError) and str(caught.value).startswith("semantics.cu")
    assert SOURCE["shuffle<int,4>"] == SOURCE["shuffle<int, 4>"]


@pytest.mark.parametrize("build", BUILDS)
def test_every_type_of_parameter_arrives(build: str) -> None:
    pair = np.array([(-7, 2.5)], [("a", np.int32), ("b", np.float32)])[0]
    out = np.zeros(11)
    args = (
        np.bool_(True), np.int8(-3), np.uint8(200), np.int16(-300), np.int32(-70000), np.uint32(2**32 - 1), np.int64(-(2**40)), np.float32(0.1),
        np.float64(0.1), pair, out,
    )  # fmt: skip
    with simulator(build):
        launch(SOURCE["every_type"], 1, 1, args)
    assert out.tolist() == [1, -3, 200, -300, -70000, 2**32 - 1, -(2**40), float(np.float32(0.1)), 0.1, -7, 2.5]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("n", [0, 1, 3, 4, 1000, 1024, 1025, 4096, 300_000])
def test_arrays_travel_there_and_back(n: int, build: str) -> None:
    room = np.arange(n + 2, dtype=np.int32)
    x, out = room[1:-1], np.full(n, -1, np.int32)
    x.flags.writeable = False
    with simulator(build, seed=n):
        launch(ADD, max(1, -(-n // 256)), 256, (x, out, np.int32(n)))
        np.testing.assert_array_equal(out, np.arange(n) + 2)
        np.testing.assert_array_equal(room, np.arange(n + 2))
        if n:
            launch(ADD, -(-n // 256), 256, (out, out, np.int32(n)))  # in place: the same array twice
            np.testing.assert_array_equal(out, np.arange(n) + 3)


@pytest.mark.parametrize("build", BUILDS)
def test_one_too_many_is_seen_wherever_an_array_ends(build: str) -> None:
    """Sizes that do and do not fill 16 bytes, and neighbours in one allocation."""
    for n in (1, 3, 4, 5, 1023, 1024, 1025):
        room = np.zeros(2 * n + 8, np.int32)
        x, out = room[: n + 1], room[n + 4 : 2 * n + 4]
        for count in (n + 1, n + 3):
            with (
                pytest.raises(KernelFault, match=r"out of bounds.*argument [01]") as caught,
                simulator(build),
            ):
                launch(ADD, 5, 256, (x, out, np.int32(count)))
            assert not room.any() and (build == "fast" or caught.value.places)


@pytest.mark.parametrize("at", [-1, -100, -4000, 5, 6, 12])
def test_bytes_around_an_array_are_looked_at_in_the_fast_build(at: int) -> None:
    x = np.zeros(5, np.uint8)
    with pytest.raises(KernelFault, match=f"bytes {'before the start' if at < 0 else 'behind the end'} of argument 0"):
        launch(SOURCE["write_at"], 1, 1, (x, np.int32(at)))
    with (
        pytest.raises(KernelFault, match=f"write of 1 bytes at byte offset {at} of argument 0") as caught,
        simulator("check"),
    ):
        launch(SOURCE["write_at"], 1, 1, (x, np.int32(at)))
    assert caught.value.places == (f"semantics.cu:{line_of('x[at] = 7')}",)


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SOURCE.path.read_text().splitlines(), 1) if text in line)


def test_an_empty_array_has_no_byte() -> None:
    for build in BUILDS:
        with (
            pytest.raises(
                KernelFault, match=r"out of bounds.*argument 0 \(x\) \(0 bytes\)|behind the end of argument 0"
            ),
            simulator(build),
        ):
            launch(SOURCE["write_at"], 1, 1, (np.zeros(0, np.uint8), np.int32(0)))


def test_arrays_that_overlap_in_part_are_refused() -> None:
    room = ints(8)
    with pytest.raises(ValueError, match=r"argument 1 \(out\) overlaps"):
        launch(ADD, 1, 4, (room[:4], room[2:6], np.int32(4)))
    with pytest.raises(ValueError, match=r"argument 1 \(out\) overlaps"):
        launch(ADD, 1, 4, (room, room[:4], np.int32(4)))


def test_const_arguments_do_not_come_back() -> None:
    """`const int* in` of add_one is writable in NumPy, and still nobody's to write."""
    library = machine.load(SOURCE.path, SOURCE.instances, "check")
    known = library.entries["add_one"].parameters
    assert [p.constant for p in known] == [True, False, False] and library.entries["add_one"].names == (
        "in",
        "out",
        "n",
    )


def test_launches_of_two_threads_wait_for_each_other() -> None:
    wrong = []

    def work(seed: int) -> None:
        x, out = np.arange(1000, dtype=np.int32) * seed, ints(1000)
        with simulator("fast" if seed % 2 else "check", seed):
            for _ in range(20):
                launch(ADD, 4, 256, (x, out, np.int32(1000)))
                if not np.array_equal(out, x + 1):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_settings_end_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._current().build == "fast" and module._current().seed == 0
    with simulator("check", seed=5, races=False, seconds=2), simulator():
        assert module._current() == module._Settings("fast", 0, True, 60.0, False)
    monkeypatch.setenv("KVTHEORY_SIMT", "check")
    assert module._current().build == "check"
    monkeypatch.setenv("KVTHEORY_SIMT", "quick")
    with pytest.raises(ValueError, match="KVTHEORY_SIMT: expected one of fast, check, got 'quick'"):
        launch(ADD, 1, 4, (ints(), ints(), np.int32(4)))
    with pytest.raises(ValueError, match="build: expected one of fast, check, got 'slow'"), simulator("slow"):
        pass


def test_element_and_namespace() -> None:
    assert [element(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)] == ["float", "__half", "__nv_bfloat16"]
    with pytest.raises(TypeError, match="float16, bfloat16 or float32, got float64"):
        element(np.float64)
    assert namespace(ints(), ints()) is np
    with pytest.raises(TypeError, match="NumPy arrays only or CuPy arrays only, got ndarray, FakeCupy"):
        namespace(ints(), FakeCupy())
    with pytest.raises(TypeError, match="got nothing"):
        namespace()


KERNEL = '#include "part.cuh"\n__global__ void k(int* x) { x[threadIdx.x] = PART; }\n'


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path / "cache"))
    return tmp_path


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from now on."""
    done: list[str] = []
    run = building._run

    def watched(command: Any, what: str) -> None:
        done.append(what)
        run(command, what)

    monkeypatch.setattr(building, "_run", watched)
    return done


def test_libraries_are_kept_until_something_in_them_changes(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = compiled(monkeypatch)
    source, part = own_cache / "kept.cu", own_cache / "part.cuh"
    source.write_text(KERNEL)
    part.write_text("#define PART 1\n")
    first, _ = building.library(source, ["k"], "fast")
    assert done == ["simt.cpp", "check.cpp", "kept.cu", "kept.cu", "kept.cu"]
    assert first.parent == own_cache / "cache" / "simt"
    assert building.library(source, ["k"], "fast")[0] == first and len(done) == 5
    part.write_text("#define PART 2\n")
    second, _ = building.library(source, ["k"], "fast")
    assert second != first and len(done) == 8, "a header that it includes is part of a source"
    part.write_text("#define PART 1\n")
    assert building.library(source, ["k"], "fast")[0] == first and len(done) == 8
    assert not list((own_cache / "cache" / "simt").glob("tmp*"))


def test_what_does_not_compile_says_where_and_is_not_tried_twice(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / "wrong.cu").write_text("__global__ void k(int* x) {\n    x[0] = nothing;\n}\n")
    source = Source(own_cache / "wrong.cu", ["k"])
    done = compiled(monkeypatch)
    for _ in range(2):
        with pytest.raises(
            BuildError, match=r"could not compile wrong.cu:\n(.*\n)*.*wrong.cu:2:12: error: .nothing. was not declared"
        ):
            launch(source["k"], 1, 1, (ints(),))
    assert done.count("wrong.cu") == 1
    with pytest.raises(FileNotFoundError, match=r"nowhere\.cu"):
        Source(own_cache / "nowhere.cu", ["k"])
    with pytest.raises(ValueError, match="listed twice"):
        Source(own_cache / "wrong.cu", ["k<int,2>", "k<int, 2>"])


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path / "file"))
    folder = building.kept_in()
    assert folder.is_dir() and folder.stat().st_mode & 0o77 == 0, "nobody else may put a library there"


def two_roundings() -> np.ndarray:
    """A product that is subnormal, and one of which an operand is."""
    a, b = np.array([1e-30, 1e-40], np.float32), np.array([1e-10, 1e10], np.float32)
    out = np.zeros((4, 2), np.float32)
    launch(SOURCE["two_roundings"], 1, 2, (a, b, np.zeros(2, np.float32), out))
    return out[0]


@pytest.mark.parametrize("build", BUILDS)
def test_subnormal_numbers_are_flushed_where_that_is_asked_for(build: str) -> None:
    a, b = np.array([1e-30, 1e-40], np.float32), np.array([1e-10, 1e10], np.float32)
    with simulator(build, flush=True):
        assert two_roundings().tolist() == [0.0, 0.0]
    assert (a * b).tolist()[0] > 0 and (a * b).tolist()[1] > 0, "and the host is as it was"
    with simulator(build):
        assert np.array_equal(two_roundings(), a * b)


def test_subnormal_numbers_are_flushed_by_the_portable_change_of_stacks_too() -> None:
    library = machine.load(SOURCE.path, ("two_roundings",), "fast", portable=True)
    a, out = np.full(64, 1e-30, np.float32), np.ones((4, 64), np.float32)
    arguments = a, np.full(64, 1e-10, np.float32), np.zeros(64, np.float32), out
    machine.launch(
        library, "two_roundings", (1, 1, 1), (64, 1, 1), arguments, 0, seed=3, races=True, seconds=9, flush=True
    )
    assert not out[0].any()


def test_a_processor_that_cannot_flush_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = machine.load(SOURCE.path, SOURCE.instances, "fast").entries["add_one"]
    monkeypatch.setitem(
        machine.load(SOURCE.path, SOURCE.instances, "fast").entries,
        "add_one",
        dataclasses.replace(entry, call=lambda how: 3),
    )
    with (
        pytest.raises(NotImplementedError, match="flush: expected a processor that flushes"),
        simulator("fast", flush=True),
    ):
        launch(ADD, 1, 4, (ints(), ints(), np.int32(4)))


def test_subnormal_numbers_survive_a_host_that_flushes_them() -> None:
    code = """
import numpy as np, torch
from tests.simt.test_semantics import SOURCE
from gpu.module import launch
assert torch.set_flush_denormal(True)
a, one, zero, out = np.full(1, 1e-30, np.float32), np.full(1, 1e-10, np.float32), np.zeros(1, np.float32), np.zeros(4, np.float32)
launch(SOURCE["two_roundings"], 1, 1, (a, one, zero, out))
assert out.view(np.uint32)[0] == 71362, out.view(np.uint32)
assert float(torch.tensor([1e-30]) * torch.tensor([1e-10])) == 0.0, "and the host is as it was"
"""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])
