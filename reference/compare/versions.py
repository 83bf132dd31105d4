"""Which code a codec's numbers depend on: a digest of its own sources and of what they import, so that a change touches its own tasks only.

    closure(m)   m, and what m imports of kvtheory and reference, at its top or inside functions, and so on; not what it imports for types
                 alone (`if TYPE_CHECKING`), and of packages above a module their own file, not all that they gather
    version      SHA-256 over the closure's files by name, and the versions of the other libraries that the closure imports

A codec that is found by name only (the table in reference/__init__.py, `reference.codec_class`) is in nobody's closure but its own: that
is what keeps codecs apart. What is common (streams, entropy coding, the measuring itself) is in everybody's.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from reference.codec import Codec, codec_class

__all__ = ["closure", "of_codec", "of_modules"]

#: packages whose sources are looked into
OURS = ("kvtheory", "reference")


class Named(Protocol):
    """What stands for a codec by its name (FittedCodec, Spec's codec)."""

    @property
    def codec_id(self) -> str: ...


def of_codec(codec: Codec | Named, run: Callable[..., Any] | None = None) -> str:
    """Version of the numbers that `run` makes of a codec; run None: of the codec's own, as of a state that it was fitted to."""
    if isinstance(codec, Codec):
        modules = {type(one).__module__ for one in _parts(codec)}
    else:
        modules = {one.__module__ for one in getattr(codec, "classes", (codec_class(codec.codec_id),))}
    return of_modules(*sorted(modules), *([run.__module__] if run is not None else []))


def _parts(codec: Codec) -> Iterator[Codec]:
    """A codec and the codecs among its parameters (stages of a Pipeline, an inner quantiser)."""
    yield codec
    for field in dataclasses.fields(codec):  # type: ignore[arg-type]
        value = getattr(codec, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Codec):
                yield from _parts(one)


@functools.lru_cache(maxsize=256)
def of_modules(*names: str) -> str:
    """16 hex digits of the SHA-256 of all that modules of these names depend on."""
    ours: set[str] = set()
    others: set[str] = set()
    for name in names:
        own, foreign = closure(name)
        ours |= own
        others |= foreign
    digest = hashlib.sha256()
    for name in sorted(ours):
        digest.update(f"{name}\0".encode() + hashlib.sha256(_source(name)).digest())
    for name in sorted(others):
        digest.update(f"{name} {_version(name)}\0".encode())
    return digest.hexdigest()[:16]


def closure(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """(modules of OURS, and of any package that `name` is of; names of other libraries) that a module depends on, itself included."""
    ours = {*OURS, name.partition(".")[0]}
    found: set[str] = set()
    foreign: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        for asked in _imports(one, frozenset(ours)):
            top = asked.partition(".")[0]
            if top in ours:
                waiting.append(asked)
            elif top not in sys.stdlib_module_names or top == "zlib":
                foreign.add(top)
    # packages above are run before a module is; what they gather for others is not its own
    above = {one.rsplit(".", i)[0] for one in found for i in range(1, one.count(".") + 1)}
    return frozenset(found | above), frozenset(foreign)


def _path(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _source(name: str) -> bytes:
    path = _path(name)
    return b"" if path is None else path.read_bytes()


@functools.lru_cache(maxsize=1024)
def _imports(name: str, ours: frozenset[str]) -> frozenset[str]:
    """Full names of the modules that a module's source asks for."""
    path = _path(name)
    if path is None or path.suffix != ".py":
        return frozenset()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_bytes())
    found: set[str] = set()
    aliases: dict[str, str] = {}
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                if alias.name in ours:  # `import kvtheory`: what is taken of it is what counts
                    aliases[alias.asname or top] = alias.name
                else:
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{above}.{base}" if base else above
            for alias in node.names:
                found.add(_home(base, alias.name) if base.partition(".")[0] in ours else base)
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            found.add(_home(aliases[node.value.id], node.attr))
    return frozenset(found - {name})


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from _nodes(other)
            continue
        yield child
        yield from _nodes(child)


def _home(package: str, attribute: str) -> str:
    """The module that `from package import attribute` takes from."""
    try:
        if importlib.util.find_spec(f"{package}.{attribute}") is not None:
            return f"{package}.{attribute}"
    except ModuleNotFoundError:  # package is a plain module
        return package
    value = getattr(importlib.import_module(package), attribute, None)
    if isinstance(value, ModuleType):
        return value.__name__
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) and home.partition(".")[0] == package.partition(".")[0] else package


def _version(name: str) -> str:
    if name == "zlib":
        return zlib.ZLIB_RUNTIME_VERSION
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
