"""Claims on the groups of arXiv 2604.15356, on residuals against their centroids, and on prefixes that are alike in meaning alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.distortion import attention_error
from kvtheory.layer import Cache
from kvtheory.statistics import mean_interval
from kvtheory.workload import Session
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, statistical
from proofs_checks.sequential import measured, stored
from proofs_checks.sequential.stored import LONGER, PAPER, SHORTER, TOKEN_BITS, Named, fill, literal, played, sessions

Result = Iterator[Evidence | Picture]
SUMS = 1e-12
#: at the paraphrases: the table was measured anew, larger, after the first one had left it open
LOOKS = 2
SUMMED = "sums of at most 1e6 squares in float64, each within 1e-16 of itself; far apart from 1"


def _ranked(made: Named) -> Any:
    from reference.prefix_store.groups import Ranked

    return [Ranked(s.tokens, np.asarray(cache.surprisal_bits)) for s, cache in made]


def small(*strings: str) -> Named:
    return [
        (Session(s, "", "prompt", None, s, np.array([ord(c) for c in s])), stored.causal([ord(c) for c in s]))
        for s in strings
    ]


GROUP_SLIPS = [
    Mutant("the rule turned round", "grouping", lambda true: lambda made, delta, rule: true(made, delta, ">=" if rule == "<=" else "<=")),
    Mutant("a centroid of the least probable session", "grouping", lambda true: lambda made, delta, rule: _relabelled(true, made, delta, rule)),
]  # fmt: skip


def _relabelled(true: Function, made: Any, delta: float, rule: str) -> Any:
    """Groups as found, the last member in the centroid's place."""
    out = []
    for one in true(made, delta, rule):
        everyone = [one.centroid, *one.members]
        forks = [literal(made[everyone[-1]].tokens, made[i].tokens) for i in everyone[:-1]]
        out.append(one._replace(centroid=everyone[-1], members=everyone[:-1], forks=forks))
    return out


@claim(
    id="sharing/groups-by-small-similarity", paper=PAPER, section="definition of clusters",
    statement="The groups {d_T ≤ δ} hold the sessions that share most with their centroid.",
    formula="max over s outside of |c∧s|  ≤  min over s in the group of |c∧s|",
    expected=Verdict.FAILS,
    functions={"grouping": "reference.prefix_store.groups.group", "store": "reference.PrefixStore"},
    mutants=[*GROUP_SLIPS, Mutant("the store's rule turned round", "store", lambda true: lambda policy, **more: true(policy, rule=">=", **more))],
    correction="sharing/groups-by-large-similarity",
)  # fmt: skip
def groups_by_small_similarity(context: Context, *, grouping: Function, store: Function) -> Result:
    made = small("ab", "abc", "zzz")
    groups = grouping(_ranked(made), float(TOKEN_BITS), "<=")
    where = '"ab", "abc" and "zzz", 8 bits a token, δ = 8 bits'
    yield exact(
        what="the groups, centroid first", ran_on=where, role="control", predicted=[["ab", "zzz"], ["abc"]],
        observed=[[made[i][0].name for i in (one.centroid, *one.members)] for one in groups],
    )  # fmt: skip
    yield from _against_outside(groups, _ranked(made), where)
    many = context.memo("many", lambda: sessions(context, context.size(60, 200)))
    ranked = _ranked(many)
    for tokens in (4, 16, 40):
        groups = grouping(ranked, float(tokens * TOKEN_BITS), "<=")
        where = f"{len(many)} sessions of the workload, 8 bits a token, δ = {tokens} tokens' worth"
        yield from _against_outside(groups, ranked, where)
        yield exact(
            what="sessions that are no more probable than their centroid", ran_on=where, role="control", predicted=len(many) - len(groups),
            observed=sum(len(ranked[i].tokens) >= len(ranked[one.centroid].tokens) for one in groups for i in one.members),
        )  # fmt: skip
        held, _ = fill(store, many, "plt", delta=float(tokens * TOKEN_BITS), residual=False)
        stats, radix = held.stats(), context.memo("radix", lambda: stored.distinct_prefixes(many))
        yield exact(
            what="tokens that the groups hold", ran_on=where, role="control", observed=stats.stored_tokens,
            predicted=sum(len(s.tokens) for s, _ in many) - sum(literal(ranked[one.centroid].tokens, ranked[i].tokens) for one in groups for i in one.members),
            note=f"{stats.bytes_stored} bytes; a radix tree holds {radix} tokens, each alone {stats.bytes_unshared} bytes",
        )  # fmt: skip


