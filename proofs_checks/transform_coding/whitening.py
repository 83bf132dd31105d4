"""The paper's construction of its transform, and that it is PCA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical
from proofs_checks.transform_coding.instances import PAPER
from proofs_checks.transform_coding.parts import Float


def _rebuilt(name: str, factor: Any, *, before: Any = None) -> Mutant:
    """The construction with another square root S of the input moment, or with weight and moment changed before it."""

    def wrong(true: Function) -> Function:
        def mutated(weight: Float, input_moment: Float, split: str = "even") -> Any:
            w, c = (weight, input_moment) if before is None else before(weight, input_moment)
            s = factor(c)
            u, sigma, vt = np.linalg.svd(w @ s, full_matrices=False)
            power = np.sqrt(sigma) if split == "even" else np.ones_like(sigma)
            latent = (power[:, None] * vt) @ np.linalg.inv(s)
            return dataclasses.replace(
                true(weight, input_moment, split),
                latent=latent,
                reconstruct=u * (sigma / power),
                variances=sigma if split == "even" else np.ones_like(sigma),
                singular_values=sigma,
            )

        return mutated

    return Mutant(name, "whitened_svd", wrong)


def _unweighted(weight: Float, moment: Float) -> tuple[Float, Float]:
    return weight, np.eye(len(moment))


def _without_inverse(true: Function) -> Function:
    def mutated(weight: Float, input_moment: Float, split: str = "even") -> Any:
        found = true(weight, input_moment, split)
        return dataclasses.replace(found, latent=found.latent @ np.linalg.cholesky(input_moment))

    return mutated


def _instances(context: Context) -> Iterator[tuple[str, Float, Float]]:
    """(where, weight (d, D), inputs (n, D)): inputs are not centred, so that second moment and covariance differ."""
    rng = context.rng("weights and inputs")
    for d, width, n in ((1, 3, 24), (4, 4, 32), (8, 24, 192), (16, 40, 320)):
        mixing = np.eye(width) + 0.1 * rng.standard_normal((width, width))
        inputs = rng.standard_normal((n, width)) @ mixing + rng.standard_normal(width)
        yield (
            f"d={d}, {n} inputs of width {width}, not centred, seed {context.seed}",
            rng.standard_normal((d, width)),
            inputs,
        )
    for label, layer in context.real():
        if "inputs" in layer.extras:
            inputs = np.asarray(layer.extras["inputs"], dtype=np.float64)
            if len(inputs) < 2 * inputs.shape[1]:
                continue  # a second moment that needs jitter belongs to another matrix
            for name in ("key_weight", "value_weight"):
                if name in layer.extras:
                    yield (
                        f"{label} KV head 0 {name}, {len(inputs)} inputs",
                        np.asarray(layer.extras[name][0], np.float64),
                        inputs,
                    )


@claim(
    id="transform-coding/whitening-is-pca",
    paper=PAPER,
    section="the transform, as its authors' code builds it",
    statement="Cholesky of the input's second moment, then the SVD of the whitened weight: this is uncentred PCA of the keys (or values)"
    " that the weight makes. Scaling the latents evenly or not does not change the score of a channel.",
    formula="C_x = SSᵀ, WS = UσVᵀ, A = σ^½VᵀS⁻¹, B = Uσ^½:  E kkᵀ = Uσ²Uᵀ,  z = Ax = σ^−½Uᵀk,  E‖k − B_r A_r x‖² = Σ_{c>r} σ_c²",
    expected=Verdict.HOLDS,
    functions={"whitened_svd": "kvtheory.transform.whitened_svd"},
    mutants=[
        _rebuilt("S from the other triangle: C_x = SᵀS", lambda c: np.linalg.cholesky(c).T),
        _rebuilt("S = C_x", lambda c: c),
        _rebuilt("no whitening: SVD of W", np.linalg.cholesky, before=_unweighted),
        _rebuilt("diagonal of C_x only", lambda c: np.diag(np.sqrt(np.diag(c)))),
        Mutant("S⁻¹ left out of A", "whitened_svd", _without_inverse),
        *systematic.scales("whitened_svd", fields=("latent",)),
        *systematic.scales("whitened_svd", fields=("variances",)),
        *systematic.square_dropped("whitened_svd", fields=("singular_values",)),
    ],
)  # fmt: skip
def whitening_is_pca(context: Context, *, whitened_svd: Function) -> Iterator[Evidence]:
    for where, weight, inputs in _instances(context):
        d = len(weight)
        moment = inputs.T @ inputs / len(inputs)
        keys = inputs @ weight.T
        # PCA by the other route: right singular vectors of the keys themselves, no second moment formed
        _, singular, basis = np.linalg.svd(keys / np.sqrt(len(keys)), full_matrices=False)
        condition = float(np.linalg.cond(moment))
        room = 1e-14 * d * max(condition, 10)
        turned = 1e-14 * condition * _crowding(singular) * d
        because = (
            f"the second moment has condition {condition:.1e}, which the Cholesky factor's inverse passes on to latents"
        )
        for split in ("even", "uneven"):
            found = whitened_svd(weight, moment, split)
            latents = inputs @ found.latent.T
            yield numerical(
                what=f"variances of PCA = σ² ({split} split), worst component",
                ran_on=where, **_worst(singular**2, found.singular_values**2), tolerance=room, because=because,
            )  # fmt: skip
            yield numerical(
                what=f"E z_c² of the latents as measured = the variances stated ({split} split), worst component",
                ran_on=where, **_worst((latents**2).mean(axis=0), found.variances), tolerance=room, because=because,
            )  # fmt: skip
            yield numerical(
                what=f"|correlation| of PCA score and latent of the same component = 1, least ({split} split)",
                ran_on=where, observed=float(np.abs(_correlation(keys @ basis.T, latents)).min()), predicted=1.0, tolerance=turned,
                because="rounding of the second moment over the least gap of its eigenvalues turns the components",
            )  # fmt: skip
            ranks = sorted({1, d // 2, d} - {0})
            lost = [((keys - latents[:, :r] @ found.reconstruct[:, :r].T) ** 2).sum() / len(keys) for r in ranks]
            rest = [(singular[r:] ** 2).sum() for r in ranks]
            total = float((singular**2).sum())
            yield numerical(
                what=f"E‖k − B_r A_r x‖² = the rest of PCA's variances, both plus all of them, worst rank of {ranks} ({split} split)",
                ran_on=where, **_worst(np.array(lost) + total, np.array(rest) + total), tolerance=room, because=because,
            )  # fmt: skip
        even, uneven = (whitened_svd(weight, moment, split) for split in ("even", "uneven"))
        queries = context.memo(
            ("queries", where),
            lambda d=d, where=where: context.rng(where).standard_normal((2 * d, d)),  # type: ignore[misc]
        )  # type: ignore[misc]
        scores = [((queries @ found.reconstruct) ** 2).mean(axis=0) * found.variances for found in (even, uneven)]
        direct = ((queries @ basis.T) ** 2).mean(axis=0) * singular**2
        for split, score in zip(("even", "uneven"), scores):
            yield numerical(
                what=f"score w_c E z_c² ({split} split) = (u_cᵀ C_q u_c) λ_c of PCA, worst component",
                ran_on=where, **_worst(score, direct), tolerance=turned, because="that of the components themselves",
            )  # fmt: skip


def _worst(observed: Float, predicted: Float) -> dict[str, Any]:
    """The component in which they differ most, relative to the larger side."""
    larger = np.maximum(np.abs(observed), np.abs(predicted))
    i = int(np.argmax(np.abs(observed - predicted) / np.where(larger > 0, larger, 1.0)))
    return {"observed": float(observed[i]), "predicted": float(predicted[i])}


def _correlation(a: Float, b: Float) -> Float:
    return (a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))


def _crowding(singular: Float) -> float:
    """Largest eigenvalue over the least gap between neighbours: how far rounding can turn an eigenvector."""
    squares = singular**2
    return float(squares[0] / np.abs(np.diff(squares)).min()) if len(squares) > 1 else 1.0
