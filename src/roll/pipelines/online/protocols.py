"""Records of the online loop, and its protocols of objective, run and engines."""

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
    """A step's groups, and the rollouts that it trains on."""

    batch: Batch
    choice: T
    """The objective's choice of rollouts."""
    rollouts: tuple[Rollout, ...]
    """All rollouts that are trained; if empty, no weight changes."""
    fates: Mapping[int, tuple[Fate, str]]
    """Fates of all draws of the batch, by draw id, with the reason if a draw is not trained."""
    demonstrations: tuple[Rollout, ...] = ()
    """Demonstrations of the batch's prompts, whether they are trained or not."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The results of a step's updates."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    stepped: bool = False
    """Whether the policy's weights changed."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """Mean advantage of each rollout, by sample id."""
    tokens: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)
    """Additional columns of the table of rollouts: see `TokenColumns`."""


class Objective(Protocol[T]):
    """A pipeline's objective: how it trains on a batch."""

    async def collect(self, batch: Batch) -> Collected[T]:
        """Choose the rollouts to train on; may be canceled at any moment."""
        ...

    async def learn(self, collected: Collected[T]) -> Update:
        """Update the trainers; called only if there are rollouts to train on."""
        ...

    def note(self, collected: Collected[T]) -> None:
        """Store in the run's state what later steps depend on; called at the step's boundary."""
        ...


class Engines(Protocol):
    """Engines of the policy: see `LivePolicy`."""

    async def wake(self) -> None:
        """Make sure that the engines can answer."""
        ...

    def learning(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which trainers may compute and change weights."""
        ...

    async def push(self) -> Mapping[str, float]:
        """Sync the new weights to every engine, and return metrics."""
        ...


class StepRun(Protocol):
    """A run as the loop uses it: see `OnlineRun`."""

    @property
    def live(self) -> Engines:
        """Engines of the policy."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the body, all steps, with synced engines, and save what can be saved however it ends."""
        ...

    async def take_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """Run the remaining steps."""
        ...

    async def next_batch(self) -> Batch:
        """Wait for finished groups."""
        ...

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, or cancel it if a signal requests a stop."""
        ...

    def count_update(self) -> None:
        """Count a policy version."""
        ...

    async def finish_step(self, collected: Collected[Any], update: Update, note: Callable[[], None]) -> list[str]:
        """Cross the step's boundary and return the alarms that stop the run."""
        ...

    async def evaluate(self) -> None:
        """Evaluate the policy if it is due: now, or concurrently with the next step."""
        ...
