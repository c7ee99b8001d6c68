"""Per-token weights of the selected rollouts: advantages, critic targets, masks and factors. Pure functions of arrays.

selection ─ values, KL penalty ─► episodes ─► advantages ─ critics' agreement ─ factors ─► training batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.algorithms.advantages import AdvantageEstimate, estimate_advantages, mask_smallest, rescale_weights
from roll.algorithms.episodes import MAX_ABS_VALUE, Episode, Float64Array
from roll.algorithms.kl import estimate_kl
from roll.algorithms.returns import compute_chunk_returns, compute_turn_returns, spread_over_tokens
from roll.algorithms.rewards import assigns_one_value_per_rollout, normalize_outcomes
from roll.algorithms.selection import Selection
from roll.config.algorithm import AlgorithmConfig
from roll.errors import ConfigError, find_raise_location, one_line_error
from roll.types import BoolArray, FloatArray, TrainingBatch, TrainingSample
from roll.user_code import load_function

__all__ = ["add_advantages", "compute_kl_token_rewards"]


def add_advantages(
    batch: TrainingBatch,
    selection: Selection,
    algorithm: AlgorithmConfig,
    *,
    values: Sequence[Sequence[FloatArray]] = (),
    token_rewards: Sequence[FloatArray] = (),
    **columns: Sequence[Any],
) -> TrainingBatch:
    """Add advantages and the other columns for the loss to the samples of a batch.

    Args:
        batch: The batch of the selection's rollouts, in order: one sample per rollout, or several if its history was
            rewritten.
        selection: The selected rollouts; demonstrations come last.
        algorithm: The algorithm's settings.
        values: [M][n][L] values by critic and sample.
        token_rewards: [n][L] rewards per token, such as a KL penalty. If the estimator assigns one value to a whole
            rollout, the sum of these rewards is part of the reward for baselines and standard deviations.
        columns: [n] other columns of the samples (log-probs, attention), by field name.

    Raises:
        ConfigError: The user's estimator returned an invalid value.
    """
    num_own, samples = len(selection.trained_rollouts), batch.samples
    rollouts = [[samples[i] for i in places] for places in batch.sequences]
    own = rollouts[:num_own]
    mean_values = [_compute_mean(given) for given in zip(*values, strict=True)]
    episodes = _build_episodes(
        selection, _join_without_prefix(mean_values, own), _join_without_prefix(token_rewards, own)
    )
    found = _estimate_trained_advantages(episodes, selection, algorithm)
    spreads = _join_without_prefix([_compute_std(given) for given in zip(*values, strict=True)], own)
    masks = [episode.mask for episode in episodes[:num_own]]
    agreed = _mask_smallest_fraction(spreads, masks, algorithm.critic.drop_agreed)
    # AsyPPO, arXiv 2510.01656: no gradient where critics agree; no entropy bonus where they diverge the most.
    divergent = _mask_smallest_fraction([-s for s in spreads], masks, algorithm.entropy.drop_divergent)
    factors = _compute_rollout_factors(episodes[:num_own], selection.accuracies, algorithm)
    weights: list[dict[str, Any]] = []
    for i, rollout in enumerate(own):
        # After the estimate: a dropped token still counts for whitening and for the critics' returns.
        advantages = np.where(agreed[i], 0.0, found.advantages[i]) if agreed else found.advantages[i]
        parts: dict[str, list[Any]] = {"advantages": _split_by_sample(advantages * factors[i], rollout)}
        if found.returns:
            parts["returns"] = _split_by_sample(found.returns[i], rollout)
        if divergent:
            parts["entropy_mask"] = [mask.astype(np.bool_) for mask in _split_by_sample(~divergent[i], rollout)]
        weights += _transpose_columns(parts)
    for rollout, shown in zip(rollouts[num_own:], selection.demonstrations, strict=True):
        weights += _transpose_columns(
            {"advantages": _split_by_sample(_compute_imitation_advantages(shown.episode, algorithm), rollout)}
        )
    for i, weight in enumerate(weights):
        weight |= {name: column[i] for name, column in columns.items()}
        if mean_values and not samples[i].expert:
            weight["old_values"] = mean_values[i]
    return replace(batch, samples=tuple(replace(s, **w) for s, w in zip(samples, weights, strict=True)))


def _compute_imitation_advantages(episode: Episode, algorithm: AlgorithmConfig) -> NDArray[np.floating[Any]]:
    """Return weight x G for every token of a demonstration, shape [T].

    G is the return of the demonstration, without a baseline (arXiv 2512.24873 eq. 7 and 10).
    """
    settings, result = algorithm.advantage, np.zeros(episode.num_tokens)
    if settings.estimator == "chunk":
        turns = compute_chunk_returns(episode, episode.total, settings.gamma)
    else:
        gamma = settings.gamma if settings.estimator in ("turn", "anchor_state") else 1.0
        turns = compute_turn_returns(episode, episode.reward, gamma)
    result[episode.mask] = spread_over_tokens(episode, turns)
    return algorithm.imitation.weight * result


def compute_kl_token_rewards(
    batch: TrainingBatch,
    logprobs: Sequence[FloatArray],
    ref_logprobs: Sequence[FloatArray],
    algorithm: AlgorithmConfig,
    coefficient: float,
) -> list[FloatArray]:
    """Compute the KL penalty in the reward: -coefficient x KL of every token [n][L], 0 outside the loss mask.

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
        penalty = estimate_kl(difference, np.zeros_like(difference), algorithm.kl.estimator)
        # Bounded, because an infinite penalty would make every baseline of its group infinite.
        penalty = np.clip(coefficient * penalty, -MAX_ABS_VALUE, MAX_ABS_VALUE)
        result.append(np.where(sample.loss_mask, -penalty, 0.0).astype(np.float32))
    return result


