"""The second kind of task of `kvtheory compare`: a codec on all layers at once, judged by the model's own next tokens.

The model reads the prefix, its cache is replaced by the decoded one in every chosen layer, and the text goes on, teacher-forced
(`kvtheory.models.Runner`). Other than the attention error, which isolates the compressed part, this is the model as it would run:
each token also sees the exact tokens between the prefix and itself, and errors go through all later layers.

With `chunk` the prefill itself attends to compressed past (`Runner.compressed_prefill`), and what is left of it after its last chunk is what the
text goes on from.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from kvtheory.statistics import Interval, RatioBootstrap, bootstrap_ratios
from kvtheory.sweep import Task
from reference.codec import Codec
from reference.compare import versions
from reference.compare.equal_rate import Curve, EqualRate, at_rates, baseline_of
from reference.compare.fitted import FittedCodec
from reference.compare.sources import Source, Split, as_dtype, divide, open_cache
from reference.compare.summary import labels, place, without_seed
from reference.compare.tables import COLUMNS, parquet
from reference.compare.tasks import Coded, carried, kept_shares, task_key, through_bytes

if TYPE_CHECKING:
    from kvtheory.models.runner import Runner

Row = dict[str, Any]

#: model.parquet: name -> (type of pyarrow, may be null, meaning)
MODEL_COLUMNS: dict[str, tuple[str, bool, str]] = {
    **{n: COLUMNS[n] for n in ("model", "text", "cache", "codec", "parameters", "state", "calibration", "bits", "seed", "dtype", "prefix", "held")},
    "layers": ("string", False, "indices of the layers whose cache is replaced"),
    "segment": ("int32", False, "segment of consecutive positions behind the prefix"),
    "positions": ("int32", False, "positions in the segment"),
    "kl_bits": ("double", False, "sum over the positions of KL(plain || replaced) of the next-token laws, bits"),
    "agree": ("int32", False, "positions at which both rank the same token first"),
    "predicted": ("int32", False, "positions whose next token is in the text"),
    "plain_surprisal_bits": ("double", False, "sum over these of -log2 P(next token) of the plain model"),
    "surprisal_bits": ("double", False, "the same of the model on the replaced cache"),
    "stream_bytes": ("int64", False, "bytes of all streams of the replaced layers"),
    "decode_flops": ("int64", True, "floating-point operations of decoding all of them; null where the codec does not say"),
    "held_bits": ("double", False, "8 stream_bytes / numbers of these layers' prefix"),
    "state_bytes": COLUMNS["state_bytes"],
    "kept": ("double", False, "tokens left / tokens coded, mean over the KV heads of the replaced layers"),
    "prefill": ("int32", True, "tokens in a chunk of a prefill that attends to compressed past; null: prefill by the plain model"),
}  # fmt: skip


def plan(
    one: Source,
    model: str,
    codecs: Sequence[Codec | FittedCodec],
    layers: Sequence[int] | None,
    split: Split,
    chunks: Sequence[int | None] = (None,),
) -> list[Task]:
    """One task for each codec and prefill on a captured source of `model` (a name, path or hub id).

    chunks: tokens in a chunk of a compressed prefill; None: prefill by the plain model. ValueError for codecs that code layers together in a
    compressed prefill.
    """
    refuse_chunks(codecs, chunks)
    indices = tuple(one.layers) if layers is None else tuple(layers)
    numbers = {i: one.layers[i] for i in indices}
    return [
        Task(
            {**task_key(one, codec, indices, split), "prefill": chunk},
            evaluate,
            (one.path, one.digest, model, numbers, carried(codec, indices), split, chunk),
            versions.of_codec(codec, evaluate),
        )
        for chunk in chunks
        for codec in codecs
    ]


def refuse_chunks(codecs: Sequence[Codec | FittedCodec], chunks: Sequence[int | None]) -> None:
    together = [codec.codec_id for codec in codecs if codec.scope != "layer"]
    if together and any(chunk is not None for chunk in chunks):
        raise ValueError(f"prefill: {together[0]} codes all layers together, which a compressed prefill has one by one")


@functools.lru_cache(maxsize=1)
def _runner(model: str) -> Any:
    from kvtheory import models
    from kvtheory.models.runner import Runner

    tokenizer, loaded = models.load(model)
    return Runner(loaded, tokenizer)


def evaluate(
    path: str,
    digest: str,
    model: str,
    layers: dict[int, int],
    codec: Codec | FittedCodec,
    split: Split,
    chunk: int | None = None,
) -> list[Row]:
    """Encode, decode, replace, run: a row for each segment of the positions behind the prefix."""
    cache = open_cache(path)
    assert cache.tokens is not None
    runner = _runner(model)
    tokens = cache.tokens[: split.prefix + split.held]
    if chunk is None:
        replaced = replace(codec, [divide(cache[number], split)[0] for number in layers.values()])
    else:
        replaced = prefill(runner, codec, tokens[: split.prefix], layers, split.dtype, chunk)
    seen = runner.evaluate(tokens, split.prefix, replaced.decoded)
    edges = np.arange(split.segments + 1) * len(seen.kl_bits) // split.segments
    rows = []
    for segment in range(split.segments):
        own = slice(edges[segment], edges[segment + 1])
        rows.append(
            {
                "segment": segment,
                "positions": len(seen.kl_bits[own]),
                # rounding may leave a law compared with itself a little below 0
                "kl_bits": max(0.0, float(seen.kl_bits[own].sum())),
                "agree": int(seen.agrees[own].sum()),
                "predicted": len(seen.surprisal_bits[own]),
                "plain_surprisal_bits": float(seen.plain_surprisal_bits[own].sum()),
                "surprisal_bits": float(seen.surprisal_bits[own].sum()),
                "stream_bytes": replaced.stream_bytes,
                "decode_flops": replaced.decode_flops,
                "held_bits": 8 * replaced.stream_bytes / replaced.numbers,
                "state_bytes": codec.state_bytes,
                "kept": replaced.kept,
            }
        )
    return rows


@dataclass(frozen=True)
class Replacement:
    """What stands for a prefix: `decoded` by layer, the bytes of all streams, the numbers that they code, the share of tokens that is left.

    decode_flops: of all streams; None where the codec does not say.
    """

    decoded: dict[int, Decoded]
    stream_bytes: int
    numbers: int
    kept: float
    decode_flops: int | None = None


def replace(codec: Codec | FittedCodec, coded: Sequence[Layer]) -> Replacement:
    """Layers of a plain prefill, through bytes."""
    found = through_bytes(codec, coded)
    total = found[0].stream_bytes if codec.scope == "cache" else sum(one.stream_bytes for one in found)
    return Replacement(
        {index_of(layer): one.decoded for layer, one in zip(coded, found)},
        total,
        sum(layer.keys.size + layer.values.size for layer in coded),
        float(np.mean([kept_shares(one.decoded, layer.tokens)[0] for one, layer in zip(found, coded)])),
        _flops(found[:1] if codec.scope == "cache" else found),
    )


def _flops(coded: Sequence[Coded]) -> int | None:
    own = [one.decode_flops for one in coded if one.decode_flops is not None]
    return sum(own) if len(own) == len(coded) else None


def prefill(
    runner: Runner,
    codec: Codec | FittedCodec,
    tokens: NDArray[np.int64],
    layers: Collection[int],
    dtype: str,
    chunk: int,
) -> Replacement:
    """A prefill in chunks that attends to what the codec's bytes hold of the chunks before; bytes and shares are of the last."""
    last: dict[int, tuple[Coded, Layer]] = {}

    def compress(index: int, layer: Layer) -> Decoded | None:
        if index not in layers:
            return None
        layer = as_dtype(layer, dtype)
        (one,) = through_bytes(codec, [layer])
        last[index] = one, layer
        return one.decoded

    decoded = runner.compressed_prefill(tokens, chunk, compress)
    return Replacement(
        dict(enumerate(decoded)),
        sum(one.stream_bytes for one, _ in last.values()),
        sum(layer.keys.size + layer.values.size for _, layer in last.values()),
        float(np.mean([kept_shares(one.decoded, layer.tokens)[0] for one, layer in last.values()])),
        _flops([one for one, _ in last.values()]),
    )


