"""Sessions that begin alike, as a serving system sees them: shared system prompts, forks, edits in the middle, paraphrases.

    sessions = kvtheory.workload.sessions(count=200, seed=0)
    cache = kvtheory.workload.play(kvtheory.prediction.ToyPlayer(vocabulary=kvtheory.workload.vocabulary(sessions)), sessions[0].tokens)

Text: templates of our own, and sentences of *Northanger Abbey* (public domain, embedded). Deterministic from the seed. What a workload says of
hit rates is a property of its templates: compare stores on one workload, not workloads with each other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvtheory.layer import Cache, Layer
from kvtheory.prediction import Player
from kvtheory.randomness import raw_words

__all__ = ["KINDS", "PARAPHRASES", "Session", "play", "remaining_cost", "sessions", "vocabulary", "words"]

#: what a session is to the one before it that it was made from
KINDS = ("prompt", "fork", "edit", "paraphrase")

#: openings that mean the same in other words, as an instruction to an assistant
PARAPHRASES = (
    ("You are a helpful assistant . Answer in one short sentence .", "You are an AI assistant . Reply with a single brief sentence ."),
    ("You are a careful editor . Mark every mistake in the text .", "You are an attentive proofreader . Point out all errors below ."),
    ("You are a teacher of literature . Explain the passage to a pupil .", "You teach books at a school . Make this extract clear to a student ."),
    ("You are a translator . Keep the tone of the original .", "Your task is translation . Preserve the style of the source ."),
)  # fmt: skip
QUESTIONS = (
    "Who is meant ?", "What does she enjoy ?", "Why was nobody surprised ?", "How many children were there ?", "What is the tone ?",
    "Name the people in it .", "Give it a title .", "Which word is the rarest ?", "Is the writer serious ?", "What happens next ?",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Session:
    """name: unique. tenant: whose. kind: one of KINDS. source: name of the session it was made from, or None. tokens (n,) int64."""

    name: str
    tenant: str
    kind: str
    source: str | None
    text: str
    tokens: NDArray[np.int64]


def words(text: str) -> list[str]:
    """A text as words and signs of punctuation, without its blanks."""
    return re.findall(r"\w+|[^\w\s]", text)


def sessions(
    count: int = 200,
    seed: int = 0,
    *,
    tenants: int = 1,
    sentences: int = 2,
    tokenise: Callable[[str], Sequence[int]] | None = None,
) -> list[Session]:
    """`count` sessions of all KINDS in turn: a prompt, then what is made from it; every fourth a new system prompt.

    prompt      a system prompt (the first of a pair of PARAPHRASES), `sentences` sentences of the novel, a question
    fork        the same, its question another, and a further sentence behind it
    edit        the same, one word in the middle of it put in another's place: as many words, of the same meaning or not
    paraphrase  the same behind the second system prompt of the pair

    tenants: the prompts go to them in turn, with what is made from them. tokenise: text -> ids; default: `words`, numbered in alphabetical order over
    the whole workload (no subwords, so that equal words at equal places are equal tokens). Only raw words of Philox are used: same seed, same sessions.
    ValueError for a count, tenants or sentences below 1, or where the novel has too few sentences.
    """
    for name, value in (("count", count), ("tenants", tenants), ("sentences", sentences)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    novel = _novel()
    if sentences > len(novel):
        raise ValueError(f"sentences: expected at most {len(novel)}, got {sentences}")
    draw = _Draw(seed)
    texts: list[tuple[str, str, str | None, str]] = []
    for i in itertools.count():
        name, tenant = f"{i:04d}", f"tenant-{i % tenants}"
        pair = PARAPHRASES[draw(len(PARAPHRASES))]
        first = draw(len(novel) - sentences + 1)
        passage = " ".join(novel[first : first + sentences])
        question = QUESTIONS[draw(len(QUESTIONS))]
        other = QUESTIONS[draw(len(QUESTIONS))]
        body = f"{pair[0]} {passage} {question}"
        made = {
            "prompt": body,
            "fork": f"{pair[0]} {passage} {other} {novel[draw(len(novel))]}",
            "edit": _edited(body, draw, novel),
            "paraphrase": f"{pair[1]} {passage} {question}",
        }
        for kind in KINDS:
            source = None if kind == "prompt" else f"{name}-prompt"
            texts.append((f"{name}-{kind}", tenant, source, made[kind]))
        if len(texts) >= count:
            break
    texts = texts[:count]
    numbered = _numbered([text for *_, text in texts]) if tokenise is None else tokenise
    return [
        Session(name, tenant, name.rpartition("-")[2], source, text, np.array(numbered(text), np.int64))
        for name, tenant, source, text in texts
    ]


def vocabulary(made: Sequence[Session]) -> int:
    """One more than the largest token id."""
    return 1 + max(int(session.tokens.max()) for session in made)


def play(player: Player, tokens: Any, dtype: DTypeLike = np.float16) -> Cache:
    """The cache that a model writes, token by token from an empty one; keys and values rounded to `dtype`. Surprisals: [0] = log2(vocabulary).

    What is rounded is what is written down: the model itself reads what it computed.
    """
    run, held, surprisal = player.start(), [], []
    for token in np.asarray(tokens).tolist():
        logits = run.logits
        if logits is None:
            surprisal.append(math.log2(player.vocabulary))
        else:
            z = np.asarray(logits, np.float64)
            surprisal.append(float((np.logaddexp.reduce(z) - z[token]) / math.log(2)))
        held.append(run.feed(token))
    layers = []
    for i in range(player.layers):
        keys, values = (
            np.stack([getattr(kv[i], name) for kv in held], axis=1).astype(dtype) for name in ("keys", "values")
        )
        layers.append(Layer(keys, values, index=i))
    return Cache(layers, tokens=np.asarray(tokens, np.int64), surprisal_bits=np.array(surprisal))


class _Draw:
    """draw(n): the next of 0 to n - 1, from raw words (off uniform by n / 2^64)."""

    def __init__(self, seed: int) -> None:
        self._words = self._blocks(seed)

    @staticmethod
    def _blocks(seed: int) -> Iterator[int]:
        for block in itertools.count():
            yield from raw_words(seed, f"workload sessions {block}", 1024).tolist()

    def __call__(self, n: int) -> int:
        return next(self._words) % n


def _novel() -> list[str]:
    text = resources.files("kvtheory").joinpath("data/northanger-abbey.txt").read_text("utf-8")
    return [" ".join(words(sentence)) for sentence in re.split(r"(?<=[.!?;])\s+", text.strip()) if sentence]


def _edited(text: str, draw: _Draw, novel: Sequence[str]) -> str:
    """One word of the middle third put in the place of another."""
    split = text.split()
    at = len(split) // 3 + draw(max(1, len(split) // 3))
    pool = [word for word in novel[draw(len(novel))].split() if word != split[at]]
    return " ".join([*split[:at], pool[draw(len(pool))], *split[at + 1 :]])


def _numbered(texts: Sequence[str]) -> Callable[[str], list[int]]:
    number = {word: i for i, word in enumerate(sorted({word for text in texts for word in words(text)}))}
    return lambda text: [number[word] for word in words(text)]


def remaining_cost(clustered: Any, tail: Any, length: Any) -> Any:
    """1 - f (1 - l/n): what is left to store, as a part of storing every session whole.

    clustered: f, the fraction of sessions that leave their prefix to others; tail: l, their mean length in tokens behind it; length: n, that of a
    whole session. Fractions stay exact. ValueError outside 0 <= f <= 1, 0 <= l <= n, n > 0. Source: arXiv 2604.15356, storage corollary.
    """
    if not (0 <= clustered <= 1 and 0 <= tail <= length and length > 0):
        raise ValueError(f"expected 0 <= f <= 1, 0 <= l <= n, n > 0, got f = {clustered}, l = {tail}, n = {length}")
    return 1 - clustered * (1 - tail / length)
