"""A toy claim about kvtheory.distortion.value_term, to test the machinery apart from the science."""

import numpy as np

from proofs_checks import mutants as systematic
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.evidence import NotRun, Picture, exact, numerical


@claim(
    id="toy/area", paper="2608.14191", section="nowhere", statement="The value term of one token with unit weight is the norm of W_O.",
    formula="D_V = sigma^2 ||W_O||^2", assumptions=(), expected=Verdict.HOLDS, functions={"value_term": "kvtheory.distortion.value_term"},
    mutants=[*systematic.scales("value_term"), Mutant("never wrong", "value_term", lambda true: true)], figure="toy",
)  # fmt: skip
def area(context, *, value_term):
    w = np.arange(6.0).reshape(2, 3)
    yield numerical(
        what="value term", ran_on="one token", observed=value_term(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), w, np.ones((1, 2)))[0],
        predicted=(w**2).sum(), tolerance=1e-12, because="six products",
    )  # fmt: skip
    yield Picture("toy", {"x": [1, 2.5]})


@claim(
    id="toy/absent", paper="2608.14191", section="nowhere", statement="Something that needs what is not there at all.", formula="1 = 1",
    expected=Verdict.HOLDS, functions={"f": "math.sqrt"}, mutants=[Mutant("one", "f", lambda t: t), Mutant("two", "f", lambda t: t)],
)  # fmt: skip
def absent(context, *, f):
    yield NotRun("a real model", "kvtheory models fetch smol")


@claim(
    id="toy/crash", paper="2608.14191", section="nowhere", statement="A check that crashes is not settled, and says so.", formula="1 = 1",
    expected=Verdict.HOLDS, functions={"f": "math.sqrt"}, mutants=[Mutant("one", "f", lambda t: t), Mutant("two", "f", lambda t: t)],
)  # fmt: skip
def crash(context, *, f):
    yield exact(what="one is one", ran_on="numbers", observed=1, predicted=1)
    raise RuntimeError("boom")
