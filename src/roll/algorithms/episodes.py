"""A rollout as the estimation of advantages sees it: numbers alone. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll.types import BoolArray, FloatArray

__all__ = ["LARGEST", "Episode", "Float64Array", "bounded", "concatenated", "turn_rewards_of"]

Float64Array = NDArray[np.float64]

LARGEST = 1e9
"""Rewards and values are clamped to ± this, so that no square or sum of theirs overflows."""


def bounded(value: float) -> float:
    """Within ± `LARGEST`."""
    return min(max(value, -LARGEST), LARGEST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """T is the number of tokens after the prompt, K the number of turns."""

    group: int
    """Rollouts of one prompt share it."""
    reward: float
    """Of the whole, after shaping; it comes with the last turn."""
    num_tokens: int
    """T"""
    turns: tuple[tuple[int, int], ...] = ()
    """[K] start and end of what the policy wrote; empty: all T tokens are one turn."""
    turn_rewards: tuple[float, ...] = ()
    """[K] of the environment; empty: all 0."""
    states: tuple[str, ...] = ()
    """[K] in which each turn began; an empty one equals no other."""
    domain: str = ""
    token_rewards: FloatArray | None = None
    """[T] further rewards per token, such as a KL penalty; 0 outside turns."""
    values: FloatArray | None = None
    """[T] a critic's value of the state before each token."""
    greedy_reward: float | None = None
    """Of the greedy answer to the same prompt."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Its turns, also where it has only the one."""
        return self.turns or ((0, self.num_tokens),)

    @property
    def mask(self) -> BoolArray:
        """[T] which tokens the policy wrote."""
        mask = np.zeros(self.num_tokens, dtype=np.bool_)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    @property
    def num_written(self) -> int:
        """How many tokens the policy wrote."""
        return int(self.mask.sum())

    @property
    def total(self) -> float:
        """Reward of the whole and of all turns."""
        return self.reward + float(sum(self.turn_rewards))

    @property
    def penalised_total(self) -> float:
        """`total`, and the sum of the rewards per token (a KL penalty of the whole rollout)."""
        return self.total if self.token_rewards is None else bounded(self.total + float(self._written_rewards.sum()))

    @property
    def turn_token_rewards(self) -> Float64Array:
        """[K] rewards per token, summed over each turn's."""
        if self.token_rewards is None:
            return np.zeros(len(self.spans))
        return np.array([self.token_rewards[start:end].sum(dtype=np.float64) for start, end in self.spans])

    @property
    def _written_rewards(self) -> Float64Array:
        assert self.token_rewards is not None
        return self.token_rewards[self.mask].astype(np.float64)


def turn_rewards_of(episode: Episode, outcome: float) -> Float64Array:
    """[K] rewards by turn, with `outcome` on the last one."""
    rewards = np.zeros(len(episode.spans))
    rewards[: len(episode.turn_rewards)] = episode.turn_rewards
    rewards[-1] += outcome
    return rewards


def concatenated(arrays: Sequence[Float64Array]) -> Float64Array:
    """All of them in one; empty where there are none."""
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)
