"""What `kvtheory compare` leaves behind the rows: tables at equal rates, ranks, the data of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtheory.cli.find_key import Found
    from kvtheory.cli.on_model import OnModels
    from reference.compare import EqualRate, Ranked, Summary

__all__ = ["FIGURES", "at_equal_kept", "at_equal_rates", "save"]

#: figures of this command
FIGURES = ("pareto", "kept-pareto", "transform-pareto", "ablation", "composition")


def save(
    out: Path,
    summaries: Sequence[Summary],
    with_model: dict[tuple[str, int], OnModels],
    equal: Sequence[Sequence[EqualRate]],
    kept: Sequence[Sequence[EqualRate]],
    keys_found: Sequence[Found],
    ranks: Sequence[Sequence[Ranked]],
) -> list[Path]:
    """The data of the pictures, one file a source, in the format of figures.book, and the table at equal rates; what a former run left is removed."""
    from kvtheory.cli.on_model import picture as point_picture
    from proofs_checks.ledger import plain, write_json
    from reference import compare as comparison
    from reference.compare import pictures, ranking
    from reference.compare.equal_rate import kept_row, row

    for name in FIGURES:
        for path in (out / "data" / name).glob("*.json"):
            path.unlink()
        if (out / "data" / name).is_dir():
            (out / "data" / name).rmdir()
    for name in ("equal-rate", "equal-kept"):
        for suffix in ("parquet", "json"):
            (out / f"{name}.{suffix}").unlink(missing_ok=True)
    (out / "ranking.parquet").unlink(missing_ok=True)

    def save(name: str, i: int, cache: str, data: Any) -> None:
        write_json(
            out / "data" / name / f"compare--{i}-{cache}.json",
            {"claim": f"compare/{i}-{cache}", "figure": name, "data": plain(data)},
        )

    rows, kept_rows, rank_rows = [], [], []
    for i, (summary, its, shares, own_ranks) in enumerate(zip(summaries, equal, kept, ranks)):
        on = with_model.get((summary.cache, summary.prefix))
        points = [] if on is None else [point_picture(run) for run in on.points]
        save("pareto", i, summary.cache, {**comparison.picture(summary), "on_model": points})
        its_keys = [one for one in keys_found if one.model == summary.model]
        against_kept = pictures.kept_pareto(summary, points, [_asdict(one) for one in its_keys])
        if against_kept["points"]:
            save("kept-pareto", i, summary.cache, against_kept)
        about = {
            "model": summary.model, "text": summary.text, "cache": summary.cache, "prefix": summary.prefix,
            "layers": ",".join(map(str, summary.layers)),
        }  # fmt: skip
        kept_rows += [kept_row(one, about) for one in shares]
        rank_rows += [ranking.row(one, about) for one in own_ranks]
        if not its:
            continue
        rows += [row(one, about) for one in its]
        curves = pictures.transform_pareto(summary, its[0].baseline)
        if curves["curves"]:
            save("transform-pareto", i, summary.cache, curves)
        ratios = pictures.ablation(summary, its)
        if ratios["lines"]:
            save("ablation", i, summary.cache, ratios)
    written = [*comparison.write_equal_rates(out, rows)] if rows else []
    if rank_rows:
        written.append(comparison.write_ranking(out, rank_rows))
    return written + ([*comparison.write_equal_kept(out, kept_rows)] if kept_rows else [])


def _asdict(one: Found) -> dict[str, Any]:
    """With intervals as lists."""
    from dataclasses import asdict

    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(one).items()}


def at_equal_kept(
    summary: Summary, on: OnModels | None, shares: Sequence[float], baseline: str | None
) -> list[EqualRate]:
    from reference.compare import at_equal_kept

    found = [one for over in ("layers", "heads") for one in at_equal_kept(summary, shares, baseline, over)]
    return found if on is None else found + on.at_equal_kept(shares, summary.prefix, baseline)


def at_equal_rates(
    summary: Summary, on: OnModels | None, targets: Sequence[float], baseline: str | None
) -> list[EqualRate]:
    from reference.compare import at_equal_rate

    found = at_equal_rate(summary, targets, baseline) + at_equal_rate(summary, targets, baseline, over="heads")
    return found if on is None else found + on.at_equal_rate(targets, baseline)
