"""Which heads are compressible: the spectrum of Sigma of every head of captured caches, as numbers and as a heat map.

    python benchmarks/spectra.py --cache smol=CAPTURE.safetensors qwen=CAPTURE.safetensors [--out docs/risk-spectra.png]

Of each query head: its queries at the positions behind the first `--tokens`, these tokens' keys and values, the centred profile (C-D1). Shares
of tr Sigma left after K/3 directions at K = tokens/8 (what the query-aware rate tail_{K/3}/K promises over tr Sigma/K), the effective rank
(tr Sigma)^2 / sum lambda^2, and the attention on the first four tokens. `--held` adds: how much of the energy that half of the queries see is held
by as many directions of the other half, of a Gaussian fitted to it, of the keys; and, with `--other` (same model, another text), of its queries.
`kvtheory capture` makes the caches.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SINKS = 4


def measure(cache: Any, tokens: int, queries: int, held: bool, other: Any = None) -> list[dict[str, float]]:
    """A row for each query head."""
    from kvtheory import risk
    from kvtheory.risk import maps

    rows = []
    m = tokens // 8 // 3
    for i, layer in enumerate(cache):
        late = np.flatnonzero(layer.query_positions >= tokens)
        late = late[np.unique(np.linspace(0, len(late) - 1, min(queries, len(late))).round().astype(int))]
        for h in range(layer.query_heads):
            kv = h // layer.group
            k, v = (np.asarray(x[kv, :tokens], np.float64) for x in (layer.keys, layer.values))
            q = np.asarray(layer.queries[h, late], np.float64)
            g = risk.profile_gram(q, k, v, layer.scale)
            values = np.linalg.eigvalsh(g)[::-1].clip(0)
            trace = float(np.trace(g))
            row = {
                "layer": i if layer.index is None else layer.index, "head": h, "trace": trace / tokens, "tail": float(values[m:].sum() / values.sum()),
                "rank": float(values.sum() ** 2 / (values**2).sum()), "sink": float(risk.density(q, k, scale=layer.scale)[:SINKS].sum(axis=0).mean() / tokens),
            }  # fmt: skip
            rows.append(row)
            if not held:
                continue
            # by half of the queries, on the other half; and by another text's on this one's
            even, odd = (risk.profile_gram(q[part::2], k, v, layer.scale) for part in (0, 1))
            row["held, own text"] = maps.held_energy(odd, maps.profile_map(even, m))
            row["held, keys"] = maps.held_energy(odd, maps.keys_pca(k, m))
            fit = risk.laws.gaussian_fit(q[::2], len(q))
            row["held, Gaussian fit"] = maps.held_energy(
                odd, maps.profile_map(risk.profile_gram(fit, k, v, layer.scale), m)
            )
            row["best"] = maps.held_energy(odd, maps.profile_map(odd, m))
            if other is not None:
                foreign = np.asarray(other[i].queries[h, late[late < other[i].queries.shape[1]]], np.float64)
                row["held, other text"] = maps.held_energy(
                    odd, maps.profile_map(risk.profile_gram(foreign, k, v, layer.scale), m)
                )
        print(f"\rlayer {i + 1} of {len(cache)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return rows


def report(name: str, rows: list[dict[str, float]], tokens: int) -> None:
    m = tokens // 8 // 3
    tails = np.array([r["tail"] for r in rows])
    print(f"\n{name}: {len(rows)} heads, n = {tokens}, tail after {m} directions (K/3, K = n/8) over tr Sigma\n")
    print("| quantile | 0 | .1 | .25 | .5 | .75 | .9 | 1 |\n|--|--|--|--|--|--|--|--|")
    for label, key in (
        ("tail share", "tail"),
        ("effective rank", "rank"),
        ("attention on the first 4", "sink"),
        ("tr Sigma", "trace"),
    ):
        values = np.quantile([r[key] for r in rows], (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1))
        print(f"| {label} | " + " | ".join(f"{x:.3g}" for x in values) + " |")
    held = [key for key in rows[0] if key.startswith("held") or key == "best"]
    for key in held:
        values = np.quantile([r[key] for r in rows], (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1))
        print(f"| energy held by {m} directions, {key} | " + " | ".join(f"{x:.3f}" for x in values) + " |")
    print(
        f"\nheads with tail share above 1/2: {(tails > 0.5).sum()} of {len(rows)}; rank correlation of tail share with sink attention: {spearman(rows):.2f}"
    )
    order = np.argsort(tails)
    for label, part in (("fastest", order[:5]), ("flattest", order[::-1][:5])):
        print(
            f"{label}: "
            + ", ".join(f"layer {int(rows[i]['layer'])} head {int(rows[i]['head'])} ({tails[i]:.3g})" for i in part)
        )
    layers = sorted({r["layer"] for r in rows})
    medians = {layer: float(np.median([r["tail"] for r in rows if r["layer"] == layer])) for layer in layers}
    print("median tail share by layer: " + ", ".join(f"{int(layer)}: {x:.3f}" for layer, x in medians.items()))


def spearman(rows: list[dict[str, float]]) -> float:
    from scipy.stats import rankdata

    x, y = (rankdata([r[key] for r in rows]) for key in ("tail", "sink"))
    return float(np.corrcoef(x, y)[0, 1])


def picture(found: dict[str, list[dict[str, float]]], tokens: int, out: Path) -> None:
    """Heat maps layer x head of the tail share, side by side, as a palette PNG."""
    from matplotlib.colors import LogNorm

    from figures import style as styles
    from kvtheory.files import replacing

    with styles.using("paper"):
        figure, panels = styles.subplots("paper", wide=True, columns=len(found), ratio=1.0, squeeze=False)
        norm = LogNorm(1e-3, 1)
        for axes, (name, rows) in zip(panels[0], found.items()):
            layers, heads = sorted({int(r["layer"]) for r in rows}), sorted({int(r["head"]) for r in rows})
            grid = np.full((len(layers), len(heads)), np.nan)
            for r in rows:
                grid[layers.index(int(r["layer"])), heads.index(int(r["head"]))] = max(r["tail"], 1e-3)
            image = axes.imshow(grid, cmap="cividis", norm=norm, aspect="auto", interpolation="nearest")
            axes.grid(False)
            axes.set_title(name, loc="left")
            axes.set_xlabel("query head")
            axes.set_xticks(range(0, len(heads), 2), [str(h) for h in heads[::2]])
            axes.set_yticks(range(0, len(layers), 4), [str(layer) for layer in layers[::4]])
        panels[0][0].set_ylabel("layer")
        figure.colorbar(image, ax=list(panels[0]), label=f"share of tr Σ after {tokens // 24} directions")
        with replacing(out) as scratch:
            figure.savefig(scratch, format="png", dpi=160, metadata={"Software": None})
    try:
        from PIL import Image
    except ImportError:
        return
    with replacing(out) as scratch, Image.open(out) as image:
        image.convert("RGB").quantize(128).save(scratch, format="PNG", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cache",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="captures of `kvtheory capture`; default: the embedded cache",
    )
    parser.add_argument(
        "--held", action="store_true", help="also how much of the energy various directions hold (five times slower)"
    )
    parser.add_argument(
        "--other", nargs="*", default=[], metavar="NAME=FILE", help="captures of the same models on another text"
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the heat map here (PNG)")
    options, _ = parser.parse_known_args()
    import kvtheory

    def named(arguments: list[str]) -> dict[str, Any]:
        pairs = (text.partition("=") for text in arguments)
        return {name: kvtheory.Cache.load(file) for name, _, file in pairs}

    caches, others = named(options.cache), named(options.other)
    tokens = options.tokens
    if not caches:
        caches, tokens = {"SmolLM2-135M, embedded layers": kvtheory.sample_cache()}, min(tokens, 240)
    found = {}
    for name, cache in caches.items():
        start = time.process_time()
        found[name] = measure(cache, tokens, options.queries, options.held or bool(others), others.get(name))
        report(name, found[name], tokens)
        print(f"{time.process_time() - start:.0f} s")
    if options.out:
        picture(found, tokens, options.out)


if __name__ == "__main__":
    main()
