"""Filters of groups and rollouts, and the early stopping of groups that can no longer pass the filters. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from roll.algorithms.episodes import Float64Array
from roll.algorithms.normalization import has_zero_variance

__all__ = ["KeepRule", "cannot_pass_filter", "find_filter_reason", "select_rollouts", "select_top_variance"]

KeepRule: TypeAlias = Literal["all", "positive", "best", "worst", "extremes"]
BOUND_TOLERANCE = 1e-9
"""Tolerance of the filters' bounds for a group with missing rewards."""


def find_filter_reason(
    rewards: Float64Array,
    *,
    skip_zero_variance: bool = True,
    min_mean: float | None = None,
    max_mean: float | None = None,
    min_std: float | None = None,
) -> str:
    """Return the reason why a filter rejects a group with the rewards [G]; an empty string if all filters accept the
    group.

    The mean and the standard deviation must lie strictly within their bounds.
    """
    if not len(rewards):
        return "the group has no rollout"
    if skip_zero_variance and has_zero_variance(rewards):
        return f"zero variance: every reward is {rewards[0]:g}"
    mean, std = float(np.mean(rewards)), float(np.std(rewards))
    if min_mean is not None and mean <= min_mean:
        return f"mean reward {mean:g} is not above {min_mean:g}"
    if max_mean is not None and mean >= max_mean:
        return f"mean reward {mean:g} is not below {max_mean:g}"
    if min_std is not None and std <= min_std:
        return f"standard deviation {std:g} is not above {min_std:g}"
    return ""


def cannot_pass_filter(
    rewards: Sequence[float],
    num_missing: int,
    reward_range: tuple[float, float],
    *,
    min_mean: float | None = None,
    max_mean: float | None = None,
    min_std: float | None = None,
) -> bool:
    """Return whether the filters will reject a group for all possible values of its missing rewards.

    The mean is largest (smallest) where all missing rewards are highest (lowest). The standard deviation is a convex
    function of the missing rewards, so it is largest where every missing reward is the lowest or the highest possible
    reward; by symmetry, only the number of highest rewards matters.

    Args:
        rewards: The known rewards.
        num_missing: Number of missing rewards; with 0, the result is False and the filters themselves decide.
        reward_range: Lowest and highest possible reward.
        min_mean: Exclusive lower bound of the group's mean reward.
        max_mean: Exclusive upper bound of the group's mean reward.
        min_std: Exclusive lower bound of the standard deviation of the group's rewards.
    """
    if num_missing <= 0:
        return False
    low, high = reward_range
    # The tolerance below keeps rounding from dropping a group here that the filters would keep once it is complete.
    corners = [
        np.array([*rewards, *[high] * k, *[low] * (num_missing - k)], dtype=np.float64) for k in range(num_missing + 1)
    ]
    kept = {"skip_zero_variance": False}
    if min_mean is not None and find_filter_reason(corners[-1], min_mean=min_mean - BOUND_TOLERANCE, **kept):
        return True
    if max_mean is not None and find_filter_reason(corners[0], max_mean=max_mean + BOUND_TOLERANCE, **kept):
        return True
    bound = None if min_std is None else min_std - BOUND_TOLERANCE
    return bound is not None and all(find_filter_reason(corner, min_std=bound, **kept) for corner in corners)


def select_rollouts(rewards: Float64Array, rule: KeepRule, num_rollouts: int) -> list[int]:
    """Return the indices of the rollouts of a group to train on, ascending; ties go to the earlier rollout.

    Args:
        rewards: The rewards of the group, shape [G].
        rule: Which rollouts are kept: `all`; `positive`, those with a reward above 0 (rejection sampling as in RAFT,
            arXiv 2504.11343); `best` or `worst`, the `num_rollouts` best or worst; `extremes`, the `num_rollouts` best
            and `num_rollouts` worst.
        num_rollouts: Number of rollouts for `best`, `worst` and `extremes`.
    """
    if rule == "all":
        return list(range(len(rewards)))
    if rule == "positive":
        return np.flatnonzero(rewards > 0).tolist()
    best = np.argsort(-rewards, kind="stable")[:num_rollouts].tolist()
    worst = np.argsort(rewards, kind="stable")[:num_rollouts].tolist()
    return sorted({"best": set(best), "worst": set(worst), "extremes": {*best, *worst}}[rule])


def select_top_variance(stds: Sequence[float], fraction: float) -> list[int]:
    """Return the indices of the groups with the largest standard deviations, ascending (StarPO-S).

    The number of groups is ceil(fraction x n); ties go to the earlier group.
    """
    num = int(np.ceil(fraction * len(stds) - 1e-9))
    return sorted(np.argsort(-np.asarray(stds, dtype=np.float64), kind="stable")[:num].tolist())
