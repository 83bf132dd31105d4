"""Models captured for `kvtheory compare`, in a process of their own, once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from kvtheory.cli.arguments import Text

__all__ = ["alone", "captured", "short"]


def captured(console: Console, out: Path, model: str, words: Text, tokens: int) -> Path:
    """The captured cache of `model` in `out`; made on first use."""
    from kvtheory.models import MODELS, available

    asked = f"{model}\0{words.id}\0{tokens}"
    name = f"{short(model)[-40:]}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.safetensors"
    path = out / "captured" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    fetch = (
        f", fetching {MODELS[model].download / 1e6:,.0f} MB first" if model in MODELS and not available(model) else ""
    )
    doing = f"capturing {short(model)} on {tokens:,} tokens of {words.id}{fetch} …"
    console.print(doing, markup=False)
    with console.status(doing):
        alone(_capture, str(path), model, words.get(), words.id, tokens)
    return path


def short(model: str) -> str:
    """A model's name without the folders above it, of characters that file names may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a new process: a model's memory is given back, and workers are not forked where torch has started threads."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        return own.submit(function, *arguments).result()


def _capture(path: str, model: str, text: str, text_id: str, tokens: int) -> None:
    from kvtheory import models

    tokenizer, loaded = models.load(model)
    models.capture_to(path, loaded, tokenizer, text, tokens=tokens, text_name=text_id)
