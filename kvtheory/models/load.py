"""Load a causal language model and its tokenizer: a name of MODELS, a local path, or anything transformers understands.

The models of MODELS come as GGUF with 4-bit weights. They are dequantised once into an ordinary float32 safetensors folder
beside the GGUF file (20-50 s; afterwards loading takes seconds). From then on the model *is* that float32 model, and a cache
captured from it is that model's true cache; its weights are 4-bit-rounded versions of the published ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtheory import checks
from kvtheory.models.fetch import MODELS, ModelUnavailable, fetch

__all__ = ["convert", "load", "origin"]

#: Raise it when what `convert` writes changes: older folders are then left alone and made anew.
_CONVERSION = 1
_ORIGIN = "kvtheory-origin.json"


def load(model: str | os.PathLike[str], dtype: str = "float32", attention: str = "sdpa") -> tuple[Any, Any]:
    """(tokenizer, model in evaluation mode) for a key of MODELS, a folder, a .gguf file, or a hub id.

    dtype: "float32", "bfloat16" or "float16", the type of the weights and of the computation (theory needs float32: recomputing
    a cache in bfloat16 differs by 1% in norm, about what a 7-bit quantiser does). attention: transformers' name of the
    attention implementation, "sdpa" or "eager".

    Raises ModelUnavailable when the model can be had neither from the disk nor from its source, ValueError for a bad dtype or a path
    without a model, and ImportError naming the extra when torch or transformers is missing.
    """
    torch, transformers = _libraries()
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f'dtype: expected "float32", "bfloat16" or "float16", got {dtype!r}')
    source, options = _source(model)
    with _quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, dtype), attn_implementation=attention, **options
            )
        except OSError as error:  # what transformers raises for a missing folder, file or hub id, and offline
            raise ModelUnavailable(
                f"{model}: transformers cannot load it ({str(error).splitlines()[0]}); "
                f"expected one of {', '.join(MODELS)}, a local path, or a hub id that can be reached"
            ) from error
    return tokenizer, loaded.eval()


def convert(name: str) -> Path:
    """The folder of model `name` (a key of MODELS) as float32 safetensors with its tokenizer; made on first use, atomically."""
    weights = fetch(name)
    folder = weights.parent / f"float32-v{_CONVERSION}"
    if not (folder / _ORIGIN).is_file():
        with _one_at_a_time(weights.parent / ".convert.lock"):
            if not (folder / _ORIGIN).is_file():  # else another process did it while this one waited
                _convert(name, weights, folder)
    return folder


def _convert(name: str, weights: Path, folder: Path) -> None:
    torch, transformers = _libraries()
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"converting GGUF weights needs the package gguf: {checks.install('real')}") from error
    from safetensors.torch import save_file

    gguf_options: dict[str, Any] = {"gguf_file": weights.name, "local_files_only": True}
    with _quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **gguf_options)
        model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **gguf_options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it describes the GGUF file, not the dequantised weights
    tied = model.config.get_text_config().tie_word_embeddings
    state = {
        key: value.contiguous() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")
    }
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=weights.parent))
    try:
        tokenizer.save_pretrained(scratch)
        model.config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        record = {
            "model": name,
            "title": MODELS[name].title,
            "packages": list(MODELS[name].packages),
            "licence": MODELS[name].licence,
            "weights": "GGUF dequantised to float32",
            "gguf_sha256": MODELS[name].sha256,
            "converted_by": {"transformers": transformers.__version__, "gguf": _version("gguf", gguf)},
        }
        (scratch / _ORIGIN).write_text(json.dumps(record, indent=1))
        with contextlib.suppress(
            OSError
        ):  # where there are no locks, another process was faster: its folder is as good
            os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path`, so that parallel tests convert once and wait for it. The system frees it with the process."""
    with open(path, "w") as lock:
        with contextlib.suppress(ImportError):  # not on Windows: there both convert, and one result is kept
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def origin(model: Any) -> dict[str, Any]:
    """What is known of where a loaded model came from: name, weights, licence; at least {"model": path or hub id}."""
    path = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    record = Path(path) / _ORIGIN
    return json.loads(record.read_text()) if record.is_file() else {"model": path}


def _source(model: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """What to hand to from_pretrained for `model`, and with which options."""
    if isinstance(model, str) and model in MODELS:
        return str(convert(model)), {"local_files_only": True}
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model: expected a folder with a model in it, but {path} has no config.json")
        return str(path), {"local_files_only": True}
    if path.is_file():
        raise ValueError(
            f"model: expected a folder, a .gguf file, a hub id or one of {', '.join(MODELS)}, got file {path}"
        )
    return str(model), {}


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(f"real models need {error.name}: {checks.install('real')}") from error
    return torch, transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars of transformers while loading: they would run through our own output."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _version(package: str, module: Any) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))
