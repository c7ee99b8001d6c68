"""A policy that answers while it is trained: its rollouts in batches, its weights on their way to the engines.

If engines hand memory over to trainers (`hand_over`), they sleep and lose their weights when trainers start to compute,
and `sync` restores all weights: engines are not called before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from roll.pipelines.colocation import SharedDevices
from roll.pipelines.generation import Generation
from roll.pipelines.run import Run, run_session
from roll.rollout import AsyncController, SamplingPlan
from roll.rollout.watchdog import Watchdog
from roll.tracking.rollout_trace import trace_engine_steps
from roll.weights import SyncReport, WeightSync

__all__ = ["ServedPolicy"]

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of checks of the engines while a weight sync waits for an evaluation."""


@dataclass(kw_only=True, slots=True)
class ServedPolicy:
    """Engines that serve the policy of a trainer."""

    run: Run[Any]
    """Run of the trainer."""
    generation: Generation
    controller: AsyncController | None = None
    """Assembles rollouts to batches; `None` if the policy is only evaluated."""
    weights: WeightSync
    plan: SamplingPlan
    """How rollouts are sampled."""
    devices: SharedDevices | None = None
    """Devices that engines and trainers hand over to each other."""
    evaluation: asyncio.Task[None] | None = None
    """Background evaluation of an asynchronous run."""

    def __post_init__(self) -> None:
        """Connect the engines to the shared devices, and let single engines go to sleep only between weight syncs."""
        self.generation.proxy.transitions.between_syncs = self.weights.pause_pushes
        if self.devices is not None:
            self.devices.join(self.generation.proxy)

    @asynccontextmanager
    async def running(self, stall_s: float) -> AsyncIterator[None]:
        """Run the body, all steps, with synced engines and a watchdog, and save what can be saved however it ends.

        Args:
            stall_s: Seconds without progress of any rollout after which a warning is logged.
        """
        dog = Watchdog(self.generation.scheduler.life, stall_s, logger.warning, self.run.spans.under_way)
        watchdog = asyncio.create_task(dog.watch(), name="watchdog")
        try:
            async with run_session(self.run, self.close):
                self.run.tracker.note("bringing the weights to the engines")
                await self.sync()
                yield
        finally:
            watchdog.cancel()

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """Run the body with the shared devices given to trainers, which may compute and change weights."""
        await self.hand_to_trainers()
        async with self.weights.changing():
            yield

    async def hand_to_trainers(self) -> None:
        """Give the shared devices to trainers; the engines sleep until the next `sync`."""
        if self.devices is not None and self.devices.phase == "generation":
            with self.run.spans.phase("offload"):
                await self.devices.to_training()

    async def wake(self) -> None:
        """Make sure that engines can answer: engines that slept since the last sync get the weights again."""
        if self.devices is not None and self.devices.phase == "training":
            await self.sync()

    async def sync(self) -> SyncReport:
        """Sync the weights to every engine while engines are paused; an engine that died is replaced and synced too.

        An evaluation is of one policy version, so this waits for an evaluation in progress; if that failed, the run
        ends at the boundary. The evaluation is given up if no engine with its weights is left to finish it.
        """
        while self.evaluation is not None and not self.evaluation.done():
            if not self.generation.proxy.num_serving:  # fresh engines get weights only in this sync
                logger.warning("an evaluation is given up, since all engines died that had the weights it is of")
                await self._end_evaluation()
            else:
                await asyncio.wait({self.evaluation}, timeout=LOOK_S)
        if self.devices is not None and self.devices.phase == "training":
            with self.run.spans.phase("offload"):
                await self.devices.to_generation()
        still = self.controller.updating() if self.controller else nullcontext()
        with self.run.spans.phase("sync"):
            return await self.weights.push(
                self.run.state.policy_version, pause_generation=still, on_dead=self.generation.proxy.restore
            )

    async def push(self) -> dict[str, float]:
        """Sync the new weights to every engine, and return metrics: see `sync`."""
        return (await self.sync()).metrics()

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a wait for rollouts; while the model generates it is a phase called `name`."""
        return self.generation.wait_phases.waiting(name)

    def counts(self) -> Mapping[str, int]:
        """Return the counts of engines and requests: see `LLMProxy.counts`."""
        return self.generation.proxy.counts()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step's generation."""
        return self.generation.metrics()

    def verifiers(self) -> dict[str, Any]:
        """Return by domain the state of rewards that later judgments depend on."""
        states = {domain: reward.state() for domain, reward in self.generation.rewards.items()}
        return {domain: state for domain, state in states.items() if state}

    def trace(self) -> None:
        """Write the engines' steps to the trace."""
        trace_engine_steps(self.generation.proxy.engines, self.run.spans.event)

    async def wait_for_evaluation(self) -> None:
        """Wait for the evaluation in progress, if any."""
        if self.evaluation is not None:
            await self.evaluation

    async def close(self) -> None:
        """Stop background tasks; may be called twice."""
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
