"""Advantages from a teacher's log-probs of sampled tokens: on-policy distillation by policy gradient. NumPy only."""

from __future__ import annotations

import numpy as np

from roll.types import BoolArray, FloatArray

__all__ = ["compute_teacher_advantages"]


def compute_teacher_advantages(
    logprobs: FloatArray,
    teacher_logprobs: FloatArray,
    loss_mask: BoolArray,
    *,
    coefficient: float = 1.0,
    limit: float | None = None,
) -> FloatArray:
    """Compute -coefficient (log pi_t - log teacher_t) of every token that the policy sampled, shape [L]; 0 elsewhere.

    The mean of these advantages is the negative reverse KL. A policy-gradient loss with these advantages, without a
    baseline and without returns, therefore minimizes KL(policy || teacher) token by token (Thinking Machines,
    "On-Policy Distillation", 2025; MiMo-V2-Flash, 2025). If they are added to the advantages of a reward, both
    objectives are optimized.

    Args:
        logprobs: Log-probs of the sampling policy as the trainer computes them, shape [L].
        teacher_logprobs: Log-probs of the teacher for the same tokens, shape [L].
        loss_mask: True where the policy sampled the token, shape [L].
        coefficient: Weight of the divergence relative to other advantages.
        limit: Bound on the absolute value of an advantage, in nats; `None` for no bound.

    Raises:
        ValueError: The arrays have different lengths.
    """
    if not logprobs.shape == teacher_logprobs.shape == loss_mask.shape:
        shapes = [array.shape for array in (logprobs, teacher_logprobs, loss_mask)]
        raise ValueError(f"log-probs of policy and teacher and the mask must have the same shape, got {shapes}")
    advantages = np.where(loss_mask, coefficient * (teacher_logprobs - logprobs), 0.0)
    return (advantages if limit is None else advantages.clip(-limit, limit)).astype(np.float32)
