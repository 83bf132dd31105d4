"""Claims on layer 1 of arXiv 2604.15356 where it is exact: what sessions that begin alike share, and the bytes that this saves."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory.distortion import attention_error
from kvtheory.layer import Cache
from kvtheory.workload import Session
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential import stored
from proofs_checks.sequential.stored import LONGER, PAPER, SHORTER, Named, fill, literal, sessions

Result = Iterator[Evidence | Picture]
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (("radix", {}), ("blocks", {"block": 4}), ("blocks", {"block": 16}))


@claim(
    id="sharing/prefix-lossless", paper=PAPER, section="layer 1; exact prefix reuse",
    statement="Sessions stored together by exact prefix, found by their tokens alone (radix tree) or by 256-bit chained hashes of full blocks, come "
    "back bit for bit, out of the bytes.",
    formula="t_1..t_i = s_1..s_i  ⇒  KV_i(t) = F(t_1..t_i) = KV_i(s)",
    assumptions=["keys and values are a function of the tokens before them, bit for bit: one model, run in one way (a fixed plan)"],
    expected=Verdict.HOLDS_UNDER,
    functions={"store": "reference.PrefixStore"},
    mutants=[
        LONGER,
        Mutant("blocks hashed without what comes before them", "store", stored.tree(stored.unchained)),
        Mutant("hashes of 8 bits", "store", stored.tree(stored.short_hash)),
    ],
)  # fmt: skip
def prefix_lossless(context: Context, *, store: Function) -> Result:
    toy, many = stored.played(context), context.memo("many", lambda: sessions(context, context.size(40, 400), 2))
    pairs = [(a, b, literal(a[0].tokens, b[0].tokens)) for i, a in enumerate(toy) for b in toy[:i]]
    yield exact(
        what="common prefixes of two sessions whose keys or values, each session played afresh, differ in any bit",
        ran_on=f"{len(pairs)} pairs of {len(toy)} sessions, toy transformer, float16", role="assumption", predicted=0,
        observed=sum(
            any(
                x.keys[:, :n].tobytes() != y.keys[:, :n].tobytes() or x.values[:, :n].tobytes() != y.values[:, :n].tobytes()
                for x, y in zip(a, b)
            )
            for (_, a), (_, b), n in pairs
        ),
    )  # fmt: skip
    for made, what in ((toy, "toy transformer, played afresh"), (many, "causal map, 2 tenants")):
        for policy, options in POLICIES:
            held, hits = fill(store, made, policy, verify=False, **options)
            where = f"{len(made)} sessions, {what}, {policy} {options or ''}"
            yield exact(
                what="sessions of which any bit comes back wrong", ran_on=where, observed=stored.wrong_sessions(held, made), predicted=0
            )  # fmt: skip
            yield exact(
                what="tokens found stored", ran_on=where, role="control", observed=sum(hits), predicted=0, relation=">"
            )
    yield from _same_block_elsewhere(store)
    yield from _wrong_share(context, store, toy)


def _same_block_elsewhere(store: Function) -> Result:
    """P X, Q, Q X: the third session finds Q, and X must not be the one that stands behind P."""
    P, Q, X = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    made = [
        (Session(name, "one", "prompt", None, "", np.array(tokens)), stored.causal(tokens))
        for name, tokens in (("PX", P + X), ("Q", Q), ("QX", Q + X))
    ]
    for policy, options in POLICIES[:2]:
        held, hits = fill(store, made, policy, verify=False, **options)
        where = f"P X, Q and Q X, blocks of 4 tokens, {policy} {options or ''}"
        yield exact(
            what="sessions of which any bit comes back wrong",
            ran_on=where,
            observed=stored.wrong_sessions(held, made),
            predicted=0,
        )
        yield exact(what="tokens found stored: Q, once", ran_on=where, role="control", observed=sum(hits), predicted=4)


def _wrong_share(context: Context, store: Function, toy: Named) -> Result:
    """What it costs where the assumption breaks: the same tokens, other numbers."""
    first, cache = toy[0]
    other = Cache(
        [
            layer.replace(values=np.nextafter(layer.values, np.float16(np.inf), dtype=layer.values.dtype))
            for layer in cache
        ],
        tokens=cache.tokens,
    )
    where = f"one session of {len(first.tokens)} tokens, put again with values one float16 step away"
    refused = 0
    for policy, options in POLICIES:
        held = store(policy, **options)
        held.put("a", cache)
        try:
            held.put("b", other)
        except ValueError:
            refused += 1
    yield exact(
        what="policies that refuse to share them, where keys and values are compared", ran_on=where, role="control",
        observed=refused, predicted=len(POLICIES),
    )  # fmt: skip
    held = store("radix", verify=False)
    held.put("a", cache)
    held.put("b", other)
    yield exact(
        what="layers that come back as the other session's, where they are not compared", ran_on=where, role="control", predicted=len(cache),
        observed=sum(a.values.tobytes() == b.values.tobytes() for a, b in zip(held.get("b"), cache)),
    )  # fmt: skip
    yield _collision(context, store, toy)


def _collision(context: Context, store: Function, toy: Named) -> Evidence:
    """What it costs where the hash of the one block that differs collides: all that was stored for the other session is taken."""
    import reference

    blind = stored.tree(stored.colliding)(store)
    made, queries = {s.name: (s, cache) for s, cache in toy}, context.rng("queries").normal(size=(4, 32, 8))
    errors, quantised = [], []
    for s, cache in toy:
        if s.kind == "edit" and s.source is not None:
            held = blind("blocks", block=4, verify=False)
            held.put("source", made[s.source][1])
            held.put("edit", cache)
            for layer, got in zip(cache, held.get("edit")):
                asked = layer.replace(queries=queries)
                errors.append(attention_error(asked, got))
                quantised.append(reference.roundtrip(reference.TurboQuant(3), asked)[2])
    return numerical(
        what="attention error of a session that is given another's blocks, its hashes colliding, mean over layers", role="control", relation=">", observed=float(np.mean(errors)), predicted=0.0,
        ran_on=f"{len(errors)} layers of prompts with one word changed, in blocks of 4 of the unchanged prompt, toy transformer, queries N(0, 1)", tolerance=0.0,
        because="an error of 0 is bit for bit", note=f"largest {max(errors):.3f}; TurboQuant(3) on the same layers: {np.mean(quantised):.3f}",
    )  # fmt: skip


@claim(
    id="sharing/block-granularity", paper=PAPER, section="layer 1; against block tables",
    statement="A session that shares full blocks only loses at most block − 1 tokens of the longest prefix stored before it; a radix tree loses none.",
    formula="LCP − hit ≤ block − 1",
    expected=Verdict.HOLDS,
    functions={"store": "reference.PrefixStore"},
    mutants=[
        SHORTER,
        Mutant("blocks of twice the size", "store", lambda true: lambda policy, block=16, **more: true(policy, block=2 * block, **more)),
        Mutant("loss not counted", "store", stored.tree(lambda tree: setattr(tree, "literal", lambda found, tokens: found.length))),
    ],
)  # fmt: skip
def block_granularity(context: Context, *, store: Function) -> Result:
    made = context.memo("many", lambda: sessions(context, context.size(40, 400), 2))
    best = context.memo("best", lambda: _best(made))
    for block in (1, 2, 7, 16, 64):
        held, hits = fill(store, made, "blocks", block=block)
        losses = [b - h for b, h in zip(best, hits)]
        where = f"{len(made)} sessions of 2 tenants, blocks of {block}"
        yield exact(
            what="largest loss of a session, tokens", ran_on=where, observed=max(losses), predicted=block - 1, relation="<=",
            tightness=max(losses) / (block - 1) if block > 1 else None, note=f"mean {np.mean(losses):.2f}, total {sum(losses)}",
        )  # fmt: skip
        yield exact(
            what="least loss of a session, tokens", ran_on=where, observed=min(losses), predicted=0, relation=">="
        )
        yield exact(
            what="tokens lost as the store counts them", ran_on=where, role="control", observed=held.stats().lost_tokens, predicted=sum(losses)
        )  # fmt: skip
    _, hits = fill(store, made, "radix")
    yield exact(
        what="tokens found stored by a radix tree", ran_on=f"{len(made)} sessions of 2 tenants", observed=sum(hits), predicted=sum(best)
    )  # fmt: skip


def _best(made: Named) -> list[int]:
    """For each session the longest prefix that one of its tenant's before it has."""
    return [
        max((literal(s.tokens, t.tokens) for t, _ in made[:i] if t.tenant == s.tenant), default=0)
        for i, (s, _) in enumerate(made)
    ]


