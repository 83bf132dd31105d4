"""Claims on two texts that part at a token (arXiv 2604.15356, the delta after divergence): how far apart their keys and values can be, and are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.prediction import ToyPlayer
from kvtheory.tiny import RationalLayer
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential import measured

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]
Float = NDArray[np.float64]

#: two layers, one number a token: attention is the mean of all values (no query), which the first layer adds to the stream; the second reads it
MEAN_OF_ALL = RationalLayer(query=((0,),), key=((1,),), value=((1,),), output=((1,),))
TOKENS: dict[Any, tuple[int | Fraction, ...]] = {"a": (1,), "b": (2,), "c": (0,)}


def stretched(stretches: Sequence[Any], distance: Any) -> Any:
    """Π κ_j ‖e − e'‖: how far apart what is computed through maps with these stretches can be."""
    for stretch in stretches:
        distance = distance * stretch
    return distance


def squared(texts: Sequence[Any], layer: int, position: int) -> Any:
    """Squared distance of two texts' keys and values. texts: two, of each layers, of each positions, of each numbers; exact for Fractions."""
    one, two = (text[layer][position] for text in texts)
    return sum((x - y) ** 2 for x, y in zip(one, two, strict=True))


@claim(
    id="sharing/delta-after-divergence", paper=PAPER, section="delta after divergence",
    statement="Keys and values of two texts at one position are apart by at most a constant to the power of the layer times the distance of the two tokens there; so where the "
    "tokens agree again, nothing is to be stored.",
    formula="‖KV_i^l(s) − KV_i^l(s')‖ ≤ κ^l ‖e(s_i) − e(s'_i)‖  for some κ, all i",
    expected=Verdict.FAILS,
    functions={"squared": "proofs_checks.sequential.parting.squared"},
    mutants=[
        Mutant("the lowest layer's distance for every layer's", "squared", lambda true: lambda texts, layer, position: true(texts, 0, position)),
        Mutant("a text against itself", "squared", lambda true: lambda texts, layer, position: true((texts[0], texts[0]), layer, position)),
    ],
    correction="sharing/delta-at-divergence", figure="divergence",
)  # fmt: skip
def after_divergence(context: Context, *, squared: Function) -> Result:
    """Read at every position, as the storage of sessions after their divergence needs it. The paper's constants were not to be had."""
    from kvtheory.tiny import RationalTransformer

    tables = context.memo("tables", lambda: measured.load("divergence"))
    for table in tables:
        sample = table.get("sample")
        if sample is None:
            continue
        names = {layer: i for i, layer in enumerate(sample["layers"])}
        behind = [i for i, position in enumerate(sample["positions"]) if position > 0]
        rms, unrelated = (np.array(table[name], float).mean(axis=0) for name in ("behind_rms", "unrelated"))
        for layer, i in names.items():
            for at in behind:
                found = math.sqrt(float(squared(sample["texts"], i, at)))
                yield numerical(
                    what=f"distance of keys and values {sample['positions'][at]} behind the divergence, equal tokens, layer {layer + 1}: at most κ^{layer + 1} · 0",
                    ran_on=f"{table['title']}, two windows that differ in one token, {len(sample['texts'][0][i][at])} numbers of a position, saved table", observed=found,
                    predicted=0.0, relation="<=", tolerance=0.0, because="numbers as the model wrote them; the lowest layer reads the token alone",
                    note=f"of {len(table['at'])} pairs, all numbers: {rms[layer]:.3g}, {rms[layer] / unrelated[layer]:.2f} of the distance of two unrelated positions",
                )  # fmt: skip
    model = RationalTransformer(TOKENS, (MEAN_OF_ALL, MEAN_OF_ALL))
    # texts[s][layer][position][number]: the keys of both positions
    texts = [
        [[[Fraction(model.kv(tuple(text[: t + 1]))[layer][0][0])] for t in (0, 1)] for layer in (0, 1)]
        for text in ("ac", "bc")
    ]
    where = 'texts "ac" and "bc", e = 1, 2, 0, two layers, attention the mean of all values, all weights 1'
    for text, key in zip(texts, (Fraction(1, 2), Fraction(1))):
        yield exact(
            what="key of c, layer 2: 0 + (e + 0)/2", ran_on=where, observed=text[1][1][0], predicted=key, role="control"
        )
    for layer in (0, 1):
        yield exact(
            what=f"|key of c behind a − behind b|², layer {layer + 1} ≤ (κ^{layer + 1} |e(c) − e(c)|)² = 0, whatever κ", ran_on=where, predicted=0, relation="<=",
            observed=squared(texts, layer, 1), note="the first layer reads the token alone" if layer == 0 else None,
        )  # fmt: skip
    yield Picture(figure="divergence", data={"models": [_curves(table) for table in tables]})


