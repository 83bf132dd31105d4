"""Compiles a .cu file for the host: one shared library for a source, its instances and a build, kept by their hash.

Two builds. "fast" is -O2. "check" has g++ call check.cpp at every access to memory and every overflow. Both forbid fused
multiply-add and everything else that would change a bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "BUILDS",
    "BuildError",
    "DYNAMIC_SHARED",
    "Unavailable",
    "compiler",
    "cuda_includes",
    "library",
    "with_includes",
]

HERE = Path(__file__).parent
KERNELS = HERE.parent / "kernels"
BUILDS = ("fast", "check")
#: bytes of dynamic shared memory that a block may have on every architecture that we compile for (the least: sm_120)
DYNAMIC_SHARED = 99 << 10
#: bytes nobody owns behind each __shared__ variable, so that an overrun does not land in the next one
GAP = 1024

_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-gdwarf-4",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
)
# TLS of the kernels: no call of an initialiser that is not there for `extern __shared__`; not shared between libraries
_KERNEL = (
    "-fno-extern-tls-init",
    "-fno-gnu-unique",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-variable",
    "-Wno-unused-function",
)
_CHECKS = (
    "-fsanitize=thread,bounds-strict,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow,alignment,bool,return,unreachable",
    "--param=tsan-instrument-func-entry-exit=0",
)  # fmt: skip
_OF_BUILD = {"fast": ("-O2",), "check": ("-O1", *_CHECKS, "-DSIMT_CHECK")}
_MACHINE = {"fast": ("-O2",), "check": ("-O2", "-DSIMT_CHECK")}


class Unavailable(RuntimeError):
    """Something this machine lacks; the message is one sentence that says what, and what still works."""


class BuildError(RuntimeError):
    """The host's compiler refused a kernel; the message ends in what it said."""


_STILL = "NumPy arrays can still be coded by the codecs of `reference`, and CuPy arrays by the kernels on a GPU"
_OLDEST = 11


def compiler() -> Path:
    """g++ of this machine: $CXX if it is a g++, else g++ on the path.

    Raises:
        Unavailable: there is none of version 11 or later (Clang does not do: its checks and its TLS symbols differ), no readelf
            beside it, or this is not Linux.
    """
    if sys.platform != "linux":
        raise Unavailable(f"the simulator of the kernels runs on Linux (or WSL) only, not on {sys.platform}; {_STILL}")
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted if "g++" in Path(wanted).name else "g++") or shutil.which("g++")
    if found is None:
        raise Unavailable(
            f"the simulator of the kernels needs g++ ({_OLDEST} or later), which is not on the path; {_STILL}"
        )
    path = Path(found).resolve()
    version = _version(path, path.stat().st_mtime_ns)
    if version < _OLDEST:
        raise Unavailable(
            f"the simulator of the kernels needs g++ {_OLDEST} or later, and {path} is version {version}; {_STILL}"
        )
    if shutil.which("readelf") is None:
        raise Unavailable(
            f"the simulator of the kernels needs readelf (of binutils), which is not on the path; {_STILL}"
        )
    return path


@functools.cache
def _version(cxx: Path, _modified: int) -> int:
    """Major version; 0 if it does not say."""
    said = subprocess.run([str(cxx), "-dumpversion"], capture_output=True, text=True, check=False).stdout
    number = said.strip().split(".")[0]
    return int(number) if number.isdigit() else 0


def _candidates() -> list[Path]:
    places: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        places += [*sorted(Path(root).glob("cu[0-9]*/include"), reverse=True), Path(root) / "cuda_runtime" / "include"]
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            places.append(Path(os.environ[variable]) / "include")
    if nvcc := shutil.which("nvcc"):
        places.append(Path(nvcc).resolve().parent.parent / "include")
    return [*places, Path("/usr/local/cuda/include")]