@claim(
    id="sharing/tenants-apart", paper=PAPER, section="layer 1; several tenants",
    statement="Sessions of different salts share nothing, whatever their tokens: what one tenant stores changes neither what another finds nor its bytes.",
    formula="h(root) = H(salt);   hits(b | a, b) = hits(b | b)",
    expected=Verdict.HOLDS,
    functions={"store": "reference.PrefixStore"},
    mutants=[
        Mutant("the salt left out", "store", stored.other_salt(lambda salt: b"")),
        Mutant("only the first byte of the salt", "store", stored.other_salt(lambda salt: salt[:1])),
        Mutant("only the length of the salt", "store", stored.other_salt(lambda salt: bytes([len(salt)]))),
    ],
)  # fmt: skip
def tenants_apart(context: Context, *, store: Function) -> Result:
    made = context.memo("many", lambda: sessions(context, context.size(40, 200)))
    for policy, options in POLICIES:
        where = f"the same {len(made)} sessions of three tenants, {policy} {options or ''}"
        alone = store(policy, verify=False, **options)
        expected = [alone.put(s.name, cache, b"tenant b") for s, cache in made]
        both = store(policy, verify=False, **options)
        for other in (b"tenant a", b""):
            for s, cache in made:
                both.put(f"{other!r} {s.name}", cache, other)
        found = [both.put(s.name, cache, b"tenant b") for s, cache in made]
        yield exact(
            what="sessions that find more tokens, or fewer, for the other tenants' sake", ran_on=where, predicted=0,
            observed=sum(a != b for a, b in zip(found, expected)),
        )  # fmt: skip
        yield exact(
            what="tokens held, in tenants' worth", ran_on=where, predicted=3,
            observed=Fraction(both.stats().stored_tokens, alone.stats().stored_tokens), note="what isolation costs: no byte is shared",
        )  # fmt: skip
        with both.match(made[0][0].tokens, b"tenant c") as lease:
            yield exact(what="tokens that a fourth tenant finds", ran_on=where, observed=lease.length, predicted=0)


