"""What noise on keys and values does to attention outputs, measured without the formulas that claim to predict it.

Routes, from sharp to general:

- `key_energy`: the Jacobian of `attention.attend` by differences in the keys themselves, one entry at a time (small instances);
- `value_energy`: attention is linear in the values, so unit values give its Jacobian, exactly and at any noise;
- `gaussian_energy`: quadrature over the joint law of the logits (three tokens), at any noise;
- `Group.sample`: Monte Carlo on a KV head and all query heads that read it; `sample_logits`: the same for white keys alone.

Monte Carlo draws come in pairs +dx, -dx, which removes odd orders, and carry a control variate: with J any matrix at all,

    E||do||^2  =  sum_x sigma_x^2 ||J_x||^2  +  E[ ||do||^2 - ||J dx||^2 ]                  (dx independent, of variance sigma_x^2)

so the estimate is unbiased whatever J is; and with J the true Jacobian the bracket is the remainder alone: its spread is as small as
the remainder, and a handful of draws shows a deviation of 1e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import attention
from kvtheory.layer import Head, Layer

Float = NDArray[np.float64]

#: f'(0) = sum_j STENCIL[j] (f(jh) - f(-jh)) / h + O(h^6)
STENCIL = {1: 45 / 60, 2: -9 / 60, 3: 1 / 60}
#: step of the differences, in logits
STEP = 0.03


def rows(layer: Layer, count: int) -> NDArray[np.int64]:
    """`count` evenly spaced queries of a layer (all, if it has fewer)."""
    layer.require("queries", by="proofs_checks")
    assert layer.queries is not None
    have = layer.queries.shape[1]
    return np.unique(np.linspace(0, have - 1, min(count, have)).round().astype(np.int64))


def at_rows(head: Head, chosen: NDArray[np.int64]) -> Head:
    """The head with some of its queries."""
    return replace(head, q=head.q[chosen], visible=head.visible[chosen])


def causal(layer: Layer) -> Layer:
    """The layer's queries moved to evenly spaced positions of its second half: each sees the tokens up to its own."""
    layer.require("queries", by="proofs_checks")
    assert layer.queries is not None
    ends = np.linspace(layer.tokens // 2, layer.tokens - 1, layer.queries.shape[1]).round().astype(np.int64)
    return layer.replace(query_positions=layer.positions[ends])


def logit_variance(head: Head, variance: Float) -> Float:
    """(m, n): scale^2 sum_c q_c^2 sigma_ic^2, the variance that independent key noise gives each logit."""
    return head.scale**2 * (head.q**2) @ variance.T


def mean_logit_variance(heads: Sequence[Head], variance: Float) -> float:
    """Its mean over the tokens that a query sees, then over queries and heads."""
    return float(
        np.mean([(logit_variance(h, variance) * h.visible).sum(axis=1) / h.visible.sum(axis=1) for h in heads])
    )


def key_energy(head: Head, variance: Float) -> Float:
    """sum_ic sigma_ic^2 ||do/dk_ic||^2 of each query, (m,), by sixth-order differences; every token visible."""
    n, d = head.k.shape
    h = STEP / (head.scale * np.abs(head.q).max())
    moved = np.zeros((n, d, len(STENCIL), 2, n, d))
    for i in range(n):
        for c in range(d):
            for s, step in enumerate(STENCIL):
                moved[i, c, s, :, i, c] = step * h, -step * h
    keys = (head.k + moved).reshape(-1, n, d)
    o = attention.attend(
        np.broadcast_to(head.q, (len(keys), *head.q.shape)), keys, np.broadcast_to(head.v, (len(keys), *head.v.shape)),
        scale=head.scale,
    ).reshape(n, d, len(STENCIL), 2, len(head.q), -1)  # fmt: skip
    derivative = np.einsum("s,icsmv->icmv", list(STENCIL.values()), o[:, :, :, 0] - o[:, :, :, 1]) / h
    return np.einsum("ic,icmD->m", variance, (derivative @ head.w_o) ** 2)


def value_energy(head: Head, variance: Float) -> Float:
    """sum_ic sigma_ic^2 ||do/dv_ic||^2 of each query, (m,): o at v = e_ic for every entry; every token visible."""
    n, dv = head.v.shape
    units = np.eye(n * dv).reshape(n, dv, n, dv).transpose(2, 0, 1, 3)  # token, (i, c), channel
    o = attention.attend(head.q[None], head.k[None], units.reshape(1, n, -1), scale=head.scale)
    o = o.reshape(len(head.q), n, dv, dv)
    return np.einsum("ic,micD->m", variance, (o @ head.w_o) ** 2)


def gaussian_energy(head: Head, key_variance: Float, value_variance: Float | None = None, nodes: int = 12) -> Float:
    """E||do||^2 of each query, (m,), under Gaussian noise, by Gauss-Hermite quadrature over all logits (so: few tokens).

    Logit noise is then independent over tokens. The values' part is conditioned on the keys': sum_i a_i^2 sum_c tau_ic^2 ||W_O,c||^2.
    """
    n = len(head.k)
    points, masses = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[points] * n, indexing="ij"), axis=-1).reshape(-1, n)
    mass = np.stack(np.meshgrid(*[masses / masses.sum()] * n, indexing="ij"), axis=-1).reshape(-1, n).prod(axis=1)
    out = np.zeros(len(head.q))
    for j, (z, s2) in enumerate(zip(attention.logits(head.q, head.k, head.scale), logit_variance(head, key_variance))):
        a = attention.softmax(z + np.sqrt(s2) * grid)
        do = (a - attention.softmax(z)) @ head.v @ head.w_o
        energy = (do**2).sum(axis=1)
        if value_variance is not None:
            energy += a**2 @ np.einsum("ic,cD->i", value_variance, head.w_o**2)
        out[j] = mass @ energy
    return out


