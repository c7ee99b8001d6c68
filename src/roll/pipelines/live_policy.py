"""A policy that answers while it is trained: its rollouts in batches, its weights on their way to the engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from roll.pipelines.generation import Generation
from roll.pipelines.run import Run
from roll.rollout import AsyncController, SamplingPlan
from roll.weights import SyncReport, WeightSync

__all__ = ["LivePolicy"]


@dataclass(kw_only=True, slots=True)
class LivePolicy:
    """Engines that follow a trainer."""

    generation: Generation
    controller: AsyncController
    """Makes its rollouts up to batches."""
    weights: WeightSync
    plan: SamplingPlan
    """How its rollouts are sampled."""
    evaluation: asyncio.Task[None] | None = None
    """Runs beside training in an asynchronous run."""

    async def sync(self, run: Run) -> SyncReport:
        """Bring the weights to every engine, which stand still meanwhile; one that died is replaced and gets them too.

        An evaluation is of one policy, so this waits for one that is under way; if that failed, the run ends at the
        boundary.
        """
        if self.evaluation is not None:
            await asyncio.wait({self.evaluation})
        with run.spans.phase("sync"):
            report = await self.weights.push(run.state.policy_version, still=self.controller.updating())
            self.generation.proxy.restore(report.dead)
        return report

    async def evaluated(self) -> None:
        """Wait for the evaluation that is under way, if one is."""
        if self.evaluation is not None:
            await self.evaluation

    async def close(self) -> None:
        """End what runs beside the steps; may be called twice."""
        if self.evaluation is not None:
            self.evaluation.cancel()
        await self.controller.close()
