"""`kvtheory figures`: draw pictures from the saved results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def figures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which figures; default: all with saved data.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of a finished `kvtheory verify`.")] = Path("report"),
    format: Annotated[str, typer.Option(help="Comma-separated: pdf, png, svg.")] = "pdf,png,svg",
    style: Annotated[str, typer.Option(help="paper (column width) or slides.")] = "paper",
) -> None:
    """Draw the figures into RESULTS/figures, each with its data as CSV and its caption."""
    import figures as package

    try:
        drawn = package.draw(results, names=names or None, formats=tuple(format.split(",")), style=style)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; figures drawn so far are whole, the same command draws them all")
        raise typer.Exit(130) from None
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    for figure in drawn:
        typer.echo(f"{figure.name}: {', '.join(str(p) for p in figure.files)}")
