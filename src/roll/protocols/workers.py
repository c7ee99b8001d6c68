"""What the controller asks of processes that run functions and keep objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

__all__ = ["KeptObject", "WorkerPool"]


@runtime_checkable
class KeptObject(Protocol):
    """An object in a process of its own, which one caller asks one thing after the other."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of it, or a coroutine method; where this is cancelled, its process is ended.

        Raises:
            WorkerDiedError: its process died, or was ended.
            Exception: whatever the method raised.
        """
        ...

    async def close(self) -> None:
        """End its process, with all that it started, at once; may be called twice."""
        ...


@runtime_checkable
class WorkerPool(Protocol):
    """Processes that run plain functions away from the controller; `cluster/` has the Ray one."""

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Run `function(*args)` in a worker.

        Raises:
            TimeoutError: it took longer than `time_limit_s`; the worker was ended and replaced.
            WorkerDiedError: the worker died.
        """
        ...

    async def keep(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> KeptObject:
        """Make `factory(*args)` in a process of its own, and keep it there until it is closed.

        Args:
            factory: a module-level function of an importable module.
            args: its arguments.
            prepare: a function and its arguments, called once in the process that all of its kind are forked from:
                what it imports and loads, they share.

        Raises:
            WorkerDiedError: the process died.
            Exception: whatever `factory` or `prepare` raised.
        """
        ...

    def beside(self, num_workers: int) -> WorkerPool:
        """Another pool in the same places, for work that must not wait for this one's; without a limit of memory.

        Its processes start when they are first needed. Whoever asked for it closes it.
        """
        ...

    def health(self) -> dict[str, int]:
        """Counts: `workers`, `busy`, `restarts`, `timeouts`."""
        ...

    async def close(self) -> None: ...
