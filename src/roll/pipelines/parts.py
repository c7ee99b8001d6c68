"""Everything a pipeline works with, made by `setup.open_parts`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from roll.config import RLVRConfig
from roll.data import Data
from roll.pipelines.checkpoint import Checkpointer
from roll.pipelines.state import RunState
from roll.pipelines.stop import StopRequest
from roll.protocols import Scorer, TrainerGroup
from roll.rewards.compose import WeightedReward
from roll.rollout import AsyncController, DataLedger, LLMProxy, RolloutScheduler, SamplingPlan
from roll.tracking import Spans, Tracker
from roll.types import PromptDraw
from roll.weights import WeightSync

__all__ = ["Parts"]


@dataclass(kw_only=True, slots=True)
class Parts:
    """The nouns of the loop."""

    config: RLVRConfig
    state: RunState
    data: Data
    held_out: list[PromptDraw]
    """What every evaluation answers."""
    ledger: DataLedger
    proxy: LLMProxy
    scheduler: RolloutScheduler
    controller: AsyncController
    rewards: Mapping[str, WeightedReward]
    """By domain."""
    train_plan: SamplingPlan
    eval_plan: SamplingPlan
    trainer: TrainerGroup
    reference: Scorer | None
    """The initial policy, where the KL penalty needs it."""
    critics: tuple[TrainerGroup, ...]
    """Value models, where the algorithm has any."""
    weights: WeightSync
    checkpointer: Checkpointer
    tracker: Tracker
    spans: Spans
    stop: StopRequest
    evaluation: asyncio.Task[None] | None = None
    """Runs beside training in an asynchronous run."""