def index_of(layer: Layer) -> int:
    assert layer.index is not None
    return layer.index


def write(folder: Path, rows: Sequence[Row]) -> Path:
    """model.parquet in `folder`."""
    path = folder / "model.parquet"
    parquet(path, MODEL_COLUMNS, rows)
    return path


@dataclass(frozen=True)
class OnModel:
    """A codec on the whole model, all seeds pooled. kl_bits: mean over positions, with its bootstrap interval over segments."""

    codec: str
    label: str
    parameters: dict[str, Any]
    bits: float | None
    held_bits: float
    amortised_bits: float
    kl_bits: Interval
    agreement: float
    perplexity: float
    plain_perplexity: float
    keep: int | float | None = None
    kept: float | None = None
    prefill: int | None = None


@dataclass(frozen=True)
class OnModels:
    """All points on one source. `kl`, `surprisal`: bootstraps of the mean KL and the mean surprisal (bits), in the order of `points`."""

    points: tuple[OnModel, ...]
    kl: RatioBootstrap
    surprisal: RatioBootstrap

    def at_equal_kept(self, shares: Sequence[float], tokens: int, baseline: str | None = None) -> list[EqualRate]:
        """`reference.compare.at_equal_kept` of the same two measures; tokens: of the prefix."""
        return [one for axis in ("budget", "kept") for one in self.at_equal_rate(shares, baseline, axis, tokens)]

    def at_equal_rate(
        self, target_bits: Sequence[float], baseline: str | None = None, axis: str = "bits", tokens: int = 1
    ) -> list[EqualRate]:
        """`reference.compare.at_equal_rate` of the KL divergence and of the perplexity.

        Both are interpolated in log2: that of the perplexity is the mean surprisal in bits. Perplexities are of the text, not above the plain
        model's.
        """
        found: list[EqualRate] = []
        measures = (
            ("kl", self.kl.log_estimates / np.log(2), self.kl.log_replicates / np.log(2)),
            ("perplexity", np.exp(self.surprisal.log_estimates), np.exp(self.surprisal.log_replicates)),
        )
        for measure, logs, replicates in measures:
            curves = self.curves(logs, replicates, axis, tokens)
            label = (
                None if baseline is None else baseline_of(baseline, [(c.label, c.codec, c.parameters) for c in curves])
            )
            found += at_rates(curves, target_bits, measure, self.kl.segments, self.kl.level, label)
        return found

    def curves(self, logs: NDArray[np.float64], replicates: NDArray[np.float64], axis: str, tokens: int) -> list[Curve]:
        """Curves of a measure: its log2 of each point, and the replicates of these; axis and tokens as `place` of reference.compare."""
        groups: dict[str, list[int]] = {}
        for i, point in enumerate(self.points):
            groups.setdefault(point.label, []).append(i)
        found = []
        for label, group in groups.items():
            at = {i: place(self.points[i], axis, tokens) for i in group}
            own = sorted((i for i in group if at[i] is not None), key=lambda i: at[i] or 0.0)
            if not own:
                continue
            points = [self.points[i] for i in own]
            found.append(
                Curve(
                    label, points[0].codec, points[0].parameters, [at[i] or 0.0 for i in own], [p.bits for p in points],
                    [p.amortised_bits for p in points], logs[own], replicates[own], axis,
                )
            )  # fmt: skip
        return found


