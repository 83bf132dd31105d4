"""What mutants are made of: the golden vectors, and what they lack (other kinds, Haar rotations, pipelines of fitted codecs).

Cache files (`kvtheory.Cache.load`) are seeds of another kind, see `cache_files`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import reference
from kvtheory.layer import Layer, Rope
from reference.codec import Codec
from tests.fuzz.messages import Message, parse, recorded
from tests.vectors import make

#: codecs without seeds of their own: their ids and parameters are in mutants of others
WITHOUT = {
    "PredictiveDelta": "floats decide its last place: no golden vector; tests/reference/test_predictive_delta.py and test_fitted.py mutate its streams",
    "TokenReplay": "decodes with a model, which no golden vector holds",
    "PrefixStore": "decodes to many caches: tests/reference/test_prefix_store.py mutates streams of its own",
}


@dataclass(frozen=True, eq=False)
class Seed:
    """An honest stream with its state, and the codec that reads it."""

    name: str
    codec: Codec
    data: bytes
    state: bytes
    message: Message
    state_message: Message | None

    @classmethod
    def of(cls, name: str, codec: Codec, data: bytes) -> Seed:
        state = codec.state
        message = parse(data)
        recorded(message, data, lambda: codec.decode(data))
        # parameters are read where the codec is made
        recorded_parameters(message, data)
        return cls(name, codec, data, state, message, parsed_state(state) if state else None)


def recorded_parameters(message: Message, data: bytes) -> None:
    fields = [leaf.fields for leaf in message.leaves()]
    recorded(message, data, lambda: reference.inspect(data))
    for leaf, own in zip(message.leaves(), fields):
        leaf.fields = tuple(sorted({*leaf.fields, *own}))


def parsed_state(state: bytes) -> Message:
    message = parse(state)
    recorded(message, state, lambda: reference.load(state))
    for group in message.groups:
        group.children = [
            parsed_state(child.join()) if isinstance(child, Message) else child for child in group.children
        ]
    return message  # fmt: skip


def _inputs(case: dict[str, Any]) -> list[Layer]:
    return [make.input_layer(one) for one in case["inputs"]]


def load() -> list[Seed]:
    """All seeds; the same list in each process."""
    seeds = []
    piped: set[str] = set()
    for path in sorted((make.HERE / "valid").glob("*.json")):
        case = json.loads(path.read_text())
        data, state = bytes.fromhex(case["stream"]), bytes.fromhex(case.get("state", ""))
        header, _ = reference.stream.read(data)
        codec = (
            reference.load(state)
            if state
            else reference.codec.from_parameters(reference.codec.class_of(header), header)
        )
        seeds.append(Seed.of(path.stem, codec, data))
        layers = _inputs(case)
        # one pipeline for each fitted codec, and one stream of several layers
        if codec.codec_id not in piped and layers[0].tokens and codec.codec_id != "Pipeline":
            piped.add(codec.codec_id)
            pipeline = reference.Pipeline([reference.Full(), codec])
            whole = layers if codec.scope == "cache" else layers[0]
            seeds.append(Seed.of(f"pipeline-{path.stem}", pipeline, pipeline.encode(whole)))
            if codec.scope == "layer":
                several = reference.encode_cache(codec, layers * 2)
                seeds.append(Seed.of(f"layers-{path.stem}", codec, several))
    # what golden vectors cannot have, as its bytes depend on the machine, or do not have
    for name, codec, layer in (
        ("turboquant-haar", reference.TurboQuant(3, rotation="haar"), make.layer(300, 1, 2, 8, 4)),
        ("turboquant-prod-haar", reference.TurboQuant(2, kind="prod", rotation="haar"), make.layer(300, 1, 2, 8, 4)),
        (
            "merge-reduce-random",
            reference.MergeReduce(8, "random", sinks=1, window=1, block=4),
            make.layer(304, 2, 14, 4, 3),
        ),
        (
            "pipeline-merge-reduce",
            reference.Pipeline(
                [reference.MergeReduce(8, "random", sinks=1, window=1, block=4), reference.TurboQuant(2)]
            ),
            make.layer(304, 2, 14, 4, 3),
        ),
    ):
        seeds.append(Seed.of(name, codec, codec.encode(layer)))
    klt = next(seed.codec for seed in seeds if seed.name == "metric-klt-5-escapes")
    seeds.append(
        Seed.of("metric-klt-certain", quiet := silent(klt, block=1 << 9), quiet.encode(make.layer(302, 2, 5, 4, 3)))
    )
    return seeds  # fmt: skip


def silent(codec: Codec, bare: bool = False, block: int = 1 << 16) -> Codec:
    """A MetricKLT that spends no bits on a token, in blocks of so many: no coefficient is coded, or (bare) its bases have no columns."""
    assert isinstance(codec, reference.MetricKLT)
    layers = []
    for one in codec.layers:
        units = []
        for unit in one.coder.units:  # type: ignore[attr-defined]
            basis, keep = unit.basis, 0 if bare else unit.basis.size
            units.append(
                replace(
                    unit,
                    basis=replace(basis, matrix=basis.matrix[:, :keep]),
                    weights=unit.weights[:keep],
                    tables=np.full_like(unit.tables[:, :keep], 255),
                    shifts=np.zeros_like(unit.shifts[:, :keep]),
                )
            )
        layers.append(replace(one, coder=replace(one.coder, units=tuple(units), block=block)))  # type: ignore[type-var]
    return replace(codec, layers=tuple(layers))  # fmt: skip


def cache_files() -> list[bytes]:
    """Small files of `Cache.save`."""
    caches = [
        kvtheory.Cache([make.layer(310, 1, 2, 2, 2)]),
        kvtheory.Cache(
            [make.layer(312, 2, 3, 4, 2, "bfloat16", index=1, rope=Rope([1.0, 0.5]), extras={"inputs": make.numbers(1, 3, 4)})],
            tokens=[1, 2, 3], surprisal_bits=[0.5, 1.0, 2.0], meta={"model": "none"},
        ),
    ]  # fmt: skip
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for i, cache in enumerate(caches):
            cache.save(Path(folder) / str(i))
            out.append((Path(folder) / str(i)).read_bytes())
    return out
