"""Reward normalization and advantage whitening, over a group, the batch, or the run. NumPy only.

The GRPO paper does not specify which standard deviation it uses. The scopes `group` and `batch` use the unbiased
standard deviation (n - 1), like published implementations, so that published learning rates can be used. Whitening uses
the population standard deviation, like GEM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from roll.algorithms.episodes import Episode, Float64Array, concatenate

__all__ = [
    "EPSILON",
    "WHITENING_EPSILON",
    "Baseline",
    "Moments",
    "NormalizationScope",
    "group_indices_by_key",
    "has_zero_variance",
    "normalize_rewards",
    "standardize_by_group",
    "whiten_values",
]

NormalizationScope: TypeAlias = Literal["none", "group", "batch", "running"]
Baseline: TypeAlias = Literal["none", "group", "batch", "running", "leave_one_out", "length_weighted", "greedy"]

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

ROUNDING_TOLERANCE = 1e-12
"""A standard deviation below this fraction of the rewards' magnitude is treated as a rounding error, and so as 0."""

WHITENING_EPSILON = 1e-8
"""Added to a variance, as the published implementations of PPO and REINFORCE++ do."""


def has_zero_variance(rewards: Sequence[float] | Float64Array) -> bool:
    """Return whether all rewards of a group [G] are equal, so that the group gives no learning signal."""
    return len(rewards) == 0 or bool(np.max(rewards) == np.min(rewards))


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream of values (Welford 1962, merged as in Chan 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add_values(self, values: Float64Array) -> Moments:
        """Return the moments of both the earlier and the new values."""
        if not len(values):
            return self
        count = self.count + len(values)
        mean = float(np.mean(values))
        # Merge of two sets (Chan 1979): M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / n, without the cancellation of
        # sum(x^2) - n mean^2.
        shift = mean - self.mean
        squares = float(np.square(values - mean).sum()) + shift**2 * self.count * len(values) / count
        return Moments(count, self.mean + shift * len(values) / count, self.squares + squares)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0

    def to_json(self) -> list[float]:
        """Return the moments as a list of numbers."""
        return [self.count, self.mean, self.squares]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Moments:
        """Build the moments from the list that `to_json` returned."""
        return cls(int(value[0]), float(value[1]), float(value[2]))


def _compute_center(values: Float64Array) -> float:
    """Return the mean, without a rounding error if all values are equal."""
    return float(values[0]) if np.ptp(values) == 0 else float(np.mean(values))


def _compute_spread(values: Float64Array) -> float:
    """Return the unbiased standard deviation; exactly 0 if all values are equal."""
    return 0.0 if len(values) < 2 or np.ptp(values) == 0 else float(np.std(values, ddof=1))


def normalize_rewards(
    episodes: Sequence[Episode],
    rewards: Float64Array,
    *,
    mean: Baseline,
    std: NormalizationScope,
    per_domain: bool = True,
    running: Mapping[str, Moments] | None = None,
    epsilon: float = EPSILON,
) -> tuple[Float64Array, dict[str, Moments]]:
    """Compute (reward - mean) / (std + epsilon) of every episode, shape [n].

    If all values in the scope of `std` are equal up to rounding, reward - mean is not divided. Rewards from which turn
    rewards were subtracted are rarely bitwise equal, so the comparison has a tolerance.

    Args:
        episodes: All scored episodes, including those that filters will remove.
        rewards: Reward of each episode, shape [n].
        mean: The baseline. `leave_one_out`: mean of the group's other rollouts (RLOO, arXiv 2402.14740 eq. 8); in a
            group of one, the reward itself. `length_weighted`: sum of length x reward over sum of lengths in the group
            (OPO, arXiv 2505.23585 eq. 5). `greedy`: `Episode.greedy_reward` (ReMax, arXiv 2310.10505).
        std: The scope of the standard deviation to divide by.
        per_domain: Whether the batch and running scopes are per domain.
        running: Moments of earlier batches, by domain; this batch is added before the moments are used.
        epsilon: Added to the standard deviation, so that the result stays bounded.

    Returns:
        Normalized rewards, and the moments including this batch.

    Raises:
        ValueError: A reward is not finite, or a greedy reward is missing.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~np.isfinite(rewards)][:3].tolist()}")
    domains = [episode.domain if per_domain else "" for episode in episodes]
    moments = dict(running or {})
    by_domain, by_group = group_indices_by_key(domains), group_indices_by_key([episode.group for episode in episodes])
    sizes = np.array([_compute_magnitude(e, r) for e, r in zip(episodes, rewards, strict=True)], dtype=np.float64)
    # This batch is added before the moments are used: in the first step there is nothing else to normalize with.
    for domain, index in by_domain.items():
        moments[domain] = moments.get(domain, Moments()).add_values(rewards[index])
    result = rewards.astype(np.float64, copy=True)
    for group, index in by_group.items():
        own, domain = rewards[index], domains[index[0]]
        scopes = {"group": own, "batch": rewards[by_domain[domain]]}
        if mean in scopes:
            result[index] -= _compute_center(scopes[mean])
        elif mean == "running":
            result[index] -= moments[domain].mean
        elif mean != "none":
            result[index] -= _compute_group_baseline(mean, [episodes[i] for i in index], own, group)
        if std != "none":
            # The standard deviation is that of the rewards, not of the centered values, so the baseline can have a
            # different scope.
            spread = moments[domain].std if std == "running" else _compute_spread(scopes[std])
            # Rewards that differ only by rounding must not be divided by the rounding error: it would become a signal
            # of size 1.
            size = sizes[index if std == "group" else by_domain[domain]].max()
            result[index] /= spread + epsilon if spread > ROUNDING_TOLERANCE * size else 1.0
    return result, moments


def _compute_magnitude(episode: Episode, reward: float) -> float:
    """Return the sum of the absolute values of a reward and its turn rewards, to bound rounding errors."""
    return abs(float(reward)) + sum(abs(turn) for turn in episode.turn_rewards)


def standardize_by_group(rewards: Float64Array, groups: Sequence[Any]) -> Float64Array:
    """Compute (reward - mean) / (std + epsilon) within each group (GRPO), shape [n].

    The result is 0 for a group in which all rewards are equal.
    """
    result = rewards.copy()
    for index in group_indices_by_key(groups).values():
        own = rewards[index]
        result[index] = (own - _compute_center(own)) / (_compute_spread(own) + EPSILON)
    return result


def group_indices_by_key(keys: Sequence[Any]) -> dict[Any, list[int]]:
    """Group the indices of `keys` by key; the result is in the order in which the keys first occur."""
    found: dict[Any, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        found[key].append(index)
    return found


def _compute_group_baseline(
    mean: str, episodes: Sequence[Episode], rewards: Float64Array, group: Any
) -> Float64Array | float:
    # Equal rewards equal their baseline exactly; computing it could leave a rounding error. A group of one has no
    # others.
    if np.ptp(rewards) == 0 and mean != "greedy":
        return rewards
    if mean == "leave_one_out":
        # RLOO, arXiv 2402.14740 eq. 8.
        return (rewards.sum() - rewards) / (len(rewards) - 1)
    if mean == "length_weighted":
        lengths = np.array([episode.num_policy_tokens for episode in episodes], dtype=np.float64)
        # OPO, arXiv 2505.23585 eq. 5.
        return float((lengths * rewards).sum() / max(lengths.sum(), 1.0))
    greedy = [episode.greedy_reward for episode in episodes]
    if any(value is None for value in greedy):
        raise ValueError(
            f"the baseline 'greedy' requires the reward of a greedy answer, which group {group} does not have"
        )
    return np.array(greedy, dtype=np.float64)


def whiten_values(values: Sequence[Float64Array], epsilon: float = WHITENING_EPSILON) -> list[Float64Array]:
    """Compute (x - mean) / sqrt(variance + epsilon) over all entries of all arrays; a single entry stays unchanged.

    The result has mean 0 and population standard deviation 1, except if the entries differ by less than about 1e-4:
    such differences are noise, and epsilon keeps them small.
    """
    together = concatenate(values)
    if len(together) < 2:
        return [array.copy() for array in values]
    centre = _compute_center(together)
    # The population variance with the epsilon inside the root, as the published implementations of PPO and REINFORCE++.
    spread = float(np.sqrt(np.var(together) + epsilon))
    return [(array - centre) / spread for array in values]
