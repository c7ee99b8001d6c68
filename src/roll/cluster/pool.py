"""LocalWorkerPool: warm processes of this machine that run plain functions away from the controller.

    submit ──► first idle worker ──► its process ──► result
                                        │ over its time: SIGKILL, a fresh process takes its place
                                        │ died: WorkerDiedError, a fresh process takes its place

Invariants: a worker runs one call at a time; a hanging call costs its own time limit and holds no other call back but
those that wait for a free worker; the time limit starts when the call starts; workers end with this process, however it
ends (they ask the kernel to be killed with their parent).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from typing import Any

from roll.cluster.pool_worker import HEADER, STARTED
from roll.errors import WorkerDiedError

__all__ = ["LocalWorkerPool"]

START_TIMEOUT_S = 60.0


class _Worker:
    """One process, started at its first call."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float) -> Any:
        body = pickle.dumps((function, args))
        process = self._process or await self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(HEADER.pack(len(body)) + body)
            await process.stdin.drain()
            reply = await self._read(process, START_TIMEOUT_S, "did not get ready")
            if reply == STARTED:
                async with asyncio.timeout(time_limit_s):
                    reply = await self._read(process)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            code = await process.wait()
            raise WorkerDiedError(f"a pool worker (process {process.pid}) ended with code {code}") from error
        ok, value = pickle.loads(reply)
        if ok:
            return value
        raise value

    async def _start(self) -> Process:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = (sys.executable, "-m", "roll.cluster.pool_worker")
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
        )
        return self._process

    @staticmethod
    async def _read(process: Process, time_limit_s: float | None = None, what: str = "") -> bytes:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(time_limit_s):
                (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
                return await process.stdout.readexactly(length)
        except TimeoutError:
            raise WorkerDiedError(
                f"a pool worker (process {process.pid}) {what} within {time_limit_s} s"
            ) from None

    async def kill(self) -> None:
        """End the process now; a later call starts a fresh one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class LocalWorkerPool:
    """Implements `WorkerPool` with processes of this machine.

    Args:
        num_workers: processes, each one call at a time.
    """

    def __init__(self, num_workers: int) -> None:
        self._workers = [_Worker() for _ in range(num_workers)]
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put_nowait(worker)
        self._num_restarts = 0
        self._num_timeouts = 0
        self._closed = False

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Run `function(*args)`, a module-level function of an importable module, in a worker.

        Raises:
            TimeoutError: it ran longer than `time_limit_s`; the worker was ended and replaced.
            WorkerDiedError: the worker died.
            Exception: whatever the function raised.
        """
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        worker = await self._idle.get()
        try:
            return await worker.call(function, args, time_limit_s)
        except TimeoutError:
            self._num_timeouts += 1
            await self._restart(worker)
            raise
        except (WorkerDiedError, asyncio.CancelledError):
            await self._restart(worker)
            raise
        finally:
            self._idle.put_nowait(worker)

    async def _restart(self, worker: _Worker) -> None:
        self._num_restarts += 1
        await asyncio.shield(worker.kill())

    def health(self) -> dict[str, int]:
        """Counts since the pool was made; `workers` and `busy` now."""
        return {
            "workers": len(self._workers),
            "busy": len(self._workers) - self._idle.qsize(),
            "restarts": self._num_restarts,
            "timeouts": self._num_timeouts,
        }

    async def close(self) -> None:
        """End every worker; may be called twice."""
        self._closed = True
        await asyncio.gather(*(worker.kill() for worker in self._workers))
