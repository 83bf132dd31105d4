"""The claims about a model's first layer, on a made-up model in place of SmolLM2: the measurement decides; absent weights are `not run`."""

import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvtheory.models import MODELS, layer_zero
from proofs_checks import sequential
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.run import run_claim

AS_PRINTED, CORRECTED = sequential.injectivity_on_real_models, sequential.injectivity_up_to_embeddings
TOKENS, WIDTH = 60, 48


@pytest.fixture
def vocabulary(tmp_path, monkeypatch):
    """Writes a first layer where the weights of smol would be. change(arrays): makes it special."""
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path))

    def write(change=lambda arrays: None):
        rng = np.random.default_rng(0)
        arrays = {
            "model.embed_tokens.weight": rng.normal(size=(TOKENS, WIDTH)),
            "model.layers.0.input_layernorm.weight": rng.uniform(0.5, 2, WIDTH),
            "model.layers.0.self_attn.k_proj.weight": rng.normal(size=(2 * 20, WIDTH)),
            "model.layers.0.self_attn.v_proj.weight": rng.normal(size=(2 * 20, WIDTH)),
        }
        change(arrays)
        folder = tmp_path / "models" / f"smol-{MODELS['smol'].sha256[:8]}" / "float32-v1"
        folder.mkdir(parents=True)
        save_file({name: array.astype(np.float32) for name, array in arrays.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(
            json.dumps({"model_type": "llama", "num_key_value_heads": 2, "rms_norm_eps": 1e-5})
        )
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"w{i}": i for i in range(TOKENS)}}}))
        (folder / "kvtheory-origin.json").write_text("{}")

    return write


def twins(arrays):
    table = arrays["model.embed_tokens.weight"]
    table[[31, 40]] = table[7]
    table[50] = table[12]


def run(claim, **options):
    return run_claim(claim, Context(claims=40, **options))


def statements(outcome):
    return {e.what: e.observed for e in outcome.evidence if e.role == "statement"}


def test_they_are_in_the_ledger_after_the_claim_that_assumes_it():
    ids = [v.id for v in vars(sequential).values() if isinstance(v, Claim)]
    at = ids.index("sequential/per-step-entropy-injective")
    assert ids[at + 1 : at + 3] == [AS_PRINTED.id, CORRECTED.id] and AS_PRINTED.correction == CORRECTED.id


@pytest.mark.parametrize("budget", ["quick", "full"])
@pytest.mark.parametrize("claim", [AS_PRINTED, CORRECTED], ids=lambda claim: claim.id)
def test_equal_embeddings(vocabulary, claim, budget):
    vocabulary(twins)
    outcome = run(claim, budget=budget)  # the optional models are not here: not asked for
    assert outcome.error is None and outcome.verdict == claim.expected
    assert [m.name for m in outcome.mutants if m.refuted is not True] == [] and len(outcome.mutants) >= 2
    assert outcome.as_expected and not outcome.not_run
    observed = statements(outcome)
    if claim is AS_PRINTED:
        assert set(observed.values()) == {3} and len(observed) == 8
        first = next(e for e in outcome.evidence if e.role == "statement")
        assert first.note.startswith("w12 (12) = w50 (50); w7 (7) = w31 (31) = w40 (40). ")
    else:
        assert set(observed.values()) == {TOKENS - 3, 0}


def test_where_all_tokens_differ_the_printed_statement_holds(vocabulary):
    vocabulary()
    outcome = run(AS_PRINTED)
    assert outcome.verdict is Verdict.HOLDS and not outcome.as_expected
    assert run(CORRECTED).as_expected


def test_projections_that_lose_a_token_break_the_corrected_one(vocabulary):
    def blind(arrays):
        table = arrays["model.embed_tokens.weight"]
        table[9] = table[3]
        table[9, 0], table[9, 1] = table[3, 1], table[3, 0]  # the same norm
        for part in "kv":
            arrays[f"model.layers.0.self_attn.{part}_proj.weight"][:, :2] = 0

    vocabulary(blind)
    outcome = run(CORRECTED)
    assert outcome.verdict is Verdict.FAILS and not outcome.as_expected
    assert statements(outcome)["distinct (K, V) rows = distinct embeddings: float32"] == TOKENS - 1


def test_tokens_that_only_few_bits_confuse_are_measured(vocabulary):
    def near(arrays):
        table = arrays["model.embed_tokens.weight"]
        table[9] = table[3] * (1 + 1e-4 * np.random.default_rng(1).normal(size=WIDTH))

    vocabulary(near)
    observed = statements(run(AS_PRINTED))
    what = "tokens less distinct (K, V) rows in the vocabulary, 0 if no two tokens share theirs"
    assert observed[f"{what}: float32"] == 0
    assert observed[f"{what}: codes of 1 bit, uniform for each channel"] == 1
    assert run(CORRECTED).as_expected


@pytest.mark.parametrize("claim", [AS_PRINTED, CORRECTED], ids=lambda claim: claim.id)
def test_absent_weights_are_not_run_and_nothing_is_downloaded(claim, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a program was started"))
    outcome = run(claim)
    assert outcome.verdict is Verdict.NOT_RUN and outcome.as_expected
    assert {m.refuted for m in outcome.mutants} == {None}
    (missing,) = outcome.not_run
    assert "SmolLM2" in missing.missing and "kvtheory models fetch smol" in missing.how
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "role, wrong",
    [
        ("collisions", lambda true: lambda rows: true(rows[:, ::2])),
        ("collisions", lambda true: lambda rows: true(np.arange(len(rows))[:, None])),
        ("key_value_rows", lambda true: lambda first: true(first)[:, ::-1]),
        ("stored", lambda true: lambda rows, bits: true(rows, "float16" if bits == "float32" else bits)),
    ],
)
def test_a_wrong_function_in_kvtheory_turns_the_verdict(vocabulary, monkeypatch, role, wrong):
    vocabulary(twins)
    monkeypatch.setattr(layer_zero, role, wrong(getattr(layer_zero, role)))
    outcomes = [run(claim) for claim in (AS_PRINTED, CORRECTED)]
    assert not any(outcome.verdict == outcome.claim.expected for outcome in outcomes)


@pytest.mark.real
def test_smol():
    """SmolLM2-135M: 15 of 49,152 tokens share 4 embeddings, and nothing else collides down to 8 bits."""
    layer_zero.weights_folder("smol")
    printed, corrected = run(AS_PRINTED), run(CORRECTED)
    assert printed.as_expected and corrected.as_expected
    lost = list(statements(printed).values())
    assert lost[:4] == [11, 11, 11, 11]  # float32, float16, bfloat16, 8 bits
    assert lost[4:] == [14, 14, 15, 15]  # 4, 3, 2, 1 bits: the other untrained tokens join them, no trained ones
    assert statements(corrected)["distinct (K, V) rows = distinct embeddings: float32"] == 49_141
