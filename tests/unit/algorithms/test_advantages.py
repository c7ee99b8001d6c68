"""Advantages by hand. All settings: `test_advantage_parts`."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from roll.algorithms.advantages import estimate_advantages
from roll.algorithms.episodes import Episode
from roll.algorithms.normalization import EPSILON, Baseline, NormalizationScope, has_zero_variance, normalize_rewards

rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8)
groups = st.lists(rewards, min_size=1, max_size=5)


def outcomes(
    values: list[list[float]], mean: Baseline = "group", std: NormalizationScope = "group", **fields: list[float]
) -> list[list[float]]:
    """Normalised rewards of groups."""
    episodes = [
        Episode(group=g, reward=r, num_tokens=int(fields.get("lengths", [1] * 9)[i]), greedy_reward=0.25)
        for g, group in enumerate(values)
        for i, r in enumerate(group)
    ]
    found, _ = normalize_rewards(
        episodes, np.array([r for group in values for r in group], np.float64), mean=mean, std=std
    )
    result, start = [], 0
    for group in values:
        result.append(found[start : start + len(group)].tolist())
        start += len(group)
    return result


def test_advantage_grpo_subtracts_the_groups_mean_and_divides_by_its_unbiased_standard_deviation() -> None:
    # mean 1/2, squared differences 4 x 1/4, divided by 3: std 0.57735
    (found,) = outcomes([[1, 0, 0, 1]])
    assert found == pytest.approx([0.866025, -0.866025, -0.866025, 0.866025], rel=1e-5)


def test_advantage_dr_grpo_leaves_the_division_out() -> None:
    assert outcomes([[1, 0, 0, 0]], std="none") == [[0.75, -0.25, -0.25, -0.25]]


def test_advantage_batch_scopes_count_every_reward() -> None:
    # mean 3, squared differences 9 + 1 + 1 + 9 = 20, divided by 3: std 2.58199
    found = outcomes([[0, 2], [4, 6]], mean="batch", std="batch")
    np.testing.assert_allclose(np.concatenate(found), np.array([-3, -1, 1, 3]) / 2.581989, rtol=1e-5)


def test_advantage_group_mean_with_batch_std() -> None:
    found = outcomes([[0, 2], [4, 6]], std="batch")
    np.testing.assert_allclose(np.concatenate(found), np.array([-1, 1, -1, 1]) / 2.581989, rtol=1e-5)


def test_advantage_none_and_none_is_the_reward_itself() -> None:
    assert outcomes([[3, -1]], mean="none", std="none") == [[3, -1]]


def test_advantage_baselines_of_a_groups_own() -> None:
    assert outcomes([[3, 1, 2]], mean="leave_one_out", std="none") == [[1.5, -1.5, 0.0]]
    # lengths 1, 3: (1 x 4 + 3 x 0) / 4 = 1
    assert outcomes([[4, 0]], mean="length_weighted", std="none", lengths=[1, 3]) == [[3.0, -1.0]]
    assert outcomes([[1, 0]], mean="greedy", std="none") == [[0.75, -0.25]]


def test_advantage_epsilon_is_added_to_the_standard_deviation() -> None:
    (found,) = outcomes([[0, 2e-6]])  # std 1.414e-6
    assert found == pytest.approx((np.array([-1, 1]) / (np.sqrt(2) + EPSILON / 1e-6)).tolist(), rel=1e-4)


def test_advantage_equal_rewards_give_exactly_zero_also_where_their_mean_is_rounded() -> None:
    assert outcomes([[0.1] * 7]) == [[0.0] * 7]


def test_advantage_without_spread_nothing_is_divided() -> None:
    assert outcomes([[2, 2]], mean="none") == [[2, 2]]
    assert outcomes([[5]], mean="none", std="batch") == [[5]]
    assert outcomes([[5]]) == [[0]]


def test_advantage_groups_of_different_size_and_empty_ones() -> None:
    assert outcomes([[1, 3], [], [7]], std="none") == [[-1, 1], [], [0]]
    assert outcomes([]) == []


def test_advantage_zero_variance() -> None:
    assert has_zero_variance([0.1, 0.1, 0.1])
    assert not has_zero_variance([0.1, 0.1, 0.2])
    assert has_zero_variance([3.0])
    assert has_zero_variance([])


def test_advantage_generalised_advantages_by_hand() -> None:
    episode = Episode(group=0, reward=1.0, num_tokens=3, values=np.array([0.5, 0.2, 0.6], np.float32))
    (found,) = estimate_advantages([episode], np.array([1.0]), estimator="gae", gamma=0.5, gae_lambda=0.5).advantages
    # deltas 0.5 x 0.2 - 0.5 = -0.4, 0.5 x 0.6 - 0.2 = 0.1, 1 - 0.6 = 0.4; A = 0.4, 0.1 + 0.1, -0.4 + 0.25 x 0.2
    assert found.tolist() == pytest.approx([-0.35, 0.2, 0.4])


def test_advantage_turn_returns_by_hand_and_nothing_for_the_environment() -> None:
    episode = Episode(group=0, reward=0.0, num_tokens=5, turns=((0, 2), (3, 5)), turn_rewards=(1.0, 0.0))
    (found,) = estimate_advantages([episode], np.array([2.0]), estimator="turn", gamma=0.5).advantages
    assert found.tolist() == [2.0, 2.0, 0.0, 2.0, 2.0]  # 1 + 0.5 x 2, and 2


@given(groups)
def test_advantage_group_advantages_have_mean_zero_and_keep_order(values: list[list[float]]) -> None:
    for group, found in zip(values, outcomes(values), strict=True):
        assert abs(np.mean(found)) < 1e-9 * max(1.0, float(np.abs(found).max()))
        order = np.argsort(group, kind="stable")
        assert (np.diff(np.array(found)[order]) >= 0).all()
        assert not any(found) or not has_zero_variance(group)


@given(groups, st.floats(-50, 50))
def test_advantage_shifting_all_rewards_changes_nothing_with_a_group_mean(
    values: list[list[float]], shift: float
) -> None:
    moved = [[r + shift for r in group] for group in values]
    for a, b, group in zip(outcomes(values), outcomes(moved), values, strict=True):
        if np.ptp(group) > 1e-6:
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_advantage_importing_them_does_not_import_torch() -> None:
    code = "import sys, roll.algorithms.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_advantage_the_last_chunk_has_the_whole_value_and_each_before_it_gamma_times_the_next() -> None:
    episode = Episode(group=0, reward=2, num_tokens=6, turns=((0, 1), (2, 4), (5, 6)))
    (found,) = estimate_advantages([episode], np.array([2.0]), estimator="chunk", gamma=0.5).advantages
    assert found.tolist() == [0.5, 0, 1, 1, 0, 2]


@pytest.mark.parametrize("std", ["group", "batch", "running"])
@pytest.mark.parametrize("estimator", ["turn", "token", "gae", "outcome"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_advantages_without_a_mean_are_not_divided_by_the_rounding_of_equal_rewards(
    estimator: Any, std: Any, scale: float
) -> None:
    """What is left of two rewards when those of their turns are taken off is 1 for both, but for the last bit."""
    rewards = scale * np.array([1.0, np.nextafter(1.0, 2.0)])
    turns, nothing = ((0, 1), (1, 2), (2, 3)), np.zeros(3, np.float32)
    by_turn = [(0.1 * scale, 0.2 * scale, 0.0), (0.0, 0.0, 0.0)]
    episodes = [
        Episode(group=0, reward=reward, num_tokens=3, turns=turns, turn_rewards=own, values=nothing)
        for reward, own in zip(rewards.tolist(), by_turn, strict=True)
    ]
    outcomes, _ = normalize_rewards(episodes, rewards, mean="none", std=std)
    np.testing.assert_allclose(outcomes, rewards, rtol=1e-12)
    found = estimate_advantages(episodes, outcomes, estimator=estimator, gae_lambda=1.0).advantages
    last = [advantages[-1] for advantages in found]
    np.testing.assert_allclose(last, rewards, rtol=1e-6)


@given(st.floats(1e-9, 1e3), st.floats(-1e3, 1e3))
def test_advantages_of_rewards_that_differ_by_more_than_rounding_are_divided(spread: float, around: float) -> None:
    episodes = [Episode(group=0, reward=around + x, num_tokens=1) for x in (0.0, spread)]
    rewards = np.array([e.reward for e in episodes])
    assume(np.ptp(rewards) > 1e-11 * np.abs(rewards).max())
    outcomes, _ = normalize_rewards(episodes, rewards, mean="none", std="group")
    np.testing.assert_allclose(outcomes, rewards / (np.ptp(rewards) / math.sqrt(2) + 1e-6), rtol=1e-9)
