"""A plugin of pytest: the simulator and the kernels built with AddressSanitizer and UndefinedBehaviorSanitizer. `make sanitize`

    python -m tests.simt.sanitised [pytest arguments]

runs the tests of the simulator, and kernels of each kind on it, in a process with the sanitisers' libraries. Their finding ends the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: not of frames on stacks: fibers end by a switch and never return, so what they had poisoned stays so for who comes next
FLAGS = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "--param=asan-stack=0",
)
#: what is run: threads, barriers, atomics, shared memory, launches; kernels that pack, code, rotate, sort and attend
TESTS = ("tests/simt/test_semantics.py", "tests/simt/test_launch.py", "tests/kernels/test_packing.py", "tests/kernels/test_rans.py",
         "tests/kernels/test_qjl.py", "tests/kernels/test_kivi.py")  # fmt: skip
#: the interpreter itself frees not all at its end; threads of the simulator run on stacks of its own, which it switches
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def pytest_configure() -> None:
    from gpu.simt import build

    build._OF_BUILD["fast"] = FLAGS
    build._MACHINE["fast"] = FLAGS


def main(arguments: list[str]) -> int:
    from gpu.simt import build

    cxx = build.compiler()
    found = [
        subprocess.run([cxx, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in found):
        print(f"not run: {cxx} has no libraries of the sanitisers (Debian: libasan, libubsan of its version)")
        return 1
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(found), "KVTHEORY_REQUIRE_KERNELS": "1"}
    chosen = [one for one in arguments if not one.startswith("-")] or list(TESTS)
    options = [one for one in arguments if one.startswith("-")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.simt.sanitised", "-s", *options, *chosen],
        env=environment,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
