"""Interfaces of worker processes that run functions and actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

__all__ = ["ActorHandle", "WorkerPool"]


@runtime_checkable
class ActorHandle(Protocol):
    """A handle to an object in a dedicated process; its methods are called one at a time."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method or a coroutine method of the object; if the call is canceled, its process is terminated.

        Raises:
            WorkerDiedError: The process died or was terminated.
            Exception: Any exception that the method raises.
        """
        ...

    async def close(self) -> None:
        """Terminate the process and all its children at once. Calling it twice is safe."""
        ...


@runtime_checkable
class WorkerPool(Protocol):
    """Processes that run plain functions outside the controller's process; `roll.cluster` implements it."""

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
        """Create the object `factory(*args)` in a dedicated process, where it stays until it is closed.

        Args:
            factory: A module-level function of an importable module.
            args: Arguments of `factory`.
            prepare: A function and its arguments, called once in the fork server from which all processes with the same
                `prepare` are forked; they share the modules and data that it loads.

        Raises:
            WorkerDiedError: The process died.
            Exception: Any exception that `factory` or `prepare` raises.
        """
        ...

    def create_sub_pool(self, num_workers: int) -> WorkerPool:
        """Return a new pool on the same nodes, for work that must not wait for calls of this pool.

        The new pool has no memory limit, and its processes start on first use. The caller must close it.
        """
        ...

    def health(self) -> dict[str, int]:
        """Return the counts `workers`, `busy`, `restarts` and `timeouts`."""
        ...

    async def close(self) -> None: ...
