"""The commands. The one place on top of everything: each imports what it runs when it runs; nothing imports this package."""

from __future__ import annotations

from typing import Annotated

import typer

import kvtheory
from kvtheory.cli import capture as _capture
from kvtheory.cli import compare as _compare
from kvtheory.cli import conform as _conform
from kvtheory.cli import figures as _figures
from kvtheory.cli import import_ as _import
from kvtheory.cli import inspect as _inspect
from kvtheory.cli import models as _models
from kvtheory.cli import verify as _verify

app = typer.Typer(
    name="kvtheory",
    help="Theory-first numerical toolkit for KV-cache compression: check the papers' claims, draw the figures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtheory {kvtheory.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("verify")(_verify.verify)
app.command("compare")(_compare.compare)
app.command("inspect")(_inspect.inspect)
app.command("conform")(_conform.conform)
app.command("import")(_import.import_)
app.add_typer(_models.app, name="models")
app.command("capture")(_capture.capture)
app.command("figures")(_figures.figures)


def main() -> None:
    """Entry point of `kvtheory` and `python -m kvtheory`."""
    app()
