"""`kvtheory import`: a cache that another program captured, as a file of kvtheory.Cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A .npz, .safetensors or .pt (tensors alone) of keys and values.")],
    out: Annotated[Path, typer.Option(help="File to write; replaced only when all is there.")],
    layout: Annotated[str, typer.Option(help="Axes of the keys, one letter each: l(ayers) b(atch) h(eads) t(okens) d (channels), such as bhtd, htd, thd.")],
    values_layout: Annotated[str | None, typer.Option(help="That of the values. Default: the keys'.")] = None,
    keys: Annotated[str | None, typer.Option(help="Name of the keys, {layer} for the number, such as layers.{layer}.k. Default: the usual ones.")] = None,
    values: Annotated[str | None, typer.Option(help="Name of the values.")] = None,
    queries: Annotated[str | None, typer.Option(help="Name of the queries, if there are any.")] = None,
    queries_layout: Annotated[str | None, typer.Option(help="That of the queries. Default: the keys'.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Query j stands at token j. Default: queries see all tokens.")] = False,
    positions: Annotated[str | None, typer.Option(help="Name of the tokens' positions. Default: 0, 1, ...")] = None,
    batch: Annotated[int | None, typer.Option(min=0, help="Row of the batch. Needed where there are several.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Drop this many tokens at the start, padding.")] = 0,
    rope_theta: Annotated[float | None, typer.Option(min=0, help="The keys carry RoPE of this base.")] = None,
    rope_dim: Annotated[int | None, typer.Option(min=2, help="Channels that it rotates. Default: all.")] = None,
    rope_layout: Annotated[str, typer.Option(help="half (llama) or interleaved.")] = "half",
    inv_freq: Annotated[str | None, typer.Option(help="Name of RoPE's frequencies (pairs,), in place of a base.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Expect this many layers.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Expect this many KV heads.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Expect this many tokens, after --skip.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Expect this many channels of a key.")] = None,
) -> None:  # fmt: skip
    """Import keys and values (and queries) that another program saved; checked, written whole or not at all, and read back."""
    from rich.console import Console

    from kvtheory import interop
    from kvtheory.layer import Cache

    console = Console(highlight=False, soft_wrap=True)
    expected = {"layers": layers, "heads": heads, "tokens": tokens, "channels": head_dim}
    try:
        if not out.parent.is_dir():
            raise ValueError(f"out: there is no folder {out.parent}")
        if out.exists() and source.exists() and out.samefile(source):
            raise ValueError("out: expected another file than SRC")
        file = interop.open_file(source)
        try:
            rope = _rope(file, interop.layout.check(layout), keys, rope_theta, rope_dim, rope_layout, inv_freq)
            how = interop.How(
                layout, values_layout, queries_layout, keys, values, queries, positions, batch, skip, causal, rope,
                {axis: n for axis, n in expected.items() if n is not None},
            )  # fmt: skip
            cache = interop.read_cache(file, how)
            cache.save(out)
            written = Cache.load(out)
            for i, layer in enumerate(cache):
                if not interop.same(layer, written[i]):
                    raise OSError(f"{out}: layer {i} does not read back as it was written")
        finally:
            file.close()
    except KeyboardInterrupt:
        console.print("\ninterrupted; nothing was written")
        raise typer.Exit(130) from None
    except (ValueError, TypeError, OSError, MemoryError) as problem:  # CannotImport is a ValueError
        raise typer.BadParameter(str(problem) or type(problem).__name__) from None
    first = written[0]
    seen = (
        "" if first.queries is None else f", {first.queries.shape[0]} query heads x {first.queries.shape[1]:,} queries"
    )
    console.print(
        f"{out}: {len(written)} layer{'s' * (len(written) > 1)} of {first.kv_heads} KV heads x {first.tokens:,} tokens x "
        f"({first.head_dim} + {first.value_dim}), {first.keys.dtype}{seen}{', RoPE' * (first.rope is not None)}; "
        f"{out.stat().st_size / 1e6:,.1f} MB, read back bit for bit",
        markup=False,
    )


def _rope(
    file: Any, word: str, keys: str | None, theta: float | None, dim: int | None, layout: str, inv_freq: str | None
) -> Any:  # fmt: skip
    """The Rope that the options name, or None."""
    import numpy as np

    from kvtheory.interop import layout as layouts
    from kvtheory.interop.errors import CannotImport
    from kvtheory.layer import Rope

    if layout not in ("half", "interleaved"):
        raise ValueError(f"rope_layout: expected half or interleaved, got {layout!r}")
    if theta is None and inv_freq is None:
        if dim is not None:
            raise ValueError("rope_dim: expected --rope-theta with it")
        return None
    if inv_freq is not None:
        if theta is not None or dim is not None:
            raise ValueError("inv_freq: expected frequencies or a base, got both")
        if inv_freq not in file.names():
            raise CannotImport(f"{file.path}: no array is named {inv_freq!r}, for the frequencies")
        return Rope(np.asarray(file.read(inv_freq), np.float64), layout)  # type: ignore[arg-type]
    names = layouts.exactly(file.names(), keys) if keys is not None else layouts.find(file.names())[0]
    shape = file.shape(next(iter(names.values())))
    if len(shape) != len(word):
        raise CannotImport(f"{file.path}: expected {len(word)} axes, as the layout {word} says, got shape {shape}")
    dim = shape[word.index("d")] if dim is None else dim
    if dim % 2 or dim < 2:
        raise ValueError(f"rope_dim: expected an even number of channels, got {dim}")
    if not theta or theta <= 0:
        raise ValueError(f"rope_theta: expected a number above 0, got {theta}")
    return Rope(float(theta) ** (-np.arange(0, dim, 2) / dim), layout)  # type: ignore[arg-type]
