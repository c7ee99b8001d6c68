"""From a selection to weights per token: advantages, a critic's targets, masks, factors. Pure functions of arrays.

selection ─ values, KL penalty ─► episodes ─► advantages ─ critics' agreement ─ factors ─► training batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.algorithms.advantages import Estimate, drop_smallest, estimate, rescaled_weights
from roll.algorithms.episodes import LARGEST, Episode, Float64Array
from roll.algorithms.kl import kl_per_token
from roll.algorithms.returns import chunk_returns, per_token, turn_returns
from roll.algorithms.rewards import is_whole, outcomes_of
from roll.algorithms.selection import Selection
from roll.config.algorithm import AlgorithmConfig
from roll.errors import ConfigError
from roll.registry import load_function
from roll.types import BoolArray, FloatArray, Rollout, TrainingBatch, TrainingSample

__all__ = ["kl_token_rewards", "weigh"]


def weigh(
    batch: TrainingBatch,
    selection: Selection,
    algorithm: AlgorithmConfig,
    *,
    values: Sequence[Sequence[FloatArray]] = (),
    token_rewards: Sequence[FloatArray] = (),
) -> TrainingBatch:
    """Give every token its advantage, and whatever else the algorithm wants of it.

    Args:
        batch: of the selection's rollouts, in order.
        selection: their episodes and outcomes; demonstrations come last.
        algorithm: its settings.
        values: [M][n][L] by critic and sample.
        token_rewards: [n][L] rewards per token, such as a KL penalty. Where one value counts for a whole rollout, their
            sum is part of it before baseline and deviation are taken.

    Raises:
        ConfigError: the user's own estimator returned something else than asked for.
    """
    starts = [sample.prefix_length for sample in batch.samples if not sample.expert]
    num_own = len(starts)
    after = [_after_prompt(arrays[:num_own], starts) for arrays in values]
    penalties = _after_prompt(token_rewards[:num_own], starts) if len(token_rewards) else []
    episodes = [
        replace(
            episode,
            values=_mean([critic[i] for critic in after]),
            token_rewards=penalties[i] if penalties else None,
        )
        for i, episode in enumerate(selection.episodes[:num_own])
    ]
    found = _estimate(episodes, selection, algorithm)
    spreads = [_deviation([critic[i] for critic in after]) for i in range(len(episodes))] if after else []
    agreed = _share(spreads, episodes, algorithm.critic.drop_agreed)
    divergent = _share([-s for s in spreads], episodes, algorithm.entropy.drop_divergent)
    factors = _factors(selection.rollouts[:num_own], episodes, selection.accuracies, algorithm)
    samples = []
    for i, sample in enumerate(batch.samples[:num_own]):
        advantages = np.where(agreed[i], 0.0, found.advantages[i]) if agreed else found.advantages[i]
        advantages = advantages * factors[i]
        samples.append(
            replace(
                sample,
                advantages=_aligned(advantages, sample),
                returns=_aligned(found.returns[i], sample) if found.returns else None,
                old_values=_mean([critic[i] for critic in values]),
                entropy_mask=_aligned(~divergent[i], sample).astype(np.bool_) if divergent else None,
            )
        )
    shown = zip(batch.samples[num_own:], selection.episodes[num_own:], selection.outcomes[num_own:], strict=True)
    imitated = [replace(s, advantages=_aligned(_imitation(e, o, algorithm), s)) for s, e, o in shown]
    return replace(batch, samples=(*samples, *imitated))


def _imitation(episode: Episode, outcome: float, algorithm: AlgorithmConfig) -> NDArray[np.floating[Any]]:
    """[T] weight x G of a demonstration: its own return, which no baseline touches (arXiv 2512.24873 eq. 7 and 10)."""
    settings, result = algorithm.advantage, np.zeros(episode.num_tokens)
    if settings.estimator == "chunk":
        turns = chunk_returns(episode, episode.total, settings.gamma)
    else:
        turns = turn_returns(
            episode, outcome, settings.gamma if settings.estimator in ("turn", "anchor_state") else 1.0
        )
    result[episode.mask] = per_token(episode, turns)
    return algorithm.imitation.weight * result


def kl_token_rewards(batch: TrainingBatch, logprobs: Sequence[FloatArray], algorithm: AlgorithmConfig,
                     coefficient: float) -> list[FloatArray]:  # fmt: skip
    """-coefficient x KL of every token [n][L], 0 outside the loss mask; for a penalty in the reward.

    Args:
        batch: with `ref_logprobs`.
        logprobs: [n][L] of the policy before the update.
        algorithm: names the estimator.
        coefficient: as it is at this step.
    """
    result = []
    for sample, own in zip(batch.samples, logprobs, strict=True):
        assert sample.ref_logprobs is not None, "the reference was asked"
        difference = (own - sample.ref_logprobs).astype(np.float64)
        penalty = kl_per_token(difference, np.zeros_like(difference), algorithm.kl.estimator)
        penalty = np.clip(coefficient * penalty, -LARGEST, LARGEST)
        result.append(np.where(sample.loss_mask, -penalty, 0.0).astype(np.float32))
    return result


def _after_prompt(arrays: Sequence[FloatArray], starts: Sequence[int]) -> list[FloatArray]:
    return [array[start:] for array, start in zip(arrays, starts, strict=True)]


def _deviation(of_critics: list[FloatArray]) -> FloatArray:
    """[T] population deviation of the critics' values."""
    return np.asarray(np.std(of_critics, axis=0, dtype=np.float64), np.float32)


