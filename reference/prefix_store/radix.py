"""A radix tree over tokens (SGLang): a run of tokens is cut wherever two sessions part, so that every common prefix is shared whole."""

from __future__ import annotations

from reference.prefix_store.segments import Segment, Tokens, common_prefix, cut
from reference.prefix_store.tree import Found, Tree

__all__ = ["Radix"]


class Radix(Tree):
    """children: by the first token of a child's run."""

    def find(self, tokens: Tokens, salt: bytes) -> Found:
        segment = self.root(salt)
        while segment.end < len(tokens) and int(tokens[segment.end]) in segment.children:
            child = segment.children[int(tokens[segment.end])]
            inside = common_prefix(child.tokens, tokens[child.start :])
            if inside < len(child.tokens):
                return Found(child, child.start + inside)
            segment = child
        return Found(segment, segment.end)

    def ends_at(self, found: Found) -> Segment:
        segment, inside = found.segment, found.length - found.segment.start
        return segment if inside == len(segment.tokens) else self._split(segment, inside)

    def _split(self, lower: Segment, at: int) -> Segment:
        """Cut a run in two, 0 < at < its length; `lower` stays the lower part, so that sessions stay where they end."""
        parent = lower.parent
        assert parent is not None
        whole = lower.layers
        upper = Segment(parent, lower.tokens[:at], [cut(kv, 0, at) for kv in whole], lower.salt)
        upper.refs, upper.last_use = lower.refs, lower.last_use
        self.attach(upper)
        lower.layers = [cut(kv, at, kv.keys.shape[1]) for kv in whole]
        lower.parent, lower.tokens, lower.start, lower.coded = upper, lower.tokens[at:], upper.end, None
        self.attach(lower)
        return upper

    def pieces(self, missing: int) -> list[int]:
        return [missing] if missing else []

    def attach(self, segment: Segment) -> None:
        assert segment.parent is not None
        segment.key = int(segment.tokens[0])
        segment.parent.children[segment.key] = segment

    def literal(self, found: Found, tokens: Tokens) -> int:
        return found.length
