"""Rewards of groups to advantages: (reward - mean) / std, each taken over nothing, the group, or the batch.

GRPO (arXiv 2402.03300, section 4.1.2) is `mean="group", std="group"`; Dr. GRPO (arXiv 2503.20783) leaves the
division out; Lite PPO (arXiv 2508.08221) is `mean="group", std="batch"`. The GRPO paper does not say which
standard deviation it means. This is the unbiased one (n - 1), as in the published implementations, so
learning rates carry over from them.

NumPy only: the controller runs this, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roll.types import FloatArray

__all__ = ["EPSILON", "Scope", "group_advantages", "has_zero_variance"]

Scope: TypeAlias = Literal["none", "group", "batch"]

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def has_zero_variance(rewards: FloatArray) -> bool:
    """Whether all rewards of a group [G] are equal, which says nothing about any rollout."""
    return len(rewards) == 0 or bool(np.max(rewards) == np.min(rewards))


def _spread(values: NDArray[np.float64]) -> float:
    """Unbiased standard deviation; exactly 0 where all values are equal, whatever rounding says."""
    return 0.0 if len(values) < 2 or np.ptp(values) == 0 else float(np.std(values, ddof=1))


def _centre(values: NDArray[np.float64]) -> float:
    """Mean; exactly the common value where all values are equal."""
    return float(values[0]) if np.ptp(values) == 0 else float(np.mean(values))


def group_advantages(
    rewards: Sequence[FloatArray], *, mean: Scope = "group", std: Scope = "group", epsilon: float = EPSILON
) -> list[FloatArray]:
    """Advantages of a batch of groups, in the shapes of `rewards`.

    Args:
        rewards: by group, [G] values; groups may differ in size and hold what was scored (nothing that
            failed). The batch scopes count every value given here, so pass groups before filtering them.
        mean: what is subtracted.
        std: what the difference is divided by, plus `epsilon`. Where all values in scope are equal there is
            no spread to divide by, and the difference stays as it is (a group minus its own mean is then
            exactly 0).
        epsilon: keeps tiny spreads from blowing up.

    Raises:
        ValueError: a reward is not finite.
    """
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    everything = np.concatenate(groups) if groups else np.zeros(0)
    if not np.isfinite(everything).all():
        raise ValueError(f"rewards must be finite, got {everything[~np.isfinite(everything)][:3].tolist()}")
    result: list[FloatArray] = []
    for group in groups:
        if not len(group):
            result.append(np.zeros(0, dtype=np.float32))
            continue
        scopes = {"group": group, "batch": everything}
        advantage = group if mean == "none" else group - _centre(scopes[mean])
        spread = 0.0 if std == "none" else _spread(scopes[std])
        result.append((advantage / (spread + epsilon) if spread else advantage).astype(np.float32))
    return result
