"""Claims on recomputing a cache from its tokens (arXiv 2604.15356, determinism): which bits come back, and what a lossless store pays for the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential import measured

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]

#: plans under which nothing but the time of day changes
SAME = ("the same call again",)
#: each number of the tables has three digits
PRINTED, PRINTED_BECAUSE = 5e-3, "the table has three digits"


def summed(products: NDArray[np.float32], order: str) -> NDArray[np.float32]:
    """Sums along the last axis in float32, one addition after the other: forwards, backwards, or in chunks of 16 that are then added."""
    x = np.asarray(products, np.float32)
    if order == "backwards":
        x = x[..., ::-1]
    if order == "chunks of 16":
        x = np.stack([summed(x[..., i : i + 16], "forwards") for i in range(0, x.shape[-1], 16)], axis=-1)
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]  # float32 + float32 is float32, rounded once
    return total


def logits(context: Context) -> dict[str, dict[str, NDArray[np.float16]]]:
    """Of each layer of the real cache q . k of one query head, in float32 in several orders, kept as float16."""

    def compute() -> dict[str, dict[str, NDArray[np.float16]]]:
        found = {}
        for label, layer in context.real():
            if layer.queries is None:
                continue
            q = np.asarray(layer.queries[0, :: context.size(8, 1)], np.float32)
            products = q[:, None] * np.asarray(layer.keys[0], np.float32)[None]
            found[label] = {
                order: summed(products, order).astype(np.float16) for order in ("forwards", "backwards", "chunks of 16")
            }
        return found

    return context.memo("logits", compute)


def as_float16(bits: Any) -> NDArray[np.float16]:
    """Numbers of 16 bits, given as the whole numbers that these are."""
    return np.asarray(bits, np.int16).view(np.float16)


def sampled(context: Context) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(where, plan, kind, what is saved of one layer) of every layer whose steps the tables have."""
    found = []
    for table in context.memo("tables", lambda: measured.load("recompute")):
        for run in table["runs"]:
            for plan in run.get("plans", []):
                for kind, stored in plan["stored"].items():
                    for number, layer in stored.get("layers", {}).items():
                        where = (
                            f"{table['title']}, layer {number}, {plan['tokens']} tokens of {table['text']}, computed in {run['compute']}, stored in {kind}, "
                            "saved table"
                        )
                        found.append((where, plan["plan"], kind, layer))
    return found


def counts_of(layer: dict[str, Any]) -> list[int]:
    """How many numbers lie each distance from the reference: 0 first, then one step up, one down, then all others."""
    return [*layer["steps"], *(size for size, many in layer["spectrum"] for _ in range(many))]


def pairs_by_steps(context: Context, steps: Function, role: Any) -> Result:
    """Numbers of a real cache that came back as others, by their steps and by comparing them: no table of a model is read wrongly by `steps`."""
    for model in dict.fromkeys(where.split(",")[0] for where, *_ in sampled(context)):
        one, two = (
            as_float16([pair[side] for where, _, _, layer in sampled(context) if where.split(",")[0] == model for pair in layer.get("pairs", [])])
            for side in (0, 1)
        )  # fmt: skip
        if len(one):
            yield exact(
                what="numbers of a cache in float16 that another plan of execution gives otherwise, by their steps and by comparing them",
                ran_on=f"{model}, {len(one)} numbers that differ, of three layers, saved table", observed=int((np.asarray(steps(one, two)) != 0).sum()),
                predicted=int((one != two).sum()), role=role,
            )  # fmt: skip


def _tolerant(name: str, change: Any) -> Mutant:
    return Mutant(name, "steps", lambda true: lambda a, b: change(true(a, b), a))


