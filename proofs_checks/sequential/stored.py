"""What the claims on stored sessions run on, by two routes, and the slips that their stores are given.

A workload of sessions (kvtheory.workload) with keys and values by a toy transformer, each session played afresh; and, where only tokens and bytes
matter, by a causal map into whole numbers, which float16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtheory import workload
from kvtheory.layer import Cache, Layer
from kvtheory.prediction import ToyPlayer
from kvtheory.workload import Session
from proofs_checks.claim import Function, Mutant
from proofs_checks.context import Context

Named = list[tuple[Session, Cache]]
PAPER = "2604.15356"
#: bits of every token in the causal instances: a law on 256 tokens, all alike
TOKEN_BITS = 8


def causal(tokens: Sequence[int], layers: int = 2) -> Cache:
    """KV_t = F(t_1..t_t), whole numbers below 2039; 8 bits a token."""
    state, states = 0, []
    for token in tokens:
        state = (1223 * state + 31 * int(token) + 1) % 2039
        states.append(state)
    c = np.array(states)[None, :, None] + np.arange(8)
    made = [
        Layer(((c + i) % 2039).astype(np.float16), ((3 * c + i) % 2039).astype(np.float16), index=i)
        for i in range(layers)
    ]
    return Cache(made, tokens=np.array(tokens, np.int64), surprisal_bits=np.full(len(states), float(TOKEN_BITS)))


def sessions(context: Context, count: int, tenants: int = 1) -> Named:
    made = workload.sessions(count, context.seed, tenants=tenants)
    return [(s, causal(s.tokens.tolist())) for s in made]


def played(context: Context, dtype: Any = np.float16) -> Named:
    """Each session by a toy transformer, afresh: nothing is handed from one to another."""

    def play() -> Named:
        made = workload.sessions(context.size(16, 200), context.seed)
        player = ToyPlayer(vocabulary=workload.vocabulary(made), seed=context.seed)
        return [(s, workload.play(player, s.tokens, dtype)) for s in made]

    return context.memo(("played", np.dtype(dtype).name), play)


def literal(s: Any, t: Any) -> int:
    """Length of the longest common prefix, by this file's own hand."""
    n = 0
    while n < min(len(s), len(t)) and s[n] == t[n]:
        n += 1
    return n


def distinct_prefixes(made: Named) -> int:
    """How many different (tenant, prefix) there are: what any exact store must hold a token of."""
    return len({(s.tenant, tuple(s.tokens[: i + 1].tolist())) for s, _ in made for i in range(len(s.tokens))})


def fill(store: Function, made: Named, policy: str, **options: Any) -> tuple[Any, list[int]]:
    """A store that holds them all, and the tokens that each found stored."""
    held = store(policy, **options)
    return held, [held.put(s.name, cache, s.tenant.encode()) for s, cache in made]


def wrong_sessions(held: Any, made: Named) -> int:
    """Sessions of which any bit came back other than it was put, by way of the bytes."""
    decoded = held.decode(held.stream())
    return sum(
        any(
            a.keys.tobytes() != b.keys.tobytes() or a.values.tobytes() != b.values.tobytes()
            for a, b in zip(decoded[s.name], cache, strict=True)
        )
        for s, cache in made
    )


def subclass(**methods: Callable[..., Any]) -> Callable[[Function], Function]:
    """The store with some methods replaced; each gets the true one first."""

    def wrong(true: Any) -> Function:
        def method(name: str, change: Callable[..., Any]) -> Any:
            return lambda self, *args, **kwargs: change(getattr(super(made, self), name), *args, **kwargs)

        made: Any = type("PrefixStore", (true,), {name: method(name, change) for name, change in methods.items()})
        return made  # type: ignore[no-any-return]

    return wrong


def tree(change: Callable[[Any], None]) -> Callable[[Function], Function]:
    """The store with its tree changed when it is made."""

    def wrong(true: Any) -> Function:
        def made(self: Any) -> None:
            true.__post_init__(self)
            change(self._held.tree)

        return type("PrefixStore", (true,), {"__post_init__": made})

    return wrong


def altered(change: Callable[[Any, Any, Any], Any]) -> Callable[[Function], Function]:
    """The store, taking other tokens than it is given: change(tokens, found, tree)."""

    def wrong(true: Any) -> Function:
        def put(self: Any, session_id: str, cache: Cache, salt: bytes = b"") -> Any:
            if self.policy != "plt":
                tokens = np.array(cache.tokens)
                tokens = change(tokens, self._held.tree.find(tokens, salt), self._held.tree)
                cache = Cache(list(cache), tokens=tokens, surprisal_bits=cache.surprisal_bits)
                return true.put(self, session_id, cache, salt)

        return type("PrefixStore", (true,), {"put": put})

    return wrong


def longer(tokens: Any, found: Any, tree: Any) -> Any:
    """The token behind the common prefix is taken for the one stored there."""
    segment, at = found.segment, found.length
    if at < len(tokens) and not hasattr(tree, "block"):
        if at == segment.end and segment.children:
            segment = next(iter(segment.children.values()))
        if segment.start <= at < segment.end:
            tokens[at] = segment.tokens[at - segment.start]
    return tokens


def shorter(tokens: Any, found: Any, tree: Any) -> Any:
    """The last token of the common prefix is taken for one that never was."""
    if found.length:
        tokens[found.length - 1] = 10**6 + tree.time
    return tokens


def in_any_order(tokens: Any, found: Any, tree: Any) -> Any:
    """What is common in any order."""
    return np.sort(tokens)


def unchained(tree: Any) -> None:
    """The hash of a block alone, without what comes before it."""
    if hasattr(tree, "block"):
        from reference.prefix_store import blocks

        def hashes(tokens: Any, salt: bytes) -> list[bytes]:
            return [
                blocks.block_hash(b"", tokens[at : at + tree.block])
                for at in range(0, len(tokens) - tree.block + 1, tree.block)
            ]

        attach = tree.attach

        def attached(segment: Any) -> None:
            attach(segment)
            if tree.reachable(segment):
                tree._by_hash.setdefault(blocks.block_hash(b"", segment.tokens), []).append(segment)

        tree.hashes, tree.attach = hashes, attached


def colliding(tree: Any) -> None:
    """Every block has one hash."""
    attach = tree.attach

    def attached(segment: Any) -> None:
        attach(segment)
        if tree.reachable(segment):
            tree._by_hash.setdefault(b"", []).append(segment)

    tree.hashes, tree.attach = lambda tokens, salt: [b""] * (len(tokens) // tree.block), attached


def short_hash(tree: Any) -> None:
    tree.hash_bytes = 1


def other_salt(change: Callable[[bytes], bytes]) -> Callable[[Function], Function]:
    return subclass(
        put=lambda true, name, cache, salt=b"": true(name, cache, change(salt)),
        match=lambda true, tokens, salt=b"": true(tokens, change(salt)),
    )


SHORTER = Mutant("shares one token, or one block, less than it could", "store", altered(shorter))
LONGER = Mutant("one token more than agrees is shared", "store", altered(longer))