def _transpose_columns(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Convert columns (one list of values per field) to one dictionary of fields per sample."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _join_without_prefix(
    arrays: Sequence[FloatArray], rollouts: Sequence[Sequence[TrainingSample]]
) -> list[FloatArray]:
    """Concatenate the per-sample arrays [L] of each rollout, without the samples' contexts, into one array [T].

    If `arrays` is empty, the result is empty.
    """
    left = iter(arrays)
    own = ([next(left)[sample.prefix_length :] for sample in rollout] for rollout in rollouts)
    return [np.concatenate(parts) for parts in own] if arrays else []


def _compute_std(values_by_critic: Sequence[FloatArray]) -> FloatArray:
    """Return the population standard deviation of the critics' values for each token, shape [L]."""
    return np.asarray(np.std(values_by_critic, axis=0, dtype=np.float64), np.float32)


def _compute_mean(values_by_critic: Sequence[FloatArray]) -> FloatArray:
    """Return the mean of the critics' values for each token, shape [L]."""
    return np.asarray(np.mean(values_by_critic, axis=0, dtype=np.float64), np.float32)


def _split_by_sample(values: Any, rollout: Sequence[TrainingSample]) -> list[FloatArray]:
    """Split an array [T] into one array [L] per sample of the rollout, with zeros on each sample's context."""
    ends = np.cumsum([len(sample) - sample.prefix_length for sample in rollout])
    parts = np.split(np.asarray(values, np.float32), ends[:-1])
    return [np.concatenate([np.zeros(s.prefix_length, np.float32), own]) for s, own in zip(rollout, parts, strict=True)]


def _build_episodes(
    selection: Selection, values: Sequence[FloatArray], penalties: Sequence[FloatArray]
) -> list[Episode]:
    """Build the episodes of all scored rollouts, with critic values and KL penalties per token.

    Rollouts that are used for training come first. The log-probs of the other rollouts are unknown, so each of their
    tokens gets the mean penalty of the tokens that are used for training. A penalty that all rollouts have in common
    then does not change any baseline.
    """
    episodes = [shaped.episode for shaped in (*selection.trained_rollouts, *selection.untrained_rollouts)]
    if penalties:
        known = [array[episode.mask] for array, episode in zip(penalties, episodes, strict=False)]
        mean = float(np.concatenate(known).mean(dtype=np.float64))
        others = episodes[len(penalties) :]
        penalties = [*penalties, *(np.where(e.mask, mean, 0.0).astype(np.float32) for e in others)]
    if not values and not penalties:
        return episodes
    rows = zip_longest(episodes, values, penalties)
    return [replace(episode, values=own, token_rewards=penalty) for episode, own, penalty in rows]


