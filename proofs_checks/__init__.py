"""The ledger: every claim of the papers, checked, with the evidence and the wrong variants that the same check refutes.

`python -m proofs_checks` (= `kvtheory verify`) runs it; `claims()` lists it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvtheory import __version__

if TYPE_CHECKING:
    from proofs_checks.claim import Claim

__kvtheory__ = __version__
__all__ = ["claims"]

#: one module per paper, in the order of the ledger
PAPER_MODULES = ("transform_coding", "sequential", "risk", "quantizers")


def claims() -> dict[str, Claim]:
    """Every claim by id, in the order of the papers and of their modules."""
    from proofs_checks.claim import Claim

    found: dict[str, Claim] = {}
    for name in PAPER_MODULES:
        for value in vars(importlib.import_module(f"proofs_checks.{name}")).values():
            if isinstance(value, Claim):
                if value.id in found:
                    raise ValueError(f"two claims have the id {value.id!r}")
                found[value.id] = value
    return found
