"""Everything a pipeline works with, made by `setup.open_parts`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from roll.config.pipelines.rlvr import RLVRConfig
from roll.data import Data
from roll.pipelines.checkpoint import Checkpointer
from roll.pipelines.judge import JudgeRole
from roll.pipelines.learning.failures import Retries
from roll.pipelines.replay.recorder import Recorder
from roll.pipelines.state import RunState
from roll.pipelines.stop import StopRequest
from roll.protocols import Scorer, TrainerGroup
from roll.rewards.compose import WeightedReward
from roll.rollout import Batch, DataLedger, LLMProxy, RolloutScheduler, SamplingPlan
from roll.tracking import Spans, Tracker
from roll.tracking.stages import Stages
from roll.types import PromptDraw
from roll.weights import SyncReport

__all__ = ["Batches", "Parts", "Weights"]


class Batches(Protocol):
    """Where a loop's batches come from: see `AsyncController`, or a recording."""

    async def next_batch(self) -> Batch: ...

    def updating(self) -> AbstractAsyncContextManager[None]: ...

    async def settle(self, version: int, trained: Collection[str]) -> None: ...

    def in_flight(self) -> list[PromptDraw]: ...

    async def close(self) -> None: ...


class Weights(Protocol):
    """Where a loop's weights go: see `WeightSync`."""

    def changing(self) -> AbstractAsyncContextManager[None]: ...

    async def push(
        self, policy_version: int, *, still: AbstractAsyncContextManager[object] | None = None
    ) -> SyncReport: ...


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
    controller: Batches
    rewards: Mapping[str, WeightedReward]
    """By domain."""
    judge: JudgeRole | None = None
    """The run's own judge, where rewards ask one."""
    train_plan: SamplingPlan
    eval_plan: SamplingPlan
    trainer: TrainerGroup
    reference: Scorer | None
    """The initial policy, where the KL penalty needs it."""
    critics: tuple[TrainerGroup, ...]
    """Value models, where the algorithm has any."""
    weights: Weights
    checkpointer: Checkpointer
    tracker: Tracker
    spans: Spans
    stages: Stages
    stop: StopRequest
    began_at: int = 0
    """Step after which this session began."""
    mid_update: bool = False
    """Whether trainers may have moved on from the last boundary: until the next one, nothing true can be saved."""
    retries: Retries = field(default_factory=Retries)
    recorder: Recorder | None = None
    """Where the run is recorded."""
    evaluation: asyncio.Task[None] | None = None
    """Runs beside training in an asynchronous run."""
