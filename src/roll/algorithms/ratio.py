"""Importance sampling ratio: new to old probability of a token, a chunk, or a whole sequence.

Log-ratios are clamped to ± `LOG_RATIO_LIMIT` only before they are exponentiated; the formulas in this module omit the
clamp.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.kl import LOG_RATIO_LIMIT
from roll.types import LossInputs

__all__ = [
    "RatioAgainst",
    "RatioLevel",
    "Reduction",
    "build_token_limit_mask",
    "clamp_log_ratio",
    "compute_log_ratio",
    "compute_segment_means",
    "compute_segment_sums",
]

RatioAgainst: TypeAlias = Literal["old", "rollout", "behavior"]
"""Log-prob in the denominator; see `roll.algorithms.correction`."""

RatioLevel: TypeAlias = Literal["token", "chunk", "sequence", "sequence_token"]
Reduction: TypeAlias = Literal["geometric", "product"]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to ± `LOG_RATIO_LIMIT`, so that `exp` stays finite."""
    return torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def compute_segment_sums(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Compute the sum of every segment of `values` [N], shape [K]; segment IDs are 0 … K-1."""
    size = int(segment_ids[-1]) + 1 if len(segment_ids) else 0
    return values.new_zeros(size).index_add(0, segment_ids, values)


def compute_segment_means(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Compute the mean of every segment of `values` [N], shape [K]."""
    return compute_segment_sums(values, segment_ids) / compute_segment_sums(torch.ones_like(values), segment_ids)


def build_token_limit_mask(inputs: LossInputs, *, against: RatioAgainst, max_token_log_ratio: float) -> Tensor:
    """Build a mask [N] of the tokens whose log-ratio is clamped by `compute_log_ratio`, for metrics.

    These are the tokens whose log-ratio exceeds `max_token_log_ratio` in the direction of their advantage.
    """
    return (
        _compute_log_prob_difference(inputs, against).detach() * inputs.require("advantages").sign()
        > max_token_log_ratio
    )


def _compute_log_prob_difference(inputs: LossInputs, against: RatioAgainst) -> Tensor:
    return inputs.require("logprobs") - inputs.require(f"{against}_logprobs")


def _return_unclamped(log_ratio: Tensor) -> Tensor:
    return log_ratio


def get_segment_ids(inputs: LossInputs, level: str) -> Tensor:
    """Return the segment ID of every token, shape [N].

    For the level `chunk`, these are the chunk IDs if the batch has them, otherwise the sequence IDs.
    """
    if level == "chunk" and inputs.chunk_ids is not None:
        return inputs.chunk_ids
    return inputs.sequence_ids


def compute_log_ratio(
    inputs: LossInputs,
    *,
    level: RatioLevel = "token",
    reduce: Reduction = "geometric",
    against: RatioAgainst = "old",
    max_token_log_ratio: float | None = None,
    clamp: bool = True,
) -> Tensor:
    """Compute log(pi / old) of every token, shape [N]; differentiable in `logprobs`.

    Args:
        inputs: The loss inputs.
        level: Level of the ratio; all tokens of a chunk or sequence share one value. `sequence_token` has the value of
            the sequence, but each token's own gradient: sg(s) + log pi - sg(log pi) (GSPO, arXiv 2507.18071, eq. 14).
        reduce: Whether a segment's log-ratio is the mean or the sum of its tokens' log-ratios.
        against: Which log-prob is the denominator.
        max_token_log_ratio: Before the mean is taken, a token's log-ratio is clamped to at most this value if A > 0,
            and to at least its negative if A < 0 (GMPO, arXiv 2507.20673, eq. 4).
        clamp: Whether to clamp the log-ratio, as required before `exp`; a clamped log-ratio has no gradient.
    """
    limited = clamp_log_ratio if clamp else _return_unclamped
    difference = _compute_log_prob_difference(inputs, against)
    if level == "token":
        return limited(difference)
    if max_token_log_ratio is not None:
        advantages = inputs.require("advantages")
        # GMPO, arXiv 2507.20673 eq. 4: cut on the side where the advantage favors a further change, as PPO's min does.
        cut = torch.where(
            advantages > 0, difference.clamp(max=max_token_log_ratio), difference.clamp(min=-max_token_log_ratio)
        )
        difference = torch.where(advantages == 0, difference, cut)
    ids = get_segment_ids(inputs, level)
    pool = compute_segment_means if reduce == "geometric" else compute_segment_sums
    # Clamped per token before pooling, so that one outlier token cannot determine the ratio of its whole segment.
    own = limited(difference)
    whole = limited(pool(own, ids))[ids]
    # GSPO-token, arXiv 2507.18071 eq. 14: the value of the sequence with the gradient of the token.
    return whole.detach() + own - own.detach() if level == "sequence_token" else whole
