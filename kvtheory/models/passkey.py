"""Passkey retrieval: a five-digit key said once more somewhere in a long text, asked for at its end.

    The pass key is 48213. Remember it. 48213 is the pass key.

stands at a random place among sentences of real prose; the prompt ends with the opened answer "The pass key is". All is teacher-forced:
the space is fed and the five digits are scored, as tokenizers that split numbers see them (counting the space as an answer would make a
perfect model look like one that fails). The cache that is compressed is the prompt's, with the question (question="seen": what a codec knows of
queries includes those that look for the key), or the text's alone, question and answer being read behind it ("unseen"). Models that answer chat are asked through their chat template. Accuracy of small models is near its
ceiling, so log2 P(key), which is graded, stands beside it, and both are paired with the full cache on the same sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Cache
from kvtheory.models.capture import capture, encode
from kvtheory.randomness import generator

if TYPE_CHECKING:
    from kvtheory.models.runner import Progress, Replaced, Runner

__all__ = ["FORMS", "QUESTIONS", "Asked", "Compress", "Passkey", "Sample", "ask", "run", "score"]

#: a captured prefix -> what stands for it
Compress = Callable[[Cache], "Replaced"]

FORMS = ("auto", "chat", "plain")
#: whether the question is among the tokens whose cache is compressed ("seen"), or comes behind them ("unseen")
QUESTIONS = ("seen", "unseen")
_ANSWER = "The pass key is"
_QUESTION = "What is the pass key"


@dataclass(frozen=True)
class Sample:
    """One prompt. depth: 0 for a key said before all filler, 1 behind all of it. tokens: of the prompt."""

    key: str
    depth: float
    tokens: int
    full_right: bool
    right: bool
    full_log2_p: float
    log2_p: float


@dataclass(frozen=True)
class Passkey:
    """form: "chat" or "plain". Full: with the model's own cache. log2_p: log2 P(key), teacher-forced, the sum over its tokens."""

    form: str
    samples: tuple[Sample, ...]

    @property
    def full_accuracy(self) -> float:
        """Share of samples with every token of the key ranked first."""
        return float(np.mean([s.full_right for s in self.samples]))

    @property
    def accuracy(self) -> float:
        return float(np.mean([s.right for s in self.samples]))

    @property
    def loss_bits(self) -> NDArray[np.float64]:
        """log2 P(key) with the full cache less that with the replaced one, (samples,): paired, so that easy keys cancel."""
        return np.array([s.full_log2_p - s.log2_p for s in self.samples])

    def summary(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "samples": len(self.samples),
            "tokens": float(np.mean([s.tokens for s in self.samples])),
            "full_accuracy": self.full_accuracy,
            "accuracy": self.accuracy,
            "full_log2_p": float(np.mean([s.full_log2_p for s in self.samples])),
            "log2_p": float(np.mean([s.log2_p for s in self.samples])),
        }


def run(
    runner: Runner,
    compress: Compress | None,
    *,
    tokens: int,
    samples: int,
    seed: int,
    filler: str | None,
    form: str,
    progress: Progress | None,
) -> Passkey:
    """`samples` prompts of at most `tokens` tokens, each with its prefix's cache replaced by compress(captured prefix).

    compress: gets the prompt up to the token before the first digit, captured (kvtheory.models.capture) with all its queries; None: nothing
    is replaced. filler: prose to hide the key in, from a random sentence on and around again at its end; None: the text "persuasion".
    form: "chat" (the tokenizer's chat template), "plain", "auto" (chat where there is a template). Sample i depends on (seed, i, tokens)
    only, whatever their number.

    Raises ValueError for bad arguments, TextUnavailable where the filler cannot be had.
    """
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    found = []
    for i in range(samples):
        if progress is not None:
            progress(i, samples, f"passkey sample {i + 1}")
        asked = ask(runner, i, tokens=tokens, seed=seed, filler=filler, form=form)
        plain = score(runner, asked, None)
        replaced = plain
        if compress is not None:
            replaced = score(runner, asked, compress(capture(runner.model, None, asked.fed[: asked.prefix])))
        found.append(Sample(asked.key, asked.depth, asked.tokens, plain[0], replaced[0], plain[1], replaced[1]))
    if progress is not None:
        progress(samples, samples, "passkey")
    return Passkey(asked.form, tuple(found))


