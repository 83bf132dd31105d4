"""The commands. The one place on top of everything: each imports what it runs when it runs; nothing imports this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

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


def _plainly(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command; what ends it outside its own care (Ctrl-C, a full disk) is said in a sentence."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; every file that is there is whole")
            raise typer.Exit(130) from None
        except OSError as problem:
            typer.echo(f"\nnot finished: {problem}; every file that is there is whole")
            raise typer.Exit(1) from None

    return run


app.command("verify")(_plainly(_verify.verify))
app.command("compare")(_plainly(_compare.compare))
app.command("inspect")(_plainly(_inspect.inspect))
app.command("conform")(_plainly(_conform.conform))
app.command("import")(_plainly(_import.import_))
app.add_typer(_models.app, name="models")
app.command("capture")(_plainly(_capture.capture))
app.command("figures")(_plainly(_figures.figures))


def main() -> None:
    """Entry point of `kvtheory` and `python -m kvtheory`."""
    app()