def summarise(rows: Sequence[Row], level: float = 0.95, seed: int = 0) -> dict[tuple[str, int], OnModels]:
    """(cache, prefix) -> its points, in the order of the rows. The same segments are drawn for all codecs."""
    sources: dict[tuple[str, int], dict[tuple[str, str, str, int | None], list[Row]]] = {}
    for row in rows:
        name = (row["codec"], without_seed(row), row["state"], row.get("prefill"))
        sources.setdefault((row["cache"], row["prefix"]), {}).setdefault(name, []).append(row)
    found = {}
    for source, points in sources.items():
        segments = 1 + max(row["segment"] for group in points.values() for row in group)
        sums = np.zeros((4, len(points), 1, segments))
        for i, group in enumerate(points.values()):
            for row in group:
                sums[:, i, 0, row["segment"]] += (
                    row["kl_bits"],
                    row["positions"],
                    row["surprisal_bits"],
                    row["predicted"],
                )
        kl = bootstrap_ratios(sums[0], sums[1], level, seed=seed)
        surprisal = bootstrap_ratios(sums[2], sums[3], level, seed=seed)

        def mean(group: list[Row], over: str, under: str) -> float:
            return float(sum(r[over] for r in group) / sum(r[under] for r in group))

        every = []
        said = labels([(codec, parameters, state) for codec, parameters, state, _ in points])
        for i, (name, label, group) in enumerate(zip(points, said, points.values())):
            held = float(np.mean([r["held_bits"] for r in group]))
            numbers = 8 * group[0]["stream_bytes"] / group[0]["held_bits"]
            every.append(
                OnModel(
                    codec=name[0],
                    label=with_prefill(label, name[3]),
                    parameters=json.loads(name[1]),
                    bits=group[0]["bits"],
                    held_bits=held,
                    amortised_bits=held + 8 * group[0]["state_bytes"] / numbers,
                    kl_bits=kl.interval(i),
                    agreement=mean(group, "agree", "positions"),
                    perplexity=2 ** mean(group, "surprisal_bits", "predicted"),
                    plain_perplexity=2 ** mean(group, "plain_surprisal_bits", "predicted"),
                    keep=json.loads(name[1]).get("keep"),
                    kept=float(np.mean([r["kept"] for r in group])) if "kept" in group[0] else None,
                    prefill=name[3],
                )
            )
        found[source] = OnModels(tuple(every), kl, surprisal)
    return found


def with_prefill(label: str, chunk: int | None) -> str:
    return label if chunk is None else f"{label}, prefill by {chunk}"


def picture(point: OnModel) -> dict[str, Any]:
    """The data of one point of figure "pareto"."""
    return {
        "label": point.label,
        "bits": point.bits,
        "keep": point.keep,
        "kept": point.kept,
        "prefill": point.prefill,
        "held_bits": point.held_bits,
        "error": point.kl_bits.estimate,
        "low": point.kl_bits.low,
        "high": point.kl_bits.high,
        "agreement": point.agreement,
        "perplexity": point.perplexity,
        "plain_perplexity": point.plain_perplexity,
        "by_layer": [],
    }
