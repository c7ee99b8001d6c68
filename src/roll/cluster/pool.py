"""A worker pool of processes on this machine that run plain functions outside the controller.

    submit ──► first idle worker ──► its process ──► result
                                        │ timeout: SIGKILL, a new process takes its place
                                        │ died: WorkerDiedError, a new process takes its place

Coroutine functions run in separate processes, many calls in each (`pool_coroutines`). Actors, which are objects that
keep their state between calls, have one process each (`pool_forks`).

Invariants: a worker runs one call at a time; a hanging call only delays calls that wait for an idle worker, and at most
until its timeout; the timeout starts when the call starts, not while a process starts or imports; workers and their
descendants end with the pool; workers also end if this process is killed, because the kernel kills them or their pipe
closes.
"""
# pebble's pool was tried instead. After a timeout, child processes of the call kept running, even after the pool was
# closed. A first call took 0.56 s instead of 0.19 s. ROLL would still have had to implement coroutine functions, memory
# limits, and reporting the last output of a process that died.

from __future__ import annotations

import asyncio
import inspect
import pickle
import signal
from collections.abc import Callable
from typing import Any

from roll.cluster.pool_coroutines import CoroutineWorkers
from roll.cluster.pool_forks import ForkedActors
from roll.cluster.pool_process import PoolProcess
from roll.cluster.pool_worker import CALL_STARTED
from roll.errors import CpuTimeoutError, WorkerDiedError
from roll.protocols import ActorHandle

__all__ = ["LocalWorkerPool"]

MEMORY_LIMIT_BYTES = 4 * 2**30


class _Worker(PoolProcess):
    """One process that runs one function at a time; it is started by the first call."""

    def __init__(self, memory_limit_bytes: int) -> None:
        super().__init__("roll.cluster.pool_worker", memory_limit_bytes)

    async def call(self, body: bytes, time_limit_s: float) -> tuple[bool, Any]:
        """Run a call. Return (True, the function's value) or (False, its exception)."""
        await self.start()
        try:
            reply = await self.send_first(body)
            if reply == CALL_STARTED:
                async with asyncio.timeout(time_limit_s):
                    reply = await self.read()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            description = await self.describe_end()
            if self.exit_code == -signal.SIGPROF:  # the timer of `roll.rewards.adaptive_pool` in the process
                raise CpuTimeoutError(f"{description}: the call exceeded its CPU time limit") from error
            raise WorkerDiedError(description) from error
        ok, value = pickle.loads(reply)
        return ok, value


class LocalWorkerPool:
    """Implements `WorkerPool` with processes on this machine. A worker's process starts at its first call.

    Args:
        num_workers: The number of processes; each runs one call at a time.
        memory_limit_bytes: The memory limit of each process; beyond it the called function gets a `MemoryError`. 0
            means no limit.
    """

    def __init__(self, num_workers: int, *, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._workers = [_Worker(memory_limit_bytes) for _ in range(num_workers)]
        # Last in, first out: the worker that was used last has imported its modules, so others may never start.
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put_nowait(worker)
        self._coroutines = CoroutineWorkers(num_workers, memory_limit_bytes=memory_limit_bytes)
        self._kept = ForkedActors(memory_limit_bytes)
        self._num_restarts = 0
        self._num_timeouts = 0
        self._closed = False

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Run `function(*args)`, a module-level function of an importable module, in a worker.

        A coroutine function does not wait for an idle worker: many coroutine functions run concurrently in one process.

        Raises:
            TimeoutError: the call ran longer than `time_limit_s`; the worker was killed and replaced.
            CpuTimeoutError: the worker was ended by a timer of CPU time (SIGPROF) that the function had started.
            WorkerDiedError: the worker died, or the pool is closed.
            Exception: any exception of the function; a `TimeoutError` that it raises becomes a `RuntimeError`.
        """
        run = self._coroutines.run if inspect.iscoroutinefunction(function) else self._run
        try:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed")
            ok, value = await run(function, args, time_limit_s)
        except CpuTimeoutError:
            self._num_timeouts += 1
            raise
        except TimeoutError:
            self._num_timeouts += 1
            raise TimeoutError(f"{function.__qualname__} exceeded the time limit of {time_limit_s:g} s") from None
        if ok:
            return value
        # The function raised it. As a `RuntimeError` it is not mistaken for a failure of the pool, which is retried.
        if isinstance(value, TimeoutError | WorkerDiedError):
            raise RuntimeError(f"{function.__qualname__} raised {type(value).__name__}: {value}") from value
        raise value

    async def _run(self, function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float) -> tuple[bool, Any]:
        """Run a call in an idle worker. Return (True, the function's value) or (False, its exception)."""
        worker = await self._idle.get()
        try:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed")
            if worker.has_died:
                await self._replace(worker)
            # Pickled here and not before the call waits: hundreds of calls may wait, each with the frames of a video.
            return await worker.call(pickle.dumps((function, args)), time_limit_s)
        except (TimeoutError, WorkerDiedError, asyncio.CancelledError):
            # Killed after a cancellation too: the worker would finish the call, and its reply would be read as the
            # reply to the next call.
            await self._replace(worker)
            raise
        finally:
            self._idle.put_nowait(worker)

    async def create_actor(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> ActorHandle:
        """See `WorkerPool.create_actor`."""
        return await self._kept.create_actor(factory, args, prepare)

    def create_sub_pool(self, num_workers: int) -> LocalWorkerPool:
        """See `WorkerPool.create_sub_pool`."""
        return LocalWorkerPool(num_workers, memory_limit_bytes=0)

    async def _replace(self, worker: _Worker) -> None:
        if not self._closed:
            self._num_restarts += 1
        await asyncio.shield(worker.end())

    def health(self) -> dict[str, int]:
        """Return the current number of `workers` and of `busy` workers, and the `restarts` and `timeouts` so far."""
        return {
            "workers": len(self._workers),
            "busy": len(self._workers) - self._idle.qsize(),
            "restarts": self._num_restarts + self._coroutines.num_restarts,
            "timeouts": self._num_timeouts,
        }

    async def close(self) -> None:
        """End every worker; calls that are running or waiting raise `WorkerDiedError`. Calling it twice is safe."""
        self._closed = True
        await asyncio.gather(
            self._coroutines.close(), self._kept.close(), *(worker.close() for worker in self._workers)
        )
