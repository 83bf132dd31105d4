"""D_K and D_V made wrong in plausible ways, each in one line, from the same pieces as the right ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant

Float = NDArray[np.float64]


@dataclass
class Pieces:
    """What the two terms are made of, so that each wrong variant is one line. u2, y2 (m, n): ||v_i W_O - o||^2, ||v_i W_O||^2."""

    q: Float
    a: Float
    v: Float
    w_o: Float
    sigma2: Float
    scale: float

    @property
    def u2(self) -> Float:
        y = self.v @ self.w_o
        return ((y[None] - (self.a @ y)[:, None]) ** 2).sum(axis=2)

    @property
    def y2(self) -> Float:
        return np.broadcast_to(((self.v @ self.w_o) ** 2).sum(axis=1), self.a.shape)

    @property
    def rows2(self) -> Float:
        return (self.w_o**2).sum(axis=1)


def rewritten(
    formula: Callable[[Pieces], Float], *, own_scale: bool = True, see_all: bool = False
) -> Callable[[Function], Function]:
    """key_term or value_term replaced by `formula`; own_scale False: the given scale is ignored; see_all: so is `visible`."""

    def wrong(true: Function) -> Function:
        def mutated(
            q: Any, k: Any, v: Any, w_o: Any, variance: Any, scale: float | None = None, *, visible: Any = None
        ) -> Float:
            scale = q.shape[1] ** -0.5 if scale is None or not own_scale else scale
            a = attention.weights(q, k, scale, visible=None if see_all else visible)
            return formula(Pieces(q, a, v, w_o, variance, scale))

        return mutated

    return wrong


def right_key_term(p: Pieces) -> Float:
    return (p.a**2 * p.u2 * p.scale**2 * (p.q**2 @ p.sigma2.T)).sum(axis=1)


def right_value_term(p: Pieces) -> Float:
    return (p.a**2 * (p.sigma2 @ p.rows2)).sum(axis=1)


def _averaged(axis: int, formula: Callable[[Pieces], Float]) -> Callable[[Pieces], Float]:
    return lambda p: formula(
        replace(p, sigma2=np.broadcast_to(p.sigma2.mean(axis=axis, keepdims=True), p.sigma2.shape))
    )


KEY_MUTANTS = [
    Mutant("1/d dropped", "key_term", rewritten(lambda p: (p.a**2 * p.u2 * (p.q**2 @ p.sigma2.T)).sum(axis=1))),
    Mutant("1/√d for 1/d", "key_term", rewritten(lambda p: right_key_term(p) / p.scale)),
    Mutant("a_i for a_i²", "key_term", rewritten(lambda p: (p.a * p.u2 * p.scale**2 * (p.q**2 @ p.sigma2.T)).sum(axis=1))),
    Mutant("‖v_i W_O‖ for ‖v_i W_O − o‖", "key_term", rewritten(lambda p: (p.a**2 * p.y2 * p.scale**2 * (p.q**2 @ p.sigma2.T)).sum(axis=1))),
    Mutant("|q_c| for q_c²", "key_term", rewritten(lambda p: (p.a**2 * p.u2 * p.scale**2 * (np.abs(p.q) @ p.sigma2.T)).sum(axis=1))),
    Mutant("‖v_i W_O − o‖ without its square", "key_term", rewritten(lambda p: (p.a**2 * np.sqrt(p.u2) * p.scale**2 * (p.q**2 @ p.sigma2.T)).sum(axis=1))),
    Mutant("W_O left out", "key_term", rewritten(lambda p: right_key_term(replace(p, w_o=np.eye(len(p.w_o)))))),
    Mutant("σ for σ²", "key_term", rewritten(lambda p: right_key_term(replace(p, sigma2=np.sqrt(p.sigma2))))),
    Mutant("variance averaged over tokens", "key_term", rewritten(_averaged(0, right_key_term))),
    Mutant("variance averaged over channels", "key_term", rewritten(_averaged(1, right_key_term))),
    Mutant("scale always 1/√d", "key_term", rewritten(right_key_term, own_scale=False)),
    Mutant("causality ignored", "key_term", rewritten(right_key_term, see_all=True)),
    *systematic.scales("key_term"),
    *systematic.dimension("key_term", lambda arguments: arguments["q"].shape[1]),
    *systematic.square_dropped("key_term"),
    *systematic.swapped("key_term", "k", "v"),
    *systematic.transposed("key_term", "w_o"),
]  # fmt: skip

VALUE_MUTANTS = [
    Mutant("a_i for a_i²", "value_term", rewritten(lambda p: (p.a * (p.sigma2 @ p.rows2)).sum(axis=1))),
    Mutant("row norm of W_O without its square", "value_term", rewritten(lambda p: (p.a**2 * (p.sigma2 @ np.sqrt(p.rows2))).sum(axis=1))),
    Mutant("column norms of W_O for row norms", "value_term", rewritten(lambda p: (p.a**2 * (p.sigma2 @ np.resize((p.w_o**2).sum(axis=0), len(p.w_o)))).sum(axis=1))),
    Mutant("W_O left out", "value_term", rewritten(lambda p: (p.a**2 * p.sigma2.sum(axis=1)).sum(axis=1))),
    Mutant("σ for σ²", "value_term", rewritten(lambda p: right_value_term(replace(p, sigma2=np.sqrt(p.sigma2))))),
    Mutant("variance averaged over tokens", "value_term", rewritten(_averaged(0, right_value_term))),
    Mutant("variance averaged over channels", "value_term", rewritten(_averaged(1, right_value_term))),
    Mutant("scale always 1/√d", "value_term", rewritten(right_value_term, own_scale=False)),
    Mutant("causality ignored", "value_term", rewritten(right_value_term, see_all=True)),
    *systematic.scales("value_term"),
    *systematic.square_dropped("value_term"),
    *systematic.swapped("value_term", "k", "v"),
    *systematic.transposed("value_term", "w_o"),
]  # fmt: skip
