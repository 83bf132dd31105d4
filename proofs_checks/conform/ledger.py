"""The ledger's claims about an algorithm, run through the same checks with somebody else's codec in place of ours."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import reference
from kvtheory.layer import Decoded, Layer
from proofs_checks.conform.registry import Asked
from proofs_checks.conform.run import Finding
from proofs_checks.conform.search import Violation
from proofs_checks.conform.subject import ForeignError
from proofs_checks.context import Context

#: what a codec claims to be -> (claim of the ledger, the role of the codec in it, our codec of that role)
RELEVANT: dict[str, tuple[tuple[str, str], ...]] = {
    "turboquant-mse": (("quantizers", "reference_turboquant"), ("quantizers", "prod_unbiased")),
    "turboquant-prod": (("quantizers", "prod_unbiased"),),
    "qjl": (("quantizers", "qjl_variance"),),
}


class _Encoded(bytes):
    """Stands for a stream: what it decodes to is known already."""

    decoded: Decoded


class _Foreign:
    """One codec at one width and seed, as the ledger's checks call ours."""

    def __init__(self, asked: Asked, bits: int, seed: int) -> None:
        self.asked, self.bits, self.seed = asked, bits, seed

    def encode(self, layer: Layer) -> bytes:
        out = self.asked.subject.through(
            np.asarray(layer.keys, np.float32), np.asarray(layer.values, np.float32), bits=self.bits, seed=self.seed
        )
        data = _Encoded(b"")
        for name, x, y in (("keys", layer.keys, out.keys), ("values", layer.values, out.values)):
            if y.shape != x.shape or not np.isfinite(y).all():
                raise Violation(f"{name} of shape {x.shape} came back as {y.shape}, or not finite")
        data.decoded = Decoded.of(out.keys, out.values)
        return data

    def decode(self, stream: Any) -> Decoded:
        decoded: Decoded = stream.decoded
        return decoded


class _Stand:
    """Called like our codec's class; gives theirs where it is of the kind and takes the width, else ours, and keeps count of both."""

    def __init__(self, asked: Asked, kind: str | None, ours: Callable[..., Any]) -> None:
        self.asked, self.kind, self.ours = asked, kind, ours
        self.theirs = self.own = 0

    def __call__(self, *, bits: int, seed: int = 0, **options: Any) -> Any:
        if options.get("kind", self.kind) == self.kind:
            try:
                self.asked.subject.ask(
                    "through",
                    [np.ones((1, 2, self.asked.sizes.usual), np.float32)] * 2,
                    options={"bits": bits, "seed": seed},
                )
                self.theirs += 1
                return _Foreign(self.asked, bits, seed)
            except ForeignError as problem:
                if problem.stage != "build":
                    raise
        self.own += 1
        return self.ours(bits=bits, seed=seed, **options)


def findings(asked: Asked, progress: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """A Finding for each claim of RELEVANT that the codec's claims touch.

    Evidence counts where every codec in it was theirs, and where it is no count of the bytes of our streams (kind "exact").
    """
    for own in asked.claims:
        for package, name in RELEVANT.get(own, ()):
            claim = getattr(importlib.import_module(f"proofs_checks.{package}"), name)
            progress(claim.id)
            start = time.perf_counter()
            yield Finding(
                f"ledger:{claim.id}", claim.statement, *_run(asked, claim, own.removeprefix("turboquant-") if "turbo" in own else None),
                seconds=time.perf_counter() - start,
            )  # fmt: skip


def _run(asked: Asked, claim: Any, kind: str | None) -> tuple[str, str, Any]:
    """(verdict, what was seen, where)."""
    if not (asked.widths and asked.seeded):
        return "skipped", "its checks need a codec that is built from bits and seed", None
    ours = reference.QJL if kind is None else reference.TurboQuant
    stand = _Stand(asked, kind, ours)
    functions = claim.look_up() | {"codec": stand}
    if "held_bits" in functions:
        functions["held_bits"] = lambda data, layer: 0.0  # of kind "exact", and about our streams
    counted, failed, undecided = 0, [], []
    try:
        for evidence in claim.run(Context(claim_id=claim.id, claims=1), functions):
            theirs, mixed = stand.theirs, stand.own
            stand.theirs = stand.own = 0
            if getattr(evidence, "kind", "exact") == "exact" or evidence.role != "statement" or not theirs or mixed:
                continue
            counted += 1
            text = f"{evidence.what} ({evidence.ran_on}): {evidence.observed} against {evidence.predicted}"
            if evidence.agrees is False:
                failed.append((text, evidence.ran_on))
            elif evidence.agrees is None:
                undecided.append(text)
    except (ForeignError, Violation) as problem:
        return "fails", str(problem), None
    if failed:
        return "fails", f"{len(failed)} of {counted} comparisons; {failed[0][0]}", failed[0][1]
    if not counted:
        return "skipped", "no comparison of it is about this kind and these widths", None
    if undecided:
        return "not settled", f"{len(undecided)} of {counted} comparisons; {undecided[0]}", None
    return "holds", f"{counted} comparisons", None
