"""The ratio of new to old probability: of a token, a chunk, or a whole sequence.

Log-ratios are clamped to ± `LOG_RATIO_LIMIT` wherever they are exponentiated, and only there: that clamp is part of
every formula here.
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
    "clamped",
    "log_ratio",
    "over_limit",
    "segment_means",
    "segment_sums",
]

RatioAgainst: TypeAlias = Literal["old", "rollout", "behavior"]
"""Whose log-prob the denominator is; see `roll.algorithms.correction`."""

RatioLevel: TypeAlias = Literal["token", "chunk", "sequence", "sequence_token"]
Reduction: TypeAlias = Literal["geometric", "product"]


def clamped(log_ratio: Tensor) -> Tensor:
    """Within ± `LOG_RATIO_LIMIT`, so that `exp` stays finite."""
    return torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def segment_sums(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Sum of every segment [K] of `values` [N]; ids are 0 … K-1."""
    size = int(segment_ids[-1]) + 1 if len(segment_ids) else 0
    return values.new_zeros(size).index_add(0, segment_ids, values)


def segment_means(values: Tensor, segment_ids: Tensor) -> Tensor:
    """Mean of every segment [K]."""
    return segment_sums(values, segment_ids) / segment_sums(torch.ones_like(values), segment_ids)


def over_limit(inputs: LossInputs, *, against: RatioAgainst, token_limit: float) -> Tensor:
    """[N] bool, for the metrics: tokens whose log-ratio `log_ratio` cuts at `token_limit`."""
    return _difference(inputs, against).detach() * inputs.need("advantages").sign() > token_limit


def _difference(inputs: LossInputs, against: RatioAgainst) -> Tensor:
    return inputs.need("logprobs") - inputs.need(f"{against}_logprobs")


def _as_it_is(log_ratio: Tensor) -> Tensor:
    return log_ratio


def segments(inputs: LossInputs, level: str) -> Tensor:
    """The ids [N] of the segments that a level speaks of."""
    if level == "chunk" and inputs.chunk_ids is not None:
        return inputs.chunk_ids
    return inputs.sequence_ids


def log_ratio(
    inputs: LossInputs,
    *,
    level: RatioLevel = "token",
    reduce: Reduction = "geometric",
    against: RatioAgainst = "old",
    token_limit: float | None = None,
    bounded: bool = True,
) -> Tensor:
    """log pi/old of every token [N], differentiable in `logprobs`.

    Args:
        inputs: the tokens.
        level: a chunk's or sequence's value is the same at all its tokens. `sequence_token` has the sequence's value
            and at each token its own gradient: sg(s) + log pi - sg(log pi) (GSPO, arXiv 2507.18071, eq. 14).
        reduce: mean of the tokens' log-ratios, or their sum.
        against: the denominator.
        token_limit: before the mean is taken, a token's log-ratio may exceed ± this only where that lowers the
            objective (GMPO, arXiv 2507.20673, eq. 4): above it where A > 0 it is cut, below where A < 0.
        bounded: whether it is clamped, for what exponentiates it; a clamped log-ratio has no gradient.
    """
    limited = clamped if bounded else _as_it_is
    difference = _difference(inputs, against)
    if level == "token":
        return limited(difference)
    if token_limit is not None:
        advantages = inputs.need("advantages")
        cut = torch.where(advantages > 0, difference.clamp(max=token_limit), difference.clamp(min=-token_limit))
        difference = torch.where(advantages == 0, difference, cut)
    ids = segments(inputs, level)
    pool = segment_means if reduce == "geometric" else segment_sums
    own = limited(difference)
    whole = limited(pool(own, ids))[ids]
    return whole.detach() + own - own.detach() if level == "sequence_token" else whole