@claim(
    id="sequential/recompute-is-bit-exact", paper=PAPER, section="lemma on determinism; lossless by recomputation",
    statement="Keys and values computed anew from the same tokens with the same weights are the same bits, so that the tokens are a lossless store of the cache.",
    formula="KV_i = F_M(t_1..t_i)",
    expected=Verdict.FAILS,
    functions={"steps": "kvtheory.sample.ulps"},
    mutants=[
        _tolerant("one step is no difference", lambda n, a: np.maximum(n - 1, 0)),
        _tolerant("only numbers below 1 are compared", lambda n, a: np.where(np.abs(a.astype(float)) < 1, n, 0)),
        _tolerant("differences of less than 8 steps are none", lambda n, a: np.where(n < 8, 0, n)),
    ],
    correction="sequential/recompute-costs", figure="recompute-differences",
)  # fmt: skip
def bit_exact(context: Context, *, steps: Function) -> Result:
    """Addition of floats is not associative: a sum cut elsewhere is another number. By hand, then in real logits, then a whole model."""
    yield from pairs_by_steps(context, steps, "control")
    one = np.array([2048.0], np.float16)
    left = (one + np.float16(1)) + np.float16(1)
    right = one + (np.float16(1) + np.float16(1))
    where = "float16: numbers from 2048 on lie 2 apart, a tie goes to the even one"
    yield exact(what="(2048 + 1) + 1 = 2048", ran_on=where, observed=int(left[0]), predicted=2048, role="control")
    yield exact(what="2048 + (1 + 1) = 2050", ran_on=where, observed=int(right[0]), predicted=2050, role="control")
    yield exact(
        what="float16 steps between q · k added from the left and in chunks of 1 and 2, q = (1, 1, 1), k = (2048, 1, 1)", ran_on=where,
        observed=int(steps(left, right)[0]), predicted=0, note="attention over chunks adds in this way",
    )  # fmt: skip
    for label, orders in logits(context).items():
        for order in ("backwards", "chunks of 16"):
            differing = int((steps(orders["forwards"], orders[order]) != 0).sum())
            total = orders["forwards"].size
            yield exact(
                what=f"of real q · k, summed in float32 {order} and not forwards, those that differ as float16", ran_on=f"{label}, {total} logits of one head",
                observed=differing, predicted=0, note=f"{differing / total:.2%}",
            )  # fmt: skip
    rows = []
    for table in context.memo("tables", lambda: measured.load("recompute")):
        for run in table["runs"]:
            for plan in run.get("plans", []):
                for kind, found in plan["stored"].items():
                    rows.append(
                        {
                            "model": table["title"], "compute": run["compute"], "stored": kind, "plan": plan["plan"], "differing": found["differing"],
                            "entropy_bits": found["entropy_bits"],
                        }
                    )  # fmt: skip
                    share = float(np.mean(found["differing"]))
                    if plan["plan"] in SAME or kind != run["compute"]:
                        continue
                    yield numerical(
                        what=f"share of keys and values that come back as other bits: {plan['plan']} against one go, computed and stored in {kind}",
                        ran_on=f"{table['title']}, {plan['tokens']} tokens of {table['text']}, all layers, saved table", observed=share, predicted=0.0,
                        tolerance=0.0, because="bits are equal or not", role="statement" if share else "assumption",
                        note=f"first layer {found['differing'][0]:.3g}, last {found['differing'][-1]:.3g}" if share else "on this machine, with these libraries",
                    )  # fmt: skip
    tables = context.memo("tables", lambda: measured.load("recompute"))
    tokens = {t["title"]: t["surprisal_bits"] / (t["tokens"] * t["numbers_a_token"]) for t in tables}
    yield Picture(figure="recompute-differences", data={"rows": rows, "tokens_bits": tokens})


def binary_entropy(share: float) -> float:
    """-p log2 p - (1 - p) log2(1 - p)."""
    return 0.0 if share in (0.0, 1.0) else -share * math.log2(share) - (1 - share) * math.log1p(-share) / math.log(2)


