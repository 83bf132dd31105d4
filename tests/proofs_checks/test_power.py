"""The same slips for every claim's functions: that they are seen, and that power.md is about what is there."""

import dataclasses
import fnmatch

import pytest

import kvtheory
import proofs_checks
from proofs_checks import power
from proofs_checks.claim import Mutant
from proofs_checks.context import Context


@pytest.fixture(scope="module")
def context():
    return Context(cache=kvtheory.sample_cache(), cache_name="sample", claims=len(proofs_checks.claims()))


def test_notes_and_open_slips_name_registered_claims_and_their_functions():
    claims = proofs_checks.claims()
    assert len(power.notes()) > 50 and len(power.open_slips()) > 50
    for pattern, mutant in (*power.notes(), *power.open_slips()):
        own = [c for c in claims.values() if fnmatch.fnmatchcase(c.id, pattern)]
        assert own, pattern
        assert any(mutant.split(":")[0] in claim.functions for claim in own), (pattern, mutant)
    assert not set(power.notes()) & power.open_slips()


def test_every_slip_of_a_formula_is_refuted(capsys):
    assert power.main(["--claim", "transform-coding/value-distortion", "--no-own"]) == 0
    said = capsys.readouterr().out
    assert "0 open, 0 new" in said and "transform-coding/value-distortion" in said


def test_a_slip_that_changes_nothing_is_void_and_one_that_raises_is_not_refuted(context):
    claim = proofs_checks.claims()["transform-coding/value-distortion"]
    context.claim_id = claim.id
    slips = power.systematic(claim, context)
    role = next(iter(claim.functions))
    assert {f"{role}: factor 2", f"{role}: sign", f"{role}: squared", f"{role}: factor 1/d"} <= {m.name for m in slips}
    by_name = {m.name: m for m in slips}
    assert power.attempt(claim, context, by_name[f"{role}: factor 2"]).outcome == "refuted"

    def same(true):
        return power.Changed(true, lambda f, bound: f(*bound.args, **bound.kwargs))

    def broken(true):
        def fail(f, bound):
            raise ZeroDivisionError

        return power.Changed(true, fail)

    assert power.attempt(claim, context, Mutant("nothing", role, same)).outcome == "void"
    assert power.attempt(claim, context, Mutant("broken", role, broken)).outcome == "raised"


def test_a_new_survivor_fails_the_command(monkeypatch, capsys):
    """power.md without its lists: what it explains is then in neither."""
    claim = "quantizers/qjl-variance"
    assert any(c == claim for c, _ in (*power.notes(), *power.open_slips()))
    monkeypatch.setattr(power, "notes", dict)
    monkeypatch.setattr(power, "open_slips", set)
    assert power.main(["--claim", claim, "--no-own"]) == 1
    assert "in neither list" in capsys.readouterr().out


def test_a_share_is_a_fixed_part():
    names = [(f"claim {i}", f"slip {j}") for i in range(40) for j in range(40)]
    part = [n for n in names if power.drawn(*n, 8)]
    assert 150 < len(part) < 250 and part == [n for n in names if power.drawn(*n, 8)]
    assert [n for n in names if power.drawn(*n, 1)] == names
    assert dataclasses.is_dataclass(power.Trial)
