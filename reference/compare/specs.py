"""Codecs as a command names them: `TurboQuant(rotation=haar)`, `MetricKLT(coding=entropy|fixed, window=0)`.

    specs   chain {"," chain} | "all"             value   number | True | False | None | word | 'quoted' | "quoted" | "(" value {"," value} ")"
    chain   spec {">" spec}                       ">": one behind another, a Pipeline
    spec    name ["(" option {"," option} ")"]
    option  name "=" value {"|" value}            "|": each of them, as specs of their own

`none` is a word (a choice of that name), `None` is None. Nothing is evaluated. `all` is EVERY.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reference import parameters
from reference.codec import Codec, codec_class

__all__ = ["EVERY", "POINT", "Spec", "options_at", "specs"]

#: parameters that make the points of one curve: nominal bits or kept tokens, and draws of one codec
POINT = ("bits", "keep", "seed")

#: the systems that have a layer or a cache to code; TokenReplay and PredictiveDelta, which need a model beside it, are not compared here (docs/compare.md)
EVERY = (
    "Full, TurboQuant, TurboQuant(kind=prod), QJL, PolarQuant, KIVI, KVQuant, PALU, KVTC, AATC, AATC(weights=variance), "
    "MetricKLT, MetricKLT(coding=fixed), StreamingLLM(keep=.5|.25), SnapKV(keep=.5|.25), ScissorHands(keep=.5|.25), "
    "MergeReduce(keep=.5|.25), SnapKV(keep=.5) > TurboQuant"
)

_TOKEN = re.compile(r"""\s*(?:([(),=|>])|'([^']*)'|"([^"]*)"|([^\s(),=|>'"]+))""")
_WORDS: Mapping[str, Any] = {"True": True, "true": True, "False": False, "false": False, "None": None}


@dataclass(frozen=True)
class Spec:
    """A codec's name and constructor arguments; of "Pipeline" the only one is `stages`, Specs.

    A chain takes the rate for its last stage and the seed for all that draw, where these do not say their own.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def codec(self) -> type[Codec]:
        return codec_class(self.name)

    @property
    def fitted(self) -> bool:
        """Whether it is made by `fit` from calibration data; a chain, whether one of its stages is."""
        return hasattr(self.codec, "fit") or any(stage.fitted for stage in self.stages)

    @property
    def stages(self) -> tuple[Spec, ...]:
        """Of a chain; () of any other."""
        return tuple(self.options["stages"]) if self.name == "Pipeline" else ()

    def takes(self, name: str) -> bool:
        """Whether it has that argument and does not say it itself."""
        if self.stages:
            return any(stage.takes(name) for stage in (self.stages if name == "seed" else self.stages[-1:]))
        return name not in self.options and name in inspect.signature(self.codec).parameters

    def make(self, **given: Any) -> Codec:
        """The codec, with what is given of `bits` and `seed` beside its options; raises what its constructor raises.

        One that is fitted is bare: it names its parameters and encodes nothing.
        """
        if not self.stages:
            return self.codec(**{**given, **self.options})
        own = [stage.make(**self.given(i, given)) for i, stage in enumerate(self.stages)]
        return self.codec(tuple(own))  # type: ignore[call-arg]

    def given(self, number: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Of a chain: what stage `number` takes of `bits` and `seed` among `options`; the rate is the last one's."""
        stage = self.stages[number]
        names = ("bits", "seed") if number + 1 == len(self.stages) else ("seed",)
        return {n: options[n] for n in names if n in options and stage.takes(n)}

    def __str__(self) -> str:
        if self.stages:
            return " > ".join(map(str, self.stages))
        return self.name + (f"({', '.join(f'{k}={v}' for k, v in self.options.items())})" if self.options else "")

    def curve(self) -> dict[str, Any]:
        """All parameters but nominal bits, `keep` and seed, as rows have them: what makes a curve one."""
        own = json.loads(json.dumps(named(self.make()), default=repr))
        return {name: value for name, value in own.items() if name not in POINT}


