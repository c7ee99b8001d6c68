"""A pool worker's process for coroutine functions: it runs any number of concurrent calls, until its parent ends.

It uses the frames of `pool_worker`, with the ID of the call.

Inputs   (call_id, call)                call is a pickled (function, args, timeout)
         (call_id, None)                cancel the call
         (call_id, FIND_BLOCKING_CALL)  report which call blocks the event loop
Outputs  (call_id, CALL_STARTED)        the call is about to run
         (call_id, (blocking,))         the answer to FIND_BLOCKING_CALL, see `_find_blocking_call`
         (call_id, TIMED_OUT)           the call timed out
         (call_id, reply)               the call ended; the reply is pickled as in `pool_worker`
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

from roll.cluster.pool_worker import (
    CALL_STARTED,
    build_error_reply,
    build_exit_error,
    prepare,
    read_frame,
    set_up_process,
    write_frame,
)

__all__ = ["FIND_BLOCKING_CALL", "TIMED_OUT", "main"]

TIMED_OUT = b"late"
FIND_BLOCKING_CALL = b"who"
BLOCKED_AFTER_S = 0.5
"""Time without an iteration of the event loop after which its current task is treated as blocking it."""

_call_id: ContextVar[int | None] = ContextVar("call_id", default=None)
"""The ID of the call that the current task belongs to."""
_call_ids: WeakKeyDictionary[asyncio.Future[Any], int | None] = WeakKeyDictionary()
"""The ID of the call by task; read by a thread outside the event loop."""


def _create_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], /, **options: Any
) -> asyncio.Task[Any]:
    """Create a task and store the ID of its call; used as the event loop's task factory."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    _call_ids[task] = _call_id.get()
    return task


async def _call(function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float) -> bytes:
    """Run a call and return its pickled reply, or `TIMED_OUT` after `time_limit_s`.

    A `TimeoutError` or a cancellation that the function itself raises is returned like any other error.
    """
    scope = asyncio.timeout(time_limit_s)
    task = asyncio.current_task()
    try:
        async with scope:
            return pickle.dumps((True, await function(*args)))
    except SystemExit as error:  # a call must not end the process, which other calls use too
        return build_error_reply(build_exit_error(error))
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():  # the caller has canceled the call
            raise
        return build_error_reply(RuntimeError(f"the call canceled itself: {error}"))
    except Exception as error:  # the caller decides what a failure of its function means
        return TIMED_OUT if scope.expired() else build_error_reply(error)


class _ReplyWriter:
    """Writes reply frames one at a time, from the event loop and from the reading thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, call_id: int, reply: object) -> None:
        body = pickle.dumps((call_id, reply))
        with self._lock:
            write_frame(self._stream, body)


def _find_blocking_call(loop: asyncio.AbstractEventLoop, call_id: int) -> tuple[int | None]:
    """Return the ID of the call that blocks the event loop, in a tuple: `(None,)` if that call is unknown.

    If the loop is not blocked, return `(call_id,)`. Must be called from a thread outside the loop.

    Args:
        loop: The event loop.
        call_id: The ID of the call that got no reply.
    """
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if turned.wait(BLOCKED_AFTER_S):
        return (call_id,)
    task = asyncio.current_task(loop)
    return (_call_ids.get(task) if task is not None else None,)


async def _serve(memory_limit_bytes: int) -> None:
    replies = _ReplyWriter(set_up_process(memory_limit_bytes))
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_create_task)
    frames: asyncio.Queue[tuple[int, bytes | None] | None] = asyncio.Queue()

    # A thread reads the input, so that the process can report which call blocks the loop while the loop is blocked.
    def read() -> None:
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            call_id, body = pickle.loads(frame)
            if body == FIND_BLOCKING_CALL:
                replies.write(call_id, _find_blocking_call(loop, call_id))
            else:
                loop.call_soon_threadsafe(frames.put_nowait, (call_id, body))
        loop.call_soon_threadsafe(frames.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    calls: dict[int, asyncio.Task[None]] = {}
    prepared: set[str] = set()

    async def run(call_id: int, body: bytes) -> None:
        try:
            function, args, time_limit_s = pickle.loads(body)
            prepare(function.__module__, prepared)
        except Exception as error:  # a dependency of the function cannot be imported here
            reply = build_error_reply(error)
        else:
            replies.write(call_id, CALL_STARTED)
            reply = await _call(function, args, time_limit_s)
        replies.write(call_id, reply)

    while (frame := await frames.get()) is not None:
        call_id, body = frame
        if body is None:
            if call_id in calls:
                calls[call_id].cancel()
            continue
        # Tasks that the call creates inherit the context, so if one of them blocks the loop, the call is reported.
        _call_id.set(call_id)
        calls[call_id] = task = loop.create_task(run(call_id, body))
        task.add_done_callback(lambda _, call_id=call_id: calls.pop(call_id))


def main(memory_limit_bytes: int) -> None:
    """Serve calls from stdin; see `pool_worker.main`."""
    asyncio.run(_serve(memory_limit_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
