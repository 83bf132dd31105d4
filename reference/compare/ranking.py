"""Codecs ranked at equal held bits: which differences are more than the draw of segments, all pairs at once.

For two codecs i and j at one rate, d = log2 e_i - log2 e_j and d* its paired bootstrap replicates over S segments (the same segments for both):

    t = d / sqrt(S / (S - 1) Var(d*)),      p = 2 P(T_{S-1} >= |t|)

S / (S - 1): a bootstrap's variance has the denominator S. A family is all pairs of codecs at all targets of one measure on one source; its p are
corrected by Holm: with p_(1) <= ... <= p_(m), the k-th is max_{l <= k} min(1, (m - l + 1) p_(l)), which bounds the chance of any wrong
"better than" in the family by the level, however the tests depend on each other.

    rank of i = 1 + number of codecs that are better than i with a corrected p <= 1 - level

so codecs whose difference is not settled share a rank. What the family does not cover: other texts, models and draws of a codec's own randomness.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.compare.equal_rate import EQUAL_RATE_COLUMNS, Curve

__all__ = ["RANKING_COLUMNS", "Ranked", "holm", "rank", "row", "write_ranking"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Ranked:
    """A curve at a target. better, worse: labels of the codecs that beat it, that it beats, after correction; p_best: corrected p against the best one.

    rank: 1 + len(better). error: its value. best: label of the one of least error, whose own p_best is None. pairs: tests in the family.
    """

    measure: str
    label: str
    held_bits: float
    rank: int
    error: float
    best: str
    p_best: float | None
    better: tuple[str, ...]
    worse: tuple[str, ...]
    pairs: int
    level: float


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Corrected p of a family (m,), in its order (Holm 1979). ValueError for what is no probability."""
    values = np.asarray(p, dtype=np.float64).ravel()
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p: expected probabilities, got {values}")
    order = np.argsort(values, kind="stable")
    steps = np.minimum(1.0, np.arange(len(values), 0, -1) * values[order])
    found = np.empty(len(values))
    found[order] = np.maximum.accumulate(steps)
    return found


def rank(
    curves: Sequence[Curve], targets: Sequence[float], measure: str, segments: int, level: float = 0.95
) -> list[Ranked]:
    """Every curve that was measured around a target, by error, target by target; targets with fewer than two curves are left out.

    segments: those that the replicates draw from, at least 2. ValueError for a level that is none.
    """
    from scipy.special import stdtr

    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    if segments < 2:
        raise ValueError(f"segments: expected at least 2, got {segments}")
    places: list[tuple[float, list[str], NDArray[np.float64]]] = []
    tests: list[tuple[int, int, int, float]] = []
    for target in targets:
        own = [curve for curve in curves if not curve.missing(target)]
        if len(own) < 2:
            continue
        found = [curve.at(target) for curve in own]
        logs = np.array([log for log, _ in found])
        for i in range(len(own)):
            for j in range(i):
                spread = np.sqrt(segments / (segments - 1) * np.var(found[i][1] - found[j][1]))
                gap = abs(logs[i] - logs[j])
                p = 1.0 if gap == 0 else 0.0 if spread == 0 else 2 * float(stdtr(segments - 1, -gap / spread))
                tests.append((len(places), i, j, min(1.0, p)))
        places.append((float(target), [curve.label for curve in own], logs))
    corrected = holm([p for *_, p in tests])
    matrices = [np.ones((len(names), len(names))) for _, names, _ in places]
    for (place, i, j, _), p in zip(tests, corrected, strict=True):
        matrices[place][i, j] = matrices[place][j, i] = p
    ranked = []
    for (target, names, logs), own_p in zip(places, matrices, strict=True):
        beats = (own_p <= 1 - level) & (logs[:, None] < logs[None, :])  # [i, j]: i is better than j
        best = int(np.argmin(logs))
        for i in np.argsort(logs, kind="stable"):
            ranked.append(
                Ranked(
                    measure=measure,
                    label=names[i],
                    held_bits=target,
                    rank=1 + int(beats[:, i].sum()),
                    error=float(np.exp2(logs[i])),
                    best=names[best],
                    p_best=None if i == best else float(own_p[i, best]),
                    better=tuple(names[j] for j in np.flatnonzero(beats[:, i])),
                    worse=tuple(names[j] for j in np.flatnonzero(beats[i])),
                    pairs=len(tests),
                    level=level,
                )
            )
    return ranked


#: ranking.parquet: name -> (type of pyarrow, may be null, meaning)
RANKING_COLUMNS: dict[str, tuple[str, bool, str]] = {
    **{n: EQUAL_RATE_COLUMNS[n] for n in ("model", "text", "cache", "prefix", "layers", "measure", "label", "target_bits")},
    "rank": ("int32", False, "1 + number of codecs that are better after correction; codecs that are not told apart share it"),
    "error": ("double", False, "value there, as in equal-rate.parquet"),
    "best": ("string", False, "label of the codec of least error there"),
    "p_best": ("double", True, "corrected p of the difference to it; null for itself"),
    "better": ("string", False, "labels of the codecs that are better, one a line"),
    "worse": ("string", False, "labels of the codecs that are worse, one a line"),
    "pairs": ("int32", False, "tests in the family that Holm's correction is over: pairs at all targets of this measure on this cache"),
    "level": ("double", False, "1 - chance of any wrong `better` in the family, at most"),
}  # fmt: skip


def row(one: Ranked, about: Mapping[str, Any]) -> Row:
    """As a row of ranking.parquet; about: model, text, cache, prefix, layers."""
    names = ("measure", "label", "rank", "error", "best", "p_best", "pairs", "level")
    return {
        **about,
        **{name: getattr(one, name) for name in names},
        "target_bits": one.held_bits,
        "better": "\n".join(one.better),
        "worse": "\n".join(one.worse),
    }


def write_ranking(folder: str | os.PathLike[str], rows: Sequence[Row]) -> Path:
    """ranking.parquet in `folder`, whole or not at all."""
    from reference.compare.tables import parquet

    path = Path(folder) / "ranking.parquet"
    parquet(path, RANKING_COLUMNS, rows)
    return path
