"""Rejection sampling (RAFT, arXiv 2304.06767):

sample → verify → keep the best → fine-tune on them → sync → evaluate → sample …

Log-probs are computed at `rollout.temperature`, as in all pipelines. The loss is the likelihood under the current
weights, so the staleness of an answer does not matter."""

from __future__ import annotations

from functools import partial
from typing import Any

from roll.algorithms.answer_selection import AnswerSelection, select_best_answers
from roll.algorithms.losses import LikelihoodLoss
from roll.config.pipelines.rejection_sampling import RejectionSamplingConfig
from roll.data.samples import build_batch
from roll.pipelines.online.answers import AnswersObjective
from roll.pipelines.online.online_run import OnlineRun
from roll.types import TrainingBatch

__all__ = ["build_objective"]


def build_objective(online: OnlineRun[RejectionSamplingConfig, Any]) -> AnswersObjective:
    """Build the objective that maximizes the likelihood of the best answers."""
    rejection, rollout = online.config.rejection, online.config.rollout

    async def build(choice: AnswerSelection) -> TrainingBatch:
        return build_batch(choice.rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)

    return AnswersObjective(
        online=online,
        choose=partial(select_best_answers, num_answers=rejection.keep, min_reward=rejection.min_reward),
        build=build,
        loss=LikelihoodLoss(aggregation=rejection.aggregation),
        compute_choice_metrics=lambda choice: {"data/rollouts_kept": float(len(choice.rollouts))},
    )
