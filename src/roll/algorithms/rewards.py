"""What a rollout's reward counts for: shaped as it is trained, judged as filters see it, normalised. Pure functions.

reward ─ algorithm.reward ─► shaped ─┬─ filters.metric ─► judged: which groups are trained
                                     └─ (R - mean) / std ─► outcomes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roll.algorithms.episodes import Episode, Float64Array, bounded
from roll.algorithms.normalise import Moments, normalised
from roll.algorithms.shaping import shaped_reward
from roll.config.algorithm import AlgorithmConfig
from roll.types import Rollout

__all__ = ["episode_of", "is_whole", "judged_range", "judged_rewards", "num_written", "outcomes_of", "trained_rewards"]


def num_written(rollout: Rollout) -> int:
    """Tokens of the policy's own."""
    return sum(turn.end - turn.start for turn in rollout.spans)


def is_whole(algorithm: AlgorithmConfig) -> bool:
    """Whether one value counts for the whole rollout, its turns' rewards included."""
    return algorithm.advantage.estimator in ("outcome", "chunk", "anchor_state")


def episode_of(
    rollout: Rollout, algorithm: AlgorithmConfig, max_new_tokens: int, greedy_reward: float | None = None
) -> Episode:
    """A scored rollout as numbers, its reward shaped.

    Args:
        rollout: see there.
        algorithm: how rewards are shaped.
        max_new_tokens: longest answer of one turn; a rollout's limit is that of all turns that its prompt has.
        greedy_reward: of the greedy answer to the same prompt.
    """
    assert rollout.reward is not None, "the rollout was scored"
    spans = rollout.spans
    of_whole = rollout.reward.value - sum(turn.reward for turn in rollout.turns)
    return Episode(
        group=rollout.draw_id,
        domain=rollout.prompt.domain,
        reward=_shaped(of_whole, rollout, algorithm, max_new_tokens),
        num_tokens=len(rollout.token_ids),
        turns=tuple((turn.start, turn.end) for turn in spans),
        turn_rewards=tuple(bounded(algorithm.reward.scale * turn.reward) for turn in spans),
        states=tuple(turn.state for turn in spans),
        greedy_reward=greedy_reward,
    )


def _shaped(reward: float, rollout: Rollout, algorithm: AlgorithmConfig, max_new_tokens: int) -> float:
    assert rollout.reward is not None, "the rollout was scored"
    return shaped_reward(
        reward,
        length=num_written(rollout),
        max_length=max_new_tokens * rollout.prompt.turns,
        well_formed=rollout.finished and rollout.reward.verdict != "no answer",
        **algorithm.reward.model_dump(),
    )


def trained_rewards(rollouts: Sequence[Rollout], algorithm: AlgorithmConfig, max_new_tokens: int) -> Float64Array:
    """[n] of scored rollouts, as they are trained: shaped, with those of all turns."""
    return np.array([_trained(r, algorithm, max_new_tokens) for r in rollouts], dtype=np.float64)


def _trained(rollout: Rollout, algorithm: AlgorithmConfig, max_new_tokens: int) -> float:
    """`Episode.total`, but for rounding: rewards that were given as equal, and shaped alike, stay equal."""
    assert rollout.reward is not None, "the rollout was scored"
    if algorithm.reward.clip is None:
        return _shaped(rollout.reward.value, rollout, algorithm, max_new_tokens)
    return episode_of(rollout, algorithm, max_new_tokens).total


def judged_rewards(rollouts: Sequence[Rollout], algorithm: AlgorithmConfig, max_new_tokens: int) -> Float64Array:
    """[n] of scored rollouts, by which their group is filtered: see `filters.metric`."""
    if algorithm.filters.metric == "reward":
        return trained_rewards(rollouts, algorithm, max_new_tokens)
    return np.array([_accuracy(rollout) for rollout in rollouts], dtype=np.float64)


def _accuracy(rollout: Rollout) -> float:
    assert rollout.reward is not None, "the rollout was scored"
    correct = rollout.reward.correct
    return bounded(rollout.reward.value) if correct is None else float(correct)


def judged_range(
    reward_range: tuple[float, float], algorithm: AlgorithmConfig, *, single_turn: bool
) -> tuple[float, float] | None:
    """Between what `judged_rewards` must lie where rewards are in `reward_range`; `None` where nothing bounds them.

    Args:
        reward_range: lowest and highest reward as it is given.
        algorithm: its settings.
        single_turn: whether no prompt has several turns.
    """
    low, high = reward_range
    shaping = algorithm.reward
    if algorithm.filters.metric == "accuracy":
        return min(low, 0.0), max(high, 1.0)
    if shaping.clip is not None and not single_turn:  # the clip spares the rewards of turns, which are not known
        return None
    longest, settings = shaping.overlong_buffer, shaping.model_dump()
    return (
        shaped_reward(low, length=longest, max_length=longest, well_formed=False, **settings),
        shaped_reward(high, length=0, max_length=longest, well_formed=True, **settings),
    )


def outcomes_of(
    episodes: Sequence[Episode], algorithm: AlgorithmConfig, moments: Mapping[str, Moments] | None = None
) -> tuple[Float64Array, dict[str, Moments]]:
    """Normalised rewards [n] of all scored rollouts of a step, and the moments of the run with them.

    Where one value counts for the whole, rewards per token (a KL penalty) are part of it, so that baseline and
    deviation are taken of the penalised reward.
    """
    settings = algorithm.advantage
    rewards = np.array([e.penalised_total if is_whole(algorithm) else e.reward for e in episodes], dtype=np.float64)
    if settings.function is not None:
        return rewards, dict(moments or {})
    return normalised(
        episodes, rewards, mean=settings.mean, std=settings.std, per_domain=settings.per_domain, running=moments
    )
