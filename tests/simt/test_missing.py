"""`import gpu` where something is missing: it works, and one sentence says what is missing and what still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE_CUPY = """
__version__ = "14.0"
class ndarray: ...
class cuda:
    class runtime:
        @staticmethod
        def getDeviceCount():
            {count}
        @staticmethod
        def getDeviceProperties(i):
            return {{"name": b"a GPU"}}
    class Device:
        id = 0
    class nvrtc:
        @staticmethod
        def getVersion():
            {nvrtc}
"""
ENCODE = """
import numpy as np, kvtheory, reference
layer = kvtheory.synthetic.make("gaussian", tokens=8, head_dim=16)
reference.roundtrip(reference.TurboQuant(), layer)
"""
LAUNCH = """
import numpy as np
from gpu.module import FOLDER, Source, launch
source = Source("common.cuh", [])
source.instances, source._known = ("k",), frozenset(["k"])
launch(source["k"], 1, 1, (np.zeros(1, np.float32),))
"""


def said(code: str, fake: Path | None = None, **environment: str) -> str:
    """What a fresh interpreter prints."""
    path = os.pathsep.join(str(p) for p in (fake, ROOT) if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_one_sentence(text: str, *parts: str) -> None:
    assert "\n" not in text and ". " not in text and not text.endswith("."), text
    for part in parts:
        assert part in text, text


def refusal(code: str) -> str:
    """Code that prints what Unavailable says."""
    body = "\n".join("    " + line for line in code.strip().splitlines())
    return f"import gpu\nfrom gpu.module import Unavailable\ntry:\n{body}\nexcept Unavailable as missing:\n    print(missing)\nelse:\n    print('nothing is missing')"


def cupy_that(tmp_path: Path, count: str = "return 1", nvrtc: str = "return (13, 0)") -> Path:
    package = tmp_path / "cupy"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_CUPY.format(count=count, nvrtc=nvrtc))
    (package / "cuda.py").write_text(
        "from cupy import cuda as _cuda\nnvrtc = _cuda.nvrtc\nruntime = _cuda.runtime\nDevice = _cuda.Device\n"
    )
    return tmp_path


NO_CUPY = "import sys; sys.modules['cupy'] = None\n"


def test_without_cupy() -> None:
    is_one_sentence(
        said(NO_CUPY + refusal("gpu.module.require_gpu()")),
        "CuPy",
        "cannot be imported",
        "pip install 'kvtheory[gpu]'",
        "still run on NumPy",
    )
    out = said(
        NO_CUPY + "import gpu\ns = gpu.status()\nprint(s.gpu, s.simulator, type(gpu.codecs()).__name__)\n" + ENCODE
    )
    assert out == "False True dict"


@pytest.mark.parametrize(
    ("count", "nvrtc", "parts"),
    [
        (
            'raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")', "return 1",
            ("driver does not answer", "cudaErrorInsufficientDriver", "still run on NumPy"),
        ),
        ('raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")', "return 1", ("cudaErrorNoDevice", "still")),
        ("return 0", "return 1", ("no NVIDIA GPU", "still")),
        ("return 1", 'raise RuntimeError("libnvrtc.so.13 is not found.\\nSearched: ...")', ("NVRTC", "libnvrtc.so.13 is not found)", "pip install nvidia-cuda-nvrtc", "still")),
    ],
    ids=["wrong driver", "no device", "no device, no error", "no nvrtc"],
)  # fmt: skip
def test_with_a_cupy_that_reaches_no_gpu(tmp_path: Path, count: str, nvrtc: str, parts: tuple[str, ...]) -> None:
    fake = cupy_that(tmp_path, count, nvrtc)
    is_one_sentence(said(refusal("gpu.module.require_gpu()"), fake), *parts)
    out = said("import gpu\ns = gpu.status()\nprint(s.gpu, s.simulator)\n" + ENCODE, fake)
    assert out == "False True"


def test_with_a_cupy_that_does_reach_one(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    assert (
        said("import gpu\nprint(gpu.status().gpu_note)", cupy_that(tmp_path))
        == "kernels run on a GPU through CuPy 14.0"
    )


def test_a_cupy_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        'raise ImportError("libcudart.so.13: cannot open shared object file")'
    )
    is_one_sentence(
        said(refusal("gpu.module.require_gpu()"), tmp_path), "libcudart.so.13: cannot open", "still run on NumPy"
    )


def test_without_a_compiler(tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path), "CXX": ""}
    is_one_sentence(said(refusal(LAUNCH), **empty), "needs g++", "not on the path", "reference")
    assert said("import gpu\nprint(gpu.status().simulator)\n" + ENCODE, **empty) == "False"


def test_with_an_old_compiler(tmp_path: Path) -> None:
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho 9\n")
    old.chmod(0o755)
    is_one_sentence(said(refusal(LAUNCH), CXX=str(old)), "needs g++ 11 or later", "is version 9", "reference")


def test_on_another_system() -> None:
    is_one_sentence(
        said("import sys; sys.platform = 'darwin'\n" + refusal(LAUNCH)), "Linux", "not on darwin", "reference"
    )


def test_without_the_headers_of_cuda() -> None:
    hidden = "import gpu.simt.build as b; b._candidates = lambda: []\n"
    is_one_sentence(said(hidden + refusal(LAUNCH)), "header files", "pip install 'kvtheory[gpu]'", "reference")
    assert said(hidden + "import gpu\nprint(gpu.status().simulator)\n" + ENCODE) == "False"


def test_headers_are_found_in_the_wheels_first() -> None:
    out = said("from gpu.simt.build import cuda_includes\nprint(*cuda_includes())")
    assert all((Path(folder)).is_dir() for folder in out.split()) and (Path(out.split()[0]) / "cuda_fp16.h").is_file()


def test_importing_loads_nothing_heavy() -> None:
    heavy = ("cupy", "torch", "scipy", "ml_dtypes")
    assert said(f"import gpu, sys\nprint([m for m in {heavy} if m in sys.modules])") == "[]"


def test_the_status_of_this_machine_is_two_sentences() -> None:
    lines = said("import gpu\nprint(gpu.status())").splitlines()
    assert len(lines) == 2 and lines[0].startswith("GPU: ") and lines[1].startswith("simulator: ")


def test_every_codec_with_kernels_has_the_name_of_a_reference() -> None:
    out = said(
        "import gpu, reference\nprint(all(issubclass(c, reference.codecs()[n]) for n, c in gpu.codecs().items()))"
    )
    assert out == "True"
