"""Which array of a file is which, by name, and which axis of it is which, by a word such as "bhtd"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from kvtheory.interop.errors import CannotImport

AXES = {"l": "layers", "b": "batch", "h": "heads", "t": "tokens", "d": "channels"}
#: names of keys and values as caches are saved; "{layer}" is a number. Tried in this order; the last two are those of a tuple of pairs.
PATTERNS = (
    ("{layer}.keys", "{layer}.values"),
    ("keys.{layer}", "values.{layer}"),
    ("key_cache.{layer}", "value_cache.{layer}"),
    ("key.{layer}", "value.{layer}"),
    ("{layer}.key", "{layer}.value"),
    ("k.{layer}", "v.{layer}"),
    ("{layer}.k", "{layer}.v"),
    ("keys", "values"),
    ("key_cache", "value_cache"),
    ("key", "value"),
    ("k", "v"),
    ("{layer}.0", "{layer}.1"),
)


def check(word: str, name: str = "layout") -> str:
    """`word` if it names h, t and d once each, and b and l at most once; ValueError if not."""
    if len(set(word)) < len(word) or not set(word) <= set(AXES) or not {"h", "t", "d"} <= set(word):
        raise ValueError(
            f"{name}: expected h (heads), t (tokens), d (channels), and perhaps b (batch) and l (layers), each once, such as bhtd; got {word!r}"
        )
    return word


def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression: any prefix that ends in a separator, any of . _ / - for each separator, any number for {layer}."""
    parts = re.split(r"(\{layer\}|[._/\-])", pattern)
    text = "".join(
        r"(?P<layer>\d+)" if p == "{layer}" else "[._/-]?" if p in set("._/-") and p else re.escape(p) for p in parts
    )
    return re.compile(rf"(?:^|.*[._/\-]){text}$")


def exactly(names: Sequence[str], pattern: str) -> dict[int, str]:
    """{layer: name} of the names that `pattern` spells, "{layer}" a number; {0: name} for a pattern without it. CannotImport if none."""
    before, here, after = pattern.partition("{layer}")
    found: dict[int, str] = {}
    for name in names:
        if not here:
            if name == pattern:
                found[0] = name
            continue
        middle = name[len(before) : len(name) - len(after) or None]
        if (
            name.startswith(before)
            and name.endswith(after)
            and middle.isdecimal()
            and len(name) > len(before) + len(after)
        ):
            found[int(middle)] = name
    if not found:
        raise CannotImport(f"no array is named {pattern!r}; there are {_few(names)}")
    return found


def find(names: Sequence[str]) -> tuple[dict[int, str], dict[int, str]]:
    """({layer: name of its keys}, {layer: name of its values}), by PATTERNS. CannotImport if none fits or one fits twice."""
    for pair in PATTERNS:
        keys, values = (_matches(names, pattern) for pattern in pair)
        if keys and values:
            return keys, values
    raise CannotImport(
        f"found no keys and values by name; say --keys and --values, such as 'layers.{{layer}}.k'; there are {_few(names)}"
    )


def _matches(names: Sequence[str], pattern: str) -> dict[int, str]:
    found: dict[int, str] = {}
    regex = _compiled(pattern)
    for name in names:
        match = regex.match(name)
        if match is None:
            continue
        layer = int(match["layer"]) if "layer" in regex.groupindex else 0
        if layer in found:
            raise CannotImport(f"{found[layer]!r} and {name!r} may both be of layer {layer}; say --keys and --values")
        found[layer] = name
    return found


def _few(names: Sequence[str]) -> str:
    return (
        ", ".join(map(repr, list(names)[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        if names
        else "none"
    )


def arranged(array: NDArray[Any], word: str, name: str, *, layer: int = 0, batch: int | None = None) -> NDArray[Any]:
    """One layer and batch row as (heads, tokens, channels). CannotImport for other numbers of axes, or a batch that is not chosen."""
    if array.ndim != len(word):
        wanted = ", ".join(AXES[axis] for axis in word)
        raise CannotImport(
            f"{name}: expected {len(word)} axes ({wanted}), as the layout {word} says, got shape {tuple(array.shape)}"
        )
    index: list[Any] = [slice(None)] * array.ndim
    if "b" in word:
        rows = array.shape[word.index("b")]
        if batch is None and rows != 1:
            raise CannotImport(f"{name}: holds a batch of {rows}; say which with --batch")
        if not 0 <= (batch or 0) < rows:
            raise CannotImport(f"{name}: expected a batch row from 0 to {rows - 1}, got {batch}")
        index[word.index("b")] = batch or 0
    if "l" in word:
        index[word.index("l")] = layer
    rest = [axis for axis in word if axis not in "bl"]
    return array[tuple(index)].transpose([rest.index(axis) for axis in "htd"])
