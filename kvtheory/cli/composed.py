"""What `kvtheory compare --choose` says: the codec chosen on one text and judged on another, and whether gains of parts multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from kvtheory.statistics import Interval
    from reference.compare import Source, Summary
    from reference.compare.frontier import Choice, Gain, Parts


def named(choose: str, sources: Sequence[Source]) -> str:
    """The text or the file that is chosen on, as sources have it. ValueError unless each model has it and another beside it."""
    path = str(Path(choose).resolve())
    own = [one for one in sources if choose in (one.text, one.path) or path == one.path]
    if not own:
        have = ", ".join(dict.fromkeys(one.text or one.path for one in sources))
        raise ValueError(f"choose: expected one of the texts or caches that are read, {have}, got {choose!r}")
    for model in dict.fromkeys(one.model for one in sources):
        its = [one for one in sources if one.model == model]
        if sum(one in own for one in its) != 1 or len(its) < 2:
            raise ValueError(f"choose: expected {choose} once, and another text, of {model}, got {len(its)} in all")
    return own[0].text or own[0].id


def report(
    choose: str | None,
    summaries: Sequence[Summary],
    rows: Sequence[dict[str, Any]],
    targets: Sequence[float],
    bases: Sequence[str | None],
    out: Path,
    print_table: Callable[[Table], None],
    say: Callable[[str], None],
) -> list[Path]:
    """Print and write, for each text that is not the one chosen on: composition.json and the data of the figure. Older ones are removed.

    rows: of the sweep, which the summaries are of. bases: of each summary the label of the baseline, which gains are over; None: no gains.
    """
    from proofs_checks.ledger import write_json
    from reference.compare import frontier

    (out / "composition.json").unlink(missing_ok=True)
    if choose is None:
        return []
    found = []
    for i, (judged, base) in enumerate(zip(summaries, bases, strict=True)):
        first = next(one for one in summaries if one.model == judged.model and choose in (one.text, one.cache))
        if judged is first:
            continue
        both = (_by_layer(first, rows), _by_layer(judged, rows))
        choices = frontier.choose(first, judged, targets, both)
        multiplied = [] if base is None else frontier.gains(judged, targets, base)
        its = frontier.parts(judged)
        about = {
            "model": judged.model, "text": judged.text, "cache": judged.cache, "chosen_on": first.text or first.cache,
            "prefix": judged.prefix, "layers": list(judged.layers), "segments": judged.segments, "level": judged.bootstrap.level,
        }  # fmt: skip
        found.append({"about": about, "choices": choices, "gains": multiplied, "parts": its})
        data = frontier.picture_of(first, judged, choices, multiplied)
        write_json(
            out / "data" / "composition" / f"compare--{i}-{judged.cache}.json",
            {"claim": f"compare/{i}-{judged.cache}", "figure": "composition", "data": data},
        )
        for table in _tables(first, judged, choices, multiplied, its):
            print_table(table)
        for target in targets:
            missing = [k for k in frontier.KINDS if not any((c.kind, c.held_bits) == (k, target) for c in choices)]
            if missing:
                kinds = ", ".join(frontier.KINDS[k] for k in missing)
                say(f"at {target:g} held bits: {kinds}: none was measured on both sides of it on both texts")
    return [frontier.write_composition(out, found)]


def _by_layer(summary: Summary, rows: Sequence[dict[str, Any]]) -> list[Summary]:
    """Its layers, each a summary of its own."""
    from reference import compare

    own = [row for row in rows if row["cache"] == summary.cache]
    # of one seed, so that replicates of all layers are of the same draws
    return [compare.summarise([row for row in own if row["layer"] == layer])[0] for layer in summary.layers]


def _tables(
    first: Summary, judged: Summary, choices: Sequence[Choice], gains: Sequence[Gain], parts: Sequence[Parts]
) -> list[Table]:
    from reference.compare.frontier import KINDS

    about = f"{judged.model} on {judged.text or judged.cache}"
    tables = []
    if choices:
        table = _table(
            f"{about}: attention error of the codec chosen on {first.text or first.cache} among its kind",
            ("held\nbits", "", "chosen", "of", "state\nbytes", "error", "95%", "over the\npapers' best", "95%", "over the best\nin hindsight"),
        )  # fmt: skip
        for c in choices:
            over = c.against.get("paper")
            table.add_row(
                f"{c.held_bits:g}", KINDS[c.kind], c.label, str(c.candidates), f"{c.state_bytes:,}",
                f"{c.error.estimate:.3g}", _ends(c.error), *(("-", "-") if over is None else (f"{over.estimate:.3f}", _ends(over))),
                f"{c.regret.estimate:.3f}",
            )  # fmt: skip
        tables.append(table)
    if gains:
        table = _table(
            f"{about}: gains over {gains[0].base} at equal held bits (error of it over theirs), and whether they multiply",
            ("held\nbits", "chain", "reduction", "coder", "product", "joint", "joint /\nproduct", "95%"),
        )
        for g in gains:
            numbers = [f"{i.estimate:.3g}" for i in (g.reduction, g.coding, g.product, g.joint, g.excess)]
            table.add_row(f"{g.held_bits:g}", g.joint_label, *numbers, _ends(g.excess))
        tables.append(table)
    if parts:
        table = _table(
            f"{about}: chains beside their parts at one nominal rate",
            ("chain", "nominal\nbits", "kept", "coder\nholds", "kept x\ncoder", "chain\nholds", "error of\nreduction", "of the\ncoder", "of the\nchain",
             "chain /\nsum", "layers"),
        )  # fmt: skip
        for p in parts:
            table.add_row(
                p.label, "-" if p.bits is None else f"{p.bits:g}", f"{100 * p.kept:.3g}%", f"{p.rate:.3f}", f"{p.kept * p.rate:.3f}",
                f"{p.held:.3f}", f"{p.reduction_error:.3g}", f"{p.coder_error:.3g}", f"{p.error:.3g}", f"{p.ratio:.2f}",
                f"{p.least:.2f} .. {p.most:.2f}",
            )  # fmt: skip
        tables.append(table)
    return tables


def _table(title: str, headings: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        words = heading in ("", "chosen", "chain")
        table.add_column(heading, justify="left" if words else "right")
    return table


def _ends(interval: Interval) -> str:
    return f"[{interval.low:.3g}, {interval.high:.3g}]"
