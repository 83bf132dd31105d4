"""What kvtheory is made of besides itself: the lock with hashes and the licences. `make supply`

    python scripts/supply.py check          constraints.hashes.txt pins what constraints.txt pins, each with SHA-256; docs/licences.md is current
    python scripts/supply.py licences       write docs/licences.md from the metadata of what is installed here
    python scripts/supply.py lock           write constraints.hashes.txt; needs uv (`pip install uv`), and asks the index of its configuration

The lock is made by `uv pip compile --no-deps --generate-hashes` from constraints.txt, so it names every file that the index has of each
version, and no index. Torch is not in it: its file for CPUs alone carries a local build tag and comes from an index of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS, LOCK, PAGE = ROOT / "constraints.txt", ROOT / "constraints.hashes.txt", ROOT / "docs" / "licences.md"
#: not locked, and why
WITHOUT = {"torch": "a CPU build with a local tag, from an index of its own"}
HEADER = """# constraints.txt with the SHA-256 of every file of each version; `python scripts/supply.py lock` makes it (uv pip compile --generate-hashes).
#   pip install --require-hashes --no-deps -r constraints.hashes.txt && pip install --no-deps kvtheory
# Without torch: {torch}.
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path = PINS) -> dict[str, str]:
    """Version by canonical name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonical(name): version for name, version in found}


def hashes(path: Path = LOCK) -> dict[str, list[str]]:
    """SHA-256 digests by canonical name."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if named := re.match(r"([A-Za-z0-9._-]+)==", line):
            own = found.setdefault(canonical(named[1]), [])
        if digest := re.search(r"--hash=sha256:([0-9a-f]{64})\b", line):
            own.append(digest[1])
    return found


def problems(constraints: Path = PINS, lock: Path = LOCK) -> list[str]:
    """What the lock lacks or has otherwise than constraints.txt."""
    wanted = {name: version for name, version in pins(constraints).items() if name not in WITHOUT}
    locked, digests = pins(lock), hashes(lock)
    said = [
        f"{n}: {v} in {constraints.name}, {locked.get(n, 'not')} in {lock.name}"
        for n, v in wanted.items()
        if locked.get(n) != v
    ]
    said += [f"{name}: in {lock.name} only" for name in locked if name not in wanted]
    said += [f"{name}: no hash in {lock.name}" for name in locked if not digests.get(name)]
    return said + [
        f"{lock.name} names an index" for _ in re.findall(r"://|--index|--find-links", lock.read_text(encoding="utf-8"))
    ]


def licence(name: str) -> str:
    """By the metadata: the SPDX expression, else the classifiers, else the licence's first line."""
    about = metadata.metadata(name)
    if about.get("License-Expression"):
        return str(about["License-Expression"])
    classes = [c.split(" :: ")[-1] for c in about.get_all("Classifier", []) if c.startswith("License ::")]
    named = [c for c in classes if c != "OSI Approved"]
    if named:
        return "; ".join(named)
    text = (about.get("License") or "").strip()
    return text.splitlines()[0][:60] if text else "not said in its metadata"


def page() -> str:
    rows, absent = [], []
    for name, version in sorted(pins().items()):
        try:
            rows.append(f"| {name} | {version} | {licence(name).replace('|', '/')} |")
        except metadata.PackageNotFoundError:
            absent.append(name)
    head = (
        "---\norphan: true\n---\n# Licences of what kvtheory installs\n\nkvtheory itself: Apache-2.0. Each pinned package of all extras, as its own metadata "
        f"says; `python scripts/supply.py licences` writes this page. {len(rows)} packages.\n\n| package | version | licence |\n|---|---|---|\n"
    )
    return (
        head
        + "\n".join(rows)
        + "\n"
        + (f"\nNot installed where this was written: {', '.join(absent)}.\n" if absent else "")
    )


def lock() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "in.txt")
        wanted.write_text("".join(f"{n}=={v}\n" for n, v in pins().items() if n not in WITHOUT), encoding="utf-8")
        made = subprocess.run(
            ["uv", "pip", "compile", wanted, "-q", "--no-deps", "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-header",
             "--no-annotate", "--python-version", ".".join(map(str, sys.version_info[:3]))],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    LOCK.write_text(HEADER.format(**WITHOUT) + made, encoding="utf-8")


def main(what: str) -> int:
    if what == "lock":
        lock()
    elif what == "licences":
        PAGE.write_text(page(), encoding="utf-8")
    elif what != "check":
        raise SystemExit(__doc__)
    said = problems()
    table = re.findall(r"^\| ([a-z0-9-]+) \| (\d\S*) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name: version for name, version, _ in table}
    said += [f"{name} {version}: not in {PAGE.name}" for name, version in pins().items() if listed.get(name) != version]
    unsaid = sum("not said" in of for _, _, of in table)
    files = sum(map(len, hashes().values()))
    print(
        f"{len(pins(LOCK))} of {len(pins())} pins locked with {files} hashes; without: {', '.join(f'{n} ({w})' for n, w in WITHOUT.items())}"
    )
    print(f"{len(table)} licences listed, {unsaid} not said by the package's metadata")
    print("\n".join(said) if said else "lock and list are current")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) == 2 else "check"))
