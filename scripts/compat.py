"""Test what meets transformers with the two minor versions of it before the pinned one, each in a venv of its own. `make test-compat`

    python scripts/compat.py FOLDER [pytest arguments]

FOLDER/VERSION is a venv that has that transformers and takes everything else from the environment that runs this script. Prints a line for
each version and exits with 1 if one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: all tests that import transformers: capture, runner and loading; the cache for `generate`
TESTS = ("tests/models", "tests/reference/hf")


def versions() -> list[str]:
    """The two minor versions before the pinned one, newest first: ["5.23", "5.22"] before 5.24.0."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line.removeprefix("transformers==") for line in lines if line.startswith("transformers=="))
    major, minor = (int(part) for part in pinned.split(".")[:2])
    if minor < 2:
        raise SystemExit(f"constraints.txt: transformers=={pinned} has no two minor versions of its major before it")
    return [f"{major}.{minor - back}" for back in (1, 2)]


def prepared(folder: Path, version: str) -> Path:
    """The interpreter of the venv of `version`, made where it is not there."""
    home = folder / version
    python = home / "bin" / "python"
    if not (home / "done").is_file():
        venv.create(home, with_pip=True, clear=True)
        wanted = f"transformers=={version}.*"
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", wanted], check=True
        )
        inside = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        # behind the venv's own packages, so that its transformers comes first
        Path(inside.stdout.strip(), "everything-else.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (home / "done").touch()
    return python


def main(folder: Path, *arguments: str) -> int:
    failed = []
    for version in versions():
        python = prepared(folder.resolve(), version)
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            [python, "-c", "import transformers; print(transformers.__version__)"],
            check=True, capture_output=True, text=True, env=own,
        ).stdout.strip()  # fmt: skip
        if not found.startswith(version + "."):
            raise SystemExit(f"{python}: expected transformers {version}, got {found}")
        print(f"== transformers {found}", flush=True)
        code = subprocess.run([python, "-m", "pytest", *TESTS, *arguments], cwd=ROOT, env=own, check=False).returncode
        failed += [version] if code else []
        print(f"== transformers {found}: {'failed' if code else 'passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
