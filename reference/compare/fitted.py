"""Codecs fitted to calibration data, once each: states in files, of which a task opens those of its layers.

    calibration   a captured cache of the same model on another work
    state         of each (codec and the version of its sources, options, nominal rate, calibration, set of layers) a folder of its own, named by their hash:
                  layer-<index>.state where the codec's state is a tuple by layer, else whole.state; about.json, written last

A chain "A > B" whose last stage B is fitted: B is fitted to what the stages before it leave of the calibration (reference.compare.seen), and
the state is that of the Pipeline.

A file layer-<index>.state is the state of that codec cut to one layer: a stream written with it is as long as with the whole state, and
decodes to the same. `state_bytes` is that of the whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtheory import files
from kvtheory.layer import Cache, Layer
from reference.codec import Codec, codec_class, load
from reference.compare import versions
from reference.compare.seen import as_seen
from reference.compare.sources import Source, open_cache, source
from reference.compare.specs import Spec, named, options_at, specs
from reference.pipeline import Pipeline

__all__ = ["Calibration", "FittedCodec", "calibration", "fit", "refuse_same_work", "usable"]

Row = dict[str, Any]
#: a run of tokens that two works do not share
COMMON = 64


@dataclass(frozen=True)
class Calibration:
    """A captured cache that codecs are fitted to: its first `tokens` tokens and their queries."""

    source: Source
    tokens: int

    @property
    def name(self) -> str:
        """What the column `calibration` says."""
        return f"{self.source.text or 'unnamed'}, {self.tokens} tokens, {self.source.id}"


def calibration(path: str | os.PathLike[str], tokens: int | None = None, label: str = "") -> Calibration:
    """The calibration in a cache file; its first `tokens` tokens, default all.

    ValueError if it has fewer, or is "sample", whose two layers are one text, which codecs are judged on.
    """
    if str(path) == "sample":
        raise ValueError(
            "calibration: the embedded sample is a test text of 384 tokens; give a captured cache of the same model on another work"
        )
    one = source(path, label)
    if tokens is not None and not 1 <= tokens <= one.tokens:
        raise ValueError(f"calibration: expected 1 to {one.tokens} tokens, those of {path}, got {tokens}")
    return Calibration(one, tokens or one.tokens)


def refuse_same_work(tested: Source, its: Calibration) -> None:
    """ValueError if the calibration is the work that `tested` is on: the same file, the same name of text, or COMMON tokens in a row shared."""
    where = f"calibration: {its.source.path} is the same work as the test text {tested.text or tested.path}"
    if its.source.digest == tested.digest or (its.source.text and its.source.text == tested.text):
        raise ValueError(f"{where}; codecs are fitted to another one")
    own, other = (open_cache(s.path).tokens for s in (its.source, tested))
    if own is not None and other is not None and not _runs(own).isdisjoint(_runs(other)):
        raise ValueError(f"{where}: they share {COMMON} tokens in a row; codecs are fitted to another one")


def _runs(tokens: Any) -> set[bytes]:
    ids = np.ascontiguousarray(tokens, dtype="<i8")
    return {ids[i : i + COMMON].tobytes() for i in range(len(ids) - COMMON + 1)}


def usable(tested: Source, its: Calibration, layers: Sequence[int]) -> None:
    """ValueError for a calibration of another model, of the same work, or without some of the layers."""
    if its.source.model != tested.model:
        raise ValueError(
            f"calibration: expected a cache of {tested.model}, got one of {its.source.model} in {its.source.path}"
        )
    refuse_same_work(tested, its)
    missing = [index for index in layers if index not in its.source.layers]
    if missing:
        raise ValueError(f"calibration: {its.source.path} has no layer {', '.join(map(str, missing))}")


# -- fitted codecs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FittedCodec:
    """A fitted codec as tasks carry it: what it is, and the files of its state. `of` opens one.

    state: first 16 hex digits of the SHA-256 of the whole state; state_bytes: its length. files: index of a layer ("all": every layer) -> path and
    SHA-256. stage_ids: of a Pipeline, the names of its stages.
    """

    codec_id: str
    parameters: Mapping[str, Any]
    state: str
    state_bytes: int
    calibration: str
    files: Mapping[int | str | None, tuple[str, str]]
    seconds: float = dataclasses.field(default=0.0, compare=False)
    stage_ids: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[type[Codec], ...]:
        """Of the codec; of a Pipeline its own and those of its stages, in order."""
        return tuple(codec_class(name) for name in (self.codec_id, *self.stage_ids))

    @property
    def scope(self) -> str:
        return self.classes[-1].scope

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(one.needs for one in self.classes))

    @property
    def bits(self) -> float | None:
        """Nominal bits, where the codec has them."""
        return nominal(self.parameters)

    def only(self, indices: Sequence[int]) -> FittedCodec:
        """The same with the files that these layers need."""
        wanted = (*indices, None, "all")
        return dataclasses.replace(self, files={i: self.files[i] for i in wanted if i in self.files})

    def of(self, index: int | None) -> Codec:
        """The codec for a layer. ValueError for a layer that it was not fitted to and for a file that was changed."""
        for key in (index, None, "all"):
            if key in self.files:
                path, digest = self.files[key]
                data = Path(path).read_bytes()
                if hashlib.sha256(data).hexdigest() != digest:
                    raise ValueError(f"state: {path} is not the file that was written; remove its folder and fit again")
                return load(data)
        raise ValueError(f"layer: {self.codec_id} was not fitted to a layer of index {index}")


def nominal(parameters: Mapping[str, Any]) -> float | None:
    bits = parameters.get("bits")
    return float(bits) if isinstance(bits, (int, float)) else None


def fit(
    codecs: str | Sequence[str] | Sequence[Spec],
    bits: Sequence[float],
    its: Calibration,
    folder: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    seeds: Sequence[int] = (0,),
    pool: Executor | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[FittedCodec]:
    """Each codec at each nominal rate, fitted to the calibration's layers (indices, default all); states found in `folder` are not made again.

    codecs: specs as text or Spec. pool: runs one task for each codec and options, of all rates that are missing; None: this process.
    Rates share what they can where the class has `fit_rates`. ValueError names the codec that refused.
    """
    wanted = [
        one
        for c in ([codecs] if isinstance(codecs, str) else codecs)
        for one in ([c] if isinstance(c, Spec) else specs(c))
    ]
    indices = list(its.source.layers) if layers is None else list(layers)
    numbers = {index: its.source.layers[index] for index in indices}
    asked: list[tuple[Path, Spec, Row]] = []
    groups: dict[str, tuple[Spec, Row, list[tuple[Any, Path]]]] = {}
    for spec in wanted:
        for options in options_at(spec, bits, seeds):
            own = Path(folder) / _name(spec, options, its, indices)
            asked.append((own, spec, options))
            if not (own / "about.json").is_file():
                rest = {k: v for k, v in options.items() if k != "bits"}
                group = groups.setdefault(
                    f"{spec.name}{json.dumps(rest, sort_keys=True, default=repr)}", (spec, rest, [])
                )
                group[2].append((options.get("bits"), own))
    if progress is not None:
        progress(0, len(groups), "")
    calls = [
        (spec, (spec.name, rest, [b for b, _ in rates], [str(f) for _, f in rates], its, numbers))
        for spec, rest, rates in groups.values()
    ]
    if pool is None:
        for done, (spec, arguments) in enumerate(calls, 1):
            _said(spec, lambda arguments=arguments: _fit(*arguments))  # type: ignore[misc]
            if progress is not None:
                progress(done, len(calls), str(spec))
    else:
        _in_pool(calls, pool, progress)
    return [_read(own) for own, _, _ in asked]


def _in_pool(
    calls: list[tuple[Spec, tuple[Any, ...]]], pool: Executor, progress: Callable[[int, int, str], None] | None
) -> None:
    waiting: dict[Future[None], Spec] = {pool.submit(_fit, *arguments): spec for spec, arguments in calls}
    try:
        for done, future in enumerate(as_completed(waiting), 1):
            _said(waiting[future], future.result)
            if progress is not None:
                progress(done, len(calls), str(waiting[future]))
    except BaseException:
        for future in waiting:
            future.cancel()
        raise


def _said(spec: Spec, call: Callable[[], Any]) -> None:
    try:
        call()
    except (TypeError, ValueError, NotImplementedError) as problem:
        raise ValueError(f"codecs: {spec}: {problem}") from problem


def _name(spec: Spec, options: Row, its: Calibration, layers: Sequence[int]) -> str:
    modules = {one.codec.__module__ for one in (spec, *spec.stages)} | ({as_seen.__module__} if spec.stages else set())
    version = versions.of_modules(*sorted(modules))
    what = json.dumps(
        [spec.name, options, its.source.digest, its.tokens, list(layers), version], sort_keys=True, default=repr
    )
    return f"{spec.name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _fit(
    codec: str, options: Row, rates: list[Any], folders: list[str], its: Calibration, numbers: Mapping[int, int]
) -> None:
    """Fit at all rates and write their states."""
    start = time.perf_counter()
    cache = open_cache(its.source.path)
    front: tuple[Codec, ...] = ()
    make: Any = codec_class(codec)
    chain = Spec(codec, options)
    if chain.stages:
        front, make, options = _before_last(chain)
    layers = Cache(
        [lambda number=number: as_seen(front, _cut(cache[number], its.tokens)) for number in numbers.values()]  # type: ignore[misc]
    )
    if rates == [None]:
        found = [make.fit(layers, **options)]
    elif hasattr(make, "fit_rates"):
        found = make.fit_rates(layers, rates, **options)
    else:
        found = [make.fit(layers, bits=b, **options) for b in rates]
    seconds = time.perf_counter() - start
    for one, folder in zip(found, folders, strict=True):
        _write(Pipeline((*front, one)) if front else one, Path(folder), its, seconds / len(found))


def _before_last(chain: Spec) -> tuple[tuple[Codec, ...], Any, Row]:
    """Of a chain: the stages before the last one, the last one's class, its options. ValueError where another than the last is fitted."""
    front = []
    for i, stage in enumerate(chain.stages[:-1]):
        if stage.fitted:
            raise ValueError(f"stages: only the last one may be fitted to calibration data, {stage} is stage {i + 1}")
        front.append(stage.make(**chain.given(i, chain.options)))
    last = chain.stages[-1]
    return tuple(front), last.codec, {**chain.given(len(front), chain.options), **last.options}


