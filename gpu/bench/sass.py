"""What the assembler made of a kernel: its instructions by kind, and which of them lie in loops. No GPU is needed.

SASS comes from cuobjdump (the package nvidia-cuda-cuobjdump with nvidia-cuda-nvdisasm, or a CUDA toolkit). Where there is none, NVRTC's PTX is
counted in its place, which is an estimate of the same instructions before the assembler's work, and every table says so.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gpu.compile import Cubin, compile_source
from gpu.module import Source

__all__ = ["Code", "compiled", "disassembler", "read", "tool_version"]


@dataclass(frozen=True)
class Code:
    """Instructions of one instance: once through, and those of them in a loop; each a count by kind.

    Kinds: "all", "multiply" (float32 and integer multiply-adds), "float64", "slow" (conversions and special functions: a quarter of the rate or less),
    "shuffle", "barrier", "shared bytes", "global bytes", and of these "stored bytes" (of one lane).
    """

    once: Counter[str]
    looped: Counter[str]


@functools.cache
def disassembler() -> Path | None:
    """cuobjdump with an nvdisasm beside it, of the wheels, the toolkit or the path."""
    places: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        places += sorted(Path(root).glob("cu[0-9]*/bin"), reverse=True)
    places += [
        Path(os.environ[name]) / "bin"
        for name in ("KVTHEORY_CUOBJDUMP", "CUDA_HOME", "CUDA_PATH")
        if os.environ.get(name)
    ]
    places.append(Path("/usr/local/cuda/bin"))
    if found := shutil.which("cuobjdump"):
        places.append(Path(found).parent)
    return next((p / "cuobjdump" for p in places if (p / "cuobjdump").is_file() and (p / "nvdisasm").is_file()), None)


def tool_version() -> str:
    """ "cuobjdump 13.5.37", or "PTX of NVRTC"."""
    tool = disassembler()
    if tool is None:
        return "PTX of NVRTC, as there is no cuobjdump"
    said = subprocess.run([str(tool), "--version"], capture_output=True, text=True, check=False).stdout
    return f"SASS by cuobjdump {(re.findall(r'V([0-9.]+)', said) or ['?'])[0]}"


@functools.cache
def compiled(source: Source, instances: tuple[str, ...], architecture: str) -> Cubin:
    """These instances alone, which takes less time than all of them."""
    own = copy.copy(source)
    own.instances = instances
    return compile_source(own, architecture)


def read(source: Source, instances: tuple[str, ...], architecture: str) -> dict[str, Code]:
    """Instance -> its code. Errors as `compile_source`."""
    cubin, tool = compiled(source, instances, architecture), disassembler()
    if tool is None:
        return _ptx(source, instances)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cubin"
        file.write_bytes(cubin.data)
        environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ.get('PATH', '')}"}
        done = subprocess.run(
            [str(tool), "-sass", str(file)], capture_output=True, text=True, check=False, env=environment
        )
    if done.returncode or "Function :" not in done.stdout:
        raise RuntimeError(f"{tool.name} could not read {source.name}: {done.stderr.strip()[:500]}")
    parts = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function :|\Z)", done.stdout, re.S))
    return {instance: _sass(parts[cubin.mangled[instance]]) for instance in instances}


_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _kinds(op: str) -> Counter[str]:
    kinds: Counter[str] = Counter(all=1)
    name = op.partition(".")[0]
    width = _BYTES[found[1]] if (found := _WIDTH.search(op)) else 4
    if name in ("FFMA", "FMUL", "FADD", "HFMA2", "IMAD", "IDP", "IDP4A"):
        kinds["multiply"] += 1
    if name in ("DFMA", "DMUL", "DADD", "DSETP", "DMNMX"):
        kinds["float64"] += 1
    if name in ("MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV", "I2FP", "F2IP"):
        kinds["slow"] += 1
    if name in ("SHFL", "VOTE", "MATCH", "REDUX"):
        kinds["shuffle"] += 1
    if name in ("BAR", "WARPSYNC"):
        kinds["barrier"] += 1
    if name in ("LDS", "STS", "ATOMS"):
        kinds["shared bytes"] += width
    if name in ("LDG", "STG", "LD", "ST", "RED", "ATOMG", "ATOM"):
        kinds["global bytes"] += width
        if name in ("STG", "ST", "RED", "ATOMG", "ATOM"):
            kinds["stored bytes"] += width
    return kinds


def _sass(text: str) -> Code:
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", text)
    instructions = [(int(at, 16), op, rest) for at, op, rest in found if op != "NOP"]
    loops = []
    for at, op, rest in instructions:
        if op.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", rest)) and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    once: Counter[str] = Counter()
    looped: Counter[str] = Counter()
    for at, op, _ in instructions:
        kinds = _kinds(op)
        once += kinds
        if any(first <= at <= last for first, last in loops):
            looped += kinds
    return Code(once, looped)


def _ptx(source: Source, instances: tuple[str, ...]) -> dict[str, Code]:
    """The same from PTX, whose names differ: mad, fma and mul of f32 and integers, of f64, cvt and approximations, shfl, bar, ld and st."""
    from cupy.cuda import nvrtc

    from gpu.module import FOLDER, OPTIONS
    from gpu.simt.build import cuda_includes

    program = nvrtc.createProgram(source.path.read_text(encoding="utf-8"), source.name, (), ())
    try:
        for instance in instances:
            nvrtc.addNameExpression(program, instance)
        includes = [f"-I{folder}" for folder in (source.path.parent, FOLDER, *cuda_includes())]
        nvrtc.compileProgram(program, ("-arch=compute_90", *OPTIONS, *includes))
        names = {instance: nvrtc.getLoweredName(program, instance) for instance in instances}
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    bodies = dict(re.findall(r"\.entry (\w+)\(.*?\)[^{]*\{(.*?)\n\}", text, re.S))
    return {instance: _ptx_code(bodies[name]) for instance, name in names.items()}


def _ptx_code(body: str) -> Code:
    lines = [line.strip() for line in body.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    loops = [
        (labels[target[1]], i)
        for i, line in enumerate(lines)
        if (target := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) and labels.get(target[1], i) < i
    ]
    once: Counter[str] = Counter()
    looped: Counter[str] = Counter()
    for i, line in enumerate(lines):
        op = re.match(r"(?:@!?%\w+\s+)?([a-z][\w.]*)\s", line)
        if not op or op[1].startswith(("ld.param", "mov")):
            continue
        kinds = Counter(all=1)
        name = op[1]
        width = (
            int((re.findall(r"[usbf](8|16|32|64)\b", name) or ["32"])[-1])
            // 8
            * (4 if ".v4" in name else 2 if ".v2" in name else 1)
        )
        if ".f64" in name and not name.startswith(("ld", "st", "cvt")):
            kinds["float64"] += 1
        elif name.startswith(("fma", "mad", "mul", "add.f32", "sub.f32")):
            kinds["multiply"] += 1
        if name.startswith(("cvt", "ex2", "rcp", "sqrt", "popc", "clz", "bfind", "brev")):
            kinds["slow"] += 1
        if name.startswith(("shfl", "vote")):
            kinds["shuffle"] += 1
        if name.startswith("bar"):
            kinds["barrier"] += 1
        if name.startswith(("ld.shared", "st.shared", "atom.shared")):
            kinds["shared bytes"] += width
        if name.startswith(("ld.global", "st.global", "atom.global", "red.global")):
            kinds["global bytes"] += width
            if not name.startswith("ld"):
                kinds["stored bytes"] += width
        once += kinds
        if any(first <= i <= last for first, last in loops):
            looped += kinds
    return Code(once, looped)
