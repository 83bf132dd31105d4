"""A captured cache of somebody else's as a kvtheory.Cache: one layer in memory at a time, each checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtheory.interop import layout as layouts
from kvtheory.interop.errors import CannotImport
from kvtheory.layer import Cache, Layer, Rope

Array = NDArray[Any]


class Source(Protocol):
    """A file of named arrays."""

    path: Path

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> Array: ...
    def close(self) -> None: ...


def open_file(path: Path) -> Source:
    """The arrays of a .npz, .safetensors, .pt or .pth; CannotImport for any other file. Nothing is unpickled but tensors, by torch."""
    from kvtheory.interop.numpy_files import Npz
    from kvtheory.interop.tensor_files import Safetensors, TorchFile

    kinds: dict[str, Any] = {".npz": Npz, ".safetensors": Safetensors, ".pt": TorchFile, ".pth": TorchFile}
    if path.suffix not in kinds:
        raise CannotImport(f"{path}: expected a .npz, .safetensors or .pt, got {path.suffix or 'no ending'}")
    if not path.is_file():
        raise CannotImport(f"{path}: there is no such file")
    source: Source = kinds[path.suffix](path)
    return source


@dataclass(frozen=True)
class How:
    """How a file is to be read.

    layout, values_layout, queries_layout: axes by letter (see layouts.AXES); None for that of the keys. keys, values, queries, positions: names, with
    "{layer}" for the layer's number, None for keys and values by the usual names and for no queries, and positions 0, 1, ...
    batch: the row; skip: tokens at the start that are padding. causal: query j stands at token j (as many queries as tokens).
    rope: what the keys carry. expect: {"layers" | "heads" | "tokens" | "channels": number} that must be so.
    """

    layout: str
    values_layout: str | None = None
    queries_layout: str | None = None
    keys: str | None = None
    values: str | None = None
    queries: str | None = None
    positions: str | None = None
    batch: int | None = None
    skip: int = 0
    causal: bool = False
    rope: Rope | None = None
    expect: dict[str, int] | None = None


class _Layer:
    """A layer that is read when it is asked for."""

    def __init__(self, source: Source, how: How, names: dict[str, str], number: int) -> None:
        self.source, self.how, self.names, self.number = source, how, names, number

    def __call__(self) -> Layer:
        how, arrays = self.how, {}
        for role, word in (("keys", how.layout), ("values", how.values_layout), ("queries", how.queries_layout)):
            if role in self.names:
                name = self.names[role]
                array = layouts.arranged(
                    self.source.read(name), word or how.layout, name, layer=self.number, batch=how.batch
                )
                if role == "keys" and how.skip > array.shape[1]:
                    raise CannotImport(f"{name}: expected at least the {how.skip} tokens to skip, got {array.shape[1]}")
                arrays[role] = array[:, how.skip :] if role != "queries" or how.causal else array
        keys, values = arrays["keys"], arrays["values"]
        where = f"{self.source.path}: layer {self.number}"
        for axis, i in (("heads", 0), ("tokens", 1)):
            if keys.shape[i] != values.shape[i]:
                raise CannotImport(
                    f"{where}: keys {self.names['keys']!r} have {keys.shape[i]} {axis}, values {self.names['values']!r} {values.shape[i]}"
                )
        for axis, i in (("heads", 0), ("tokens", 1), ("channels", 2)):
            wanted = (how.expect or {}).get(axis)
            if wanted is not None and keys.shape[i] != wanted:
                raise CannotImport(
                    f"{where}: expected {wanted} {axis}, got {keys.shape[i]}; is the layout {how.layout}?"
                )
        positions = None
        if how.positions is not None:
            name = how.positions.replace("{layer}", str(self.number))
            if name not in self.source.names():
                raise CannotImport(f"{where}: no array is named {name!r}, for the positions")
            positions = self.source.read(name)
            if positions.ndim == 2:
                if how.batch is None and positions.shape[0] != 1:
                    raise CannotImport(
                        f"{where}: positions {name!r} are of a batch of {positions.shape[0]}; say which with --batch"
                    )
                positions = positions[how.batch or 0]
            positions = positions[how.skip :]
        queries = arrays.get("queries")
        at = None
        if queries is not None and how.causal:
            if queries.shape[1] != keys.shape[1]:
                raise CannotImport(
                    f"{where}: expected a query at each of {keys.shape[1]} tokens (--causal), got {queries.shape[1]}"
                )
            at = np.arange(keys.shape[1], dtype=np.int64) if positions is None else positions
        try:
            return Layer(
                keys, values, queries, rope=how.rope, index=self.number, positions=positions, query_positions=at
            )
        except (
            ValueError,
            TypeError,
        ) as problem:  # NaN, inf, integers, shapes that do not fit: it names argument and place
            raise CannotImport(f"{where}: {problem}") from None


def read_cache(source: Source, how: How) -> Cache:
    """The cache in `source`, its layers lazy; CannotImport says what does not fit, ValueError what is wrong with `how`."""
    for name in ("layout", "values_layout", "queries_layout"):
        word = getattr(how, name)
        if word is not None:
            layouts.check(word, name)
    if (how.keys is None) != (how.values is None):
        raise ValueError("keys, values: expected names of both, or of none")
    names = source.names()
    if how.keys is not None and how.values is not None:
        keys, values = layouts.exactly(names, how.keys), layouts.exactly(names, how.values)
    else:
        keys, values = layouts.find(names)
    if set(keys) != set(values):
        one = min(set(keys) ^ set(values))
        raise CannotImport(f"{source.path}: layer {one} has {'keys' if one in keys else 'values'} alone")
    queries = {} if how.queries is None else layouts.exactly(names, how.queries)
    if queries and set(queries) != set(keys):
        raise CannotImport(f"{source.path}: queries of {len(queries)} layers, keys of {len(keys)}")
    if "l" in how.layout:
        if len(keys) > 1:
            raise CannotImport(
                f"{source.path}: the layout {how.layout} says that one array holds all layers; found {len(keys)} of them"
            )
        shape = source.shape(keys[0])
        if len(shape) != len(how.layout):
            raise CannotImport(
                f"{keys[0]}: expected {len(how.layout)} axes, as the layout {how.layout} says, got shape {shape}"
            )
        count = shape[how.layout.index("l")]
        other = source.shape(values[0])
        word = how.values_layout or how.layout
        if "l" not in word or len(other) != len(word) or other[word.index("l")] != count:
            raise CannotImport(
                f"{source.path}: keys {shape} and values {other} do not hold as many layers in layout {how.layout}"
            )
        keys, values, queries = (
            {i: found[0] for i in range(count)} if found else {} for found in (keys, values, queries)
        )
    wanted = (how.expect or {}).get("layers")
    if not keys or (wanted is not None and len(keys) != wanted):
        raise CannotImport(f"{source.path}: expected {wanted or 'some'} layers, got {len(keys)}")
    roles = {"keys": keys, "values": values, "queries": queries}
    layers = [
        _Layer(source, how, {role: found[i] for role, found in roles.items() if found}, i) for i in sorted(keys)
    ]  # fmt: skip
    return Cache(layers, meta={"imported": {"file": source.path.name, "layout": how.layout}})


def same(a: Layer, b: Layer) -> bool:
    """Whether two layers hold the same numbers, bit for bit."""
    return all(
        (x is None) == (y is None) and (x is None or (x.dtype == y.dtype and np.array_equal(x, y)))
        for x, y in ((getattr(a, name), getattr(b, name)) for name in ("keys", "values", "queries", "positions", "query_positions"))
    )  # fmt: skip
