"""What prefix trees have in common, whatever their policy cuts tokens at: references, and room made by the least recently used leaf."""

from __future__ import annotations

import abc
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reference.prefix_store.segments import KV, Segment, Tokens

__all__ = ["Found", "Tree"]

NO_TOKENS: Tokens = np.zeros(0, np.int64)


class Found(NamedTuple):
    """The longest stored prefix that may be shared: `length` tokens, of which the last lie in `segment` (a root: none)."""

    segment: Segment
    length: int


class Tree(abc.ABC):
    """Segments by salt: sessions of different salts have different roots, and so no segment in common."""

    def __init__(self) -> None:
        self.roots: dict[bytes, Segment] = {}
        self.time = 0

    @abc.abstractmethod
    def find(self, tokens: Tokens, salt: bytes) -> Found:
        """The longest prefix that this policy shares."""

    @abc.abstractmethod
    def ends_at(self, found: Found) -> Segment:
        """The segment that ends with what was found, cut out of a longer one if need be."""

    @abc.abstractmethod
    def pieces(self, missing: int) -> list[int]:
        """Lengths of the segments that so many new tokens are kept in."""

    @abc.abstractmethod
    def attach(self, segment: Segment) -> None:
        """Make a new segment known to its parent, and to `find` if it may be shared."""

    @abc.abstractmethod
    def literal(self, found: Found, tokens: Tokens) -> int:
        """Length of the longest prefix that is stored at all, shareable or not."""

    def detach(self, segment: Segment) -> None:
        """Undo `attach`, of a leaf."""
        assert segment.parent is not None and not segment.children and not segment.refs
        del segment.parent.children[segment.key]

    def reachable(self, segment: Segment) -> bool:
        """Whether `find` can give it, once no session holds it."""
        return True

    def root(self, salt: bytes) -> Segment:
        return self.roots[salt] if salt in self.roots else Segment(None, NO_TOKENS, [], salt)

    def grow(self, found: Found, tokens: Tokens, layers: Callable[[int, int], Sequence[KV]], salt: bytes) -> Segment:
        """Hang the tokens behind what was found; layers(start, end) gives their keys and values. The segment that ends with them."""
        segment = self.ends_at(found)
        if segment.is_root:
            self.roots[salt] = segment
        at = found.length
        for size in self.pieces(len(tokens) - at):
            child = Segment(segment, tokens[at : at + size], layers(at, at + size), salt)
            self.attach(child)
            segment, at = child, at + size
        return segment

    def hold(self, segment: Segment) -> None:
        self.time += 1
        for step in segment.upwards():
            step.refs += 1
            step.last_use = self.time

    def let_go(self, segment: Segment) -> None:
        for step in segment.upwards():
            step.refs -= 1
        if not segment.is_root and not segment.refs and not segment.children and not self.reachable(segment):
            self.detach(segment)

    def segments(self) -> Iterator[Segment]:
        """Parents first; roots by salt, children by their tokens: the order depends on what is stored alone, not on when it came."""
        for salt in sorted(self.roots):
            waiting = [self.roots[salt]]
            while waiting:
                segment = waiting.pop()
                if not segment.is_root:
                    yield segment
                waiting += sorted(segment.children.values(), key=_order, reverse=True)

    def evict(self) -> Iterator[Segment]:
        """Drop leaves that nothing refers to, least recently used first, one each time the iterator is asked."""
        heap = [(s.last_use, -s.start, id(s), s) for s in self.segments() if not s.refs and not s.children]
        heapq.heapify(heap)
        while heap:
            segment = heapq.heappop(heap)[-1]
            parent = segment.parent
            assert parent is not None
            self.detach(segment)
            yield segment
            if not parent.is_root and not parent.refs and not parent.children:
                heapq.heappush(heap, (parent.last_use, -parent.start, id(parent), parent))


def _order(segment: Segment) -> tuple[list[int], int]:
    # only private blocks of the same tokens are told apart by who came first
    return segment.tokens.tolist(), segment.key
