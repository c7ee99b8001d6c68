"""Shaping and normalization of rewards, and the values that filters compare with their bounds.

reward ─ algorithm.reward ─► shaped ─┬─ filters.metric ─► judged: which groups are trained
                                     └─ (R - mean) / std ─► outcomes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from roll.algorithms.episodes import Episode, Float64Array, clamp_value
from roll.algorithms.normalization import Moments, normalize_rewards
from roll.config.algorithm import AlgorithmConfig
from roll.types import Rollout

__all__ = [
    "ShapedRollout",
    "assigns_one_value_per_rollout",
    "compute_baseline_reward",
    "compute_filter_value_range",
    "compute_soft_overlong_penalty",
    "normalize_outcomes",
    "shape_reward",
    "shape_rollout",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedRollout:
    """A scored rollout with its shaped reward and the value by which it is filtered."""

    rollout: Rollout
    episode: Episode
    """Turns and rewards of the rollout, from which advantages are computed."""
    training_reward: float
    """`Episode.total` without rounding errors: equal rewards that are shaped in the same way stay equal."""
    filter_value: float
    """Value by which the rollout's group is filtered: see `filters.metric`."""


def compute_soft_overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Return DAPO's soft overlong penalty, between 0 and 1 (arXiv 2503.14476 eq. 13).

    It is 0 up to `max_length` - `buffer` tokens, then linear, and 1 at `max_length` and beyond; a buffer of 0 disables
    it.
    """
    if buffer <= 0:
        return 0.0
    return min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


def shape_reward(
    reward: float,
    *,
    length: int,
    max_length: int,
    well_formed: bool,
    scale: float = 1.0,
    shift: float = 0.0,
    clip: float | None = None,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    format_penalty: float = 0.0,
) -> float:
    """Compute clip(scale x reward + shift) - overlong penalty - format penalty; see `RewardShapingConfig`.

    The result is clamped to ± `MAX_ABS_VALUE`. Lengths are in tokens.
    """
    value = scale * reward + shift
    if clip is not None:
        value = min(max(value, -clip), clip)
    # DAPO, arXiv 2503.14476 eq. 13. After the clip, so that a clipped reward still loses the whole penalty.
    value -= overlong_penalty * compute_soft_overlong_penalty(length, max_length, overlong_buffer)
    return clamp_value(value if well_formed else value - format_penalty)


def shape_rollout(
    rollout: Rollout, algorithm: AlgorithmConfig, max_new_tokens: int, greedy_reward: float | None = None
) -> ShapedRollout:
    """Shape the reward of a scored rollout.

    Args:
        rollout: The scored rollout.
        algorithm: Settings of reward shaping and of the filters.
        max_new_tokens: Maximum number of tokens in one turn; a rollout's limit is `max_new_tokens * prompt.turns`.
        greedy_reward: Reward of the greedy answer to the same prompt.
    """
    reward, spans = rollout.reward, rollout.spans
    assert reward is not None, "the rollout was scored"
    value = reward.value - sum(turn.reward for turn in rollout.replayed)  # replayed turns are not the rollout's own
    shaped = partial(
        shape_reward,
        length=sum(turn.end - turn.start for turn in spans),
        max_length=max_new_tokens * rollout.prompt.turns,
        well_formed=rollout.is_finished and reward.verdict != "no answer",
        **algorithm.reward.model_dump(),
    )
    episode = Episode(
        group=rollout.draw_id,
        domain=rollout.prompt.domain,
        # Estimators add the rewards of turns themselves, so here only the remaining reward is shaped.
        reward=shaped(value - sum(turn.reward for turn in rollout.turns)),
        num_tokens=len(rollout.token_ids),
        turns=tuple((turn.start, turn.end) for turn in spans),
        turn_rewards=tuple(clamp_value(algorithm.reward.scale * turn.reward) for turn in spans),
        states=tuple(turn.state for turn in spans),
        greedy_reward=greedy_reward,
    )
    # A clip applies to the remaining reward only, so with one the total must be summed from the shaped parts.
    training_reward = shaped(value) if algorithm.reward.clip is None else episode.total
    accuracy = clamp_value(reward.value) if reward.correct is None else float(reward.correct)
    filter_value = training_reward if algorithm.filters.metric == "reward" else accuracy
    return ShapedRollout(rollout=rollout, episode=episode, training_reward=training_reward, filter_value=filter_value)


def compute_filter_value_range(
    reward_range: tuple[float, float], algorithm: AlgorithmConfig, *, single_turn: bool
) -> tuple[float, float] | None:
    """Return the range of `ShapedRollout.filter_value` for rewards in `reward_range`; `None` if it is unbounded.

    Args:
        reward_range: Lowest and highest reward before shaping.
        algorithm: The algorithm's settings.
        single_turn: Whether every prompt has a single turn.
    """
    low, high = reward_range
    shaping = algorithm.reward
    if algorithm.filters.metric == "accuracy":
        return min(low, 0.0), max(high, 1.0)
    if shaping.clip is not None and not single_turn:  # turn rewards are not clipped, and their range is unknown
        return None
    longest, settings = shaping.overlong_buffer, shaping.model_dump()
    return (
        shape_reward(low, length=longest, max_length=longest, well_formed=False, **settings),
        shape_reward(high, length=0, max_length=longest, well_formed=True, **settings),
    )


def assigns_one_value_per_rollout(algorithm: AlgorithmConfig) -> bool:
    """Return whether the estimator assigns one value to the whole rollout, including the rewards of its turns."""
    return algorithm.advantage.estimator in ("outcome", "chunk", "anchor_state")


def compute_baseline_reward(episode: Episode, algorithm: AlgorithmConfig) -> float:
    """Return the reward from which baselines and standard deviations are computed.

    If the estimator assigns one value to the whole rollout, the result includes rewards per turn and per token (a KL
    penalty).
    """
    return episode.penalized_total if assigns_one_value_per_rollout(algorithm) else episode.reward


def normalize_outcomes(
    episodes: Sequence[Episode], algorithm: AlgorithmConfig, moments: Mapping[str, Moments] | None = None
) -> tuple[Float64Array, dict[str, Moments]]:
    """Return the normalized rewards [n] of all scored rollouts of a step, and the run's moments including them."""
    settings = algorithm.advantage
    rewards = np.array([compute_baseline_reward(episode, algorithm) for episode in episodes], dtype=np.float64)
    if settings.function is not None:
        return rewards, dict(moments or {})
    return normalize_rewards(
        episodes, rewards, mean=settings.mean, std=settings.std, per_domain=settings.per_domain, running=moments
    )
