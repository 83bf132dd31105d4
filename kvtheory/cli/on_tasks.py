"""The fourth kind of task of `kvtheory compare`: questions with known answers (kvtheory.models.tasks), one task a codec and item.

The cache of the prompt, question included, is coded and replaced; the answer is greedy. Every codec gets the same items, and the full cache is
the control: what it does not solve says nothing of a codec, so scores are given over the items that it solves, and how many these are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtheory.cli.on_model import _runner, prefill, refuse_chunks, replace, with_prefill
from kvtheory.models import tasks as questions
from kvtheory.statistics import Interval, mean_interval, proportion_interval
from kvtheory.sweep import Task
from reference.codec import Codec
from reference.compare import versions
from reference.compare.fitted import FittedCodec
from reference.compare.sources import Source, Split, as_dtype
from reference.compare.summary import labels, without_seed
from reference.compare.tables import COLUMNS, parquet
from reference.compare.tasks import carried, task_key

Row = dict[str, Any]

#: tasks.parquet: name -> (type of pyarrow, may be null, meaning)
TASK_COLUMNS: dict[str, tuple[str, bool, str]] = {
    **{n: COLUMNS[n] for n in ("model", "codec", "parameters", "state", "calibration", "bits", "seed", "dtype")},
    "layers": ("string", False, "indices of the layers whose cache is replaced"),
    "prefill": ("int32", True, "tokens in a chunk of a prefill that attends to compressed past; null: prefill by the plain model"),
    "task": ("string", False, "needle, needles, tracking, lookup, or what the data set calls it"),
    "origin": ("string", False, "generated, or the first 16 hex digits of the SHA-256 of the data set's file"),
    "item": ("int32", False, "number of the item, the same for every codec"),
    "item_seed": ("int64", True, "of generated items"),
    "most_tokens": ("int32", True, "of a generated prompt"),
    "metric": ("string", False, "by which the answer is scored"),
    "form": ("string", False, "chat or plain"),
    "tokens": ("int32", False, "of the prompt; all but the last have the cache replaced"),
    "answer": ("string", False, "the first right answer"),
    "full_said": ("string", False, "the greedy answer with the plain model's cache"),
    "said": ("string", False, "the greedy answer with the replaced cache"),
    "full_score": ("double", False, "0 to 1, of full_said"),
    "score": ("double", False, "0 to 1, of said"),
    "full_log2_p": ("double", False, "log2 P(first answer), teacher-forced, with the plain model's cache"),
    "log2_p": ("double", False, "the same with the replaced one"),
    "stream_bytes": ("int64", False, "bytes of all streams of the replaced layers"),
    "held_bits": ("double", False, "8 stream_bytes / numbers of these layers' coded tokens"),
    "state_bytes": COLUMNS["state_bytes"],
    "kept": ("double", False, "tokens left / tokens coded, mean over the KV heads of the replaced layers"),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One item as a task carries it. item: None for a generated one, made by (task, number, tokens, seed) where it is asked."""

    task: str
    number: int
    origin: str
    tokens: int | None
    seed: int | None
    item: questions.Item | None


def read(names: Sequence[str], count: int, tokens: int, seed: int) -> list[Asked]:
    """What --tasks names: generated kinds ("generated": all of them), `count` items of each, and files, of which the first `count` (0: all).

    ValueError in one sentence for what is none of these.
    """
    found: list[Asked] = []
    for name in dict.fromkeys(names):
        kinds = questions.KINDS if name == "generated" else (name,) if name in questions.KINDS else ()
        for kind in kinds:
            found += [Asked(kind, i, "generated", tokens, seed, None) for i in range(count or 10)]
        if kinds:
            continue
        if not Path(name).is_file():
            raise ValueError(
                f"tasks: no file {name!r} and no task of that name; there are generated, {', '.join(questions.KINDS)}"
            )
        try:
            items, digest = questions.read(name)
        except OSError as problem:
            raise ValueError(f"tasks: {name} cannot be read: {problem.strerror}") from None
        found += [Asked(one.task, i, digest, None, None, one) for i, one in enumerate(items[: count or None])]
    if len({(a.origin, a.task, a.number) for a in found}) < len(found):
        raise ValueError("tasks: expected files that differ, two are equal")
    return found


