"""`make adversary T=60`: gradient ascent on every ratio from random starts, for T seconds; the worst instances are kept in worst.json.

Adam on the logarithm's slope, steps of .05 that shrink, parameters held within +-12, 300 steps a start. An instance replaces the kept one only
where the library's own functions give the higher ratio, too. Exit status 1 where a ratio exceeds 1 by more than its rounding: a finding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.adversary.inequalities import INEQUALITIES, Inequality

WORST = Path(__file__).with_name("worst.json")
REACH = 12.0


def climb(inequality: Inequality, start: Any, steps: int = 300) -> Any:
    """The best point of one ascent, rounded as it is kept."""
    import torch

    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([x], lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.99)
    best, point = -np.inf, np.array(start)
    for _ in range(steps):
        optimiser.zero_grad()
        ratio = inequality.ascent(x)
        if not torch.isfinite(ratio):
            break
        if ratio.item() > best:
            best, point = ratio.item(), x.detach().numpy().copy()
        (-ratio).backward()
        if not torch.isfinite(x.grad).all():  # type: ignore[union-attr]
            break
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(-REACH, REACH)
    return np.round(point, 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kept = json.loads(WORST.read_text(encoding="utf-8")) if WORST.is_file() else {}
    generator, end = np.random.default_rng(options.seed), time.monotonic() + options.seconds
    starts = dict.fromkeys(INEQUALITIES, 0)
    while time.monotonic() < end:
        for name, inequality in INEQUALITIES.items():
            if time.monotonic() >= end:
                break
            starts[name] += 1
            point = climb(inequality, generator.normal(0, generator.choice([0.3, 1.0, 3.0]), inequality.size))
            ratio = inequality.library(point)
            if np.isfinite(ratio) and ratio > kept.get(name, {"ratio": -np.inf})["ratio"]:
                kept[name] = {"claim": inequality.claim, "ratio": ratio, "instance": point.tolist()}
                WORST.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    violated = 0
    for name, inequality in INEQUALITIES.items():
        ratio = kept[name]["ratio"] if name in kept else float("nan")
        broken = ratio > 1 + inequality.room
        violated += broken
        print(
            f"{'VIOLATED' if broken else 'holds':8} worst ratio {ratio:.9f}  {inequality.claim}: {inequality.what}  ({starts[name]} starts)"
        )
    print(
        f"{len(INEQUALITIES)} inequalities, {sum(starts.values())} ascents, {violated} violated; {len(WORST.read_bytes())} bytes of instances"
    )
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
