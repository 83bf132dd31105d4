"""What was measured on real models, saved: tables that `python -m benchmarks.sequential` writes, each with its command and its plan.

Claims read them, so that the ledger needs neither torch nor weights; whoever doubts a table runs its command.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

__all__ = ["MODELS", "load"]

#: in the order of the ledger
MODELS = ("smol", "qwen", "qwen-1.5b")


def load(kind: str) -> list[dict[str, Any]]:
    """The tables of one measurement, of every model that has one; none where `python -m benchmarks.sequential KIND` was never saved."""
    folder = resources.files("proofs_checks.sequential.measured")
    found = []
    for model in MODELS:
        file = folder / f"{kind}-{model}.json"
        if file.is_file():
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return found
