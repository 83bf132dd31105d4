"""A quick part of `make faults`: one moment of each disturbance; and that the instruments see what they are there for."""

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow.parquet")

from functools import partial

from kvtheory import files
from tests.faults import instrument
from tests.faults.commands import Command, commands, to_interrupt
from tests.faults.study import Study, interrupted


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


@pytest.mark.parametrize("name", ["save", "capture", "compare", "verify"])
def test_nothing_half_written_is_taken_for_whole(name, inputs, tmp_path):
    study = Study(commands(inputs)[name], tmp_path)
    study.killed(1)
    if name in ("save", "capture"):
        study.full(1)
        study.unwritable()
    if name in ("save", "verify"):
        study.together(1)


def test_interruption_ends_all_processes_at_once(inputs, tmp_path):
    command, moments, least = to_interrupt(inputs)[1]
    assert command.name == "verify --jobs 2"
    # it has claims for a minute; a busy machine forks slowly
    interrupted(command, tmp_path, moments[:1], least, settled=1.5)


# -- the instruments ---------------------------------------------------------------------------------------------------


def _carelessly(folder):
    (folder / "result.json").write_text("{")
    (folder / "result.json").write_text('{"a": 1}')


def _carefully(folder):
    with files.replacing(folder / "result.json") as scratch:
        scratch.write_text('{"a": 1}')


def _leaving_a_child(folder):
    _carefully(folder)
    if os.fork() == 0:
        import time

        time.sleep(3)
        os._exit(0)
    _carefully(folder)


def test_a_file_written_in_place_is_seen(tmp_path):
    good = Study(Command("carefully", _carefully, _carefully), tmp_path)
    assert good.events == 4 and "4 of 4" in good.killed(9)
    bad = Study(Command("carelessly", _carelessly, _carelessly), tmp_path)
    with pytest.raises(AssertionError, match=r"result\.json"):
        bad.killed(9)
    with pytest.raises(AssertionError, match="Traceback"):
        bad.full(9)


def test_a_process_that_stays_is_seen(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    ended = instrument.run(partial(_leaving_a_child, out), tmp_path / "log", out, "kill", 4)
    assert ended.status == -9 and ended.lingered > 2


def test_a_second_run_is_refused_and_the_lock_goes_with_its_process(tmp_path):
    with (
        files.locked(tmp_path / "new"),
        pytest.raises(ValueError, match=r"another run is at work in .*new"),
        files.locked(tmp_path / "new"),
    ):
        pass
    with files.locked(tmp_path / "new"):
        pass

    def holding(folder):
        with files.locked(folder):
            os.kill(os.getpid(), 9)

    assert instrument.run(partial(holding, tmp_path), tmp_path / "log", tmp_path / "none").status == -9
    with files.locked(tmp_path):
        pass