def _mean(of_critics: list[FloatArray]) -> FloatArray | None:
    """[T] mean of the critics' values; `None` without a critic."""
    return np.asarray(np.mean(of_critics, axis=0, dtype=np.float64), np.float32) if of_critics else None


def _aligned(answer: Any, sample: TrainingSample) -> FloatArray:
    """[T] as [L], with zeros on the prompt."""
    return np.concatenate([np.zeros(sample.prefix_length, np.float32), np.asarray(answer, np.float32)])


def _estimate(episodes: list[Episode], selection: Selection, algorithm: AlgorithmConfig) -> Estimate:
    """Advantages of the trained episodes; the others have their part in baselines, deviations and whitening."""
    settings = algorithm.advantage
    if settings.function is not None:
        return _own_estimate(load_function(settings.function, "advantage function"), settings.function, episodes)
    num = len(episodes)
    everyone = [*episodes, *_penalised_alike(selection.others, episodes)]
    outcomes = np.concatenate([selection.outcomes[:num], selection.other_outcomes])
    if is_whole(algorithm) and settings.mean != "greedy" and num and episodes[0].token_rewards is not None:
        outcomes, _ = outcomes_of(everyone, algorithm)
        everyone = [replace(episode, token_rewards=None) for episode in everyone]
    if settings.estimator == "gae":  # critics were not asked for more
        everyone, outcomes = everyone[:num], outcomes[:num]
    found = estimate(
        everyone,
        outcomes,
        estimator=settings.estimator,
        std=settings.std,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        step_weight=settings.step_weight,
        whiten=settings.whiten,
        clip=settings.clip,
    )
    return Estimate(advantages=found.advantages[:num], returns=found.returns)


def _penalised_alike(others: Sequence[Episode], trained: Sequence[Episode]) -> list[Episode]:
    """Of rollouts that are not trained no log-probs are known: each of their tokens counts with the trained ones' mean
    reward per token, so that a penalty which all pay alike moves no baseline."""
    known = [e.token_rewards[e.mask] for e in trained if e.token_rewards is not None]
    if not known:
        return list(others)
    mean = float(np.concatenate(known).mean(dtype=np.float64))
    return [replace(e, token_rewards=np.where(e.mask, mean, 0.0).astype(np.float32)) for e in others]


def _own_estimate(function: Callable[..., Any], path: str, episodes: list[Episode]) -> Estimate:
    """The user's estimator: `def advantages(episodes: list[Episode]) -> list` of one number, or [T], for each."""
    given = function(episodes)
    if len(given) != len(episodes):
        raise ConfigError(f"advantage function '{path}' returned {len(given)} values for {len(episodes)} episodes.")
    advantages = []
    for episode, value in zip(episodes, given, strict=True):
        array = np.asarray(value, dtype=np.float32)
        if array.shape not in ((), (episode.num_tokens,)) or not np.isfinite(array).all():
            raise ConfigError(
                f"advantage function '{path}' returned an array of shape {array.shape} for an episode of "
                f"{episode.num_tokens} tokens: return one finite number, or one per token."
            )
        advantages.append(np.where(episode.mask, array, np.float32(0.0)).astype(np.float32))
    return Estimate(advantages=advantages)


def _share(values: list[FloatArray], episodes: list[Episode], share: float) -> list[BoolArray]:
    """The tokens that hold the smallest share of values; nothing where the share is 0."""
    return drop_smallest(values, [episode.mask for episode in episodes], share) if share > 0 and values else []


def _factors(
    rollouts: Sequence[Rollout],
    episodes: Sequence[Episode],
    accuracies: Mapping[int, float],
    algorithm: AlgorithmConfig,
) -> Float64Array:
    """[n] factors on whole rollouts, by difficulty and length."""
    factors = np.ones(len(rollouts))
    if algorithm.weights.difficulty:
        solved = np.array([accuracies[r.draw_id] for r in rollouts])
        factors *= rescaled_weights(0.5 + 1.5 * (1.0 - np.clip(solved, 0.0, 1.0)))
    if algorithm.weights.length and len(factors):
        lengths = np.array([episode.mask.sum() for episode in episodes], dtype=np.float64)
        factors *= rescaled_weights(1.5 - lengths / max(lengths.max(), 1.0))
    return factors
