"""`kvtheory compare`: codecs x bits x layers on captured caches or on models, resumable, with a picture."""

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

    from kvtheory.cli.on_model import OnModel
    from kvtheory.sweep import Task
    from reference.compare import Summary


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
    codecs: Annotated[str, typer.Option(help="Comma-separated names of codecs.")] = "Full,TurboQuant",
    bits: Annotated[str, typer.Option(help="Nominal bits per number, for the codecs that have them.")] = "2,3,4",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to capture: a name of `kvtheory models`, a path or a hub id; repeatable."),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="Captured cache: sample (embedded) or a FILE; repeatable. Default, without --model: sample."),
    ] = None,
    text: Annotated[str, typer.Option(help="What --model reads: a text's name in kvtheory, or a FILE.")] = "hamlet",
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
    on_model: Annotated[
        bool,
        typer.Option(
            "--kl/--no-kl", help="With --model: also run it on the compressed prefix (KL, top-1, perplexity)."
        ),
    ] = True,
    draw: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw the picture.")] = True,
) -> None:
    """Attention error against the bits that codecs really hold, on held-out queries of real caches.

    Bits are counted from the bytes that are decoded. An interrupted run continues when the same command is given again; codecs, bits and
    layers may be added to it. Writes results.parquet, timings.parquet, data/ and figures/ into OUT.
    """
    # Before NumPy is loaded: with one thread a process the sums are the same for any --jobs, and workers do not fight for cores.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    from rich.console import Console

    from kvtheory import sweep
    from kvtheory.cli import on_model as model_tasks
    from reference import compare as comparison
    from reference.compare.tables import require_pyarrow

    console = Console(highlight=False, soft_wrap=True)
    sizes = SIZES[budget]
    models = list(model or [])
    caches = list(cache or ([] if models else ["sample"]))
    try:
        require_pyarrow()
        chosen = comparison.codecs_at(_words(codecs), _bits(bits), range(seed, seed + sizes.seeds))
        wanted = None if layers is None else _layers(layers)
        words = _Text(text) if models else None
        same = _same(budget, dtype, seed, models, words, caches)
        if (out / "sweep.json").is_file():  # a sweep without tasks: does the folder hold this very comparison?
            sweep.run([], None, out, same=same)  # type: ignore[arg-type]
        sources = [comparison.source(name) for name in caches]
        for name in models:
            assert words is not None
            path = _captured(console, out, name, words, sizes.prefix + sizes.held)
            sources.append(comparison.source(path, label=name))
        split = comparison.Split(sizes.prefix, sizes.held, sizes.segments, dtype.value)
        tasks = comparison.plan(sources, chosen, layers=wanted, split=split)
        runs = [
            task for one, name in zip(sources[len(caches) :], models) for task in model_tasks.plan(one, name, chosen, wanted, split)
        ]  # fmt: skip
        rows, timings = _run(console, tasks, out, same, jobs or _cores(), scheduler)
        model_rows: list[dict[str, Any]] = []
        (out / "model.parquet").unlink(missing_ok=True)
        if on_model and runs:
            # one process: a model takes memory, and its plain run serves all codecs
            model_rows, more = _run(console, runs, out, same, 1, scheduler, "model runs")
            timings += [{**row, "task": "model"} for row in more]
        paths = [*comparison.write(out, rows, timings)]
        if model_rows:
            paths.append(model_tasks.write(out, model_rows))
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
    for summary in summaries:
        _table(console, summary)
        _model_table(console, summary, with_model.get((summary.cache, summary.prefix), []))
    _save(out, summaries, with_model)
    said = [str(path) for path in paths]
    if draw:
        import figures

        said += [str(p) for drawn in figures.draw(out, names=["pareto"]) for p in drawn.files if p.suffix == ".png"]
    console.print(", ".join(said), markup=False)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word for word in (part.strip() for part in text.split(",")) if word))


def _bits(text: str) -> list[float]:
    found: list[float] = []
    for word in _words(text):
        try:
            number = float(word)
        except ValueError:
            raise ValueError(f"bits: expected numbers, got {word!r}") from None
        found.append(int(number) if number.is_integer() else number)
    return found


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


class _Text:
    """A text by name or from a file. id: what the results call it; a file's has the start of its SHA-256."""

    def __init__(self, name: str) -> None:
        from kvtheory.models import texts

        if name in texts.TEXTS:
            self.id = name
            self.get: Callable[[], str] = lambda: texts.text(name)
            return
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"text: no file {name!r} and no text of that name; there are {', '.join(texts.TEXTS)}")
        content = path.read_text(encoding="utf-8")
        self.id = f"{path.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        self.get = lambda: content


