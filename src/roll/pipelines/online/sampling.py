"""The source of a run's draws, and the controller that assembles its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from roll.config.rollout_run import RolloutRunConfig
from roll.data import PromptData
from roll.pipelines.generation import GenerationParts
from roll.pipelines.learning.state import LearningState
from roll.rollout import AsyncController, BatchSpec, DataLedger, SamplingPlan
from roll.types import PromptDraw

__all__ = ["DrawSource", "build_controller"]


class DrawSource(Protocol):
    """Source of a controller's draws; `PromptStream` implements it."""

    def draw(self, count: int, domain: str | None = None) -> Sequence[PromptDraw]:
        """Return the next draws; if `domain` is given, only from this domain."""
        ...

    def redraw(self, draw_id: int, domain: str, position: int) -> PromptDraw:
        """Recreate an earlier draw from its ID, its domain and its position in the stream."""
        ...


def build_controller(
    config: RolloutRunConfig,
    state: LearningState,
    data: PromptData,
    ledger: DataLedger,
    generation: GenerationParts,
    plan: SamplingPlan,
    *companions: SamplingPlan,
    draws: DrawSource | None = None,
    **filters: Any,
) -> AsyncController:
    """Build a run's controller; it begins with the draws that were in flight when the previous process ended.

    Args:
        config: Configuration of the run.
        state: State at a step's boundary.
        data: Prompts of the run.
        ledger: Ledger that records every draw.
        generation: Engines and rewards.
        plan: Sampling settings of groups.
        companions: Sampling settings of companion groups for the same prompts.
        draws: Source of draws; by default `data.train`.
        filters: Filters of finished groups, as in `BatchSpec`.
    """

    stream = draws or data.train

    def draw(count: int, domain: str | None) -> Sequence[PromptDraw]:
        drawn = stream.draw(count, domain)
        ledger.record_draws(drawn, state.step + 1)
        return drawn

    rollout = config.rollout
    pending = [stream.redraw(*entry) for entry in state.pending]
    ahead = rollout.scheduling.async_ratio > 0
    quotas = {entry.domain or entry.source: entry.weight for entry in config.data}
    return AsyncController(
        generation.scheduler,
        generation.proxy,
        rollout.scheduling,
        BatchSpec(
            draw=draw,
            plans=(plan, *companions),
            batch_size=rollout.prompts_per_step,
            num_steps=config.training.num_steps - state.step,
            weights=quotas if rollout.scheduling.domain_quotas else {},
            num_allocated=state.step * rollout.prompts_per_step + (len(pending) if ahead else 0),
            **filters,
        ),
        version=state.policy_version,
        pending=pending,
    )
