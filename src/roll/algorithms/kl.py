"""Estimators of KL(policy || reference) per sampled token (Schulman 2020, joschu.net/blog/kl-approx)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "KLEstimator", "kl_per_token"]

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "absolute", "full"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one absurd token cannot make the loss infinite."""


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL estimate of every token [N]; differentiable in `logprobs`.

    `k1`: log p/q, unbiased, high variance. As a loss its gradient is 0 in expectation: use it to measure.
    `k2`: (log p/q)^2 / 2, biased, low variance; its gradient is that of the true KL.
    `k3`: q/p - 1 - log q/p, unbiased, never negative (GRPO's choice).
    `absolute`: |log p/q|.
    `full` is not per sampled token: it comes with the inputs (`LossInputs.full_kl`).

    Raises:
        ValueError: the estimator is unknown.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "absolute":
        return difference.abs()
    if estimator == "k3":
        log_ratio = torch.clamp(-difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator '{estimator}': use k1, k2, k3 or absolute")
