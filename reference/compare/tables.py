"""A comparison on disk: results.parquet, the same bytes for the same numbers, and timings.parquet beside it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvtheory
from kvtheory import checks, files

__all__ = ["COLUMNS", "TIMING_COLUMNS", "host", "parquet", "require_pyarrow", "write"]

Row = dict[str, Any]

#: results.parquet: name -> (type of pyarrow, may be null, meaning)
COLUMNS: dict[str, tuple[str, bool, str]] = {
    "model": ("string", False, "model of the capture"),
    "text": ("string", False, "text of the capture"),
    "cache": ("string", False, "first 16 hex digits of the SHA-256 of the captured cache's file"),
    "codec": ("string", False, "codec id"),
    "parameters": ("string", False, "constructor arguments, JSON with sorted names"),
    "state": ("string", False, "first 16 hex digits of the SHA-256 of the codec's fitted state; empty if it has none"),
    "calibration": (
        "string",
        False,
        "what the state was fitted to: text, tokens, start of its cache's SHA-256; empty if nothing was fitted here",
    ),
    "bits": ("double", True, "nominal bits per number, the constructor's; null if it has none"),
    "seed": ("int64", True, "seed of the codec's own randomness; null if it has none"),
    "dtype": ("string", False, "element type of the coded numbers"),
    "prefix": ("int32", False, "tokens at positions below are coded"),
    "held": ("int32", False, "positions of held-out queries after the prefix"),
    "layer": ("int32", False, "index of the layer in its model"),
    "head": ("int32", True, "KV head whose query heads make up o; null: all heads of the layer"),
    "segment": ("int32", False, "segment of consecutive held-out queries"),
    "queries": ("int32", False, "held-out queries in the segment"),
    "numerator": ("double", False, "sum over the segment's queries of ||o_hat - o||^2"),
    "denominator": ("double", False, "sum over the segment's queries of ||o||^2"),
    "numbers": ("int64", False, "keys.size + values.size of the layer's prefix"),
    "stream_bytes": ("int64", False, "bytes of the stream that holds the layer: everything but the fitted state"),
    "stream_numbers": ("int64", False, "numbers in that stream (of all its layers, where layers are coded together)"),
    "decode_flops": (
        "int64",
        True,
        "floating-point operations of decoding that stream; null where the codec does not say",
    ),
    "held_bits": ("double", False, "8 stream_bytes / stream_numbers, bits per number"),
    "state_bytes": ("int64", False, "bytes of the fitted state, which serves any number of streams"),
    "amortised_bits": ("double", False, "held_bits + 8 state_bytes / numbers of all layers of this cache in the table"),
    "window": ("int32", True, "sliding window of the layer where shorter than the text; null: none"),
    "kept": ("double", False, "tokens left of each KV head (of this one, or their mean) / tokens coded"),
    "law": (
        "string",
        False,
        "queries that the codec was given: prompt, or held-out (an oracle: those that it is judged by)",
    ),
}

#: timings.parquet: a row a task; what does not repeat is here and nowhere else
TIMING_COLUMNS: dict[str, tuple[str, bool, str]] = {
    **{name: COLUMNS[name] for name in ("model", "text", "cache", "codec", "parameters", "bits", "seed")},
    "task": (
        "string",
        False,
        "fit: of a codec; attention: one layer's error; model: the model's own next tokens; passkey: a sample of it",
    ),
    "layers": ("string", False, "indices of the layers of the task"),
    "seconds": ("double", False, "of reading, coding, decoding and measuring in the worker"),
    "cpu_seconds": (
        "double",
        True,
        "CPU seconds of the same, all threads: what a busy machine does not add to; null for a fit",
    ),
    "encode_seconds": ("double", True, "CPU seconds of encoding all layers of the task; null for a fit"),
    "decode_seconds": ("double", True, "CPU seconds of decoding them from the bytes; null for a fit"),
    "cpu": ("string", False, "of the machine that wrote this file; workers of a cluster may be others"),
    "cores": ("int32", False, "logical cores of it"),
    "platform": ("string", False, "operating system and machine"),
    "threads": ("string", False, "OMP_NUM_THREADS as set"),
    "versions": ("string", False, "JSON: python, numpy, scipy, ml_dtypes, pyarrow, kvtheory"),
}


def write(folder: str | os.PathLike[str], rows: Sequence[Row], timings: Sequence[Row]) -> tuple[Path, Path]:
    """results.parquet and timings.parquet in `folder`, each whole or not at all; their paths.

    Equal rows give equal bytes of results.parquet under one version of pyarrow. ModuleNotFoundError names the extra that has it.
    """
    require_pyarrow()
    table: dict[tuple[Any, ...], int] = {}
    for row in rows:
        if row["head"] is None and row["segment"] == 0:
            table[_identity(row)] = table.get(_identity(row), 0) + row["numbers"]
    results = [
        {**row, "amortised_bits": row["held_bits"] + 8 * row["state_bytes"] / table[_identity(row)]} for row in rows
    ]
    facts = host()
    folder = Path(folder)
    paths = folder / "results.parquet", folder / "timings.parquet"
    parquet(paths[0], COLUMNS, results)
    parquet(paths[1], TIMING_COLUMNS, [{"task": "attention", **row, **facts} for row in timings])
    return paths


def _identity(row: Row) -> tuple[Any, ...]:
    """One codec on one cache."""
    return tuple(row[name] for name in ("cache", "prefix", "held", "dtype", "codec", "parameters", "state", "law"))


def host() -> Row:
    """cpu, cores, platform, threads and versions, as timings.parquet has them."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"kvtheory": kvtheory.__version__, "python": platform.python_version()}
    for name in ("numpy", "scipy", "ml_dtypes", "pyarrow"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "versions": json.dumps(versions, sort_keys=True),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def require_pyarrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"Parquet results need pyarrow, of the extra `sweep`: {checks.install('sweep')}"
        ) from None
    return pyarrow


def parquet(path: Path, columns: Mapping[str, tuple[str, bool, str]], rows: Sequence[Row]) -> None:
    """The rows as a Parquet file with these columns (see COLUMNS), whole or not at all."""
    pa = require_pyarrow()
    import pyarrow.parquet

    schema = pa.schema(
        [
            pa.field(name, pa.type_for_alias(kind), nullable=nullable, metadata={"meaning": meaning})
            for name, (kind, nullable, meaning) in columns.items()
        ],
        metadata={"kvtheory": f"docs/compare.md, kvtheory {kvtheory.__version__}"},
    )
    table = pa.Table.from_pylist(
        [{n: row.get(n) if nullable else row[n] for n, (_, nullable, _) in columns.items()} for row in rows],
        schema=schema,
    )
    with files.replacing(path) as scratch:
        pyarrow.parquet.write_table(table, scratch, compression="zstd")
