"""The parts of a run whose policy answers prompts while it learns, or of the replay of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from roll.config.generating import GeneratingConfig
from roll.pipelines.learner import Learner
from roll.pipelines.learning.state import LearningState
from roll.pipelines.live_policy import LivePolicy
from roll.pipelines.run import Run
from roll.rollout import Batch, LifeCycle, LLMProxy
from roll.types import PromptDraw, Rollout, RolloutId

__all__ = ["Batches", "OnlineRun", "Recorder"]

C_co = TypeVar("C_co", bound=GeneratingConfig, covariant=True)


class Batches(Protocol):
    """Where a loop's batches come from: see `AsyncController`, or a recording."""

    async def next_batch(self) -> Batch: ...

    async def settle(self, version: int, trained: Collection[RolloutId]) -> None: ...

    def in_flight(self) -> list[PromptDraw]: ...


class Recorder(Protocol):
    """Keeps what crosses from generation to training, so that it can be played again."""

    def listen(self, life: LifeCycle, proxy: LLMProxy) -> None:
        """Be told of every transition, and of every request."""
        ...

    async def record(self, state: LearningState, batch: Batch, demonstrations: Sequence[Rollout]) -> None:
        """A step is done, its boundary marked, its metrics not yet written."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineRun(Generic[C_co]):
    """A run, where its batches come from, what learns from them, and the engines that get the weights."""

    config: C_co
    run: Run[LearningState]
    learner: Learner
    batches: Batches
    engine_counts: Callable[[], Mapping[str, int]]
    """See `LLMProxy.counts`."""
    live: LivePolicy | None = None
    """The engines that make the batches; `None` where they were recorded."""
    recorder: Recorder | None = None
    """Where the run is recorded."""
