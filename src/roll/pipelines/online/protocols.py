"""The records that the online loop passes on, and its protocols for objective, run and engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from roll.rollout.batch import Batch
from roll.types import Fate, FloatArray, Rollout

__all__ = ["Collected", "Engines", "Objective", "StepRun", "Update"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected(Generic[T]):
    """A step's groups, and what it learns from."""

    batch: Batch
    choice: T
    """What the objective made of them."""
    rollouts: tuple[Rollout, ...]
    """All that is learned from; without any, no weight changes."""
    fates: Mapping[int, tuple[Fate, str]]
    """Of all draws of the batch, by draw id, with the reason where one is not trained."""
    demonstrations: tuple[Rollout, ...] = ()
    """Of prompts of the batch, whether they are learned from or not."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What a step did to the weights."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    stepped: bool = False
    """Whether the policy's weights moved."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """By sample id, the mean advantage of a rollout."""
    tokens: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)
    """Further columns of the record of rollouts: see `TokenColumns`."""


class Objective(Protocol[T]):
    """What a pipeline learns from a batch, and how."""

    async def collect(self, batch: Batch) -> Collected[T]:
        """Choose what is learned from; may be cancelled at any moment."""
        ...

    async def learn(self, collected: Collected[T]) -> Update:
        """Update the trainers; called only where there are rollouts to learn from."""
        ...

    def note(self, collected: Collected[T]) -> None:
        """Remember in the run's state what later steps depend on; called at the step's boundary."""
        ...


class Engines(Protocol):
    """Who answers: see `LivePolicy`."""

    async def wake(self) -> None:
        """See to it that the engines can answer."""
        ...

    def learning(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which trainers may compute and change weights."""
        ...

    async def push(self) -> Mapping[str, float]:
        """Bring the new weights to every engine; returns metrics."""
        ...


class StepRun(Protocol):
    """What lasts of a run: see `OnlineRun`."""

    @property
    def live(self) -> Engines:
        """Who answers."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Be around all steps: engines have the weights, and however it ends, what can be saved is."""
        ...

    async def take_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """Take the remaining steps."""
        ...

    async def next_batch(self) -> Batch:
        """Wait for finished groups."""
        ...

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or cancel it where a signal asks for a stop."""
        ...

    def count_update(self) -> None:
        """Count a policy version."""
        ...

    async def finish_step(self, collected: Collected[Any], update: Update, note: Callable[[], None]) -> list[str]:
        """Cross the step's boundary and return the alarms that stop the run."""
        ...

    async def evaluate(self) -> None:
        """Measure the policy where it is due: now, or beside the next step."""
        ...
