"""What `kvtheory compare` says of ranks at equal bits and of questions answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from kvtheory.cli.on_model import OnModels
    from kvtheory.cli.on_tasks import Answered
    from reference.compare import Summary
    from reference.compare.ranking import Ranked

HEADINGS = {"attention": "attention error", "kl": "KL of the model's next tokens"}


def rank_all(summary: Summary, on: OnModels | None, targets: Sequence[float]) -> list[Ranked]:
    """Ranks of a source at each target by attention error, and by KL where the model ran."""
    import numpy as np

    from reference.compare import error_curves
    from reference.compare.ranking import rank

    boot = summary.bootstrap
    found = rank(
        [c for c in error_curves(summary) if ", oracle" not in c.label], targets, "attention", boot.segments, boot.level
    )
    if on is not None:
        curves = on.curves(on.kl.log_estimates / np.log(2), on.kl.log_replicates / np.log(2), "bits", summary.prefix)
        found += rank(curves, targets, "kl", on.kl.segments, on.kl.level)
    return found


def rank_tables(ranked: Sequence[Ranked]) -> list[Table]:
    """A table a measure."""
    from rich.table import Table

    tables = []
    for measure in dict.fromkeys(one.measure for one in ranked):
        own = [one for one in ranked if one.measure == measure]
        table = Table(
            title=f"ranks at equal held bits by {HEADINGS[measure]}; codecs that share one are not told apart at {own[0].level:.0%} "
            f"(Holm over {own[0].pairs} pairs)",
            title_justify="left", box=None, pad_edge=False,
        )  # fmt: skip
        for heading in ("held\nbits", "rank"):
            table.add_column(heading, justify="right")
        table.add_column("codec")
        for heading in ("value", "p against\nthe best", "beats"):
            table.add_column(heading, justify="right")
        for one in own:
            p = "-" if one.p_best is None else f"{one.p_best:.2g}"
            table.add_row(f"{one.held_bits:g}", str(one.rank), one.label, f"{one.error:.3g}", p, str(len(one.worse)))
        tables.append(table)
    return tables


def answer_tables(answered: Sequence[Answered]) -> list[tuple[Table, str]]:
    """A table a task, and what is to be said below it."""
    from rich.table import Table

    tables = []
    for task in dict.fromkeys(one.task for one in answered):
        own = [one for one in answered if one.task == task]
        first = own[0]
        table = Table(
            title=f"{task}: the full cache solves {first.solved} of {first.items} (mean score {first.full_score:.3f})",
            title_justify="left", box=None, pad_edge=False,
        )  # fmt: skip
        table.add_column("codec")
        headings = [
            "nominal\nbits",
            "held\nbits",
            "right of\nthe solved",
            "95%",
            "mean score\nof all",
            "bits lost to\nthe full cache",
            "95%",
        ]
        for heading in headings:
            table.add_column(heading, justify="right")
        for one in own:
            exact, lost = one.interval, one.loss_bits
            table.add_row(
                one.label, "-" if one.bits is None else f"{one.bits:g}", f"{one.held_bits:.3f}",
                "-" if one.kept_right is None else f"{one.kept_right:.2f}",
                "-" if exact is None else f"[{exact.low:.2f}, {exact.high:.2f}]", f"{one.score:.3f}",
                *(("-", "-") if lost is None else (f"{lost.estimate:.3f}", f"[{lost.low:.3f}, {lost.high:.3f}]")),
            )  # fmt: skip
        below = "" if first.solved else "the full cache solves none: this task says nothing of any codec here"
        tables.append((table, below))
    return tables


def show(
    print_table: Callable[[Table], None],
    say: Callable[[str], None],
    ranked: Sequence[Ranked],
    answered: Sequence[Answered],
) -> None:
    """Everything of one source."""
    for table, below in answer_tables(answered):
        print_table(table)
        if below:
            say(below)
    for table in rank_tables(ranked):
        print_table(table)
