"""Attention sinks: how much of tr Sigma they hold, and what keeping them is worth to the reducers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from kvtheory import balancing, risk
from kvtheory.layer import Layer
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.risk.heads import (
    EPS,
    SQUARE_BECAUSE,
    Compared,
    Float,
    One,
    deviations,
    energies,
    groups,
    named,
    square_tolerance,
    worst_equality,
)

SINKS = 4


def _uniform(one: One) -> Float:
    return np.full(one.n, 1 / one.n)


def _alone(one: One) -> Float:
    """Squared deviation of the summary that is token i alone, for every i."""
    return energies(deviations(one, np.eye(one.n), _uniform(one)))


def _attention(one: One) -> float:
    """Mean attention that the first SINKS tokens get."""
    return float(risk.density(one.q, one.k, scale=one.scale)[:SINKS].sum(axis=0).mean()) / one.n


def _sink_cache(n: int, mass: Fraction) -> One:
    """One query with `mass` on token 0, of value 0, and the rest even on n - 1 tokens with orthonormal values."""
    keys = np.zeros((n, 1))
    keys[0] = np.log(float(mass * (n - 1) / (1 - mass)))
    return named(f"sink of {mass}, n = {n}", risk.Instance(np.ones((1, 1)), keys, np.eye(n)[:, 1:]))


def _shares(n: int, mass: Fraction) -> tuple[Fraction, Fraction]:
    """(share, tr Sigma) of `_sink_cache`, by its softmax in rationals."""
    a = [mass] + [(1 - mass) / (n - 1)] * (n - 1)
    o = a[1:]
    energy = [n * a[0] ** 2 * sum(x * x for x in o)]
    energy += [n * a[i] ** 2 * sum(((1 if c == i - 1 else 0) - o[c]) ** 2 for c in range(n - 1)) for i in range(1, n)]
    return energy[0] / sum(energy), sum(energy, Fraction(0))


def _attention_only(true: Function) -> Function:
    """n a^2, without the distance of the value from the output."""
    return lambda q, k, v, scale=None, kind="centred": (risk.density(q, k, scale=scale) ** 2).mean(axis=1) / len(k)


def _from_zero(true: Function) -> Function:
    """||v|| for ||v - o||: a sink of value 0 then holds nothing."""
    return lambda q, k, v, scale=None, kind="centred": (risk.density(q, k, scale=scale) ** 2).mean(axis=1) * (np.asarray(v) ** 2).sum(axis=1) / len(k)  # fmt: skip


@claim(
    id="risk/sinks", paper="kvtheory", section="what Section 4's trace says about attention sinks; both profiles",
    statement="Wherever the first four tokens of a head get more than half of its attention, they hold more than half of tr Σ, though their values are near zero: "
    "Γ = b (v − o) has ‖v − o‖ ≈ ‖o‖ there. Stated for the centred profile. It does not hold: with one sink of value 0 and mass a, the other values orthonormal, its share is "
    "a²/(1 + a² − (1 − a²)/(n − 1)) < 1/2 for every a. What is measured on real sink heads is reported; with the augmented profile, which counts the lost mass, nearly all of tr Σ⁺ is there.",
    formula="n E aᵢ² ‖vᵢ − o‖² summed over i < 4  >  tr Σ / 2   where E Σ_{i<4} aᵢ > 1/2",
    expected=Verdict.FAILS,
    functions={"token_energy": "kvtheory.risk.token_energy"},
    mutants=[
        *systematic.scales("token_energy"), *systematic.square_dropped("token_energy"),
        Mutant("attention without the value", "token_energy", _attention_only),
        Mutant("‖v‖ for ‖v − o‖", "token_energy", _from_zero),
        Mutant("augmented for centred", "token_energy", lambda true: lambda q, k, v, scale=None, kind="centred": true(q, k, v, scale, "augmented")),
        *systematic.swapped("token_energy", "k", "v"),
    ],
    figure="sinks", correction="risk/sinks-kept",
)  # fmt: skip
def sinks(context: Context, *, token_energy: Function) -> Iterator[Evidence | Picture]:
    heads = groups(context, context.size(64, 256), context.size(8, 64))
    for group, ones in heads:
        compared = []
        for one in ones:
            # each token's profile by attention: the deviation of the summary that is this token alone
            truth = context.memo(("alone", one.label), partial(_alone, one))
            found = token_energy(one.q, one.k, one.v, one.scale)
            i = int(np.argmax(np.abs(found * one.n - truth)))
            compared.append(
                Compared(
                    one,
                    float(found[i]) * one.n,
                    float(truth[i]),
                    square_tolerance(one, _uniform(one), float(truth.max()), max(float(truth[i]), 1e-300)),
                )
            )
        yield worst_equality("n times a token's energy = squared deviation of the summary that is this token alone, by attention", group, compared, SQUARE_BECAUSE, role="control")  # fmt: skip
    for n, mass in ((3, Fraction(3, 4)), (64, Fraction(9, 10))):
        one = _sink_cache(n, mass)
        share, trace = _shares(n, mass)
        yield exact(what="share of tr Σ (centred) held by the sink > 1/2", ran_on=one.label, observed=share, predicted=Fraction(1, 2), relation=">",
                    note="smallest counterexample: 3 tokens, one query" if n == 3 else None)  # fmt: skip
        found = token_energy(one.q, one.k, one.v, one.scale)
        for what, observed, predicted in (
            ("tr Σ", float(found.sum()), trace),
            ("energy of the sink", float(found[0]), share * trace),
        ):
            yield numerical(what=f"{what} by the function = its rational value", ran_on=one.label, observed=observed, predicted=float(predicted),
                            tolerance=64 * n * EPS, because="sums of n squares of softmax weights", role="control")  # fmt: skip
    rows = []
    for group, ones in groups(context, 242, context.size(24, 96)):
        for one in ones:
            row: dict[str, Any] = {"head": one.label, "group": group, "attention": _attention(one)}
            for kind in ("centred", "augmented"):
                energy = token_energy(one.q, one.k, one.v, one.scale, kind)
                row[kind] = float(energy[:SINKS].sum() / energy.sum())
            rows.append(row)
    for row in rows:
        if row["attention"] > 0.5:
            for kind in ("centred", "augmented"):
                yield numerical(
                    what=f"share of tr Σ ({kind}) held by the first {SINKS} tokens > 1/2", ran_on=f"{row['head']}: attention {row['attention']:.3f} on them", observed=row[kind],
                    predicted=0.5, relation=">", tolerance=1e-9, because="sums of squares", role="statement" if kind == "centred" else "assumption",
                )  # fmt: skip
    yield Picture("sinks", {"shares": rows})


# --- what keeping them is worth

_KEPT = 64


def _heads(context: Context) -> list[tuple[str, Layer, int, One]]:
    """(label, layer of the tokens, KV head, its query heads as `One`): sink layers of the run, and the synthetic kind of that name."""
    made = context.synthetic(
        "attention_sink", kv_heads=1, query_heads=1, tokens=256, head_dim=16, value_dim=16, queries=48
    )
    found = [("synthetic attention_sink", made)]
    for label, layer in context.real():
        found.append((label, layer))
    out = []
    for label, layer in found:
        assert layer.queries is not None
        n = 256 if layer.query_positions is not None else layer.tokens
        rows = (
            np.arange(layer.queries.shape[1])
            if layer.query_positions is None
            else np.flatnonzero(layer.query_positions >= n)
        )
        first = Layer(layer.keys[:, :n], layer.values[:, :n], layer.queries[:, rows], scale=layer.scale)
        for h in range(layer.query_heads):
            head = first.head(h)
            out.append(
                (
                    f"{label} head {h}",
                    first,
                    h // layer.group,
                    One(f"{label} head {h}", head.q, head.k, head.v, head.scale),
                )
            )
    return out


def _streaming(codec: Any, layer: Layer, kv: int, first: int, seed: int) -> Float:
    """Weights (n,) of what the codec leaves of a KV head: its log-weights, of sum 1."""
    decoded = codec(keep=_KEPT, sinks=first, positions="original").reduce(layer)
    w = np.zeros(layer.tokens)
    kept = int(decoded.kept[kv])
    w[decoded.positions[kv, :kept]] = np.exp(decoded.log_weights[kv, :kept])
    return np.asarray(w / w.sum())


def _profiles(context: Context, one: One) -> Float:
    """Centred profiles under every second query, in 32 directions: what the walk sees."""

    def leading() -> Float:
        values, vectors = np.linalg.eigh(risk.profile_gram(one.q[::2], one.k, one.v, one.scale))
        return np.asarray((vectors * np.sqrt(values.clip(0)))[:, ::-1][:, :32])

    return context.memo(("profiles", one.label), leading)


def _with_sinks(one: One, x: Float, sample: Function, method: str, first: int, seed: int) -> Float:
    """K tokens, `first` of them kept with their own weight 1/n, the others by `sample` of the rest with the rest's mass."""
    n = one.n
    index, weight = sample(x[first:], _KEPT - first, method, _KEPT // 6 if method == "spectral" else 0, seed=seed)
    w = np.zeros(n)
    w[:first] = 1 / n
    w[first + index] = weight * (n - first) / n
    return w


def _walk(context: Context, one: One, first: int, seed: int) -> Float:
    x = _profiles(context, one)
    return context.memo(
        ("walk", one.label, first, seed), partial(_with_sinks, one, x, balancing.sample, "spectral", first, seed)
    )


def _true(attention_risk: Function, one: One, w: Float) -> float:
    index = np.flatnonzero(w)
    return float(attention_risk(one.q[1::2], one.k, one.v, index, w[index] / w[index].sum(), one.scale))


@claim(
    id="risk/sinks-kept", paper="kvtheory", section="the correction of risk/sinks: true risk, no profile but inside the reducers (centred)",
    statement="On heads whose first four tokens get more than half of the attention, keeping these four exactly, inside the same budget, divides the squared attention error of "
    "StreamingLLM and of random sampling by more than 2 in the geometric mean. Of the spectral walk, which sees the queries, no such factor is claimed: it is reported.",
    formula="G[r(reducer without sinks) / r(reducer with 4 sinks)] > 2,   G the geometric mean over heads with E Σ_{i<4} aᵢ > 1/2",
    expected=Verdict.HOLDS,
    functions={"streaming": "reference.streaming_llm.StreamingLLM", "sample": "kvtheory.balancing.sample", "attention_risk": "kvtheory.risk.attention_risk"},
    mutants=[
        Mutant("sinks ignored by StreamingLLM", "streaming", lambda true: lambda keep, sinks, positions: true(keep=keep, sinks=0, positions=positions)),
        Mutant("sinks always kept by StreamingLLM", "streaming", lambda true: lambda keep, sinks, positions: true(keep=keep, sinks=4, positions=positions)),
        Mutant("first tokens always drawn", "sample", lambda true: lambda x, K, *a, **k: (np.arange(K), np.full(K, 1 / K))),
        Mutant("risk the same whatever is kept", "attention_risk", lambda true: lambda q, k, v, index, weight, scale=None: 1.0),
        Mutant("without and with exchanged", "attention_risk", lambda true: lambda *a, **k: 1 / true(*a, **k)),
    ],
    figure="sinks",
)  # fmt: skip
def sinks_kept(
    context: Context, *, streaming: Function, sample: Function, attention_risk: Function
) -> Iterator[Evidence | Picture]:
    draws, rows = context.size(2, 16), []
    for label, layer, kv, one in _heads(context):
        mass = _attention(one)
        methods: dict[str, Callable[[int, int], Float]] = {
            "StreamingLLM": partial(_streaming, streaming, layer, kv),
            "random": partial(_with_sinks, one, np.zeros((one.n, 1)), sample, "srs"),
            # reported only, so by the true function, once
            "spectral walk": partial(_walk, context, one),
        }
        output = float(
            (risk.profiles.means(one.q[1::2], one.k, one.v, _uniform(one), one.scale)[0] ** 2).sum(axis=1).mean()
        )
        row: dict[str, Any] = {"head": label, "group": label.split(" head")[0], "attention": mass}
        for name, reduce in methods.items():
            count = 1 if name == "StreamingLLM" else draws
            for first in (0, SINKS):
                risks = [_true(attention_risk, one, reduce(first, context.seed + seed)) for seed in range(count)]
                row[f"{name}, {first} sinks"] = float(np.mean(risks)) / output
        rows.append(row)
    for group in dict.fromkeys(r["group"] for r in rows):
        for sink in (True, False):
            own = [r for r in rows if r["group"] == group and (r["attention"] > 0.5) is sink]
            if not own:
                continue
            for name in ("StreamingLLM", "random", "spectral walk"):
                gains = {r["head"]: r[f"{name}, 0 sinks"] / r[f"{name}, {SINKS} sinks"] for r in own}
                factor = float(np.exp(np.mean(np.log(list(gains.values())))))
                yield numerical(
                    what=f"{name}: squared error without sinks over that with {SINKS}, geometric mean, > 2",
                    ran_on=f"{group}, {len(own)} heads with {'more' if sink else 'less'} than half of their attention on the first {SINKS} tokens; {_KEPT} of {one.n} tokens",
                    observed=factor, predicted=2.0, relation=">", tolerance=1e-9, because="ratios of measured errors, the walks' and samples' means over seeds",
                    role="statement" if sink and name != "spectral walk" else "assumption", details={"factor": gains},
                )  # fmt: skip
    yield Picture("sinks", {"reducers": rows})
