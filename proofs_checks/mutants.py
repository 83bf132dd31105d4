"""Systematic mutants: the slips that formulas suffer from, applied to any function by its signature.

Each maker returns Mutants for one role of a claim. They keep shapes, so that a check refutes them by numbers and not by a crash.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from proofs_checks.claim import Function, Mutant

__all__ = ["dimension", "heads_by_modulo", "natural_log", "scales", "square_dropped", "swapped", "transposed"]


def _arguments(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def _times(value: Any, factor: Any) -> Any:
    if isinstance(value, Fraction) and isinstance(factor, float) and factor in (2.0, 0.5):
        return value * Fraction(factor)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_times(x, factor) for x in value)
    return value * factor


def _root(value: Any) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_root(x) for x in value)
    return np.sqrt(value) if isinstance(value, np.ndarray) else math.sqrt(value)


def _on_output(
    name: str, role: str, change: Callable[[Any, inspect.BoundArguments], Any], fields: Iterable[str] = ()
) -> Mutant:
    """A mutant that changes what the function returns; of a record (dataclass or named tuple), the named fields only."""

    def wrong(true: Function) -> Function:
        @functools.wraps(true)
        def mutated(*args: Any, **kwargs: Any) -> Any:
            bound = _arguments(true, args, kwargs)
            result = true(*args, **kwargs)
            names = tuple(fields)
            if not names:
                return change(result, bound)
            new = {field: change(getattr(result, field), bound) for field in names}
            return result._replace(**new) if hasattr(result, "_replace") else dataclasses.replace(result, **new)

        return mutated

    suffix = f" in {', '.join(fields)}" if fields else ""
    return Mutant(f"{role}: {name}{suffix}", role, wrong)


def scales(role: str, *, fields: Iterable[str] = ()) -> list[Mutant]:
    """Factors 2 and 1/2."""
    return [
        _on_output("factor 2", role, lambda x, _: _times(x, 2.0), fields),
        _on_output("factor 1/2", role, lambda x, _: _times(x, 0.5), fields),
    ]


def dimension(role: str, size: Callable[[dict[str, Any]], int], *, fields: Iterable[str] = ()) -> list[Mutant]:
    """Factors d and sqrt d (the 1/d of a scale^2 lost, or lost once). `size(arguments)` gives d."""
    return [
        _on_output("factor d", role, lambda x, b: _times(x, float(size(b.arguments))), fields),
        _on_output("factor sqrt d", role, lambda x, b: _times(x, float(size(b.arguments)) ** 0.5), fields),
    ]


def square_dropped(role: str, *, fields: Iterable[str] = ()) -> list[Mutant]:
    """A norm where its square belongs."""
    return [_on_output("square dropped", role, lambda x, _: _root(x), fields)]


def natural_log(role: str, *, fields: Iterable[str] = ()) -> list[Mutant]:
    """Nats where bits belong."""
    return [_on_output("natural for binary logarithm", role, lambda x, _: _times(x, math.log(2)), fields)]


def _on_input(name: str, role: str, change: Callable[[dict[str, Any]], None]) -> Mutant:
    def wrong(true: Function) -> Function:
        @functools.wraps(true)
        def mutated(*args: Any, **kwargs: Any) -> Any:
            bound = _arguments(true, args, kwargs)
            change(bound.arguments)
            return true(*bound.args, **bound.kwargs)

        return mutated

    return Mutant(f"{role}: {name}", role, wrong)


def swapped(role: str, first: str, second: str) -> list[Mutant]:
    """Two arguments of the same shape exchanged (keys and values, say); a check needs an instance where they are alike in shape."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[first], arguments[second] = arguments[second], arguments[first]

    return [_on_input(f"{first} and {second} swapped", role, change)]


def transposed(role: str, name: str) -> list[Mutant]:
    """A matrix read in the other order (W_O stored as (out, in), read as (in, out)): same shape, wrong entries."""

    def change(arguments: dict[str, Any]) -> None:
        x = np.asarray(arguments[name])
        arguments[name] = np.ascontiguousarray(np.swapaxes(x, -1, -2)).reshape(x.shape)

    return [_on_input(f"{name} transposed", role, change)]


def heads_by_modulo(role: str) -> list[Mutant]:
    """Query head h reads KV head h % kv_heads instead of h // group; for functions of a `layer`, or of `queries` and `keys`."""

    def permute(queries: Any, kv_heads: int) -> Any:
        heads = len(queries)
        group = heads // kv_heads
        # position h of the new array holds the head that modulo mapping would have read KV head h // group
        order = [kv + kv_heads * j for kv in range(kv_heads) for j in range(group)]
        return np.asarray(queries)[order]

    def change(arguments: dict[str, Any]) -> None:
        if "layer" in arguments:
            layer = arguments["layer"]
            arguments["layer"] = layer.replace(queries=permute(layer.queries, layer.kv_heads))
        else:
            arguments["queries"] = permute(arguments["queries"], len(arguments["keys"]))

    return [_on_input("KV head by modulo", role, change)]