def content_bytes(held: Any) -> int:
    """Bytes of keys and values in a stream: the inner codec's parts but for shapes, read from the bytes."""
    from reference import stream
    from reference.prefix_store.layout import groups_of

    names = held._codec.part_names
    total = 0
    for _, group in groups_of(stream.read(held.stream())[1][0]):
        total += sum(part.remaining for name, part in zip(names, stream.split(group), strict=True) if name != "shape")
    return total


def per_token(inner: Any) -> tuple[int, int]:
    """Bytes of keys and values, all layers, that the inner codec takes for one token, and for a piece however short (its tables)."""
    from reference import stream
    from reference.prefix_store.segments import KV, LayerKind, coded
    from reference.stream import Reader

    sizes = []
    for n in (16, 32):
        cache = stored.causal(list(range(n)))
        layers, kinds = [KV(x.keys, x.values) for x in cache], [LayerKind.of(x) for x in cache]
        parts = [stream.split(Reader(group)) for group in coded(inner, layers, kinds, 0)]
        sizes.append(
            sum(part.remaining for one in parts for name, part in zip(inner.part_names, one) if name != "shape")
        )
    size, rest = divmod(sizes[1] - sizes[0], 16)
    assert not rest
    return size, sizes[0] - 16 * size


@claim(
    id="sharing/layers-additive", paper=PAPER, section="proposition on the two layers",
    statement="Sharing and quantising add up in bytes: each distinct prefix costs what the quantiser takes for one token, once, and each piece its tables, so "
    "that both save what sharing saves, plus what quantising saves on the tokens that sharing leaves.",
    formula="B(share, quantise) = c_q · #{distinct prefixes} + k_q · #{pieces},   Σ n_i = #{held} + #{found stored}",
    expected=Verdict.HOLDS,
    functions={"store": "reference.PrefixStore"},
    mutants=[
        SHORTER,
        LONGER,
        Mutant("quantiser left out", "store", lambda true: lambda policy, inner=None, **more: true(policy, **more)),
    ],
)  # fmt: skip
def layers_additive(context: Context, *, store: Function) -> Result:
    import reference

    made = context.memo("many", lambda: sessions(context, context.size(40, 200)))
    total, distinct = (
        sum(len(s.tokens) for s, _ in made),
        context.memo("distinct", lambda: stored.distinct_prefixes(made)),
    )
    full, none = per_token(reference.Full())
    where = f"{len(made)} sessions, {total} tokens, {distinct} distinct prefixes"
    yield exact(
        what="bytes of tables that Full writes with each piece", ran_on="-", role="control", observed=none, predicted=0
    )
    saved = total * full - content_bytes(fill(store, made, "radix", verify=False)[0])
    for name, inner in (
        ("Full", reference.Full()), ("TurboQuant(4)", reference.TurboQuant(4)), ("TurboQuant(2)", reference.TurboQuant(2)),
    ):  # fmt: skip
        held, hits = fill(store, made, "radix", inner=inner, verify=False)
        (one, tables), content, stats = per_token(inner), content_bytes(held), held.stats()
        tables *= stats.segments
        yield exact(
            what=f"bytes of keys and values, radix and {name}", ran_on=where, observed=content, predicted=one * distinct + tables,
            note=f"{one} bytes a token, {tables} bytes of tables in {stats.segments} pieces; stream {stats.bytes_stored} bytes, of them {stats.table_bytes} "
            f"of tables and tokens of the store; each session alone {stats.bytes_unshared}",
        )  # fmt: skip
        yield exact(
            what="tokens held and found stored", ran_on=where, observed=stats.stored_tokens + sum(hits), predicted=total
        )
        yield exact(
            what=f"bytes saved by both = by sharing + by {name} on what is left − tables of the pieces", ran_on=where, observed=total * full - content,
            predicted=saved + distinct * (full - one) - tables,
        )  # fmt: skip
        if one != full:
            alone = saved + total * (full - one)
            yield exact(
                what=f"saved by sharing alone + by {name} alone, each of the whole workload, is more than both save, by (tokens shared) × (bytes saved on one) + tables",
                ran_on=where, role="control", observed=alone - (total * full - content), predicted=(total - distinct) * (full - one) + tables,
                note="savings of the two measured apart do not add",
            )  # fmt: skip


