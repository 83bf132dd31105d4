"""`kvtheory compare`: codecs x bits or kept tokens x layers on captured caches or on models, resumable, with a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtheory.cli import arguments, captured, printed, running, saved
from kvtheory.cli.verify import Budget

if TYPE_CHECKING:
    from reference.compare import EqualRate, Ranked


class Question(StrEnum):
    seen = "seen"
    unseen = "unseen"


class Dtype(StrEnum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass(frozen=True)
class Sizes:
    """What a budget is: tokens coded, positions that ask, segments of them, seeds of codecs that draw."""

    prefix: int
    held: int
    segments: int
    seeds: int


SIZES = {Budget.quick: Sizes(1024, 512, 8, 1), Budget.full: Sizes(4096, 1024, 16, 3)}


def compare(
    codecs: Annotated[
        str,
        typer.Option(
            help="Comma-separated codecs, with options: 'AATC,MetricKLT(coding=entropy|fixed,joint=none)'; 'SnapKV(keep=.5) > KIVI' one behind another; all."
        ),
    ] = "Full,TurboQuant",
    bits: Annotated[str, typer.Option(help="Nominal bits per number, for the codecs that have them.")] = "2,3,4",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to capture: a name of `kvtheory models`, a path or a hub id; repeatable."),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="Captured cache: sample (embedded) or a FILE; repeatable. Default, without --model: sample."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="What --model reads: a text's name in kvtheory, or a FILE; repeatable. Default: hamlet."),
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="What fitted codecs are fitted to, another work than TEXT: with --model a text's name or a FILE, captured once; or a "
            "captured cache FILE of the same model; repeatable, one for each model."
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of it. Default: 4,096 of a text, all of a captured cache.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers by index: 2,18 or 0-9. Default: all.")] = None,
    budget: Annotated[
        Budget, typer.Option(help="quick: 1,024 + 512 tokens. full: 4,096 + 1,024 tokens, 3 seeds.")
    ] = Budget.quick,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the numbers that are coded.")] = Dtype.float16,
    out: Annotated[Path, typer.Option(help="Folder of results, finished tasks and captured caches.")] = Path(
        "report/compare"
    ),
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: one a core.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="A Dask cluster, tcp://HOST:PORT (its workers must see OUT), or local.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the codecs' randomness and of the intervals.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Draws of each codec that draws, from SEED on. Default: the budget's.")
    ] = None,
    on_model: Annotated[
        bool,
        typer.Option(
            "--kl/--no-kl", help="With --model: also run it on the compressed prefix (KL, top-1, perplexity)."
        ),
    ] = True,
    at: Annotated[
        str | None, typer.Option(help="Held bits at which the codecs are compared, interpolated. Default: 2,2.5,3,4.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The codec, as in --codecs, that the others' errors at equal held bits are divided by."),
    ] = None,
    choose: Annotated[
        str | None,
        typer.Option(
            help="One of the texts (or caches) read: at each of --at the best codec is chosen on it, and judged on the others of its model."
        ),
    ] = None,
    at_kept: Annotated[
        str | None,
        typer.Option(help="Shares of the tokens at which codecs with a `keep` are compared. Default: .5,.25,.1,.05."),
    ] = None,
    oracle: Annotated[
        str,
        typer.Option(
            help="Codecs, as in --codecs, that are also given the very queries they are judged by (attention error only)."
        ),
    ] = "",
    prefill: Annotated[
        str,
        typer.Option(
            help="Of the model runs and of --passkey: plain, compressed (each chunk attends to compressed past), or both."
        ),
    ] = "plain",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in a chunk of a compressed prefill.")] = 256,
    passkey: Annotated[
        int, typer.Option(min=0, help="With --model: samples of passkey retrieval, each on every codec. 0: none.")
    ] = 0,
    passkey_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a passkey prompt, at most.")] = 512,
    question: Annotated[
        Question,
        typer.Option(help="Whether the passkey's question is among the tokens that are coded, or comes behind them."),
    ] = Question.seen,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: questions, each on every codec: needle, needles, tracking, lookup, generated (these four), or a FILE of JSON "
            "lines with prompt, answer and metric; repeatable."
        ),
    ] = None,
    items: Annotated[
        int, typer.Option(min=0, help="Items of each of --tasks. 0: 10 of a generated one, all of a FILE.")
    ] = 0,
    task_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a generated prompt, at most.")] = 512,
    draw: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw the picture.")] = True,
) -> None:
    """Attention error against the bits that codecs really hold or the tokens that they keep, on held-out queries of real caches; ratios to a baseline.

    Codecs that are fitted to calibration data are fitted once, to another work than the one they are judged on. Bits are counted from the bytes that are decoded. An interrupted run continues when the same command is given again; codecs, bits and
    layers may be added to it. Writes results.parquet, timings.parquet, equal-rate.parquet, ranking.parquet, states/, data/ and figures/ into OUT.
    """
    # Before NumPy is loaded: with one thread a process the sums are the same for any --jobs, and workers do not fight for cores.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    from rich.console import Console

    from kvtheory import sweep
    from kvtheory.cli import calibrated, composed, find_key, on_tasks, ranked
    from kvtheory.cli import on_model as model_tasks
    from reference import compare as comparison
    from reference.compare.tables import require_pyarrow

    console = Console(highlight=False, soft_wrap=True)
    sizes = SIZES[budget]
    models = list(model or [])
    caches = list(cache or ([] if models else ["sample"]))
    try:
        require_pyarrow()
        specs, rates = comparison.specs(codecs), arguments.bits(bits)
        draws = range(seed, seed + (seeds or sizes.seeds))
        # refused before anything is captured
        comparison.codecs_at([spec for spec in specs if not spec.fitted], rates, draws)
        oracles = comparison.codecs_at(comparison.specs(oracle), rates, draws)
        chunks, shares = arguments.chunks(prefill, chunk), arguments.shares(at_kept or ".5,.25,.1,.05")
        if passkey and not models:
            raise ValueError("passkey: expected --model, which answers, with it")
        if tasks and not models:
            raise ValueError("tasks: expected --model, which answers, with it")
        asked_items = on_tasks.read(tasks or [], items, task_tokens, seed)
        base = None if baseline is None else arguments.among(baseline, specs)
        targets = arguments.bits(at or "2,2.5,3,4", "at")
        wanted = None if layers is None else arguments.layers(layers)
        words = [arguments.Text(name) for name in dict.fromkeys(text or ["hamlet"])] if models else []
        same = arguments.same(budget, dtype, seed, models, words, caches)
        if (out / "sweep.json").is_file():  # a sweep without tasks: does the folder hold this very comparison?
            sweep.run([], None, out, same=same)  # type: ignore[arg-type]
        sources = [comparison.source(name) for name in caches]
        for name in models:
            for one_text in words:
                path = captured.captured(console, out, name, one_text, sizes.prefix + sizes.held)
                sources.append(comparison.source(path, label=name))
        arguments.have(sources, wanted)
        chooser = None if choose is None else composed.named(choose, sources)
        origins = [*(None for _ in caches), *(name for name in models for _ in words)]
        # questions are asked once a model, whatever texts it reads
        first = [number for number, name in enumerate(origins) if name is not None and name not in origins[:number]]
        calibrations = []
        if any(spec.fitted for spec in specs):

            def capture(model: str, name: str, tokens: int) -> Path:
                return captured.captured(console, out, model, arguments.Text(name, "calibration"), tokens)

            calibrations = calibrated.choose(calibration or [], calibration_tokens, sources, origins, capture, wanted)
            sweep.run([], None, out, same=same)  # type: ignore[arg-type]  # states stand for these sources
        chosen, fits = calibrated.codecs_of(
            console,
            specs,
            rates,
            draws,
            sources,
            calibrations,
            wanted,
            out / "states",
            jobs or arguments.cores(),
            scheduler,
        )
        bases = {
            one.id: None if base is None else arguments.made(base, specs, own, rates, draws)
            for one, own in zip(sources, chosen)
        }
        split = comparison.Split(sizes.prefix, sizes.held, sizes.segments, dtype.value)
        layer_tasks = [
            task
            for one, own in zip(sources, chosen)
            for task in [
                *comparison.plan([one], own, layers=wanted, split=split),
                *(comparison.plan([one], oracles, layers=wanted, split=split, law="held-out") if oracles else ()),
            ]
        ]
        runs = [
            task for one, own, origin in zip(sources, chosen, origins) if origin is not None
            for task in model_tasks.plan(one, origin, own, wanted, split, chunks)
        ]  # fmt: skip
        samples = find_key.Samples(passkey, passkey_tokens, seed, question.value)
        searches = [
            task for i in first if passkey
            for task in find_key.plan(sources[i], origins[i] or "", chosen[i], wanted, split, samples, chunks)
        ]  # fmt: skip
        questions = [
            task for i in first
            for task in on_tasks.plan(sources[i], origins[i] or "", chosen[i], wanted, split, asked_items, chunks)
        ]  # fmt: skip
        rows, timings = running.run(console, layer_tasks, out, same, jobs or arguments.cores(), scheduler)
        model_rows: list[dict[str, Any]] = []
        (out / "model.parquet").unlink(missing_ok=True)
        if on_model and runs:
            # one process: a model takes memory, and its plain run serves all codecs
            model_rows, more = running.run(console, runs, out, same, 1, scheduler, "model runs")
            timings += [{**row, "task": "model"} for row in more]
        found_rows: list[dict[str, Any]] = []
        (out / "passkey.parquet").unlink(missing_ok=True)
        if searches:
            found_rows, more = running.run(console, searches, out, same, 1, scheduler, "passkey samples")
            timings += [{**row, "task": "passkey"} for row in more]
        answer_rows: list[dict[str, Any]] = []
        (out / "tasks.parquet").unlink(missing_ok=True)
        if questions:
            answer_rows, more = running.run(console, questions, out, same, 1, scheduler, "questions")
            timings += [{**row, "task": "question"} for row in more]
        timings += fits
        paths = [*comparison.write(out, rows, timings)]
        if model_rows:
            paths.append(model_tasks.write(out, model_rows))
        if found_rows:
            paths.append(find_key.write(out, found_rows))
        if answer_rows:
            paths.append(on_tasks.write(out, answer_rows))
    except KeyboardInterrupt:
        kept = len(list((out / "tasks").glob("*.json")))
        console.print(
            f"\ninterrupted; {kept} finished tasks are kept in {out}, the same command continues", markup=False
        )
        raise typer.Exit(130) from None
    except (ValueError, TypeError, OSError) as problem:
        raise typer.BadParameter(str(problem)) from None
    except (ImportError, RuntimeError) as problem:  # an extra, a model or a text that is not there
        console.print(f"not run: {problem}", markup=False)
        raise typer.Exit(1) from None
    summaries = comparison.summarise(rows, seed=seed)
    with_model = model_tasks.summarise(model_rows, seed=seed)
    reduces = base is not None and hasattr(specs[base].codec, "keep")
    asked = at is not None or chooser is not None or (base is not None and not reduces) or bool(calibrations)
    answered = on_tasks.summarise(answer_rows)
    ranks: list[list[Ranked]] = []
    kept_asked = at_kept is not None or reduces
    equal: list[list[EqualRate]] = []
    equal_kept: list[list[EqualRate]] = []
    keys_found = find_key.summarise(
        found_rows, baseline=None if base is None else (specs[base].name, specs[base].curve())
    )
    for summary in summaries:
        on = with_model.get((summary.cache, summary.prefix))
        over = arguments.label(summary, bases[summary.cache])
        equal.append(saved.at_equal_rates(summary, on, targets, over) if asked else [])
        equal_kept.append(saved.at_equal_kept(summary, on, shares, over if reduces else None) if kept_asked else [])
        printed.points_table(console, summary, asked or kept_asked)
        printed.model_table(console, summary, on)
        printed.passkey_table(console, [one for one in keys_found if one.model == summary.model])
        printed.equal_table(console, equal[-1])
        printed.equal_table(console, equal_kept[-1])
        ranks.append(ranked.rank_all(summary, on, targets) if asked else [])
        ranked.show(
            lambda table: printed.show(console, table),
            lambda said: console.print(said, markup=False),
            ranks[-1],
            [one for one in answered if one.model == summary.model],
        )
    paths += saved.save(out, summaries, with_model, equal, equal_kept, keys_found, ranks)
    paths += composed.report(
        chooser, summaries, rows, targets, [arguments.label(one, bases[one.cache]) for one in summaries], out,
        lambda table: printed.show(console, table), lambda said: console.print(said, markup=False),
    )  # fmt: skip
    said = [str(path) for path in paths]
    if draw:
        import figures

        names = [name for name in saved.FIGURES if (out / "data" / name).is_dir()]
        said += [str(p) for drawn in figures.draw(out, names=names) for p in drawn.files if p.suffix == ".png"]
    console.print(", ".join(said), markup=False)
