"""The ledger's own machinery: what counts as agreement, how verdicts fall, how mutants fare, what is written."""

import importlib.resources
import json
import math
from fractions import Fraction

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory.distortion
from kvtheory.statistics import Interval
from proofs_checks import ledger as ledgers
from proofs_checks import mutants as systematic
from proofs_checks import report, terminal
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.context import FAMILY_LEVEL, Context
from proofs_checks.evidence import certified, exact, numerical, search, statistical
from proofs_checks.run import run_all, run_claim
from tests.proofs_checks import toy

COMMON = {"what": "a thing", "ran_on": "a place"}


def interval(low, high):
    return Interval((low + high) / 2, low, high, 0.99)


class TestEvidence:
    @given(st.fractions(), st.fractions())
    def test_exact_is_the_relation_itself(self, a, b):
        for relation, truth in (("=", a == b), ("<=", a <= b), (">", a > b), ("!=", a != b)):
            assert exact(observed=a, predicted=b, relation=relation, **COMMON).agrees is truth

    def test_exact_refuses_rounded_floats(self):
        with pytest.raises(TypeError, match="rounded float"):
            exact(observed=0.1, predicted=0.1, **COMMON)
        assert exact(observed=0.5, predicted=Fraction(1, 2), **COMMON).agrees

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(0.97, 1.02, True), (0.5, 1.5, None), (1.2, 1.3, False), (1.04, 1.06, None), (0.8, 0.9, False)],
    )
    def test_a_wide_interval_never_counts_as_agreement(self, low, high, expected):
        assert statistical(interval=interval(low, high), predicted=1.0, margin=0.05, **COMMON).agrees is expected
        negative = statistical(interval=interval(-high, -low), predicted=-1.0, margin=0.05, **COMMON)
        assert negative.agrees is expected

    def test_one_sided_statistics(self):
        for low, high, expected in ((0.2, 0.9, True), (0.9, 1.1, None), (1.1, 1.2, False)):
            assert statistical(interval=interval(low, high), predicted=1.0, relation="<=", **COMMON).agrees is expected
            assert (
                statistical(interval=interval(-high, -low), predicted=-1.0, relation=">=", **COMMON).agrees is expected
            )
        with pytest.raises(ValueError, match="margin above 0"):
            statistical(interval=interval(1, 1), predicted=1.0, **COMMON)

    def test_numerical(self):
        because = {"because": "rounding"}
        assert numerical(observed=1 + 1e-13, predicted=1, tolerance=1e-12, **because, **COMMON).agrees
        assert not numerical(observed=1 + 1e-11, predicted=1, tolerance=1e-12, **because, **COMMON).agrees
        numpy = numerical(observed=np.float64(1), predicted=1, tolerance=np.float64(1e-9), **because, **COMMON)
        assert numpy.agrees is True  # not np.True_, which `judge` would not know
        assert numerical(observed=math.nan, predicted=1, tolerance=1e-12, **because, **COMMON).agrees is None
        assert numerical(observed=1, predicted=math.inf, relation="<=", tolerance=0, **because, **COMMON).agrees is None
        assert not numerical(observed=2.0, predicted=1.0, relation="<=", tolerance=1e-9, **because, **COMMON).agrees

    def test_certified_decides_only_what_the_enclosure_decides(self):
        assert certified(observed=(914455.9, 914456.1), predicted=(914455.5, 914456.5), **COMMON).agrees is True
        assert certified(observed=(914455, 914457), predicted=(914455.5, 914456.5), **COMMON).agrees is None
        assert certified(observed=(3.0, 3.1), predicted=(914455.5, 914456.5), **COMMON).agrees is False
        assert certified(observed=(0.9, 1.1), predicted=1.0, relation="<=", **COMMON).agrees is None
        assert certified(observed=(0.9, 0.99), predicted=1.0, relation="<=", **COMMON).agrees is True
        assert certified(observed=(1.01, 1.1), predicted=1.0, relation="<=", **COMMON).agrees is False
        assert certified(observed=(1.01, 1.1), predicted=1.0, relation=">", **COMMON).agrees is True

    def test_search_says_how_hard_it_tried(self):
        assert (
            "40 tries, Nelder-Mead" in search(worst=0.9, bound=1.0, tries=40, optimiser="Nelder-Mead", **COMMON).ran_on
        )
        assert search(worst=1.1, bound=1.0, tries=1, optimiser="x", **COMMON).agrees is False


