"""The kept worst instances again, and hypothesis looking for worse ones."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from tests.adversary.inequalities import INEQUALITIES
from tests.adversary.search import REACH, WORST

KEPT = json.loads(WORST.read_text(encoding="utf-8"))


def test_every_inequality_has_its_instance_and_all_are_small():
    assert list(sorted(KEPT)) == sorted(INEQUALITIES)
    assert WORST.stat().st_size < 200_000


@pytest.mark.parametrize("name", INEQUALITIES)
def test_the_worst_instance_reaches_its_ratio_and_no_more_than_one(name):
    ratio = INEQUALITIES[name].library(np.array(KEPT[name]["instance"]))
    assert ratio == pytest.approx(KEPT[name]["ratio"], rel=INEQUALITIES[name].room)
    assert ratio <= 1 + INEQUALITIES[name].room


@pytest.mark.parametrize("name", INEQUALITIES)
@settings(max_examples=25)
@given(data=st.data())
def test_hypothesis_finds_nothing_above_one(name, data):
    inequality = INEQUALITIES[name]
    number = st.floats(-REACH / 4, REACH / 4, allow_subnormal=False)
    point = np.round(data.draw(st.lists(number, min_size=inequality.size, max_size=inequality.size)), 3)
    spread = np.linspace(-1, 1, inequality.size) ** 3  # no instance with all values alike, where both sides are 0
    with np.errstate(all="ignore"):
        ratio = inequality.library(point + spread)
    if np.isfinite(ratio):
        target(ratio)
        assert ratio <= 1 + inequality.room
