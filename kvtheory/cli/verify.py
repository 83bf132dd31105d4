"""`kvtheory verify`: every claim, its mutants, the ledger, the figures, the report."""

from __future__ import annotations

import fnmatch
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Budget(StrEnum):
    quick = "quick"
    full = "full"


def load_cache(name: str) -> Any:
    """The cache that --cache names: "sample", "none" or a file of kvtheory.Cache.save."""
    import kvtheory

    if name == "none":
        return None
    if name == "sample":
        return kvtheory.sample_cache()
    try:
        return kvtheory.Cache.load(name)
    except (OSError, ValueError) as problem:
        raise typer.BadParameter(str(problem), param_hint="--cache") from None


def verify(
    claim: Annotated[
        list[str] | None, typer.Option("--claim", help="Only claims whose id matches this GLOB; repeatable.")
    ] = None,
    cache: Annotated[
        str, typer.Option(help="Real cache: sample (embedded), none, or a FILE written by Cache.save.")
    ] = "sample",
    budget: Annotated[Budget, typer.Option(help="Sizes: quick (under 2 minutes) or full.")] = Budget.quick,
    seed: Annotated[int, typer.Option(help="Of all randomness; same seed, same ledger (but for the seconds).")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of ledger.json, index.html, figures. Default: report, or report/selected with --claim."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the interrupted run in this folder, same options and sources.")
    ] = None,
    draw: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw the figures into the report.")] = True,
) -> None:
    """Check every claim of the papers; exit status 1 if a verdict is not the expected one or a mutant survives."""
    from rich.console import Console

    import proofs_checks
    from proofs_checks import ledger as ledgers
    from proofs_checks import report, terminal
    from proofs_checks.context import Context
    from proofs_checks.run import Outcome, run_all

    registered = proofs_checks.claims()
    globs = claim or ["*"]
    chosen = [c for c in registered.values() if any(fnmatch.fnmatch(c.id, g) for g in globs)]
    if not chosen:
        raise typer.BadParameter(
            f"no claim matches {', '.join(globs)}; there are: {', '.join(registered)}", param_hint="--claim"
        )
    context = Context(
        seed=seed, budget=budget.value, cache=load_cache(cache), cache_name=cache, claims=len(registered)
    )  # fmt: skip
    console = Console(highlight=False, soft_wrap=True)
    try:
        # a selection never takes the place of the whole ledger
        folder = resume or out or Path("report/selected" if claim else "report")
        store = ledgers.Store(folder, context, resume=resume is not None)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None
    out = store.out
    todo = [c for c in chosen if c.id not in store.records]
    console.print(
        f"{len(chosen)} claims, budget {budget.value}, seed {seed}, real cache {cache}"
        + (f"; {len(chosen) - len(todo)} finished before" if len(todo) < len(chosen) else "")
    )
    start = time.perf_counter()
    finished = len(chosen) - len(todo)
    status = console.status("") if console.is_terminal else None

    def progress(claim_id: str, doing: str) -> None:
        if status is not None:
            status.update(f"[{finished}/{len(chosen)}] {claim_id}: {doing}")

    def done(outcome: Outcome) -> None:
        nonlocal finished
        finished += 1
        console.print(terminal.line(store.add(outcome)))

    try:
        if status is not None:
            status.start()
        run_all(todo, context, progress, done, jobs=jobs)
    except KeyboardInterrupt:
        console.print(
            f"\ninterrupted after {finished} of {len(chosen)} claims; continue with --resume {out} and the same options"
        )
        raise typer.Exit(130) from None
    finally:
        if status is not None:
            status.stop()

    ledger = store.finish(chosen, len(registered))
    pictures: dict[str, tuple[Path, str]] = {}
    if draw:
        import figures

        console.print("drawing figures …")
        for drawn in figures.draw(out, formats=("svg", "pdf", "png")):
            pictures[drawn.name] = (next(p for p in drawn.files if p.suffix == ".svg"), drawn.caption)
    report.write(out / "index.html", ledger, pictures)
    terminal.summary(console, ledger)
    console.print(
        f"ledger {out / 'ledger.json'}, report {out / 'index.html'}, {len(pictures)} figures in {out / 'figures'}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    raise typer.Exit(0 if ledgers.succeeded(ledger) else 1)
