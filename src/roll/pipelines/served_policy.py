"""Engines that serve the policy during training: they generate rollouts and receive the new weights.

If engines share devices with trainers, they release these devices before trainers compute (`SharedDevices`). `sync`
restores the weights of the engines; they generate after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from roll.pipelines.colocation import SharedDevices
from roll.pipelines.generation import GenerationParts
from roll.pipelines.run import Run, run_session
from roll.rollout import AsyncController, Batch, SamplingPlan
from roll.rollout.watchdog import Watchdog
from roll.tracking.rollout_trace import trace_engine_steps
from roll.weights import SyncReport, WeightSync

__all__ = ["ServedPolicy"]

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Interval of checks of the engines while a weight sync waits for an evaluation."""


@dataclass(kw_only=True, slots=True)
class ServedPolicy:
    """Engines that serve the policy of a trainer."""

    run: Run[Any]
    """Run of the trainer."""
    generation: GenerationParts
    controller: AsyncController | None = None
    """Assembles rollouts into batches; `None` if the policy is only evaluated."""
    weights: WeightSync
    plan: SamplingPlan
    """Sampling settings of rollouts."""
    devices: SharedDevices | None = None
    """Devices that engines and trainers use alternately."""
    evaluation: asyncio.Task[None] | None = None
    """Background evaluation of an asynchronous run."""

    def __post_init__(self) -> None:
        """Attach the engines to the shared devices; allow individual engines to sleep only between weight syncs."""
        self.generation.proxy.transitions.between_syncs = self.weights.pause_pushes
        if self.controller is not None and self.generation.widths is not None:
            self.controller.round_listener = self.generation.widths
        if self.devices is not None:
            buffer = self.controller.buffer if self.controller is not None else None
            self.devices.attach(self.generation.proxy, buffer, self.weights.pause_pushes)

    @asynccontextmanager
    async def open_session(self, stall_s: float) -> AsyncIterator[None]:
        """Sync the engines and start a watchdog for all steps; save a checkpoint on exit, if possible also after an
        error.

        Args:
            stall_s: Seconds without progress of any rollout after which a warning is logged.
        """
        watchdog = Watchdog(
            self.generation.scheduler.lifecycle, stall_s, logger.warning, self.run.spans.get_open_phases
        )
        watching = asyncio.create_task(watchdog.watch(), name="watchdog")
        try:
            async with run_session(self.run, self.close):
                self.run.tracker.note("syncing the weights to the engines")
                await self.sync()
                await self._start_elastic_engines()
                yield
        finally:
            watching.cancel()

    async def _start_elastic_engines(self) -> None:
        """Start using nodes that join the cluster, and wait for the minimum; the weights must have been synced."""
        if (elastic := self.generation.elastic_engines) is not None:
            elastic.start()
            await self.run.stop.run_unless_stopped(elastic.wait_for_min())

    @asynccontextmanager
    async def enter_training(self) -> AsyncIterator[None]:
        """Switch the shared devices to training. Within this context, trainers may compute and change weights."""
        await self.release_devices()
        async with self.weights.begin_update():
            yield

    async def release_devices(self) -> None:
        """Switch the shared devices to training; the engines on them do not generate until the next `sync`."""
        if self.devices is not None and self.devices.phase == "generation":
            if not self.devices.list_kept_engines():  # an evaluation would wait for the engines for ever
                await self._finish_evaluation()
            with self.run.spans.phase("offload"):
                await self.devices.switch_to_training()

    def is_stream_due(self, num_groups: int) -> bool:
        """Return whether the trainer should start on finished groups now, for which the shared devices are released.

        Args:
            num_groups: Number of finished groups that are certain to be in the next batch.
        """
        return self.devices is None or self.devices.is_stream_due(num_groups)

    def record_stream(self, batch: Batch, *, wait_s: float, step_s: float) -> None:
        """Record a batch whose first groups were trained on while other groups were still generated.

        Args:
            batch: The batch.
            wait_s: Seconds in which the trainer waited for further groups after it had started on the first groups.
            step_s: Seconds from the start of the collection of this batch to its end.
        """
        if self.devices is not None:
            self.devices.record_stream(batch, wait_s=wait_s, step_s=step_s)

    async def wake(self) -> None:
        """Let all engines generate again, and sync the weights to those that have slept since the last sync."""
        if self.devices is not None and self.devices.phase == "training" and not self.devices.is_reserved:
            await self.sync()

    async def sync(self) -> SyncReport:
        """Sync the weights to every engine while engines are paused; an engine that died is replaced and synced too.

        An evaluation in progress is completed first, because it must evaluate a single policy version. If the
        evaluation fails, the run ends at the step boundary. The evaluation is canceled if every engine with the
        evaluated weights has died.
        """
        await self._finish_evaluation()
        devices = self.devices if self.devices is not None and self.devices.should_return() else None
        if devices is not None:
            with self.run.spans.phase("offload"):
                await devices.switch_to_generation()
        pause = self.controller.pause_for_update() if self.controller else nullcontext()
        with self.run.spans.phase("sync"):
            report = await self.weights.push(
                self.run.state.policy_version, pause_generation=pause, on_dead=self.generation.proxy.start_replacing
            )
            if devices is not None:
                await devices.serve(report.engines)
        return report

    async def _finish_evaluation(self) -> None:
        """Wait for the evaluation in progress; cancel it if every engine with the evaluated weights has died."""
        while self.evaluation is not None and not self.evaluation.done():
            if not self.generation.proxy.num_serving_engines:  # fresh engines get weights only in this sync
                logger.warning("the evaluation is canceled, because all engines with the evaluated weights died")
                await self._end_evaluation()
            else:
                await asyncio.wait({self.evaluation}, timeout=POLL_INTERVAL_S)

    async def push(self) -> dict[str, float]:
        """Sync the new weights to every engine, and return the metrics of the sync."""
        return (await self.sync()).compute_metrics()

    def measure_wait(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures a wait for rollouts by phase; the phase `name` is generation."""
        return self.generation.wait_phases.measure_wait(name)

    def get_counts(self) -> Mapping[str, int]:
        """Return the counts of engine changes and reissued requests."""
        counters = self.generation.proxy.get_counters()
        if (elastic := self.generation.elastic_engines) is not None:
            counters |= {"serving": self.generation.proxy.num_serving_engines, **elastic.get_counters()}
        if (widths := self.generation.widths) is not None:
            counters |= widths.get_counters()
        return counters

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of a step's generation."""
        return self.generation.collect_metrics()

    def get_verifier_states(self) -> dict[str, Any]:
        """Return the states of stateful rewards, by domain."""
        states = {domain: reward.state() for domain, reward in self.generation.rewards.items()}
        return {domain: state for domain, state in states.items() if state}

    def trace(self) -> None:
        """Write the engine steps that ended after the previous call to the trace file."""
        trace_engine_steps(self.generation.proxy.engines, self.run.spans.add_event)

    async def wait_for_evaluation(self) -> None:
        """Wait for the evaluation in progress, if any."""
        if self.evaluation is not None:
            await self.evaluation

    async def close(self) -> None:
        """Stop background tasks. Calling it twice is safe."""
        await self._end_evaluation()
        if self.controller is not None:
            await self.controller.close()

    async def _end_evaluation(self) -> None:
        evaluation, self.evaluation = self.evaluation, None
        if evaluation is not None:
            evaluation.cancel()  # once: a second cancellation would interrupt its cleanup of rollouts
            await asyncio.wait({evaluation})
            if not evaluation.cancelled():
                evaluation.exception()  # another error ends the run
