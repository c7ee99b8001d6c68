"""On-policy distillation, in one short loop:

    sample ─► the teacher scores every token ─► learn ─► sync ─► evaluate ─► sample …

    loss     divergence of whole distributions, token by token      GKD, arXiv 2306.13649, with lambda = 1
    reward   A_t = log teacher_t - log student_t                     Thinking Machines, "On-Policy Distillation", 2025

and in both, with a weight, the advantage of the sources' rewards within a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll.algorithms.choosing import Answers, answers_below
from roll.config.pipelines.distill import DistillConfig
from roll.data.samples import build_batch
from roll.pipelines.distill.losses import distillation_loss, sampled_divergence, with_advantages
from roll.pipelines.distill.teachers import teacher_logprobs
from roll.pipelines.online.online_loop import OnlineLoop, Sampled
from roll.types import Rollout, TrainingBatch

__all__ = ["train"]


async def train(loop: OnlineLoop[DistillConfig], num_tokens: Sequence[int]) -> None:
    """Take the remaining steps.

    Args:
        loop: the parts of a step.
        num_tokens: that each teacher has. A padded student may sample an id beyond them; such an answer is left out.
    """
    config, rollout = loop.config, loop.config.rollout
    loss = distillation_loss(config.distillation)

    async def step() -> list[str]:
        sampled = await loop.sample(known)
        batch = await taught(sampled)
        metrics = await loop.learn(batch, loss, config.updates) | sampled_divergence(batch)
        return await loop.cross_boundary(sampled, metrics, batch)

    def known(rollouts: Sequence[Rollout]) -> list[Answers] | str:
        return answers_below(rollouts, num_tokens=num_tokens[config.teacher_of[rollouts[0].prompt.domain]])

    async def taught(sampled: Sampled) -> TrainingBatch:
        rollouts = sampled.choice.rollouts
        batch = build_batch(rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        pairs = zip(batch.samples, batch.by_sample(rollouts), strict=True)
        batch = replace(batch, samples=tuple(replace(s, teacher=config.teacher_of[r.prompt.domain]) for s, r in pairs))
        if loop.learner.teachers:
            asked = teacher_logprobs(loop.learner.teachers, config.teacher_of, batch, batch.by_sample(rollouts))
            said = await loop.ask("teacher", asked)
            pairs = zip(batch.samples, said, strict=True)
            batch = replace(batch, samples=tuple(replace(s, teacher_logprobs=column) for s, column in pairs))
        return with_advantages(batch, rollouts, config.distillation)

    await loop.repeat(step)