@dataclass(frozen=True, eq=False)
class Asked:
    """Sample `number` as it is run. fed (n - 1,): prompt and answer but for its last token; prefix: how many of them have their cache replaced.

    targets: the tokens of the key, which the last len(targets) laws are scored by. tokens: of the prompt.
    """

    number: int
    form: str
    key: str
    depth: float
    tokens: int
    fed: NDArray[np.int64]
    prefix: int
    targets: NDArray[np.int64]


def ask(
    runner: Runner,
    number: int,
    *,
    tokens: int,
    seed: int = 0,
    filler: str | None = None,
    form: str = "auto",
    question: str = "seen",
) -> Asked:
    """Sample `number`; arguments and errors as `run`."""
    from kvtheory.models.texts import text

    tokenizer = runner.tokenizer
    if tokenizer is None:
        raise ValueError("tokenizer: passkey needs one, got None")
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    if question not in QUESTIONS:
        raise ValueError(f"question: expected one of {', '.join(QUESTIONS)}, got {question!r}")
    template = getattr(tokenizer, "chat_template", None)
    if form == "chat" and not template:
        raise ValueError("form: this tokenizer has no chat template; use plain")
    if form == "auto":
        form = "chat" if template else "plain"
    sentences = re.split(r"(?<=[.!?])\s+", (text("persuasion") if filler is None else filler).strip())
    rng = generator(seed, f"passkey sample {number} of {tokens} tokens")
    prompt, key, depth = _prompt(tokenizer, form, tokens, sentences, rng)
    answer = np.asarray(tokenizer(" " + key, add_special_tokens=False)["input_ids"], dtype=np.int64)
    ids = np.concatenate([prompt, answer])
    first = len(prompt) + next(j for j, token in enumerate(answer) if tokenizer.decode([int(token)]).strip())
    # the last token is only scored, the one before the first digit only fed
    prefix = first - 1 if question == "seen" else _before_the_question(tokenizer, prompt)
    return Asked(number, form, key, depth, len(prompt), ids[:-1], prefix, ids[first:])


def score(runner: Runner, asked: Asked, decoded: Replaced | None) -> tuple[bool, float]:
    """(every token of the key ranked first, log2 P(key)), with `decoded` in place of the prefix's cache; None: with the cache itself."""
    from kvtheory.models.runner import log_softmax_bits

    targets = asked.targets
    bits = log_softmax_bits(runner.logits(asked.fed, asked.prefix, decoded)[-len(targets) :])
    return bool((bits.argmax(axis=1) == targets).all()), float(bits[np.arange(len(targets)), targets].sum())


def _before_the_question(tokenizer: Any, prompt: NDArray[np.int64]) -> int:
    """How many tokens of a prompt lie wholly before its question."""

    def text(count: int) -> str:
        return str(tokenizer.decode([int(token) for token in prompt[:count]]))

    end = text(len(prompt)).rindex(_QUESTION)
    count = len(prompt)
    while len(text(count)) > end:
        count -= 1
    return count


def _prompt(
    tokenizer: Any, form: str, tokens: int, sentences: list[str], rng: np.random.Generator
) -> tuple[NDArray[np.int64], str, float]:
    """(prompt (n,), key, depth) with n <= tokens and as many sentences of filler as fit."""
    key = str(rng.integers(10_000, 100_000))
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    start, where = int(rng.integers(len(sentences))), float(rng.random())

    def prompt(chosen: list[str]) -> NDArray[np.int64]:
        place = round(where * len(chosen))
        context = " ".join([*chosen[:place], needle, *chosen[place:]])
        if form == "plain":
            return encode(tokenizer, f"{context}\n\n{_QUESTION}? {_ANSWER}")
        question = [{"role": "user", "content": f"{context}\n\n{_QUESTION} mentioned in the text above?"}]
        opened = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) + _ANSWER
        return np.asarray(tokenizer(opened, add_special_tokens=False)["input_ids"], dtype=np.int64)

    chosen: list[str] = []
    room = tokens - len(prompt(chosen))
    if room < 0:
        raise ValueError(f"tokens: expected at least {tokens - room} for the question and its key, got {tokens}")
    while True:
        sentence = sentences[(start + len(chosen)) % len(sentences)]
        room -= len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
        if room < 0:
            break
        chosen.append(sentence)
    while len(found := prompt(chosen)) > tokens:  # sentences side by side may take a token more than one by one
        chosen.pop()
    return found, key, round(where * len(chosen)) / max(1, len(chosen))
