"""Code over an array namespace, `xp.name(...)`, is valid for CuPy too: every call is held against CuPy's signature.

CuPy imports without a GPU, but none of its functions runs; NumPy, which the other tests run, takes more arguments and more names. What
cannot be seen so: implicit conversions of CuPy arrays to NumPy's, which raise TypeError, and methods whose object is no array.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
#: what is asked of CuPy only, behind `xp is np`
_CUPY_ONLY = ("cuda", "get_default_memory_pool")
_MODULE = ("__name__", "__version__")
#: methods of arrays that are always NumPy's: of codecs' parameters
_ON_THE_HOST = ("unit.bits.max",)


@dataclass(frozen=True)
class Use:
    """An attribute of a namespace, and how it is called, if it is."""

    place: str
    path: tuple[str, ...]
    call: ast.Call | None
    method: bool = False

    def __str__(self) -> str:
        return f"{self.place} {'.'.join(self.path)}"


def _path(node: ast.AST) -> tuple[str, ...] | None:
    """("xp", "linalg", "norm") of xp.linalg.norm."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else None


def _namespaces(tree: ast.AST) -> set[str]:
    """Names that stand for a namespace: xp, and whatever namespace(...) is bound to."""
    names = {"xp"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = _path(node.value.func)
            if called and called[-1] in ("namespace", "get_array_module", "array_namespace"):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def uses(text: str, file: str) -> Iterator[Use]:
    """All uses of a namespace in a file, and calls with keywords of methods in functions that have one."""
    tree = ast.parse(text)
    names = _namespaces(tree)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    called: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (path := _path(node.func)) and path[0] in names and len(path) > 1:
            inner = node.func
            while isinstance(inner, ast.Attribute):
                called.add(id(inner))
                inner = inner.value
            yield Use(f"{file}:{node.lineno}", path[1:], node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called and (path := _path(node)) and path[0] in names:
            yield Use(f"{file}:{node.lineno}", path[1:], None)
    for function in functions:
        own = list(ast.walk(function))
        if not any(isinstance(n, ast.Name) and n.id in names for n in own):
            continue
        for node in own:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.keywords:
                path = _path(node.func)
                if (path is None or path[0] not in {*names, "np", "numpy"}) and ast.unparse(
                    node.func
                ) not in _ON_THE_HOST:
                    yield Use(f"{file}:{node.lineno}", (node.func.attr,), node, method=True)


def _resolve(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def complaint(use: Use, module: Any) -> str | None:
    """What is wrong with a use in this namespace."""
    if use.path[0] in _MODULE:
        return None
    if use.method:
        return _method_complaint(use, module)
    try:
        found = _resolve(module, use.path)
    except AttributeError:
        return f"{module.__name__} has no {'.'.join(use.path)}"
    if use.call is None:
        return None
    given, keywords = use.call.args, [k.arg for k in use.call.keywords]
    if isinstance(found, getattr(module, "ufunc", ())):
        if len(given) > found.nin + found.nout:
            return f"takes {found.nin} arrays"
        wrong = [k for k in keywords if k not in ("out", "dtype")]
        return f"knows no {wrong}" if wrong else None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # a builtin that does not say
    if any(isinstance(a, ast.Starred) for a in given) or None in keywords:
        bind = signature.bind_partial
        given = [a for a in given if not isinstance(a, ast.Starred)]
    else:
        bind = signature.bind
    try:
        bind(*given, **{k: None for k in keywords if k is not None})
    except TypeError as error:
        return f"{error} in {'.'.join(use.path)}{signature}"
    return None


def _method_complaint(use: Use, module: Any) -> str | None:
    method = getattr(module.ndarray, use.path[0], None)
    if method is None or use.call is None:
        return None  # of another object
    try:
        known = set(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        head = (method.__doc__ or "").splitlines()[:1]
        if not head or "(" not in head[0]:
            return None
        known = {
            p.split("=")[0].split(":")[0].split()[-1].strip("*")
            for p in head[0].split("(", 1)[1].rsplit(")", 1)[0].split(",")
            if p.split()
        }
    wrong = [k.arg for k in use.call.keywords if k.arg is not None and k.arg not in known]
    return f"{module.__name__}.ndarray.{use.path[0]} knows no {wrong}" if wrong and "kwargs" not in known else None


def _all() -> list[Use]:
    found: list[Use] = []
    for package in ("gpu", "kvtheory", "reference"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "xp" in text or "namespace(" in text:
                found += uses(text, str(path.relative_to(ROOT)))
    return found


USES = _all()


def test_there_is_array_level_code() -> None:
    assert len([u for u in USES if u.call is not None and not u.method]) >= 50
    assert len({u.place.split(":")[0] for u in USES}) >= 10


def test_every_call_is_valid_for_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    wrong = [f"{u}: {c}" for u in USES if (c := complaint(u, cupy))]
    assert not wrong, "\n".join(wrong)


def test_every_call_is_valid_for_numpy() -> None:
    wrong = [f"{u}: {c}" for u in USES if u.path[0] not in _CUPY_ONLY and (c := complaint(u, np))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("xp.sum(x, where=m)", "where"),
        ("xp.clip(x, min=0)", "min|a_min"),
        ("xp.take_along_axis(x, i)", "axis"),
        ("xp.unpackbits(x, count=3)", "count"),
        ("xp.unstack(x)", "has no unstack"),
        ("xp.linalg.nothing(x)", "has no linalg.nothing"),
        ("xp.nothing", "has no nothing"),
        ("xp.abs(x, where=m)", "where"),
        ("xp.abs(x, y, z)", "takes 1 arrays"),
        ("xp.zeros(*shape, fill=3)", "fill"),
        ("x.sum(where=m) + xp.zeros(1)", "where"),
    ],
)
def test_a_call_that_numpy_takes_and_cupy_does_not_is_seen(call: str, said: str) -> None:
    cupy = pytest.importorskip("cupy")
    found = [
        c for u in uses(f"def f(x, i, m, y, z, shape, xp):\n    return {call}\n", "f.py") if (c := complaint(u, cupy))
    ]
    assert len(found) == 1 and re.search(said, found[0]), found


def test_other_names_of_a_namespace_are_known() -> None:
    text = "def f(x):\n    lib = namespace(x)\n    return lib.zeros(3), lib.float32, np.sum(x, where=x > 0)\n"
    assert [u.path for u in uses(text, "f.py")] == [("zeros",), ("float32",)]
