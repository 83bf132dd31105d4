"""What every kernel takes on every architecture, as the assembler says: registers, shared memory, local memory, spills. No GPU is needed.

    python benchmarks/kernels_static.py                # prints the tables of docs/gpu.md
    python benchmarks/kernels_static.py --write        # and puts them there
    python benchmarks/kernels_static.py --only rans.cu # the numbers of some files; with --write their rows alone are made anew

Of two compilers: NVRTC, which makes what a GPU runs, and nvcc (`nvcc -Xptxas -v`), where there is one; the page has both. Rows are kernels; a
range runs over the kernel's instances, for nvcc over the architectures too.
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


Taken = dict[tuple[str, str], dict[str, list[Resources]]]


def measured(chosen: list[Source], nvcc: bool) -> tuple[Taken, Taken]:
    """(file, kernel) -> architecture -> resources of its instances, by NVRTC and (or nothing) by nvcc."""
    out: tuple[Taken, Taken] = ({}, {})
    for source in chosen:
        for architecture in ARCHITECTURES:
            cubin = compile_source(source, architecture)
            every = [cubin.resources, by_nvcc(source, architecture, cubin.mangled) if nvcc else {}]
            for taken, own in zip(out, every):
                for instance, resources in own.items():
                    kernel = source.name, instance.split("<")[0]
                    taken.setdefault(kernel, {}).setdefault(architecture, []).append(resources)
    return out


def span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def row_of(by: dict[str, list[Resources]]) -> list[str]:
    """The cells of one kernel: instances, registers on each architecture, shared, local, spills."""
    every = [r for own in by.values() for r in own]
    return [
        str(len(by[ARCHITECTURES[0]])), *(span([r.registers for r in by[a]]) for a in ARCHITECTURES), span([r.shared_bytes for r in every]),
        span([r.stack_bytes for r in every]), span([r.spill_bytes for r in every]),
    ]  # fmt: skip


def numbers_table(taken: Taken, by_nvcc_: Taken) -> str:
    heads = " | ".join(f"sm_{a}" for a in ARCHITECTURES)
    lines = [
        f"| file | kernel | instances | registers: {heads} | shared | local | spills | nvcc: registers | nvcc: spills |",
        "|" + "---|" * (8 + len(ARCHITECTURES)),
    ]
    for kernel, by in sorted(taken.items()):
        other = [r for own in by_nvcc_.get(kernel, {}).values() for r in own]
        both = [span([r.registers for r in other]), span([r.spill_bytes for r in other])] if other else ["", ""]
        lines.append(f"| {kernel[0]} | `{kernel[1]}` | " + " | ".join([*row_of(by), *both]) + " |")
    return "\n".join(lines)


def versions(nvcc: bool) -> str:
    from cupy.cuda import nvrtc

    said = f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))}"
    if not nvcc:
        return said
    told = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return f"{said}; the last two columns by nvcc {re.findall(r'V([0-9.]+)', told)[0]} (-Xptxas -v)"


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
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md; needs nvcc")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="these files of kernels")
    given, _ = parser.parse_known_args()  # `make bench` gives all scripts the same arguments
    nvcc = shutil.which("nvcc") is not None
    if given.write and not nvcc:
        parser.error("--write: expected nvcc on the path")
    lookup = lookup_table()
    chosen = [source for source in all_sources() if not given.only or source.name in given.only]
    numbers = numbers_table(*measured(chosen, nvcc))
    head = f"By {versions(nvcc)}. Bytes: static shared memory a block, local memory and spills a thread."
    if given.only and given.write:
        numbers = with_other_rows(head, numbers, given.only)
    numbers = f"{head}\n\n{numbers}"
    print(*([] if given.only else [lookup]), numbers, sep="\n\n")
    if given.write:
        put("lookup", lookup)
        put("numbers", numbers)


def with_other_rows(head: str, numbers: str, only: list[str]) -> str:
    """The table with the page's rows of the other files, which were made by the same compilers."""
    begin, end = MARKS["numbers"]
    page = PAGE.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    if head not in page:
        raise SystemExit(f"the rows of the page were made by other compilers than these: {head}; write all of them")
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    lines = numbers.splitlines()
    kept = [line for line in rows if line.split("|")[1].strip() not in only]
    return "\n".join([*lines[:2], *sorted([*lines[2:], *kept])])


if __name__ == "__main__":
    main()
