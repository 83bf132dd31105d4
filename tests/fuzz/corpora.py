"""The small committed corpora of files.py: `python -m tests.fuzz.corpora` writes tests/fuzz/corpus/."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

CORPUS = Path(__file__).parent / "corpus"


def inputs() -> dict[str, dict[str, bytes]]:
    """Honest files by target and name, a few hundred bytes to a few kilobytes each."""
    import torch
    from safetensors.numpy import save

    from tests.fuzz.seeds import cache_files

    arrays = {
        f"layers.{i}.{side}": np.arange(8, dtype=np.float16).reshape(1, 2, 4) + i
        for i in (0, 1)
        for side in ("keys", "values")
    }
    stored, packed = io.BytesIO(), io.BytesIO()
    np.savez(stored, **arrays)
    np.savez_compressed(packed, **arrays)
    made: dict[str, dict[str, bytes]] = {"npz": {"stored": stored.getvalue(), "packed": packed.getvalue()}}
    made["cache"] = {f"cache-{i}": data for i, data in enumerate(cache_files())}
    made["tensors"] = {"named": save(arrays)}
    saved = io.BytesIO()
    torch.save(
        [
            (torch.from_numpy(arrays[f"layers.{i}.keys"]), torch.from_numpy(arrays[f"layers.{i}.values"]))
            for i in (0, 1)
        ],
        saved,
    )
    made["torch"] = {"pairs": saved.getvalue()}
    record = {
        "id": "a/b",
        "as_expected": True,
        "verdict": "holds",
        "evidence": [],
        "mutants": [{"name": "m", "refuted": True}],
        "seconds": 0.1,
    }
    run = {"seed": 0, "budget": "quick", "cache": None, "sources": "0" * 64}
    made["ledger"] = {"claim": json.dumps({"run": run, "claim": record}, indent=1).encode()}
    made["task"] = {"task": json.dumps({"rows": [{"x": 1, "y": 0.5}], "timing": {"seconds": 0.1}}).encode()}
    lines = [
        {"prompt": "a", "answer": "b", "metric": "exact"}, {"prompt": "c", "answer": ["d", "é"], "metric": "contains", "max_new_tokens": 3, "opening": "x"},
    ]  # fmt: skip
    made["questions"] = {"lines": "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()}
    return made


def main() -> None:
    for target, files in inputs().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (CORPUS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