@claim(
    id="sequential/recompute-costs", paper=PAPER, section="lemma on determinism, corrected",
    statement="The same call on the same machine gives the same bits. A store that is to be lossless under any other plan holds, beside the tokens, what differs: by a code of each "
    "number alone the binary entropy of the share of numbers that do, and their share of the entropy of how far; on trained models more than what the tokens take.",
    formula="H(steps) = h_2(s) + s H(steps | steps ≠ 0) ≥ h_2(s),  s = P(steps ≠ 0);   N · H(steps) > Σ_t −log2 P(t_t | t_<t)",
    assumptions=("one machine, one build of the libraries for each table", "differences are coded one by one, under a table of each layer"),
    expected=Verdict.HOLDS_UNDER,
    functions={"entropy": "kvtheory.entropy.entropy_bits", "steps": "kvtheory.sample.ulps"},
    mutants=[
        *(m for m in systematic.scales("entropy") if "1/2" in m.name),
        *systematic.natural_log("entropy"),
        Mutant("the entropy of which number differs forgotten", "entropy", lambda true: lambda weights: true([w for w in list(weights)[1:]] or [1])),
        Mutant("one step is no difference", "steps", lambda true: lambda a, b: np.maximum(true(a, b) - 1, 0)),
    ],
)  # fmt: skip
def costs(context: Context, *, entropy: Function, steps: Function) -> Result:
    yield from pairs_by_steps(context, steps, "statement")
    for where, plan, _, layer in sampled(context):
        counts = counts_of(layer)
        differing = sum(counts[1:])
        if plan in SAME or not differing:
            continue
        share = differing / sum(counts)
        inside = float(entropy(counts[1:]))
        yield numerical(
            what=f"bits a number of the steps = h_2 of the share that differs + that share of the bits of how far: {plan}", ran_on=where, observed=float(entropy(counts)),
            predicted=binary_entropy(share) + share * inside, tolerance=1e-9, because="logarithms of integers", note=f"{share:.3%} differ, in {sum(c > 0 for c in counts) - 1} distances",
        )  # fmt: skip
    for label, orders in logits(context).items():
        found = np.asarray(steps(orders["forwards"], orders["backwards"])).ravel()
        counts = [int(c) for c in np.unique(found, return_counts=True)[1]]
        differing = int((found != 0).sum())
        where = f"{label}, {found.size} logits of one head, forwards and backwards in float32, kept as float16"
        direct = int((orders["forwards"] != orders["backwards"]).sum())
        yield exact(
            what="numbers that differ, by their steps and by comparing them", ran_on=where, observed=differing, predicted=direct
        )  # fmt: skip
        bits, least = float(entropy(counts)), binary_entropy(direct / found.size)
        yield numerical(
            what="bits a number of the steps ≥ those of which number differs", ran_on=where, observed=bits, predicted=least, relation=">=", tolerance=1e-12,
            because="logarithms of integers", tightness=least / bits if bits else None,
        )  # fmt: skip
    for table in context.memo("tables", lambda: measured.load("recompute")):
        tokens = table["surprisal_bits"] / (table["tokens"] * table["numbers_a_token"])
        for run in table["runs"]:
            for plan in run.get("plans", []):
                for kind, found in plan["stored"].items():
                    where = f"{table['title']}, {plan['tokens']} tokens of {table['text']}, computed in {run['compute']}, stored in {kind}, saved table"
                    shares, each = (np.asarray(found[name], float) for name in ("differing", "entropy_bits"))
                    if plan["plan"] in SAME:
                        yield exact(
                            what=f"layers with a number that differs: {plan['plan']}", ran_on=where, observed=int((shares != 0).sum()), predicted=0
                        )  # fmt: skip
                        continue
                    if not shares.any():
                        continue
                    yield numerical(
                        what=f"bits a number of the steps, mean over layers, above those of the tokens: {plan['plan']}", ran_on=where, observed=float(each.mean()),
                        predicted=tokens, relation=">", tolerance=PRINTED, because=PRINTED_BECAUSE,
                        note=f"{each.mean() / tokens:,.0f} times what the tokens take; {float(shares.mean()):.2%} of the numbers differ; a ratio of "
                        f"{16 / (each.mean() + tokens):,.0f} to 16 bits a number, not of {16 / tokens:,.0f}",
                    )  # fmt: skip
