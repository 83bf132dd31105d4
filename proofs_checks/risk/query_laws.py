"""Whether a sample chosen by one law of queries serves another: the gain of the spectral walk over random sampling, law by law."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvtheory import risk
from kvtheory.layer import Layer
from kvtheory.statistics import geometric_mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, statistical
from proofs_checks.risk.heads import (
    SQUARE_BECAUSE,
    Compared,
    Float,
    One,
    dense,
    deviations,
    square_tolerance,
    worst_equality,
)

_TOKENS = 256
_SAME, _UNRELATED = ("held out",), ("isotropic Gaussian",)


def _trained(true: Function) -> Function:
    """Tested on the queries chosen by."""
    return lambda q, block=1: (true(q, block)[0],) * 2


def _method(method: str, protect: bool = True) -> Any:
    return lambda true: lambda x, K, _, m=0, seed=0: true(x, K, method, m if protect else 0, seed)


class _Head:
    """One head: the queries chosen by, and those of every law it is tested on."""

    def __init__(self, label: str, k: Float, v: Float, scale: float, choose: Float, laws: dict[str, Float]) -> None:
        self.label, self.k, self.v, self.scale, self.choose, self.laws = label, k, v, scale, choose, laws

    def one(self, q: Float) -> One:
        return One(self.label, q, self.k, self.v, self.scale)

    def gram(self, context: Context, name: str, q: Float) -> Float:
        """Of the centred profiles; `name` says which queries these are."""
        return context.memo(
            ("gram", self.label, name, hash(q.tobytes())), lambda: risk.profile_gram(q, self.k, self.v, self.scale)
        )


def _synthetic(context: Context, held_out: Function, gaussian_fit: Function, isotropic: Function) -> list[_Head]:
    """Keys and values without structure, queries close to 4 directions: Σ has some 4 directions, and what is learned of them says nothing of others."""
    found = []
    for i in range(12):
        rng = context.rng(f"head of four queries {i}")
        k, v = rng.standard_normal((128, 16)), rng.standard_normal((128, 1))
        asked, unasked = (2 * rng.standard_normal((4, 16)) for _ in range(2))
        q, other = (
            centre[rng.integers(4, size=64)] + 0.05 * rng.standard_normal((64, 16)) for centre in (asked, unasked)
        )
        choose, test = held_out(q)
        laws = {
            "held out": test,
            "Gaussian fit": gaussian_fit(choose, 64, context.seed),
            "isotropic Gaussian": isotropic(choose, 64, context.seed),
            "four other queries": other,
        }
        found.append(_Head(f"head of four queries {i}", k, v, 0.25, choose, laws))
    return found


def _real(
    context: Context, layers: list[tuple[str, Layer]], held_out: Function, gaussian_fit: Function, isotropic: Function
) -> dict[str, list[_Head]]:
    """Every query head of each layer: its queries behind the first 256 tokens, and other laws for them to be tested on."""
    found: dict[str, list[_Head]] = {}
    for i, (label, layer) in enumerate(layers):
        assert layer.queries is not None and layer.query_positions is not None
        n = min(_TOKENS, 2 * layer.tokens // 3)
        late = np.flatnonzero(layer.query_positions >= n)
        elsewhere = layers[i - 1][1]
        # quickly: of three or more heads that share keys not the second
        skipped = context.size(1 if layer.group > 2 else layer.query_heads, layer.query_heads)
        for h in (h for h in range(layer.query_heads) if h % layer.group != skipped):
            q = layer.queries[:, late].astype(np.float64)
            own, group, heads = q[h], layer.group, layer.query_heads
            choose, test = held_out(own)
            laws = {"held out": test, "later positions": test[2 * len(test) // 3 :]}
            if group > 1:
                laws["next head of its KV head"] = q[h // group * group + (h + 1) % group][1::2]
            if layer.kv_heads > 1:
                laws["a head of another KV head"] = q[(h + group) % heads][1::2]
            if (
                elsewhere is not layer
                and elsewhere.queries is not None
                and elsewhere.queries.shape[2] == own.shape[1]
                and elsewhere.query_positions is not None
            ):
                laws["another layer"] = elsewhere.queries[
                    h % elsewhere.query_heads, elsewhere.query_positions >= n
                ].astype(np.float64)[1::2]
            laws |= {
                "Gaussian fit": gaussian_fit(choose, 64, context.seed),
                "isotropic Gaussian": isotropic(choose, 64, context.seed),
            }
            kv = h // group
            k, v = (x[kv, :n].astype(np.float64) for x in (layer.keys, layer.values))
            found.setdefault(label, []).append(_Head(f"{label} head {h}", k, v, layer.scale, choose, laws))
            # chosen by earlier positions alone, where the test is on later ones
            found[label][-1].laws["later positions, chosen by earlier ones"] = laws["later positions"]
    return found


def layer_heads(context: Context) -> dict[str, list[_Head]]:
    """group -> heads with their laws, by the true functions: for other claims."""
    given = risk.laws.held_out, risk.laws.gaussian_fit, risk.laws.isotropic
    return {"heads of four queries": _synthetic(context, *given), **_real(context, context.real(), *given)}


def _gains(
    context: Context, head: _Head, number: int, sample: Function, trace_bound: Function, runs: int
) -> dict[str, Float]:
    """law -> random sampling's mean linear risk (exact) over that of each of `runs` walks."""
    n = len(head.k)
    K = n // 4
    seeds = [context.seed + 1000 * number + r for r in range(runs)]  # other coins for every head

    def leading(name: str, q: Float) -> Float:
        values, vectors = context.memo(
            ("eigen", head.label, name, hash(q.tobytes())), lambda: np.linalg.eigh(head.gram(context, name, q))
        )
        return np.asarray((vectors * np.sqrt(values.clip(0)))[:, ::-1][:, :48])

    def walks(name: str, q: Float, own: list[int]) -> list[Float]:
        # kept for other mutants, but never across samplers: the sampler is part of the key
        key = ("walks", head.label, name, hash(q.tobytes()), tuple(own), sample)
        return context.memo(
            key, lambda: [dense(n, *sample(leading(name, q), K, "spectral", K // 6, seed)) for seed in own]
        )

    found, chosen = {}, walks("choose", head.choose, seeds)
    for name, q in head.laws.items():
        w = chosen
        if name.endswith("by earlier ones"):
            w = walks("earlier", head.laws["earlier"], seeds[:2])
        elif name == "earlier":
            continue
        g = head.gram(context, name, q)
        random = float(
            trace_bound(risk.Spectrum(float(np.trace(g)) / n, np.zeros(0), n, 0.0, complete=False), K, replace=False)
        )
        found[name] = random / np.array([float(x @ g @ x) for x in w])
    return found


@claim(
    id="risk/query-knowledge", paper="2607.01520", section="Section 4.3 (query-aware rate) and Assumption 5.1, under our reading; linear risk of the centred profile",
    statement="What the spectral walk gains over random sampling of as many tokens is knowledge of the queries. Chosen by half of a head's queries and tested on the other half it divides the mean linear risk by "
    "more than 2 (geometric mean of a layer's heads); tested on isotropic Gaussian queries of the same size, by less than 1.5. Two moments are most of what there is to know: a Gaussian "
    "fitted to the queries of the choice is served nearly as the queries themselves (reported, as other heads, other layers and later positions are).",
    formula="G = E‖∫ Γ_ν′ dP̂_random‖² / E‖∫ Γ_ν′ dP̂_walk(ν)‖²:   G > 2 for ν′ = ν held out,   G < 1.5 for ν′ = N(0, σ² I)",
    expected=Verdict.HOLDS,
    functions={
        "sample": "kvtheory.balancing.sample",
        "trace_bound": "kvtheory.risk.trace_bound",
        "held_out": "kvtheory.risk.laws.held_out",
        "isotropic": "kvtheory.risk.laws.isotropic",
        "gaussian_fit": "kvtheory.risk.laws.gaussian_fit",
    },
    mutants=[
        Mutant("random sampling for the walk", "sample", _method("srs")),
        Mutant("nothing protected, no tail seen", "sample", lambda true: lambda x, K, _, m=0, seed=0: true(np.zeros((len(x), 1)), K, "spectral", 0, seed)),
        Mutant("tested on the queries chosen by", "held_out", _trained),
        Mutant("all queries on both sides", "held_out", lambda true: lambda q, block=1: (q, q)),
        Mutant("the choice's own queries for unrelated ones", "isotropic", lambda true: lambda q, count, seed=0: np.asarray(q)),
        Mutant("twice as long queries", "isotropic", lambda true: lambda q, count, seed=0: 2 * true(q, count, seed)),
        Mutant("covariance about 0", "gaussian_fit", lambda true: lambda q, count, seed=0: true(np.vstack([q, -q]), count, seed)),
        Mutant("covariance forgotten", "gaussian_fit", lambda true: lambda q, count, seed=0: np.repeat(np.mean(q, axis=0)[None], count, axis=0)),
        *systematic.scales("trace_bound"),
        Mutant("no finite population factor", "trace_bound", lambda true: lambda s, K, replace=True: true(s, K, True)),
    ],
    figure="query-knowledge",
)  # fmt: skip
def query_knowledge(
    context: Context,
    *,
    sample: Function,
    trace_bound: Function,
    held_out: Function,
    isotropic: Function,
    gaussian_fit: Function,
) -> Iterator[Evidence | Picture]:
    # The laws and the exact law of random sampling.
    rng = context.rng("queries")
    q = rng.standard_normal((40, 5)) @ rng.standard_normal((5, 5)) + 3
    for block in (1, 4):
        choose, test = held_out(q, block)
        both = {row.tobytes() for row in choose} & {row.tobytes() for row in test}
        yield exact(
            what="queries both chosen by and tested on",
            ran_on=f"40 queries, blocks of {block}",
            observed=len(both),
            predicted=0,
            role="control",
        )
        yield exact(
            what="queries on either side",
            ran_on=f"40 queries, blocks of {block}",
            observed=[len(choose), len(test)],
            predicted=[20, 20],
            role="control",
        )
    many = 20000
    fit, flat = gaussian_fit(q, many, context.seed), isotropic(q, many, context.seed)
    spread = float(np.linalg.eigvalsh(np.cov(q.T, bias=True)).max())
    for what, found, truth in (
        ("mean", fit.mean(axis=0), q.mean(axis=0)), ("covariance", np.cov(fit.T, bias=True), np.cov(q.T, bias=True)),
    ):  # fmt: skip
        unit = spread if what == "covariance" else spread**0.5
        yield numerical(what=f"{what} of the Gaussian fit: largest distance from the queries' own, over their largest deviation, ≤ 0.1", ran_on=f"40 queries of 5 channels, {many} draws",
                        observed=float(np.abs(found - truth).max()) / unit, predicted=0.1, relation="<=", tolerance=0.0, because="ten standard errors: sqrt(2/20000) = .01", role="control")  # fmt: skip
    yield numerical(what="mean square of an isotropic query's norm over that of the queries", ran_on=f"40 queries, {many} draws", observed=float((flat**2).sum(axis=1).mean() / (q**2).sum(axis=1).mean()),
                    predicted=1.0, tolerance=0.06, because="ten standard errors: sqrt(2/5/20000) = .0045", role="control")  # fmt: skip
    groups: dict[str, list[_Head]] = {"heads of four queries": _synthetic(context, held_out, gaussian_fit, isotropic)}
    groups |= _real(context, context.real(), held_out, gaussian_fit, isotropic)
    for group, heads in groups.items():
        compared = []
        for head in heads[:2]:
            n, one = len(head.k), head.one(head.laws["held out"])
            K, p = n // 4, np.full(n, 1 / n)
            g = head.gram(context, "held out", one.q)

            def truth(one: One = one, n: int = n, K: int = K, p: Float = p) -> float:
                """Exact second moment of random weights on the deviations of single tokens, by attention."""
                x = deviations(one, np.eye(n), p).reshape(n, -1)
                norm, total = float((x**2).sum()), float((x.sum(axis=0) ** 2).sum())
                together = (K - 1) / (K * n * (n - 1))
                return ((1 / (n * K) - together) * norm + together * total) / len(one.q)

            mean = context.memo(("random", head.label, hash(one.q.tobytes())), truth)
            s = risk.Spectrum(float(np.trace(g)) / n, np.zeros(0), n, 0.0, complete=False)
            compared.append(Compared(one, trace_bound(s, K, replace=False), mean, n * square_tolerance(one, p, mean)))
        yield worst_equality(
            "mean linear risk of random sampling by the function = from attention",
            group,
            compared,
            SQUARE_BECAUSE,
            role="control",
        )
    runs, rows = context.size(10, 20), []
    comparisons = 2 * len(groups)
    for group, heads in groups.items():
        laws: dict[str, dict[str, Float]] = {}
        for number, head in enumerate(heads):
            if "later positions" in head.laws:
                third = 2 * (len(head.choose) + len(head.laws["held out"])) // 3
                merged = np.empty((len(head.choose) + len(head.laws["held out"]), head.choose.shape[1]))
                merged[::2], merged[1::2] = head.choose, head.laws["held out"]
                head.laws["earlier"] = merged[:third]
            for name, own in _gains(context, head, number, sample, trace_bound, runs).items():
                laws.setdefault(name, {})[head.label] = own
        for name, gains in laws.items():
            # geometric mean of the heads for each walk seed: only the walks are random here
            by_run = np.exp(np.mean([np.log(g) for g in gains.values()], axis=0))
            rows += [
                {"group": group, "law": name, "head": label, "gain": float(np.exp(np.log(g).mean()))}
                for label, g in gains.items()
            ]
            where = f"{group}, {len(gains)} heads, n = {len(heads[0].k)}, K = n/4, m = K/6, {len(by_run)} walks a head"
            details = {"gain": {label: float(np.exp(np.log(g).mean())) for label, g in gains.items()}}
            if name in _SAME + _UNRELATED:
                over = name in _SAME
                yield statistical(what=f"gain of the walk over random sampling, geometric mean of the heads, tested on: {name}, {'≥ 2' if over else '≤ 1.5'}", ran_on=where,
                                  interval=geometric_mean_interval(by_run, 1 - context.alpha(comparisons)), predicted=2.0 if over else 1.5, relation=">=" if over else "<=",
                                  details=details, note="the walks are random, the heads and their queries given")  # fmt: skip
            else:
                yield numerical(what=f"gain of the walk over random sampling, geometric mean of the heads, tested on: {name}, > 1.5", ran_on=where, predicted=1.5, relation=">", tolerance=1e-9,
                                observed=float(np.exp(np.log(by_run).mean())), because="a mean of few walks, reported only", role="assumption", details=details)  # fmt: skip
    yield Picture("query-knowledge", {"gains": rows})
