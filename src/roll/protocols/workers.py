"""Interfaces of worker processes that run functions and hold objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

__all__ = ["ActorHandle", "WorkerPool"]


@runtime_checkable
class ActorHandle(Protocol):
    """An object in a dedicated process; one caller calls its methods one at a time."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method or a coroutine method of the object; cancellation terminates its process.

        Raises:
            WorkerDiedError: The process died, or was terminated.
            Exception: The method raised.
        """
        ...

    async def close(self) -> None:
        """Terminate the process and all its children at once; may be called twice."""
        ...


@runtime_checkable
class WorkerPool(Protocol):
    """Processes that run plain functions outside the controller's process; `cluster/` has a Ray implementation."""

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Run `function(*args)` in a worker.

        Raises:
            TimeoutError: The function took longer than `time_limit_s`; the worker was terminated and replaced.
            WorkerDiedError: The worker died.
        """
        ...

    async def create_actor(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> ActorHandle:
        """Create `factory(*args)` in a dedicated process, and keep it there until it is closed.

        Args:
            factory: A module-level function of an importable module.
            args: Arguments of `factory`.
            prepare: A function and its arguments, called once in the template process from which all processes with
                the same `prepare` are forked; they share the modules and data that it loads.

        Raises:
            WorkerDiedError: The process died.
            Exception: `factory` or `prepare` raised.
        """
        ...

    def sub_pool(self, num_workers: int) -> WorkerPool:
        """Return another pool on the same nodes, for work that must not wait for this pool's; it has no memory limit.

        Its processes start on first use. The caller must close it.
        """
        ...

    def health(self) -> dict[str, int]:
        """Return the counts `workers`, `busy`, `restarts` and `timeouts`."""
        ...

    async def close(self) -> None: ...