def _estimate_trained_advantages(
    episodes: list[Episode], selection: Selection, algorithm: AlgorithmConfig
) -> AdvantageEstimate:
    """Return the advantages of the episodes of `selection.trained`, which come first in `episodes`.

    The other episodes are only used for baselines, standard deviations and whitening.
    """
    settings, num, outcomes = algorithm.advantage, len(selection.trained_rollouts), selection.outcomes
    if settings.function is not None:
        function = load_function(settings.function, "advantage function")
        return _call_user_estimator(function, settings.function, episodes[:num])
    penalised = (
        assigns_one_value_per_rollout(algorithm)
        and settings.mean != "greedy"
        and any(e.token_rewards is not None for e in episodes)
    )
    if penalised:
        # Selection normalized the rewards before the penalty was known; now it is part of the total, and so of the
        # baselines.
        outcomes, _ = normalize_outcomes(episodes, algorithm)
    if settings.estimator == "gae":  # only trained rollouts have critic values
        episodes, outcomes = episodes[:num], outcomes[:num]
    own = settings.model_dump(exclude={"mean", "per_domain", "function"})
    found = estimate_advantages(episodes, outcomes, includes_penalty=penalised, **own)
    return AdvantageEstimate(advantages=found.advantages[:num], returns=found.returns)


def _call_user_estimator(function: Callable[..., Any], path: str, episodes: list[Episode]) -> AdvantageEstimate:
    """Compute advantages with the user's estimator.

    The estimator is called as `advantages(episodes)`, and returns one number or one array [T] for each episode.
    """
    try:
        given = [np.asarray(value, dtype=np.float32) for value in function(episodes)]
    except Exception as error:
        place = find_raise_location(error)
        raise ConfigError(f"advantage function '{path}' failed at {place}: {one_line_error(error)}") from error
    if len(given) != len(episodes):
        raise ConfigError(
            f"advantage function '{path}' returned {len(given)} values for {len(episodes)} episodes: return one "
            "value per episode."
        )
    advantages = []
    for episode, array in zip(episodes, given, strict=True):
        if array.shape not in ((), (episode.num_tokens,)) or not np.isfinite(array).all():
            raise ConfigError(
                f"advantage function '{path}' returned an array of shape {array.shape} for an episode of "
                f"{episode.num_tokens} tokens: return one finite number, or one per token."
            )
        advantages.append(np.where(episode.mask, array, np.float32(0.0)).astype(np.float32))
    return AdvantageEstimate(advantages=advantages)


def _mask_smallest_fraction(values: list[FloatArray], masks: list[BoolArray], fraction: float) -> list[BoolArray]:
    """Return masks of the tokens with the smallest `fraction` of all values; an empty list if `fraction` is 0."""
    return mask_smallest(values, masks, fraction) if fraction > 0 and values else []


def _compute_rollout_factors(
    episodes: Sequence[Episode], accuracies: Mapping[int, float], algorithm: AlgorithmConfig
) -> Float64Array:
    """Compute the factor on each rollout's advantages, shape [n]: larger for harder prompts and shorter answers."""
    factors = np.ones(len(episodes))
    if algorithm.weights.difficulty:
        solved = np.array([accuracies[episode.group] for episode in episodes])
        # Rescaled to mean 1, so that the weights do not change the effective learning rate.
        factors *= rescale_weights(0.5 + 1.5 * (1.0 - np.clip(solved, 0.0, 1.0)))
    if algorithm.weights.length and len(factors):
        lengths = np.array([episode.num_policy_tokens for episode in episodes], dtype=np.float64)
        factors *= rescale_weights(1.5 - lengths / max(lengths.max(), 1.0))
    return factors