def named(codec: Any) -> dict[str, Any]:
    """A codec's parameters as rows have them: of a Pipeline the stages in words, with the last one's rate and the seeds of all apart."""
    stages = getattr(codec, "stages", None)
    if stages is None:
        return dict(codec.parameters)
    words = []
    for i, stage in enumerate(stages):
        usual = {f.name: f.default for f in dataclasses.fields(stage)}
        apart = ("bits", "seed") if i + 1 == len(stages) else ("seed",)
        said = [f"{k}={v}" for k, v in stage.parameters.items() if k not in apart and v != usual.get(k)]
        words.append(type(stage).__name__ + (f"({', '.join(said)})" if said else ""))
    seeds = [stage.parameters["seed"] for stage in stages if "seed" in stage.parameters]
    found: dict[str, Any] = {"stages": " > ".join(words)}
    if "bits" in stages[-1].parameters:
        found["bits"] = stages[-1].parameters["bits"]
    return {**found, "seed": seeds[0]} if seeds else found


def specs(text: str | Iterable[str]) -> list[Spec]:
    """The codecs that a text (or several) names; each once.

    ValueError says where a text is none, which codecs there are, which options a codec has.
    """
    found: list[Spec] = []
    for one in [text] if isinstance(text, str) else text:
        reader = _Reader(one)
        while reader.more():
            found += [spec for spec in reader.chain() if spec not in found]
            if reader.more():
                reader.take(",")
    return found


def options_at(spec: Spec, bits: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Constructor arguments at each nominal rate and seed, where the codec has them and the spec does not say its own.

    ValueError if it needs a rate and none is given.
    """
    rated, seeded = spec.takes("bits"), spec.takes("seed")
    if rated and not bits:
        raise ValueError(f"bits: {spec.name} needs at least one nominal rate")
    return [
        {**({"bits": b} if rated else {}), **({"seed": s} if seeded else {}), **spec.options}
        for b in (bits if rated else (None,))
        for s in (seeds if seeded else (None,))
    ]


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def more(self) -> bool:
        return bool(self.text[self.at :].strip())

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        return match[1] or "" if match else ""

    def take(self, mark: str) -> None:
        if self.peek() != mark:
            self.fail(f"expected {mark!r}")
        match = _TOKEN.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def fail(self, problem: str) -> None:
        rest = self.text[self.at :].strip()
        raise ValueError(f"codecs: {problem} at {repr(rest) if rest else 'the end'} of {self.text!r}")

    def word(self, what: str) -> tuple[str, bool]:
        """(the word, whether it was quoted)."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match[1]:
            self.fail(f"expected {what}")
        assert match is not None
        self.at = match.end()
        return match[4] or match[2] or match[3] or "", match[4] is None

    def chain(self) -> list[Spec]:
        found: list[tuple[Spec, ...]] = [(one,) for one in self.spec()]
        while self.peek() == ">":
            self.take(">")
            behind = self.spec()
            found = [(*stages, one) for stages in found for one in behind]
        return [stages[0] if len(stages) == 1 else Spec("Pipeline", {"stages": stages}) for stages in found]

    def spec(self) -> list[Spec]:
        start = self.at
        name, _ = self.word("a codec's name")
        if name == "all":
            return specs(EVERY)
        if name == "Pipeline":
            self.at = start
            self.fail("expected its stages as A > B")
        try:
            known = parameters.names(codec_class(name))
        except LookupError as problem:
            raise ValueError(f"codecs: {problem.args[0]}") from None
        choices: dict[str, list[Any]] = {}
        if self.peek() == "(":
            self.take("(")
            while self.peek() != ")":
                option, _ = self.word("an option's name")
                if option not in known:
                    raise ValueError(f"codecs: {name} has no option {option!r}; there are {', '.join(known) or 'none'}")
                if option in choices:
                    raise ValueError(f"codecs: {name} has option {option!r} twice")
                self.take("=")
                choices[option] = [self.value()]
                while self.peek() == "|":
                    self.take("|")
                    choices[option].append(self.value())
                if self.peek() != ")":
                    self.take(",")
            self.take(")")
        return [Spec(name, dict(zip(choices, values))) for values in itertools.product(*choices.values())]

    def value(self) -> Any:
        if self.peek() == "(":
            self.take("(")
            items = []
            while self.peek() != ")":
                items.append(self.value())
                if self.peek() != ")":
                    self.take(",")
            self.take(")")
            return tuple(items)
        word, quoted = self.word("a value")
        if quoted:
            return word
        if word in _WORDS:
            return _WORDS[word]
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                pass
        return word
