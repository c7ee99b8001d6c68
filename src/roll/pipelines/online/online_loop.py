"""The parts of a step that pipelines share which learn from rollouts of the newest policy, one step after the other:

    sample ─► choose ─► learn ─► weight sync ─► boundary: every draw has its fate ─► evaluate ─► sample …

Sampling changes nothing that lasts, so a signal can end it; what follows runs to the boundary.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from roll.algorithms.choosing import Answers, Choice, chosen
from roll.config.algorithm_parts import UpdateConfig
from roll.config.generating import GeneratingConfig
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.learner import Learner, train_policy
from roll.pipelines.learning.measures import learning_metrics, mean_advantages
from roll.pipelines.learning.state import LearningState
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.online.boundary import batch_figures, cross_boundary, decided, evaluate_if_due, running
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.run import Run, take_steps
from roll.protocols import LossFn
from roll.rollout import Batch
from roll.types import Rollout, TrainingBatch

__all__ = ["OnlineLoop", "Sampled"]

C = TypeVar("C", bound=GeneratingConfig)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A step's rollouts, and which of them are learnt from."""

    batch: Batch
    choice: Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineLoop(Generic[C]):
    """What a `loop.py` composes its step of."""

    online: OnlineRun[C]
    live: LivePolicy
    evaluator: Evaluator

    @property
    def config(self) -> C:
        """Of the run."""
        return self.online.config

    @property
    def run(self) -> Run[LearningState]:
        """Where it stands."""
        return self.online.run

    @property
    def learner(self) -> Learner:
        """Who learns."""
        return self.online.learner

    async def sample(self, choose: Callable[[Sequence[Rollout]], list[Answers] | str]) -> Sampled:
        """The next prompts' rollouts with their rewards, and those of each group that are learnt from."""
        await self.live.wake(self.run)
        with self.live.generation.wait_phases.waiting("generate"):
            batch = await self.run.stop.unless(self.online.batches.next_batch())
        choice = chosen(batch.groups, choose)
        choice.fates.update(decided(batch))
        return Sampled(batch=batch, choice=choice)

    async def ask(self, role: str, question: Awaitable[T]) -> T:
        """What trainers say that do not learn, once they have the memory of the devices that they share."""
        await self.live.hand_to_trainers(self.run)
        with self.run.spans.phase(role):
            return await question

    async def learn(self, batch: TrainingBatch, loss: LossFn, updates: UpdateConfig) -> dict[str, float]:
        """Update the policy, and bring it to the engines; returns metrics. Nothing happens without a sample."""
        run, live = self.run, self.live
        if not batch.num_loss_tokens:
            return {}
        async with live.learning(run):
            with run.spans.phase("train"):
                results = await train_policy(run, self.learner.policy, batch, loss, updates)
            metrics = learning_metrics(batch, results, ())
            if any(result.stepped for result in results):
                run.state.policy_version += 1
                metrics |= (await live.sync(run)).metrics()
        return metrics

    async def cross_boundary(
        self, sampled: Sampled, metrics: dict[str, float], trained: TrainingBatch | None = None
    ) -> list[str]:
        """The step is done; returns alarms that stop the run.

        Args:
            sampled: what it began with.
            metrics: of what it learnt.
            trained: what it learnt from, where its samples have advantages to be kept with their rollouts.
        """
        run, batch, fates = self.run, sampled.batch, sampled.choice.fates
        metrics = await batch_figures(run.state, batch, fates) | metrics
        with run.spans.phase("record"):
            run.tracker.log_rollouts(run.state.step + 1, batch.groups, mean_advantages(trained) if trained else {})
        learnt = {rollout.rollout_id for rollout in sampled.choice.rollouts}
        return await cross_boundary(self.online, batch, fates, learnt, metrics)

    async def repeat(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """Take the remaining steps, and evaluate between them.

        Raises:
            AlarmError: an alarm stops the run; everything up to this step's boundary is saved.
            Interrupted: a signal asked for a stop; everything up to the last step's boundary is saved.
        """

        async def step_and_evaluate() -> list[str]:
            alarms = await step()
            await evaluate_if_due(self.online, self.evaluator)
            return alarms

        async with running(self.run, self.live, self.config.rollout.stall_s):
            await evaluate_if_due(self.online, self.evaluator)
            await take_steps(self.run, step_and_evaluate)
