"""Records of the online loop, and its protocols of objective, run and engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from roll.rollout.batch import Batch
from roll.types import DrawOutcome, FloatArray, Rollout

__all__ = ["CollectedBatch", "Engines", "Objective", "StepRun", "UpdateOutcome"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedBatch(Generic[T]):
    """A batch, the rollouts that an objective chose to train on, and the outcome of every draw."""

    batch: Batch
    choice: T
    """The rollouts that the objective chose, in the objective's format."""
    rollouts: tuple[Rollout, ...]
    """All rollouts to train on; if empty, the weights do not change."""
    draw_outcomes: Mapping[int, tuple[DrawOutcome, str]]
    """Outcomes of all draws of the batch, by draw id, with the reason if a draw is not trained."""
    demonstrations: tuple[Rollout, ...] = ()
    """Demonstrations of the batch's prompts, whether they are trained or not."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOutcome:
    """The results of a step's updates: metrics, advantages, and whether the weights changed."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    has_new_weights: bool = False
    """True if the policy's weights changed."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """Mean advantage of each rollout, by sample id."""
    tokens: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)
    """Additional columns of the table of rollouts: see `token_columns`."""


class Objective(Protocol[T]):
    """A pipeline's objective, which defines how to train on a batch."""

    async def collect(self, batch: Batch) -> CollectedBatch[T]:
        """Choose the rollouts to train on; may be canceled at any time."""
        ...

    async def learn(self, collected: CollectedBatch[T]) -> UpdateOutcome:
        """Update the trainers; called only if there are rollouts to train on."""
        ...

    def update_state(self, collected: CollectedBatch[T]) -> None:
        """Update the parts of the run's state on which later steps depend; called at the step's boundary."""
        ...


class Engines(Protocol):
    """The training loop's interface to the policy's engines; `ServedPolicy` implements it."""

    async def wake(self) -> None:
        """Wake sleeping engines, so that they can serve requests."""
        ...

    def enter_training(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager within which trainers may compute and change weights."""
        ...

    async def push(self) -> Mapping[str, float]:
        """Sync the new weights to every engine, and return metrics."""
        ...


class StepRun(Protocol):
    """The training loop's interface to a run; `OnlineRun` implements it."""

    @property
    def policy_engines(self) -> Engines:
        """Engines of the policy."""
        ...

    def open_session(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager for all steps, within which the engines have the current weights.

        A checkpoint is saved on exit; after an error, it is saved if possible.
        """
        ...

    async def run_steps(self, step: Callable[[], Awaitable[list[str]]]) -> None:
        """Run the remaining steps."""
        ...

    async def next_batch(self) -> Batch:
        """Return the next batch as soon as its groups are finished."""
        ...

    async def run_unless_stopped(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of `coroutine`, or cancel it if a signal requests a stop."""
        ...

    def advance_policy_version(self) -> None:
        """Increase the policy version by 1."""
        ...

    async def finish_step(
        self, collected: CollectedBatch[Any], update: UpdateOutcome, update_state: Callable[[], None]
    ) -> list[str]:
        """Complete the step at its boundary, and return the messages of alarms that stop the run."""
        ...

    async def evaluate(self) -> None:
        """Evaluate the policy if an evaluation is due: now, or concurrently with the next step."""
        ...
