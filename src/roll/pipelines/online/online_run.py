"""The parts of a run whose policy generates rollouts while it trains, or of its replay, and the step's boundary."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from roll.algorithms.hacking import BASELINE_STEPS
from roll.config.rollout_run import RolloutRunConfig
from roll.pipelines import measures
from roll.pipelines.evaluation import Evaluator
from roll.pipelines.learner import Learner
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.failures import check_step_failures
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.boundary import compute_step_metrics, record_draw_outcomes
from roll.pipelines.online.protocols import CollectedBatch, Engines, UpdateOutcome
from roll.pipelines.run import Run, run_steps
from roll.rollout import Batch, LifeCycle, LLMProxy
from roll.types import PromptDraw, Rollout, RolloutId

__all__ = ["BatchSource", "OnlineRun", "Recorder", "RunEngines"]

logger = logging.getLogger(__name__)

C_co = TypeVar("C_co", bound=RolloutRunConfig, covariant=True)
E_co = TypeVar("E_co", bound="RunEngines", covariant=True)
T = TypeVar("T")


class BatchSource(Protocol):
    """Source of a loop's batches: an `AsyncController`, or a recording."""

    async def next_batch(self) -> Batch: ...

    async def complete_step(self, version: int, trained: Collection[RolloutId]) -> None: ...

    def list_in_flight(self) -> list[PromptDraw]: ...


class Recorder(Protocol):
    """Records all data that generation passes to training, for a replay."""

    def listen(self, lifecycle: LifeCycle, proxy: LLMProxy) -> None:
        """Start observing every transition of a rollout and every request to an engine."""
        ...

    async def record(self, state: LearningState, batch: Batch, demonstrations: Sequence[Rollout]) -> None:
        """Record a step after its boundary is marked and before its metrics are written."""
        ...


class RunEngines(Engines, Protocol):
    """Engines of a run, with additional methods that the loop does not use; `ServedPolicy` implements them."""

    def open_session(self, stall_s: float) -> AbstractAsyncContextManager[None]:
        """Return a context manager for all steps that logs a warning after `stall_s` seconds without progress."""
        ...

    def measure_wait(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures a wait for rollouts by phase; the phase `name` is generation."""
        ...

    def get_counts(self) -> Mapping[str, int]:
        """Return the counts of replaced engines and reissued requests."""
        ...

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of a step's generation."""
        ...

    def get_verifier_states(self) -> dict[str, Any] | None:
        """Return the states of stateful rewards, by domain; `None` if the run has no rewards."""
        ...

    def trace(self) -> None:
        """Write the engine steps that ended after the previous call to the trace file."""
        ...

    async def wait_for_evaluation(self) -> None:
        """Wait for the evaluation in progress, if any."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun(Generic[C_co, E_co]):
    """A run with its batch source, its trainers, and the engines that receive the weights; implements `StepRun`."""

    config: C_co
    run: Run[LearningState]
    learner: Learner
    batches: BatchSource
    policy_engines: E_co
    """The engines that generate the batches."""
    evaluator: Evaluator | None = None
    """Evaluates the policy; `None` without engines."""
    recorder: Recorder | None = None
    """Recorder of the run, if it is recorded."""

    @property
    def is_asynchronous(self) -> bool:
        """True if generation and evaluation run concurrently with training."""
        return self.config.rollout.scheduling.async_ratio > 0

    def open_session(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager for all steps; it syncs the engines on entry and saves a checkpoint on exit."""
        return self.policy_engines.open_session(self.config.rollout.stall_s)

    async def run_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """Run the remaining steps."""
        await run_steps(self.run, step)

    async def next_batch(self) -> Batch:
        """Return the next batch, and measure the wait for it as a phase."""
        with self.policy_engines.measure_wait("wait" if self.is_asynchronous else "generate"):
            return await self.batches.next_batch()

    async def run_unless_stopped(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of `coroutine`, or cancel it if a signal requests a stop."""
        return await self.run.stop.run_unless_stopped(coroutine)

    def advance_policy_version(self) -> None:
        """Increase the policy version by 1."""
        self.run.state.policy_version += 1

    async def finish_step(
        self, collected: CollectedBatch[Any], update: UpdateOutcome, update_state: Callable[[], None]
    ) -> list[str]:
        """Complete the step at its boundary, and return the messages of alarms that stop the run."""
        run, batch, limits = self.run, collected.batch, self.config.alarms
        state = run.state
        metrics = {
            **await compute_step_metrics(state, batch, collected.draw_outcomes),
            **collected.metrics,
            **update.metrics,
        }
        with run.spans.phase("record"):
            run.tracker.log_rollouts(state.step + 1, batch.groups, update.advantages, update.tokens)
        # From here until the boundary the state is inconsistent: an error in between must not save it.
        run.mid_update = True
        state.step += 1
        record_draw_outcomes(run.ledger, collected.draw_outcomes, state.step)
        if "reward/mean" in metrics:  # at least one answer was scored
            state.first_lengths = [*state.first_lengths, metrics["rollout/length_mean"]][:BASELINE_STEPS]
        # First, because the boundary stores the draws that are in flight after the trained rollouts are removed.
        await self.batches.complete_step(state.policy_version, {rollout.rollout_id for rollout in collected.rollouts})
        update_state()
        # The stream's position and the draws in flight are stored together, with no await in between that could change
        # them.
        self._mark_boundary()
        run.mid_update = False
        # After the boundary, so that an alarm that stops the run saves the step that it reports.
        state.alarms, alarms = check_alarms(limits, metrics, state.alarms)
        alarms += check_step_failures(limits, state, batch.groups, is_first_step=state.step == run.began_at + 1)
        metrics |= (
            measures.compute_run_metrics(state, run.ledger, self.policy_engines.get_counts())
            | self.policy_engines.collect_metrics()
        )
        for alarm in alarms:
            logger.warning("%s", alarm.message)
        with run.spans.phase("record"):
            if self.recorder is not None:
                await self.recorder.record(state, batch, collected.demonstrations)
            self.policy_engines.trace()
            run.tracker.log_step(state.step, metrics | run.spans.get_metrics())
        return [alarm.message for alarm in alarms if alarm.stops]

    def _mark_boundary(self) -> None:
        """Store the stream's position and the draws in flight, so that a resumed run continues with the same draws."""
        state, stream = self.run.state, self.run.stream
        state.data = stream.state()
        state.num_draws = stream.num_drawn
        state.pending = [[d.draw_id, d.prompt.domain, d.position] for d in self.batches.list_in_flight()]
        self._store_verifier_states()

    def _store_verifier_states(self) -> None:
        """Store the states of stateful rewards, on which later scores depend."""
        states = self.policy_engines.get_verifier_states()
        if states is not None:
            self.run.state.verifiers = states

    async def evaluate(self) -> None:
        """Evaluate the policy if an evaluation is due: now, or concurrently with the next step."""
        if self.evaluator is None:
            return
        if self.is_asynchronous:
            await self._evaluate_concurrently(self.evaluator)
        elif await self.evaluator.evaluate_if_due():  # nothing else runs, and this is still the boundary
            self._store_verifier_states()

    async def _evaluate_concurrently(self, evaluator: Evaluator) -> None:
        """Start a background evaluation if one is due; after the last step, or with `keep_best`, wait until it ends."""
        run = self.run
        evaluator.raise_last_error()  # at this point, all updates can be saved
        evaluator.begin_if_due()
        has_stepped = run.state.step > run.began_at
        if has_stepped and (run.checkpoint.keep_best or run.state.step == run.num_steps):
            await run.stop.run_unless_stopped(self.policy_engines.wait_for_evaluation())
