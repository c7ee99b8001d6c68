"""Objective of pipelines that train on single answers or pairs of answers, without an `algorithm`:

choose answers of every group ─► outputs of other models ─► the batch ─► a loss
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll.algorithms.choosing import Answers, Choice, choose_rollouts
from roll.pipelines.learner import train_policy
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.online.boundary import fates_of_groups
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.online.protocols import Collected, Update
from roll.protocols import LossFn
from roll.rollout import Batch
from roll.types import Rollout, TrainingBatch

__all__ = ["AnswersObjective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersObjective:
    """Implements `Objective`."""

    online: OnlineRun[Any, Any]
    choose: Callable[[Sequence[Rollout]], list[Answers] | str]
    """Returns the answers to train on from a group's scored rollouts, or why there are none."""
    build: Callable[[Choice], Awaitable[TrainingBatch]]
    """Builds the batch of the chosen answers, with all columns that the loss needs."""
    loss: LossFn
    count: Callable[[Choice], dict[str, float]] = lambda choice: {}
    """Returns metrics of the choice."""
    measure: Callable[[TrainingBatch], dict[str, float]] = lambda batch: {}
    """Returns metrics of a batch before the update."""
    has_advantages: bool = False
    """Whether samples have advantages, which are recorded with their rollouts."""

    async def collect(self, batch: Batch) -> Collected[Choice]:
        """Choose among the answers of each group."""
        choice = choose_rollouts(batch.groups, self.choose)
        choice.fates.update(fates_of_groups(batch))
        return Collected(
            batch=batch,
            choice=choice,
            rollouts=choice.rollouts,
            fates=choice.fates,
            metrics=self.count(choice),
        )

    async def learn(self, collected: Collected[Choice]) -> Update:
        """Update the policy."""
        run, policy = self.online.run, self.online.learner.policy
        batch = await self.build(collected.choice)
        with run.spans.phase("train"):
            results = await train_policy(run, policy, batch, self.loss, self.online.config.updates)
        return Update(
            metrics=learning_metrics(batch, results, ()) | self.measure(batch),
            stepped=any(result.stepped for result in results),
            advantages=mean_advantages(batch) if self.has_advantages else {},
        )

    def note(self, collected: Collected[Choice]) -> None:
        """Do nothing: every step depends only on its own answers."""
