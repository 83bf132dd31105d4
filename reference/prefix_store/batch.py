"""Sessions of policy "plt": held whole until a stream is made of their groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.codec import Codec
from reference.prefix_store.groups import Group, Ranked, group
from reference.prefix_store.layout import End, Record, decode_layers
from reference.prefix_store.segments import KV, LayerKind, coded, common_prefix, cut
from reference.stream import Reader

__all__ = ["Batch", "Member"]


class Member(NamedTuple):
    ranked: Ranked
    layers: list[KV]
    salt: bytes


class Batch:
    """members: by id, in the order in which they came."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._made: tuple[list[Record], dict[str, End]] | None = None

    def put(self, session_id: str, member: Member) -> None:
        self.members[session_id] = member
        self._made = None

    def drop(self, session_id: str) -> None:
        del self.members[session_id]
        self._made = None

    def groups(self, delta: float, rule: str) -> list[tuple[list[str], Group]]:
        """For each salt its ids, and the groups of them."""
        out = []
        for salt in sorted({member.salt for member in self.members.values()}):
            ids = [name for name, member in self.members.items() if member.salt == salt]
            out += [(ids, one) for one in group([self.members[name].ranked for name in ids], delta, rule)]
        return out

    def records(
        self, inner: Codec, kinds: Sequence[LayerKind], delta: float, rule: str, residual: bool
    ) -> tuple[list[Record], dict[str, End]]:
        """The centroid of a group is a record without parent; a member behind it forks from it, where it shares a token with it."""
        if self._made is None:
            records: list[Record] = []
            ends: dict[str, End] = {}
            for ids, one in self.groups(delta, rule):
                centre = self.members[ids[one.centroid]]
                number, size = len(records), len(centre.ranked.tokens)
                ends[ids[one.centroid]] = End(number, size)
                whole = coded(inner, centre.layers, kinds, 0)
                records.append(Record(None, 0, centre.ranked.tokens, False, centre.salt, whole))
                base = decode_layers(inner, [Reader(part) for part in whole], 0, size)
                for i, fork in zip(one.members, one.forks):
                    member = self.members[ids[i]]
                    if fork < len(member.ranked.tokens):
                        rest = self._rest(member, fork, base if residual else None)
                        whole = coded(inner, rest, kinds, fork)
                        records.append(Record(number, fork, member.ranked.tokens[fork:], residual, member.salt, whole))
                        ends[ids[i]] = End(len(records) - 1, len(member.ranked.tokens))
                    else:
                        ends[ids[i]] = End(number, fork)
            self._made = records, ends
        return self._made

    @staticmethod
    def _rest(member: Member, fork: int, base: list[KV] | None) -> list[KV]:
        """What is kept of a member from its fork on."""
        rest = [cut(kv, fork, len(member.ranked.tokens)) for kv in member.layers]
        if base is None:
            return rest
        return [KV(*(_less(own, b, fork) for own, b in zip(kv, held))) for kv, held in zip(rest, base)]

    def lost(self) -> int:
        """Tokens held more than once: those of every distinct prefix beyond the first."""
        if self._made is None:
            return 0
        records, _ = self._made
        stored = sum(len(record.tokens) for record in records)
        distinct = 0
        for salt in {member.salt for member in self.members.values()}:
            strings = sorted(m.ranked.tokens.tolist() for m in self.members.values() if m.salt == salt)
            arrays = [np.array(string) for string in strings]
            distinct += sum(map(len, arrays)) - sum(common_prefix(a, b) for a, b in itertools.pairwise(arrays))
        return stored - distinct


def _less(own: NDArray[Any], base: NDArray[Any], fork: int) -> NDArray[Any]:
    """own, its first token at `fork`, less the base's tokens at the same positions; the difference in float64, rounded to own's type."""
    out = own.copy()
    both = max(0, min(base.shape[1] - fork, own.shape[1]))
    less = own[:, :both].astype(np.float64) - base[:, fork : fork + both].astype(np.float64)
    out[:, :both] = less.astype(own.dtype)
    return out
