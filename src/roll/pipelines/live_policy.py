"""A policy that answers while it is trained: its rollouts in batches, its weights on their way to the engines.

Where its engines hand memory over to trainers (`hand_over`), they sleep and lose their weights when trainers begin to
compute, and `sync` brings all of them back: nothing is asked of engines before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from roll.pipelines.generation import Generation
from roll.pipelines.hand_over import SharedDevices
from roll.pipelines.run import Run, whole_run
from roll.rollout import AsyncController, SamplingPlan
from roll.rollout.watchdog import Watchdog
from roll.tracking.rollout_trace import trace_engine_steps
from roll.weights import SyncReport, WeightSync

__all__ = ["LivePolicy"]

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the engines of an evaluation that a weight sync waits for."""


@dataclass(kw_only=True, slots=True)
class LivePolicy:
    """Engines that follow a trainer."""

    run: Run[Any]
    """Of the trainer."""
    generation: Generation
    controller: AsyncController | None = None
    """Makes its rollouts up to batches; `None` where it only answers to be measured."""
    weights: WeightSync
    plan: SamplingPlan
    """How its rollouts are sampled."""
    devices: SharedDevices | None = None
    """Those that engines and trainers hand over to each other."""
    evaluation: asyncio.Task[None] | None = None
    """Runs beside training in an asynchronous run."""

    def __post_init__(self) -> None:
        """Let shared devices know the engines, and engines fall asleep between weight syncs alone."""
        self.generation.proxy.transitions.between_syncs = self.weights.between
        if self.devices is not None:
            self.devices.join(self.generation.proxy)

    @asynccontextmanager
    async def running(self, stall_s: float) -> AsyncIterator[None]:
        """Be around all steps: the engines have the weights, and however it ends, what can be saved is.

        Args:
            stall_s: after so many seconds in which no rollout moved, a warning says what is waited for.
        """
        dog = Watchdog(self.generation.scheduler.life, stall_s, logger.warning, self.run.spans.under_way)
        watchdog = asyncio.create_task(dog.watch(), name="watchdog")
        try:
            async with whole_run(self.run, self.close):
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
        """Give trainers the memory of the devices that they share with engines, which sleep until the next `sync`."""
        if self.devices is not None and self.devices.phase == "generation":
            with self.run.spans.phase("hand_over"):
                await self.devices.to_training()

    async def wake(self) -> None:
        """See to it that engines can answer: those that slept since the last sync get the weights again."""
        if self.devices is not None and self.devices.phase == "training":
            await self.sync()

    async def sync(self) -> SyncReport:
        """Bring the weights to every engine, which stand still meanwhile; one that died is replaced and gets them too.

        An evaluation is of one policy, so this waits for one that is under way; if that failed, the run ends at the
        boundary. Without an engine that still has its weights it is given up, since nobody can end it.
        """
        while self.evaluation is not None and not self.evaluation.done():
            if not self.generation.proxy.num_serving:  # fresh ones get weights with this sync alone
                logger.warning("an evaluation is given up, since all engines died that had the weights it is of")
                await self._end_evaluation()
            else:
                await asyncio.wait({self.evaluation}, timeout=LOOK_S)
        if self.devices is not None and self.devices.phase == "training":
            with self.run.spans.phase("hand_over"):
                await self.devices.to_generation()
        still = self.controller.updating() if self.controller else nullcontext()
        with self.run.spans.phase("sync"):
            return await self.weights.push(
                self.run.state.policy_version, still=still, on_dead=self.generation.proxy.restore
            )

    async def push(self) -> dict[str, float]:
        """Bring the new weights to every engine; returns metrics: see `sync`."""
        return (await self.sync()).metrics()

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a wait for rollouts; while the model writes it is a phase called `name`."""
        return self.generation.wait_phases.waiting(name)

    def counts(self) -> Mapping[str, int]:
        """Return what happened to requests: see `LLMProxy.counts`."""
        return self.generation.proxy.counts()

    def metrics(self) -> dict[str, float]:
        """Return those of a step's generation."""
        return self.generation.metrics()

    def verifiers(self) -> dict[str, Any]:
        """Return, by domain, what rewards know that later judgements depend on."""
        states = {domain: reward.state() for domain, reward in self.generation.rewards.items()}
        return {domain: state for domain, state in states.items() if state}

    def trace(self) -> None:
        """Bring what engines did to the trace."""
        trace_engine_steps(self.generation.proxy.engines, self.run.spans.event)

    async def evaluated(self) -> None:
        """Wait for the evaluation that is under way, if one is."""
        if self.evaluation is not None:
            await self.evaluation

    async def close(self) -> None:
        """End what runs beside the steps; may be called twice."""
        await self._end_evaluation()
        if self.controller is not None:
            await self.controller.close()

    async def _end_evaluation(self) -> None:
        evaluation, self.evaluation = self.evaluation, None
        if evaluation is not None:
            evaluation.cancel()  # once: cancelled again, it could not see its rollouts end
            await asyncio.wait({evaluation})
            if not evaluation.cancelled():
                evaluation.exception()  # another error ends the run