def largest_stretches(table: dict[str, Any]) -> tuple[Float, Float]:
    """Of each layer, and of its keys and values, over all states measured."""
    found = []
    for name in ("stretch_layer", "stretch_kv"):
        rows = [row for one in table.get("segments", [table]) for row in one[name]]
        found.append(np.array(rows, float).max(axis=0))
    return found[0], found[1]


def _curves(table: dict[str, Any]) -> dict[str, Any]:
    """By layer: distances at and behind the divergence, of unrelated positions, and the two bounds, over the mean distance of the embeddings."""
    e = float(np.mean(table["embedding_distance"]))
    layer, kv = largest_stretches(table)
    product = np.concatenate([[1.0], np.cumprod(layer)[:-1]]) * kv
    power = float(layer.max()) ** np.arange(len(layer)) * kv
    return {
        "model": table["title"], "embedding_distance": e, "at": np.mean(table["at"], axis=0).tolist(), "behind": np.mean(table["behind_rms"], axis=0).tolist(),
        "unrelated": np.mean(table["unrelated"], axis=0).tolist(), "product": (product * e).tolist(), "power": (power * e).tolist(),
    }  # fmt: skip


# -- at the position itself ----------------------------------------------------------------------------------------------


def _norm(x: Float) -> Float:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def toy_layer(player: ToyPlayer, number: int, past: Sequence[Any], x: Float) -> Float:
    """What layer `number` of the toy transformer makes of the stream x (rows, width) of its next position: written out anew."""
    w, heads, d = player.weights[number], player.kv_heads, player.head_dim
    h, position = _norm(x), np.array([len(past)])
    q, k = (
        player.rope.apply((h @ w[name]).reshape(len(x) * many, 1, d), position).reshape(len(x), many, d)
        for name, many in (("q", 2 * heads), ("k", heads))
    )
    v = (h @ w["v"]).reshape(len(x), heads, d)
    keys = np.stack([*(np.broadcast_to(kv[number].keys, k.shape) for kv in past), k], axis=2)
    values = np.stack([*(np.broadcast_to(kv[number].values, v.shape) for kv in past), v], axis=2)
    z = np.einsum("rhd,rhtd->rht", q, np.repeat(keys, 2, axis=1)) / np.sqrt(d)
    a = np.exp(z - z.max(axis=2, keepdims=True))
    a /= a.sum(axis=2, keepdims=True)
    return x + np.einsum("rht,rhtd->rhd", a, np.repeat(values, 2, axis=1)).reshape(len(x), -1) @ w["o"]


def toy_kv(player: ToyPlayer, number: int, x: Float) -> Float:
    """Keys before rotation, and values, (rows, numbers)."""
    w = player.weights[number]
    return np.concatenate([_norm(x) @ w["k"], _norm(x) @ w["v"]], axis=1)


def stretch(f: Any, x: Float, y: Float, nodes: int = 16) -> float:
    """The largest singular value of f's Jacobian on the segment from x to y: over Gauss-Legendre nodes, by central differences.

    f(y) − f(x) = ∫ J (y − x): at most the mean over the segment of ‖J‖ ‖y − x‖, hence at most its largest value at the nodes of a rule that
    integrates it; the rule's error is far below the slack.
    """
    step, found = 1e-5, 0.0
    eye = np.eye(len(x)) * step
    for at in (np.polynomial.legendre.leggauss(nodes)[0] + 1) / 2:
        here = x + at * (y - x)
        jacobian = (f(here + eye) - f(here - eye)) / (2 * step)
        found = max(found, float(np.linalg.norm(jacobian, 2)))
    return found


