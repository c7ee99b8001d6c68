"""Token weights of a selection: advantages, critic targets, masks, factors. Pure functions of arrays.

selection ─ values, KL penalty ─► episodes ─► advantages ─ critics' agreement ─ factors ─► training batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.algorithms.advantages import Estimate, drop_smallest, estimate, rescale_weights
from roll.algorithms.episodes import LARGEST, Episode, Float64Array
from roll.algorithms.kl import kl_per_token
from roll.algorithms.returns import chunk_returns, per_token, turn_returns
from roll.algorithms.rewards import is_whole, normalize_outcomes
from roll.algorithms.selection import Selection
from roll.config.algorithm import AlgorithmConfig
from roll.errors import ConfigError, one_line_error, raised_at
from roll.types import BoolArray, FloatArray, TrainingBatch, TrainingSample
from roll.user_code import load_function

__all__ = ["compute_token_weights", "kl_token_rewards"]


def compute_token_weights(
    batch: TrainingBatch,
    selection: Selection,
    algorithm: AlgorithmConfig,
    *,
    values: Sequence[Sequence[FloatArray]] = (),
    token_rewards: Sequence[FloatArray] = (),
    **columns: Sequence[Any],
) -> TrainingBatch:
    """Complete the samples of a batch with advantages and the other columns that the algorithm needs.

    Args:
        batch: The batch of the selection's rollouts, in order: one sample per rollout, or several if its history was
            rewritten.
        selection: The selected rollouts; demonstrations come last.
        algorithm: The algorithm's settings.
        values: [M][n][L] values by critic and sample.
        token_rewards: [n][L] rewards per token, such as a KL penalty. If the estimator assigns one value to a whole
            rollout, their sum is included before baseline and deviation are computed.
        columns: [n] other columns of the samples (log-probs, attention), by field name.

    Raises:
        ConfigError: The user's estimator returned an invalid value.
    """
    num_own, samples = len(selection.trained), batch.samples
    rollouts = [[samples[i] for i in places] for places in batch.sequences]
    own = rollouts[:num_own]
    said = [_mean(given) for given in zip(*values, strict=True)]
    episodes = _episodes(selection, _after_prompt(said, own), _after_prompt(token_rewards, own))
    found = _estimate(episodes, selection, algorithm)
    spreads = _after_prompt([_deviation(given) for given in zip(*values, strict=True)], own)
    masks = [episode.mask for episode in episodes[:num_own]]
    agreed = _smallest_mask(spreads, masks, algorithm.critic.drop_agreed)
    divergent = _smallest_mask([-s for s in spreads], masks, algorithm.entropy.drop_divergent)
    factors = _factors(episodes[:num_own], selection.accuracies, algorithm)
    weights: list[dict[str, Any]] = []
    for i, rollout in enumerate(own):
        advantages = np.where(agreed[i], 0.0, found.advantages[i]) if agreed else found.advantages[i]
        parts: dict[str, list[Any]] = {"advantages": _split_by_sample(advantages * factors[i], rollout)}
        if found.returns:
            parts["returns"] = _split_by_sample(found.returns[i], rollout)
        if divergent:
            parts["entropy_mask"] = [mask.astype(np.bool_) for mask in _split_by_sample(~divergent[i], rollout)]
        weights += _rows(parts)
    for rollout, shown in zip(rollouts[num_own:], selection.demonstrations, strict=True):
        weights += _rows({"advantages": _split_by_sample(_imitation(shown.episode, algorithm), rollout)})
    for i, weight in enumerate(weights):
        weight |= {name: column[i] for name, column in columns.items()}
        if said and not samples[i].expert:
            weight["old_values"] = said[i]
    return replace(batch, samples=tuple(replace(s, **w) for s, w in zip(samples, weights, strict=True)))


def _imitation(episode: Episode, algorithm: AlgorithmConfig) -> NDArray[np.floating[Any]]:
    """Return weight x G for every token of a demonstration, shape [T].

    G is the demonstration's own return, without a baseline (arXiv 2512.24873 eq. 7 and 10).
    """
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
    """Compute -coefficient x KL of every token [n][L], 0 outside the loss mask; used for a KL penalty in the reward.

    Args:
        batch: The batch, for the loss masks of its samples.
        logprobs: Log-probs of the policy before the update, [n][L].
        ref_logprobs: Log-probs of the reference, [n][L].
        algorithm: Settings that name the estimator.
        coefficient: KL coefficient of this step.
    """
    result = []
    for sample, own, ref in zip(batch.samples, logprobs, ref_logprobs, strict=True):
        difference = (own - ref).astype(np.float64)
        penalty = kl_per_token(difference, np.zeros_like(difference), algorithm.kl.estimator)
        penalty = np.clip(coefficient * penalty, -LARGEST, LARGEST)
        result.append(np.where(sample.loss_mask, -penalty, 0.0).astype(np.float32))
    return result


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Transpose the columns of a rollout's samples into one row per sample."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _after_prompt(arrays: Sequence[FloatArray], rollouts: Sequence[Sequence[TrainingSample]]) -> list[FloatArray]:
    """Concatenate arrays [L] of each rollout's samples, without their contexts, into [n][T]; empty if `arrays` is
    empty.
    """
    left = iter(arrays)
    own = ([next(left)[sample.prefix_length :] for sample in rollout] for rollout in rollouts)
    return [np.concatenate(parts) for parts in own] if arrays else []


def _deviation(of_critics: Sequence[FloatArray]) -> FloatArray:
    """Return the population deviation of the critics' values, shape [L]."""
    return np.asarray(np.std(of_critics, axis=0, dtype=np.float64), np.float32)


