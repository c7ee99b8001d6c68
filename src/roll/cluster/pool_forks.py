"""Actors of the worker pool: objects in processes forked from a fork server that has imported their dependencies.

    create_actor ──► the fork server for these dependencies (its process is started once) ──► a fork ──► the actor
    call ──► (actor_id, method, arguments) ──► its process ──► (actor_id, reply)

A fork takes milliseconds and shares the memory of the imported modules, so an actor needs little more memory than its
state. If one actor hangs, crashes or leaks memory, the others are not affected.

Invariants: an actor has one call at a time; if a call is canceled, its actor is ended, because the state is unknown; if
a fork server dies, its actors raise `WorkerDiedError`, and the next created actor starts a new fork server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Callable
from typing import Any

from roll.cluster.pool_process import PoolProcess
from roll.cluster.pool_worker import CALL_STARTED
from roll.errors import WorkerDiedError

__all__ = ["ForkedActors"]

FunctionCall = tuple[Callable[..., Any], tuple[Any, ...]]


class _ForkServer:
    """The controller's connection to a fork server and to the actors that it forked."""

    def __init__(self, prepare: FunctionCall, memory_limit_bytes: int) -> None:
        self._prepare = prepare
        self._process = PoolProcess("roll.cluster.pool_fork_worker", memory_limit_bytes)
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._actor_ids = itertools.count()
        self._replies: dict[int, asyncio.Future[bytes]] = {}

    async def create_actor(self, body: bytes) -> _ForkedActor:
        async with self._starting:
            if self._reader is None or self._reader.done():
                await self._process.end()
                await self._process.start()
                try:
                    await self._prepare_process()
                except BaseException:
                    await self._process.end()
                    raise
                self._reader = asyncio.create_task(self._read(), name="pool-forks")
        forked = _ForkedActor(self, next(self._actor_ids))
        try:
            await forked.send(body)
        except BaseException:
            await forked.close()
            raise
        return forked

    async def _prepare_process(self) -> None:
        try:
            reply = await self._process.send_first(pickle.dumps(self._prepare))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise WorkerDiedError(await self._process.describe_end()) from error
        if reply != CALL_STARTED:
            raise pickle.loads(reply)[1]

    async def call(self, actor_id: int, body: bytes) -> bytes:
        """Send a pickled call to an actor and return the reply; if the caller is canceled, kill the actor's process."""
        if self._reader is None or self._reader.done():
            raise WorkerDiedError("the actor's process was terminated")
        self._replies[actor_id] = reply = asyncio.get_running_loop().create_future()
        try:
            await self._process.write(pickle.dumps((actor_id, body)))
            return await reply
        except ConnectionError as error:
            raise WorkerDiedError(await self._process.describe_end()) from error
        except asyncio.CancelledError:
            self.kill(actor_id)
            raise
        finally:
            self._replies.pop(actor_id, None)

    def kill(self, actor_id: int) -> None:
        """Kill an actor's process without waiting until it has ended."""
        if self._reader is not None and not self._reader.done():
            self._process.send(pickle.dumps((actor_id, None)))

    async def _read(self) -> None:
        """Pass replies to their calls until the process ends, then fail all waiting calls."""
        cause = "the actor's process was terminated"
        try:
            while True:
                actor_id, reply = pickle.loads(await self._process.read())
                waiting = self._replies.get(actor_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            cause = await self._process.describe_end()
        finally:
            for waiting in self._replies.values():
                if not waiting.done():
                    waiting.set_exception(WorkerDiedError(cause))

    async def close(self) -> None:
        """End the process and all processes that it forked."""
        reader, self._reader = self._reader, None
        await self._process.end_gracefully()
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        await self._process.close()


class _ForkedActor:
    """Implements `ActorHandle` for an object in a forked process."""

    def __init__(self, fork_server: _ForkServer, actor_id: int) -> None:
        self.actor_id = actor_id
        self._fork_server = fork_server
        self._ended: str | None = None
        self._closed = False

    async def call(self, method: str, *args: Any) -> Any:
        """See `ActorHandle`."""
        return await self.send(pickle.dumps((method, args)))

    async def send(self, body: bytes) -> Any:
        """Send a pickled call and return its value, or raise its exception."""
        if self._ended is not None:
            raise WorkerDiedError(self._ended)
        try:
            reply = pickle.loads(await self._fork_server.call(self.actor_id, body))
        except asyncio.CancelledError:
            self._ended = "the process was killed during a call"
            raise
        if isinstance(reply, str):
            self._ended = reply
            raise WorkerDiedError(reply)
        ok, value = reply
        if not ok:
            raise value
        return value

    async def close(self) -> None:
        """See `ActorHandle`."""
        if not self._closed:
            self._closed, self._ended = True, "the actor's process was terminated"
            self._fork_server.kill(self.actor_id)


class ForkedActors:
    """Creates actors, each in its own forked process, with one fork server for each `prepare` function.

    Args:
        memory_limit_bytes: The memory limit of each process; 0 means no limit.
    """

    def __init__(self, memory_limit_bytes: int) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._fork_servers: dict[bytes, _ForkServer] = {}
        self._closed = False

    async def create_actor(
        self, factory: Callable[..., Any], args: tuple[Any, ...], prepare: FunctionCall
    ) -> _ForkedActor:
        """See `WorkerPool.create_actor`."""
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        key = pickle.dumps(prepare)
        if key not in self._fork_servers:
            self._fork_servers[key] = _ForkServer(prepare, self._memory_limit_bytes)
        return await self._fork_servers[key].create_actor(pickle.dumps((None, (factory, args))))

    async def close(self) -> None:
        """End every process. Calling it twice is safe."""
        self._closed = True
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(*(fork_server.close() for fork_server in self._fork_servers.values()))
