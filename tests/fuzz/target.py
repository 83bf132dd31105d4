"""Coverage-guided fuzzing of all decoders: `make fuzz T=60`, or `python -m tests.fuzz.target -max_total_time=60 [CORPUS]`.

An input is a sealed stream, read with the state that its digest names among those of the golden vectors; or a sealed state, and if it
loads, the vectors of its codec are decoded with it. The mutator works behind the checksum: libFuzzer's own on the body, or the engine of
mutations.py, and the result is sealed. Other arguments are libFuzzer's; without a CORPUS the vectors are the corpus, and what is found is
forgotten. Anything but CorruptStream, StateMismatch or a result within a second of the processor's time ends the run with the input in
a file crash-*.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["reference"]):
    import reference
    from reference import CorruptStream, StateMismatch, stream
    from tests.fuzz import seeds as seeds_
    from tests.fuzz.mutations import Mutator
    from tests.vectors import make

    #: golden vectors of one codec that a changed state of it is tried on
    TRIED = 3
    LARGEST = 1 << 16
    SECONDS = 1.0

    EVERY = seeds_.load()
MUTATOR = Mutator(EVERY)
CODECS = {stream.digest(seed.state): seed.codec for seed in EVERY}


def corpus(folder: Path) -> None:
    """Streams and states of all seeds, and the streams that must be refused."""
    inputs = [*(seed.data for seed in EVERY), *(seed.state for seed in EVERY if seed.state)]
    refused = sorted((make.HERE / "invalid").glob("*.json"))
    inputs += [bytes.fromhex(json.loads(path.read_text())["stream"]) for path in refused]
    for i, data in enumerate(inputs):
        (folder / str(i)).write_bytes(data)


def read(data: bytes) -> None:
    """Decode a stream or load a state, whatever it is."""
    header, _ = stream.read(data)
    reference.inspect(data)
    if header.kind is not stream.Kind.STATE:
        codec = CODECS.get(header.digest) if header.digest else None
        if codec is not None:
            codec.decode(data)
        else:
            reference.decode(data)
        return
    codec = reference.load(data)
    same = [seed for seed in EVERY if seed.codec.codec_id == codec.codec_id and seed.state]
    for seed in same[:TRIED]:
        message = seed.message.copy()
        message.digest = codec._digest
        try:
            codec.decode(message.join())
        except (CorruptStream, StateMismatch):
            continue


def test_one_input(data: bytes) -> None:
    began = time.process_time()
    try:
        read(data)
    except CorruptStream as problem:
        assert 0 <= problem.offset <= len(data), problem
    except StateMismatch:
        pass
    took = time.process_time() - began
    assert took < SECONDS, f"took {took:.2f} s"


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Nine in ten sealed."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return atheris.Mutate(data, most)
    if rng.random() < 0.5 or len(data) < 9:
        return MUTATOR.of(rng, data)[:most]
    return stream.seal(atheris.Mutate(data[4:-4], max(1, most - 8)))


def main(arguments: list[str]) -> Any:
    options = {"-timeout": "20", "-rss_limit_mb": "4096", "-max_len": str(LARGEST), "-len_control": "0"}
    given = {argument.split("=")[0] for argument in arguments}
    own = [f"{name}={value}" for name, value in options.items() if name not in given]
    with tempfile.TemporaryDirectory() as scratch:
        if all(argument.startswith("-") for argument in arguments):
            corpus(Path(scratch))
            own.append(scratch)
        atheris.Setup([sys.argv[0], *arguments, *own], test_one_input, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