def _against_outside(groups: Any, ranked: Any, where: str) -> Result:
    """The first group of which anything was left outside."""
    inside = next((one for one in groups if one.members and len(one.members) + 1 < len(ranked)), None)
    if inside is None:
        return
    before = [i for one in groups[: groups.index(inside)] for i in (one.centroid, *one.members)]
    centre = ranked[inside.centroid].tokens
    out = [
        literal(centre, ranked[i].tokens)
        for i in range(len(ranked))
        if i not in {inside.centroid, *inside.members, *before}
    ]
    if out:
        least = min(literal(centre, ranked[i].tokens) for i in inside.members)
        yield exact(
            what="most tokens shared with the centroid outside the group ≤ least inside", ran_on=where, observed=max(out), predicted=least, relation="<="
        )  # fmt: skip


@claim(
    id="sharing/groups-by-large-similarity", paper=PAPER, section="definition of clusters, corrected",
    statement="The groups {d_T ≥ δ} hold the sessions that share most with their centroid; no groups hold fewer tokens than a radix tree, which holds each "
    "distinct prefix once.",
    formula="#{held by any exact store} ≥ #{distinct prefixes} = #{held by a radix tree}",
    expected=Verdict.HOLDS,
    functions={"grouping": "reference.prefix_store.groups.group", "store": "reference.PrefixStore"},
    mutants=[*GROUP_SLIPS[:1], SHORTER, LONGER], figure="prefix-store-bytes",
)  # fmt: skip
def groups_by_large_similarity(context: Context, *, grouping: Function, store: Function) -> Result:
    many = context.memo("many", lambda: sessions(context, context.size(60, 200)))
    ranked, distinct = _ranked(many), context.memo("distinct", lambda: stored.distinct_prefixes(many))
    radix = fill(store, many, "radix", verify=False)[0].stats()
    policies = [("radix tree", radix)]
    where = f"{len(many)} sessions of the workload, 8 bits a token"
    yield exact(
        what="tokens that a radix tree holds = distinct prefixes",
        ran_on=where,
        observed=radix.stored_tokens,
        predicted=distinct,
    )
    for rule in ("<=", ">="):
        for tokens in (0, 4, 16, 40):
            there = f"{where}, {{d_T {rule} {tokens} tokens' worth}}"
            held = fill(store, many, "plt", delta=float(tokens * TOKEN_BITS), rule=rule, residual=False)[0].stats()
            if tokens:
                policies.append((f"groups, $d_T$ {'≤' if rule == '<=' else '≥'} {tokens} tokens' worth", held))
            yield exact(
                what="tokens that the groups hold ≥ distinct prefixes", ran_on=there, observed=held.stored_tokens, predicted=distinct, relation=">=",
                note=f"{held.bytes_stored} bytes against {radix.bytes_stored} of a radix tree, tables and tokens included",
            )  # fmt: skip
            if rule == ">=" and tokens:
                yield from _against_outside(grouping(ranked, float(tokens * TOKEN_BITS), ">="), ranked, there)
    for block in (32, 16, 4):
        policies.insert(1, (f"blocks of {block}", fill(store, many, "blocks", block=block, verify=False)[0].stats()))
    names = ("bytes_stored", "table_bytes", "bytes_unshared", "stored_tokens", "tokens")
    yield Picture(
        figure="prefix-store-bytes",
        data={
            "policies": [
                {"policy": name, "found": s.hit_tokens, **{n: getattr(s, n) for n in names}} for name, s in policies
            ]
        },
    )


