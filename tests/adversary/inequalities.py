"""Inequalities as ratios that must not exceed 1: a differentiable form for the ascent, and the same ratio by the library's own functions.

Parameters are one flat vector: no instance is out of reach, and hypothesis, gradients and the kept instances all speak of the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import entropy, risk, transform
from kvtheory.distortion import key_term, remainder_term
from kvtheory.prediction import mixture

TOKENS, CHANNELS, QUERIES, KEPT = 5, 2, 2, 2


@dataclass(frozen=True)
class Inequality:
    """ascent(torch vector) -> ratio as a torch scalar; library(float64 vector) -> the same ratio; room: rounding of `library`, relative."""

    claim: str
    what: str
    size: int
    ascent: Callable[[Any], Any]
    library: Callable[[Any], float]
    room: float = 1e-9


def _head(x: Any) -> tuple[Any, Any, Any]:
    """(q, k, v) of one head; two channels, scale 1."""
    n, m, c = TOKENS, QUERIES, CHANNELS
    return x[: m * c].reshape(m, c), x[m * c : (m + n) * c].reshape(n, c), x[(m + n) * c :].reshape(n, c)


HEAD = (2 * TOKENS + QUERIES) * CHANNELS
MIX = TOKENS * (1 + CHANNELS)


def _mix(x: Any, torch: Any) -> tuple[Any, Any]:
    return torch.softmax(x[:TOKENS], 0), x[TOKENS:].reshape(TOKENS, CHANNELS)


def _mix_numbers(x: Any) -> tuple[Any, Any]:
    w = np.exp(x[:TOKENS] - x[:TOKENS].max())
    return w / w.sum(), x[TOKENS:].reshape(TOKENS, CHANNELS)


def _width(f: Any) -> Any:
    return ((f[:, None] - f[None]) ** 2).sum(-1).max()


def _energy(x: Any) -> Any:
    import torch

    p, f = _mix(x, torch)
    return (p @ ((f - p @ f) ** 2).sum(-1)) / (_width(f) / 2 * (p * (1 - p)).sum())


def _energy_library(x: Any) -> float:
    p, f = _mix_numbers(x)
    return float(mixture.residual_energy(p, f) / mixture.collision_bound(p, mixture.diameter(f)))


def _entropy(p: Any) -> Any:
    return -(p * p.clamp_min(1e-300).log2()).sum()


def _collision(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def ratio(x: Any) -> Any:
        import torch

        p = torch.softmax(x, 0)
        return (p * (1 - p)).sum() / of(_entropy(p))

    return ratio


def _collision_library(bound: Callable[[float, float], float]) -> Callable[[Any], float]:
    def ratio(x: Any) -> float:
        w = np.exp(x - x.max())
        p = w / w.sum()
        return float(mixture.collision_bound(p, 1.0) / bound(mixture.token_entropy(p), 1.0))

    return ratio


def _residual(x: Any) -> Any:
    import torch

    p, f = _mix(x, torch)
    return (((f - p @ f) ** 2).sum(-1).sqrt() / (_width(f).sqrt() * (1 - p))).max()


def _residual_library(x: Any) -> float:
    p, f = _mix_numbers(x)
    delta = mixture.diameter(f)
    return max(float(np.linalg.norm(row - p @ f)) / float(mixture.error_bound(w, delta)) for w, row in zip(p, f))


D = 3


def _matrices(x: Any) -> tuple[Any, Any, Any]:
    parts = [x[i * D * D : (i + 1) * D * D].reshape(D, D) for i in range(3)]
    eye = np.eye(D) if isinstance(x, np.ndarray) else x.new_tensor(np.eye(D))
    return parts[0] @ parts[0].T + 0.01 * eye, parts[1] @ parts[1].T + 0.01 * eye, parts[2] + 2 * eye


def _hadamard(x: Any) -> Any:
    import torch

    sigma, metric, t = _matrices(x)
    inverse = torch.linalg.inv(t)
    coded = torch.diagonal(t @ sigma @ t.T).log().sum() + torch.diagonal(inverse.T @ metric @ inverse).log().sum()
    return (torch.logdet(sigma) + torch.logdet(metric) - coded).exp() ** (1 / D)


def _hadamard_library(x: Any) -> float:
    sigma, metric, t = _matrices(x)
    return float(4.0 ** -transform.basis_loss_bits(sigma, metric, t))


def _outputs(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    a = (q @ k.T).exp()
    a = a / a.sum(1, keepdim=True)
    return a, a @ v


SETS = list(itertools.combinations(range(TOKENS), KEPT))


def _kept(a: Any, v: Any, kept: tuple[int, ...]) -> Any:
    part = a[:, list(kept)]
    return part @ v[list(kept)] / part.sum(1, keepdim=True)


def _true_risk(a: Any, o: Any, v: Any) -> Any:
    return sum(((_kept(a, v, s) - o) ** 2).sum(1).mean() for s in SETS) / len(SETS)


def _safe(x: Any) -> Any:
    q, k, v = _head(x)
    a, o = _outputs(q, k, v)
    radius = ((v - v.mean(0)) ** 2).sum(1).max()
    return _true_risk(a, o, v) / (4 * radius * TOKENS * (a**2).sum(1).mean() / KEPT)


def _augmented(x: Any) -> Any:
    q, k, v = _head(x)
    a, o = _outputs(q, k, v)
    u = v - v.mean(0)
    radius, b = (u**2).sum(1).max(), TOKENS * a
    trace = (b**2 @ (u**2).sum(1)) / TOKENS - ((a @ u) ** 2).sum(1) + radius * ((b**2).sum(1) / TOKENS - 1)
    return _true_risk(a, o, v) / (2 * trace.mean() / KEPT * (TOKENS - KEPT) / (TOKENS - 1))


def _selection(x: Any) -> Any:
    q, k, v = _head(x)
    a, o = _outputs(q, k, v)
    radius = ((v - v.mean(0)) ** 2).sum(1).max()
    return ((_kept(a, v, (0, 1)) - o) ** 2).sum(1).mean() / (4 * radius * ((1 - a[:, :KEPT].sum(1)) ** 2).mean())


def _risk_library(bound: Callable[..., float], sets: list[tuple[int, ...]]) -> Callable[[Any], float]:
    def ratio(x: Any) -> float:
        q, k, v = _head(np.asarray(x))
        risks = [risk.attention_risk(q, k, v, np.array(s), np.full(KEPT, 1 / KEPT), 1.0) for s in sets]
        return float(np.mean(risks)) / bound(q, k, v)

    return ratio


def _coefficient(sign: float) -> Callable[[Any], Any]:
    def ratio(x: Any) -> Any:
        import torch

        p, v = _mix(x, torch)
        u = p[:, None] * (v - p @ v)
        spread = (p * ((u - p @ u) ** 2).sum(1)).sum()
        c = 0.5 + 3 * (p**2).sum() - 6 * spread / (u**2).sum()
        return c / 3.5 if sign > 0 else -c / 1.75

    return ratio


def _coefficient_library(sign: float) -> Callable[[Any], float]:
    def ratio(x: Any) -> float:
        p, v = _mix_numbers(np.asarray(x))
        q, k, noise = np.ones((1, 1)), np.log(p)[:, None], np.full((TOKENS, 1), 1e-2)
        r = float(remainder_term(q, k, v, np.eye(CHANNELS), noise, scale=1.0)[0])
        c = r / (1e-2 * float(key_term(q, k, v, np.eye(CHANNELS), noise, scale=1.0)[0]))
        return c / 3.5 if sign > 0 else -c / 1.75

    return ratio


STRINGS = list(itertools.product((0, 1), repeat=3))


def _partition(p: Any, label: Callable[[tuple[int, ...]], Any]) -> Any:
    import torch

    groups: dict[Any, list[int]] = {}
    for i, s in enumerate(STRINGS):
        groups.setdefault(label(s), []).append(i)
    return _entropy(torch.stack([p[g].sum() for g in groups.values()]))


def _ones(prefix: tuple[int, ...]) -> int:
    return sum(prefix) if len(prefix) > 1 else 0


def _step(x: Any) -> Any:
    import torch

    p = torch.softmax(x, 0)
    caches = lambda t: lambda s: tuple(_ones(s[:i]) for i in range(1, t + 1))  # noqa: E731
    now = _partition(p, caches(3)) - _partition(p, caches(2))
    token = _partition(p, lambda s: s) - _partition(p, lambda s: s[:2])
    slack = _partition(p, lambda s: (s[:2], caches(2)(s))) - _partition(p, caches(2))
    return now / (token + slack)


def _step_library(x: Any) -> float:
    w = np.exp(np.asarray(x) - np.max(x))
    parts = [Fraction(max(1, round(float(a) * 10**9))) for a in w / w.sum()]
    language = entropy.FiniteLanguage({s: a / sum(parts) for s, a in zip(STRINGS, parts)})
    found, slack = entropy.sequential(language, _ones), entropy.tokens_given_kv(language, _ones)
    return found.kv_given_kv[2] / (found.tokens[2] + slack[2])


INEQUALITIES = {
    "mixture-energy": Inequality("prediction/residual-of-a-mixture", "E|R|^2 <= D^2/2 (1 - sum p^2)", MIX, _energy, _energy_library),
    "collision-entropy": Inequality(
        "prediction/residual-of-a-mixture", "1 - sum p^2 <= 1 - 2^-H", TOKENS, _collision(lambda h: 1 - 2.0 ** (-h)), _collision_library(mixture.entropy_bound)
    ),
    "collision-linear": Inequality(
        "prediction/residual-of-a-mixture", "1 - sum p^2 <= H/2", TOKENS, _collision(lambda h: h / 2), _collision_library(mixture.linear_bound)
    ),
    "mixture-error": Inequality("prediction/residual-of-a-mixture", "|R(v)| <= D (1 - p_v)", MIX, _residual, _residual_library, 1e-6),
    "hadamard-twice": Inequality(
        "transform-coding/metric-klt", "(det S det M)^(1/d) <= prod^(1/d) of a basis", 3 * D * D, _hadamard, _hadamard_library, 1e-6
    ),
    "safe-bound": Inequality(
        "risk/safe-bound", "E r <= 4 B^2 rho / K", HEAD, _safe, _risk_library(lambda q, k, v: risk.safe_bound(q, k, v, KEPT, 1.0), SETS), 1e-6
    ),
    "augmented-bound": Inequality(
        "risk/augmented-trace-bound", "E r <= (2 tr Sigma+ / K)(n-K)/(n-1)", HEAD, _augmented,
        _risk_library(lambda q, k, v: risk.augmented_bound(q, k, v, KEPT, 1.0, replace=False), SETS), 1e-6,
    ),
    "selection-bound": Inequality(
        "risk/selection-bound", "r(S) <= 4 R^2 E(1 - a(S))^2", HEAD, _selection,
        _risk_library(lambda q, k, v: risk.selection_bound(q, k, v, np.arange(KEPT), 1.0), [(0, 1)]), 1e-6,
    ),
    "remainder-above": Inequality("transform-coding/remainder", "c <= 7/2", MIX, _coefficient(1.0), _coefficient_library(1.0), 1e-6),
    "remainder-below": Inequality("transform-coding/remainder", "-7/4 <= c", MIX, _coefficient(-1.0), _coefficient_library(-1.0), 1e-6),
    "per-step-corrected": Inequality(
        "sequential/per-step-entropy-corrected", "H(KV_3|KV_<3) <= H(t_3|t_<3) + H(t_<3|KV_<3)", len(STRINGS), _step, _step_library, 1e-6
    ),
}  # fmt: skip
