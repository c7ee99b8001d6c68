"""Objective of pipelines that train on single answers or pairs of answers, without an `algorithm`:

choose answers of every group ─► outputs of other models ─► the batch ─► a loss
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.algorithms.answer_selection import AnswerSelection, LossUnit, select_rollouts_per_group
from roll.pipelines.learner import train_policy
from roll.pipelines.learning.measures import compute_learning_metrics, compute_mean_advantages
from roll.pipelines.online.boundary import collect_draw_outcomes
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.online.protocols import CollectedBatch, UpdateOutcome
from roll.protocols import LossFn
from roll.rollout import Batch
from roll.types import Rollout, TrainingBatch

__all__ = ["AnswersObjective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersObjective:
    """An `Objective` that trains a loss on chosen answers of each group."""

    online: OnlineRun[Any, Any]
    choose: Callable[[Sequence[Rollout]], list[LossUnit] | str]
    """Returns the answers to train on from a group's scored rollouts, or the reason if there are none."""
    build: Callable[[AnswerSelection], Awaitable[TrainingBatch]]
    """Builds the batch of the chosen answers, with all columns that the loss needs."""
    loss: LossFn
    compute_choice_metrics: Callable[[AnswerSelection], dict[str, float]] = lambda choice: {}
    """Returns metrics of the chosen answers."""
    measure: Callable[[TrainingBatch], dict[str, float]] = lambda batch: {}
    """Returns metrics of a batch before the update."""
    has_advantages: bool = False
    """True if samples have advantages; advantages are recorded with the rollouts."""

    async def collect(self, batch: Batch) -> CollectedBatch[AnswerSelection]:
        """Choose the answers of each group to train on; return them with metrics and the outcome of every draw."""
        choice = select_rollouts_per_group(batch.groups, self.choose)
        choice.draw_outcomes.update(collect_draw_outcomes(batch))
        return CollectedBatch(
            batch=batch,
            choice=choice,
            rollouts=choice.rollouts,
            draw_outcomes=choice.draw_outcomes,
            metrics=self.compute_choice_metrics(choice),
        )

    async def learn(self, collected: CollectedBatch[AnswerSelection]) -> UpdateOutcome:
        """Build the batch of the chosen answers, and update the policy on it."""
        run, policy = self.online.run, self.online.learner.policy
        batch = await self.build(collected.choice)
        with run.spans.phase("train"):
            results = await train_policy(run, policy, batch, self.loss, self.online.config.updates)
        return UpdateOutcome(
            metrics=compute_learning_metrics(batch, results, ()) | self.measure(batch),
            has_new_weights=any(result.stepped for result in results),
            advantages=compute_mean_advantages(batch) if self.has_advantages else {},
        )

    def update_state(self, collected: CollectedBatch[AnswerSelection]) -> None:
        """Do nothing, because this objective has no state."""