def _pairs(context: Context, aligned: bool) -> list[tuple[tuple[Session, Cache], tuple[Session, Cache], int]]:
    """(shorter, longer, their common prefix) of all pairs that overlap by 16 tokens and more behind it, of which more than half (aligned), or not
    more, are the same token at the same position."""

    def found() -> Any:
        out: dict[bool, list[Any]] = {True: [], False: []}
        made = sorted(played(context, np.float32), key=lambda pair: len(pair[0].tokens))
        for i, b in enumerate(made):
            for a in made[:i]:
                fork, n = literal(a[0].tokens, b[0].tokens), len(a[0].tokens)
                if n - fork >= 16:
                    same = float((a[0].tokens[fork:] == b[0].tokens[fork:n]).mean())
                    out[same > 0.5].append((a, b, fork))
        return out

    pairs: list[Any] = context.memo("pairs", found)[aligned]
    return pairs[:: max(1, len(pairs) // context.size(12, 60))]


def _energy(pairs: Any) -> float:
    """Σ ||KV − KV of the source||² / Σ ||KV||², over the positions behind the divergence that both have."""
    less = whole = 0.0
    for (_, a), (_, b), fork in pairs:
        for x, y in zip(a, b):
            n = x.tokens
            for pair in ((x.keys, y.keys), (x.values, y.values)):
                p, q = (z[:, fork:n].astype(float) for z in pair)
                less, whole = less + float(((q - p) ** 2).sum()), whole + float((q**2).sum())
    return less / whole


def _errors(context: Context, store: Function, pairs: Any, bits: int = 3) -> tuple[list[float], list[float], int]:
    """Attention error of each pair and layer by residuals and afresh, layer by layer; how many pairs have streams of two sizes."""
    import reference

    queries = context.rng("queries").normal(size=(4, 32, 8))
    out: tuple[list[float], list[float]] = ([], [])
    unequal = 0
    for source, own, _ in pairs:
        sizes = []
        for residual, errors in zip((True, False), out):
            # one group of the two, with the source as its centroid: it is put first, and no less probable by the law
            held = store("plt", delta=0.0, rule=">=", residual=residual, inner=reference.TurboQuant(bits))
            for name, (s, cache) in (("source", source), ("own", own)):
                held.put(
                    name, Cache(list(cache), tokens=s.tokens, surprisal_bits=np.full(len(s.tokens), float(TOKEN_BITS)))
                )
            sizes.append(len(held.stream()))
            errors += [attention_error(layer.replace(queries=queries), d) for layer, d in zip(own[1], held.get("own"))]
        unequal += sizes[0] != sizes[1]
    return *out, unequal


def _geometric(residual: list[float], afresh: list[float]) -> float:
    return math.exp(float(np.mean(np.log(residual) - np.log(afresh))))


RESIDUAL_SLIPS = [
    Mutant("residuals never taken", "store", lambda true: lambda policy, residual=True, **more: true(policy, residual=False, **more)),
    Mutant("twice the bits for residuals", "store", lambda true: lambda policy, residual=True, inner=None, **more: true(policy, residual=residual, inner=type(inner)(2 * inner.bits) if residual else inner, **more)),
]  # fmt: skip
RESIDUAL_WHERE = "toy transformer with random weights, TurboQuant(3), queries N(0, 1), streams of one size"


@claim(
    id="sharing/residual-after-divergence", paper=PAPER, section="layer 1; residuals against a centroid",
    statement="The other sessions of a group cost less error, at the same bytes, as residuals against their centroid from the divergence on than coded afresh.",
    formula="E‖KV_i(s) − KV_i(c)‖² < E‖KV_i(s)‖²,   i > |s∧c|",
    expected=Verdict.FAILS,
    functions={"store": "reference.PrefixStore"},
    mutants=RESIDUAL_SLIPS, correction="sharing/residual-of-aligned-tails",
)  # fmt: skip
def residual_after_divergence(context: Context, *, store: Function) -> Result:
    pairs = _pairs(context, aligned=False)
    residual, afresh, unequal = _errors(context, store, pairs)
    where = f"{len(pairs)} pairs of sessions that mostly differ token by token behind their prefix, {RESIDUAL_WHERE}"
    yield exact(
        what="pairs whose two streams differ in length", ran_on=where, role="control", observed=unequal, predicted=0
    )
    yield numerical(
        what="energy of the residual behind the divergence / energy of keys and values", ran_on=where, role="control", observed=_energy(pairs), predicted=1.0,
        relation=">", tolerance=SUMS, because=SUMMED, note="two independent vectors of one law: 2",
    )  # fmt: skip
    yield numerical(
        what="attention error by residuals / afresh, geometric mean over pairs and layers", ran_on=where, observed=_geometric(residual, afresh), predicted=1.0,
        relation="<=", tolerance=SUMS, because=SUMMED, note=f"worst {max(r / a for r, a in zip(residual, afresh)):.2f}",
    )  # fmt: skip
    yield numerical(
        what="the same is not 1: the residuals were taken", ran_on=where, role="control", observed=_geometric(residual, afresh), predicted=1.0, relation="!=",
        tolerance=SUMS, because=SUMMED,
    )  # fmt: skip


@claim(
    id="sharing/residual-of-aligned-tails", paper=PAPER, section="layer 1; residuals against a centroid, corrected",
    statement="Residuals behind the divergence pay, on average, where the tails mostly have the same tokens at the same positions, as after one word put in another's place; there "
    "keys and values differ by context alone.",
    formula="t_i = s_i for i > j:   E‖KV_i(s) − KV_i(t)‖² < E‖KV_i(s)‖²",
    assumptions=["measured on a toy transformer with random weights"],
    expected=Verdict.HOLDS_UNDER,
    functions={"store": "reference.PrefixStore"},
    mutants=RESIDUAL_SLIPS,
)  # fmt: skip
def residual_of_aligned_tails(context: Context, *, store: Function) -> Result:
    pairs = _pairs(context, aligned=True)
    residual, afresh, unequal = _errors(context, store, pairs)
    where = f"{len(pairs)} pairs of sessions that mostly agree token by token behind their prefix, {RESIDUAL_WHERE}"
    yield exact(
        what="pairs whose two streams differ in length", ran_on=where, role="control", observed=unequal, predicted=0
    )
    yield numerical(
        what="energy of the residual behind the divergence / energy of keys and values", ran_on=where, observed=_energy(pairs), predicted=1.0, relation="<",
        tolerance=SUMS, because=SUMMED,
    )  # fmt: skip
    yield numerical(
        what="attention error by residuals / afresh, geometric mean over pairs and layers", ran_on=where, observed=_geometric(residual, afresh), predicted=1.0,
        relation="<", tolerance=SUMS, because=SUMMED, note=f"worst {max(r / a for r, a in zip(residual, afresh)):.2f}",
    )  # fmt: skip
    yield from _mean_of_keys(context)


def _mean_of_keys(context: Context) -> Result:
    """On a real model: how much of another text's keys at the same positions is their mean before RoPE, which needs no session."""
    for label, layer in context.real():
        if layer.rope is None or layer.tokens < 64:
            continue
        n = layer.tokens // 2
        keys = layer.rope.undo(layer.keys, layer.positions)
        values = np.asarray(layer.values, float)
        first, second = (slice(16, n), slice(n + 16, 2 * n))
        energy = float((keys[:, second] ** 2).sum())
        other = float(((keys[:, second] - keys[:, first]) ** 2).sum()) / energy
        mean = float(((keys[:, second] - keys[:, first].mean(axis=1, keepdims=True)) ** 2).sum()) / energy
        apart = float(((values[:, second] - values[:, first]) ** 2).sum()) / float((values[:, second] ** 2).sum())
        yield numerical(
            what="energy of keys less those of another passage at the same positions ≥ less their fixed mean before RoPE", ran_on=f"{label}, two passages of {n - 16} tokens",
            role="assumption", observed=other, predicted=mean, relation=">=", tolerance=SUMS, because=SUMMED,
            note=f"of the energy of the keys; values less those of the other passage: {apart:.2f} of theirs. What a residual gains on a real model "
            "is the mean of the keys, and a fixed vector gives more of it",
        )  # fmt: skip


@claim(
    id="sharing/paraphrases", paper=PAPER, section="section on semantic prefixes",
    statement="Two prompts that say the same in other words share what they have literally in common, and nothing else.",
    formula="hit(s | t) = |s∧t|",
    expected=Verdict.HOLDS,
    functions={"store": "reference.PrefixStore"},
    mutants=[
        LONGER,
        SHORTER,
        Mutant("tokens in any order", "store", stored.altered(stored.in_any_order)),
    ],
)  # fmt: skip
def paraphrases(context: Context, *, store: Function) -> Result:
    texts = {s.name: (s, c) for s, c in context.memo("many", lambda: sessions(context, context.size(80, 400)))}
    pairs = [(texts[s.source], (s, c)) for s, c in texts.values() if s.kind == "paraphrase" and s.source]
    hits, common, sizes = [], [], []
    for (a, kv_a), (b, kv_b) in pairs:
        held = store("radix", verify=False)
        held.put("a", kv_a)
        hits.append(held.put("b", kv_b))
        common.append(literal(a.tokens, b.tokens))
        sizes.append(len(b.tokens))
    where = f"{len(pairs)} pairs of prompts, the second its system prompt in other words, the rest the same"
    yield exact(
        what="pairs that share another number of tokens than their literal prefix has", ran_on=where, predicted=0, observed=sum(a != b for a, b in zip(hits, common)),
        note=f"literal prefix {np.mean(common):.1f} of {np.mean(sizes):.1f} tokens on average",
    )  # fmt: skip
    kv = {s.name: (s, c) for s, c in played(context, np.float32)}
    said = [
        (kv[s.source], (s, c), literal(kv[s.source][0].tokens, s.tokens))
        for s, c in kv.values()
        if s.kind == "paraphrase" and s.source
    ]
    prompts = [v for v in kv.values() if v[0].kind == "prompt"]
    unlike = [(a, b, literal(a[0].tokens, b[0].tokens)) for a, b in zip(prompts, [*prompts[1:], prompts[0]])]
    yield numerical(
        what="mean cosine of keys and values behind the divergence, paraphrases − unrelated prompts", ran_on=f"{len(said)} and {len(unlike)} pairs, toy transformer with random weights",
        role="assumption", observed=_cosine(said) - _cosine(unlike), predicted=0.0, tolerance=0.0, because="reported as measured",
        note=f"paraphrases {_cosine(said):.3f}, unrelated {_cosine(unlike):.3f}; weights that have learnt nothing know no meaning, so this says nothing of real models",
    )  # fmt: skip


def nearer(near: Any, far: Any) -> Any:
    """log(near / far) of two squared distances: below 0 where the first two are nearer to each other."""
    return np.log(np.asarray(near, float)) - np.log(np.asarray(far, float))


def _upper(table: dict[str, Any], part: str, name: str) -> NDArray[np.float64]:
    """Mean squared distance of each pair of prompts over passages and the upper half of the layers."""
    rows = np.array(table[part][name], float)
    of_pairs = rows.reshape(len(table["prompts"]), -1, rows.shape[1])
    found: NDArray[np.float64] = of_pairs[:, :, rows.shape[1] // 2 :].mean(axis=(1, 2))
    return found


@claim(
    id="sharing/meaning-beyond-the-prefix", paper=PAPER, section="section on semantic prefixes, on trained models",
    statement="In trained models keys and values of equal tokens are nearer to each other behind two prompts of one meaning than behind two of different meaning and like length, "
    "though the first have no longer a literal prefix in common: meaning leaves a trace, and d_T, which sees the literal prefix alone, does not tell it.",
    formula="s∧s' no longer than s∧u:   E log ‖KV(s x) − KV(s' x)‖² < E log ‖KV(s x) − KV(u x)‖²",
    assumptions=("pairs of prompts count as independent samples", "upper half of the layers", "two looks at the data: 16 pairs had not settled it, 32 were then measured; the level is halved"),
    expected=Verdict.HOLDS_UNDER,
    functions={"nearer": "proofs_checks.sequential.groups.nearer"},
    mutants=[
        Mutant("the two kinds of prompts exchanged", "nearer", lambda true: lambda near, far: true(far, near)),
        Mutant("distances without the paraphrases'", "nearer", lambda true: lambda near, far: true(far, np.roll(far, 1))),
    ],
)  # fmt: skip
def meaning(context: Context, *, nearer: Function) -> Result:
    tables = context.memo("tables", lambda: measured.load("paraphrases"))
    for table in tables:
        common = table["literal_prefix_tokens"]
        chosen = [i for i, (own, other) in enumerate(common) if own <= other]
        logs = np.mean(
            [
                nearer(_upper(table, part, "paraphrase"), _upper(table, part, "unrelated"))[chosen]
                for part in ("keys", "values")
            ],
            axis=0,
        )
        where = (
            f"{table['title']}, {len(chosen)} pairs of prompts, of which the paraphrase has no more tokens in common than the unrelated prompt (0 to "
            f"{max(common[i][0] for i in chosen)}), {table['passages']} passages of {table['tokens']} tokens, saved table"
        )
        means = {
            part: [float(_upper(table, part, name).mean()) for name in ("paraphrase", "unrelated", "other_tokens")]
            for part in ("keys", "values")
        }
        yield statistical(
            what="log of the squared distance behind paraphrases over that behind unrelated prompts, mean of keys and values: below 0", ran_on=where,
            interval=mean_interval(logs, 1 - context.alpha(LOOKS * len(tables))), predicted=0.0, relation="<",
            note="squared distance over both variances, paraphrases / unrelated / two passages behind one prompt: "
            + "; ".join(f"{part} {a:.3f} / {b:.3f} / {c:.2f}" for part, (a, b, c) in means.items()) + f"; {int((logs < 0).sum())} of {len(logs)} pairs",
        )  # fmt: skip


def _cosine(pairs: Any) -> float:
    found = []
    for (_, a), (_, b), fork in pairs:
        for x, y in zip(a, b):
            n = min(x.tokens, y.tokens)
            for pair in ((x.keys, y.keys), (x.values, y.values)):
                p, q = (z[:, fork:n].astype(float) for z in pair)
                found.append((p * q).sum(axis=-1) / np.sqrt((p**2).sum(axis=-1) * (q**2).sum(axis=-1)))
    return float(np.mean(np.concatenate([x.ravel() for x in found])))
