"""`kvtheory inspect`: what a stream says of itself, and where each of its bits went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    stream: Annotated[Path, typer.Argument(metavar="FILE", help="A stream or a state, as a codec wrote it.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print header, shapes and parts of a compressed cache, with bytes and bits per number of each part. Nothing is decoded."""
    import json as jsons

    import reference

    try:
        found = reference.inspect(stream.read_bytes())
    except OSError as problem:
        raise typer.BadParameter(f"{stream}: {problem.strerror}", param_hint="FILE") from None
    except reference.CorruptStream as problem:
        raise typer.BadParameter(f"{stream}: {problem}", param_hint="FILE") from None
    record = found.record()
    if json:
        typer.echo(jsons.dumps(record, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    parameters = ", ".join(f"{name}={value!r}" for name, value in record["parameters"].items())
    lines = [
        ("what", {"layer": "one layer", "layers": f"{found.layers} layers, each coded alone", "cache": "layers coded together",
                  "state": "the fitted state of a codec, for reference.load", "sessions": "sessions stored together"}[found.kind]),
        ("format version", str(found.version)),
        ("codec", f"{found.codec}({parameters})"),
        ("state", found.digest or "none: data-oblivious"),
    ]  # fmt: skip
    if found.kind == "state":
        del lines[-1]
    for shape in record["layers"][:1]:
        same = all({**other, "index": None} == {**shape, "index": None} for other in record["layers"])
        types = (
            shape["key_dtype"]
            if shape["key_dtype"] == shape["value_dtype"]
            else f"{shape['key_dtype']} keys, {shape['value_dtype']} values"
        )
        sizes = f"{shape['kv_heads']} KV heads x {shape['tokens']:,} tokens x ({shape['head_dim']} + {shape['value_dim']}), {types}"
        lines.append(("shape" if same else "first shape", sizes))
        indices = [other["index"] for other in record["layers"]]
        if indices != [None] * len(indices):
            lines.append(("index", ", ".join("-" if i is None else str(i) for i in indices)))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.print(f"{name:<{width}}  {value}", markup=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("part", "bytes", "bits per number", "share"):
        table.add_column(heading, justify="left" if heading == "part" else "right", no_wrap=True)
    rows = [(part["name"], part["bytes"], part["bits_per_number"]) for part in record["parts"]]
    for name, size, rate in [*rows, ("total", found.total_bytes, found.held_bits)]:
        table.add_row(
            name, f"{size:,}", "-" if rate is None else f"{rate:.4f}", f"{size / found.total_bytes:.2%}", end_section=name == rows[-1][0]
        )  # fmt: skip
    console.print()
    console.print(table)
