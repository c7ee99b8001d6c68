"""KL penalty: estimators of KL(policy || reference) per sampled token (Schulman 2020, joschu.net/blog/kl-approx).

The estimators accept tensors (for a loss; the result has a gradient) and NumPy arrays (for a penalty in the reward;
torch is not imported).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "KLEstimator", "adapt_coefficient", "estimate_kl"]

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "absolute", "full"]
Array = TypeVar("Array", "Tensor", NDArray[np.floating[Any]])

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that a single outlier token cannot make the loss infinite."""


def estimate_kl(logprobs: Array, ref_logprobs: Array, estimator: KLEstimator = "k3") -> Array:
    """Estimate the KL divergence at every token, shape [N]; differentiable in `logprobs`.

    `k1`: log p/q, unbiased, high variance. As a loss, its gradient is 0 in expectation, so use it only as a metric.
    `k2`: (log p/q)^2 / 2, biased, low variance; its gradient is that of the true KL.
    `k3`: q/p - 1 - log q/p, unbiased, never negative (GRPO's choice).
    `absolute`: |log p/q|.
    `full` is not supported here, because the exact divergence is already in `LossInputs.full_kl`.

    Raises:
        ValueError: The estimator is unknown.
    """
    difference: Any = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "absolute":
        return abs(difference)
    if estimator == "k3":
        # k3 = expm1(d) - d with d = log q/p: expm1 keeps the precision of small d, where exp(d) - 1 would cancel.
        log_ratio = (-difference).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return (np.expm1(log_ratio) if isinstance(log_ratio, np.ndarray) else log_ratio.expm1()) - log_ratio
    raise ValueError(f"unknown KL estimator '{estimator}': expected one of k1, k2, k3 or absolute")


def adapt_coefficient(coefficient: float, kl: float, *, target: float, num_rollouts: int, horizon: int) -> float:
    """Compute the adaptive KL coefficient of the next step (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    The result is coefficient x (1 + clip(kl / target - 1, -0.2, 0.2) x min(num_rollouts / horizon, 1)). Ziegler's last
    factor is num_rollouts / horizon; it is capped at 1 because a horizon shorter than a step could make the coefficient
    negative.

    Args:
        coefficient: Coefficient of the last step.
        kl: Divergence per token measured in the last step.
        target: Target divergence per token.
        num_rollouts: Number of rollouts of the last step.
        horizon: Number of rollouts over which an error of 20 % changes the coefficient by 20 %.
    """
    # arXiv 1909.08593 section 2.2; the clip keeps one unusual step from changing the coefficient much.
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(num_rollouts / horizon, 1.0))
