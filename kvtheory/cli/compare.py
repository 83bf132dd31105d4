"""`kvtheory compare`: codecs x bits or kept tokens x layers on captured caches or on models, resumable, with a picture."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtheory.cli.verify import Budget

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtheory.cli.find_key import Found
    from kvtheory.cli.on_model import OnModels
    from kvtheory.sweep import Task
    from reference.codec import Codec
    from reference.compare import EqualRate, FittedCodec, Ranked, Source, Spec, Summary


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
    from kvtheory.cli import calibrated, find_key, on_tasks, ranked
    from kvtheory.cli import on_model as model_tasks
    from reference import compare as comparison
    from reference.compare.tables import require_pyarrow

    console = Console(highlight=False, soft_wrap=True)
    sizes = SIZES[budget]
    models = list(model or [])
    caches = list(cache or ([] if models else ["sample"]))
    try:
        require_pyarrow()
        specs, rates = comparison.specs(codecs), _bits(bits)
        draws = range(seed, seed + (seeds or sizes.seeds))
        # refused before anything is captured
        comparison.codecs_at([spec for spec in specs if not spec.fitted], rates, draws)
        oracles = comparison.codecs_at(comparison.specs(oracle), rates, draws)
        chunks, shares = _chunks(prefill, chunk), _shares(at_kept or ".5,.25,.1,.05")
        if passkey and not models:
            raise ValueError("passkey: expected --model, which answers, with it")
        if tasks and not models:
            raise ValueError("tasks: expected --model, which answers, with it")
        asked_items = on_tasks.read(tasks or [], items, task_tokens, seed)
        base = None if baseline is None else _among(baseline, specs)
        targets = _bits(at or "2,2.5,3,4", "at")
        wanted = None if layers is None else _layers(layers)
        words = [_Text(name) for name in dict.fromkeys(text or ["hamlet"])] if models else []
        same = _same(budget, dtype, seed, models, words, caches)
        if (out / "sweep.json").is_file():  # a sweep without tasks: does the folder hold this very comparison?
            sweep.run([], None, out, same=same)  # type: ignore[arg-type]
        sources = [comparison.source(name) for name in caches]
        for name in models:
            for one_text in words:
                path = _captured(console, out, name, one_text, sizes.prefix + sizes.held)
                sources.append(comparison.source(path, label=name))
        _have(sources, wanted)
        origins = [*(None for _ in caches), *(name for name in models for _ in words)]
        # questions are asked once a model, whatever texts it reads
        first = [number for number, name in enumerate(origins) if name is not None and name not in origins[:number]]
        calibrations = []
        if any(spec.fitted for spec in specs):

            def capture(model: str, name: str, tokens: int) -> Path:
                return _captured(console, out, model, _Text(name, "calibration"), tokens)

            calibrations = calibrated.choose(calibration or [], calibration_tokens, sources, origins, capture, wanted)
            sweep.run([], None, out, same=same)  # type: ignore[arg-type]  # states stand for these sources
        chosen, fits = calibrated.codecs_of(
            console, specs, rates, draws, sources, calibrations, wanted, out / "states", jobs or _cores(), scheduler
        )
        bases = {
            one.id: None if base is None else _of(base, specs, own, rates, draws) for one, own in zip(sources, chosen)
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
        rows, timings = _run(console, layer_tasks, out, same, jobs or _cores(), scheduler)
        model_rows: list[dict[str, Any]] = []
        (out / "model.parquet").unlink(missing_ok=True)
        if on_model and runs:
            # one process: a model takes memory, and its plain run serves all codecs
            model_rows, more = _run(console, runs, out, same, 1, scheduler, "model runs")
            timings += [{**row, "task": "model"} for row in more]
        found_rows: list[dict[str, Any]] = []
        (out / "passkey.parquet").unlink(missing_ok=True)
        if searches:
            found_rows, more = _run(console, searches, out, same, 1, scheduler, "passkey samples")
            timings += [{**row, "task": "passkey"} for row in more]
        answer_rows: list[dict[str, Any]] = []
        (out / "tasks.parquet").unlink(missing_ok=True)
        if questions:
            answer_rows, more = _run(console, questions, out, same, 1, scheduler, "questions")
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
    asked = at is not None or (base is not None and not reduces) or bool(calibrations)
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
        over = _label(summary, bases[summary.cache])
        equal.append(_at_equal_rates(summary, on, targets, over) if asked else [])
        equal_kept.append(_at_equal_kept(summary, on, shares, over if reduces else None) if kept_asked else [])
        _table(console, summary, asked or kept_asked)
        _model_table(console, summary, on)
        _passkey_table(console, [one for one in keys_found if one.model == summary.model])
        _equal_table(console, equal[-1])
        _equal_table(console, equal_kept[-1])
        ranks.append(ranked.rank_all(summary, on, targets) if asked else [])
        ranked.show(
            lambda table: _show(console, table),
            lambda said: console.print(said, markup=False),
            ranks[-1],
            [one for one in answered if one.model == summary.model],
        )
    paths += _save(out, summaries, with_model, equal, equal_kept, keys_found, ranks)
    said = [str(path) for path in paths]
    if draw:
        import figures

        names = [name for name in FIGURES if (out / "data" / name).is_dir()]
        said += [str(p) for drawn in figures.draw(out, names=names) for p in drawn.files if p.suffix == ".png"]
    console.print(", ".join(said), markup=False)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word for word in (part.strip() for part in text.split(",")) if word))


def _bits(text: str, name: str = "bits") -> list[float]:
    found: list[float] = []
    for word in _words(text):
        try:
            number = float(word)
        except ValueError:
            raise ValueError(f"{name}: expected numbers, got {word!r}") from None
        if not 0 < number < 1000:
            raise ValueError(f"{name}: expected numbers above 0, got {word}")
        found.append(int(number) if number.is_integer() else number)
    return found


def _shares(text: str) -> list[float]:
    found = [float(number) for number in _bits(text, "at-kept")]
    if any(share > 1 for share in found):
        raise ValueError(f"at-kept: expected shares of the tokens, at most 1, got {max(found):g}")
    return found


def _chunks(text: str, chunk: int) -> list[int | None]:
    """Tokens in a chunk of each kind of prefill that is named; None: plain."""
    kinds: dict[str, list[int | None]] = {"plain": [None], "compressed": [chunk], "both": [None, chunk]}
    if text not in kinds:
        raise ValueError(f"prefill: expected one of {', '.join(kinds)}, got {text!r}")
    return kinds[text]


def _layers(text: str) -> list[int]:
    found: list[int] = []
    for word in _words(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None:
            raise ValueError(f"layers: expected indices as 2,18 or 0-9, got {word!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"layers: expected a range from low to high, got {word!r}")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def _among(baseline: str, specs: Sequence[Spec]) -> int:
    """The number of the spec that is the baseline; ValueError for one that is not there."""
    from reference.compare import specs as read

    found = read(baseline)
    if len(found) != 1:
        raise ValueError(f"baseline: expected one codec, got {baseline!r}")
    for i, spec in enumerate(specs):
        if spec.name == found[0].name and spec.curve() == found[0].curve():
            return i
    raise ValueError(f"baseline: {found[0]} is not among the codecs: {', '.join(map(str, specs))}")


def _of(
    number: int,
    specs: Sequence[Spec],
    codecs: Sequence[Codec | FittedCodec],
    rates: Sequence[float],
    seeds: Sequence[int],
) -> Codec | FittedCodec:
    """A codec of a spec, as it was made: `fit` may have chosen a parameter."""
    from reference.compare.specs import options_at

    return codecs[sum(len(options_at(spec, rates, seeds)) for spec in specs[:number])]


def _label(summary: Summary, codec: Codec | FittedCodec | None) -> str | None:
    """What a summary calls the curve of a codec."""
    from reference.compare.equal_rate import same_curve
    from reference.compare.specs import named

    if codec is None:
        return None
    return next(
        p.label for p in summary.points
        if p.codec == codec.codec_id and p.law == "prompt" and same_curve(p.parameters, named(codec))
    )  # fmt: skip


def _have(sources: Sequence[Source], wanted: Sequence[int] | None) -> None:
    """ValueError for a layer that a source has not."""
    for one in sources:
        for index in wanted or ():
            if index not in one.layers:
                raise ValueError(
                    f"layers: {one.label} has no layer {index}; there are {', '.join(map(str, one.layers))}"
                )


class _Text:
    """A text by name or from a file. id: what the results call it; a file's has the start of its SHA-256."""

    def __init__(self, name: str, option: str = "text") -> None:
        from kvtheory.models import texts

        if name in texts.TEXTS:
            self.id = name
            self.get: Callable[[], str] = lambda: texts.text(name)
            return
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"{option}: no file {name!r} and no text of that name; there are {', '.join(texts.TEXTS)}")
        content = path.read_text(encoding="utf-8")
        self.id = f"{path.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        self.get = lambda: content


