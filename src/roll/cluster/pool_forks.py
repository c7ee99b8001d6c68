"""Objects kept in processes of their own, forked from a process that has imported their dependencies.

    keep ──► the nursery for these dependencies (its process is started once) ──► a fork ──► the object
    call ──► (number, method, arguments) ──► its process ──► (number, reply)

A fork takes milliseconds and shares memory with the imports, so an object costs little more than itself. A hang, a
crash or a leak of one object does not affect the others.

Invariants: an object has one call at a time; an object whose call is canceled is ended, because its state is then
unknown; if a nursery dies, its objects raise `WorkerDiedError`, and the next kept object starts a new nursery.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Callable
from typing import Any

from roll.cluster.pool_process import PoolProcess
from roll.cluster.pool_worker import STARTED
from roll.errors import WorkerDiedError

__all__ = ["ForkedActors"]

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class _ForkServer:
    """A process that forks, and its forked processes."""

    def __init__(self, prepare: Call, memory_limit_bytes: int) -> None:
        self._prepare = prepare
        self._process = PoolProcess("roll.cluster.pool_fork_worker", memory_limit_bytes)
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[bytes]] = {}

    async def create_actor(self, body: bytes) -> _ForkedActor:
        async with self._starting:
            if self._reader is None or self._reader.done():
                await self._process.end()
                await self._process.start()
                try:
                    await self._prepared()
                except BaseException:
                    await self._process.end()
                    raise
                self._reader = asyncio.create_task(self._read(), name="pool-forks")
        forked = _ForkedActor(self, next(self._numbers))
        try:
            await forked.send(body)
        except BaseException:
            await forked.close()
            raise
        return forked

    async def _prepared(self) -> None:
        try:
            await self._process.write(pickle.dumps(self._prepare))
            reply = await self._process.first_reply()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise WorkerDiedError(await self._process.describe_end()) from error
        if reply != STARTED:
            raise pickle.loads(reply)[1]

    async def ask(self, number: int, body: bytes) -> bytes:
        """Return the reply to a call; if this is canceled, the object's process is killed."""
        if self._reader is None or self._reader.done():
            raise WorkerDiedError("its process was ended")
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        try:
            await self._process.write(pickle.dumps((number, body)))
            return await reply
        except ConnectionError as error:
            raise WorkerDiedError(await self._process.describe_end()) from error
        except asyncio.CancelledError:
            self.forget(number)
            raise
        finally:
            self._replies.pop(number, None)

    def forget(self, number: int) -> None:
        """Kill an object's process, without waiting for its end."""
        if self._reader is not None and not self._reader.done():
            self._process.send(pickle.dumps((number, None)))

    async def _read(self) -> None:
        """Distribute replies until the process ends, then fail all waiting calls."""
        cause = "its process was ended"
        try:
            while True:
                number, reply = pickle.loads(await self._process.read())
                waiting = self._replies.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            cause = await self._process.describe_end()
        finally:
            for waiting in self._replies.values():
                if not waiting.done():
                    waiting.set_exception(WorkerDiedError(cause))

    async def close(self) -> None:
        """End the process with all that it forked."""
        reader, self._reader = self._reader, None
        await self._process.end_in_order()
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        await self._process.close()


class _ForkedActor:
    """A kept object in a forked process. See `ActorHandle`."""

    def __init__(self, nursery: _ForkServer, number: int) -> None:
        self.number = number
        self._nursery = nursery
        self._ended: str | None = None
        self._closed = False

    async def call(self, method: str, *args: Any) -> Any:
        """See `ActorHandle`."""
        return await self.send(pickle.dumps((method, args)))

    async def send(self, body: bytes) -> Any:
        """Send a call and return its value, or raise its exception."""
        if self._ended is not None:
            raise WorkerDiedError(self._ended)
        try:
            found = pickle.loads(await self._nursery.ask(self.number, body))
        except asyncio.CancelledError:
            self._ended = "its process was ended in the midst of a call"
            raise
        if isinstance(found, str):
            self._ended = found
            raise WorkerDiedError(found)
        ok, value = found
        if not ok:
            raise value
        return value

    async def close(self) -> None:
        """See `ActorHandle`."""
        if not self._closed:
            self._closed, self._ended = True, "its process was ended"
            self._nursery.forget(self.number)


class ForkedActors:
    """Kept objects in processes of their own.

    Args:
        memory_limit_bytes: The memory limit of each process; 0 means no limit.
    """

    def __init__(self, memory_limit_bytes: int) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._nurseries: dict[bytes, _ForkServer] = {}
        self._closed = False

    async def create_actor(self, factory: Callable[..., Any], args: tuple[Any, ...], prepare: Call) -> _ForkedActor:
        """See `WorkerPool.keep`."""
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        key = pickle.dumps(prepare)
        if key not in self._nurseries:
            self._nurseries[key] = _ForkServer(prepare, self._memory_limit_bytes)
        return await self._nurseries[key].create_actor(pickle.dumps((None, (factory, args))))

    async def close(self) -> None:
        """End every process; may be called twice."""
        self._closed = True
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(*(nursery.close() for nursery in self._nurseries.values()))