def clusters(groups: int, each: int, prefix: int, tail: int) -> Named:
    """Sessions of one length: `groups` prefixes, each continued in `each` ways."""
    made = []
    for g in range(groups):
        for m in range(each):
            tokens = [g] * prefix + [100 + m] * tail
            made.append((Session(f"{g}/{m}", "", "prompt", None, "", np.array(tokens)), stored.causal(tokens)))
    return made


def _part_left(store: Function, made: Named, policy: str, **options: Any) -> tuple[Fraction, list[int]]:
    """Bytes of keys and values held, over those of all sessions alone."""
    import reference

    held, hits = fill(store, made, policy, **options)
    return Fraction(content_bytes(held), per_token(reference.Full())[0] * sum(len(s.tokens) for s, _ in made)), hits


COST_SLIPS = [
    *systematic.scales("cost"),
    Mutant("1 − f l/n", "cost", lambda true: lambda f, tail, n: 1 - f * tail / n),
    Mutant("the tail alone, l/n", "cost", lambda true: lambda f, tail, n: tail / n),
]


@claim(
    id="sharing/storage-corollary", paper=PAPER, section="storage corollary",
    statement="Where a fraction f of all sessions is clustered, with mean tail l of n tokens, the part 1 − f (1 − l/n) is left to store.",
    formula="B / B_0 = 1 − f (1 − l/n),   f = #{clustered} / #{sessions}",
    expected=Verdict.FAILS,
    functions={"cost": "kvtheory.workload.remaining_cost", "store": "reference.PrefixStore"},
    mutants=[*COST_SLIPS, SHORTER],
    correction="sharing/storage-of-followers",
)  # fmt: skip
def storage_corollary(context: Context, *, cost: Function, store: Function) -> Result:
    yield exact(
        what="1 − f (1 − l/n) at f = 1/2, l = 1, n = 4", ran_on="-", role="control", observed=cost(Fraction(1, 2), 1, 4), predicted=Fraction(5, 8)
    )  # fmt: skip
    for groups, each, prefix, tail in ((1, 2, 1, 1), (3, 4, 24, 8), (5, 40, 24, 8)):
        observed, _ = _part_left(store, clusters(groups, each, prefix, tail), "radix")
        n = prefix + tail
        where = f"{groups} clusters of {each} sessions, {prefix} tokens shared, tails of {tail}"
        yield exact(
            what="part of the bytes of keys and values that is left", ran_on=where, observed=observed, predicted=cost(Fraction(1), Fraction(tail), n),
            note="the first session of each cluster is held whole" + ("; the smallest counterexample" if n == 2 else ""),
        )  # fmt: skip
        yield exact(
            what="the same, with one prefix for each cluster", ran_on=where, role="control", observed=observed,
            predicted=Fraction(prefix + each * tail, each * n),
        )  # fmt: skip