def _same(
    budget: Budget, dtype: Dtype, seed: int, models: list[str], words: Sequence[_Text], caches: list[str]
) -> dict[str, Any]:
    """What a folder of finished tasks stands for. Codecs, bits and layers are in the tasks' own keys, sources and libraries in their versions."""
    from kvtheory.sample import SAMPLE

    def digest(name: str) -> str:
        if name == "sample":
            return SAMPLE  # its bytes are among the sources
        if not Path(name).is_file():
            raise ValueError(f"cache: no cache file at {name}")
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return {
        "budget": budget.value,
        "dtype": dtype.value,
        "seed": seed,
        "model": models,
        "text": [one.id for one in words],
        "cache": [digest(name) for name in caches],
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- capture -----------------------------------------------------------------------------------------------------------


def _captured(console: Console, out: Path, model: str, words: _Text, tokens: int) -> Path:
    """The captured cache of `model` in `out`; made on first use."""
    from kvtheory.models import MODELS, available

    asked = f"{model}\0{words.id}\0{tokens}"
    name = f"{_short(model)[-40:]}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.safetensors"
    path = out / "captured" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    fetch = (
        f", fetching {MODELS[model].download / 1e6:,.0f} MB first" if model in MODELS and not available(model) else ""
    )
    doing = f"capturing {_short(model)} on {tokens:,} tokens of {words.id}{fetch} …"
    console.print(doing, markup=False)
    with console.status(doing):
        _alone(_capture, str(path), model, words.get(), words.id, tokens)
    return path


def _short(model: str) -> str:
    """A model's name without the folders above it, of characters that file names may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a new process: a model's memory is given back, and workers are not forked where torch has started threads."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        return own.submit(function, *arguments).result()


def _capture(path: str, model: str, text: str, text_id: str, tokens: int) -> None:
    from kvtheory import models

    tokenizer, loaded = models.load(model)
    models.capture_to(path, loaded, tokenizer, text, tokens=tokens, text_name=text_id)


#: between two lines on progress in a log
EVERY_SECONDS = 30.0


# -- running -----------------------------------------------------------------------------------------------------------


def _run(
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
            bar.update(shown, completed=done, description=f"{_short(key['model'])}{where}: {key['codec']}{rate}")

        with sweep.executor(min(jobs, max(1, len(tasks) - kept)), scheduler) as pool:
            return sweep.run(tasks, pool, out, same=same, progress=progress)


# -- results -----------------------------------------------------------------------------------------------------------


def _save(
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


def _at_equal_kept(
    summary: Summary, on: OnModels | None, shares: Sequence[float], baseline: str | None
) -> list[EqualRate]:
    from reference.compare import at_equal_kept

    found = [one for over in ("layers", "heads") for one in at_equal_kept(summary, shares, baseline, over)]
    return found if on is None else found + on.at_equal_kept(shares, summary.prefix, baseline)


def _at_equal_rates(
    summary: Summary, on: OnModels | None, targets: Sequence[float], baseline: str | None
) -> list[EqualRate]:
    from reference.compare import at_equal_rate

    found = at_equal_rate(summary, targets, baseline) + at_equal_rate(summary, targets, baseline, over="heads")
    return found if on is None else found + on.at_equal_rate(targets, baseline)


#: figures of this command
FIGURES = ("pareto", "kept-pareto", "transform-pareto", "ablation")

#: axis of EqualRate -> its column, that of its neighbours, what is said of interpolation
AXES = {
    "bits": ("held\nbits", "between\nheld rates", "; log2 interpolated between the two nearest held rates"),
    "kept": ("kept\ntokens", "between\nkept", "; log2 interpolated in log2 of what is kept"),
    "budget": ("budget\nof tokens", "between\nbudgets", "; what is kept may be less"),
}


def _at(place: float, axis: str) -> str:
    return f"{place:g}" if axis == "bits" else f"{100 * place:g}%"


def _between(below: float, above: float, axis: str) -> str:
    if axis == "bits":
        return f"{below:.3f} .. {above:.3f}"
    return f"{100 * below:.3g}%" if below == above else f"{100 * below:.3g} .. {100 * above:.3g}%"


def _keep(keep: int | float | None) -> str:
    return "-" if keep is None else f"{100 * keep:g}%" if isinstance(keep, float) else f"{keep:,}"


def _kept(kept: float | None) -> str:
    return "-" if kept is None else f"{100 * kept:.1f}%"


#: of EqualRate.measure
HEADINGS = {
    "attention": "attention error, geometric mean over layers",
    "attention by head": "attention error, geometric mean over KV heads",
    "kl": "the model itself: KL, bits",
    "perplexity": "the model itself: perplexity",
}


def _equal_table(console: Console, equal: Sequence[EqualRate]) -> None:
    from rich.table import Table

    for measure, axis in dict.fromkeys((one.measure, one.axis) for one in equal):
        if axis == "kept" and measure not in ("attention", "kl"):
            continue  # in the file
        own = [one for one in equal if (one.measure, one.axis) == (measure, axis)]
        where, between, interpolated = AXES[axis]
        there = [one for one in own if one.error is not None]
        baseline = own[0].baseline
        over = f", and over that of {baseline}" if baseline else ""
        table = Table(
            title=f"{HEADINGS[measure]}, at equal {where.replace(chr(10), ' ')}{over}{interpolated}",
            title_justify="left", box=None, pad_edge=False,
        )  # fmt: skip
        table.add_column(where, justify="right")
        table.add_column("codec")
        headings = [between, "value", f"{there[0].error.level:.0%}" if there and there[0].error else ""]
        for heading in [*headings, *(["ratio", "paired\ninterval"] if baseline else [])]:
            table.add_column(heading, justify="right")
        for one in there:
            table.add_row(_at(one.held_bits, axis), one.label, *_cells(one))
        if there:
            _show(console, table)
        if measure in ("attention", "kl") and axis != "kept":
            missing: dict[tuple[str, str], list[str]] = {}
            for one in own:
                if one.why:
                    missing.setdefault((one.label, one.why), []).append(_at(one.held_bits, axis))
            for (label, why), at in missing.items():
                console.print(f"{label} at {', '.join(at)}: {why}; nothing is extrapolated", markup=False)


def _show(console: Console, table: Table) -> None:
    """A table as wide as it is: a narrow terminal wraps its lines, a file has them whole."""
    from rich.measure import Measurement

    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=1000), table).maximum)
    try:
        console.print(table)
    finally:
        console.width = width


def _cells(one: EqualRate) -> list[str]:
    assert one.below is not None and one.above is not None and one.error is not None
    cells = [
        _between(one.below[1], one.above[1], one.axis),
        f"{one.error.estimate:.3g}",
        f"[{one.error.low:.3g}, {one.error.high:.3g}]",
    ]
    if one.baseline is None:
        return cells
    if one.ratio is None:
        return [*cells, "-", "-"]
    return [*cells, f"{one.ratio.estimate:.3f}", f"[{one.ratio.low:.3f}, {one.ratio.high:.3f}]"]


def _table(console: Console, summary: Summary, equal_rates: bool) -> None:
    from rich.table import Table

    level = f"{summary.bootstrap.level:.0%}"
    layers = f"{len(summary.layers)} layer{'s' if len(summary.layers) > 1 else ''}"
    table = Table(
        title=f"{_short(summary.model)}{', ' if summary.text else ''}{summary.text}: {layers}, {summary.prefix:,} tokens as {summary.dtype}, "
        f"{summary.queries} held-out queries in {summary.segments} segments",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec")
    reduce = any(p.keep is not None for p in summary.points)
    for heading in (
        "nominal\nbits",
        *(("budget", "kept") if reduce else ()),
        "held\nbits",
        "ratio",
        "state\nbytes",
        "attention\nerror",
        level,
    ):
        table.add_column(heading, justify="right")
    for p in summary.points:
        state = f"{p.state_bytes:,}" + (f" (+{p.amortised_bits - p.held_bits:.3f} bits)" if p.state_bytes else "")
        table.add_row(
            p.label, "-" if p.bits is None else f"{p.bits:g}", *((_keep(p.keep), _kept(p.kept)) if reduce else ()),
            f"{p.held_bits:.4f}", f"{16 / p.held_bits:.2f}", state,
            f"{p.error.estimate:.3g}", f"[{p.error.low:.3g}, {p.error.high:.3g}]",
        )  # fmt: skip
    _show(console, table)
    for line in [] if equal_rates else _equal_rates(summary):
        console.print(line, markup=False)
    if summary.windowed:
        console.print(
            f"layers {', '.join(map(str, summary.windowed))} have a sliding window: their true queries see less than the whole prefix",
            markup=False,
        )


def _model_table(console: Console, summary: Summary, on: OnModels | None) -> None:
    from rich.table import Table

    if on is None:
        return
    runs = on.points
    table = Table(
        title=f"{_short(summary.model)} itself, the same layers replaced (perplexity {runs[0].plain_perplexity:.3f} without)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec")
    reduce = any(run.keep is not None for run in runs)
    for heading in (
        "nominal\nbits",
        *(("budget", "kept") if reduce else ()),
        "held\nbits",
        "KL,\nbits",
        f"{summary.bootstrap.level:.0%}",
        "same\ntop-1",
        "perplexity",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        kl = run.kl_bits
        table.add_row(
            run.label, "-" if run.bits is None else f"{run.bits:g}", *((_keep(run.keep), _kept(run.kept)) if reduce else ()),
            f"{run.held_bits:.4f}", f"{kl.estimate:.3g}",
            f"[{kl.low:.3g}, {kl.high:.3g}]", f"{run.agreement:.1%}", f"{run.perplexity:.3f}",
        )  # fmt: skip
    _show(console, table)


def _passkey_table(console: Console, found: Sequence[Found]) -> None:
    """Right answers and log2 P(key) of each codec, paired over samples with the full cache and with the baseline."""
    from rich.table import Table

    if not found:
        return
    one = found[0]
    over = any(f.gain_bits is not None for f in found)
    table = Table(
        title=f"passkey, {one.samples} samples, question {one.question}: the full cache finds {one.full_right} of {one.samples}, "
        f"log2 P(key) {one.full_log2_p:.3f}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec")
    headings = [
        "nominal\nbits",
        "budget",
        "kept",
        "held\nbits",
        "found",
        "95%",
        "log2\nP(key)",
        "bits lost to\nthe full cache",
        "paired\n95%",
    ]
    for heading in [*headings, *(["bits gained on\nthe baseline", "paired\n95%"] if over else [])]:
        table.add_column(heading, justify="right")
    for f in found:
        exact = "-" if f.accuracy is None else f"[{f.accuracy.low:.2f}, {f.accuracy.high:.2f}]"
        ends = [
            cell
            for i in (f.loss_bits, *((f.gain_bits,) if over else ()))
            for cell in (("-", "-") if i is None else (f"{i.estimate:.3f}", f"[{i.low:.3f}, {i.high:.3f}]"))
        ]
        table.add_row(
            f.label, "-" if f.bits is None else f"{f.bits:g}", _keep(f.keep), _kept(f.kept), f"{f.held_bits:.4f}",
            f"{f.right:.2f}", exact, f"{f.log2_p:.3f}", *ends,
        )  # fmt: skip
    _show(console, table)
    if one.full_right < one.samples:
        console.print(
            f"the full cache misses {one.samples - one.full_right} of {one.samples} keys: what a codec misses there says nothing of it",
            markup=False,
        )


def _equal_rates(summary: Summary) -> list[str]:
    """Curves against the first one, where both were measured around the same held rate."""
    import numpy as np

    from kvtheory.statistics import expanded_percentiles
    from reference.compare import at_held_bits

    curves = {label: own for label, own in summary.curves().items() if len(own) > 1}
    lines = []
    for label, own in list(curves.items())[1:]:
        first = next(iter(curves))
        ends = [[summary.points[i].held_bits for i in points] for points in (curves[first], own)]
        low, high = max(e[0] for e in ends), min(e[-1] for e in ends)
        if low > high:
            continue
        held = 0.5 * (low + high)
        try:
            (a, a_draws), (b, b_draws) = at_held_bits(summary, first, held), at_held_bits(summary, label, held)
        except ValueError:  # an error of 0
            continue
        edges = expanded_percentiles(b_draws - a_draws, summary.segments, summary.bootstrap.level)
        ratio, least, most = (float(np.exp2(x)) for x in (b - a, *edges))
        lines.append(
            f"at {held:.3f} held bits (log2 error interpolated): error of {label} / {first} = {ratio:.3g} [{least:.3g}, {most:.3g}]"
        )
    return lines
