"""Running claims: the check as stated, then each mutant through the same check, up to the evidence that decides it."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtheory import sweep
from proofs_checks.claim import Claim, Mutant, Verdict
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, NotRun, Picture

#: (claim id, what is being done now) -> None
Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class MutantOutcome:
    """refuted: the check's verdict on the mutant differs from the claim's expected one; None where the claim was not run."""

    name: str
    refuted: bool | None
    verdict: Verdict | None
    by: str | None


@dataclass(frozen=True)
class Outcome:
    claim: Claim
    verdict: Verdict
    evidence: tuple[Evidence, ...]
    pictures: tuple[Picture, ...]
    mutants: tuple[MutantOutcome, ...]
    seconds: float
    not_run: tuple[NotRun, ...] = ()
    error: str | None = None

    @property
    def as_expected(self) -> bool:
        """The verdict is the expected one (a claim not run counts as such, and is listed apart) and no mutant survived."""
        surviving = any(m.refuted is False for m in self.mutants)
        return not surviving and self.error is None and self.verdict in (self.claim.expected, Verdict.NOT_RUN)


@dataclass
class _Collected:
    evidence: list[Evidence] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    decisive: Evidence | None = None


def _collect(claim: Claim, context: Context, mutant: Mutant | None, tell: Callable[[str], None]) -> _Collected:
    functions = claim.look_up()
    if mutant is not None:
        functions[mutant.role] = mutant.wrong(functions[mutant.role])
    got = _Collected()
    for item in claim.run(context, functions):
        if isinstance(item, Evidence):
            got.evidence.append(item)
            tell(f"{len(got.evidence)} comparisons")
            if mutant is not None and claim.cannot_recover(item):
                got.decisive = item
                break
        elif isinstance(item, Picture):
            got.pictures.append(item)
        elif isinstance(item, NotRun):
            got.not_run.append(item)
            if mutant is not None:
                break
        else:
            raise TypeError(f"{claim.id}: a check yields Evidence, Picture or NotRun, got {type(item).__name__}")
    return got


def run_mutant(
    claim: Claim, context: Context, mutant: Mutant, tell: Callable[[str], None] = lambda _: None
) -> MutantOutcome:
    """The mutant through the claim's own check. A mutant that crashes it is not refuted by evidence: it counts as surviving."""
    try:
        got = _collect(claim, context, mutant, tell)
    except Exception as problem:
        return MutantOutcome(mutant.name, False, None, f"crashed: {type(problem).__name__}: {problem}")
    if got.not_run:
        return MutantOutcome(mutant.name, None, Verdict.NOT_RUN, got.not_run[0].missing)
    verdict = claim.judge(got.evidence)
    decisive = got.decisive or next((e for e in got.evidence if e.agrees is not True), None)
    return MutantOutcome(mutant.name, verdict != claim.expected, verdict, None if decisive is None else decisive.what)


def run_claim(claim: Claim, context: Context, progress: Progress = lambda *_: None) -> Outcome:
    """Check the claim and all its mutants. A check that crashes gives `not settled` with the error; the run goes on."""
    start = time.perf_counter()
    context.claim_id = claim.id
    try:
        got = _collect(claim, context, None, lambda text: progress(claim.id, text))
    except Exception:
        return Outcome(
            claim, Verdict.NOT_SETTLED, (), (), tuple(MutantOutcome(m.name, None, None, None) for m in claim.mutants),
            time.perf_counter() - start, error=traceback.format_exc(limit=6),
        )  # fmt: skip
    if got.not_run:
        mutants = [MutantOutcome(m.name, None, Verdict.NOT_RUN, None) for m in claim.mutants]
        verdict = Verdict.NOT_RUN
    else:
        verdict = claim.judge(got.evidence)
        mutants = []
        for i, mutant in enumerate(claim.mutants):
            progress(claim.id, f"mutant {i + 1} of {len(claim.mutants)}")
            mutants.append(run_mutant(claim, context, mutant))
    context.forget()
    return Outcome(
        claim,
        verdict,
        tuple(got.evidence),
        tuple(got.pictures),
        tuple(mutants),
        time.perf_counter() - start,
        tuple(got.not_run),
    )


def run_all(
    claims: Sequence[Claim], context: Context, progress: Progress, done: Callable[[Outcome], None], *, jobs: int = 1
) -> None:
    """One after another in this process, or on `jobs` forked workers; `done` is called with each outcome, in the ledger's order."""
    if jobs == 1:
        for claim in claims:
            done(run_claim(claim, context, progress))
        return
    # Forked workers inherit the cache and any replaced function; a claim travels by its place in the list, since checks do not pickle.
    global _forked
    _forked = (claims, context)
    with sweep.processes(jobs, multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(_run_forked, i) for i in range(len(claims))]
        for claim, future in zip(claims, futures):
            progress(claim.id, "waiting for its worker")
            done(replace(future.result(), claim=claim))


_forked: tuple[Sequence[Claim], Context] | None = None


def _run_forked(i: int) -> Outcome:
    assert _forked is not None
    claims, context = _forked
    return replace(run_claim(claims[i], context), claim=None)  # type: ignore[arg-type]
