"""Groups that no outcome can save: known before their last rollout ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.algorithms.filters import reason_to_leave_out

__all__ = ["is_doomed"]

TOLERANCE = 1e-9


def is_doomed(
    rewards: Sequence[float],
    missing: int,
    reward_range: tuple[float, float],
    *,
    min_mean: float | None = None,
    max_mean: float | None = None,
    min_std: float | None = None,
) -> bool:
    """Whether a group fails the same filter, whatever its missing rewards are within the range.

    The mean is largest (smallest) where all missing rewards are highest (lowest). The deviation is a convex function of
    them, so it is largest at a corner of the cube, and by symmetry only the number of highest ones matters.

    Args:
        rewards: those that are known.
        missing: how many are not; with none, the filters themselves decide.
        reward_range: lowest and highest possible reward.
        min_mean: see `reason_to_leave_out`.
        max_mean: see `reason_to_leave_out`.
        min_std: see `reason_to_leave_out`.
    """
    if missing <= 0:
        return False
    low, high = reward_range
    corners = [np.array([*rewards, *[high] * k, *[low] * (missing - k)], dtype=np.float64) for k in range(missing + 1)]
    kept = {"skip_zero_variance": False}
    if min_mean is not None and reason_to_leave_out(corners[-1], min_mean=min_mean - TOLERANCE, **kept):
        return True
    if max_mean is not None and reason_to_leave_out(corners[0], max_mean=max_mean + TOLERANCE, **kept):
        return True
    bound = None if min_std is None else min_std - TOLERANCE
    return bound is not None and all(reason_to_leave_out(corner, min_std=bound, **kept) for corner in corners)