def _mean(of_critics: Sequence[FloatArray]) -> FloatArray:
    """Return the mean of the critics' values, shape [L]."""
    return np.asarray(np.mean(of_critics, axis=0, dtype=np.float64), np.float32)


def _split_by_sample(answer: Any, rollout: Sequence[TrainingSample]) -> list[FloatArray]:
    """Split an array [T] into one array [L] per sample of the rollout, with zeros on each sample's context."""
    ends = np.cumsum([len(sample) - sample.prefix_length for sample in rollout])
    parts = np.split(np.asarray(answer, np.float32), ends[:-1])
    return [np.concatenate([np.zeros(s.prefix_length, np.float32), own]) for s, own in zip(rollout, parts, strict=True)]


def _episodes(selection: Selection, values: Sequence[FloatArray], penalties: Sequence[FloatArray]) -> list[Episode]:
    """Return all scored episodes, the trained ones first, with the critics' values and the KL penalties of their
    tokens.

    Log-probs of rollouts that are not trained are unknown: each of their tokens gets the trained tokens' mean penalty,
    so that a penalty common to all rollouts does not move any baseline.
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
    """Return the advantages of the trained episodes; the others count in baselines, deviations and whitening."""
    settings, num, outcomes = algorithm.advantage, len(selection.trained), selection.outcomes
    if settings.function is not None:
        function = load_function(settings.function, "advantage function")
        return _own_estimate(function, settings.function, everyone[:num])
    penalised = is_whole(algorithm) and settings.mean != "greedy" and any(e.token_rewards is not None for e in everyone)
    if penalised:
        outcomes, _ = normalize_outcomes(everyone, algorithm)
    if settings.estimator == "gae":  # only trained rollouts have critic values
        everyone, outcomes = everyone[:num], outcomes[:num]
    own = settings.model_dump(exclude={"mean", "per_domain", "function"})
    found = estimate(everyone, outcomes, penalised=penalised, **own)
    return Estimate(advantages=found.advantages[:num], returns=found.returns)


def _own_estimate(function: Callable[..., Any], path: str, episodes: list[Episode]) -> Estimate:
    """Call the user's estimator, `def advantages(episodes: list[Episode]) -> list`: one number, or an array [T], per
    episode.
    """
    try:
        given = [np.asarray(value, dtype=np.float32) for value in function(episodes)]
    except Exception as error:
        place = raised_at(error)
        raise ConfigError(f"advantage function '{path}' failed at {place}: {one_line_error(error)}") from error
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


def _smallest_mask(values: list[FloatArray], masks: list[BoolArray], share: float) -> list[BoolArray]:
    """Return a mask of the tokens with the smallest share of values; an empty list if the share is 0."""
    return drop_smallest(values, masks, share) if share > 0 and values else []


def _factors(episodes: Sequence[Episode], accuracies: Mapping[int, float], algorithm: AlgorithmConfig) -> Float64Array:
    """Return the factors on whole rollouts by difficulty and length, shape [n]."""
    factors = np.ones(len(episodes))
    if algorithm.weights.difficulty:
        solved = np.array([accuracies[episode.group] for episode in episodes])
        factors *= rescale_weights(0.5 + 1.5 * (1.0 - np.clip(solved, 0.0, 1.0)))
    if algorithm.weights.length and len(factors):
        lengths = np.array([episode.num_written for episode in episodes], dtype=np.float64)
        factors *= rescale_weights(1.5 - lengths / max(lengths.max(), 1.0))
    return factors
