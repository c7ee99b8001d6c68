"""Coroutine functions of the worker pool: each process runs many calls concurrently, outside the controller's loop.

    submit ──► least busy process ──► (call_id, call) ──► its event loop ──► (call_id, reply)
                                          │ timeout: canceled there
                                          │ no reply: find the blocking call ──► SIGKILL, a new process

Invariants: a timeout starts when a call begins, not while a process starts or imports. If a call blocks its process's
event loop, the process is killed: the blocking call is treated as timed out, and the other calls raise
`WorkerDiedError`, whichever timeout expires first. If a caller is canceled, its call is canceled too. Processes end
with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll.cluster.pool_coroutine_worker import FIND_BLOCKING_CALL, TIMED_OUT
from roll.cluster.pool_process import START_TIMEOUT_S, PoolProcess
from roll.cluster.pool_worker import CALL_STARTED
from roll.errors import WorkerDiedError

__all__ = ["CoroutineWorkers"]

CANCEL_GRACE_S = 2.0
"""Time that a process has to cancel a call after its timeout; then its event loop is treated as blocked."""
BLOCKING_CALL_TIMEOUT_S = 5.0
"""Time that a process has to report which call blocks its event loop."""

_PROCESS_KILLED = (
    "a pool worker was killed, because another call blocked its event loop, or because its pool was closed"
)


@dataclass(slots=True, eq=False)
class _Call:
    started: asyncio.Event = field(default_factory=asyncio.Event)
    reply: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    blocked_by: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    overdue_at_s: float = math.inf
    """Time of the event loop, in seconds, at which the reply becomes overdue."""


class _Worker:
    """One process with many concurrent calls; it is started by the first call."""

    def __init__(self, memory_limit_bytes: int) -> None:
        self.calls: dict[int, _Call] = {}
        self._process = PoolProcess("roll.cluster.pool_coroutine_worker", memory_limit_bytes)
        self._call_ids = itertools.count()
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def call(self, body: bytes, time_limit_s: float) -> tuple[bool, Any]:
        """Run a call. Return (True, the function's value) or (False, its exception).

        Raises:
            TimeoutError: the call took too long.
            WorkerDiedError: the process ended.
        """
        call_id, call = next(self._call_ids), _Call()
        self.calls[call_id] = call
        try:
            await self._start(call_id, call, body)
            call.overdue_at_s = asyncio.get_running_loop().time() + time_limit_s + CANCEL_GRACE_S
            reply = await self._wait_for_reply(call_id, call)
        except ConnectionError as error:
            raise WorkerDiedError(await self._process.describe_end()) from error
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionError, AssertionError):
                await self._process.write(pickle.dumps((call_id, None)))
            raise
        finally:
            self.calls.pop(call_id, None)
            call.reply.cancel() or call.reply.exception()  # retrieve the exception, so that asyncio does not log it
        if reply == TIMED_OUT:
            raise TimeoutError
        ok, value = pickle.loads(reply)
        return ok, value

    async def _wait_for_reply(self, call_id: int, call: _Call) -> bytes:
        """Wait for a call's reply, and return it.

        A reply may be late because another call blocks the process. The process is then killed when the blocking call
        times out.

        Raises:
            TimeoutError: this call blocks the process, or ignores its cancellation; the process was killed.
            WorkerDiedError: another call blocked the process, so this call must be retried.
        """
        loop, held_up, until = asyncio.get_running_loop(), False, call.overdue_at_s
        while not (await asyncio.wait({call.reply}, timeout=until - loop.time()))[0]:
            culprit = await self._find_blocking_call(call_id, call)
            if call.reply.done():  # it answered after all, or another call's timeout ended its process
                break
            if culprit is call:  # the call ignores its cancellation
                await self.end()
                raise TimeoutError
            held_up = True
            if culprit is None or loop.time() >= culprit.overdue_at_s:
                if culprit is not None and not culprit.reply.done():
                    culprit.reply.set_exception(TimeoutError())
                await self.end()
                raise WorkerDiedError(_PROCESS_KILLED)
            await asyncio.wait({call.reply, culprit.reply}, timeout=culprit.overdue_at_s - loop.time())
            until = loop.time() + CANCEL_GRACE_S
        reply = call.reply.result()
        # The call was late because another call blocked the loop, so it is retried instead of scored as too slow.
        if held_up and reply == TIMED_OUT:
            raise WorkerDiedError(_PROCESS_KILLED)
        return reply

    async def _find_blocking_call(self, call_id: int, call: _Call) -> _Call | None:
        """Find the call that blocks the event loop of the process and delays the reply to `call`; `None` if unknown."""
        try:
            async with asyncio.timeout(BLOCKING_CALL_TIMEOUT_S):
                await self._process.write(pickle.dumps((call_id, FIND_BLOCKING_CALL)))
                culprit = await call.blocked_by.get()
        except TimeoutError:  # not even the process's reading thread can run, for example because C code holds the GIL
            return call if len(self.calls) == 1 else None
        return call if len(self.calls) == 1 else self.calls.get(-1 if culprit is None else culprit)

    async def _start(self, call_id: int, call: _Call, body: bytes) -> None:
        """Send a call, and wait until the process starts it, so that the call's timeout does not include imports.

        Raises:
            ConnectionError: the process has ended.
            WorkerDiedError: the process was not ready in time.
        """
        try:
            # The timeout includes the write: a process that hangs does not read a frame that is larger than the pipe's
            # buffer.
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._send(call_id, body)
                await self._wait_until_started(call)
        except TimeoutError:
            error = self._process.build_not_ready_error()
            await self.end()
            raise error from None

    async def _send(self, call_id: int, body: bytes) -> None:
        async with self._starting:
            if self._reader is None or self._reader.done():
                await self._process.end()
                await self._process.start()
                self._reader = asyncio.create_task(self._read(), name="pool-coroutines")
        await self._process.write(pickle.dumps((call_id, body)))

    async def _wait_until_started(self, call: _Call) -> None:
        """Wait until the process starts the call or replies."""
        started = asyncio.ensure_future(call.started.wait())
        try:
            await asyncio.wait({started, call.reply}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()

    async def _read(self) -> None:
        """Pass replies to their calls until the process ends, then fail all waiting calls."""
        cause = _PROCESS_KILLED
        try:
            while True:
                call_id, reply = pickle.loads(await self._process.read())
                call = self.calls.get(call_id)
                if call is not None and reply == CALL_STARTED:
                    call.started.set()
                elif call is not None and isinstance(reply, tuple):
                    call.blocked_by.put_nowait(reply[0])
                elif call is not None and not call.reply.done():
                    call.reply.set_result(reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            cause = await self._process.describe_end()
        finally:
            for call in self.calls.values():
                if not call.reply.done():
                    call.reply.set_exception(WorkerDiedError(cause))
                call.blocked_by.put_nowait(None)

    async def end(self) -> None:
        """Kill the process. Its calls raise `WorkerDiedError`; a later call starts a new process."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        await self._process.end()

    async def close(self) -> None:
        """Kill the process and start no new one."""
        await self._process.close()
        await self.end()


class CoroutineWorkers:
    """Processes that run coroutine functions.

    Args:
        num_workers: Maximum number of processes; a call goes to the process with the fewest calls.
        memory_limit_bytes: The memory limit of each process; 0 means no limit.
    """

    def __init__(self, num_workers: int, *, memory_limit_bytes: int) -> None:
        self._workers = [_Worker(memory_limit_bytes) for _ in range(num_workers)]
        self._closed = False
        self.num_restarts = 0

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float) -> tuple[bool, Any]:
        """Run a call. Return (True, the function's value) or (False, its exception).

        Raises:
            TimeoutError: the call took too long.
            WorkerDiedError: the process ended.
        """
        body = pickle.dumps((function, args, time_limit_s))
        worker = min(self._workers, key=lambda worker: len(worker.calls))
        try:
            return await worker.call(body, time_limit_s)
        except WorkerDiedError:
            self.num_restarts += not self._closed
            raise

    async def close(self) -> None:
        """Kill every process; running calls raise `WorkerDiedError`. Calling it twice is safe."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))
