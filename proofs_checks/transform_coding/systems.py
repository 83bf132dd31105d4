"""One allocation problem, many systems: KIVI, PALU, KVTC, AATC and eviction are choices of basis, weights and levels in it.

min sum_c D_c(b_c) subject to sum_c b_c = B, where D_c(b) = w_c s_c g(b) or as measured, inf for a number of bits that is not to be had.
Each system's own rule is written out here as its authors have it, without the solver, and compared with the solver's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention, rate
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding.eviction import removed_energy
from proofs_checks.transform_coding.noise import uniform_quantised
from proofs_checks.transform_coding.optimal_transform import _eigen
from proofs_checks.transform_coding.parts import Float, Part, definite, real_parts
from proofs_checks.transform_coding.whole_bits import by_knapsack

Ints = NDArray[np.int64]

#: numbers of bits that KVTC's authors' quantisers have
KVTC_BITS = (0, 1, 2, 4, 8)


def authors_rounding(scores: Float, budget: int, most: int = 16) -> Ints:
    """AATC's allocation as its authors' code has it: bits = clamp(round(1/2 log2(score/lambda)), 0, most), lambda by bisection, then topped up
    or trimmed one bit at a time, where it gains most or costs least under 4^-b."""
    low, high = 1e-300, float(scores.max()) * 4

    def at(level: float) -> Ints:
        return np.clip(np.round(0.5 * np.log2(scores / level)), 0, most).astype(np.int64)

    for _ in range(200):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if at(middle).sum() > budget else (low, middle)
    bits = at(high)
    while bits.sum() < budget:
        gain = np.where(bits < most, scores * 4.0**-bits, -np.inf)
        bits[np.argmax(gain)] += 1
    while bits.sum() > budget:
        loss = np.where(bits > 0, scores * 4.0 ** -(bits - 1.0), np.inf)
        bits[np.argmin(loss)] -= 1
    return bits


def only(table: Float, levels: tuple[int, ...]) -> Float:
    """The table with all other levels not to be had."""
    out = np.full(table.shape, np.inf)
    out[:, list(levels)] = table[:, list(levels)]
    return out


def kivi_codes(block: Float, bits: int) -> list[rate.Quantizer]:
    """One quantiser a channel: 2^bits equal steps from its minimum to its maximum."""
    return [
        rate.Quantizer.nearest(np.linspace(low, high, 2**bits))
        for low, high in zip(block.min(axis=0), block.max(axis=0))
    ]


def _bits(by: Callable[[Float, int], Any]) -> Callable[[Function], Function]:
    return lambda true: lambda tables, budget: by(np.asarray(tables, dtype=float), budget)


def _largest_first(tables: Float, budget: int) -> Ints:
    """Bits to the components of largest distortion without any, all levels taken as available, as many as fit."""
    bits = np.zeros(len(tables), dtype=np.int64)
    most = tables.shape[1] - 1
    for c in np.argsort(-tables[:, 0], kind="stable"):
        bits[c] = min(most, budget - bits.sum())
    return bits


def _short(tables: Float, budget: int) -> Ints:
    """An allocation of one bit less, where there is one."""
    try:
        return rate.integer_bits(tables, budget - 1)
    except ValueError:
        return np.zeros(len(tables), dtype=np.int64)


def _spectra(context: Context) -> list[tuple[str, Float, Float]]:
    """(where, variances of PCA, weights)."""
    rng = context.rng("spectra")
    found = [(f"log-normal, d={d}, seed {context.seed}", np.sort(np.exp(2 * rng.standard_normal(d)))[::-1], np.exp(rng.standard_normal(d))) for d in (8, 24)]  # fmt: skip
    for part in real_parts(context):
        values, u = _eigen(part.covariance)
        found.append((part.label, values, np.einsum("ic,ij,jc->c", u, definite(part.metric), u)))
    return found


@claim(
    id="transform-coding/special-cases",
    paper=OWN,
    section="the systems beside arXiv 2608.14191 as choices in its decomposition",
    statement="KIVI, PALU, KVTC, AATC and the eviction of tokens allocate what one solver allocates when it is held to their basis, their weights and"
    " the levels that they have.",
    formula="min Σ D_c(b_c), Σ b_c = B:  KIVI T = I, b_c ≡ b, steps by range;  PALU PCA, b_c ∈ {0, b}, w = 1;  KVTC PCA over heads, w = 1;"
    "  AATC w_c σ_c² 4^{−b};  eviction b_i ∈ {0, 1} over tokens, D_i = a_i²‖u_i‖²",
    expected=Verdict.HOLDS,
    functions={"integer_bits": "kvtheory.rate.integer_bits", "measured_table": "kvtheory.rate.measured_table"},
    mutants=[
        Mutant("components in the wrong order", "integer_bits", _bits(lambda t, b: rate.integer_bits(t[::-1], b))),
        Mutant("largest first, up to all levels", "integer_bits", _bits(_largest_first)),
        Mutant("levels that are not to be had taken as the last before", "integer_bits", _bits(lambda t, b: rate.integer_bits(np.where(np.isfinite(t), t, np.nanmin(np.where(np.isfinite(t), t, np.nan), axis=1, keepdims=True)), b))),
        Mutant("one bit left over", "integer_bits", _bits(_short)),
        *systematic.scales("measured_table"),
        *systematic.square_dropped("measured_table"),
    ],
)  # fmt: skip
def special_cases(context: Context, *, integer_bits: Function, measured_table: Function) -> Iterator[Evidence]:
    spectra = _spectra(context)
    g4 = 4.0 ** -np.arange(17.0)
    gaussian = context.memo("gaussian", lambda: rate.gaussian_table(9))

    # KIVI: T = I, one number of bits, steps by range
    for part in real_parts(context)[: context.size(2, 12)] or [_made_up(context)]:
        block = part.x[:32]
        codes = {b: kivi_codes(block, b) for b in (1, 2, 3, 4)}
        table = np.full((block.shape[1], 5), np.inf)
        table[:, 0] = (block**2).mean(axis=0)
        for b, quantisers in codes.items():
            table[:, b] = [
                float(np.asarray(measured_table(block[:, c : c + 1], [q]))[0, 0]) for c, q in enumerate(quantisers)
            ]
        flat = np.asarray(integer_bits(only(table, (2,)), 2 * len(table)))
        yield exact(
            what="KIVI: bits of a channel when 2 are the only level", ran_on=f"{part.label}, 32 tokens", observed=sorted(set(flat.tolist())), predicted=[2],
        )  # fmt: skip
        coded = uniform_quantised(block, 2)[0]
        yield numerical(
            what="KIVI: distortion of that allocation by the table of equal steps over each channel's range = mean squared error of KIVI's rounding, 2 bits, one group of 32 tokens",
            ran_on=part.label, observed=float(table[np.arange(len(table)), flat].sum()), predicted=float(((coded - block) ** 2).mean(axis=0).sum()), tolerance=1e-10,
            because="two ways of rounding to the same points; ties apart, of measure 0",
        )  # fmt: skip
        free = np.asarray(integer_bits(table, 2 * len(table)))
        rows = np.arange(len(table))
        yield numerical(
            what="KIVI: what equal bits leave over what the solver leaves that may give 0 to 4 bits by the same table: at least 1", ran_on=part.label,
            observed=float(table[rows, flat].sum() / table[rows, free].sum()), predicted=1.0, relation=">=", tolerance=1e-12, because="sums of positive terms",
        )  # fmt: skip

    # eviction: tokens for channels, one bit each: kept or not
    worse = tried = 0
    heads = [(kind, context.synthetic(kind, kv_heads=1, query_heads=1, tokens=24, head_dim=8, model_dim=10, queries=6).head(0)) for kind in ("gaussian", "heavy_tail", "needle")]  # fmt: skip
    for _kind, head in heads:
        a = attention.weights(head.q, head.k, head.scale)
        y = head.v @ head.w_o
        factor = (a**2 * ((y[None] - (a @ y)[:, None]) ** 2).sum(axis=2)).sum(axis=0)
        for keep in (1, 6, 18):
            given = np.asarray(integer_bits(np.stack([factor, np.zeros_like(factor)], axis=1), keep))
            worse += int(not np.array_equal(np.flatnonzero(given), np.sort(np.argsort(-factor)[:keep])))
            tried += 1
        # one token to go: by the exact error of each, the solver finds the best
        single = np.array([removed_energy(head, np.arange(24) == j).sum() for j in range(24)])
        given = np.asarray(integer_bits(np.stack([single, np.zeros(24)], axis=1), 23))
        worse += int(np.flatnonzero(given == 0).tolist() != [int(np.argmin(single))])
        tried += 1
    yield exact(
        what="eviction: allocations of one bit a token, kept or not, that keep other tokens than those of largest token factor (or remove another than the one of"
        " least error)",
        ran_on=f"gaussian, heavy_tail, needle, n=24, {tried} allocations, seed {context.seed}", observed=worse, predicted=0,
    )  # fmt: skip

    # AATC: rounding with bisection and top-up, against the exact minimum
    worse = tried = 0
    for _, s, w in spectra:
        for mean in context.size((1.0, 2.5), (1.0, 1.5, 2.0, 2.5, 3.0)):
            budget = int(mean * len(s))
            scores = (w / np.quantile(w, 0.95)) * (s / np.quantile(s, 0.95))
            theirs, ours = authors_rounding(scores, budget), np.asarray(integer_bits(scores[:, None] * g4, budget))
            worse += int(not np.array_equal(theirs, ours))
            tried += 1
    yield exact(
        what="AATC: allocations of the authors' rounding, bisection and top-up that differ from the solver's with weights w_c σ_c² and 4⁻ᵇ",
        ran_on=f"{len(spectra)} spectra (of real heads: PCA with weights), 1 to 3 bits, {tried} allocations", observed=worse, predicted=0,
        note="round(½ log₂(score/λ)) gives a bit where it gains more than ¾ of 2λ: one slope for all, hence the optimum",
    )  # fmt: skip

    # PALU: {0, b}, w = 1: the leading components, whatever g
    worse = tried = 0
    for _, s, _ in spectra[:2] + spectra[2 :: max(1, len(spectra) // context.size(4, 12))]:
        for b in (2, 4):
            for keep in (len(s) // 3, (7 * len(s)) // 10):
                for law in (g4[:9], gaussian):
                    given = np.asarray(integer_bits(only(s[:, None] * law, (0, b)), b * keep))
                    worse += int(not np.array_equal(given, np.where(np.arange(len(s)) < keep, b, 0)))
                    tried += 1
    yield exact(
        what="PALU: allocations with levels 0 and b and no weights that are not b bits for the leading components of PCA, the rank of a truncated SVD",
        ran_on=f"log-normal spectra and real heads, b = 2 and 4, ranks d/3 and .7 d, two laws, {tried} allocations", observed=worse, predicted=0,
    )  # fmt: skip
    for part in real_parts(context)[: context.size(2, 12)] or [_made_up(context)]:
        x = part.x - part.x.mean(axis=0)
        values, u = _eigen(part.covariance)
        keep = (7 * len(values)) // 10
        given = np.asarray(integer_bits(only(values[:, None] * g4[:9], (0, 4)), 4 * keep))
        lost = float(((x @ u[:, given == 0]) ** 2).sum())
        tail = float((np.linalg.svd(x, compute_uv=False)[keep:] ** 2).sum())
        yield numerical(
            what="PALU: energy of what gets no bits = least energy that any rank .7 d leaves (singular values of the rows)", ran_on=part.label, observed=lost, predicted=tail,
            tolerance=1e-9, because="singular values of the rows against eigenvalues of their covariance",
        )  # fmt: skip

    # KVTC: PCA over the heads of a layer together, w = 1, levels 0, 1, 2, 4, 8
    worse = tried = 0
    for where, s in [*((w, v) for w, v, _ in spectra[:2]), *_joint(context)]:
        table = only(s[:, None] * gaussian, KVTC_BITS)
        ticks = np.where(
            np.isfinite(table), np.rint(np.where(np.isfinite(table), table, 0) / table[:, 0].max() * 2**44), -1
        ).astype(np.int64)
        own = context.memo(("kvtc", where), lambda ticks=ticks: _knapsack(ticks))  # type: ignore[misc]
        for mean in (1, 2):
            given = np.asarray(integer_bits(np.where(ticks < 0, np.inf, ticks), mean * len(s)))
            worse += int(
                given.sum() != mean * len(s) or sum(int(ticks[c, b]) for c, b in enumerate(given)) != own[mean * len(s)]
            )
            tried += 1
    yield exact(
        what="KVTC: allocations on PCA over all heads of a layer, plain variances, levels 0, 1, 2, 4, 8, that cost more than its dynamic programme's",
        ran_on=f"{tried} allocations, of keys and of values (real heads where there are any), knapsack in Python integers", observed=worse, predicted=0,
    )  # fmt: skip


def _made_up(context: Context) -> Part:
    rng = context.rng("made up")
    return Part(
        f"normal rows, d=24, seed {context.seed}",
        "keys",
        rng.standard_normal((200, 24)) * np.exp(rng.standard_normal(24)),
        np.eye(24),
    )


def _joint(context: Context) -> list[tuple[str, Float]]:
    """PCA variances of all KV heads of a layer side by side, keys and values, the largest 32 of each: KVTC over heads."""
    found = []
    by_layer: dict[str, list[Part]] = {}
    for part in real_parts(context):
        by_layer.setdefault(f"{part.label.split(' KV head')[0]} {part.kind}", []).append(part)
    for label, parts in by_layer.items():
        x = np.concatenate([p.x - p.x.mean(axis=0) for p in parts], axis=1)
        found.append((label, np.linalg.svd(x / np.sqrt(len(x)), compute_uv=False)[:32] ** 2))
    return found[: context.size(2, 8)]


def _knapsack(ticks: Ints) -> dict[int, int]:
    """As `by_knapsack`, for tables with levels that are not to be had (-1): those are priced out of reach."""
    large = int(ticks.max()) * (len(ticks) + 1)
    return {spent: price for spent, price in by_knapsack(np.where(ticks < 0, large, ticks)).items() if price < large}
