"""Tasks run with a bar, or in a log with lines, that say how long the rest will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtheory.cli.captured import short

if TYPE_CHECKING:
    from rich.console import Console

    from kvtheory.sweep import Task

__all__ = ["run"]

#: between two lines on progress in a log
EVERY_SECONDS = 30.0


def run(
    console: Console,
    tasks: Sequence[Task],
    out: Path,
    same: dict[str, Any],
    jobs: int,
    scheduler: str | None,
    what: str = "tasks",
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvtheory import sweep

    kept = sum((out / "tasks" / f"{task.name}.json").is_file() for task in tasks)
    console.print(f"{len(tasks)} {what}" + (f", {kept} finished before" if kept else ""), markup=False)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        shown = bar.add_task("", total=len(tasks), completed=kept)

        start = said = time.monotonic()

        def progress(done: int, total: int, task: Task) -> None:
            nonlocal said
            key = task.key
            if not console.is_terminal and time.monotonic() - said > EVERY_SECONDS:  # a log has no bar
                said = time.monotonic()
                left = (said - start) / (done - kept) * (total - done)
                console.print(f"{done} of {total} {what}, about {max(1, round(left / 60))} min left", markup=False)
            rate = "" if key["bits"] is None else f" {key['bits']:g} bits"
            if "item" in key:
                rate += f", {key['task']} {key['item'] + 1}"
            if "sample" in key:
                rate += f", sample {key['sample'] + 1}"
            where = f" layer {key['layers']}" if "," not in key["layers"] else ""
            bar.update(shown, completed=done, description=f"{short(key['model'])}{where}: {key['codec']}{rate}")

        with sweep.executor(min(jobs, max(1, len(tasks) - kept)), scheduler) as pool:
            return sweep.run(tasks, pool, out, same=same, progress=progress)
