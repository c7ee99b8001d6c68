"""Advantages, by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.advantages import EPSILON, group_advantages, has_zero_variance


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8)
groups = st.lists(rewards.map(lambda values: np.array(values, dtype=np.float32)), min_size=1, max_size=5)


def test_grpo_subtracts_the_groups_mean_and_divides_by_its_unbiased_standard_deviation() -> None:
    (found,) = group_advantages([floats(1, 0, 0, 1)])
    # mean 1/2, squared differences 4 x 1/4, divided by 3: std 0.57735
    np.testing.assert_allclose(found, floats(0.866025, -0.866025, -0.866025, 0.866025), rtol=1e-5)


def test_dr_grpo_leaves_the_division_out() -> None:
    (found,) = group_advantages([floats(1, 0, 0, 0)], std="none")
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_batch_scopes_count_every_reward() -> None:
    found = group_advantages([floats(0, 2), floats(4, 6)], mean="batch", std="batch")
    # mean 3, squared differences 9 + 1 + 1 + 9 = 20, divided by 3: std 2.58199
    np.testing.assert_allclose(np.concatenate(found), floats(-3, -1, 1, 3) / 2.581989, rtol=1e-5)


def test_group_mean_with_batch_std() -> None:
    found = group_advantages([floats(0, 2), floats(4, 6)], mean="group", std="batch")
    np.testing.assert_allclose(np.concatenate(found), floats(-1, 1, -1, 1) / 2.581989, rtol=1e-5)


def test_none_and_none_is_the_reward_itself() -> None:
    assert group_advantages([floats(3, -1)], mean="none", std="none")[0].tolist() == [3, -1]


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    (found,) = group_advantages([floats(0, 2e-6)])  # std 1.414e-6
    np.testing.assert_allclose(found, floats(-1, 1) / (np.sqrt(2) + EPSILON / 1e-6), rtol=1e-4)


def test_equal_rewards_give_exactly_zero_also_where_their_mean_is_rounded() -> None:
    (found,) = group_advantages([np.full(7, 0.1, dtype=np.float32)])
    assert found.tolist() == [0.0] * 7


def test_without_spread_nothing_is_divided() -> None:
    assert group_advantages([floats(2, 2)], mean="none", std="group")[0].tolist() == [2, 2]
    assert group_advantages([floats(5)], mean="none", std="batch")[0].tolist() == [5]
    assert group_advantages([floats(5)])[0].tolist() == [0]


def test_groups_of_different_size_and_empty_ones() -> None:
    found = group_advantages([floats(1, 3), floats(), floats(7)], std="none")
    assert [values.tolist() for values in found] == [[-1, 1], [], [0]]
    assert group_advantages([]) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([floats(0, bad)])


def test_zero_variance() -> None:
    assert has_zero_variance(floats(0.1, 0.1, 0.1))
    assert not has_zero_variance(floats(0.1, 0.1, 0.2))
    assert has_zero_variance(floats(3))
    assert has_zero_variance(floats())


@given(groups)
def test_group_advantages_have_mean_zero_and_keep_order(values: list[np.ndarray]) -> None:
    for group, advantage in zip(values, group_advantages(values), strict=True):
        assert advantage.dtype == np.float32
        assert advantage.shape == group.shape
        assert abs(advantage.astype(np.float64).mean()) < 1e-5 * max(1.0, np.abs(advantage).max())
        order = np.argsort(group, kind="stable")
        assert (np.diff(advantage[order]) >= 0).all()
        assert (not advantage.any()) or not has_zero_variance(group)


@given(groups, st.floats(-50, 50))
def test_shifting_all_rewards_changes_nothing_with_a_group_mean(values: list[np.ndarray], shift: float) -> None:
    doubled = [group.astype(np.float64) for group in values]
    moved = [group + shift for group in doubled]
    for a, b, group in zip(group_advantages(doubled), group_advantages(moved), doubled, strict=True):
        if np.ptp(group) > 1e-6:
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, roll.algorithms.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
