"""What every kernel takes on every architecture, as the assembler says: registers, shared memory, local memory, spills. No GPU is needed.

    python benchmarks/kernels_static.py                # prints the tables of docs/gpu.md
    python benchmarks/kernels_static.py --write        # and puts them there

The compiler is nvcc (`nvcc -Xptxas -v`) where there is one, else NVRTC, which runs the same assembler: --compiler chooses. Rows are kernels;
a range runs over the kernel's instances.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import gpu
from gpu.compile import ARCHITECTURES, Resources, _resources, compile_source
from gpu.module import FOLDER, OPTIONS, Source, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
MARKS = {
    "lookup": ("<!-- lookup: made by benchmarks/kernels_static.py -->", "<!-- end of lookup -->"),
    "numbers": ("<!-- numbers: made by benchmarks/kernels_static.py -->", "<!-- end of numbers -->"),
}


def all_sources() -> list[Source]:
    """Every file of kernels that a module of gpu/ launches from, by name; of two Sources of one file, both."""
    for found in pkgutil.walk_packages(gpu.__path__, "gpu."):
        importlib.import_module(found.name)
    return sorted(sources(), key=lambda s: s.name)


def by_nvcc(source: Source, architecture: str, mangled: dict[str, str]) -> dict[str, Resources]:
    """Resources of each instance, out of what `nvcc -Xptxas -v` prints."""
    wanted = ",\n".join(f"    (void*)&{i}" for i in source.instances)
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "all.cu"
        wrapper.write_text(f'#include "{source.path}"\nextern void* const instances[] = {{\n{wanted}\n}};\n')
        command = [
            "nvcc", *(o for o in OPTIONS), f"-arch=sm_{architecture}", "-cubin", "-Xptxas=-v", f"-I{FOLDER}", str(wrapper), "-o",
            str(Path(folder) / "all.cubin"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc could not compile {source.name} for sm_{architecture}:\n{done.stderr}")
    said = _resources(done.stdout + done.stderr)
    return {instance: said[name] for instance, name in mangled.items()}


def measured(compiler: str) -> dict[tuple[str, str], dict[str, list[Resources]]]:
    """(file, kernel) -> architecture -> resources of its instances."""
    out: dict[tuple[str, str], dict[str, list[Resources]]] = {}
    for source in all_sources():
        for architecture in ARCHITECTURES:
            cubin = compile_source(source, architecture)
            taken = by_nvcc(source, architecture, cubin.mangled) if compiler == "nvcc" else cubin.resources
            for instance, resources in taken.items():
                kernel = instance.split("<")[0]
                out.setdefault((source.name, kernel), {}).setdefault(architecture, []).append(resources)
    return out


def span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def numbers_table(taken: dict[tuple[str, str], dict[str, list[Resources]]]) -> str:
    heads = " | ".join(f"sm_{a}" for a in ARCHITECTURES)
    lines = [
        f"| file | kernel | instances | registers: {heads} | shared | local | spills |",
        "|" + "---|" * (6 + len(ARCHITECTURES)),
    ]
    for (file, kernel), by in sorted(taken.items()):
        everything = [r for rs in by.values() for r in rs]
        registers = " | ".join(span([r.registers for r in by[a]]) for a in ARCHITECTURES)
        lines.append(
            f"| {file} | `{kernel}` | {len(by[ARCHITECTURES[0]])} | {registers} | {span([r.shared_bytes for r in everything])} "
            f"| {span([r.stack_bytes for r in everything])} | {span([r.spill_bytes for r in everything])} |"
        )
    return "\n".join(lines)


def references(path: Path) -> list[str]:
    """The files that a .cu says it equals, in its first comment."""
    comment = re.match(r"(?://[^\n]*\n)+", path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(re.findall(r"\b((?:reference|kvtheory)/[\w/]+\.py)", comment[0] if comment else "")))


def launchers(name: str) -> list[Path]:
    """Modules of gpu/ that make a Source of this file; the module of Source itself shows one in its docstring."""
    made = re.compile(rf"\bSource\(\s*\"{re.escape(name)}\"")
    found = sorted((ROOT / "gpu").rglob("*.py"))
    return [p for p in found if p.name != "module.py" and made.search(p.read_text(encoding="utf-8"))]


def tests_of(name: str, modules: list[Path]) -> list[Path]:
    """The test named after the file, or else those that import a module that launches from it."""
    own = ROOT / "tests" / "kernels" / f"test_{Path(name).stem}.py"
    if own.exists():
        return [own]
    dotted = [".".join(m.relative_to(ROOT).with_suffix("").parts) for m in modules]
    out = []
    for test in sorted((ROOT / "tests" / "kernels").glob("test_*.py")):
        text = test.read_text(encoding="utf-8")
        if any(
            re.search(
                rf"\b{re.escape(d)}\b|from {re.escape(d.rpartition('.')[0])} import .*\b{d.rpartition('.')[2]}\b", text
            )
            for d in dotted
        ):
            out.append(test)
    return out


def lookup_table() -> str:
    lines = ["| file of kernels | kernels | equals | launched by | test |", "|---|---|---|---|---|"]

    def link(path: Path | str) -> str:
        relative = str(Path(path).relative_to(ROOT)) if isinstance(path, Path) else path
        return f"[{relative}](../{relative})"

    for path in sorted(FOLDER.glob("*.cu")):
        kernels = list(
            dict.fromkeys(i.split("<")[0] for s in all_sources() if s.name == path.name for i in s.instances)
        )
        modules = launchers(path.name)
        lines.append(
            f"| {link(path)} | {', '.join(f'`{k}`' for k in kernels)} | {', '.join(map(link, references(path)))} "
            f"| {', '.join(map(link, modules))} | {', '.join(map(link, tests_of(path.name, modules)))} |"
        )
    return "\n".join(lines)


def put(name: str, text: str) -> None:
    begin, end = MARKS[name]
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(begin, 1)
    PAGE.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", choices=("nvcc", "nvrtc"), default="nvcc" if shutil.which("nvcc") else "nvrtc")
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md")
    given, _ = parser.parse_known_args()  # `make bench` gives all scripts the same arguments
    lookup = lookup_table()
    numbers = numbers_table(measured(given.compiler))
    if given.compiler == "nvcc":
        version = re.findall(
            r"V([\d.]+)", subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        )[0]
    else:
        from cupy.cuda import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
    numbers = f"By {given.compiler} {version}; bytes, static shared memory a block, local memory and spills a thread.\n\n{numbers}"
    print(lookup, numbers, sep="\n\n")
    if given.write:
        put("lookup", lookup)
        put("numbers", numbers)


if __name__ == "__main__":
    main()