class TestVerdict:
    def agree(self, **more):
        return exact(observed=1, predicted=1, **COMMON, **more)

    def disagree(self, **more):
        return exact(observed=1, predicted=2, **COMMON, **more)

    def undecided(self):
        return statistical(interval=interval(0.5, 1.5), predicted=1.0, margin=0.01, **COMMON)

    def test_how_verdicts_fall(self):
        judge = toy.area.judge
        assert judge([self.agree()]) is Verdict.HOLDS
        assert judge([self.agree(), self.disagree()]) is Verdict.FAILS
        assert judge([self.agree(), self.undecided()]) is Verdict.NOT_SETTLED
        assert judge([self.disagree(), self.undecided()]) is Verdict.FAILS
        assert judge([self.agree(), self.disagree(role="control")]) is Verdict.NOT_SETTLED
        assert judge([self.disagree(), self.disagree(role="control")]) is Verdict.NOT_SETTLED
        assert judge([self.agree(), self.disagree(role="assumption")]) is Verdict.HOLDS
        assert judge([]) is Verdict.NOT_SETTLED
        assert judge([self.agree(role="control")]) is Verdict.NOT_SETTLED

    def test_a_claim_that_could_not_fail_is_refused(self):
        options = {
            "id": "x/y", "paper": "p", "section": "s", "statement": "t", "formula": "f", "expected": Verdict.HOLDS,
            "functions": {"f": "math.sqrt"},
        }  # fmt: skip
        one = Mutant("a", "f", lambda t: t)
        with pytest.raises(ValueError, match="at least two mutants"):
            claim(**options, mutants=[one])(lambda context, f: iter(()))
        with pytest.raises(ValueError, match="replaces 'g', expected one of f"):
            claim(**options, mutants=[one, Mutant("b", "g", lambda t: t)])(lambda context, f: iter(()))


class TestRun:
    def test_mutants_are_refuted_and_the_harmless_one_survives(self):
        outcome = run_claim(toy.area, Context())
        assert outcome.verdict is Verdict.HOLDS
        assert [m.refuted for m in outcome.mutants] == [True, True, False]
        assert not outcome.as_expected
        assert outcome.pictures[0].data == {"x": [1, 2.5]}

    def test_the_true_function_is_looked_up_when_the_check_runs(self, monkeypatch):
        true = kvtheory.distortion.value_term
        monkeypatch.setattr(kvtheory.distortion, "value_term", lambda *a, **k: 3 * true(*a, **k))
        assert run_claim(toy.area, Context()).verdict is Verdict.FAILS

    def test_not_run_never_counts_and_never_hides(self):
        outcome = run_claim(toy.absent, Context())
        assert outcome.verdict is Verdict.NOT_RUN and outcome.as_expected
        assert all(m.refuted is None for m in outcome.mutants)
        record = ledgers.claim_record(outcome)
        assert ledgers.order_for_reading([ledgers.claim_record(run_claim(toy.area, Context())), record])[0] is record
        assert any("not run" in line and "a real model" in line for line in terminal.problems([record]))

    def test_a_crash_is_an_error_that_does_not_stop_the_run(self):
        seen = []
        run_all([toy.crash, toy.absent], Context(), lambda *_: None, seen.append)
        assert seen[0].verdict is Verdict.NOT_SETTLED and "boom" in seen[0].error and not seen[0].as_expected
        assert len(seen) == 2

    def test_a_mutant_that_crashes_is_not_refuted_by_evidence(self):
        def wrong(true):
            raise KeyError("shape")

        mutant = Mutant("crashes", "value_term", wrong)
        from proofs_checks.run import run_mutant

        outcome = run_mutant(toy.area, Context(), mutant)
        assert outcome.refuted is False and "crashed: KeyError" in outcome.by

    def test_forked_workers_give_the_same(self):
        alone, forked = [], []
        for jobs, seen in ((1, alone), (2, forked)):
            run_all([toy.area, toy.absent], Context(), lambda *_: None, seen.append, jobs=jobs)
        for a, b in zip(alone, forked, strict=True):
            one, other = ledgers.claim_record(a), ledgers.claim_record(b)
            one.pop("seconds"), other.pop("seconds")
            assert one == other


