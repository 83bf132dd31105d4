"""What a transform coder sees: vectors of covariance Sigma and a metric M of their errors, drawn at random or from a real KV head.

A part of a real cache is the keys (before RoPE, where they have one) or the values of one KV head, first tokens left out: sinks are
kept exact by every codec here and would own the covariance. Its metric is written out from the definition: for keys the mean
square of the logit error over the queries that read them, for values W_O W_O^T times the attention's mean square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer
from proofs_checks.context import Context

Float = NDArray[np.float64]

#: first tokens that stay exact
SINKS = 4


class Part(NamedTuple):
    """x (n, d) are the vectors, metric (d, d) their M, singular where there are few queries."""

    label: str
    kind: str
    x: Float
    metric: Float

    @property
    def covariance(self) -> Float:
        centred = self.x - self.x.mean(axis=0)
        return centred.T @ centred / len(self.x)


class KVHead(NamedTuple):
    """One KV head of a real layer."""

    label: str
    layer: Layer
    kv: int

    @property
    def heads(self) -> range:
        return range(self.kv * self.layer.group, (self.kv + 1) * self.layer.group)


def real_kv_heads(context: Context, most: int = 6) -> list[KVHead]:
    """At most so many KV heads of the real cache, evenly spaced over its layers and heads."""
    every = [
        KVHead(f"{label} KV head {kv}", layer, kv) for label, layer in context.real() for kv in range(layer.kv_heads)
    ]
    if len(every) <= most:
        return every
    return [every[i] for i in np.unique(np.linspace(0, len(every) - 1, most).round().astype(int))]


def queries_of(head: KVHead, *, pre_rope: bool = False) -> Float:
    """(G, m, d): the queries that read the head, after RoPE, or before it by their own positions."""
    layer = head.layer
    assert layer.queries is not None
    q = np.asarray(layer.queries[head.heads.start : head.heads.stop], dtype=np.float64)
    if pre_rope and layer.rope is not None and layer.query_positions is not None:
        q = layer.rope.undo(q, layer.query_positions)
    return q


def part_of(head: KVHead, kind: str) -> Part:
    """kind: "keys" or "values"."""
    layer = head.layer
    if kind == "keys":
        keys = (layer.keys if layer.rope is None else layer.rope.undo(layer.keys[head.kv : head.kv + 1], layer.positions))[
            0 if layer.rope is not None else head.kv
        ]  # fmt: skip
        q = queries_of(head, pre_rope=True).reshape(-1, layer.head_dim)
        metric = layer.scale**2 * q.T @ q * (layer.group / len(q))
        return Part(f"{head.label} keys", kind, np.asarray(keys, dtype=np.float64)[SINKS:], metric)
    values = np.asarray(layer.values[head.kv], dtype=np.float64)
    metric = np.zeros((layer.value_dim, layer.value_dim))
    for h in head.heads:
        one = layer.head(h)
        mass = (attention.weights(one.q, one.k, one.scale, visible=one.visible) ** 2).sum() / len(one.q)
        metric += mass * one.w_o @ one.w_o.T
    return Part(f"{head.label} values", kind, values[SINKS:], metric)


def real_parts(context: Context, most: int = 6) -> list[Part]:
    """Keys and values of `real_kv_heads`; made once for a claim and its mutants."""
    return context.memo(
        ("parts", most),
        lambda: [part_of(head, kind) for head in real_kv_heads(context, most) for kind in ("keys", "values")],
    )


def definite(matrix: Float, amount: float = 0.01) -> Float:
    """`amount` of the mean eigenvalue added to the diagonal, by hand: the ledger's own shrinkage."""
    return matrix + amount * np.trace(matrix) / len(matrix) * np.eye(len(matrix))


def random_pairs(rng: np.random.Generator, sizes: tuple[int, ...], each: int) -> Iterator[tuple[int, Float, Float]]:
    """(d, Sigma, M): Gaussian matrices' squares, `each` of every size; their eigenvectors have nothing in common."""
    for d in sizes:
        for _ in range(each):
            a, b = rng.standard_normal((2, d, 2 * d))
            yield d, a @ a.T / (2 * d), b @ b.T / (2 * d)


def hadamard(d: int) -> Float:
    """The orthogonal Sylvester matrix, (d, d); of the largest power of two that divides d, in blocks, where d is none."""
    block = d & -d
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(d // block), h) / np.sqrt(block)
