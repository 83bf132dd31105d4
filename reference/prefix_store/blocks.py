"""Blocks of a fixed number of tokens, found by chained hashes (vLLM): only full blocks are shared, and only behind a shared block.

    h(root) = H(salt)      h(block) = H(h(block before), tokens of the block)      H: SHA-256, its first `hash_bytes` bytes

The salt of a tenant enters at the root, and so every hash of theirs. What is left of a session behind its last full block is its own.
"""

from __future__ import annotations

import hashlib

from reference.prefix_store.segments import Segment, Tokens, common_prefix
from reference.prefix_store.tree import Found, Tree

__all__ = ["Blocks", "block_hash", "root_hash"]


def root_hash(salt: bytes, hash_bytes: int = 32) -> bytes:
    """What the first block of a tenant is chained to."""
    return hashlib.sha256(salt).digest()[:hash_bytes]


def block_hash(before: bytes, tokens: Tokens, hash_bytes: int = 32) -> bytes:
    """Of a block of `tokens` behind a prefix whose hash is `before`."""
    return hashlib.sha256(before + tokens.astype("<i8").tobytes()).digest()[:hash_bytes]


class Blocks(Tree):
    """children: by a serial number. verify: whether a block found by its hash must hold the same prefix, of the same salt."""

    def __init__(self, block: int, hash_bytes: int = 32, verify: bool = True) -> None:
        super().__init__()
        self.block, self.hash_bytes, self.verify = block, hash_bytes, verify
        self._by_hash: dict[bytes, list[Segment]] = {}
        self._serial = 0

    def hashes(self, tokens: Tokens, salt: bytes) -> list[bytes]:
        """Of all full blocks of a session."""
        chain, out = root_hash(salt, self.hash_bytes), []
        for at in range(0, len(tokens) - self.block + 1, self.block):
            chain = block_hash(chain, tokens[at : at + self.block], self.hash_bytes)
            out.append(chain)
        return out

    def find(self, tokens: Tokens, salt: bytes) -> Found:
        segment = self.root(salt)
        for key in self.hashes(tokens, salt):
            own = tokens[segment.end : segment.end + self.block]
            for found in self._by_hash.get(key, []):
                same = found.parent is segment and common_prefix(found.tokens, own) == self.block
                # tenants stay apart also where only hashes are compared, and two of them agree
                by_hash = not self.verify and found.start == segment.end and found.salt == salt
                if same or by_hash:
                    segment = found
                    break
            else:
                break
        return Found(segment, segment.end)

    def ends_at(self, found: Found) -> Segment:
        return found.segment

    def pieces(self, missing: int) -> list[int]:
        sizes = [self.block] * (missing // self.block)
        return [*sizes, missing % self.block] if missing % self.block else sizes

    def attach(self, segment: Segment) -> None:
        parent = segment.parent
        assert parent is not None
        self._serial += 1
        segment.key = self._serial
        parent.children[segment.key] = segment
        before = root_hash(segment.salt, self.hash_bytes) if parent.is_root else parent.hash
        segment.hash = block_hash(before, segment.tokens, self.hash_bytes)
        if self.reachable(segment):
            self._by_hash.setdefault(segment.hash, []).append(segment)

    def detach(self, segment: Segment) -> None:
        super().detach(segment)
        if self.reachable(segment):
            alike = self._by_hash[segment.hash]
            alike.remove(segment)
            if not alike:
                del self._by_hash[segment.hash]

    def reachable(self, segment: Segment) -> bool:
        return len(segment.tokens) == self.block

    def literal(self, found: Found, tokens: Tokens) -> int:
        rest = tokens[found.length :]
        return found.length + max((common_prefix(s.tokens, rest) for s in found.segment.children.values()), default=0)
