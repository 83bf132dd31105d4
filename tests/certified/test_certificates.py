"""Inequalities of the ledger proved on small instances in ball arithmetic; what decides them decides wrongly about nothing."""

import flint
import pytest
from flint import arb, fmpq

import proofs_checks
from proofs_checks.certified import balls, run


@pytest.fixture(scope="module")
def all_of_them():
    with flint.ctx.workprec(balls.PRECISION):
        return list(run.certificates())


def test_all_are_proved_and_every_wrong_formula_is_refuted(all_of_them):
    with flint.ctx.workprec(balls.PRECISION):
        for c in all_of_them:
            assert balls.decide(c.left, c.relation, c.right) is True, (c.claim, c.what, c.instance)
            for name, (left, right) in c.controls.items():
                assert balls.decide(left, c.relation, right) is False, (c.claim, c.what, name)


def test_every_claim_with_certificates_is_registered_and_has_a_wrong_formula(all_of_them):
    registered = proofs_checks.claims()
    assert len(all_of_them) > 300
    for claim in {c.claim for c in all_of_them}:
        assert claim in registered
        assert any(c.controls for c in all_of_them if c.claim == claim)
    for name in run.WITHOUT:
        assert any(claim == name or claim.startswith(name.removesuffix("*")) for claim in registered), name


def test_a_ball_that_touches_decides_nothing():
    with flint.ctx.workprec(balls.PRECISION):
        wide = arb(1, 0.5)
        assert balls.decide(wide, "<=", arb(1)) is None
        assert balls.decide(wide, "<=", arb(2)) is True and balls.decide(wide, "<=", arb(0)) is False
        assert balls.decide(fmpq(1, 3), "<=", fmpq(1, 3)) is True  # exact numbers are compared exactly


def test_the_command_fails_for_a_false_inequality(monkeypatch, capsys):
    honest = run.certificates

    def one_false():
        yield from list(honest())[:3]
        yield balls.Certificate("sequential/total-entropy", "1 <= 1/2", "by hand", fmpq(1), "<=", fmpq(1, 2), {})

    monkeypatch.setattr(run, "certificates", one_false)
    assert run.main() == 1
    assert "FALSE sequential/total-entropy: 1 <= 1/2" in capsys.readouterr().out
