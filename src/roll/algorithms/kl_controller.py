"""The adaptive KL coefficient (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

from __future__ import annotations

__all__ = ["adapted_coefficient"]


def adapted_coefficient(coefficient: float, kl: float, *, target: float, num_rollouts: int, horizon: int) -> float:
    """coefficient x (1 + clip(kl / target - 1, -0.2, 0.2) x min(num_rollouts / horizon, 1)).

    The last factor is Ziegler's, where the horizon is longer than a step; a shorter one could make the coefficient
    negative.

    Args:
        coefficient: of the step that was made.
        kl: divergence per token that it measured.
        target: where it should be.
        num_rollouts: of the step.
        horizon: rollouts over which an error of 20 % changes the coefficient by 20 %.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(num_rollouts / horizon, 1.0))