@claim(
    id="sharing/storage-of-followers", paper=PAPER, section="storage corollary, corrected",
    statement="The part left to store is 1 − f (1 − l/n) with f the part of all tokens that belongs to sessions which find a prefix stored, "
    "and l/n the part of those sessions that lies behind it. The tables come on top.",
    formula="B / B_0 = 1 − f (1 − l/n),   f = Σ_followers n_i / Σ n_i,   l/n = Σ_followers l_i / Σ_followers n_i",
    expected=Verdict.HOLDS,
    functions={"cost": "kvtheory.workload.remaining_cost", "store": "reference.PrefixStore"},
    mutants=[*COST_SLIPS, LONGER],
)  # fmt: skip
def storage_of_followers(context: Context, *, cost: Function, store: Function) -> Result:
    instances = [
        (clusters(3, 4, 24, 8), "3 clusters of 4 sessions, 24 tokens shared, tails of 8"),
        (context.memo("many", lambda: sessions(context, context.size(60, 400))), "workload"),
    ]
    for made, name in instances:
        for policy, options in POLICIES:
            observed, hits = _part_left(store, made, policy, verify=False, **options)
            best = context.memo((name, policy, str(options)), lambda m=made, o=options: _followed(m, o.get("block", 1)))  # type: ignore[misc]
            follow = [(len(s.tokens), hit) for (s, _), hit in zip(made, best) if hit]
            total = sum(len(s.tokens) for s, _ in made)
            n = sum(size for size, _ in follow)
            f, tail = Fraction(n, total), Fraction(n - sum(hit for _, hit in follow))
            held, _ = fill(store, made, policy, verify=False, **options)
            stats = held.stats()
            yield exact(
                what="part of the bytes of keys and values that is left", ran_on=f"{len(made)} sessions, {name}, {policy} {options or ''}",
                observed=observed, predicted=cost(f, tail, n),
                note=f"{len(follow)} of {len(made)} sessions follow; whole streams {stats.bytes_stored} / {stats.bytes_unshared} bytes = "
                f"{stats.bytes_stored / stats.bytes_unshared:.4f}, tables and tokens {stats.table_bytes} bytes",
            )  # fmt: skip
            yield exact(what="sessions that find another number of tokens than counted by hand", ran_on=name, role="control", predicted=0,
                        observed=sum(a != b for a, b in zip(hits, best)))  # fmt: skip


def _followed(made: Named, block: int) -> list[int]:
    """What each session finds, by hand: the best common prefix in whole blocks of both."""
    return [
        max(
            (literal(s.tokens, t.tokens) // block * block for t, _ in made[:i] if t.tenant == s.tenant), default=0
        )
        for i, (s, _) in enumerate(made)
    ]  # fmt: skip
