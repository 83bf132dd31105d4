"""`Cache`: the layers of one sequence, in memory or in one safetensors file that is read layer by layer.

The file is an ordinary safetensors file. Its metadata has one key, "kvtheory", a JSON text with `format`, `version`, one record
per layer (index, scale, rope, names of its extras), a CRC-32 of each tensor and the caller's `meta`; the tensors are "tokens", "surprisal_bits" and
"<layer>.<field>". One metadata key, because safetensors does not fix the order of several: the same cache gives the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.checksums import crc32
from kvtheory.layer.record import Layer, as_array
from kvtheory.layer.rope import Rope

FORMAT, VERSION = "kvtheory-cache", 1
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "uint64": "U64",
    "int32": "I32", "uint32": "U32", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_FIELDS = ("keys", "values", "queries", "output_proj", "positions", "query_positions")


class CorruptCache(ValueError):
    """The file is not a kvtheory cache, is cut short, or contradicts its own header; the message says which."""


class Cache:
    """The layers of one sequence, with its token ids and their surprisal.

    layers: Layers, or callables that return one when asked (lazy). tokens: (n,) int64 or None.
    surprisal_bits: (n,) float64, [t] = -log2 P(t | before t), or None. meta: anything JSON can hold (model, text, versions).
    """

    def __init__(
        self,
        layers: Sequence[Layer | Callable[[], Layer]],
        tokens: Any = None,
        surprisal_bits: Any = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self._layers = list(layers)
        for i, layer in enumerate(self._layers):
            if not (isinstance(layer, Layer) or callable(layer)):
                raise TypeError(
                    f"layers[{i}]: expected a Layer or a callable returning one, got {type(layer).__name__}"
                )
        self.tokens: NDArray[np.int64] | None = None
        if tokens is not None:
            ids = as_array("tokens", tokens)
            if ids.dtype.kind not in "iu":
                raise TypeError(f"tokens: expected integers, got {ids.dtype}")
            checks.shape("tokens", ids, ("n",))
            self.tokens = ids.astype(np.int64, copy=False)
        self.surprisal_bits: NDArray[np.float64] | None = None
        if surprisal_bits is not None:
            bits = checks.floating("surprisal_bits", as_array("surprisal_bits", surprisal_bits)).astype(
                np.float64, copy=False
            )
            checks.shape("surprisal_bits", bits, ("n",), {} if self.tokens is None else {"n": len(self.tokens)})
            self.surprisal_bits = checks.finite("surprisal_bits", bits, ("token",))
        self.meta: dict[str, Any] = json.loads(_json("meta", dict(meta or {})))

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, i: int) -> Layer:
        entry = self._layers[i]
        if isinstance(entry, Layer):
            return entry
        layer = entry()
        if not isinstance(layer, Layer):
            raise TypeError(f"layers[{i}]: expected its callable to return a Layer, got {type(layer).__name__}")
        return layer

    def __iter__(self) -> Iterator[Layer]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        model = self.meta.get("model")
        return f"Cache({len(self)} layers{f', {len(self.tokens)} tokens' if self.tokens is not None else ''}{f', {model}' if model else ''})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to `path`, one layer in memory at a time; `path` holds the whole new file or what it held before."""
        path = Path(path)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            whole = Path(scratch) / "whole"
            self._write(whole, Path(scratch))
            os.replace(whole, path)

    def _write(self, whole: Path, scratch: Path) -> None:
        # Tensors are spilled by element size, widest first in the file: every tensor stays aligned, and nothing is loaded twice.
        entries: dict[int, list[tuple[str, str, list[int], int]]] = {8: [], 4: [], 2: [], 1: []}
        checksums: dict[str, int] = {}
        with ExitStack() as stack:
            spill: dict[int, IO[bytes]] = {
                size: stack.enter_context(open(scratch / f"spill{size}", "w+b")) for size in entries
            }

            def put(name: str, array: NDArray[Any]) -> None:
                code = _CODES.get(array.dtype.newbyteorder("=").name)
                if code is None:
                    raise TypeError(f"{name}: elements of {array.dtype} cannot be stored")
                little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
                raw = little.reshape(-1).view(np.uint8).data
                spill[array.dtype.itemsize].write(raw)
                checksums[name] = crc32(raw)
                entries[array.dtype.itemsize].append((name, code, list(array.shape), little.nbytes))

            for name in ("tokens", "surprisal_bits"):
                if getattr(self, name) is not None:
                    put(name, getattr(self, name))
            records = []
            for i, layer in enumerate(self):
                for field in _FIELDS:
                    if getattr(layer, field) is not None:
                        put(f"{i}.{field}", getattr(layer, field))
                for name, extra in layer.extras.items():
                    put(f"{i}.extras.{name}", extra)
                window = {} if layer.window is None else {"window": layer.window}
                records.append(
                    {
                        "index": layer.index,
                        "scale": layer.scale,
                        "rope": None if layer.rope is None else layer.rope.to_json(),
                        "extras": list(layer.extras),
                        **window,
                    }
                )
            about = {"format": FORMAT, "version": VERSION, "layers": records, "crc32": checksums, "meta": self.meta}
            header: dict[str, Any] = {"__metadata__": {"kvtheory": _json("meta", about)}}
            offset = 0
            for stored in entries.values():
                for name, code, dims, nbytes in stored:
                    header[name] = {"dtype": code, "shape": dims, "data_offsets": [offset, offset + nbytes]}
                    offset += nbytes
            text = _json("header", header).encode()
            text += b" " * (-len(text) % 8)
            with open(whole, "wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
                for source in spill.values():
                    source.seek(0)
                    shutil.copyfileobj(source, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cache:
        """The cache in `path`; its layers are read when asked for. CorruptCache says what is wrong with a file that is none."""
        path = Path(path)
        if not path.is_file():
            found = ", but a folder" if path.is_dir() else ""
            raise FileNotFoundError(f"path: no cache file at {path}{found}")
        with _open(path) as file:
            names = set(file.keys())
            try:
                record = json.loads((file.metadata() or {})["kvtheory"])
                if record["format"] != FORMAT:
                    raise KeyError
                version, layers, meta = record["version"], record["layers"], record["meta"]
            except (KeyError, TypeError, ValueError, RecursionError):
                raise CorruptCache(
                    f"{path}: a safetensors file, but not a kvtheory cache (no kvtheory header)"
                ) from None
            if not isinstance(version, int) or version > VERSION:
                raise CorruptCache(
                    f"{path}: cache format version {version}, this kvtheory reads up to {VERSION}; upgrade it"
                )
            try:
                checksums = record["crc32"]
                if not isinstance(checksums, dict):
                    raise TypeError(f"crc32: expected an object, got {type(checksums).__name__}")
                for i, entry in enumerate(layers):
                    wanted = {f"{i}.keys", f"{i}.values", f"{i}.positions"} | {
                        f"{i}.extras.{n}" for n in entry["extras"]
                    }
                    if not wanted <= names:
                        raise CorruptCache(f"{path}: layer {i} lacks {sorted(wanted - names)[0]!r}")
                    if entry["rope"] is not None:
                        Rope.from_json(entry["rope"])
                tokens, bits = (
                    _read(file, path, n, checksums) if n in names else None for n in ("tokens", "surprisal_bits")
                )
                return cls([_Stored(path, i, entry, checksums) for i, entry in enumerate(layers)], tokens, bits, meta)
            except CorruptCache:
                raise
            except (KeyError, TypeError, AttributeError, ValueError) as problem:
                raise CorruptCache(f"{path}: malformed kvtheory header ({problem})") from None


class _Stored:
    """A layer on disk. Each call reads it anew, so that a walk over a cache holds one layer at a time."""

    def __init__(self, path: Path, i: int, record: dict[str, Any], checksums: dict[str, int]) -> None:
        self.path, self.i, self.record, self.checksums = path, i, record, checksums

    def __call__(self) -> Layer:
        with _open(self.path) as file:
            names = set(file.keys())

            def read(field: str) -> NDArray[Any]:
                return _read(file, self.path, f"{self.i}.{field}", self.checksums)

            get = {field: read(field) if f"{self.i}.{field}" in names else None for field in _FIELDS}
            extras = {name: read(f"extras.{name}") for name in self.record["extras"]}
        rope = self.record["rope"]
        try:
            return Layer(
                **get,
                rope=None if rope is None else Rope.from_json(rope),
                scale=self.record["scale"],
                index=self.record["index"],
                window=self.record.get("window"),
                extras=extras,
            )
        except (ValueError, TypeError, KeyError) as problem:
            raise CorruptCache(f"{self.path}: layer {self.i}: {problem}") from None


def _open(path: Path) -> Any:
    import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16, which safetensors asks it for
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as problem:
        raise CorruptCache(f"{path}: not a readable safetensors file ({problem})") from None


def _read(file: Any, path: Path, name: str, checksums: dict[str, int]) -> NDArray[Any]:
    from safetensors import SafetensorError

    try:
        array: NDArray[Any] = file.get_tensor(name)
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
    ) as problem:  # the last two: a type that NumPy has not
        raise CorruptCache(f"{path}: cannot read tensor {name!r} ({problem})") from None
    if crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) != checksums.get(name):
        raise CorruptCache(f"{path}: tensor {name!r} does not have the checksum that its header states")
    return array


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"{name}: expected what JSON can hold ({problem})") from None
