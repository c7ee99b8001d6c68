"""What a step of distillation learns by: a divergence, advantages from a teacher, and those of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll.algorithms.correction import Correction
from roll.algorithms.losses import DistillationLoss, PolicyLoss, SummedLoss
from roll.algorithms.normalise import standardised
from roll.algorithms.teaching import teacher_advantages
from roll.config.distillation import DistillationConfig
from roll.protocols import LossFn
from roll.types import Rollout, TrainingBatch

__all__ = ["distillation_loss", "sampled_divergence", "with_advantages"]


def distillation_loss(config: DistillationConfig) -> LossFn:
    """The divergence, and beside it, or alone, a policy gradient with the advantages of `with_advantages`.

    Ratios are to the engine's probabilities, which are also those that a teacher's are compared with.
    """
    gradient = PolicyLoss(ratio_against="rollout", aggregation=config.aggregation, correction=Correction(upper=None))
    if config.place == "reward":
        return gradient
    divergence = DistillationLoss(divergence=config.form, aggregation=config.aggregation)
    if not config.reward_weight:
        return divergence if config.coefficient == 1.0 else SummedLoss(parts=((config.coefficient, divergence),))
    return SummedLoss(parts=((config.coefficient, divergence), (1.0, gradient)))


def with_advantages(batch: TrainingBatch, rollouts: Sequence[Rollout], config: DistillationConfig) -> TrainingBatch:
    """What every token is worth: to its teacher, where its log-probs are there, and by its rollout's reward.

    Args:
        batch: of the rollouts, in their order.
        rollouts: with their rewards.
        config: what either counts.
    """
    rewards = np.array([r.reward.value if r.reward else 0.0 for r in rollouts], dtype=np.float64)
    earned = config.reward_weight * standardised(rewards, [r.draw_id for r in rollouts])
    samples = []
    for sample, value in zip(batch.samples, batch.by_sample(earned.tolist()), strict=True):
        advantages = np.where(sample.loss_mask, value, 0.0).astype(np.float32)
        if sample.teacher_logprobs is not None and sample.rollout_logprobs is not None:
            advantages += teacher_advantages(
                sample.rollout_logprobs,
                sample.teacher_logprobs,
                sample.loss_mask,
                coefficient=config.coefficient,
                limit=config.limit,
            )
        samples.append(replace(sample, advantages=advantages))
    return replace(batch, samples=tuple(samples))


def sampled_divergence(batch: TrainingBatch) -> dict[str, float]:
    """KL(student || teacher) per token before the update, as the sampled tokens show it; empty without log-probs of a
    teacher. It is the metric that the exact divergence has.
    """
    found = [
        (s.rollout_logprobs - s.teacher_logprobs)[s.loss_mask]
        for s in batch.samples
        if s.rollout_logprobs is not None and s.teacher_logprobs is not None
    ]
    return {"training/distill/divergence": float(np.concatenate(found).mean())} if found else {}