def plan(
    one: Source,
    model: str,
    codecs: Sequence[Codec | FittedCodec],
    layers: Sequence[int] | None,
    split: Split,
    asked: Sequence[Asked],
    chunks: Sequence[int | None] = (None,),
) -> list[Task]:
    """One task for each item, prefill and codec on `model` (a name, path or hub id), item by item. ValueError as on_model.plan."""
    refuse_chunks(codecs, chunks)
    indices = tuple(one.layers) if layers is None else tuple(layers)
    tasks = []
    for each in asked:
        about = {
            "task": each.task, "origin": each.origin, "item": each.number, "item_seed": each.seed, "most_tokens": each.tokens,
            "text": each.task, "cache": "",  # what timings.parquet has
        }  # fmt: skip
        for chunk in chunks:
            for codec in codecs:
                key = task_key(one, codec, indices, split)
                own = {
                    n: key[n]
                    for n in ("model", "codec", "parameters", "state", "calibration", "bits", "seed", "dtype", "layers")
                }
                tasks.append(
                    Task(
                        {**own, **about, "prefill": chunk},
                        ask,
                        (model, each, indices, carried(codec, indices), split.dtype, chunk),
                        versions.of_codec(codec, ask),
                    )
                )
    return tasks


@functools.lru_cache(maxsize=1)  # tasks come item by item
def _posed(model: str, each: Asked) -> tuple[questions.Posed, Any, questions.Said]:
    """(the question, its captured prefix, what the full cache makes of it)."""
    from kvtheory.models.capture import capture

    runner = _runner(model)
    item = each.item
    if item is None:
        assert each.tokens is not None and each.seed is not None
        item = questions.generate(each.task, each.number, runner.tokenizer, tokens=each.tokens, seed=each.seed)
    posed = questions.pose(runner, item)
    return posed, capture(runner.model, None, posed.prompt[: posed.prefix]), questions.answer(runner, posed, None)


def ask(
    model: str, each: Asked, layers: tuple[int, ...], codec: Codec | FittedCodec, dtype: str, chunk: int | None
) -> list[Row]:
    """Encode, decode, replace, answer: one row."""
    runner = _runner(model)
    posed, captured, full = _posed(model, each)
    if chunk is None:
        replaced = replace(codec, [as_dtype(layer, dtype) for layer in captured if layer.index in layers])
    else:
        replaced = prefill(runner, codec, posed.prompt[: posed.prefix], layers, dtype, chunk)
    own = questions.answer(runner, posed, replaced.decoded)
    return [
        {
            "metric": posed.item.metric,
            "form": posed.form,
            "tokens": len(posed.prompt),
            "answer": posed.item.answers[0],
            "full_said": full.text,
            "said": own.text,
            "full_score": full.score,
            "score": own.score,
            "full_log2_p": full.log2_p,
            "log2_p": own.log2_p,
            "stream_bytes": replaced.stream_bytes,
            "held_bits": 8 * replaced.stream_bytes / replaced.numbers,
            "state_bytes": codec.state_bytes,
            "kept": replaced.kept,
        }
    ]


def write(folder: Path, rows: Sequence[Row]) -> Path:
    """tasks.parquet in `folder`."""
    path = folder / "tasks.parquet"
    parquet(path, TASK_COLUMNS, rows)
    return path


@dataclass(frozen=True)
class Answered:
    """A codec on one task (seeds averaged within an item). solved: items that the full cache answers with score 1; kept_right: the codec's mean score
    over these, its interval exact where scores are 0 or 1 (None where they are not, or nothing is solved).

    score, full_score: means over all items, as data sets report them. loss_bits: mean over all items of log2 P(first answer) with the full cache
    less that with the codec's, t interval.
    """

    model: str
    task: str
    codec: str
    label: str
    bits: float | None
    held_bits: float
    items: int
    solved: int
    kept_right: float | None
    interval: Interval | None
    score: float
    full_score: float
    loss_bits: Interval | None


def summarise(rows: Sequence[Row], level: float = 0.95) -> list[Answered]:
    """An Answered for each model, task, codec and prefill, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        name = (row["model"], row["task"], row["origin"], row["codec"], without_seed(row), row["state"], row["prefill"])
        groups.setdefault(name, []).append(row)
    said = labels([name[3:6] for name in groups])
    found = []
    for (name, group), label in zip(groups.items(), said, strict=True):
        items: dict[int, list[Row]] = {}
        for row in group:
            items.setdefault(row["item"], []).append(row)

        def mean(column: str, items: dict[int, list[Row]] = items) -> np.ndarray[Any, Any]:
            return np.array([np.mean([row[column] for row in own]) for own in items.values()])

        score, full = mean("score"), mean("full_score")
        own = score[full == 1]
        whole = len(own) > 0 and bool(np.isin(own, (0, 1)).all())
        lost = mean("full_log2_p") - mean("log2_p")
        found.append(
            Answered(
                model=name[0],
                task=name[1],
                codec=name[3],
                label=with_prefill(label, name[6]),
                bits=group[0]["bits"],
                held_bits=float(np.mean([row["held_bits"] for row in group])),
                items=len(items),
                solved=len(own),
                kept_right=float(own.mean()) if len(own) else None,
                interval=proportion_interval(int(own.sum()), len(own), level) if whole else None,
                score=float(score.mean()),
                full_score=float(full.mean()),
                loss_bits=mean_interval(lost, level) if len(lost) > 1 else None,
            )
        )
    return found
