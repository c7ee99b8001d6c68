"""Rewards, turns and values of a rollout, from which advantages are estimated. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll.types import BoolArray, FloatArray

__all__ = ["MAX_ABS_VALUE", "Episode", "Float64Array", "clamp_value", "compute_turn_rewards", "concatenate"]

Float64Array = NDArray[np.float64]

MAX_ABS_VALUE = 1e9
"""Rewards and values are clamped to ± this, so that their squares and sums do not overflow."""


def clamp_value(value: float) -> float:
    """Clamp a value to ± `MAX_ABS_VALUE`."""
    return min(max(value, -MAX_ABS_VALUE), MAX_ABS_VALUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A scored rollout for advantage estimation; T is the number of tokens after the prompt, K the number of turns."""

    group: int
    """Group id; rollouts of one prompt share it."""
    reward: float
    """Reward of the whole rollout, after shaping; it falls on the last turn."""
    num_tokens: int
    """Number of tokens after the prompt, T."""
    turns: tuple[tuple[int, int], ...] = ()
    """[K] start and end of the policy's tokens in each turn; empty: all T tokens are one turn."""
    turn_rewards: tuple[float, ...] = ()
    """[K] rewards of the environment by turn; empty: all 0."""
    states: tuple[str, ...] = ()
    """[K] state in which each turn began; an empty string is different from every state."""
    domain: str = ""
    token_rewards: FloatArray | None = None
    """[T] additional rewards per token, such as a KL penalty; 0 outside turns."""
    values: FloatArray | None = None
    """[T] critic value of the state before each token."""
    greedy_reward: float | None = None
    """Reward of the greedy answer to the same prompt."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and end of every turn; (0, T) if `turns` is empty."""
        return self.turns or ((0, self.num_tokens),)

    @property
    def mask(self) -> BoolArray:
        """Mask of the tokens that the policy wrote, shape [T]."""
        mask = np.zeros(self.num_tokens, dtype=np.bool_)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return int(self.mask.sum())

    @property
    def total(self) -> float:
        """Reward of the whole rollout plus the rewards of all turns."""
        return self.reward + float(sum(self.turn_rewards))

    @property
    def penalized_total(self) -> float:
        """`total` plus the sum of the rewards per token (a KL penalty of the whole rollout)."""
        return (
            self.total
            if self.token_rewards is None
            else clamp_value(self.total + float(self._policy_token_rewards.sum()))
        )

    @property
    def token_rewards_by_turn(self) -> Float64Array:
        """Rewards per token, summed over each turn, shape [K]."""
        if self.token_rewards is None:
            return np.zeros(len(self.spans))
        return np.array([self.token_rewards[start:end].sum(dtype=np.float64) for start, end in self.spans])

    @property
    def _policy_token_rewards(self) -> Float64Array:
        assert self.token_rewards is not None
        return self.token_rewards[self.mask].astype(np.float64)


def compute_turn_rewards(episode: Episode, outcome: float) -> Float64Array:
    """Return the reward of each turn, shape [K], with `outcome` added to the reward of the last turn."""
    rewards = np.zeros(len(episode.spans))
    rewards[: len(episode.turn_rewards)] = episode.turn_rewards
    rewards[-1] += outcome
    return rewards


def concatenate(arrays: Sequence[Float64Array]) -> Float64Array:
    """Concatenate arrays; return an empty array for an empty sequence."""
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)
