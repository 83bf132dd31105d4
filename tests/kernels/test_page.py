"""docs/gpu.md: its tables know every kernel there is, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import gpu
from gpu.module import FOLDER, sources
from tests.simt.test_faults import FAULTS

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
REMAKE = "run `python benchmarks/kernels_static.py --write`"
for _module in pkgutil.walk_packages(gpu.__path__, "gpu."):
    importlib.import_module(_module.name)


def table(name: str) -> list[list[str]]:
    part = PAGE.split(f"<!-- {name}: made by")[1].split(f"<!-- end of {name} -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return rows[2:]


def kernels() -> set[tuple[str, str]]:
    return {(s.name, i.split("<")[0]) for s in sources() for i in s.instances}


def test_every_file_leads_to_its_kernels_reference_and_test() -> None:
    rows = table("lookup")
    assert {re.findall(r"[\w]+\.cu", row[0])[0] for row in rows} == {p.name for p in FOLDER.glob("*.cu")}, REMAKE
    for file, names, equals, launched, test in rows:
        own = {k for f, k in kernels() if f"/{f})" in file}
        assert set(re.findall(r"`(\w+)`", names)) == own, f"{file}: {REMAKE}"
        assert "reference/" in equals or "kvtheory/" in equals, file
        assert "gpu/" in launched and "tests/kernels/test_" in test, file


def test_every_kernel_has_its_numbers_and_none_spills() -> None:
    rows = table("numbers")
    assert {(row[0], row[1].strip("`")) for row in rows} == kernels(), REMAKE
    counts = {(s.name, k): 0 for s in sources() for k in {i.split("<")[0] for i in s.instances}}
    for s in sources():
        for i in s.instances:
            counts[s.name, i.split("<")[0]] += 1
    for row in rows:
        assert int(row[2]) == counts[row[0], row[1].strip("`")], f"{row[:3]}: {REMAKE}"
        assert row[9] == row[11] == "0", f"{row[:2]}: spills by NVRTC and by nvcc"


def test_the_number_of_planted_faults_is_true() -> None:
    told = re.search(r"holds a kernel for each, (\d+) in all", PAGE)
    assert told and int(told[1]) == len(FAULTS)
