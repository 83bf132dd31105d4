"""Ranks at equal held bits: Holm's correction, the paired t of the bootstrap, and who shares a rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from kvtheory.statistics import bootstrap_ratios
from reference.compare.equal_rate import Curve
from reference.compare.ranking import RANKING_COLUMNS, holm, rank, row, write_ranking

SEGMENTS = 8


def curves(errors, draws=20000, seed=1):
    """Curves of two points, at 2 and 4 bits, from errors (codecs, segments) of the first and a quarter of them of the second."""
    errors = np.asarray(errors, dtype=float)
    numerators = np.concatenate([errors, errors / 4])[:, None, :]
    boot = bootstrap_ratios(numerators, np.ones_like(numerators), 0.95, seed=seed, draws=draws)
    logs, replicates = boot.log_estimates / np.log(2), boot.log_replicates / np.log(2)
    n = len(errors)
    return [
        Curve(f"c{i}", "X", {}, [2.0, 4.0], [2, 4], [2.0, 4.0], logs[[i, n + i]], replicates[[i, n + i]])
        for i in range(n)
    ]


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([]).shape == (0,) and holm([0.6, 0.9]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="p: expected probabilities"):
        holm([0.1, 1.1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_the_step_down_rule(p):
    """Rejected at a level: exactly those before the first p_(k) that is above level / (m - k + 1)."""
    corrected = holm(p)
    assert (corrected >= np.asarray(p)).all() and (corrected <= np.minimum(1, len(p) * np.asarray(p)) + 1e-15).all()
    for level in (0.01, 0.05, 0.2):
        left = sorted(p)
        passed = 0
        while passed < len(left) and (len(left) - passed) * left[passed] <= level:
            passed += 1
        assert (corrected <= level).sum() == passed


def test_a_pair_is_the_paired_t_test():
    """Two codecs on the same segments: the bootstrap's t is that of the segments' own differences."""
    rng = np.random.default_rng(0)
    # small relative spread, so that the logarithm of a mean is the mean of logarithms to first order
    common = 1 + 0.05 * rng.standard_normal(SEGMENTS)
    errors = [common, common * (1.02 + 0.01 * rng.standard_normal(SEGMENTS))]
    found = rank(curves(errors), [2.0], "attention", SEGMENTS)
    paired, apart = stats.ttest_rel(*errors), stats.ttest_ind(*errors)
    assert {one.label for one in found} == {"c0", "c1"} and found[0].pairs == 1
    # 20,000 draws know the spread to 1 / sqrt(40,000) = 0.5%; first order in a spread of 5%: the rest
    t = -special.stdtrit(SEGMENTS - 1, found[1].p_best / 2)
    assert t == pytest.approx(abs(paired.statistic), rel=0.05)
    assert abs(apart.statistic) < 0.5 * abs(paired.statistic)  # or the pairing would not show


def test_codecs_that_are_not_told_apart_share_a_rank():
    rng = np.random.default_rng(3)
    common = np.exp(0.3 * rng.standard_normal(SEGMENTS))
    noise = np.exp(0.05 * rng.standard_normal((4, SEGMENTS)))
    own = curves([common * noise[0], 1.001 * common * noise[1], 3 * common * noise[2], 9 * common * noise[3]])
    own.append(Curve("single", "X", {}, [3.0], [3], [3.0], np.array([0.0]), np.zeros((1, own[0].replicates.shape[1]))))
    found = rank(own, [2.0, 3.0, 7.0], "attention", SEGMENTS)
    assert {one.held_bits for one in found} == {2.0, 3.0} and {one.pairs for one in found} == {6 + 10}
    ranks = {one.label: one.rank for one in found if one.held_bits == 2.0}
    assert ranks == {"c0": 1, "c1": 1, "c2": 3, "c3": 4}
    third = next(one for one in found if one.label == "c2" and one.held_bits == 2.0)
    assert set(third.better) == {"c0", "c1"} and third.worse == ("c3",)
    assert "single" in {one.label for one in found if one.held_bits == 3.0}
    for one in found:
        assert one.rank == 1 + len(one.better)


def test_more_pairs_are_a_stricter_test():
    """The same two codecs, told apart alone, are not among twenty copies of the second: the correction counts all pairs."""
    rng = np.random.default_rng(5)
    common = np.exp(0.2 * rng.standard_normal(SEGMENTS))
    other = common * np.exp(0.05 + 0.04 * rng.standard_normal(SEGMENTS))
    alone = rank(curves([common, other], 4000), [2.0], "kl", SEGMENTS)
    among = rank(curves([common, *[other] * 20], 4000), [2.0], "kl", SEGMENTS)
    assert alone[1].rank == 2 and alone[1].p_best < 0.05
    assert all(one.rank == 1 for one in among) and among[1].pairs == 210


def test_wrong_betters_are_rare_where_all_codecs_are_equal():
    """The family-wise level: eight equal codecs, 200 draws of the segments, any wrong `better` in at most 5% of the draws.

    A binomial of 200 at 0.05 is above 20 with probability 0.1%.
    """
    rng = np.random.default_rng(7)
    wrong = 0
    for trial in range(200):
        common = np.exp(0.3 * rng.standard_normal(SEGMENTS))
        own = curves(common * np.exp(0.1 * rng.standard_normal((8, SEGMENTS))), draws=400, seed=trial)
        wrong += any(one.better for one in rank(own, [2.0], "attention", SEGMENTS))
    assert wrong <= 20


def test_the_table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    about = {"model": "m", "text": "t", "cache": "c", "prefix": 64, "layers": "1,2"}
    found = rank(curves(np.array([[1.0] * 8, [2.0] * 8])), [2.0], "attention", SEGMENTS)
    assert found[1].p_best == 0.0  # no spread at all
    path = write_ranking(tmp_path, [row(one, about) for one in found])
    table = pyarrow.read_table(path)
    assert table.column_names == list(RANKING_COLUMNS) and table.to_pylist()[1]["better"] == "c0"


@pytest.mark.parametrize(
    ("arguments", "said"), [((SEGMENTS, 1.5), "level"), ((1, 0.95), "segments: expected at least 2")]
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        rank([], [2.0], "attention", *arguments)