class TestSystematic:
    def value(self, mutant, function, *args, **kwargs):
        return mutant.wrong(function)(*args, **kwargs)

    def test_outputs(self):
        f = lambda q, k: float((q * k).sum())  # noqa: E731
        q = np.arange(4.0)
        twice, half = systematic.scales("f")
        assert self.value(twice, f, q, q) == 28 and self.value(half, f, q, k=q) == 7
        d, root = systematic.dimension("f", lambda arguments: arguments["q"].shape[-1])
        assert self.value(d, f, q, q) == 56 and self.value(root, f, q, q) == 28
        assert self.value(systematic.square_dropped("f")[0], f, q, q) == math.sqrt(14)
        assert self.value(systematic.natural_log("f")[0], f, q, q) == pytest.approx(14 * math.log(2))
        assert self.value(twice, lambda: (Fraction(1, 3), np.ones(2)))[0] == Fraction(2, 3)

    def test_fields_of_records(self):
        mutant = systematic.scales("f", fields=("low",))[0]
        changed = self.value(mutant, lambda: Interval(1.0, 2.0, 3.0, 0.5))
        assert changed == Interval(1.0, 4.0, 3.0, 0.5) and "low" in mutant.name

    def test_inputs(self):
        matrix = np.arange(6.0).reshape(2, 3)
        f = lambda k, v, w_o=matrix: (k - v, w_o)  # noqa: E731
        difference, w = self.value(systematic.swapped("f", "k", "v")[0], f, 5, 2)
        assert difference == -3
        _, w = self.value(systematic.transposed("f", "w_o")[0], f, 5, 2)
        assert w.shape == (2, 3) and w.tolist() == [[0, 3, 1], [4, 2, 5]]

    def test_heads_by_modulo(self):
        queries = np.arange(4.0).reshape(4, 1, 1)
        f = lambda queries, keys: queries[:, 0, 0].tolist()  # noqa: E731
        # KV head 0 is read by positions 0 and 1: by modulo those are heads 0 and 2
        assert self.value(systematic.heads_by_modulo("f")[0], f, queries, np.zeros((2, 1, 1))) == [0, 2, 1, 3]


