"""The parts of a run whose policy generates rollouts while it trains, or of its replay, and the step's boundary."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roll.algorithms.hacking import BASELINE_STEPS
from roll.config.generating import GeneratingConfig
from roll.pipelines import measures
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.learner import Learner
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.failures import step_alarms
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.boundary import settle, step_metrics
from roll.pipelines.online.protocols import Collected, Engines, Update
from roll.pipelines.run import Run, take_steps
from roll.rollout import Batch, LifeCycle, LLMProxy
from roll.types import PromptDraw, Rollout, RolloutId

__all__ = ["Batches", "OnlineRun", "Recorder", "RunEngines"]

logger = logging.getLogger(__name__)

C_co = TypeVar("C_co", bound=GeneratingConfig, covariant=True)
E_co = TypeVar("E_co", bound="RunEngines", covariant=True)
T = TypeVar("T")


class Batches(Protocol):
    """Source of a loop's batches: see `AsyncController`, or a recording."""

    async def next_batch(self) -> Batch: ...

    async def settle(self, version: int, trained: Collection[RolloutId]) -> None: ...

    def in_flight(self) -> list[PromptDraw]: ...


class Recorder(Protocol):
    """Records everything that passes from generation to training, so that it can be replayed."""

    def listen(self, life: LifeCycle, proxy: LLMProxy) -> None:
        """Observe every transition and every request."""
        ...

    async def record(self, state: LearningState, batch: Batch, demonstrations: Sequence[Rollout]) -> None:
        """Record a step after its boundary is marked and before its metrics are written."""
        ...


class RunEngines(Engines, Protocol):
    """Engines of a run, with methods that are used outside the loop: see `LivePolicy`."""

    def running(self, stall_s: float) -> AbstractAsyncContextManager[None]:
        """See `StepRun.running`, and `rollout.stall_s`."""
        ...

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a wait for rollouts; while the model generates it is a phase called `name`."""
        ...

    def counts(self) -> Mapping[str, int]:
        """See `LLMProxy.counts`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step's generation."""
        ...

    def verifiers(self) -> dict[str, Any] | None:
        """Return by domain the state of rewards that later judgments depend on; `None` if nothing is judged."""
        ...

    def trace(self) -> None:
        """Write the engines' steps to the trace."""
        ...

    async def wait_for_evaluation(self) -> None:
        """Wait for the evaluation in progress, if any."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun(Generic[C_co, E_co]):
    """A run, the source of its batches, its trainers, and the engines that get the weights; implements `StepRun`."""

    config: C_co
    run: Run[LearningState]
    learner: Learner
    batches: Batches
    live: E_co
    """The engines that generate the batches."""
    evaluator: Evaluator | None = None
    """Evaluates the policy; `None` without engines."""
    recorder: Recorder | None = None
    """Recorder of the run, if it is recorded."""

    @property
    def ahead(self) -> bool:
        """Whether generation and evaluation run concurrently with training."""
        return self.config.rollout.scheduling.async_ratio > 0

    def running(self) -> AbstractAsyncContextManager[None]:
        """See `StepRun`."""
        return self.live.running(self.config.rollout.stall_s)

    async def take_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """See `StepRun`."""
        await take_steps(self.run, step)

    async def next_batch(self) -> Batch:
        """See `StepRun`."""
        with self.live.waiting("wait" if self.ahead else "generate"):
            return await self.batches.next_batch()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """See `StepRun`."""
        return await self.run.stop.run_unless_stopped(work)

    def count_update(self) -> None:
        """See `StepRun`."""
        self.run.state.policy_version += 1

    async def finish_step(self, collected: Collected[Any], update: Update, note: Callable[[], None]) -> list[str]:
        """See `StepRun`."""
        run, batch, limits = self.run, collected.batch, self.config.alarms
        state = run.state
        metrics = {**await step_metrics(state, batch, collected.fates), **collected.metrics, **update.metrics}
        with run.spans.phase("record"):
            run.tracker.log_rollouts(state.step + 1, batch.groups, update.advantages, update.tokens)
        run.mid_update = True
        state.step += 1
        settle(run.ledger, collected.fates, state.step)
        if "reward/mean" in metrics:  # at least one answer was scored
            state.first_lengths = [*state.first_lengths, metrics["rollout/length_mean"]][:BASELINE_STEPS]
        await self.batches.settle(state.policy_version, {rollout.rollout_id for rollout in collected.rollouts})
        note()
        self._mark()
        run.mid_update = False
        state.alarms, alarms = check_alarms(limits, metrics, state.alarms)
        alarms += step_alarms(limits, state, batch.groups, first=state.step == run.began_at + 1)
        metrics |= measures.run_metrics(state, run.ledger, self.live.counts()) | self.live.metrics()
        for alarm in alarms:
            logger.warning("%s", alarm.message)
        with run.spans.phase("record"):
            if self.recorder is not None:
                await self.recorder.record(state, batch, collected.demonstrations)
            self.live.trace()
            run.tracker.log_step(state.step, metrics | run.spans.metrics())
        return [alarm.message for alarm in alarms if alarm.stops]

    def _mark(self) -> None:
        """Store the stream's position and the draws in flight, so that a resumed run launches exactly those again."""
        state, stream = self.run.state, self.run.stream
        state.data = stream.state()
        state.num_draws = stream.num_drawn
        state.pending = [[d.draw_id, d.prompt.domain, d.position] for d in self.batches.in_flight()]
        self._remember_verifiers()

    def _remember_verifiers(self) -> None:
        """Store the state of rewards that later judgments depend on."""
        states = self.live.verifiers()
        if states is not None:
            self.run.state.verifiers = states

    async def evaluate(self) -> None:
        """See `StepRun`."""
        if self.evaluator is None:
            return
        if self.ahead:
            await self._evaluate_concurrently(self.evaluator)
        elif await self.evaluator.evaluate_if_due():  # nothing else runs, and this is still the boundary
            self._remember_verifiers()

    async def _evaluate_concurrently(self, evaluator: Evaluator) -> None:
        """Start a background evaluation if it is due; wait for it if the end of the step depends on it."""
        run = self.run
        evaluator.check_last()  # at this point, all updates can be saved
        evaluator.begin_if_due()
        has_stepped = run.state.step > run.began_at
        if has_stepped and (run.checkpoint.keep_best or run.state.step == run.num_steps):
            await run.stop.run_unless_stopped(self.live.wait_for_evaluation())
