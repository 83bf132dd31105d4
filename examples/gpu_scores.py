"""Which tokens SnapKV and ScissorHands keep, decided where the cache lies, and whether rounding can have decided it.

python examples/gpu_scores.py                        # NumPy arrays; kernels run in the simulator
python examples/gpu_scores.py --gpu                  # CuPy arrays
"""

from __future__ import annotations

import argparse

import numpy as np

import kvtheory
import reference
from gpu import scores
from gpu.module import require_gpu
from gpu.tokens import gather


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=400)
    given = parser.parse_args(arguments)
    xp = require_gpu() if given.gpu else np

    made = kvtheory.synthetic.make(
        "clustered", kv_heads=2, query_heads=4, tokens=given.tokens, head_dim=32, queries=48, seed=0
    )
    queries, keys = (xp.asarray(np.asarray(x, np.float16)) for x in (made.queries, made.keys))
    for decide, codec in (
        (scores.snapkv, reference.SnapKV(keep=0.25, window=16)),
        (scores.scissorhands, reference.ScissorHands(keep=0.25, window=16)),
    ):
        for precision in ("float32", "float64"):
            kept, certain = decide(codec, queries, keys, precision=precision)
            left = gather(keys, kept)
            print(f"{type(codec).__name__}, sums in {precision}: keys {tuple(left.shape)}, certain: {certain}")


if __name__ == "__main__":
    main()
