"""`kvtheory capture`: the true KV cache of a real model on a text, with the queries that read it, into one safetensors file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer


def capture(
    out: Annotated[Path, typer.Option(help="File to write; replaced only when all is there.")],
    model: Annotated[str, typer.Option(help="A name of `kvtheory models`, a path or a hub id.")] = "smol",
    text: Annotated[
        str, typer.Option(help="What the model reads: a FILE (UTF-8), or a text's name in kvtheory.")
    ] = "hamlet",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens, from the start of the text.")] = 1024,
    layers: Annotated[str, typer.Option(help="Layers by index: 0,5,10 or 0-9; -1 is the last; all.")] = "all",
    inputs: Annotated[bool, typer.Option("--inputs", help="Also the layers' inputs and W_K, W_V.")] = False,
    fisher: Annotated[bool, typer.Option("--fisher", help="Also the Fisher diagonals (a backward pass).")] = False,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Keep the queries of this many positions, evenly spread. Default: of all.")
    ] = None,
) -> None:
    """Capture keys, values, queries, output projections, token ids and surprisal; in float32, one layer in memory at a time."""
    from rich.console import Console

    from kvtheory import models
    from kvtheory.models.texts import TextUnavailable

    console = Console(highlight=False, soft_wrap=True)
    try:
        wanted = _layers(layers)
        source, label = _text(text)
        if not out.parent.is_dir():
            raise ValueError(f"out: there is no folder {out.parent}")
        with console.status(f"loading {model}{_download(model)}"):
            tokenizer, loaded = models.load(model)
        ids = models.encode(tokenizer, source, tokens)
        cache = _run(console, out, loaded, tokenizer, ids, wanted, _spread(queries, tokens), inputs, fisher, label)
    except KeyboardInterrupt:
        console.print("\ninterrupted; nothing was written")
        raise typer.Exit(130) from None
    except ImportError as problem:
        console.print(f"not run: {problem}", markup=False)
        raise typer.Exit(1) from None
    except (models.ModelUnavailable, TextUnavailable) as problem:
        console.print(f"not run: {problem}", markup=False)
        raise typer.Exit(1) from None
    except (ValueError, TypeError, OSError) as problem:  # UnsupportedModel is a ValueError
        raise typer.BadParameter(str(problem)) from None
    first = cache[0]
    kept = 0 if first.queries is None else first.queries.shape[1]
    console.print(
        f"{out}: {len(cache)} layer{'s' * (len(cache) > 1)} of {first.kv_heads} KV heads x {first.tokens:,} tokens x {first.head_dim}, "
        f"queries of {kept:,} positions; mean surprisal {cache.surprisal_bits[1:].mean() if tokens > 1 else 0:.2f} bits; "  # type: ignore[index]
        f"{out.stat().st_size / 1e6:,.1f} MB",
        markup=False,
    )


def _run(
    console: Any, out: Path, model: Any, tokenizer: Any, ids: Any, layers: Any, positions: Any, inputs: bool, fisher: bool, label: str
) -> Any:  # fmt: skip
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from kvtheory import models

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("prefill", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        return models.capture_to(
            out, model, tokenizer, ids, layers=layers, query_positions=positions, inputs=inputs, fisher=fisher, progress=progress,
            text_name=label,
        )  # fmt: skip


def _layers(text: str) -> list[int] | None:
    """ "0,5,10", "0-9", "-1", "all" (None)."""
    if text.strip() == "all":
        return None
    found: list[int] = []
    for word in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", word)
        if (
            match is None
            or (match[2] is not None and int(match[2]) < int(match[1]))
            or (match[2] and int(match[1]) < 0)
        ):
            raise ValueError(f"layers: expected indices as 0,5,10, a range as 0-9, or all, got {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _text(name: str) -> tuple[str, str]:
    """(the text, what the capture calls it)."""
    from kvtheory.models.texts import TEXTS
    from kvtheory.models.texts import text as get

    if name in TEXTS:
        return get(name), name
    if Path(name).is_file():
        return Path(name).read_text(encoding="utf-8"), Path(name).name
    raise ValueError(f"text: no file {name!r} and no text of that name; there are {', '.join(TEXTS)}")


def _spread(queries: int | None, tokens: int) -> Any:
    """`queries` of the positions 0 .. tokens - 1, evenly spread, the last one among them; None: all."""
    import numpy as np

    if queries is None:
        return None
    if queries > tokens:
        raise ValueError(f"queries: expected at most {tokens}, one a token, got {queries}")
    return (np.arange(1, queries + 1) * tokens) // queries - 1


def _download(model: str) -> str:
    from kvtheory.models import MODELS, available

    missing = model in MODELS and not available(model)
    return f", fetching {MODELS[model].download / 1e6:,.0f} MB first" if missing else ""
