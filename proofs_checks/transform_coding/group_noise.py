"""Noise on a stored head, measured at the output of all query heads that read it: before squaring they add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Layer
from proofs_checks.transform_coding import noise
from proofs_checks.transform_coding.parts import Float, KVHead


def output(layer: Layer, keys: Float, values: Float, kv: int) -> Float:
    """(queries, D): the sum over the query heads of KV head kv of their outputs after W_O, for other keys (n, d) and values (n, dv)."""
    assert layer.queries is not None
    total: Any = 0
    for h in range(kv * layer.group, (kv + 1) * layer.group):
        head = layer.head(h)
        a = attention.weights(head.q, keys, head.scale, visible=head.visible)
        total = total + a @ values @ head.w_o
    return np.asarray(total)


def key_quadratic(layer: Layer, kv: int, to_keys: Callable[[Float], Float], stored: Float) -> Float:
    """(d, d): mean over queries of sum_i J_i^T J_i, J_i = d output / d stored_i, by sixth-order differences in every stored number.

    to_keys: from what is stored (n, d) to the keys that attention reads.
    """
    values = np.asarray(layer.values[kv], dtype=np.float64)
    assert layer.queries is not None
    n, d = stored.shape
    step = noise.STEP / (layer.scale * float(np.abs(np.asarray(layer.queries, dtype=float)).max()) * 2)
    total = np.zeros((d, d))
    for i in range(n):
        rows = []
        for c in range(d):
            derivative: Any = 0.0
            for count, weight in noise.STENCIL.items():
                for sign in (1, -1):
                    moved = stored.copy()
                    moved[i, c] += sign * count * step
                    derivative = derivative + sign * weight * output(layer, to_keys(moved), values, kv) / step
            rows.append(np.ravel(derivative))
        jacobian = np.array(rows)
        total += jacobian @ jacobian.T
    return total / layer.queries.shape[1]


def value_quadratic(layer: Layer, kv: int) -> Float:
    """(dv, dv): the same for values, exact: the output for unit values."""
    assert layer.queries is not None
    keys = np.asarray(layer.keys[kv], dtype=np.float64)
    n, dv = layer.values[kv].shape
    total = np.zeros((dv, dv))
    for i in range(n):
        rows = []
        for c in range(dv):
            unit = np.zeros((n, dv))
            unit[i, c] = 1
            rows.append(output(layer, keys, unit, kv).ravel())
        jacobian = np.array(rows)
        total += jacobian @ jacobian.T
    return total / layer.queries.shape[1]


class Joint(NamedTuple):
    """A real KV head with its G query heads at some queries; outputs in coordinates common to the heads that keep lengths."""

    layer: Layer
    kv: int
    q: Float  # (G, m, d)
    z: Float  # (G, m, n), -inf where not visible
    a: Float
    vl: Float  # (G, n, r): values after W_O, relative to the token with most mass
    lengths: Float  # (G, dv, r)

    @classmethod
    def of(cls, head: KVHead, chosen: NDArray[np.int64]) -> Joint:
        heads = [noise.at_rows(head.layer.head(h), chosen) for h in head.heads]
        stacked = np.concatenate([h.w_o for h in heads])  # (G dv, D)
        lengths = np.asarray(np.linalg.qr(stacked.T, mode="r")).T.reshape(len(heads), heads[0].w_o.shape[0], -1)
        z = np.stack([attention.logits(h.q, h.k, h.scale, visible=h.visible) for h in heads])
        a = attention.softmax(z)
        v = heads[0].v - heads[0].v[a.sum(axis=(0, 1)).argmax()]
        return cls(head.layer, head.kv, np.stack([h.q for h in heads]), z, a, v @ lengths, lengths)

    def part(self) -> Layer:
        """The layer with this KV head and these queries only; `chosen` must have been in ascending order of position."""
        own = slice(self.kv * self.layer.group, (self.kv + 1) * self.layer.group)
        return self.layer.replace(
            keys=self.layer.keys[self.kv : self.kv + 1], values=self.layer.values[self.kv : self.kv + 1],
            output_proj=None if self.layer.output_proj is None else self.layer.output_proj[own],
        )  # fmt: skip

    def keys_energy(self, root: Float, turn: Callable[[Float], Float], draws: int, rng: np.random.Generator, level: float) -> Float:  # fmt: skip
        """(draws,): unbiased estimates of E ||do||^2 / level, mean over queries, keys moved by turn(xi root^T), xi white, level small.

        Pairs +-dk, and the straight part ||J dk||^2 replaced by its exact mean sum_i E ||sum_g scale (q_g dk_i) J_gi||^2: whatever J is, the
        estimate is unbiased (see `noise`), and with J right its spread is that of the remainder alone.
        """
        scale, m = self.layer.scale, self.q.shape[1]
        n = self.a.shape[2]
        o = self.a @ self.vl
        u = [self.a[g][:, :, None] * (self.vl[g][None] - o[g][:, None]) for g in range(len(self.q))]  # (m, n, r)
        # E (q_g dk_i)(q_h dk_i) = sum over columns of the root, each turned at each token
        columns = [
            scale * self.q @ turn(np.broadcast_to(column, (n, len(root)))).T for column in root.T
        ]  # (G, m, n) each
        mean = 0.0
        for g in range(len(self.q)):
            for h in range(len(self.q)):
                inner = np.einsum("mnr,mnr->mn", u[g], u[h])
                mean += float((inner * sum(c[g] * c[h] for c in columns)).sum())
        out = np.empty(draws)
        for j in range(draws):
            dz = np.sqrt(level) * scale * self.q @ turn(rng.standard_normal((n, root.shape[1])) @ root.T).T
            straight = sum((dz[g][:, None, :] @ u[g])[:, 0] for g in range(len(self.q)))
            moved = [
                sum((attention.softmax(self.z[g] + sign * dz[g]) - self.a[g]) @ self.vl[g] for g in range(len(self.q)))
                for sign in (1, -1)
            ]
            excess = sum(float((x**2).sum()) for x in moved) / 2 - float((np.asarray(straight) ** 2).sum())
            out[j] = (mean + excess / level) / m
        return out

    def values_energy(self, root: Float) -> float:
        """E ||do||^2, mean over queries, values moved by xi root^T, xi white. Without draws: the output is linear in the values, so token by
        token and column by column of the root.
        """
        moved = np.einsum("ck,gcr->gkr", root, self.lengths)  # (G, columns, r)
        do = np.einsum("gmn,gkr->mnkr", self.a, moved, optimize=True)
        return float(np.einsum("mnkr,mnkr->", do, do)) / self.q.shape[1]
