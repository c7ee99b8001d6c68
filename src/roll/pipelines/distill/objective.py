"""On-policy distillation:

    sample ─► the teacher scores every token ─► learn ─► sync ─► evaluate ─► sample …

    loss     divergence of whole distributions, token by token      GKD, arXiv 2306.13649, with lambda = 1
    reward   A_t = log teacher_t - log student_t                     Thinking Machines, "On-Policy Distillation", 2025

Both can add the group-normalized advantages of the sources' rewards, with a weight.

The divergence is computed for the current student, even if an older policy version sampled the text. A_t, and the
ratios that weight all advantages, use the `rollout_logprobs` of the policy version that sampled the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roll.algorithms.answer_selection import AnswerSelection, LossUnit, select_answers_in_vocabulary
from roll.algorithms.correction import Correction
from roll.algorithms.losses import DistillationLoss, PolicyLoss, SummedLoss
from roll.algorithms.normalization import standardize_by_group
from roll.algorithms.teacher_advantages import compute_teacher_advantages
from roll.config.distillation import DistillationConfig
from roll.config.pipelines.distill import DistillConfig
from roll.data.samples import build_batch
from roll.pipelines.distill.teachers import compute_teacher_logprobs
from roll.pipelines.online.answers import AnswersObjective
from roll.pipelines.online.online_run import OnlineRun
from roll.protocols import LossFn
from roll.types import Rollout, TrainingBatch

__all__ = ["attach_advantages", "build_distillation_loss", "build_objective", "estimate_divergence"]


def build_objective(online: OnlineRun[DistillConfig, Any], num_tokens: Sequence[int]) -> AnswersObjective:
    """Build the objective that minimizes the student's divergence from the teacher of each source.

    Args:
        online: The run.
        num_tokens: Vocabulary size of each teacher. A student with a padded vocabulary may sample larger IDs; answers
            with such IDs are left out.
    """
    config, rollout, teachers, run = online.config, online.config.rollout, online.learner.teachers, online.run

    def select_in_vocabulary(rollouts: Sequence[Rollout]) -> list[LossUnit] | str:
        return select_answers_in_vocabulary(
            rollouts, vocab_size=num_tokens[config.teacher_by_domain[rollouts[0].prompt.domain]]
        )

    async def build(choice: AnswerSelection) -> TrainingBatch:
        rollouts = choice.rollouts
        batch = build_batch(rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        pairs = zip(batch.samples, batch.expand_to_samples(rollouts), strict=True)
        batch = replace(
            batch, samples=tuple(replace(s, teacher=config.teacher_by_domain[r.prompt.domain]) for s, r in pairs)
        )
        if teachers:
            with run.spans.phase("teacher"):
                columns = await compute_teacher_logprobs(
                    teachers, config.teacher_by_domain, batch, batch.expand_to_samples(rollouts)
                )
            pairs = zip(batch.samples, columns, strict=True)
            batch = replace(batch, samples=tuple(replace(s, teacher_logprobs=column) for s, column in pairs))
        return attach_advantages(batch, rollouts, config.distillation)

    return AnswersObjective(
        online=online,
        choose=select_in_vocabulary,
        build=build,
        loss=build_distillation_loss(config.distillation),
        measure=estimate_divergence,
        has_advantages=True,
    )


def build_distillation_loss(config: DistillationConfig) -> LossFn:
    """Return the loss: the divergence, a policy gradient on the advantages of `attach_advantages`, or their sum.

    Ratios and the teacher's advantages are relative to the engine's log-probs.
    """
    gradient = PolicyLoss(ratio_against="rollout", aggregation=config.aggregation, correction=Correction(upper=None))
    if config.mode == "reward":
        return gradient
    divergence = DistillationLoss(divergence=config.divergence_spec, aggregation=config.aggregation)
    if not config.reward_weight:
        return divergence if config.coefficient == 1.0 else SummedLoss(parts=((config.coefficient, divergence),))
    return SummedLoss(parts=((config.coefficient, divergence), (1.0, gradient)))


def attach_advantages(batch: TrainingBatch, rollouts: Sequence[Rollout], config: DistillationConfig) -> TrainingBatch:
    """Return the batch with advantages from rewards and, if the teachers' log-probs are present, from teachers.

    Args:
        batch: The batch of the rollouts, in the same order.
        rollouts: Rollouts with rewards.
        config: Weights of teachers and rewards.
    """
    rewards = np.array([r.reward.value if r.reward else 0.0 for r in rollouts], dtype=np.float64)
    earned = config.reward_weight * standardize_by_group(rewards, [r.draw_id for r in rollouts])
    samples = []
    for sample, value in zip(batch.samples, batch.expand_to_samples(earned.tolist()), strict=True):
        advantages = np.where(sample.loss_mask, value, 0.0).astype(np.float32)
        if sample.teacher_logprobs is not None and sample.rollout_logprobs is not None:
            advantages += compute_teacher_advantages(
                sample.rollout_logprobs,
                sample.teacher_logprobs,
                sample.loss_mask,
                coefficient=config.coefficient,
                limit=config.limit,
            )
        samples.append(replace(sample, advantages=advantages))
    return replace(batch, samples=tuple(samples))


def estimate_divergence(batch: TrainingBatch) -> dict[str, float]:
    """Estimate KL(student || teacher) per token before the update, from the sampled tokens.

    The result is empty without teacher log-probs.

    The metric has the same name as the exact divergence.
    """
    found = [
        (s.rollout_logprobs - s.teacher_logprobs)[s.loss_mask]
        for s in batch.samples
        if s.rollout_logprobs is not None and s.teacher_logprobs is not None
    ]
    return {"training/distill/divergence": float(np.concatenate(found).mean())} if found else {}
