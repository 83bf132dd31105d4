"""`kvtheory verify`: every claim, its mutants, the ledger, the figures, the report."""

from __future__ import annotations

import fnmatch
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proofs_checks.claim import Claim
    from proofs_checks.context import Context
    from proofs_checks.ledger import Store


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
    ctx: typer.Context,
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
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Claims as content-addressed tasks: on a Dask cluster, tcp://HOST:PORT (its workers must see --cache) or local, or on --jobs processes: "
            "here. With --resume, a changed source file then costs only the claims that depend on it."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the interrupted run in this folder, same options and sources.")
    ] = None,
    draw: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw the figures into the report.")] = True,
) -> None:
    """Check every claim of the papers; exit status 1 if a verdict is not the expected one or a mutant survives."""
    if scheduler is not None:
        # before NumPy is loaded: workers do not fight for cores, and sums are the same for any number of them
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(variable, "1")
    from rich.console import Console

    import proofs_checks
    from kvtheory import files
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
        if resume is None or folder.is_dir():
            ctx.with_resource(files.locked(folder))
        store = ledgers.Store(folder, context, resume=resume is not None, by_claim=scheduler is not None)
    except (ValueError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    out = store.out
    start = time.perf_counter()
    total = len(chosen)
    status = console.status("") if console.is_terminal else None

    def progress(claim_id: str, doing: str) -> None:
        if status is not None:
            status.update(f"[{len(store.records)}/{total}] {claim_id}: {doing}")

    def done(outcome: Outcome) -> None:
        console.print(terminal.line(store.add(outcome)))

    def said(todo: Sequence[Claim]) -> None:
        console.print(
            f"{total} claims, budget {budget.value}, seed {seed}, real cache {cache}"
            + (f"; {total - len(todo)} finished before" if len(todo) < total else "")
        )

    try:
        if status is not None:
            status.start()
        todo = [c for c in chosen if c.id not in store.records]
        if scheduler is None:
            said(todo)
            run_all(todo, context, progress, done, jobs=jobs)
        else:
            _sweep(
                todo,
                context,
                store,
                jobs,
                scheduler,
                said,
                progress,
                lambda record: console.print(terminal.line(record)),
            )
    except KeyboardInterrupt:
        console.print(
            f"\ninterrupted after {len(store.records)} of {total} claims; continue with --resume {out} and the same options"
        )
        raise typer.Exit(130) from None
    except (OSError, ImportError, RuntimeError) as problem:  # a full disk, no Dask, workers with other sources
        console.print(
            f"\nnot finished: {problem}; {len(store.records)} of {total} claims are in {out}, continue with --resume {out}",
            markup=False,
        )
        raise typer.Exit(1) from None
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


#: content-addressed claims of a run, in its folder
FINISHED = "finished"


def _sweep(
    claims: Sequence[Claim],
    context: Context,
    store: Store,
    jobs: int,
    scheduler: str,
    said: Callable[[Sequence[Claim]], None],
    progress: Callable[[str, str], None],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """The claims as tasks on an executor; each record goes into the store as it comes, in the order of the ledger for those that were there."""
    from kvtheory import sweep
    from proofs_checks import tasks

    folder = store.out / FINISHED
    planned = tasks.plan(claims, context)
    tasks.forget_unsettled(folder, planned)
    for task in planned:
        if (found := tasks.kept(folder, task)) is not None:
            store.keep(*found)
    todo = [(claim, task) for claim, task in zip(claims, planned) if claim.id not in store.records]
    said([claim for claim, _ in todo])

    def done(finished: int, total: int, task: sweep.Task) -> None:
        found = tasks.kept(folder, task)
        assert found is not None, task.key  # it was written a moment ago
        show(store.keep(*found))
        progress(str(task.key["claim"]), f"finished, {total - finished} to go")

    if todo:
        with sweep.executor(min(jobs, len(todo)), None if scheduler == "here" else scheduler) as pool:
            sweep.run([task for _, task in todo], pool, folder, same={}, progress=done)
