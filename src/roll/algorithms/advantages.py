"""From rewards to a weight per token:

    shaped rewards ─ (R - mean) / std ─► outcomes          `normalise`
    outcomes ─ over tokens or turns ─► returns ─ whitening ─ clip ─► advantages

NumPy only: the controller runs this, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from roll.algorithms.episodes import LARGEST, Episode, Float64Array, concatenated
from roll.algorithms.normalise import Scope, whitened
from roll.algorithms.returns import (
    chunk_returns,
    discounted,
    gae,
    per_token,
    step_advantages,
    token_rewards,
    turn_returns,
)
from roll.types import BoolArray, FloatArray

__all__ = ["Estimate", "Estimator", "drop_smallest", "estimate", "rescaled_weights"]

Estimator: TypeAlias = Literal["outcome", "token", "turn", "chunk", "anchor_state", "gae"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What the rewards of a batch say about its tokens; lists are by episode."""

    advantages: list[FloatArray]
    """[T] each; 0 where the policy did not write the token."""
    returns: list[FloatArray] = field(default_factory=list)
    """[T] each, what a critic should learn; empty without one."""


def estimate(
    episodes: Sequence[Episode],
    outcomes: Float64Array,
    *,
    estimator: Estimator = "outcome",
    std: Scope = "group",
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    step_weight: float = 1.0,
    whiten: Literal["none", "token", "turn"] = "none",
    clip: float | None = None,
    penalised: bool = False,
) -> Estimate:
    """Advantages of all episodes of a batch; see `roll.config.algorithm_parts.AdvantageConfig`.

    Args:
        episodes: all that count for whitening and for states met again.
        outcomes: [n] their normalised rewards (`normalised`): the total one for `outcome`, `chunk` and `anchor_state`;
            for the others that of the whole, to which rewards of turns and tokens are added as they are.
        estimator: how they spread over tokens.
        std: `anchor_state` divides step advantages by a deviation, unless it is `none`.
        gamma: discount per token, or per turn for `turn`, `chunk` and `anchor_state`.
        gae_lambda: of `gae`.
        step_weight: of `anchor_state`.
        whiten: over all tokens, or all turns.
        clip: bound of the result.
        penalised: whether outcomes of the whole have the rewards per token in them.

    Raises:
        ValueError: `gae` has no values.
    """
    returns: list[Float64Array] = []
    if estimator == "gae":
        values = [_values(episode) for episode in episodes]
        given = [token_rewards(e, o) for e, o in zip(episodes, outcomes, strict=True)]
        tokens = [gae(r, v, gamma, gae_lambda) for r, v in zip(given, values, strict=True)]
        returns = [a + v for a, v in zip(tokens, values, strict=True)]
    elif estimator == "token":
        tokens = [discounted(token_rewards(e, o), gamma) for e, o in zip(episodes, outcomes, strict=True)]
    else:
        turns = _by_turn(episodes, outcomes, estimator, std=std, gamma=gamma, step_weight=step_weight)
        if whiten == "turn":
            turns = whitened(turns)
        tokens = [per_token(e, t) for e, t in zip(episodes, turns, strict=True)]
        if estimator != "turn" and not penalised:  # whose returns have them
            tokens = _with_token_rewards(episodes, tokens)
    if whiten == "token":
        tokens = whitened(tokens)
    if clip is not None:
        tokens = [np.clip(array, -clip, clip) for array in tokens]
    return Estimate(
        advantages=[_spread_out(e, array) for e, array in zip(episodes, tokens, strict=True)],
        returns=[_spread_out(e, array) for e, array in zip(episodes, returns, strict=True)] if returns else [],
    )


def _with_token_rewards(episodes: Sequence[Episode], tokens: list[Float64Array]) -> list[Float64Array]:
    """Add what rewards per token come to after each token (a KL penalty in the reward)."""
    return [
        t if e.token_rewards is None else t + discounted(e.token_rewards[e.mask].astype(np.float64), 1.0)
        for e, t in zip(episodes, tokens, strict=True)
    ]


def _by_turn(
    episodes: Sequence[Episode],
    outcomes: Float64Array,
    estimator: Estimator,
    *,
    std: Scope,
    gamma: float,
    step_weight: float,
) -> list[Float64Array]:
    if estimator == "turn":
        return [turn_returns(e, o, gamma) for e, o in zip(episodes, outcomes, strict=True)]
    if estimator == "chunk":
        return [chunk_returns(e, o, gamma) for e, o in zip(episodes, outcomes, strict=True)]
    same = [np.full(len(e.spans), o) for e, o in zip(episodes, outcomes, strict=True)]
    if estimator == "outcome":
        return same
    steps = step_advantages(episodes, gamma=gamma, std=std)
    return [a + step_weight * s for a, s in zip(same, steps, strict=True)]


def _values(episode: Episode) -> Float64Array:
    if episode.values is None:
        raise ValueError("gae needs a critic's values, which an episode does not have")
    return np.clip(episode.values[episode.mask].astype(np.float64), -LARGEST, LARGEST)


def _spread_out(episode: Episode, tokens: Float64Array) -> FloatArray:
    """Values of the policy's tokens [n] at their places among all [T]."""
    result = np.zeros(episode.num_tokens, dtype=np.float32)
    result[episode.mask] = tokens
    return result


def drop_smallest(values: Sequence[FloatArray], masks: Sequence[BoolArray], share: float) -> list[BoolArray]:
    """Which tokens hold the smallest `share` of all values under the masks.

    AsyPPO (arXiv 2510.01656): where critics agree, tokens leave the policy gradient. They are those below the value at
    place floor(share x n) of the n sorted ones. Of equal values there all stay or all go, whatever the order of the
    batch; where critics agree everywhere, as before their first update, all stay.
    """
    together = np.sort(concatenated([np.asarray(v, np.float64)[m] for v, m in zip(values, masks, strict=True)]))
    if not len(together):
        return [np.zeros(len(mask), dtype=np.bool_) for mask in masks]
    threshold = together[int(share * len(together))]
    return [mask & (np.asarray(v, np.float64) < threshold) for v, mask in zip(values, masks, strict=True)]


def rescaled_weights(weights: Float64Array) -> Float64Array:
    """Factors with mean 1; all 1 where their sum is 0."""
    total = float(weights.sum())
    return weights * (len(weights) / total) if total > 0 else np.ones_like(weights)
