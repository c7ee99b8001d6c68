"""What the loops of `rlvr`, and a replay of one, go round with: from batches to weights, and to batches again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.rlvr.recorder import Recorder
from roll.pipelines.run import Run
from roll.rollout import Batch
from roll.types import PromptDraw, RolloutId

__all__ = ["Batches", "Circle"]


class Batches(Protocol):
    """Where a loop's batches come from: see `AsyncController`, or a recording."""

    async def next_batch(self) -> Batch: ...

    async def settle(self, version: int, trained: Collection[RolloutId]) -> None: ...

    def in_flight(self) -> list[PromptDraw]: ...


@dataclass(kw_only=True, slots=True)
class Circle:
    """Everything that a step passes through."""

    config: RLVRConfig
    run: Run[LearningState]
    learner: Learner
    batches: Batches
    engine_counts: Callable[[], Mapping[str, int]]
    """See `LLMProxy.counts`."""
    live: LivePolicy | None = None
    """The engines that make the batches; `None` where they were recorded."""
    recorder: Recorder | None = None
    """Where the run is recorded."""