def _cut(layer: Layer, tokens: int) -> Layer:
    """The first `tokens` tokens, and the queries at their positions."""
    if layer.positions.size and int(layer.positions.max()) < tokens:
        return layer
    own = layer.positions < tokens
    extras = {name: array[own] if name == "inputs" else array for name, array in layer.extras.items()}
    changes: Row = {}
    if layer.queries is not None and layer.query_positions is not None:
        asked = layer.query_positions < tokens
        changes = {"queries": layer.queries[:, asked], "query_positions": layer.query_positions[asked]}
    return layer.replace(
        keys=layer.keys[:, own], values=layer.values[:, own], positions=layer.positions[own], extras=extras, **changes
    )  # fmt: skip


def _write(codec: Codec, folder: Path, its: Calibration, seconds: float) -> None:
    written = []
    for index, part in _by_layer(codec).items():
        name = "whole.state" if index == "all" else f"layer-{'none' if index is None else index}.state"
        with files.replacing(folder / name) as scratch:
            scratch.write_bytes(part.state)
        written.append([index, name, hashlib.sha256(part.state).hexdigest()])
    about = {
        "codec": codec.codec_id,
        "parameters": json.loads(json.dumps(named(codec), default=repr)),
        "stages": [stage.codec_id for stage in codec.stages] if isinstance(codec, Pipeline) else [],
        "state": hashlib.sha256(codec.state).hexdigest()[:16],
        "state_bytes": codec.state_bytes,
        "calibration": its.name,
        "seconds": seconds,
        "files": written,
    }
    with files.replacing(folder / "about.json") as scratch:
        scratch.write_text(json.dumps(about, indent=1), encoding="utf-8")


def _by_layer(codec: Codec) -> dict[int | str | None, Codec]:
    """The codec cut to each layer, where its state is a tuple of what was fitted by layer (`.index`); else "all" of it."""
    if isinstance(codec, Pipeline):
        return {index: Pipeline((*codec.stages[:-1], last)) for index, last in _by_layer(codec.last).items()}
    kept = [f.name for f in dataclasses.fields(codec) if "state" in f.metadata]  # type: ignore[arg-type]
    if codec.scope == "layer" and len(kept) == 1:
        entries = getattr(codec, kept[0])
        if isinstance(entries, tuple) and entries and all(hasattr(entry, "index") for entry in entries):
            return {entry.index: dataclasses.replace(codec, **{kept[0]: (entry,)}) for entry in entries}  # type: ignore[type-var]
    return {"all": codec}


def _read(folder: Path) -> FittedCodec:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return FittedCodec(
        about["codec"], about["parameters"], about["state"], about["state_bytes"], about["calibration"],
        {index: (str((folder / name).resolve()), digest) for index, name, digest in about["files"]}, about["seconds"],
        tuple(about.get("stages", ())),
    )  # fmt: skip
