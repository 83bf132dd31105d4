"""The TurboQuant claims: each true statement gets its expected verdict, every mutant another; a wrong kvtheory turns it."""

import numpy as np
import pytest

import kvtheory
from kvtheory import quantization
from proofs_checks import quantizers
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.evidence import Picture
from proofs_checks.quantizers import instruments
from proofs_checks.run import run_claim

CLAIMS = {c.id: c for c in vars(quantizers).values() if isinstance(c, Claim)}


@pytest.fixture(scope="module")
def outcomes():
    return {id: run_claim(c, Context(claims=30)) for id, c in CLAIMS.items()}


@pytest.mark.parametrize("id", CLAIMS)
def test_verdict(outcomes, id):
    assert outcomes[id].error is None
    assert outcomes[id].verdict == CLAIMS[id].expected, [e for e in outcomes[id].evidence if not e.agrees]


@pytest.mark.parametrize("id", CLAIMS)
def test_every_mutant_is_refuted(outcomes, id):
    assert [m.name for m in outcomes[id].mutants if m.refuted is not True] == []
    assert len(outcomes[id].mutants) >= 4


def test_ids_and_corrections():
    assert all(id.startswith("quantizers/") and c.paper == "2504.19874" for id, c in CLAIMS.items())
    for c in CLAIMS.values():
        if c.expected is Verdict.FAILS:
            assert CLAIMS[c.correction].expected is Verdict.HOLDS


def test_picture(outcomes):
    pictures = [p for o in outcomes.values() for p in o.pictures]
    assert [p.figure for p in pictures] == ["turboquant-distortion"]
    data = pictures[0].data
    assert isinstance(pictures[0], Picture) and len(data["bits"]) == len(data["upper_bound"]) == len(
        data["distortion"]["128"]
    )
    assert all(low <= high for low, high in zip(data["distortion"]["128"], data["upper_bound"]))


@pytest.mark.parametrize(
    "name, wrong, ids",
    [
        ("mse_bound", lambda bits: 1.5 * 4.0 ** -np.asarray(bits, dtype=float), {"quantizers/turboquant-mse-bound"}),
        (
            "mse_distortion",
            lambda dim, bits: 1.01 * np.pi / 8 * 4.0 ** (1 - bits),
            set(CLAIMS) - {"quantizers/prod-table"},
        ),
        ("mse_lower_bound", lambda bits: 0.5 * 4.0 ** -np.asarray(bits, dtype=float), {"quantizers/lower-bound"}),
        ("printed_prod", lambda bits: (1.56, 0.56, 0.18, 0.053)[bits - 1], {"quantizers/prod-table"}),
    ],
)
def test_a_wrong_library_turns_the_verdict(monkeypatch, name, wrong, ids):
    monkeypatch.setattr(quantization, name, wrong)
    for id in ids:
        claim = CLAIMS[id]
        if f"kvtheory.quantization.{name}" not in claim.functions.values():
            continue
        outcome = run_claim(Claim(**{**vars(claim), "mutants": ()}), Context(claims=30))
        assert outcome.verdict != claim.expected, id


def test_real_keys_are_measured():
    layers = [
        kvtheory.synthetic.make(kind, tokens=64, head_dim=64, seed=i)
        for i, kind in enumerate(("gaussian", "outlier_channels", "low_rank"))
    ]
    context = Context(claims=30, cache=kvtheory.Cache(layers))
    outcome = run_claim(Claim(**{**vars(CLAIMS["quantizers/turboquant-mse"]), "mutants": ()}), context)
    rows = [e for e in outcome.evidence if "keys" in e.what]
    assert len(rows) == 2 and all(e.agrees for e in rows)


class TestInstruments:
    """The check's own measurements, on values known in closed form."""

    @pytest.mark.parametrize("dim", [2, 3, 5, 64])
    def test_beta_moments(self, dim):
        mass, first, second = instruments.beta_moments(dim, np.array([-0.3, 0.1]))
        assert (
            mass.sum() == pytest.approx(1)
            and first.sum() == pytest.approx(0, abs=1e-15)
            and second.sum() == pytest.approx(1 / dim)
        )
        if dim == 3:
            assert mass == pytest.approx([0.35, 0.2, 0.45]) and first == pytest.approx([-0.2275, -0.02, 0.2475])

    @pytest.mark.parametrize("bits", [1, 2, 3])
    def test_random_code(self, bits):
        assert instruments.random_code(3, bits) == pytest.approx(1 - (1 - 2 / (8**bits + 1)) ** 2, rel=1e-9)

    def test_random_code_by_simulation(self):
        rng = np.random.default_rng(5)
        c = rng.standard_normal((4000, 16, 4))
        c /= np.linalg.norm(c, axis=2, keepdims=True)
        reach = c[:, :, 0].max(axis=1)  # x = e_1
        r = np.sqrt(1 - instruments.random_code(4, 1))
        error = 1 + r * r - 2 * r * reach
        assert error.mean() == pytest.approx(instruments.random_code(4, 1), abs=4.5 * error.std() / np.sqrt(error.size))

    def test_richardson(self):
        n = 2.0 ** np.arange(3, 6)
        assert instruments.richardson(5 - 3 / n)[0] == pytest.approx(5)
