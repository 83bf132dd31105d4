"""Our own codecs break none of the properties that they are asked for."""

import pytest

from proofs_checks.conform import Subject, run

OURS = {
    "TurboQuant": ("reference:TurboQuant", {"bits": 3}, ["turboquant-mse"]),
    "TurboQuant prod": ("reference:TurboQuant", {"bits": 2, "kind": "prod"}, ["turboquant-prod"]),
    "QJL": ("reference:QJL", {"bits": 1}, ["qjl"]),
    "KIVI": ("reference:KIVI", {"bits": 2}, []),
    "PolarQuant": ("reference:PolarQuant", {}, []),
    "Full": ("reference:Full", {}, ["lossless"]),
}
FITTED = ("AATC", "KVTC", "PALU", "KVQuant", "MetricKLT")
#: what does not turn on sizes, which a fitted codec is fitted to anew, a fit each
FEW = ("nan", "inf", "one-token", "dtype", "hostile-bytes", "fresh-decoder", "held-bits", "rate-bound", "input")


def sound(report, most):
    failed = [f for f in report.findings if f.verdict in ("fails", "not settled")]
    assert not failed, failed
    assert report.conforms and report.count("holds") >= most


@pytest.mark.parametrize("name", OURS)
def test_data_oblivious_codecs_conform(name):
    spec, arguments, claims = OURS[name]
    sound(run(Subject(spec, arguments), claims=claims, examples=12, seconds=8), 19)


@pytest.mark.parametrize("name", FITTED)
def test_fitted_codecs_conform(name):
    sound(run(Subject(f"reference:{name}", {"bits": 3}, fit=True), only=FEW, examples=8, seconds=8), 8)