def cuda_includes() -> tuple[Path, ...]:
    """Folders that hold cuda_fp16.h and what it includes: of the nvidia wheels, else of an installed toolkit.

    Raises:
        Unavailable: there are none.
    """
    for folder in _candidates():
        if (folder / "cuda_fp16.h").is_file() and (folder / "crt" / "host_defines.h").is_file():
            return tuple(f for f in (folder, folder / "cccl") if f.is_dir())
    raise Unavailable(
        "the kernels need CUDA's header files, which are not installed: `pip install 'kvtheory[gpu]'` brings them (no GPU or driver "
        "needed); without them the codecs of `reference` still work"
    )


def with_includes(source: Path) -> dict[Path, str]:
    """The text of a source and of all that it includes by `#include "..."`: beside the includer, else of gpu/kernels."""
    texts: dict[Path, str] = {}
    todo = [source.resolve()]
    while todo:
        path = todo.pop()
        if path in texts:
            continue
        texts[path] = path.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', texts[path], re.M):
            # a file that is nowhere is for the compiler to complain of
            todo += [p for p in (path.parent / name, KERNELS / name) if p.is_file()][:1]
    return texts


def kept_in() -> Path:
    """Where libraries are kept: the user's cache of kvtheory, or a private temporary folder where that cannot be written."""
    base = (
        os.environ.get("KVTHEORY_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvtheory"
    )
    folder = Path(base) / "simt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _temporarykept_in()


@functools.cache
def _temporarykept_in() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvtheory-simt-"))


def _run(command: Sequence[str | Path], what: str) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} could not compile {what}:\n{done.stderr.strip()[:6000]}")


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _publish(made: Path, target: Path) -> None:
    """Two processes may make one file at the same time: whoever comes last replaces an equal one."""
    os.replace(made, target)


def _machine(cxx: Path, stamp: object, build: str, includes: Sequence[str], portable: bool) -> list[Path]:
    """The object files of the simulator itself, shared by all kernels."""
    texts = [(HERE / name).read_text(encoding="utf-8") for name in ("simt.h", "machine.h", "simt.cpp", "check.cpp")]
    flags = (*_COMMON, *_MACHINE[build], *(("-DSIMT_PORTABLE",) if portable else ()))
    objects = []
    for part in ("simt", "check"):
        target = kept_in() / f"{part}-{build}-{_key(texts, stamp, flags, includes)}.o"
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=kept_in()) as scratch:
                made = Path(scratch) / "made.o"
                _run(
                    [cxx, *flags, "-Wall", "-Wextra", f"-I{HERE}", *includes, "-c", HERE / f"{part}.cpp", "-o", made],
                    f"{part}.cpp",
                )
                _publish(made, target)
        objects.append(target)
    return objects


def _wrapper(source: Path, instances: Sequence[str]) -> str:
    lines = [
        f'#include "{source.resolve()}"',
        # the one array of dynamic shared memory, whatever file declares it
        f"alignas(16) thread_local uint4 smem[{DYNAMIC_SHARED} / sizeof(uint4)];",
        '#define EXPORT extern "C" __attribute__((visibility("default")))',
        "EXPORT char* simt_stacks();",
        "EXPORT const void* simt_address() { return reinterpret_cast<const void*>(&simt_address); }",
    ]
    for i, name in enumerate(instances):
        lines += [
            f"EXPORT int launch_{i}(simt::Launch* how) {{ return simt::launch(&{name}, *how, reinterpret_cast<char*>(smem), sizeof smem); }}",
            f"EXPORT int describe_{i}(simt::Parameter* out) {{ return simt::describe(&{name}, out); }}",
            f"EXPORT const void* kernel_{i}() {{ return reinterpret_cast<const void*>(&{name}); }}",
        ]
    return "\n".join(lines) + "\n"


def _with_gaps(assembly: str) -> str:
    """The assembly with room after each thread-local variable; its symbol keeps its size."""
    in_tls = False
    lines = []
    for line in assembly.splitlines():
        lines.append(line)
        word = line.split(None, 1)
        if word and word[0] in (".section", ".text", ".data", ".bss", ".previous", ".popsection", ".pushsection"):
            in_tls = word[0] == ".section" and word[1].startswith(".tbss")
        elif in_tls and word and word[0] == ".zero":
            lines.append(f"\t.zero\t{GAP}")
    return "\n".join(lines) + "\n"


