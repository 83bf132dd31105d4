"""The tree of summaries: buckets as a binary counter while tokens come, prefixes by a scan of fixed shape when all are there.

Blocks of `block` tokens are the leaves, reduced to K atoms each. With REDUCE(a u b) for "the atoms of a, then those of b, reduced to K":

    bucket(0, i)     = REDUCE(block i)
    bucket(l, i)     = REDUCE(bucket(l - 1, 2 i) u bucket(l - 1, 2 i + 1))
    prefix(j)        of the first j blocks: the buckets of the binary digits of j, from the largest (oldest) to the smallest,
                     each REDUCEd into what came before:  prefix = REDUCE(prefix u bucket)
    summary          = REDUCE(prefix(j) u tokens behind the last whole block)

A stream of tokens carries buckets like a binary counter and needs at most log2(n / block) + 1 of them. The scan of Blelloch (1990) makes
all prefixes at once, in 2 log2 levels: up the tree the buckets, down the tree prefix(right child) = REDUCE(prefix(parent) u left child);
that is the same sequence of REDUCEs, so both give the same atoms, bit for bit. A REDUCE's randomness is keyed by its place in the tree.
"""

from __future__ import annotations

from collections.abc import Callable

from reference.merge_reduce.nodes import Atoms

__all__ = ["Buckets", "Reduce", "prefix_summaries"]

#: (atoms, name of the place in the tree) -> at most K atoms
Reduce = Callable[[Atoms, str], Atoms]


class Buckets:
    """The binary counter of one head: whole blocks go in, buckets come out."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        #: level -> bucket, of the digits that are 1
        self._held: dict[int, Atoms] = {}
        self.blocks = 0

    def push(self, block: Atoms) -> None:
        carried = self._reduce(block, f"bucket 0 {self.blocks}")
        level = 0
        while level in self._held:
            pair = self._held.pop(level).with_behind(carried)
            level += 1
            carried = self._reduce(pair, f"bucket {level} {self.blocks >> level}")
        self._held[level] = carried
        self.blocks += 1

    def oldest_first(self) -> list[Atoms]:
        return [self._held[level] for level in sorted(self._held, reverse=True)]

    def prefix(self, none: Atoms) -> Atoms:
        """prefix(blocks)."""
        out, done = none, 0
        for level in sorted(self._held, reverse=True):
            done += 1 << level
            out = (
                self._held[level]
                if not len(out)
                else self._reduce(out.with_behind(self._held[level]), f"prefix {done}")
            )
        return out


def prefix_summaries(blocks: list[Atoms], reduce: Reduce, none: Atoms) -> list[Atoms]:
    """prefix(0), ..., prefix(len(blocks)): exclusive prefixes by an up-sweep and a down-sweep over a tree padded to a power of two."""
    count = len(blocks)
    size = 1 << max(0, (count - 1).bit_length())
    levels: list[list[Atoms]] = [[reduce(block, f"bucket 0 {i}") for i, block in enumerate(blocks)]]
    while len(levels[-1]) > 1:
        below, level = levels[-1], len(levels)
        levels.append(
            [reduce(below[2 * i].with_behind(below[2 * i + 1]), f"bucket {level} {i}") for i in range(len(below) // 2)]
        )
    before: dict[int, Atoms] = {0: none}  # blocks in front of a node -> their prefix
    for level in range(max(0, (size - 1).bit_length()) - 1, -1, -1):
        width = 1 << level
        for start in [start for start in before if start + width <= count and start % (2 * width) == 0]:
            left = levels[level][start // width]
            own = before[start]
            before[start + width] = left if not len(own) else reduce(own.with_behind(left), f"prefix {start + width}")
    if count == size:
        before[count] = levels[-1][0]
    return [before[j] for j in range(count + 1)]
