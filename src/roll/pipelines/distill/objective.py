"""On-policy distillation:

    sample ─► the teacher scores every token ─► learn ─► sync ─► evaluate ─► sample …

    loss     divergence of whole distributions, token by token      GKD, arXiv 2306.13649, with lambda = 1
    reward   A_t = log teacher_t - log student_t                     Thinking Machines, "On-Policy Distillation", 2025

and in both, with a weight, the advantage of the sources' rewards within a group.

The divergence is of the current student, whoever wrote the text. The student of A_t, and of the ratios by which all
advantages are weighed, is the one that sampled the token: its `rollout_logprobs`, of whatever policy version they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roll.algorithms.choosing import Answers, Choice, answers_below
from roll.config.pipelines.distill import DistillConfig
from roll.data.samples import build_batch
from roll.pipelines.distill.losses import distillation_loss, sampled_divergence, with_advantages
from roll.pipelines.distill.teachers import teacher_logprobs
from roll.pipelines.online.answers import AnswersObjective
from roll.pipelines.online.online_run import OnlineRun
from roll.types import Rollout, TrainingBatch

__all__ = ["objective"]


def objective(online: OnlineRun[DistillConfig, Any], num_tokens: Sequence[int]) -> AnswersObjective:
    """Return what is learned: to come near to the teacher of each source.

    Args:
        online: the run.
        num_tokens: that each teacher has. A padded student may sample an id beyond them; such an answer is left out.
    """
    config, rollout, teachers, run = online.config, online.config.rollout, online.learner.teachers, online.run

    def known(rollouts: Sequence[Rollout]) -> list[Answers] | str:
        return answers_below(rollouts, num_tokens=num_tokens[config.teacher_of[rollouts[0].prompt.domain]])

    async def build(choice: Choice) -> TrainingBatch:
        rollouts = choice.rollouts
        batch = build_batch(rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        pairs = zip(batch.samples, batch.by_sample(rollouts), strict=True)
        batch = replace(batch, samples=tuple(replace(s, teacher=config.teacher_of[r.prompt.domain]) for s, r in pairs))
        if teachers:
            with run.spans.phase("teacher"):
                said = await teacher_logprobs(teachers, config.teacher_of, batch, batch.by_sample(rollouts))
            pairs = zip(batch.samples, said, strict=True)
            batch = replace(batch, samples=tuple(replace(s, teacher_logprobs=column) for s, column in pairs))
        return with_advantages(batch, rollouts, config.distillation)

    return AnswersObjective(
        online=online,
        choose=known,
        build=build,
        loss=distillation_loss(config.distillation),
        measure=sampled_divergence,
        has_advantages=True,
    )