class TestLedger:
    def run(self, out, **options):
        context = Context(claims=3)
        store = ledgers.Store(out, context, **({"resume": False} | options))
        run_all([toy.area, toy.absent], context, lambda *_: None, store.add)
        return store.finish([toy.area, toy.absent], 3)

    def test_file_matches_its_schema_and_says_what_happened(self, tmp_path):
        ledger = self.run(tmp_path)
        schema = json.loads(importlib.resources.files("proofs_checks").joinpath("ledger.schema.json").read_text())
        saved = json.loads((tmp_path / "ledger.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(saved)
        assert saved == json.loads(json.dumps(ledger))
        assert not ledgers.succeeded(ledger)
        data = json.loads((tmp_path / "data" / "toy" / "toy--area.json").read_text())
        assert data["data"] == {"x": [1, 2.5]} and data["run"] == saved["run"]
        broken = json.loads(json.dumps(saved))
        broken["claims"][0]["verdict"] = "true"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate(broken)

    def test_resume_only_under_the_same_sources_and_options(self, tmp_path, monkeypatch):
        self.run(tmp_path)
        again = ledgers.Store(tmp_path, Context(claims=3), resume=True)
        assert set(again.records) == {"toy/area", "toy/absent"}
        with pytest.raises(ValueError, match="seed changed since that run"):
            ledgers.Store(tmp_path, Context(seed=1, claims=3), resume=True)
        monkeypatch.setattr(ledgers, "source_digest", lambda: "0" * 64)
        with pytest.raises(ValueError, match="sources changed since that run"):
            ledgers.Store(tmp_path, Context(claims=3), resume=True)
        with pytest.raises(ValueError, match="no interrupted run there"):
            ledgers.Store(tmp_path / "new", Context(), resume=True)
        assert ledgers.Store(tmp_path, Context(), resume=False).records == {} and not list(
            tmp_path.glob("claims/*.json")
        )

    def test_report_is_self_contained_and_names_what_is_wrong(self, tmp_path):
        ledger = self.run(tmp_path)
        picture = tmp_path / "toy.svg"
        picture.write_text('<?xml version="1.0"?><svg><g id="a"/><use href="#a"/></svg>')
        report.write(tmp_path / "index.html", ledger, {"toy": (picture, "A caption & more.")})
        page = (tmp_path / "index.html").read_text()
        for text in (
            "Not run",
            "a real model",
            "never wrong",
            "survives",
            "A caption &amp; more.",
            'id="toy-a"',
            'href="#toy-a"',
        ):
            assert text in page
        # one script of its own, forbidden every request; tests/report has it in a browser
        assert "script src" not in page and "default-src 'none'" in page and '<link rel="icon" href="data:,">' in page
        lines = terminal.problems(ledger["claims"])
        assert any("survives" in line and "never wrong" in line for line in lines)
        assert "1 not as expected" in terminal.count_line(ledger)

    def test_the_report_groups_what_is_alike_and_shows_what_disagrees(self):
        def row(what, agrees, role="statement"):
            return {"what": what, "agrees": agrees, "role": role, "kind": "exact", "relation": "="}

        alike = [row("a", True) for _ in range(6)]
        first, rest, more = report.grouped([*alike, row("b", True), row("c", False), row("a", None)])
        shown = [e for group in first for e in group]
        assert [e["agrees"] for e in shown[:2]] == [False, None] or [e["what"] for e in shown[:1]] == ["c"]
        assert {e["agrees"] for e in shown} == {True, False, None} and more == 4 == sum(map(len, rest))
        assert report.relation(row("c", False)) == "not =" and report.relation(row("a", True)) == "="
        many = [row(str(i), True) for i in range(30)] + [row("bad", False)] * 3
        first, rest, more = report.grouped(many)
        assert sum(map(len, first)) + more == 33 and sum(e["agrees"] is False for g in first for e in g) == 3

    def test_figures_that_differ_are_shown_to_differ(self):
        evidence = {"observed": 0.360034, "predicted": 0.36, "agrees": False}
        assert terminal.pair(evidence) == ("0.36003", "0.36")
        assert terminal.pair(evidence | {"agrees": True}) == ("0.36", "0.36")
        assert terminal.number(914455.81) == "914,456" and terminal.number([0.1, 2]) == "[0.1, 2]"
        assert terminal.number(Fraction(5, 8)) == "5/8" and terminal.number(True) == "True"

    def test_plain_values(self):
        assert ledgers.plain({"a": Fraction(1, 3), "b": np.float64(2), "c": (np.arange(2), math.inf), 1: Verdict.HOLDS}) == {
            "a": "1/3", "b": 2.0, "c": [[0, 1], "inf"], "1": "holds",
        }  # fmt: skip


def test_the_family_level_is_divided_among_claims_and_comparisons():
    context = Context(claims=20)
    assert context.alpha(5) == FAMILY_LEVEL / 100
    a, b = Context(claim_id="x"), Context(claim_id="y")
    assert a.rng("p").random() == a.rng("p").random() != b.rng("p").random()
