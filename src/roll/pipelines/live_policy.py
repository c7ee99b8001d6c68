"""A policy that answers while it is trained: its rollouts in batches, its weights on their way to the engines.

Where its engines hand memory over to trainers (`hand_over`), they sleep and lose their weights when trainers begin to
compute, and `sync` brings all of them back: nothing is asked of engines before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from roll.pipelines.generation import Generation
from roll.pipelines.hand_over import SharedDevices
from roll.pipelines.run import Run
from roll.rollout import AsyncController, SamplingPlan
from roll.weights import SyncReport, WeightSync

__all__ = ["LivePolicy"]


@dataclass(kw_only=True, slots=True)
class LivePolicy:
    """Engines that follow a trainer."""

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
    async def learning(self, run: Run[Any]) -> AsyncIterator[None]:
        """Inside, trainers compute and change weights."""
        await self.hand_to_trainers(run)
        async with self.weights.changing():
            yield

    async def hand_to_trainers(self, run: Run[Any]) -> None:
        """Give trainers the memory of the devices that they share with engines, which sleep until the next `sync`."""
        if self.devices is not None and self.devices.phase == "generation":
            with run.spans.phase("hand_over"):
                await self.devices.to_training()

    async def wake(self, run: Run[Any]) -> None:
        """See to it that engines can answer: those that slept since the last sync get the weights again."""
        if self.devices is not None and self.devices.phase == "training":
            await self.sync(run)

    async def sync(self, run: Run[Any]) -> SyncReport:
        """Bring the weights to every engine, which stand still meanwhile; one that died is replaced and gets them too.

        An evaluation is of one policy, so this waits for one that is under way; if that failed, the run ends at the
        boundary.
        """
        if self.evaluation is not None:
            await asyncio.wait({self.evaluation})
        if self.devices is not None and self.devices.phase == "training":
            with run.spans.phase("hand_over"):
                await self.devices.to_generation()
        still = self.controller.updating() if self.controller else nullcontext()
        with run.spans.phase("sync"):
            return await self.weights.push(run.state.policy_version, still=still, on_dead=self.generation.proxy.restore)

    async def evaluated(self) -> None:
        """Wait for the evaluation that is under way, if one is."""
        if self.evaluation is not None:
            await self.evaluation

    async def close(self) -> None:
        """End what runs beside the steps; may be called twice."""
        if self.evaluation is not None:
            self.evaluation.cancel()
        if self.controller is not None:
            await self.controller.close()
