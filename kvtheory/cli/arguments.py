"""What the options of `kvtheory compare` mean: numbers, layers, texts, the baseline, what a folder stands for."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtheory.cli.compare import Dtype
    from kvtheory.cli.verify import Budget
    from reference.codec import Codec
    from reference.compare import FittedCodec, Source, Spec, Summary

__all__ = ["Text", "among", "bits", "chunks", "cores", "have", "label", "layers", "made", "same", "shares"]


def words(text: str) -> list[str]:
    return list(dict.fromkeys(word for word in (part.strip() for part in text.split(",")) if word))


def bits(text: str, name: str = "bits") -> list[float]:
    found: list[float] = []
    for word in words(text):
        try:
            number = float(word)
        except ValueError:
            raise ValueError(f"{name}: expected numbers, got {word!r}") from None
        if not 0 < number < 1000:
            raise ValueError(f"{name}: expected numbers above 0, got {word}")
        found.append(int(number) if number.is_integer() else number)
    return found


def shares(text: str) -> list[float]:
    found = [float(number) for number in bits(text, "at-kept")]
    if any(share > 1 for share in found):
        raise ValueError(f"at-kept: expected shares of the tokens, at most 1, got {max(found):g}")
    return found


def chunks(text: str, chunk: int) -> list[int | None]:
    """Tokens in a chunk of each kind of prefill that is named; None: plain."""
    kinds: dict[str, list[int | None]] = {"plain": [None], "compressed": [chunk], "both": [None, chunk]}
    if text not in kinds:
        raise ValueError(f"prefill: expected one of {', '.join(kinds)}, got {text!r}")
    return kinds[text]


def layers(text: str) -> list[int]:
    found: list[int] = []
    for word in words(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None:
            raise ValueError(f"layers: expected indices as 2,18 or 0-9, got {word!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"layers: expected a range from low to high, got {word!r}")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def among(baseline: str, specs: Sequence[Spec]) -> int:
    """The number of the spec that is the baseline; ValueError for one that is not there."""
    from reference.compare import specs as read

    found = read(baseline)
    if len(found) != 1:
        raise ValueError(f"baseline: expected one codec, got {baseline!r}")
    for i, spec in enumerate(specs):
        if spec.name == found[0].name and spec.curve() == found[0].curve():
            return i
    raise ValueError(f"baseline: {found[0]} is not among the codecs: {', '.join(map(str, specs))}")


def made(
    number: int,
    specs: Sequence[Spec],
    codecs: Sequence[Codec | FittedCodec],
    rates: Sequence[float],
    seeds: Sequence[int],
) -> Codec | FittedCodec:
    """A codec of a spec, as it was made: `fit` may have chosen a parameter."""
    from reference.compare.specs import options_at

    return codecs[sum(len(options_at(spec, rates, seeds)) for spec in specs[:number])]


def label(summary: Summary, codec: Codec | FittedCodec | None) -> str | None:
    """What a summary calls the curve of a codec."""
    from reference.compare.equal_rate import same_curve
    from reference.compare.specs import named

    if codec is None:
        return None
    return next(
        p.label for p in summary.points
        if p.codec == codec.codec_id and p.law == "prompt" and same_curve(p.parameters, named(codec))
    )  # fmt: skip


def have(sources: Sequence[Source], wanted: Sequence[int] | None) -> None:
    """ValueError for a layer that a source has not."""
    for one in sources:
        for index in wanted or ():
            if index not in one.layers:
                raise ValueError(
                    f"layers: {one.label} has no layer {index}; there are {', '.join(map(str, one.layers))}"
                )


class Text:
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


def same(
    budget: Budget, dtype: Dtype, seed: int, models: list[str], words: Sequence[Text], caches: list[str]
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


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