def _same(
    budget: Budget, dtype: Dtype, seed: int, models: list[str], words: _Text | None, caches: list[str]
) -> dict[str, Any]:
    """What a folder of finished tasks stands for. Codecs, bits and layers are in the tasks' own keys."""
    import numpy
    import scipy

    from kvtheory.sample import SAMPLE
    from proofs_checks.ledger import source_digest

    def digest(name: str) -> str:
        if name == "sample":
            return SAMPLE  # its bytes are among the sources
        if not Path(name).is_file():
            raise ValueError(f"cache: no cache file at {name}")
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return {
        "sources": source_digest(("kvtheory", "reference")),
        "versions": {"numpy": numpy.__version__, "scipy": scipy.__version__},
        "budget": budget.value,
        "dtype": dtype.value,
        "seed": seed,
        "model": models,
        "text": None if words is None else words.id,
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

        def progress(done: int, total: int, task: Task) -> None:
            key = task.key
            rate = "" if key["bits"] is None else f" {key['bits']:g} bits"
            where = f" layer {key['layers']}" if "," not in key["layers"] else ""
            bar.update(shown, completed=done, description=f"{_short(key['model'])}{where}: {key['codec']}{rate}")

        with sweep.executor(min(jobs, max(1, len(tasks) - kept)), scheduler) as pool:
            return sweep.run(tasks, pool, out, same=same, progress=progress)


# -- results -----------------------------------------------------------------------------------------------------------


def _save(out: Path, summaries: Sequence[Summary], with_model: dict[tuple[str, int], list[OnModel]]) -> None:
    """The data of the picture, one file a source, in the format of figures.book; what a former run left is removed."""
    from kvtheory.cli.on_model import picture as point_picture
    from proofs_checks.ledger import plain, write_json
    from reference.compare import picture

    folder = out / "data" / "pareto"
    for path in folder.glob("*.json"):
        path.unlink()
    for i, summary in enumerate(summaries):
        runs = with_model.get((summary.cache, summary.prefix), [])
        data = {**picture(summary), "on_model": [point_picture(run, _label(summary, run)) for run in runs]}
        record = {"claim": f"compare/{i}-{summary.cache}", "figure": "pareto", "data": plain(data)}
        write_json(folder / f"compare--{i}-{summary.cache}.json", record)


def _table(console: Console, summary: Summary) -> None:
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
    table.add_column("codec", overflow="fold")
    for heading in ("nominal\nbits", "held\nbits", "ratio", "state\nbytes", "attention\nerror", level):
        table.add_column(heading, justify="right", no_wrap=True)
    for p in summary.points:
        state = f"{p.state_bytes:,}" + (f" (+{p.amortised_bits - p.held_bits:.3f} bits)" if p.state_bytes else "")
        table.add_row(
            p.label, "-" if p.bits is None else f"{p.bits:g}", f"{p.held_bits:.4f}", f"{16 / p.held_bits:.2f}", state,
            f"{p.error.estimate:.3g}", f"[{p.error.low:.3g}, {p.error.high:.3g}]",
        )  # fmt: skip
    console.print(table)
    for line in _equal_rates(summary):
        console.print(line, markup=False)
    if summary.windowed:
        console.print(
            f"layers {', '.join(map(str, summary.windowed))} have a sliding window: their true queries see less than the whole prefix",
            markup=False,
        )


def _label(summary: Summary, run: OnModel) -> str:
    return next(p.label for p in summary.points if (p.codec, p.parameters) == (run.codec, run.parameters))


def _model_table(console: Console, summary: Summary, runs: Sequence[OnModel]) -> None:
    from rich.table import Table

    if not runs:
        return
    table = Table(
        title=f"{_short(summary.model)} itself, the same layers replaced (perplexity {runs[0].plain_perplexity:.3f} without)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("codec", overflow="fold")
    for heading in (
        "nominal\nbits",
        "held\nbits",
        "KL,\nbits",
        f"{summary.bootstrap.level:.0%}",
        "same\ntop-1",
        "perplexity",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        kl = run.kl_bits
        table.add_row(
            _label(summary, run), "-" if run.bits is None else f"{run.bits:g}", f"{run.held_bits:.4f}", f"{kl.estimate:.3g}",
            f"[{kl.low:.3g}, {kl.high:.3g}]", f"{run.agreement:.1%}", f"{run.perplexity:.3f}",
        )  # fmt: skip
    console.print(table)


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
