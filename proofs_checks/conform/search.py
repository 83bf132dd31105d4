"""The least input that breaks a property: hypothesis draws and shrinks, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Violation(Exception):
    """A property does not hold. instance: what showed it (an Instance, or any text); seen: what came instead."""

    def __init__(self, seen: str, instance: Any = None) -> None:
        super().__init__(seen)
        self.seen, self.instance = seen, instance


class Skip(Exception):
    """A property does not apply to this codec; the message says why."""


def least(
    strategy: Any,
    check: Callable[[Any], None],
    *,
    order: Callable[[Any], Any],
    examples: int = 40,
    seconds: float = 20.0,
) -> None:
    """Raise the Violation of the simplest drawn instance that `check` fails on; return if none of `examples` does.

    After `seconds` no further instance is tried: what failed before that is reported as it is.
    """
    try:
        import hypothesis
    except ImportError:  # the command says so before it starts
        raise ImportError("the conformance runner needs the package hypothesis") from None
    from hypothesis import HealthCheck, Phase, Verbosity

    start, best = time.monotonic(), []  # type: ignore[var-annotated]

    def run(instance: Any) -> None:
        if time.monotonic() - start > seconds:
            return
        try:
            check(instance)
        except Violation as violation:
            violation.instance = violation.instance or instance
            if not best or order(violation.instance) <= order(best[0].instance):
                best[:] = [violation]
            raise

    settings = hypothesis.settings(
        max_examples=examples, database=None, derandomize=True, deadline=None, report_multiple_bugs=False, print_blob=False,
        verbosity=Verbosity.quiet, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        settings(hypothesis.given(strategy)(run))()
    except Violation:
        pass
    except hypothesis.errors.Flaky:
        pass  # out of time while shrinking, or a codec that does not do the same twice
    if best:
        raise best[0].with_traceback(None)
