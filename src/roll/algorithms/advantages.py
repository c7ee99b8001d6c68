"""Advantages: one weight per token, computed from rewards.

    shaped rewards ─ (R - mean) / std ─► outcomes          `normalize_rewards`
    outcomes ─ over tokens or turns ─► returns ─ whitening ─ clip ─► advantages

NumPy only: the controller process runs this code and does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from roll.algorithms.episodes import MAX_ABS_VALUE, Episode, Float64Array, concatenate
from roll.algorithms.normalization import NormalizationScope, whiten_values
from roll.algorithms.returns import (
    compute_chunk_returns,
    compute_discounted_returns,
    compute_gae,
    compute_step_advantages,
    compute_token_rewards,
    compute_turn_returns,
    spread_over_tokens,
)
from roll.types import BoolArray, FloatArray

__all__ = ["AdvantageEstimate", "Estimator", "estimate_advantages", "mask_smallest", "rescale_weights"]

Estimator: TypeAlias = Literal["outcome", "token", "turn", "chunk", "anchor_state", "gae"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageEstimate:
    """Advantages and returns of a batch, one array per episode."""

    advantages: list[FloatArray]
    """Shape [T] each; 0 where the policy did not write the token."""
    returns: list[FloatArray] = field(default_factory=list)
    """Targets of a critic, shape [T] each; empty without a critic."""


def estimate_advantages(
    episodes: Sequence[Episode],
    outcomes: Float64Array,
    *,
    estimator: Estimator = "outcome",
    std: NormalizationScope = "group",
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    step_weight: float = 1.0,
    whiten: Literal["none", "token", "turn"] = "none",
    clip: float | None = None,
    includes_penalty: bool = False,
) -> AdvantageEstimate:
    """Compute the advantages of all episodes of a batch; see `roll.config.algorithm_parts.AdvantageConfig`.

    Args:
        episodes: All episodes of the batch; whitening and the search for repeated states cover all of them.
        outcomes: Normalized rewards of the episodes (`normalize_rewards`), shape [n]. `outcome`, `chunk` and
            `anchor_state` expect total rewards. The other estimators expect rewards of whole rollouts, and add the
            rewards per turn and per token without normalizing them.
        estimator: How rewards are assigned to tokens.
        std: For `anchor_state`: step advantages are divided by a standard deviation unless `std` is `none`.
        gamma: Discount per token; for `turn`, `chunk` and `anchor_state`, per turn.
        gae_lambda: Lambda of `gae`.
        step_weight: Weight of the step advantages of `anchor_state`.
        whiten: The scope of whitening: all tokens, all turns, or none.
        clip: Bound on the absolute value of an advantage.
        includes_penalty: Whether the outcomes of whole rollouts already include the rewards per token.

    Raises:
        ValueError: `gae` is used and an episode has no critic values.
    """
    returns: list[Float64Array] = []
    if estimator == "gae":
        values = [_get_critic_values(episode) for episode in episodes]
        rewards = map(compute_token_rewards, episodes, outcomes)
        tokens = [compute_gae(r, v, gamma, gae_lambda) for r, v in zip(rewards, values, strict=True)]
        # The critic's target is advantage + value (the lambda-return), before whitening changes the scale of the
        # advantages.
        returns = [a + v for a, v in zip(tokens, values, strict=True)]
    elif estimator == "token":
        tokens = [compute_discounted_returns(r, gamma) for r in map(compute_token_rewards, episodes, outcomes)]
    else:
        turns = _compute_turn_advantages(episodes, outcomes, estimator, std=std, gamma=gamma, step_weight=step_weight)
        # Whitening precedes the repetition per token, so a long turn counts as much as a short one.
        if whiten == "turn":
            turns = whiten_values(turns)
        tokens = [spread_over_tokens(e, t) for e, t in zip(episodes, turns, strict=True)]
        if estimator != "turn" and not includes_penalty:  # returns of `turn` include the rewards per token
            tokens = _with_token_rewards(episodes, tokens)
    if whiten == "token":
        tokens = whiten_values(tokens)
    # The bound comes last: it applies to the advantages that the loss uses, after whitening.
    if clip is not None:
        tokens = [np.clip(array, -clip, clip) for array in tokens]
    return AdvantageEstimate(
        advantages=[_scatter_tokens(e, array) for e, array in zip(episodes, tokens, strict=True)],
        returns=[_scatter_tokens(e, array) for e, array in zip(episodes, returns, strict=True)] if returns else [],
    )


def _with_token_rewards(episodes: Sequence[Episode], tokens: list[Float64Array]) -> list[Float64Array]:
    """Add to each token's value the rewards (a KL penalty) of this token and of all later tokens."""
    return [
        t
        if e.token_rewards is None
        else t + compute_discounted_returns(e.token_rewards[e.mask].astype(np.float64), 1.0)
        for e, t in zip(episodes, tokens, strict=True)
    ]


def _compute_turn_advantages(
    episodes: Sequence[Episode],
    outcomes: Float64Array,
    estimator: Estimator,
    *,
    std: NormalizationScope,
    gamma: float,
    step_weight: float,
) -> list[Float64Array]:
    if estimator == "turn":
        return [compute_turn_returns(e, o, gamma) for e, o in zip(episodes, outcomes, strict=True)]
    if estimator == "chunk":
        return [compute_chunk_returns(e, o, gamma) for e, o in zip(episodes, outcomes, strict=True)]
    same = [np.full(len(e.spans), o) for e, o in zip(episodes, outcomes, strict=True)]
    if estimator == "outcome":
        return same
    steps = compute_step_advantages(episodes, gamma=gamma, std=std)
    return [a + step_weight * s for a, s in zip(same, steps, strict=True)]


def _get_critic_values(episode: Episode) -> Float64Array:
    if episode.values is None:
        raise ValueError("the advantage estimator 'gae' requires critic values, but an episode has none")
    return np.clip(episode.values[episode.mask].astype(np.float64), -MAX_ABS_VALUE, MAX_ABS_VALUE)


def _scatter_tokens(episode: Episode, tokens: Float64Array) -> FloatArray:
    """Scatter the values of the policy's tokens [n] into an array over all tokens [T], with zeros elsewhere."""
    result = np.zeros(episode.num_tokens, dtype=np.float32)
    result[episode.mask] = tokens
    return result


def mask_smallest(values: Sequence[FloatArray], masks: Sequence[BoolArray], fraction: float) -> list[BoolArray]:
    """Return masks of the tokens with the smallest `fraction` of all values under `masks`.

    AsyPPO (arXiv 2510.01656): tokens on which the critics agree are excluded from the policy gradient. The excluded
    tokens have values below the value at index floor(fraction x n) of the n sorted values. Tokens of equal value are
    all kept or all dropped, independent of the order of the batch. If the critics agree on all tokens, as before their
    first update, all tokens are kept.
    """
    together = np.sort(concatenate([np.asarray(v, np.float64)[m] for v, m in zip(values, masks, strict=True)]))
    if not len(together):
        return [np.zeros(len(mask), dtype=np.bool_) for mask in masks]
    # A threshold on the value, not a count of tokens, so the result does not depend on the order of equal values.
    threshold = together[int(fraction * len(together))]
    return [mask & (np.asarray(v, np.float64) < threshold) for v, mask in zip(values, masks, strict=True)]


def rescale_weights(weights: Float64Array) -> Float64Array:
    """Rescale weights to mean 1; all become 1 if their sum is 0."""
    total = float(weights.sum())
    return weights * (len(weights) / total) if total > 0 else np.ones_like(weights)
