"""Which calibration a source's codecs are fitted to, and the fitting, for `kvtheory compare`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from reference.codec import Codec
    from reference.compare import Calibration, FittedCodec, Source, Spec

#: tokens that are captured where --calibration names a text
TOKENS = 4096


def choose(
    names: Sequence[str],
    tokens: int | None,
    sources: Sequence[Source],
    models: Sequence[str | None],
    capture: Callable[[str, str, int], Path],
    layers: Sequence[int] | None,
) -> list[Calibration]:
    """The calibration of each source: a captured cache FILE of its model, or for a source of --model a text that is captured now.

    models: for each source the --model that it was captured from, None for a --cache. capture(model, text, tokens) -> its file.
    ValueError for none, several, and one on the same work as the source or without its layers.
    """
    from reference import compare

    if not names:
        raise ValueError(
            "calibration: codecs that are fitted need --calibration, a text's name or FILE (with --model) or a captured cache FILE"
        )
    texts = [name for name in names if not _is_cache(name)]
    files = [compare.calibration(name, tokens) for name in names if name not in texts]
    if len(texts) > 1:
        raise ValueError(f"calibration: expected one text, got {', '.join(texts)}")
    found = []
    for one, model in zip(sources, models, strict=True):
        own = [its for its in files if its.source.model == one.model]
        if model is not None and texts:
            path = capture(model, texts[0], tokens or TOKENS)
            own.append(compare.calibration(path, label=model))
        if len(own) > 1:
            raise ValueError(
                f"calibration: expected one for {one.label}, got {', '.join(its.source.path for its in own)}"
            )
        if not own:
            raise ValueError(_nothing(one, model, texts, files))
        compare.usable(one, own[0], list(one.layers) if layers is None else layers)
        found.append(own[0])
    return found


def _nothing(one: Source, model: str | None, texts: Sequence[str], files: Sequence[Calibration]) -> str:
    if model is None and texts:
        return (
            f"calibration: no captured cache at {texts[0]!r}: for --cache it is a file of `kvtheory capture` of {one.model} on another work; "
            "a text is captured with --model only"
        )
    had = ", ".join(f"{its.source.path} of {its.source.model}" for its in files)
    return f"calibration: expected a cache of {one.model}, got {had}"


def _is_cache(name: str) -> bool:
    """Whether this is a safetensors file: the length of a header in 8 bytes, which no text has, and "{"."""
    if name == "sample":
        return True
    if not Path(name).is_file():
        return False
    with open(name, "rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[7] == 0 and head[8:] == b"{"


def codecs_of(
    console: Console,
    specs: Sequence[Spec],
    bits: Sequence[float],
    seeds: Sequence[int],
    sources: Sequence[Source],
    calibrations: Sequence[Calibration],
    layers: Sequence[int] | None,
    folder: Path,
    jobs: int,
    scheduler: str | None,
) -> tuple[list[list[Codec | FittedCodec]], list[dict[str, Any]]]:
    """(codecs of each source in the order of the specs, timing rows of the fits); fitted where calibrations are given, one for each source.

    States are kept in `folder`; sources of one model and one set of layers share them.
    """
    from reference import compare
    from reference.compare.specs import options_at

    oblivious = {i: compare.codecs_at([spec], bits, seeds) for i, spec in enumerate(specs) if not spec.fitted}
    made: dict[Any, list[FittedCodec]] = {}
    found: list[list[Codec | FittedCodec]] = []
    timings: list[dict[str, Any]] = []
    for number, one in enumerate(sources):
        fitted: list[FittedCodec] = []
        if len(oblivious) < len(specs):
            its, indices = calibrations[number], list(one.layers) if layers is None else list(layers)
            key = its.source.digest, its.tokens, tuple(indices)
            if key not in made:
                made[key] = _fit(
                    console, [s for s in specs if s.fitted], bits, seeds, its, indices, folder, jobs, scheduler
                )
                timings += [_timing(its, codec, indices) for codec in made[key]]
            fitted = made[key]
        own: list[Codec | FittedCodec] = []
        taken = 0
        for i, spec in enumerate(specs):
            count = len(options_at(spec, bits, seeds))
            own += oblivious[i] if i in oblivious else fitted[taken : taken + count]
            taken += 0 if i in oblivious else count
        found.append(own)
    return found, timings


def _fit(
    console: Console,
    specs: Sequence[Spec],
    bits: Sequence[float],
    seeds: Sequence[int],
    its: Calibration,
    layers: Sequence[int],
    folder: Path,
    jobs: int,
    scheduler: str | None,
) -> list[FittedCodec]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvtheory import sweep
    from reference import compare

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True, disable=not console.is_terminal
    )  # fmt: skip
    with bar:
        shown = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            if not done and total:
                console.print(
                    f"{its.source.model}, {len(layers)} layers: {total} fit{'s' * (total > 1)} to {its.name}",
                    markup=False,
                )
            bar.update(shown, completed=done, total=total, description=f"fitted {what}" if what else "fitting")

        with sweep.executor(min(jobs, len(specs)), scheduler) as pool:
            return compare.fit(specs, bits, its, folder, layers=layers, seeds=seeds, pool=pool, progress=progress)


def _timing(its: Calibration, codec: FittedCodec, layers: Sequence[int]) -> dict[str, Any]:
    """A row of timings.parquet: of the calibration's text and cache."""
    return {
        "model": its.source.model,
        "text": its.source.text,
        "cache": its.source.id,
        "codec": codec.codec_id,
        "parameters": json.dumps(codec.parameters, sort_keys=True),
        "bits": codec.bits,
        "seed": codec.parameters.get("seed"),
        "task": "fit",
        "layers": ",".join(map(str, layers)),
        "seconds": codec.seconds,
    }
