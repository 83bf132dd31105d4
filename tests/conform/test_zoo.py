"""Each property finds the codec that was made to break it; sound codecs, and ours, break none."""

from pathlib import Path

import pytest

from proofs_checks.conform import PROPERTIES, Subject, run
from tests.conform.zoo import FAULTS

ZOO = str(Path(__file__).with_name("zoo.py"))


def asked(name, *only, arguments=None, **options):
    subject = Subject(f"{ZOO}:{name}", arguments or {}, timeout=options.pop("timeout", 30), memory=16)
    return run(subject, only=only, examples=options.pop("examples", 25), seconds=10, **options)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_its_property(fault):
    name, wanted = FAULTS[fault]
    report = asked(name, wanted, timeout=4 if name == "Hangs" else 30)
    (finding,) = report.findings
    assert (finding.name, finding.verdict) == (wanted, "fails"), finding
    assert finding.seen and not report.conforms


def test_every_property_has_a_codec_that_breaks_it():
    assert {wanted for _, wanted in FAULTS.values()} == set(PROPERTIES)


@pytest.mark.parametrize("name", ["Sound", "SoundBytes", "Pair", "Sketch"])
def test_sound_codecs_conform(name):
    bits = 2 if name == "Sketch" else None
    report = asked(name, bits=3.0 if bits else None)
    failed = [f for f in report.findings if f.verdict in ("fails", "not settled")]
    assert not failed and report.conforms and report.count("holds") >= 20


def test_vectors_that_err_together_are_no_collision():
    (finding,) = asked("OneStep", "seed-collision").findings
    assert finding.verdict == "holds", finding
