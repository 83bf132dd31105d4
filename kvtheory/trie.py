"""The trie of a law on token strings: how much two strings share, how far they are apart, and a cache indexed by it.

    P(s)        probability that a string starts with s;   s^t  longest common prefix (LCP)
    d_T(s, t) = -log2 P(s^t)                               the paper's "metric": a similarity, it GROWS with what is shared
    D(s, t)   = -log2 P(s | s^t) - log2 P(t | s^t)         length in bits of the path between s and t in the trie

d_T is the Gromov product at the root: d_T(s,u) >= min(d_T(s,t), d_T(t,u)), and d_T(s,s) = -log2 P(s) is not 0.
D = -log2 P(s) - log2 P(t) - 2 d_T(s,t) is a metric where every transition has 0 < P < 1; summed edge by edge, as here,
D(s,s) is 0 and an edge with P next to 1 is not absorbed.  2^(-d_T) underflows after 1074 bits: compare LCPs or bits.

Source: arXiv 2604.15356 for d_T, its trie "metric"; D and what holds of both is derived here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvtheory.entropy import Law, surprisal_bits

__all__ = [
    "Lease",
    "Match",
    "Node",
    "ProbabilisticTrie",
    "common_prefix",
    "similarity_bits",
    "swap_time_tail",
    "tree_distance_bits",
]

Prefix = tuple[Any, ...]


def common_prefix(s: Prefix, t: Prefix) -> int:
    """Length in tokens of the longest common prefix."""
    length = 0
    for a, b in zip(s, t):
        if a != b:
            break
        length += 1
    return length


def _edges(law: Law, string: Prefix, start: int, end: int) -> list[float]:
    """-log2 P(t_i | t_<i) for start <= i < end; the first impossible token ends the list with inf."""
    bits: list[float] = []
    for i in range(start, end):
        bits.append(surprisal_bits(law.next(string[:i]).get(string[i], 0)))
        if bits[-1] == math.inf:
            break  # nothing has a probability given an impossible prefix, and the law need not answer
    return bits


def similarity_bits(law: Law, s: Prefix, t: Prefix) -> float:
    """d_T(s, t) = -log2 P(s^t) in bits: 0 for strings that share nothing, inf where s^t is impossible.

    A similarity: the larger, the more is shared. Not a metric; d_T(s, s) = -log2 P(s).
    law: a `Law`; it is asked for the LCP's prefixes only. Source: arXiv 2604.15356, the trie "metric".
    """
    return math.fsum(_edges(law, tuple(s), 0, common_prefix(s, t)))


def tree_distance_bits(law: Law, s: Prefix, t: Prefix) -> float:
    """D(s, t) = -log2 P(s|s^t) - log2 P(t|s^t) in bits: what it takes to send both tails given what is shared.

    A metric where every transition has 0 < P < 1; a pseudo-metric where some P is 1 (two strings at distance 0). A
    string of probability 0 is at distance inf from every other and 0 from itself.
    """
    s, t = tuple(s), tuple(t)
    if s == t:
        return 0.0
    fork = common_prefix(s, t)
    down_s = _edges(law, s, 0, len(s))
    if math.inf in down_s:
        return math.inf
    return math.fsum(down_s[fork:] + _edges(law, t, fork, len(t)))


class Node:
    """A run of tokens that no stored string leaves half way, with what the index knows about the prefix ending here."""

    __slots__ = ("children", "count", "edge_bits", "last_use", "log2_probability", "parent", "pins", "run", "value")

    def __init__(self, parent: Node | None, run: Prefix, edge_bits: list[float]) -> None:
        self.parent = parent
        self.run = run
        self.edge_bits = edge_bits  # -log2 P(token | before) of each token of the run
        self.log2_probability: float = (parent.log2_probability if parent else 0.0) - math.fsum(edge_bits)
        self.children: dict[Any, Node] = {}  # by first token of the child's run
        self.count = 0  # insertions that went through
        self.last_use = 0  # time of the last insertion, match or hold that went through
        self.pins = 0  # holds that go through
        self.value: Any = None  # the caller's, for the string ending here; dropped when this node is trimmed

    @property
    def prefix(self) -> Prefix:
        """The tokens from the root to the end of this node."""
        runs = []
        node: Node | None = self
        while node is not None:
            runs.append(node.run)
            node = node.parent
        return tuple(token for run in reversed(runs) for token in run)

    def __repr__(self) -> str:
        return (
            f"Node({self.prefix!r}, log2_probability={self.log2_probability:.4g}, count={self.count}, pins={self.pins})"
        )


class Match(NamedTuple):
    """The longest stored prefix of a query."""

    length: int
    """tokens matched"""
    bits: float
    """-log2 P(matched prefix) = d_T(query, any stored string that goes through it), in bits"""
    node: Node
    """the node the match ends in (at its end, once the match has been touched or held)"""


class Lease:
    """A held match: its tokens are not evicted until `release()`, or until the end of a `with` block."""

    def __init__(self, trie: ProbabilisticTrie, match: Match) -> None:
        self.match = match
        self._trie: ProbabilisticTrie | None = trie

    def release(self) -> None:
        """Give the hold back. ValueError the second time."""
        if self._trie is None:
            raise ValueError("release: this lease was released before")
        self._trie._pin(self.match.node, -1)
        self._trie = None

    def __enter__(self) -> Match:
        return self.match

    def __exit__(self, *exception: object) -> None:
        if self._trie is not None:
            self.release()


class ProbabilisticTrie:
    """Radix tree over token strings, every node with its probability under a law: prefix reuse with a prior.

        trie = ProbabilisticTrie(law, capacity=4096)      # tokens; None: no limit
        trie.insert(prompt)
        with trie.hold(other_prompt) as match: ...        # reuse the first match.length tokens

    What is retrieved is the longest exact prefix; argmax of d_T over the stored strings is the same string,
    so the law never changes WHAT is reused. It only ranks what to keep: policy "lru" evicts the least recently used
    leaf token first, "probability" the leaf token whose prefix is least probable, least recently used among equals.
    Tokens go one by one from the end of a leaf, so that exactly as many are freed as are needed.

    The law is asked once for each token that is newly stored. Not safe for threads.
    """

    def __init__(self, law: Law, capacity: int | None = None, policy: str = "lru") -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity: expected a number of tokens >= 0 or None, got {capacity}")
        if policy not in ("lru", "probability"):
            raise ValueError(f"policy: expected 'lru' or 'probability', got {policy!r}")
        self.law = law
        self.capacity = capacity
        self.policy = policy
        self.root = Node(None, (), [])
        self.size = 0
        """tokens stored"""
        self.pinned = 0
        """tokens stored that are held"""
        self._time = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def strings(self) -> list[Prefix]:
        """The stored strings that no other stored string extends."""
        return [node.prefix for node in self.nodes() if not node.children]

    def __contains__(self, tokens: Prefix) -> bool:
        return self.longest_match(tokens, touch=False).length == len(tokens)

    def longest_match(self, tokens: Prefix, touch: bool = True) -> Match:
        """The longest prefix of `tokens` that is stored. touch: counts as a use, so the node is split where the match ends."""
        tokens = tuple(tokens)
        node, inside = self._descend(tokens)
        if touch:
            if inside < len(node.run):
                node = self._split(node, inside)
            self._use(node)
            inside = len(node.run)
        bits = -(node.parent.log2_probability if node.parent else 0.0) + math.fsum(node.edge_bits[:inside])
        return Match(self._depth(node.parent) + inside, bits, node)

    def hold(self, tokens: Prefix) -> Lease:
        """The longest match, held against eviction until the lease is released."""
        match = self.longest_match(tokens)
        self._pin(match.node, +1)
        return Lease(self, match)

    def insert(self, tokens: Prefix) -> Node:
        """Store a string and all its prefixes; gives the node that ends with it.

        Makes room first, from what is neither held nor part of the string. Raises ValueError, and changes nothing, when
        that does not suffice.
        """
        tokens = tuple(tokens)
        match = self.longest_match(tokens, touch=False)
        missing = len(tokens) - match.length
        if self.capacity is not None and self.size + missing > self.capacity:
            kept = self.pinned + self._unpinned_on_path(tokens[: match.length])
            if kept + missing > self.capacity:
                raise ValueError(
                    f"capacity: {missing} more tokens do not fit into {self.capacity}: {kept} are held or shared with the string"
                )
        node, inside = self._descend(tokens)
        if inside < len(node.run):
            node = self._split(node, inside)
        if self.capacity is not None and self.size + missing > self.capacity:
            self._pin(node, +1)
            self.evict(self.size + missing - self.capacity)
            self._pin(node, -1)
        if missing:
            node = self._grow(node, tokens, match.length)
        self._use(node)
        step: Node | None = node
        while step is not None:
            step.count += 1
            step = step.parent
        return node

    def evict(self, tokens: int) -> int:
        """Free up to `tokens` tokens that are not held, in the order of the policy; gives the number freed."""
        heap = [(self._priority(node), node.last_use, id(node), node) for node in self.nodes() if not node.children]
        heap = [entry for entry in heap if not entry[-1].pins]
        heapq.heapify(heap)
        freed = 0
        while freed < tokens and heap:
            node = heapq.heappop(heap)[-1]
            parent = node.parent
            assert parent is not None
            # one use touches a whole run, so LRU may trim it at once; probability grows with every token trimmed
            cut = min(tokens - freed, len(node.run)) if self.policy == "lru" else 1
            freed += cut
            self.size -= cut
            left = len(node.run) - cut
            if left:
                node.run, node.edge_bits, node.value = node.run[:left], node.edge_bits[:left], None
                node.log2_probability = parent.log2_probability - math.fsum(node.edge_bits)
            else:
                del parent.children[node.run[0]]
                node.parent = None
                node = parent
            if node is not self.root and not node.children and not node.pins:
                heapq.heappush(heap, (self._priority(node), node.last_use, id(node), node))
        return freed

    def _priority(self, node: Node) -> float:
        return node.log2_probability if self.policy == "probability" else 0.0

    def _descend(self, tokens: Prefix) -> tuple[Node, int]:
        """The node in which the longest match ends, and how many tokens of its run are matched."""
        node, inside, at = self.root, 0, 0
        while inside == len(node.run) and at < len(tokens) and tokens[at] in node.children:
            node = node.children[tokens[at]]
            inside = common_prefix(node.run, tokens[at : at + len(node.run)])
            at += inside
        return node, inside

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two, 0 < at < len(run). `node` stays the lower part, so that holds and values stay where they end."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.run[:at], node.edge_bits[:at])
        upper.count, upper.last_use, upper.pins = node.count, node.last_use, node.pins
        parent.children[node.run[0]] = upper
        node.parent, node.run, node.edge_bits = upper, node.run[at:], node.edge_bits[at:]
        upper.children[node.run[0]] = node
        return upper

    def _grow(self, node: Node, tokens: Prefix, start: int) -> Node:
        """Hang tokens[start:] below `node` as one run."""
        missing = len(tokens) - start
        bits = [] if node.log2_probability == -math.inf else _edges(self.law, tokens, start, len(tokens))
        bits += [math.inf] * (missing - len(bits))
        child = Node(node, tokens[start:], bits)
        node.children[tokens[start]] = child
        self.size += missing
        return child

    def _use(self, node: Node) -> None:
        self._time += 1
        step: Node | None = node
        while step is not None:
            step.last_use = self._time
            step = step.parent

    def _pin(self, node: Node, by: int) -> None:
        step: Node | None = node
        while step is not None:
            if step.pins == 0:
                self.pinned += len(step.run)
            step.pins += by
            if step.pins == 0:
                self.pinned -= len(step.run)
            step = step.parent

    def _depth(self, node: Node | None) -> int:
        depth = 0
        while node is not None:
            depth += len(node.run)
            node = node.parent
        return depth

    def _unpinned_on_path(self, tokens: Prefix) -> int:
        """Tokens of a stored prefix that are not held yet."""
        node, inside = self._descend(tokens)
        free = 0
        while node.parent is not None:
            free += 0 if node.pins else inside
            node = node.parent
            inside = len(node.run)
        return free


def swap_time_tail(probabilities: Sequence[Any], top: int, draws: int) -> Any:
    """P(T_swap > draws): after `draws` independent draws, not all of the `top` most probable items have been seen.

    By inclusion and exclusion over the sets of unseen items: sum over non-empty S of (-1)^(|S|+1) (1 - P(S))^draws.
    probabilities: a law, in any order; ints and Fractions stay exact. Raises ValueError for a bad `top` or `draws`, or a
    law that does not sum to 1. Source: T_swap of arXiv 2604.06228, lemma 2.
    """
    law = sorted(probabilities, reverse=True)
    if not 1 <= top <= len(law):
        raise ValueError(f"top: expected 1..{len(law)}, got {top}")
    if draws < 0:
        raise ValueError(f"draws: expected a number >= 0, got {draws}")
    if not all(p >= 0 for p in law) or abs(sum(law) - 1) > 1e-9:
        raise ValueError(f"probabilities: expected non-negative numbers with the sum 1, got the sum {sum(law)}")
    return sum(
        (-1) ** (size + 1) * (1 - sum(unseen)) ** draws
        for size in range(1, top + 1)
        for unseen in itertools.combinations(law[:top], size)
    )
