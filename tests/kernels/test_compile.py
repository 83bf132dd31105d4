"""Every kernel compiles for every architecture, from wheels alone, and none spills a register."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

import gpu
from gpu.compile import ARCHITECTURES, Cubin, compile_source, stored
from gpu.module import FOLDER, OPTIONS, BuildError, Source, Unavailable, sources
from tests.kernels.test_page import PAGE, REMAKE, table

for _module in pkgutil.walk_packages(gpu.__path__, "gpu."):
    importlib.import_module(_module.name)
SOURCES = sources()
#: bytes of static shared memory of a block: more than this no architecture gives without being asked
MOST_SHARED = 48 << 10


@functools.cache
def compiled(source: Source, architecture: str) -> Cubin:
    try:
        return compile_source(source, architecture)
    except Unavailable as missing:
        if os.environ.get("KVTHEORY_REQUIRE_KERNELS"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


def code(text: str) -> str:
    """Without comments and strings."""
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", " ", text, flags=re.S)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_every_instance_compiles_without_spills(source: Source, architecture: str) -> None:
    cubin = compiled(source, architecture)
    assert cubin.data[:4] == b"\x7fELF" and set(cubin.mangled) == set(source.instances) == set(cubin.resources)
    for instance, taken in cubin.resources.items():
        assert taken.registers > 0, instance
        assert taken.spill_bytes == 0, f"{instance} spills {taken.spill_bytes} bytes on sm_{architecture}"
        assert taken.shared_bytes <= MOST_SHARED, instance
        assert cubin.mangled[instance].encode() in cubin.data
    from cupy.cuda import nvrtc

    if "By NVRTC {}.{}".format(*nvrtc.getVersion()) in PAGE:  # another one may take other registers
        agrees_with_the_page(source, architecture, cubin)


def agrees_with_the_page(source: Source, architecture: str, cubin: Cubin) -> None:
    """docs/gpu.md has the numbers of what is compiled now."""
    rows = {(row[0], row[1].strip("`")): row for row in table("numbers")}
    for kernel in dict.fromkeys(i.split("<")[0] for i in source.instances):
        assert (source.name, kernel) in rows, f"{kernel}: {REMAKE}"
        row = rows[source.name, kernel]
        own = [taken for i, taken in cubin.resources.items() if i.split("<")[0] == kernel]
        told = [[int(n) for n in re.findall(r"\d+", cell)] for cell in row]
        registers = [taken.registers for taken in own]
        column = told[3 + ARCHITECTURES.index(architecture)]
        assert [min(registers), max(registers)] == [column[0], column[-1]], f"{kernel} on sm_{architecture}: {REMAKE}"
        for taken in own:
            assert told[7][0] <= taken.shared_bytes <= told[7][-1], f"{kernel}, shared: {REMAKE}"
            assert told[8][0] <= taken.stack_bytes <= told[8][-1], f"{kernel}, local: {REMAKE}"


def test_what_a_gpu_runs_keeps_subnormals_and_rounds_twice(tmp_path, monkeypatch) -> None:
    """The file that `launch` loads: compiled with the options that are tested, no others, and again when an included file changes."""
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path))
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(
        '#include "part.cuh"\n__global__ void f(const float* x, float* y) { y[0] = part(x[0], x[1]) / x[2]; }\n'
    )
    part = "__device__ inline float part(float a, float b) { return a * b + %s; }\n"
    paths = []
    for more in ("1.0f", "2.0f", "2.0f"):
        (tmp_path / "part.cuh").write_text(part % more)
        compiled(Source(kernel, ["f"]), "90")  # skips, or fails, where there is no NVRTC
        path, mangled = stored(Source(kernel, ["f"]), "90")
        assert Path(path).read_bytes()[:4] == b"\x7fELF" and list(mangled) == ["f"]
        paths.append(path)
    assert paths[0] != paths[1] == paths[2]

    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(part % "1.0f" + kernel.read_text().split("\n", 1)[1], "k.cu", (), ())
    nvrtc.compileProgram(program, ("-arch=compute_90", *OPTIONS))
    ptx = nvrtc.getPTX(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert ".ftz" not in ptx and "div.rn.f32" in ptx and "mul.rn.f32" in ptx and "fma" not in ptx


def test_a_source_that_is_wrong_is_refused_with_its_line() -> None:
    """That the test above can fail: C++ that g++ takes and NVRTC does not."""
    wrong = FOLDER.parents[1] / "tests" / "kernels" / "refused.cu"
    with pytest.raises(BuildError, match=r"refused\.cu\(5\)"):
        try:
            compile_source(Source(wrong, ["no_kernel_of_cuda"]), "90")
        except Unavailable as missing:
            pytest.skip(str(missing))


def test_every_file_of_kernels_belongs_to_a_source() -> None:
    files = {p.name for p in FOLDER.glob("*.cu")}
    assert files == {s.name for s in SOURCES}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.cu")), ids=lambda p: p.name)
def test_every_kernel_of_a_file_has_an_instance(path) -> None:
    """A template that nothing instantiates is compiled by nobody."""
    declared = set(
        re.findall(
            r"__global__\s+(?:__launch_bounds__\([^)]*\)\s*)?void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(",
            code(path.read_text()),
        )
    )
    listed = {i.split("<")[0].split("::")[-1].strip() for s in SOURCES if s.name == path.name for i in s.instances}
    assert declared and declared == listed


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.cu*")), ids=lambda p: p.name)
def test_kernels_are_plain_cuda(path) -> None:
    """No inline PTX, no std::, no host code, no approximate arithmetic, one dynamic array."""
    text = code(path.read_text())
    for forbidden in (
        r"\basm\b",
        r"\bstd::",
        r"<<<",
        r"\bcuda[A-Z]\w*\(",
        r"\b__(?:fdividef|expf|exp10f|logf|log2f|log10f|powf|sinf|cosf|tanf)\b",
        r"\brsqrtf\b",
        r"\bprintf\b",
        r"\bassert\b",
    ):
        assert not re.search(forbidden, text), f"{path.name} uses {forbidden}"
    for kind, name in re.findall(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\s*\[", text):
        assert (kind, name) == ("uint4", "smem")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.cu")), ids=lambda p: p.name)
def test_every_file_says_what_it_equals(path) -> None:
    """From a kernel to its reference: the first comment names a file of reference/ or kvtheory/ that exists."""
    comment = re.match(r"(?://[^\n]*\n)+", path.read_text())
    assert comment, f"{path.name} does not begin with a comment"
    named = re.findall(r"\b((?:reference|kvtheory)/[\w/]+\.py)", comment[0])
    assert named and all((FOLDER.parents[1] / n).is_file() for n in named), f"{path.name} names {named}"
