"""From a selection to weights per token: advantages, a critic's targets, masks, factors. Pure functions of arrays.

selection ─ values, KL penalty ─► episodes ─► advantages ─ critics' agreement ─ factors ─► training batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
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
from roll.errors import ConfigError, in_one_line, raised_at
from roll.types import BoolArray, FloatArray, TrainingBatch, TrainingSample
from roll.user_code import load_function

__all__ = ["kl_token_rewards", "weigh"]


def weigh(
    batch: TrainingBatch,
    selection: Selection,
    algorithm: AlgorithmConfig,
    *,
    values: Sequence[Sequence[FloatArray]] = (),
    token_rewards: Sequence[FloatArray] = (),
    **columns: Sequence[Any],
) -> TrainingBatch:
    """Complete the samples of a batch: every token gets its advantage, and whatever else the algorithm wants of it.

    Args:
        batch: of the selection's rollouts, in order: one sample or, where its history was rewritten, several of each.
        selection: what was chosen; demonstrations come last.
        algorithm: its settings.
        values: [M][n][L] by critic and sample.
        token_rewards: [n][L] rewards per token, such as a KL penalty. Where one value counts for a whole rollout, their
            sum is part of it before baseline and deviation are taken.
        columns: [n] what else was computed of the samples (log-probs, attention), by the names of their fields.

    Raises:
        ConfigError: the user's own estimator returned something else than asked for.
    """
    num_own, samples = len(selection.trained), batch.samples
    rollouts = [[samples[i] for i in places] for places in batch.sequences]
    own = rollouts[:num_own]
    said = [_mean(given) for given in zip(*values, strict=True)]
    episodes = _episodes(selection, _after_prompt(said, own), _after_prompt(token_rewards, own))
    found = _estimate(episodes, selection, algorithm)
    spreads = _after_prompt([_deviation(given) for given in zip(*values, strict=True)], own)
    masks = [episode.mask for episode in episodes[:num_own]]
    agreed = _smallest(spreads, masks, algorithm.critic.drop_agreed)
    divergent = _smallest([-s for s in spreads], masks, algorithm.entropy.drop_divergent)
    factors = _factors(episodes[:num_own], selection.accuracies, algorithm)
    weights: list[dict[str, Any]] = []
    for i, rollout in enumerate(own):
        advantages = np.where(agreed[i], 0.0, found.advantages[i]) if agreed else found.advantages[i]
        parts: dict[str, list[Any]] = {"advantages": _aligned(advantages * factors[i], rollout)}
        if found.returns:
            parts["returns"] = _aligned(found.returns[i], rollout)
        if divergent:
            parts["entropy_mask"] = [mask.astype(np.bool_) for mask in _aligned(~divergent[i], rollout)]
        weights += _rows(parts)
    for rollout, shown in zip(rollouts[num_own:], selection.demonstrations, strict=True):
        weights += _rows({"advantages": _aligned(_imitation(shown.episode, algorithm), rollout)})
    for i, weight in enumerate(weights):
        weight |= {name: column[i] for name, column in columns.items()}
        if said and not samples[i].expert:
            weight["old_values"] = said[i]
    return replace(batch, samples=tuple(replace(s, **w) for s, w in zip(samples, weights, strict=True)))


def _imitation(episode: Episode, algorithm: AlgorithmConfig) -> NDArray[np.floating[Any]]:
    """[T] weight x G of a demonstration: its own return, which no baseline touches (arXiv 2512.24873 eq. 7 and 10)."""
    settings, result = algorithm.advantage, np.zeros(episode.num_tokens)
    if settings.estimator == "chunk":
        turns = chunk_returns(episode, episode.total, settings.gamma)
    else:
        gamma = settings.gamma if settings.estimator in ("turn", "anchor_state") else 1.0
        turns = turn_returns(episode, episode.reward, gamma)
    result[episode.mask] = per_token(episode, turns)
    return algorithm.imitation.weight * result


def kl_token_rewards(
    batch: TrainingBatch,
    logprobs: Sequence[FloatArray],
    ref_logprobs: Sequence[FloatArray],
    algorithm: AlgorithmConfig,
    coefficient: float,
) -> list[FloatArray]:
    """-coefficient x KL of every token [n][L], 0 outside the loss mask; for a penalty in the reward.

    Args:
        batch: its samples' masks.
        logprobs: [n][L] of the policy before the update.
        ref_logprobs: [n][L] of the reference.
        algorithm: names the estimator.
        coefficient: as it is at this step.
    """
    result = []
    for sample, own, ref in zip(batch.samples, logprobs, ref_logprobs, strict=True):
        difference = (own - ref).astype(np.float64)
        penalty = kl_per_token(difference, np.zeros_like(difference), algorithm.kl.estimator)
        penalty = np.clip(coefficient * penalty, -LARGEST, LARGEST)
        result.append(np.where(sample.loss_mask, -penalty, 0.0).astype(np.float32))
    return result


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Columns of a rollout's samples as one row of each sample."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _after_prompt(arrays: Sequence[FloatArray], rollouts: Sequence[Sequence[TrainingSample]]) -> list[FloatArray]:
    """[n][T] of the first rollouts, from arrays [L] of their samples, without contexts; empty where there is none."""
    left = iter(arrays)
    own = ([next(left)[sample.prefix_length :] for sample in rollout] for rollout in rollouts)
    return [np.concatenate(parts) for parts in own] if arrays else []


def _deviation(of_critics: Sequence[FloatArray]) -> FloatArray:
    """[L] population deviation of the critics' values."""
    return np.asarray(np.std(of_critics, axis=0, dtype=np.float64), np.float32)