class Sample(NamedTuple):
    """Noise energy of one KV head's group at several levels t (noise t dx).

    linear (G, m): sum_x sigma_x^2 ||J_x||^2 at t = 1. excess (draws, levels, G, m): ||do||^2 - ||J t dx||^2, mean of the pair +-dx.
    """

    levels: Float
    linear: Float
    excess: Float

    def ratios(self, predicted: Float) -> Float:
        """(draws, levels, G): independent unbiased estimates of E||do||^2 / t^2 over `predicted` (G, m), both summed over queries."""
        energy = self.linear.sum(axis=-1) + self.excess.sum(axis=-1) / self.levels[:, None] ** 2
        return energy / predicted.sum(axis=-1)


def _isometric(w_o: Float) -> Float:
    """R^T (dv, min(dv, D)) with ||x W_O|| = ||x R^T||."""
    return np.asarray(np.linalg.qr(w_o.T, mode="r")).T


class Group:
    """One KV head of a layer with the G query heads that read it, at some of the layer's queries.

    heads: as `Layer.head` gives them. by_logit (G, m, n, r): do/dz_i, in coordinates that keep lengths.
    """

    def __init__(self, layer: Layer, kv: int, chosen: NDArray[np.int64]) -> None:
        self.heads = [at_rows(layer.head(h), chosen) for h in range(kv * layer.group, (kv + 1) * layer.group)]
        self.k, self.scale = self.heads[0].k, layer.scale
        self.q = np.stack([h.q for h in self.heads])
        self.positions = layer.positions
        self.query_positions = None if layer.query_positions is None else layer.query_positions[chosen]
        self.window = layer.window
        self.lengths = np.stack([_isometric(h.w_o) for h in self.heads])  # (G, dv, r)
        self.weights = np.stack(
            [attention.weights(h.q, h.k, h.scale, visible=h.visible) for h in self.heads]
        )  # (G, m, n)
        # Weights sum to 1, so a shift common to all values moves all outputs alike: relative to the token with most mass, the
        # outputs of a sink head are small, and their changes survive in float64.
        v = self.heads[0].v
        self.v = v - v[self.weights.sum(axis=(0, 1)).argmax()]
        self.by_logit = np.stack(
            [[attention.logit_jacobian(a, self.v @ r) for a in w] for w, r in zip(self.weights, self.lengths)]
        )

    def attend(self, k: Float, v: Float) -> Float:
        """The group's outputs for each of S caches, k (S, n, d) and v (S, n, dv): (S, G, m, dv)."""
        queries = np.broadcast_to(self.q, (len(k), *self.q.shape)).reshape(-1, *self.q.shape[1:])
        o = attention.attend(
            queries,
            k,
            v,
            scale=self.scale,
            positions=self.positions,
            query_positions=self.query_positions,
            window=self.window,
        )
        return o.reshape(len(k), *self.q.shape[:2], -1)

    def key_part(self, sigma: Float) -> Float:
        """sum_ic sigma_ic^2 ||do/dk_ic||^2, (G, m), as do/dk_ic = scale q_c do/dz_i."""
        return self.scale**2 * np.einsum(
            "gmnr,gmnr,gmn->gm", self.by_logit, self.by_logit, self.q**2 @ (sigma**2).T, optimize=True
        )

    def value_part(self, sigma: Float) -> Float:
        """sum_ic sigma_ic^2 ||do/dv_ic||^2, (G, m), with a_i = o(v = e_i) for a single channel of unit values."""
        units = np.eye(len(self.k))[None]
        a = self.attend(self.k[None], units)[0]
        return np.einsum("gmn,gn->gm", a**2, np.einsum("nv,gvr->gn", sigma**2, self.lengths**2))

    def sample(
        self, key_sigma: Float | None, value_sigma: Float | None, levels: ArrayLike, draws: int, rng: np.random.Generator,
        law: str = "gaussian",
    ) -> Sample:  # fmt: skip
        """Noise t sigma_ic x_ic on keys and values, x white of unit variance ("gaussian" or "uniform"), at each level t.

        key_sigma (n, d), value_sigma (n, dv); None: exact. All heads of the group and all queries share a draw.
        """
        linear = np.zeros(self.q.shape[:2])
        linear += 0 if key_sigma is None else self.key_part(key_sigma)
        linear += 0 if value_sigma is None else self.value_part(value_sigma)

        def noise(sigma: Float | None, like: Float) -> Float:
            if sigma is None:
                return np.zeros_like(like)
            x = rng.standard_normal(like.shape) if law == "gaussian" else np.sqrt(12) * (rng.random(like.shape) - 0.5)
            return sigma * x

        t = np.asarray(levels, dtype=np.float64)
        signed = np.concatenate([t, -t])[:, None, None]
        exact = self.attend(self.k[None], self.v[None])
        excess = np.empty((draws, len(t), *linear.shape))
        for draw in excess:
            dk, dv = noise(key_sigma, self.k), noise(value_sigma, self.v)
            do = (self.attend(self.k + signed * dk, self.v + signed * dv) - exact) @ self.lengths
            moved = np.einsum("sgmr,sgmr->sgm", do, do).reshape(2, len(t), *linear.shape).mean(axis=0)
            dz = self.scale * self.q @ dk.T
            straight = (dz[:, :, None, :] @ self.by_logit)[:, :, 0] + self.weights @ dv @ self.lengths
            draw[:] = moved - (t**2)[:, None, None] * np.einsum("gmr,gmr->gm", straight, straight)
        return Sample(t, linear, excess)