def _symbols(path: Path) -> dict[str, list[Any]]:
    """Thread-local variables [offset, size, mangled, demangled] and functions [address, mangled] of a library."""
    out: dict[str, list[Any]] = {"variables": [], "functions": []}
    for mangled, plain in zip(*(_readelf(path, flag) for flag in ("--symbols", "--symbols=--demangle"))):
        if len(mangled) < 8 or mangled[6] == "UND":
            continue
        if mangled[3] == "TLS" and int(mangled[2], 0):
            out["variables"].append([int(mangled[1], 16), int(mangled[2], 0), mangled[7], " ".join(plain[7:])])
        elif mangled[3] == "FUNC" and not mangled[7].startswith(("_ZN4simt", "_ZNS", "_ZS", "__")):
            out["functions"].append([int(mangled[1], 16), mangled[7]])
    return out


def _readelf(path: Path, flag: str) -> list[list[str]]:
    flags = ["-sW"] if flag == "--symbols" else ["-sWC"]
    text = subprocess.run(["readelf", *flags, str(path)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in text.split("'.symtab'", 1)[-1].splitlines()]
    return [r for r in rows if r and r[0].rstrip(":").isdigit()]


def library(
    source: Path, instances: Sequence[str], build: str, portable: bool = False
) -> tuple[Path, dict[str, list[Any]]]:
    """The shared library with `instances` of the kernels of `source`, made if there is none, and its symbols.

    Args:
        source: a .cu file.
        instances: name expressions, such as "encode<float, 4>".
        build: "fast" or "check".
        portable: change stacks by the C library, as on processors other than x86-64.

    Raises:
        Unavailable: no g++ or no CUDA headers.
        BuildError: g++ refuses the source.
    """
    cxx, folders = compiler(), cuda_includes()
    state = cxx.stat()
    stamp = (str(cxx), state.st_mtime_ns, state.st_size, [(str(f), f.stat().st_mtime_ns) for f in folders])
    includes = [f"-isystem{f}" for f in folders]
    own = ["simt.h", "machine.h", "simt.cpp", "check.cpp"]
    texts = (
        [(HERE / name).read_text(encoding="utf-8") for name in own],
        sorted((p.name, t) for p, t in with_includes(source).items()),
    )
    flags = (*_COMMON, *_KERNEL, *_OF_BUILD[build])
    key = _key(texts, str(source.resolve()), list(instances), stamp, flags, GAP, DYNAMIC_SHARED, portable)
    target = kept_in() / f"{source.stem}-{build}-{key}.so"
    layout = target.with_suffix(".json")
    if not (target.exists() and layout.exists()):
        objects = _machine(cxx, stamp, build, includes, portable)
        with tempfile.TemporaryDirectory(dir=kept_in()) as scratch:
            at = Path(scratch)
            (at / "main.cpp").write_text(_wrapper(source, instances), encoding="utf-8")
            _run(
                [
                    cxx,
                    *flags,
                    f"-I{HERE}",
                    f"-I{KERNELS}",
                    *includes,
                    "-include",
                    "simt.h",
                    "-S",
                    at / "main.cpp",
                    "-o",
                    at / "main.s",
                ],
                source.name,
            )
            (at / "gaps.s").write_text(_with_gaps((at / "main.s").read_text(encoding="utf-8")), encoding="utf-8")
            _run([cxx, "-c", at / "gaps.s", "-o", at / "main.o"], source.name)
            _run(
                [cxx, "-shared", "-Wl,-Bsymbolic", at / "main.o", *objects, "-lpthread", "-lrt", "-o", at / "lib.so"],
                source.name,
            )
            (at / "lib.json").write_text(json.dumps(_symbols(at / "lib.so")), encoding="utf-8")
            _publish(at / "lib.json", layout)
            _publish(at / "lib.so", target)
    return target, json.loads(layout.read_text(encoding="utf-8"))
