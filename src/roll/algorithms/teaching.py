"""A teacher's judgement of sampled tokens as advantages: on-policy distillation by policy gradient, without torch."""

from __future__ import annotations

import numpy as np

from roll.types import BoolArray, FloatArray

__all__ = ["teacher_advantages"]


def teacher_advantages(
    logprobs: FloatArray,
    teacher_logprobs: FloatArray,
    loss_mask: BoolArray,
    *,
    coefficient: float = 1.0,
    limit: float | None = None,
) -> FloatArray:
    """-coefficient (log pi_t - log teacher_t) of every token the policy sampled; 0 elsewhere.

    Its mean is minus the reverse KL, so a policy-gradient loss with these as advantages, without a baseline and without
    looking ahead, lowers KL(policy || teacher) token by token (Thinking Machines, "On-Policy Distillation", 2025;
    MiMo-V2-Flash, 2025). Added to a reward's advantages, both are learned from.

    Args:
        logprobs: [L] of the policy that sampled, as the trainer computes them.
        teacher_logprobs: [L] of the teacher, given the same tokens.
        loss_mask: [L] True where the policy sampled the token.
        coefficient: of the divergence, against other advantages.
        limit: advantages are cut at this size, in nats; `None`: they are not.

    Raises:
        ValueError: the arrays are of different lengths.
    """
    if not logprobs.shape == teacher_logprobs.shape == loss_mask.shape:
        shapes = [array.shape for array in (logprobs, teacher_logprobs, loss_mask)]
        raise ValueError(f"log-probs of policy and teacher and the mask are of one sample, but have shapes {shapes}")
    advantages = np.where(loss_mask, coefficient * (teacher_logprobs - logprobs), 0.0)
    return (advantages if limit is None else advantages.clip(-limit, limit)).astype(np.float32)