@claim(
    id="sharing/delta-at-divergence", paper=PAPER, section="delta after divergence, corrected",
    statement="At the position where two texts part, behind one past, keys and values of layer l are apart by at most the distance of the two embeddings times the product of the "
    "layers' stretches: the largest singular values of their Jacobians between the two. It is attained by linear layers, and says nothing on trained models.",
    formula="‖KV^l(s) − KV^l(s')‖ ≤ κ_KV,l Π_{j<l} κ_j ‖e(t) − e(t')‖,   κ_j = sup over the segment of ‖D g_j‖",
    assumptions=("the two texts agree before the position", "the layers are differentiable there", "on trained models the largest of a few states between the two stands for the supremum"),
    expected=Verdict.HOLDS_UNDER,
    functions={"bound": "proofs_checks.sequential.parting.stretched", "player": "kvtheory.prediction.ToyPlayer"},
    mutants=[
        Mutant("the largest stretch alone", "bound", lambda true: lambda stretches, distance: max(stretches) * distance),
        Mutant("the lowest layer's stretch left out", "bound", lambda true: lambda stretches, distance: true(stretches[1:], distance)),
        Mutant("the sum of the stretches less their number", "bound", lambda true: lambda stretches, distance: (1 + sum(s - 1 for s in stretches)) * distance),
        Mutant("half of the distance", "bound", lambda true: lambda stretches, distance: true(stretches, distance) / 2),
    ],
)  # fmt: skip
def at_divergence(context: Context, *, bound: Function, player: Function) -> Result:
    from kvtheory.tiny import RationalTransformer

    # one token, itself its only past: x -> x (1 + v o), a line through 0
    layers = tuple(
        RationalLayer(query=((0,),), key=((k,),), value=((v,),), output=((o,),))
        for k, v, o in ((1, 2, 1), (1, 1, 3), (5, 1, 0))
    )
    model = RationalTransformer({"a": (1,), "b": (4,)}, layers)
    one, two = model.kv(("a",)), model.kv(("b",))
    apart = abs(Fraction(one[2][0][0]) - Fraction(two[2][0][0]))
    where = "e = 1 and 4, first position, layers x ↦ x (1 + 2·1), x (1 + 1·3), then the key 5 x"
    yield exact(
        what="|key of a − key of b|, layer 3: 5 · 3 · 4 · 3",
        ran_on=where,
        observed=apart,
        predicted=180,
        role="control",
    )
    yield exact(
        what="|key of a − key of b| ≤ κ_K κ_2 κ_1 |e(a) − e(b)|, attained", ran_on=where, observed=apart, predicted=bound([3, 4, 5], 3), relation="<=", tightness=1.0
    )  # fmt: skip
    yield exact(what="the bound itself", ran_on=where, observed=bound([3, 4, 5], 3), predicted=180)
    its = player(vocabulary=32, layers=context.size(3, 5), kv_heads=1, head_dim=8, seed=context.seed)
    rng = context.rng("pairs")
    worst, loose = 0.0, []
    number = context.size(3, 12)
    for _ in range(number):
        play = its.start()
        past = [play.feed(int(t)) for t in rng.integers(0, its.vocabulary, 6)]
        tokens = [int(t) for t in rng.choice(its.vocabulary, 2, replace=False)]
        kv = play.candidates(tokens)
        x = its.embedding[tokens]
        distance = float(np.linalg.norm(x[0] - x[1]))
        stretches: list[float] = []
        for i in range(its.layers):
            observed = math.sqrt(sum(float(((a[0] - a[1]) ** 2).sum()) for a in kv[i]))
            own = stretch(lambda rows, i=i: toy_kv(its, i, rows), x[0], x[1])
            limit = float(bound([*stretches, own], distance))
            worst = max(worst, observed / limit)
            loose.append(limit / observed)
            stretches.append(stretch(lambda rows, i=i, past=past: toy_layer(its, i, past, rows), x[0], x[1]))
            x = toy_layer(its, i, past, x)
    yield numerical(
        what="distance of keys and values at the divergence over the bound, the largest", ran_on=f"{number} pairs of tokens behind 6, toy transformer of {its.layers} layers", observed=worst,
        predicted=1.0, relation="<=", tolerance=1e-6, because="central differences with a step of 1e-5", tightness=worst, note=f"the bound is {min(loose):.1f} to {max(loose):.1f} times too large",
    )  # fmt: skip
    for table in context.memo("tables", lambda: measured.load("divergence")):
        unrelated = float(np.array(table["unrelated"], float)[:, -1].max())
        for one in table.get("segments", []):
            pair = one["pair"]
            e, at = float(table["embedding_distance"][pair]), np.array(table["at"][pair], float)
            layer, kv = (np.array(one[name], float).max(axis=0) for name in ("stretch_layer", "stretch_kv"))
            where = f"{table['title']}, pair {pair}, Jacobians at {len(one['stretch_kv'])} states between the two, saved table"
            limits = [float(bound([*layer[:i], kv[i]], e)) for i in range(len(layer))]
            slack = [math.log10(limit / seen) for limit, seen in zip(limits, at)]
            near = int(np.argmin(slack))
            yield numerical(
                what="distance of keys and values at the divergence ≤ that of the embeddings times the product of the stretches: the layer nearest to it", ran_on=where,
                observed=float(at[near]), predicted=limits[near], relation="<=", tolerance=PRINTED, because="three digits; the largest of the nodes stands for the supremum",
                tightness=float(at[near]) / limits[near], note=f"layer {near + 1}; 10^{min(slack):.1f} to 10^{max(slack):.1f} too large over layers",
            )  # fmt: skip
            yield numerical(
                what="the bound at the last layer, above the largest distance of two positions that have nothing in common: it says nothing", ran_on=where, observed=limits[-1],
                predicted=unrelated, relation=">", tolerance=PRINTED, because="three digits",
                note=f"any κ that holds is at least {layer.max():.3g}, and κ^l reaches 10^{(len(layer) - 1) * math.log10(float(layer.max())) + math.log10(float(kv[-1])):.0f}",
            )  # fmt: skip


PRINTED = 1.1e-2
