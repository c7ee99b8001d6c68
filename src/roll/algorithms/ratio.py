"""Importance sampling ratio: new to old probability of a token, a chunk, or a whole sequence.

Log-ratios are clamped to ± `LOG_RATIO_LIMIT` wherever they are exponentiated, and only there; the formulas in this
module do not write the clamp out.
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
    "clamp_log_ratio",
    "log_ratio",
    "over_limit",
    "segment_means",
    "segment_sums",
]

RatioAgainst: TypeAlias = Literal["old", "rollout", "behavior"]
"""Log-prob in the denominator; see `roll.algorithms.correction`."""

RatioLevel: TypeAlias = Literal["token", "chunk", "sequence", "sequence_token"]
Reduction: TypeAlias = Literal["geometric", "product"]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to ± `LOG_RATIO_LIMIT`, so that `exp` stays finite."""
    return torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def segment_sums(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the sum of every segment of `values` [N], shape [K]; ids are 0 … K-1."""
    size = int(segment_ids[-1]) + 1 if len(segment_ids) else 0
    return values.new_zeros(size).index_add(0, segment_ids, values)


def segment_means(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the mean of every segment, shape [K]."""
    return segment_sums(values, segment_ids) / segment_sums(torch.ones_like(values), segment_ids)


def over_limit(inputs: LossInputs, *, against: RatioAgainst, max_token_log_ratio: float) -> Tensor:
    """Return a mask [N], for metrics, of the tokens whose log-ratio `log_ratio` cuts at `max_token_log_ratio`."""
    return _difference(inputs, against).detach() * inputs.require("advantages").sign() > max_token_log_ratio


def _difference(inputs: LossInputs, against: RatioAgainst) -> Tensor:
    return inputs.require("logprobs") - inputs.require(f"{against}_logprobs")


def _as_it_is(log_ratio: Tensor) -> Tensor:
    return log_ratio


def segments(inputs: LossInputs, level: str) -> Tensor:
    """Return the segment ids [N] of a level: chunk ids for `chunk` if the batch has them, else sequence ids."""
    if level == "chunk" and inputs.chunk_ids is not None:
        return inputs.chunk_ids
    return inputs.sequence_ids


def log_ratio(
    inputs: LossInputs,
    *,
    level: RatioLevel = "token",
    reduce: Reduction = "geometric",
    against: RatioAgainst = "old",
    max_token_log_ratio: float | None = None,
    bounded: bool = True,
) -> Tensor:
    """Compute log pi/old of every token, shape [N], differentiable in `logprobs`.

    Args:
        inputs: The loss inputs.
        level: Level of the ratio; all tokens of a chunk or sequence share its value. `sequence_token` has the
            sequence's value and at each token the token's own gradient: sg(s) + log pi - sg(log pi) (GSPO, arXiv
            2507.18071, eq. 14).
        reduce: Whether a segment's log-ratio is the mean or the sum of its tokens' log-ratios.
        against: Which log-prob is the denominator.
        max_token_log_ratio: Before the mean is taken, a token's log-ratio may exceed ± this only where that lowers the
            objective (GMPO, arXiv 2507.20673, eq. 4): it is cut above the limit where A > 0, below it where A < 0.
        bounded: Whether to clamp the log-ratio, as needed before `exp`; a clamped log-ratio has no gradient.
    """
    limited = clamp_log_ratio if bounded else _as_it_is
    difference = _difference(inputs, against)
    if level == "token":
        return limited(difference)
    if max_token_log_ratio is not None:
        advantages = inputs.require("advantages")
        cut = torch.where(
            advantages > 0, difference.clamp(max=max_token_log_ratio), difference.clamp(min=-max_token_log_ratio)
        )
        difference = torch.where(advantages == 0, difference, cut)
    ids = segments(inputs, level)
    pool = segment_means if reduce == "geometric" else segment_sums
    own = limited(difference)
    whole = limited(pool(own, ids))[ids]
    return whole.detach() + own - own.detach() if level == "sequence_token" else whole
