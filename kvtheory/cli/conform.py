"""`kvtheory conform`: our property suite and claims against anybody's codec, which runs in a process of its own."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtheory import checks


def conform(
    codec: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:NAME", help="The codec: package.module:Name or file.py:Name; a class, a function that builds one, or an object."),
    ] = None,
    arg: Annotated[list[str] | None, typer.Option("--arg", help="An argument of NAME, as bits=3; repeatable.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Build it by NAME.fit(calibration layers, arguments).")] = False,
    bits: Annotated[float | None, typer.Option(min=0, help="Bits a number that it claims to hold. Default: its own `bits`.")] = None,
    claim: Annotated[
        list[str] | None, typer.Option("--claim", help="turboquant-mse, turboquant-prod, qjl, unbiased or lossless; repeatable, beside its own `claims`.")
    ] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Also the ledger's claims about the algorithm that it claims to be.")] = False,
    only: Annotated[list[str] | None, typer.Option("--property", help="Only this property; repeatable. Default: all.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the properties and stop.")] = False,
    python: Annotated[str, typer.Option(help="Interpreter that runs the codec, of another virtual environment. Default: this one.")] = sys.executable,
    path: Annotated[list[Path] | None, typer.Option("--path", help="A FOLDER to import from first; repeatable.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 60.0,
    memory: Annotated[float, typer.Option(min=0, help="GiB of address space of the codec's process; 0: no limit.")] = 16.0,
    examples: Annotated[int, typer.Option(min=1, help="The most inputs that one search draws.")] = 40,
    seconds: Annotated[float, typer.Option(min=0.1, help="The most seconds that one search takes.")] = 20.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write what was found to this FILE; schema: conform.schema.json.")] = None,
) -> None:  # fmt: skip
    """Say which properties of a good codec hold, with the least input that breaks each that does not.

    Exit status 0: none fails; 1: some fail; 2: it cannot be asked (no such module, wrong arguments).
    """
    import json as jsons

    from rich.console import Console

    from kvtheory.files import replacing
    from proofs_checks import conform as conformance
    from proofs_checks.conform import report as reports

    console = Console(highlight=False, soft_wrap=True)
    if listing:
        from proofs_checks.conform.run import ordered

        for one in ordered():
            console.print(f"{one.name:<15} {one.statement}", markup=False)
        return
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise typer.BadParameter(f"the search for least inputs needs an extra: {checks.install('conform')}") from None
    if codec is None or not codec.rpartition(":")[0] or not codec.rpartition(":")[2]:
        raise typer.BadParameter(
            f"expected package.module:Name or file.py:Name, got {codec!r}", param_hint="MODULE:NAME"
        )
    if json is not None and not json.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json.parent}", param_hint="--json")
    subject = conformance.Subject(
        codec, _arguments(arg or []), python, tuple(str(p) for p in path or ()), timeout, memory, fit=fit
    )  # fmt: skip
    status = console.status("") if console.is_terminal else None
    try:
        if status is not None:
            status.start()
        result = conformance.run(
            subject, bits=bits, claims=claim or (), only=only or (), examples=examples, seconds=seconds, ledger=ledger,
            progress=lambda name: status.update(name) if status is not None else None,
            found=lambda finding: console.print(reports.line(finding), markup=False),
        )  # fmt: skip
    except conformance.ForeignError as problem:
        raise typer.BadParameter(f"{codec}: {problem}", param_hint="MODULE:NAME") from None
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    except KeyboardInterrupt:
        console.print("\ninterrupted; nothing was written")
        raise typer.Exit(130) from None
    finally:
        if status is not None:
            status.stop()
    console.print("\n" + reports.summary(result), markup=False)
    if json is not None:
        with replacing(json) as scratch:
            scratch.write_text(jsons.dumps(result.record(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    raise typer.Exit(0 if result.conforms else 1)


def _arguments(texts: list[str]) -> dict[str, Any]:
    """ "bits=3" -> {"bits": 3}; what is no Python literal is text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint="--arg")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found
