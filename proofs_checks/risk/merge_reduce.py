"""Merge-reduce: what the errors of the REDUCEs in a tree add up to, on the tree that the reference codec uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import risk
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, statistical
from proofs_checks.risk.heads import Float, factor, gram, of_layer
from reference.merge_reduce.nodes import Atoms
from reference.merge_reduce.tree import Buckets

#: (places among the atoms, shares of their weight) from the atoms' profiles, their shares, the budget, a seed
Keep = Callable[[Float, Float, int, int], tuple[Any, Any]]


class _Tree:
    """One run of the tree on profiles x (n, .): squared errors of each REDUCE, and of each bucket as a whole, by level."""

    def __init__(self, buckets: Any, keep: Keep, x: Float, K: int, seed: int = 0) -> None:
        self.own: dict[int, list[Float]] = {}
        self.whole: dict[int, list[Float]] = {}
        self._x, self._K, self._keep, self._seed, self._count = x, K, keep, seed, 0
        tree = buckets(self.reduce)
        n = len(x)
        dummy = np.zeros((K, 1))
        for start in range(0, n, K):
            tree.push(Atoms(np.arange(start, start + K), np.ones(K), dummy, dummy))
        none = Atoms(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, 1)), np.zeros((0, 1)))
        root = tree.prefix(none)
        self.total = root.weight @ x[root.position] / root.weight.sum() - x.mean(axis=0)
        self.kept = len(root)

    def reduce(self, atoms: Atoms, place: str) -> Atoms:
        if len(atoms) <= self._K:
            return atoms
        self._count += 1
        p = atoms.weight / atoms.weight.sum()
        x = self._x[atoms.position]
        index, share = self._keep(x, p, self._K, 1000 * self._seed + self._count)
        out = atoms.taken(np.asarray(index), np.asarray(share) * atoms.weight.sum())
        after = share @ x[index]
        if place.startswith("bucket"):
            level, number = map(int, place.split()[1:])
            tokens = slice(number * (self._K << level), (number + 1) * (self._K << level))
            self.own.setdefault(level, []).append(after - p @ x)
            self.whole.setdefault(level, []).append(after - self._x[tokens].mean(axis=0))
        return out


def _squares(rows: list[Float]) -> Float:
    return (np.stack(rows) ** 2).sum(axis=1)


def _greater(x: Float, p: Float, K: int, seed: int) -> tuple[Any, Any]:
    """The K atoms of the greatest first coordinate: biased as much as a REDUCE of whole atoms can be."""
    index = np.sort(np.argsort(-x[:, 0], kind="stable")[:K])
    return index, np.full(K, 1 / K)


def _sampler(sample: Function, method: str, protect: int = 0) -> Keep:
    def keep(x: Float, p: Float, K: int, seed: int) -> tuple[Any, Any]:
        return sample(x, K, method, protect, seed=seed, weights=p)  # type: ignore[no-any-return]

    return keep


def _tossed(coins: dict[int, bool] | bool) -> Keep:
    """One of two atoms by a coin: coins[i] for the i-th REDUCE, or one coin for all."""

    def keep(x: Float, p: Float, K: int, seed: int) -> tuple[Any, Any]:
        up = coins if isinstance(coins, bool) else coins[seed % 1000]
        greater = int(np.argmax(x[:, 0]))
        return np.array([greater if up else 1 - greater]), np.ones(1)

    return keep


def _fractions(rows: list[Float], scale: int) -> Fraction:
    """Mean of the squares of one-dimensional errors that are multiples of 1/scale."""
    return sum((Fraction(round(float(r[0]) * scale), scale) ** 2 for r in rows), Fraction(0)) / len(rows)


class _Chain:
    """A chain in place of the tree: each block reduced into all that came before."""

    def __init__(self, reduce: Any) -> None:
        self._reduce, self._blocks = reduce, 0
        self._held: Atoms | None = None

    def push(self, block: Atoms) -> None:
        self._blocks += 1
        if self._held is None:
            self._held = block
        else:
            level = self._blocks.bit_length() - 1
            self._held = self._reduce(self._held.with_behind(block), f"bucket {level} 0")

    def prefix(self, none: Atoms) -> Atoms:
        return self._held if self._held is not None else none


def _weights_forgotten(true: Function) -> Function:
    """Atoms of a bucket weigh 1 again where buckets merge: K tokens in place of K 2^l."""

    def wrong(reduce: Any) -> Any:
        def merged(atoms: Atoms, place: str) -> Atoms:
            uneven = Atoms(
                atoms.position,
                np.where(np.arange(len(atoms)) < len(atoms) // 2, 2.0, 1.0) * atoms.weight,
                atoms.keys,
                atoms.values,
            )
            return reduce(uneven, place)  # type: ignore[no-any-return]

        return true(merged)

    return wrong


_METHODS = {"random": ("srs", 0), "halving": ("halving", 0), "spectral, m = 1": ("spectral", 1)}


@claim(
    id="risk/merge-reduce-accumulation", paper="2607.01520", section="Section 5 (merge-reduce); linear risk of the centred profile, and of any vectors in place of profiles",
    statement="In a balanced tree of n/K leaves whose REDUCEs keep K of 2K weighted atoms and are unbiased given their input, mean squared errors add up geometrically: "
    "V_l at level l of L = log2(n/K) counts 2^(l−L)-fold, at most twice the worst V in all and dominated by the root, without a factor log2(n/K). REDUCEs that are not "
    "unbiased given their input (biased ones, or all with one coin) can pay the triangle inequality in full: (Σ √V_l)², log2²(n/K) V.",
    formula="E ‖total‖² = Σ_l 2^(l−L) V_l ≤ 2 max V;   in general ≤ (Σ_l √V_l)², attained: L² V",
    expected=Verdict.HOLDS,
    functions={
        "accumulated": "kvtheory.risk.accumulated_risk",
        "biased": "kvtheory.risk.accumulated_bias",
        "buckets": "reference.merge_reduce.tree.Buckets",
        "sample": "kvtheory.balancing.sample",
    },
    mutants=[
        *systematic.scales("accumulated"), *systematic.square_dropped("biased"), *systematic.scales("biased"),
        Mutant("levels alike: Σ V_l", "accumulated", lambda true: sum),
        Mutant("leaves dominate", "accumulated", lambda true: lambda V: true(list(reversed(V)))),
        Mutant("the root alone", "accumulated", lambda true: lambda V: V[-1]),
        Mutant("weights 4^(l − L)", "accumulated", lambda true: lambda V: sum(v / 4 ** (len(V) - level) for level, v in enumerate(V, 1))),
        Mutant("Σ V_l for (Σ √V_l)²", "biased", lambda true: lambda V: float(sum(V))),
        Mutant("a chain for the tree", "buckets", lambda true: _Chain),
        Mutant("weights of older buckets doubled", "buckets", _weights_forgotten),
        Mutant("biased sampler", "sample", lambda true: lambda x, K, *a, **k: _greater(x, x[:, 0], K, 0)),
        Mutant("repeated sampler: iid draws", "sample", lambda true: lambda x, K, method, m=0, seed=0, weights=None: true(x, K, "iid", 0, seed=seed, weights=weights)),
        Mutant("a token fewer", "sample", lambda true: lambda x, K, method, m=0, seed=0, weights=None: true(x, K - 1, method, m, seed=seed, weights=weights)),
    ],
    figure="merge-reduce-accumulation",
)  # fmt: skip
def merge_reduce_accumulation(
    context: Context, *, accumulated: Function, biased: Function, buckets: Function, sample: Function
) -> Iterator[Evidence | Picture]:
    # All coins of a small tree, in rationals.
    for L in (1, 2, 3):
        x = risk.staircase(L)[:, None].astype(float)
        nodes = (1 << L) - 1
        totals: list[Float] = []
        own: dict[int, list[Float]] = {}
        for coins in itertools.product((False, True), repeat=nodes):
            tree = _Tree(buckets, _tossed(dict(enumerate(coins, 1))), x, 1)
            totals.append(tree.total)
            for level, rows in tree.own.items():
                own.setdefault(level, []).extend(rows)
        V = [_fractions(own.get(level, [np.zeros(1)]), 1 << L) for level in range(1, L + 1)]
        where = (
            f"staircase of {1 << L} tokens, K = 1, all {1 << nodes} tosses of a fair coin for each of {nodes} REDUCEs"
        )
        yield exact(what="mean squared error of the root = Σ 2^(l−L) V_l", ran_on=where, observed=_fractions(totals, 1 << L), predicted=accumulated(V))  # fmt: skip
        yield exact(
            what="the same ≤ 2 max V",
            ran_on=where,
            observed=_fractions(totals, 1 << L),
            predicted=2 * max(V),
            relation="<=",
        )

    # What REDUCEs pay that are biased, or that share their coin.
    stairs = []
    for L in range(1, 9):
        x = risk.staircase(L)[:, None].astype(float)
        where = f"staircase of {1 << L} tokens, K = 1, n/K = {1 << L}"
        tree = _Tree(buckets, _greater, x, 1)
        V = [max(_squares(tree.own.get(level, [np.zeros(1)]))) for level in range(1, L + 1)]
        yield exact(
            what="greatest squared error of one REDUCE that keeps the greater atom",
            ran_on=where,
            observed=round(max(V)),
            predicted=1,
            role="control",
        )
        yield exact(what="squared error of the root, the greater atom always kept = (Σ √V_l)² = log2²(n/K)", ran_on=where, observed=round(float(tree.total[0] ** 2)), predicted=round(biased(V)))  # fmt: skip
        shared = [_Tree(buckets, _tossed(up), x, 1).total for up in (False, True)]
        yield exact(what="mean error of the root where one fair coin serves all REDUCEs: each of them unbiased by itself", ran_on=where,
                    observed=_fractions([shared[0] + shared[1]], 1 << L), predicted=0, role="control")  # fmt: skip
        yield exact(
            what="its mean square = log2²(n/K)", ran_on=where, observed=_fractions(shared, 1 << L), predicted=L * L
        )
        stairs.append(
            {
                "ratio": 1 << L,
                "greater": float(tree.total[0] ** 2),
                "one coin": float(_fractions(shared, 1 << L)),
                "bound": biased([1] * L),
            }
        )
    yield exact(what="(Σ √V_l)² of L = 8 equal levels", ran_on="V = 1", observed=round(biased([1] * 8)), predicted=64)

    # Random trees on vectors in general position, all n/K at once: a tree of 2^L leaves has 2^(L-l) buckets of level l.
    curves: list[dict[str, Any]] = []
    K, L, width, trees = 4, 8, 512, context.size(24, 96)
    for name, (method, protect) in _METHODS.items():
        # the walk takes some five times as long
        levels = L if method != "spectral" else context.size(6, L)
        x = _vectors(context, K << levels, width)
        yield from _measured(context, f"{K << levels} normal vectors in {width} dimensions", name, _sampler(sample, method, protect), buckets, accumulated, x, K, trees if method != "spectral" else 3 * trees // 2, 0.25, curves)  # fmt: skip
    for label, layer in context.real():
        one = of_layer(label, layer, 256, 16)[0]
        x = factor(one, gram(one, np.full(one.n, 1 / one.n)))[:, ::-1][:, :64]
        yield from _measured(context, one.label, "random", _sampler(sample, "srs"), buckets, accumulated, x[: one.n // 128 * 128], 8, context.size(40, 1000), 0.5, curves, role="assumption")  # fmt: skip
    yield Picture(
        "merge-reduce-accumulation", {"curves": [*curves, _biased_curve(context, K, L, width)], "staircase": stairs}
    )


def _measured(
    context: Context, where: str, name: str, keep: Keep, buckets: Any, accumulated: Function, x: Float, K: int, trees: int, margin: float,
    curves: list[dict[str, Any]], role: Any = "statement",
) -> Iterator[Evidence]:  # fmt: skip
    """Of `trees` runs: at every level, the buckets' mean squared error against that of the REDUCEs below them."""
    runs, exactly = [], "spectral" not in name  # the walk may keep fewer
    for seed in range(trees):
        runs.append(_Tree(buckets, keep, x, K, seed=1 + seed))
        if runs[-1].kept > K or (exactly and runs[-1].kept < K):
            break
    ran_on = f"{where}, {name} REDUCEs, K = {K}, {len(runs)} trees"
    yield exact(what="atoms of a root", ran_on=ran_on, observed=runs[-1].kept, predicted=K, relation="=" if exactly else "<=", role="control")  # fmt: skip
    L = (len(x) // K).bit_length() - 1
    if len(runs) < trees:
        return
    V = [float(np.mean([_squares(t.own.get(level, [np.zeros(1)])).mean() for t in runs])) for level in range(1, L + 1)]
    points = []
    for level in range(1, L + 1):
        totals = np.array([_squares(t.whole.get(level, [np.full(1, np.nan)])).mean() for t in runs])
        # what the same run's REDUCEs below each bucket come to: the difference is cross terms, of mean 0
        below = np.array(
            [accumulated([_squares(t.own.get(j, [np.zeros(1)])).mean() for j in range(1, level + 1)]) for t in runs],
            dtype=float,
        )
        points.append(
            {"ratio": 1 << level, "total": float(totals.mean()), "V": V[level - 1], "predicted": float(below.mean())}
        )
        if level in (1, L // 2, L):
            interval = mean_interval(1 + (totals - below) / below.mean(), 1 - context.alpha(3 * (len(_METHODS) + 2)))
            yield statistical(
                what=f"mean squared error over Σ 2^(l−L) V_l, n/K = {1 << level}: 1 within {100 * margin:g} %", ran_on=ran_on, interval=interval, predicted=1.0,
                margin=margin, role=role, note="to be told from Σ V_l, which is L/2 times that, and from V_L alone, about half of it",
            )  # fmt: skip
    yield numerical(
        what=f"Σ 2^(l−L) V_l of the measured V, n/K = {1 << L}, ≤ 2 max V", ran_on=ran_on, observed=float(accumulated(V)), predicted=2 * max(V), relation="<=", tolerance=1e-12,
        because="sums of L terms", role=role, note="V by level: " + ", ".join(f"{v:.3g}" for v in V),
    )  # fmt: skip
    curves.append({"where": where, "reducer": name, "K": K, "trees": trees, "points": points})


def _vectors(context: Context, n: int, width: int) -> Float:
    """Normal vectors (n, width), the first coordinate six times the others: so many that cross terms nearly cancel, and one in which bias shows."""
    x = context.rng("vectors").standard_normal((n, width))
    x[:, 0] *= 6
    return x


def _biased_curve(context: Context, K: int, L: int, width: int) -> dict[str, Any]:
    """Vectors in general position, the atoms of the greatest first coordinate kept: for the picture."""
    x = _vectors(context, K << L, width)
    tree = _Tree(Buckets, _greater, x, K)
    points = [
        {
            "ratio": 1 << level,
            "total": float(_squares(tree.whole[level]).mean()),
            "V": float(_squares(tree.own[level]).mean()),
        }
        for level in range(1, L + 1)
    ]
    return {
        "where": f"{len(x)} normal vectors in {width} dimensions",
        "reducer": "biased: greatest first coordinate",
        "K": K,
        "trees": 1,
        "points": points,
    }
