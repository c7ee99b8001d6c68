"""Advantages of samples from the rewards of groups, and the turning points of TurningPoint-GRPO: pure NumPy."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["compute_advantages", "compute_reward_weights", "compute_step_rewards"]

EPSILON = 1e-4
"""Added to standard deviations, as in the code of Flow-GRPO."""

FloatArray = NDArray[np.float64]


def compute_advantages(rewards: FloatArray, std: Literal["group", "batch", "none"]) -> FloatArray:
    """Return the advantages (R - group mean) / std; rewards and advantages have the shape [P, G] or [P, G, T].

    Rewards per step are normalized separately for each step.

    Args:
        rewards: The rewards of P groups of G samples.
        std: The standard deviation to divide by: over the group, over all samples of the batch, or none.
    """
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if std == "none":
        return centered
    spread = rewards.std(axis=1, keepdims=True) if std == "group" else rewards.std(axis=(0, 1), keepdims=True)
    return centered / (spread + EPSILON)


def compute_reward_weights(rewards: FloatArray, temperature: float) -> FloatArray:
    """Return weights exp(R / temperature) with mean 1, of the same shape as the rewards."""
    shifted = np.exp((rewards - rewards.max()) / temperature)
    return shifted / shifted.mean()


def compute_step_rewards(completions: FloatArray, *, strict: bool) -> FloatArray:
    """Return the rewards [N, T] of the individual SDE steps (TurningPoint-GRPO, arXiv 2602.06422).

    R_k is the reward of a sample whose first k steps are SDE steps and whose other steps are ODE steps, so R_0 is the
    reward of the ODE path, and R_T is the reward of the full SDE path. The reward of step k is the difference d_k = R_k
    - R_{k-1}. The reward of a turning point is R_T - R_{k-1}, which includes the effect of all later steps. With s_k =
    sign(d_k) sign(R_T - R_0), step k is a turning point if

        k = 1: s_1 > 0          k > 1: s_{k-1} < 0 and s_k > 0
        strict: also sign(d_k) sign(R_T - R_k) > 0; for k = 1 this replaces s_1 > 0

    The numbers of turning points with positive and with negative rewards are then made equal over all samples; the
    turning points with the largest magnitude are kept.

    Args:
        completions: [N, T + 1] rewards R_0, …, R_T.
        strict: Whether to use the strict form.
    """
    last = completions[:, -1:]
    d = np.diff(completions, axis=1)
    s = np.sign(d) * np.sign(last - completions[:, :1])
    continues = np.sign(d) * np.sign(last - completions[:, 1:]) > 0
    turning = np.empty_like(d, dtype=bool)
    turning[:, 0] = continues[:, 0] if strict else s[:, 0] > 0
    turning[:, 1:] = (s[:, :-1] < 0) & (s[:, 1:] > 0)
    if strict:
        turning[:, 1:] &= continues[:, 1:]
    total = last - completions[:, :-1]
    kept = min(int((turning & (total > 0)).sum()), int((turning & (total < 0)).sum()))
    chosen = np.zeros_like(turning)
    for sign in (1, -1):
        places = np.argwhere(turning & (sign * total > 0))
        order = np.argsort([-abs(total[i, k]) for i, k in places], kind="stable")[:kept]
        for i, k in places[order] if len(places) else []:
            chosen[i, k] = True
    return np.where(chosen, total, d)
