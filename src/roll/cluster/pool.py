"""LocalWorkerPool: warm processes of this machine that run plain functions away from the controller.

    submit ──► first idle worker ──► its process ──► result
                                        │ over its time: SIGKILL, a fresh process takes its place
                                        │ died: WorkerDiedError, a fresh process takes its place

Invariants: a worker runs one call at a time; a hanging call costs its own time limit and holds no other call back but
those that wait for a free worker; the time limit starts when the call starts, not while a process starts or imports;
workers, and what they started, end with the pool; workers end with this process, however it ends (the kernel kills
them, and their pipe closes).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import IO, Any

from roll.cluster.pool_worker import HEADER, STARTED
from roll.errors import WorkerDiedError

__all__ = ["LocalWorkerPool"]

START_TIMEOUT_S = 120.0
"""For a process to start and import what a function needs."""
END_TIMEOUT_S = 5.0
MEMORY_LIMIT_BYTES = 4 * 2**30
LOG_BYTES = 2**20
"""What workers print is kept up to about this, to explain a death."""


class _Worker:
    """One process, started at its first call."""

    def __init__(self, memory_limit_bytes: int) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._process: Process | None = None
        self._log: IO[bytes] | None = None
        self._closed = False

    @property
    def ended_by_itself(self) -> bool:
        """Whether its process is gone though nobody ended it."""
        return self._process is not None and self._process.returncode is not None

    async def call(self, body: bytes, time_limit_s: float) -> tuple[bool, Any]:
        """Whether the function returned, and its value or its exception."""
        process = self._process or await self._start()
        self._shorten_log()
        assert process.stdin is not None
        try:
            process.stdin.write(HEADER.pack(len(body)) + body)
            await process.stdin.drain()
            reply = await self._ready(process)
            if reply == STARTED:
                async with asyncio.timeout(time_limit_s):
                    reply = await _read(process)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            code = await _end_of(process)
            raise WorkerDiedError(
                f"a pool worker (process {process.pid}) ended with {_ending(code)}{self._last_words()}"
            ) from error
        ok, value = pickle.loads(reply)
        return ok, value

    async def _start(self) -> Process:
        single_threaded = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # sets of strings iterate alike in every worker, so a verdict never depends on which one gave it
        fixed = {**single_threaded, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # -P: a file in the current directory must not stand in for a module of the standard library
        command = (sys.executable, "-P", "-m", "roll.cluster.pool_worker", str(self._memory_limit_bytes))
        self._log = self._log or tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._log,
                env={**os.environ, **fixed},
                start_new_session=True,  # Ctrl-C is the controller's; and all that a worker starts can be ended with it
            )
        except OSError as error:
            raise WorkerDiedError(f"a pool worker cannot be started: {error}") from error
        self._process = process
        if self._closed:  # while the process was starting
            await self.end()
            raise WorkerDiedError("the worker pool is closed")
        return process

    async def _ready(self, process: Process) -> bytes:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await _read(process)
        except TimeoutError:
            raise WorkerDiedError(
                f"a pool worker (process {process.pid}) was not ready within {START_TIMEOUT_S:g} s{self._last_words()}"
            ) from None

    def _shorten_log(self) -> None:
        if self._log is not None and os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            self._log.seek(0)
            self._log.truncate()

    def _last_words(self) -> str:
        """The last line that it printed."""
        if self._log is None:
            return ""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        lines = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    async def end(self) -> None:
        """End the process and all that it started; a later call starts a fresh one."""
        (process, self._process), (log, self._log) = (self._process, None), (self._log, None)
        if process is not None:
            _kill(process)
            await process.wait()
        if log is not None:
            log.close()

    async def close(self) -> None:
        """End it for good."""
        self._closed = True
        await self.end()


async def _end_of(process: Process) -> int:
    """Exit code of a process that closed its pipe, which is about to end, or else is ended."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            return await process.wait()
    except TimeoutError:
        _kill(process)
        return await process.wait()


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return await process.stdout.readexactly(length)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


class LocalWorkerPool:
    """Implements `WorkerPool` with processes of this machine. A worker's process starts when it is first needed.

    Args:
        num_workers: processes, each one call at a time.
        memory_limit_bytes: of each process; beyond it the called function meets a `MemoryError`. 0 means no limit.
    """

    def __init__(self, num_workers: int, *, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._workers = [_Worker(memory_limit_bytes) for _ in range(num_workers)]
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
            WorkerDiedError: the worker died, or the pool is closed.
            Exception: whatever the function raised; its own `TimeoutError` comes as a `RuntimeError`.
        """
        body = pickle.dumps((function, args))
        worker = await self._idle.get()
        try:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed")
            if worker.ended_by_itself:
                await self._replace(worker)
            ok, value = await worker.call(body, time_limit_s)
        except TimeoutError:
            self._num_timeouts += 1
            await self._replace(worker)
            raise TimeoutError(f"{function.__qualname__} took longer than {time_limit_s:g} s") from None
        except (WorkerDiedError, asyncio.CancelledError):
            await self._replace(worker)
            raise
        finally:
            self._idle.put_nowait(worker)
        if ok:
            return value
        if isinstance(value, TimeoutError | WorkerDiedError):  # its own, not the pool's
            raise RuntimeError(f"{function.__qualname__} raised {type(value).__name__}: {value}") from value
        raise value

    def beside(self, num_workers: int) -> LocalWorkerPool:
        """See `WorkerPool.beside`."""
        return LocalWorkerPool(num_workers, memory_limit_bytes=0)

    async def _replace(self, worker: _Worker) -> None:
        if not self._closed:
            self._num_restarts += 1
        await asyncio.shield(worker.end())

    def health(self) -> dict[str, int]:
        """`workers`, `busy` now; `restarts`, `timeouts` since the pool was made."""
        return {
            "workers": len(self._workers),
            "busy": len(self._workers) - self._idle.qsize(),
            "restarts": self._num_restarts,
            "timeouts": self._num_timeouts,
        }

    async def close(self) -> None:
        """End every worker, and every call with `WorkerDiedError`; may be called twice."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))