def _mean(of_critics: Sequence[FloatArray]) -> FloatArray:
    """[L] mean of the critics' values."""
    return np.asarray(np.mean(of_critics, axis=0, dtype=np.float64), np.float32)


def _aligned(answer: Any, rollout: Sequence[TrainingSample]) -> list[FloatArray]:
    """[T] as [L] of each of the rollout's samples, with zeros on its context."""
    ends = np.cumsum([len(sample) - sample.prefix_length for sample in rollout])
    parts = np.split(np.asarray(answer, np.float32), ends[:-1])
    return [np.concatenate([np.zeros(s.prefix_length, np.float32), own]) for s, own in zip(rollout, parts, strict=True)]


def _episodes(selection: Selection, values: Sequence[FloatArray], penalties: Sequence[FloatArray]) -> list[Episode]:
    """Of all scored rollouts, the trained ones first, with what a critic and a KL penalty say of their tokens.

    Of rollouts that are not trained no log-probs are known: each of their tokens counts with the trained ones' mean
    reward per token, so that a penalty which all pay alike moves no baseline.
    """
    episodes = [shaped.episode for shaped in (*selection.trained, *selection.others)]
    if penalties:
        known = [array[episode.mask] for array, episode in zip(penalties, episodes, strict=False)]
        mean = float(np.concatenate(known).mean(dtype=np.float64))
        others = episodes[len(penalties) :]
        penalties = [*penalties, *(np.where(e.mask, mean, 0.0).astype(np.float32) for e in others)]
    if not values and not penalties:
        return episodes
    said = zip_longest(episodes, values, penalties)
    return [replace(episode, values=own, token_rewards=penalty) for episode, own, penalty in said]


def _estimate(everyone: list[Episode], selection: Selection, algorithm: AlgorithmConfig) -> Estimate:
    """Advantages of the trained episodes; the others have their part in baselines, deviations and whitening."""
    settings, num, outcomes = algorithm.advantage, len(selection.trained), selection.outcomes
    if settings.function is not None:
        function = load_function(settings.function, "advantage function")
        return _own_estimate(function, settings.function, everyone[:num])
    penalised = is_whole(algorithm) and settings.mean != "greedy" and any(e.token_rewards is not None for e in everyone)
    if penalised:
        outcomes, _ = outcomes_of(everyone, algorithm)
    if settings.estimator == "gae":  # critics were not asked for more
        everyone, outcomes = everyone[:num], outcomes[:num]
    own = settings.model_dump(exclude={"mean", "per_domain", "function"})
    found = estimate(everyone, outcomes, penalised=penalised, **own)
    return Estimate(advantages=found.advantages[:num], returns=found.returns)


def _own_estimate(function: Callable[..., Any], path: str, episodes: list[Episode]) -> Estimate:
    """The user's estimator: `def advantages(episodes: list[Episode]) -> list` of one number, or [T], for each."""
    try:
        given = [np.asarray(value, dtype=np.float32) for value in function(episodes)]
    except Exception as error:
        place = raised_at(error)
        raise ConfigError(f"advantage function '{path}' failed at {place}: {in_one_line(error)}") from error
    if len(given) != len(episodes):
        raise ConfigError(f"advantage function '{path}' returned {len(given)} values for {len(episodes)} episodes.")
    advantages = []
    for episode, array in zip(episodes, given, strict=True):
        if array.shape not in ((), (episode.num_tokens,)) or not np.isfinite(array).all():
            raise ConfigError(
                f"advantage function '{path}' returned an array of shape {array.shape} for an episode of "
                f"{episode.num_tokens} tokens: return one finite number, or one per token."
            )
        advantages.append(np.where(episode.mask, array, np.float32(0.0)).astype(np.float32))
    return Estimate(advantages=advantages)


def _smallest(values: list[FloatArray], masks: list[BoolArray], share: float) -> list[BoolArray]:
    """The tokens that hold the smallest share of values; nothing where the share is 0."""
    return drop_smallest(values, masks, share) if share > 0 and values else []


def _factors(episodes: Sequence[Episode], accuracies: Mapping[int, float], algorithm: AlgorithmConfig) -> Float64Array:
    """[n] factors on whole rollouts, by difficulty and length."""
    factors = np.ones(len(episodes))
    if algorithm.weights.difficulty:
        solved = np.array([accuracies[episode.group] for episode in episodes])
        factors *= rescaled_weights(0.5 + 1.5 * (1.0 - np.clip(solved, 0.0, 1.0)))
    if algorithm.weights.length and len(factors):
        lengths = np.array([episode.num_written for episode in episodes], dtype=np.float64)
        factors *= rescaled_weights(1.5 - lengths / max(lengths.max(), 1.0))
    return factors
