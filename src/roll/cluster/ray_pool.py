"""RayWorkerPool: worker processes on every machine of a Ray cluster.

    submit ──► the place with the fewest calls per worker ──► PoolActor, one per place ──► its LocalWorkerPool

The local pools kill hanging calls, limit memory and replace dead processes, so calls behave the same here and there;
Ray only transfers them. Invariants: a reply states whether it is a value, an error or a timeout, so it does not depend
on how Ray wraps exceptions; a place whose actor died is started again, and its calls end with `WorkerDiedError`; a
canceled call is canceled at its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, TaskCancelledError

from roll.cluster.actor_log import log_into_the_run
from roll.cluster.pool import MEMORY_LIMIT_BYTES, LocalWorkerPool
from roll.errors import WorkerDiedError
from roll.protocols import ActorHandle

__all__ = ["PoolActor", "RayWorkerPool"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class PoolActor:
    """The worker processes of one place."""

    def __init__(self, num_workers: int, memory_limit_bytes: int) -> None:
        log_into_the_run()
        self._pool = LocalWorkerPool(num_workers, memory_limit_bytes=memory_limit_bytes)
        self._kept: dict[int, ActorHandle] = {}

    async def submit(
        self, function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float
    ) -> tuple[str, Any, dict[str, int]]:
        """Return `value`, `timeout` or `error`, the matching value, and the counts of this actor's pool."""
        try:
            value = await self._pool.submit(function, *args, time_limit_s=time_limit_s)
        except TimeoutError as error:
            return "timeout", str(error), self._pool.health()
        except Exception as error:  # the caller decides what a failure of its function means
            return *_error(error), self._pool.health()
        return "value", value, self._pool.health()

    async def create_actor(
        self, number: int, factory: Callable[..., Any], args: tuple[Any, ...], prepare: tuple[Any, ...]
    ) -> tuple[str, Any]:
        """Create and keep an object under this number."""
        try:
            self._kept[number] = await self._pool.create_actor(factory, *args, prepare=prepare)
        except Exception as error:
            return _error(error)
        return "value", None

    async def ask(self, number: int, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
        """Call a method of a kept object."""
        try:
            return "value", await self._kept[number].call(method, *args)
        except Exception as error:
            return _error(error)

    async def release(self, number: int) -> None:
        """End the kept object of this number, if any."""
        kept = self._kept.pop(number, None)
        if kept is not None:
            await kept.close()

    async def close(self) -> None:
        """End every worker."""
        await self._pool.close()


def _error(error: Exception) -> tuple[str, Any]:
    return "error", (error, tuple(getattr(error, "__notes__", ())))


def _error_of_reply(value: Any) -> Exception:
    """Return the error of a reply, with its notes."""
    error, notes = value
    for note in notes if not getattr(error, "__notes__", None) else ():
        error.add_note(note)
    return error


class _Place:
    """The controller's end of a place."""

    def __init__(self, num_workers: int, memory_limit_bytes: int, options: dict[str, Any]) -> None:
        self.num_workers = num_workers
        self.num_calls = 0
        self.num_kept = 0
        self.counts = {"restarts": 0, "timeouts": 0}
        self._before = {"restarts": 0, "timeouts": 0}
        self._settings = (num_workers, memory_limit_bytes)
        self._options = options
        self.actor = self._start()

    def _start(self) -> Any:
        remote = ray.remote(PoolActor).options(max_restarts=0, max_concurrency=4096, **self._options)
        return remote.remote(*self._settings)

    def note(self, health: dict[str, int]) -> None:
        """Store the counts of a reply, added to those of actors that died."""
        self.counts = {name: self._before[name] + health[name] for name in self.counts}

    def replace(self, dead: Any) -> None:
        """Start a new actor, unless the dead one has been replaced already."""
        if dead is self.actor:
            self.counts["restarts"] += self.num_workers
            self._before = dict(self.counts)
            self.actor = self._start()


class _RayActor:
    """A kept object at a place. See `ActorHandle`."""

    def __init__(self, place: _Place, number: int) -> None:
        self.number = number
        self._place, self._actor = place, place.actor
        self._closed = False
        place.num_kept += 1

    async def call(self, method: str, *args: Any) -> Any:
        if self._closed:
            raise WorkerDiedError("its process was ended")
        return await self.ask(lambda actor: actor.ask.remote(self.number, method, args))

    async def ask(self, begin: Callable[[Any], Any]) -> Any:
        """Call the actor and return the value of the reply, or raise its error."""
        reference = begin(self._actor)
        try:
            kind, value = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except (RayActorError, TaskCancelledError) as error:
            self._place.replace(self._actor)
            raise WorkerDiedError(f"a place of the worker pool died: {type(error).__name__}") from error
        if kind == "error":
            raise _error_of_reply(value)
        return value

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._place.num_kept -= 1
            self._actor.release.remote(self.number)


class RayWorkerPool:
    """Implements `WorkerPool` on the machines of a Ray cluster.

    Args:
        num_workers: The total number of processes, spread evenly.
        places: The Ray options of the actor at each place; a single empty one means any machine.
        memory_limit_bytes: The memory limit of each process; 0 means no limit.
    """

    def __init__(
        self,
        num_workers: int,
        places: Sequence[dict[str, Any]] = ({},),
        *,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        used = list(places)[:num_workers]
        share, more = divmod(num_workers, len(used))
        self._options = list(places)
        self._places = [
            _Place(share + (index < more), memory_limit_bytes, options) for index, options in enumerate(used)
        ]
        self._numbers = itertools.count()
        self._closed = False

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        place = min(self._places, key=lambda p: p.num_calls / p.num_workers)
        actor = place.actor
        place.num_calls += 1
        reference = None
        try:
            reference = actor.submit.remote(function, args, time_limit_s)
            kind, value, health = await reference
        except asyncio.CancelledError:
            if reference is not None:
                ray.cancel(reference)
            raise
        except (RayActorError, TaskCancelledError) as error:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed") from None
            logger.warning("a place of the worker pool died and is started again: %s", error)
            place.replace(actor)
            raise WorkerDiedError(f"a place of the worker pool died: {type(error).__name__}") from error
        finally:
            place.num_calls -= 1
        place.note(health)
        if kind == "timeout":
            raise TimeoutError(value)
        if kind == "error":
            raise _error_of_reply(value)
        return value

    async def create_actor(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> ActorHandle:
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        place = min(self._places, key=lambda p: p.num_kept / p.num_workers)
        kept = _RayActor(place, next(self._numbers))
        try:
            await kept.ask(lambda actor: actor.create_actor.remote(kept.number, factory, args, prepare))
        except BaseException:
            await kept.close()
            raise
        return kept

    def sub_pool(self, num_workers: int) -> RayWorkerPool:
        return RayWorkerPool(num_workers, self._options, memory_limit_bytes=0)

    def health(self) -> dict[str, int]:
        """See `WorkerPool.health`; restarts and timeouts are as of each actor's last reply."""
        return {
            "workers": sum(place.num_workers for place in self._places),
            "busy": sum(min(place.num_calls, place.num_workers) for place in self._places),
            "restarts": sum(place.counts["restarts"] for place in self._places),
            "timeouts": sum(place.counts["timeouts"] for place in self._places),
        }

    async def close(self) -> None:
        """End every worker, and every call with `WorkerDiedError`; may be called twice."""
        closed, self._closed = self._closed, True
        if closed:
            return
        for place in self._places:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await place.actor.close.remote()
            ray.kill(place.actor, no_restart=True)