def sample_logits(head: Head, variances: Sequence[float], draws: int, rng: np.random.Generator) -> tuple[Float, Float]:
    """Gaussian white keys, one variance sigma^2 for all: the logits of a query then get white noise of variance scale^2 ||q||^2 sigma^2.

    variances: its means over the queries. Returns sum_x sigma_x^2 ||J_x||^2, (levels, m), and the excess over it, (draws, levels, m):
    the mean over a pair of ||do||^2 - ||J dx||^2. Draws are independent over queries, shared over levels.
    """
    vw = (head.v - head.v.mean(axis=0)) @ _isometric(head.w_o)
    share = (head.q**2).sum(axis=1)
    deviations = np.sqrt(np.outer(variances, share / share.mean()))  # (levels, m)
    linear = np.empty(deviations.shape)
    excess = np.empty((draws, *deviations.shape))
    for j, (q, seen) in enumerate(zip(head.q, head.visible)):
        z = attention.logits(q[None], head.k[seen], head.scale)[0]
        a = attention.softmax(z)
        u = vw[seen] - a @ vw[seen]
        by_logit = attention.logit_jacobian(a, u)
        x = rng.standard_normal((draws, len(z)))
        energy = ((x @ by_logit) ** 2).sum(axis=1)
        for level, s in enumerate(deviations[:, j]):
            do = attention.softmax(z + np.concatenate([s * x, -s * x])) @ u
            linear[level, j] = s**2 * (by_logit**2).sum()
            excess[:, level, j] = (do**2).sum(axis=1).reshape(2, draws).mean(axis=0) - s**2 * energy
    return linear, excess


def uniform_quantised(k: Float, bits: int, group: int = 32) -> tuple[Float, Float, NDArray[np.bool_]]:
    """Keys on 2^bits equal steps from minimum to maximum of each channel over `group` tokens (KIVI); all (n, d).

    Also step^2 / 12, and where a key is the minimum or maximum: those are coded exactly.
    """
    out, variance, extreme = np.empty_like(k), np.empty_like(k), np.empty(k.shape, bool)
    for start in range(0, len(k), group):
        block = slice(start, start + group)
        low, high = k[block].min(axis=0), k[block].max(axis=0)
        step = np.where(high > low, (high - low) / (2**bits - 1), 1.0)
        out[block] = low + step * np.round((k[block] - low) / step)
        variance[block] = np.where(high > low, step**2 / 12, 0.0)
        extreme[block] = (k[block] == low) | (k[block] == high)
    return out, variance, extreme
