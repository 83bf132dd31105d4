"""The third kind of task of `kvtheory compare`: passkey retrieval (kvtheory.models.passkey), one task a codec and sample.

The cache of the prompt up to the token before the first digit (question "seen"), or of the text before the question ("unseen"), is
coded and replaced; the key is then scored teacher-forced. Every codec gets the same samples, so differences are paired over samples; the full
cache on the same sample is the control.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtheory.cli.on_model import _runner, prefill, refuse_chunks, replace, with_prefill
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

#: passkey.parquet: name -> (type of pyarrow, may be null, meaning)
PASSKEY_COLUMNS: dict[str, tuple[str, bool, str]] = {
    **{n: COLUMNS[n] for n in ("model", "codec", "parameters", "state", "calibration", "bits", "seed", "dtype")},
    "layers": ("string", False, "indices of the layers whose cache is replaced"),
    "prefill": ("int32", True, "tokens in a chunk of a prefill that attends to compressed past; null: prefill by the plain model"),
    "question": ("string", False, "seen: among the tokens that are coded; unseen: behind them"),
    "most_tokens": ("int32", False, "of a prompt"),
    "sample": ("int32", False, "number of the sample, the same prompt for every codec"),
    "key_seed": ("int64", False, "of the samples"),
    "form": ("string", False, "chat or plain"),
    "key": ("string", False, "the five digits"),
    "depth": ("double", False, "0: said before all filler, 1: behind it"),
    "tokens": ("int32", False, "of the prompt"),
    "coded": ("int32", False, "of them with the cache replaced"),
    "full_right": ("bool", False, "all digits ranked first with the plain model's cache"),
    "right": ("bool", False, "all digits ranked first"),
    "full_log2_p": ("double", False, "log2 P(key) with the plain model's cache"),
    "log2_p": ("double", False, "log2 P(key)"),
    "stream_bytes": ("int64", False, "bytes of all streams of the replaced layers"),
    "held_bits": ("double", False, "8 stream_bytes / numbers of these layers' coded tokens"),
    "state_bytes": COLUMNS["state_bytes"],
    "kept": ("double", False, "tokens left / tokens coded, mean over the KV heads of the replaced layers"),
}  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """count samples of at most `tokens` tokens by `seed`; question: "seen" or "unseen"."""

    count: int
    tokens: int
    seed: int
    question: str


def plan(
    one: Source,
    model: str,
    codecs: Sequence[Codec | FittedCodec],
    layers: Sequence[int] | None,
    split: Split,
    samples: Samples,
    chunks: Sequence[int | None] = (None,),
) -> list[Task]:
    """One task for each sample, prefill and codec on `model` (a name, path or hub id), sample by sample. ValueError as on_model.plan."""
    refuse_chunks(codecs, chunks)
    indices = tuple(one.layers) if layers is None else tuple(layers)
    about = {"question": samples.question, "most_tokens": samples.tokens, "key_seed": samples.seed}
    tasks = []
    for number in range(samples.count):
        for chunk in chunks:
            for codec in codecs:
                key = task_key(one, codec, indices, split)
                own = {
                    n: key[n]
                    for n in ("model", "codec", "parameters", "state", "calibration", "bits", "seed", "dtype", "layers")
                }
                tasks.append(
                    Task(
                        # text and cache are what timings.parquet has
                        {**own, **about, "text": "passkey", "cache": "", "sample": number, "prefill": chunk},
                        find,
                        (model, number, samples, indices, carried(codec, indices), split.dtype, chunk),
                        versions.of_codec(codec, find),
                    )
                )
    return tasks


@functools.lru_cache(maxsize=1)  # tasks come sample by sample
def _asked(model: str, number: int, samples: Samples, form: str) -> tuple[Any, Any, tuple[bool, float]]:
    """(the sample, its captured prefix, what the full cache makes of it)."""
    from kvtheory.models import passkey
    from kvtheory.models.capture import capture

    runner = _runner(model)
    asked = passkey.ask(runner, number, tokens=samples.tokens, seed=samples.seed, question=samples.question, form=form)
    return asked, capture(runner.model, None, asked.fed[: asked.prefix]), passkey.score(runner, asked, None)


def find(
    model: str,
    number: int,
    samples: Samples,
    layers: tuple[int, ...],
    codec: Codec | FittedCodec,
    dtype: str,
    chunk: int | None,
) -> list[Row]:
    """Encode, decode, replace, score: one row."""
    from kvtheory.models import passkey

    runner = _runner(model)
    asked, captured, full = _asked(model, number, samples, "auto")
    if chunk is None:
        replaced = replace(codec, [as_dtype(layer, dtype) for layer in captured if layer.index in layers])
    else:
        replaced = prefill(runner, codec, asked.fed[: asked.prefix], layers, dtype, chunk)
    own = passkey.score(runner, asked, replaced.decoded)
    return [
        {
            "form": asked.form,
            "key": asked.key,
            "depth": asked.depth,
            "tokens": asked.tokens,
            "coded": asked.prefix,
            "full_right": full[0],
            "right": own[0],
            "full_log2_p": full[1],
            "log2_p": own[1],
            "stream_bytes": replaced.stream_bytes,
            "held_bits": 8 * replaced.stream_bytes / replaced.numbers,
            "state_bytes": codec.state_bytes,
            "kept": replaced.kept,
        }
    ]


def write(folder: Path, rows: Sequence[Row]) -> Path:
    """passkey.parquet in `folder`."""
    path = folder / "passkey.parquet"
    parquet(path, PASSKEY_COLUMNS, rows)
    return path


@dataclass(frozen=True)
class Found:
    """A codec on all samples (and seeds, averaged within a sample). accuracy: exact interval, None where seeds differ in what they find.

    loss_bits: mean over samples of log2 P(key) with the full cache less that with the codec's, t interval over samples.
    gain_bits: the same of log2 P(key) less the baseline's at the same `keep`, bits and prefill; None where there is no such.
    """

    model: str
    codec: str
    label: str
    bits: float | None
    keep: int | float | None
    kept: float
    held_bits: float
    prefill: int | None
    question: str
    samples: int
    right: float
    accuracy: Interval | None
    full_right: int
    log2_p: float
    full_log2_p: float
    loss_bits: Interval | None
    gain_bits: Interval | None


def summarise(
    rows: Sequence[Row], level: float = 0.95, baseline: tuple[str, dict[str, Any]] | None = None
) -> list[Found]:
    """A Found for each codec, prefill and model, in the order of the rows. baseline: codec and parameters of its curve."""
    from reference.compare.equal_rate import same_curve

    groups: dict[tuple[str, str, str, str, int | None, str], list[Row]] = {}
    for row in rows:
        name = (row["model"], row["codec"], without_seed(row), row["state"], row["prefill"], row["question"])
        groups.setdefault(name, []).append(row)
    said = labels([(codec, parameters, state) for _, codec, parameters, state, _, _ in groups])
    scores = {name: _by_sample(group, "log2_p") for name, group in groups.items()}
    found = []
    for (name, group), label in zip(groups.items(), said, strict=True):
        model, codec, parameters, _, chunk, question = name
        own = json.loads(parameters)
        right, full_right = _by_sample(group, "right"), _by_sample(group, "full_right")
        full = _by_sample(group, "full_log2_p")
        whole = bool(np.isin(list(right.values()), (0, 1)).all())
        base = None if baseline is None else next(
            (
                scores[other] for other in groups
                if other[0] == model and other[4:] == name[4:] and other[1] == baseline[0] and same_curve(json.loads(other[2]), baseline[1])
                and all(json.loads(other[2]).get(n) == own.get(n) for n in ("keep", "bits"))
            ),
            None,
        )  # fmt: skip
        found.append(
            Found(
                model=model,
                codec=codec,
                label=with_prefill(label, chunk),
                bits=group[0]["bits"],
                keep=own.get("keep"),
                kept=float(np.mean([r["kept"] for r in group])),
                held_bits=float(np.mean([r["held_bits"] for r in group])),
                prefill=chunk,
                question=question,
                samples=len(right),
                right=float(np.mean(list(right.values()))),
                accuracy=proportion_interval(int(sum(right.values())), len(right), level) if whole else None,
                full_right=int(sum(full_right.values())),
                log2_p=float(np.mean(list(scores[name].values()))),
                full_log2_p=float(np.mean(list(full.values()))),
                loss_bits=_difference(full, scores[name], level),
                gain_bits=None if base is None or base is scores[name] else _difference(scores[name], base, level),
            )
        )
    return found


def _by_sample(group: Sequence[Row], column: str) -> dict[int, float]:
    """Sample -> mean over seeds."""
    parts: dict[int, list[float]] = {}
    for row in group:
        parts.setdefault(row["sample"], []).append(float(row[column]))
    return {sample: float(np.mean(values)) for sample, values in parts.items()}


def _difference(one: dict[int, float], other: dict[int, float], level: float) -> Interval | None:
    """Of the mean difference over the samples of both; None for fewer than two."""
    common = sorted(set(one) & set(other))
    return mean_interval([one[s] - other[s] for s in common], level) if len(common) > 1 else None
