"""Which groups and rollouts are trained. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from roll.algorithms.episodes import Float64Array
from roll.algorithms.normalise import has_zero_variance

__all__ = ["Keep", "kept_rollouts", "reason_to_leave_out", "top_variance"]

Keep: TypeAlias = Literal["all", "positive", "best", "worst", "extremes"]


def reason_to_leave_out(
    rewards: Float64Array,
    *,
    skip_zero_variance: bool = True,
    min_mean: float | None = None,
    max_mean: float | None = None,
    min_std: float | None = None,
) -> str:
    """Why a group with these rewards [G] is not trained; empty where it is."""
    if not len(rewards):
        return "it has no rollout"
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


def kept_rollouts(rewards: Float64Array, keep: Keep, num: int) -> list[int]:
    """Which rollouts of a group [G] are trained, ascending; of equal rewards the earlier ones.

    `positive` is RAFT's rejection sampling (arXiv 2504.11343): reward above 0. `extremes`: `num` best and `num` worst.
    """
    if keep == "all":
        return list(range(len(rewards)))
    if keep == "positive":
        return np.flatnonzero(rewards > 0).tolist()
    best = np.argsort(-rewards, kind="stable")[:num].tolist()
    worst = np.argsort(rewards, kind="stable")[:num].tolist()
    return sorted({"best": set(best), "worst": set(worst), "extremes": {*best, *worst}}[keep])


def top_variance(stds: Sequence[float], share: float) -> list[int]:
    """Which groups have the largest deviations, ascending: ceil(share x n), of equals the earlier (StarPO-S)."""
    num = int(np.ceil(share * len(stds) - 1e-9))
    return sorted(np.argsort(-np.asarray(stds, dtype=np.float64), kind="stable")[:num].tolist())
