"""All certificates, the claims without one, and the command that prints both."""

from __future__ import annotations

import time
from collections.abc import Iterator

import flint

from proofs_checks.certified import balls, entropies, gains, mixture, quantisers, risks, tries
from proofs_checks.certified.balls import Certificate, decide, margin, shown

#: claims that state an inequality and have no certificate: why
WITHOUT = {
    "transform-coding/validity-range": "compares a first order with a Monte Carlo mean; no finite sum to enclose",
    "transform-coding/attention-weights": "about errors of a codec on real and synthetic caches",
    "transform-coding/klt-any-law": "differential entropies of a law of our own, by quadrature in float64",
    "transform-coding/measured-tables": "about the tables of a codec's own quantisers",
    "sequential/payload-is-surprisal": "about lengths of streams: whole bits, compared exactly in the ledger",
    "sequential/ratio-914000": "the ledger compares whole numbers and balls already",
    "sharing/*": "about lengths of streams and token counts: whole numbers, compared exactly in the ledger",
    "sharing/delta-at-divergence": "a Lipschitz bound of a transformer in float64: its operator norms are not enclosed",
    "prediction/known-token-beats-mean": "about errors of a codec on a toy transformer",
    "prediction/residual-bounds-on-real-models": "the certified bounds (prediction/residual-of-a-mixture) on measured energies",
    "prediction/gains-on-real-models": "measured on trained models",
    "prediction/residual-grows-with-surprisal": "measured on trained models",
    "risk/assumption-5-1": "a share measured on real caches",
    "risk/plain-cube-bound": "an expectation over the walk's coins, which the ledger takes by enumeration in float64",
    "risk/spectral-decay": "measured on real caches",
    "risk/own-tokens-floor": "distances to convex hulls by a solver in float64",
    "risk/aware-agnostic-separation": "optima of cone programmes in float64",
    "risk/query-knowledge": "ratios of expectations measured on real caches",
    "risk/sampling-rate": "slopes and ratios of expectations measured on caches",
    "risk/selection-beats-balance": "an expectation over the walk's coins on caches",
    "risk/sinks": "measured on real caches",
    "risk/sinks-kept": "measured on real caches",
    "quantizers/prod-on-attention": "errors of a codec at the attention output",
    "quantizers/kivi-channels": "errors of a codec",
    "quantizers/kivi-two-bits": "about lengths of streams: whole bits, compared exactly in the ledger",
    "quantizers/kvquant-*": "errors of a codec",
}

TOPICS = (entropies, mixture, gains, tries, risks, quantisers)


def certificates() -> Iterator[Certificate]:
    """All of them; to be taken within `flint.ctx.workprec(balls.PRECISION)`."""
    for topic in TOPICS:
        yield from topic.certificates()


def without() -> dict[str, str]:
    return dict(WITHOUT)


def main() -> int:
    """Print a line a certificate; 1 where one is not proved or a wrong formula is not refuted."""
    start, number, failed, controls = time.perf_counter(), 0, 0, 0
    claims: dict[str, int] = {}
    with flint.ctx.workprec(balls.PRECISION):
        for c in certificates():
            number += 1
            proved = decide(c.left, c.relation, c.right)
            refuted = {name: decide(left, c.relation, right) is False for name, (left, right) in c.controls.items()}
            good = proved is True and all(refuted.values())
            failed += not good
            controls += len(refuted)
            claims[c.claim] = claims.get(c.claim, 0) + len(refuted)
            wrong = "; ".join(f"{'refuted' if ok else 'NOT REFUTED'}: {name}" for name, ok in refuted.items())
            verdict = {True: "proved", False: "FALSE", None: "UNDECIDED"}[proved]
            print(
                f"{verdict} {c.claim}: {c.what} [{c.instance}] {shown(c.left)} {c.relation} {shown(c.right)}, margin {shown(margin(c), 5)}"
                + (f" | {wrong}" if wrong else "")
            )
    bare = [name for name, many in claims.items() if many == 0]
    print("\ninequalities of the ledger without a certificate:")
    for name, why in WITHOUT.items():
        print(f"  {name}: {why}")
    print(
        f"\n{number} inequalities of {len(claims)} claims, {number - failed} proved, {controls} wrong formulas refuted"
        f"{f', claims without one: {bare}' if bare else ''}; {balls.PRECISION} bits, {time.perf_counter() - start:.1f} s"
    )
    return 1 if failed or bare else 0
