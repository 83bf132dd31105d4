"""Questions with known answers: generated retrieval tasks in the style of RULER, and any data set as lines of JSON.

    needle     one sentence says the code of a thing, somewhere among real prose; asked for at the end
    needles    several things have codes, one of them is asked for
    tracking   a code is said of one thing, and of others that theirs is the same as the one before; the last one is asked for
    lookup     nothing but lines "thing: code", one of them is asked for

Codes are five digits, so that a guess is right once in 90,000; things are a colour and an animal. A data set is a file of lines, each

    {"prompt": "...", "answer": "..." or ["...", ...], "metric": one of METRICS}

with `task` (a name to group by), `opening` (how the answer begins, not scored) and `max_new_tokens` (default 64) where wanted. Answers are greedy: each
next token is the one ranked first, to the end of the turn or the limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.models.capture import encode
from kvtheory.randomness import generator

if TYPE_CHECKING:
    from kvtheory.models.runner import Replaced, Runner

__all__ = ["KINDS", "METRICS", "Item", "Posed", "Said", "answer", "generate", "pose", "read", "score"]

KINDS = ("needle", "needles", "tracking", "lookup")
#: things that have codes in "needles", and links of the chain in "tracking"
_CODES, _LINKS = 4, 1
_COLOURS = ["red", "green", "blue", "white", "black", "yellow", "purple", "orange", "grey", "brown", "pink", "golden"]
_ANIMALS = ["fox", "owl", "bear", "wolf", "horse", "lion", "tiger", "duck", "goat", "crow", "frog", "whale"]
#: bytes of a line of a data set, and new tokens of an answer, at most
MOST_LINE, MOST_NEW = 1 << 24, 1024


@dataclass(frozen=True)
class Item:
    """One question. answers: any of them is right. opening: how the answer begins, given. most: new tokens at most."""

    task: str
    prompt: str
    answers: tuple[str, ...]
    metric: str
    opening: str = ""
    most: int = 64


# -- generated -----------------------------------------------------------------------------------------------------------


def generate(kind: str, number: int, tokenizer: Any, *, tokens: int, seed: int = 0, filler: str | None = None) -> Item:
    """Item `number` of a kind, of at most `tokens` tokens as `pose` puts it; depends on (kind, number, tokens, seed, filler) only.

    filler: prose, from a random sentence on and around again; None: the text "persuasion". ValueError for an unknown kind and for too
    few tokens; TextUnavailable where the filler cannot be had.
    """
    if kind not in KINDS:
        raise ValueError(f"task: expected one of {', '.join(KINDS)}, got {kind!r}")
    rng = generator(seed, f"task {kind} {number} of {tokens} tokens")
    things = [f"{colour} {animal}" for colour in _COLOURS for animal in _ANIMALS]
    things = [things[i] for i in rng.permutation(len(things))]
    codes = [str(code) for code in rng.choice(90_000, len(things), replace=False) + 10_000]
    if kind == "lookup":
        where = float(rng.random())

        def build(count: int) -> Item:
            asked = int(where * count)
            lines = "\n".join(f"{things[i]}: {codes[i]}" for i in range(count))
            prompt = f"This is a list of codes.\n{lines}\n\nWhat is the code of the {things[asked]}?"
            return Item(kind, prompt, (codes[asked],), "starts", f"{things[asked]}:", 8)

        return _most(build, len(things), tokenizer, tokens, 1)
    if kind == "tracking":
        said = [f"The code of the {things[0]} is {codes[0]}."]
        said += [f"The code of the {things[i + 1]} is the same as the code of the {things[i]}." for i in range(_LINKS)]
        asked, code = things[_LINKS], codes[0]
    else:
        many = _CODES if kind == "needles" else 1
        said = [f"The code of the {things[i]} is {codes[i]}." for i in range(many)]
        chosen = int(rng.integers(many))
        asked, code = things[chosen], codes[chosen]
    sentences = _sentences(filler)
    start = int(rng.integers(len(sentences)))
    depths = np.sort(rng.random(len(said)))

    def hidden(count: int) -> Item:
        parts = [sentences[(start + i) % len(sentences)] for i in range(count)]
        for place, sentence in reversed([*zip(np.round(depths * count).astype(int), said, strict=True)]):
            parts.insert(int(place), sentence)
        return _item(kind, " ".join(parts), asked, code)

    return _most(hidden, tokens, tokenizer, tokens, 0)


def _item(kind: str, context: str, thing: str, code: str) -> Item:
    opening = f"The code of the {thing} is"
    return Item(kind, f"{context}\n\nWhat is the code of the {thing}?", (code,), "starts", opening, 8)


def _sentences(filler: str | None) -> list[str]:
    from kvtheory.models.texts import text

    return re.split(r"(?<=[.!?])\s+", (text("persuasion") if filler is None else filler).strip())


def _most(build: Callable[[int], Item], most: int, tokenizer: Any, tokens: int, least: int) -> Item:
    """build(count) of the largest count in least .. most whose prompt has at most `tokens` tokens, by bisection."""

    def length(count: int) -> int:
        return len(_ids(tokenizer, build(count), "auto"))

    if (shortest := length(least)) > tokens:
        raise ValueError(f"task-tokens: expected at least {shortest} for the question and its code, got {tokens}")
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(middle) <= tokens else (low, middle - 1)
    return build(low)


# -- a data set ----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> tuple[list[Item], str]:
    """(the items of a data set, the first 16 hex digits of the SHA-256 of its file).

    ValueError in one sentence with the number of the line for what is no item; FileNotFoundError.
    """
    name = os.path.basename(os.fspath(path))
    task = name.rsplit(".", 1)[0]
    items: list[Item] = []
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), 1):
            where = f"tasks: line {number} of {name}"
            if len(line) > MOST_LINE:
                raise ValueError(f"{where}: expected at most {MOST_LINE:,} bytes")
            digest.update(line)
            if line.strip():
                items.append(_read(line, where, task))
    if not items:
        raise ValueError(f"tasks: expected lines of JSON in {name}, got none")
    return items, digest.hexdigest()[:16]


def _read(line: bytes, where: str, task: str) -> Item:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{where}: expected UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: expected JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object with prompt, answer and metric, got {_kind(found)}")
    answers = found.get("answer")
    answers = answers if isinstance(answers, list) else [answers]
    if not answers:
        raise ValueError(f"{where}: answer: expected a string or some, got none")
    texts = {"prompt": found.get("prompt"), "metric": found.get("metric")}
    texts |= {f"answer {i + 1}" if len(answers) > 1 else "answer": one for i, one in enumerate(answers)}
    texts |= {name: found[name] for name in ("task", "opening") if name in found}
    for field, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {field}: expected a string, got {_kind(value)}")
        if not value.strip():
            raise ValueError(f"{where}: {field}: expected a string that is not empty")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{where}: {field}: holds half of a character (a lone surrogate)")
    if texts["metric"] not in METRICS:
        raise ValueError(f"{where}: metric: expected one of {', '.join(METRICS)}, got {str(texts['metric'])[:40]!r}")
    most = found.get("max_new_tokens", 64)
    if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= MOST_NEW:
        raise ValueError(f"{where}: max_new_tokens: expected a whole number from 1 to {MOST_NEW}")
    return Item(
        found.get("task", task), found["prompt"], tuple(answers), found["metric"], found.get("opening", ""), most
    )


def _kind(value: Any) -> str:
    names: Mapping[type, str] = {
        type(None): "nothing",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a string",
    }
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


# -- asking ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Posed:
    """A question in tokens. prompt (n,): ids with the opening; target (m,): ids of the first answer, m >= 1."""

    item: Item
    form: str
    prompt: NDArray[np.int64]
    target: NDArray[np.int64]

    @property
    def prefix(self) -> int:
        """How many tokens have their cache replaced: all but the last, which is fed to ask for the first new one."""
        return len(self.prompt) - 1


@dataclass(frozen=True)
class Said:
    """text: the greedy answer. score: by the item's metric, 0 to 1. log2_p: of the first answer's tokens, teacher-forced."""

    text: str
    score: float
    log2_p: float


def pose(runner: Runner, item: Item, form: str = "auto") -> Posed:
    """form: "chat" (the tokenizer's chat template), "plain", "auto" (chat where there is a template).

    ValueError for a prompt that is longer with its answer than the model's positions.
    """
    tokenizer = runner.tokenizer
    if tokenizer is None:
        raise ValueError("tokenizer: tasks need one, got None")
    if form == "auto":
        form = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    if form not in ("chat", "plain"):
        raise ValueError(f"form: expected auto, chat or plain, got {form!r}")
    prompt = _ids(tokenizer, item, form)
    space = " " if item.opening else ""
    target = np.asarray(tokenizer(space + item.answers[0], add_special_tokens=False)["input_ids"], dtype=np.int64)
    room = getattr(runner.model.config.get_text_config(), "max_position_embeddings", None)
    if room is not None and len(prompt) + max(item.most, len(target)) > room:
        raise ValueError(
            f"prompt: expected at most {room - max(item.most, len(target))} tokens of task {item.task}, so that the answer fits the model, got {len(prompt)}"
        )
    if len(prompt) < 2 or not len(target):
        raise ValueError(f"prompt: expected at least 2 tokens and an answer of 1, got {len(prompt)} and {len(target)}")
    return Posed(item, form, prompt, target)


def _ids(tokenizer: Any, item: Item, form: str) -> NDArray[np.int64]:
    if form == "auto":
        form = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    if form == "plain":
        return encode(tokenizer, f"{item.prompt}\n\n{item.opening}" if item.opening else item.prompt)
    asked = [{"role": "user", "content": item.prompt}]
    opened = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) + item.opening
    return np.asarray(tokenizer(opened, add_special_tokens=False)["input_ids"], dtype=np.int64)


def answer(runner: Runner, posed: Posed, decoded: Replaced | None) -> Said:
    """What the model says with `decoded` in place of the prefix's cache; None: with the cache itself.

    The answer is fed first, teacher-forced: as far as its tokens rank first, that is what greedy decoding says, so a right answer takes one pass.
    """
    from kvtheory.models.runner import log_softmax_bits

    fed = np.concatenate([posed.prompt, posed.target])
    bits = log_softmax_bits(runner.logits(fed, posed.prefix, decoded))
    best = bits.argmax(axis=1)
    where = np.arange(len(posed.target))
    log2_p = float(bits[where, posed.target].sum())
    agree = int(np.argmin(np.append(best[:-1] == posed.target, False)))
    ends = _ends(runner)
    new = [int(token) for token in (*posed.target[:agree], best[agree])][: posed.item.most]
    while new[-1] not in ends and len(new) < posed.item.most and not _settled(runner, posed.item, new):
        fed = np.concatenate([posed.prompt, np.asarray(new, dtype=np.int64)])
        new.append(int(runner.logits(fed, posed.prefix, decoded)[-1].argmax()))
    text = str(runner.tokenizer.decode([token for token in new if token not in ends], skip_special_tokens=True))
    return Said(text, score(posed.item.metric, text, posed.item.answers), log2_p)


def _ends(runner: Runner) -> set[int]:
    found = [getattr(runner.tokenizer, "eos_token_id", None)]
    own = getattr(getattr(runner.model, "generation_config", None), "eos_token_id", None)
    found += own if isinstance(own, list) else [own]
    return {int(token) for token in found if token is not None}


def _settled(runner: Runner, item: Item, new: Sequence[int]) -> bool:
    """Whether more tokens cannot change the score."""
    if item.metric not in ("starts", "exact", "f1"):
        return False
    text = str(runner.tokenizer.decode(list(new), skip_special_tokens=True)).lstrip()
    if item.metric != "starts":
        return "\n" in text
    # one more character than the answer: a longer number is another one
    longest = max(len(one.strip()) for one in item.answers)
    return len(text) > longest or not any(one.strip().startswith(text) for one in item.answers)


# -- scores ----------------------------------------------------------------------------------------------------------------


def score(metric: str, said: str, answers: Sequence[str]) -> float:
    """From 0 to 1, the best over the answers (of "all": the share of them); ValueError for an unknown metric."""
    if metric not in METRICS:
        raise ValueError(f"metric: expected one of {', '.join(METRICS)}, got {metric!r}")
    values = [float(METRICS[metric](said, one)) for one in answers]
    return sum(values) / len(values) if metric == "all" else max(values)


def _plain(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    kept = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def _line(said: str) -> str:
    return said.strip().partition("\n")[0]


def _starts(said: str, one: str) -> bool:
    own, wanted = said.strip(), one.strip()
    return own.startswith(wanted) and not (own[len(wanted) :][:1].isalnum() and wanted[-1:].isalnum())


def _f1(said: str, one: str) -> float:
    own, wanted = _plain(_line(said)).split(), _plain(one).split()
    common = sum((Counter(own) & Counter(wanted)).values())
    return 2 * common / (len(own) + len(wanted)) if common else 0.0


def _number(said: str, one: str) -> bool:
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (said, one)]
    return bool(found[0] and found[1]) and float(found[0][-1]) == float(found[1][-1])


def _choice(said: str, one: str) -> bool:
    found = re.search(r"\b([A-J])\b", said)
    return found is not None and found[1] == one.strip().strip("().").upper()


#: metric -> (what is said, one answer) -> score
METRICS: Mapping[str, Callable[[str, str], float]] = {
    "exact": lambda said, one: _plain(_line(said)) == _plain(one),
    "starts": _starts,
    "contains": lambda said, one: f" {_plain(one)} " in f" {_plain(said)} ",
    "all": lambda said, one: f" {_plain(one)} " in f" {_plain(said)} ",
    "f1": _f1,
    "number": _number,
    "choice": _choice,
}
