"""Compiles the kernels for real GPUs by NVRTC. No GPU and no driver is needed: CI compiles every kernel this way.

CuPy's own compile function asks for the current device, and adds options of its own; its bindings of NVRTC do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass

from gpu.module import FOLDER, OPTIONS, Source, Unavailable
from gpu.simt.build import BuildError, cuda_includes, kept_in, with_includes

__all__ = ["ARCHITECTURES", "Cubin", "Resources", "compile_source", "stored"]

#: compute capabilities that the kernels are compiled for: A100, H100, B200, RTX 50
ARCHITECTURES = ("80", "90", "100", "120")


@dataclass(frozen=True)
class Resources:
    """What one instance takes on one architecture, as the assembler (ptxas) says.

    registers: of each thread. shared_bytes: static, of each block. stack_bytes: local memory of each thread (arrays that no
    register can hold). spill_bytes: registers' worth that are stored to local memory and loaded again, both counted.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A source compiled for one architecture: the ELF file, and for each instance its mangled name in it and what it takes."""

    architecture: str
    data: bytes
    mangled: dict[str, str]
    resources: dict[str, Resources]


def _resources(log: str) -> dict[str, Resources]:
    """Out of what ptxas says of each function, by mangled name."""
    found = {}
    for name, rest in re.findall(
        r"Compiling entry function '(\w+)' for '\w+'\n(.*?)(?=Compiling entry function|\Z)", log, re.S
    ):
        own = rest.split("Function properties for " + name, 1)[-1]

        def number(pattern: str, text: str = own) -> int:
            numbers = re.findall(pattern, text)
            return int(numbers[0]) if numbers else 0

        if "Used " not in own or "bytes spill stores" not in own:
            raise BuildError(f"ptxas says nothing of the registers and spills of {name}:\n{own[:600]}")
        spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        stack = max(number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes cumulative stack size"))
        found[name] = Resources(number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), stack, spills)
    return found


def compile_source(source: Source, architecture: str) -> Cubin:
    """Compiles all instances of a source for one compute capability ("90").

    Raises:
        BuildError: NVRTC refuses the source; the message ends in its log.
        Unavailable: CuPy, NVRTC or the CUDA headers are not installed.
    """
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise Unavailable(
            "compiling kernels for a GPU needs CuPy's bindings of NVRTC: `pip install 'kvtheory[gpu]'` (no GPU or driver needed); the "
            "simulator works without them"
        ) from error
    includes = [f"-I{folder}" for folder in (source.path.parent, FOLDER, *cuda_includes())]
    try:
        program = nvrtc.createProgram(source.path.read_text(encoding="utf-8"), source.name, (), ())
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(
            f"NVRTC cannot be loaded ({str(error).splitlines()[0]}): `pip install nvidia-cuda-nvrtc`; the simulator works without it"
        ) from error
    try:
        for instance in source.instances:
            nvrtc.addNameExpression(program, instance)
        try:
            nvrtc.compileProgram(program, (f"-arch=sm_{architecture}", "-Xptxas=-v", *OPTIONS, *includes))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            raise BuildError(
                f"NVRTC could not compile {source.name} for sm_{architecture} ({error}):\n{log[:6000]}"
            ) from error
        mangled = {instance: nvrtc.getLoweredName(program, instance) for instance in source.instances}
        said = _resources(nvrtc.getProgramLog(program))
        data = _whole(nvrtc.getCUBIN(program))
        return Cubin(architecture, data, mangled, {instance: said[name] for instance, name in mangled.items()})
    finally:
        nvrtc.destroyProgram(program)


def _whole(data: bytes) -> bytes:
    """The ELF file that NVRTC made: CuPy's `getCUBIN` leaves out its last byte, as if it were the end of a string.

    In memory nobody sees that, as Python ends bytes with a 0, which the last byte of a program header (its alignment's highest) is too; a
    file that a driver or a disassembler opens would be cut off.
    """
    start, size, count = (int.from_bytes(data[at:to], "little") for at, to in ((32, 40), (54, 56), (56, 58)))
    return data + b"\0" if start + size * count == len(data) + 1 else data


def stored(source: Source, architecture: str) -> tuple[str, dict[str, str]]:
    """(path of the cubin, mangled name of each instance), compiled once and kept by the hash of all that goes in. Errors of `compile_source`.

    It is what a GPU runs. CuPy's own compilation would add -ftz=true, which CI's kernels do not have (subnormals would come out as 0), and
    keep what it compiled though an included file changed.
    """
    from cupy.cuda import nvrtc

    what = (
        "whole",
        nvrtc.getVersion(),
        architecture,
        OPTIONS,
        source.instances,
        sorted(with_includes(source.path).values()),
    )
    name = f"{source.path.stem}-sm{architecture}-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"
    path, names = kept_in() / f"{name}.cubin", kept_in() / f"{name}.json"
    if not (path.exists() and names.exists()):
        made = compile_source(source, architecture)
        for target, data in ((path, made.data), (names, json.dumps(made.mangled).encode())):
            with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
                scratch.write(data)
            os.replace(scratch.name, target)
    return str(path), json.loads(names.read_text())
