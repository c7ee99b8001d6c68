"""A pool worker's process for coroutine functions: it runs any number of concurrent calls, until its parent is gone.

Frames are those of `pool_worker`, with the number of the call. Inputs are `(number, call)`, where the call is a pickled
`(function, args, timeout)`, `(number, None)` to cancel the call, and `(number, WHO)` to find out why it is silent.
Outputs are `(number, STARTED)` when the call is about to run, `(number, (culprit,))` if requested (see
`_find_blocking_call`), and
finally `(number, LATE)` if it timed out, else `(number, reply)`, pickled as in `pool_worker`.
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
    STARTED,
    begin,
    build_error_reply,
    build_exit_error,
    prepare,
    read_frame,
    write_frame,
)

__all__ = ["LATE", "WHO", "main"]

LATE = b"late"
WHO = b"who"
TURN_S = 0.5
"""Time after which a loop without a turn counts as blocked by its current task."""

_number: ContextVar[int | None] = ContextVar("number", default=None)
"""The number of the call that the current task belongs to."""
_numbers: WeakKeyDictionary[asyncio.Future[Any], int | None] = WeakKeyDictionary()
"""The number of the call by task, for a thread outside the loop."""


def _create_numbered_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], /, **options: Any
) -> asyncio.Task[Any]:
    """Create a task that remembers the number of its call; a task factory."""
    task = asyncio.Task(work, loop=loop, **options)
    _numbers[task] = _number.get()
    return task


async def _call(function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float) -> bytes:
    """Run a call and return its reply; its own timeouts and cancellations are errors like any other."""
    scope = asyncio.timeout(time_limit_s)
    task = asyncio.current_task()
    try:
        async with scope:
            return pickle.dumps((True, await function(*args)))
    except SystemExit as error:  # a call must not end the process that it shares with others
        return build_error_reply(build_exit_error(error))
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():  # the caller has canceled the call
            raise
        return build_error_reply(RuntimeError(f"it was cancelled by itself: {error}"))
    except Exception as error:  # the caller decides what a failure of its function means
        return LATE if scope.expired() else build_error_reply(error)


class _Replies:
    """Writes the frames of the loop and of the reading thread, one at a time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, number: int, reply: object) -> None:
        body = pickle.dumps((number, reply))
        with self._lock:
            write_frame(self._stream, body)


def _find_blocking_call(loop: asyncio.AbstractEventLoop, number: int) -> tuple[int | None]:
    """Return the call that blocks the event loop, or `number` if the loop is not blocked; `None` inside if unknown.

    It is called from another thread, to find out why a call is silent.
    """
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if turned.wait(TURN_S):
        return (number,)
    task = asyncio.current_task(loop)
    return (_numbers.get(task) if task is not None else None,)


async def _serve(memory_limit_bytes: int) -> None:
    replies = _Replies(begin(memory_limit_bytes))
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_create_numbered_task)
    frames: asyncio.Queue[tuple[int, bytes | None] | None] = asyncio.Queue()

    def read() -> None:
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            number, body = pickle.loads(frame)
            if body == WHO:
                replies.write(number, _find_blocking_call(loop, number))
            else:
                loop.call_soon_threadsafe(frames.put_nowait, (number, body))
        loop.call_soon_threadsafe(frames.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    calls: dict[int, asyncio.Task[None]] = {}
    prepared: set[str] = set()

    async def run(number: int, body: bytes) -> None:
        try:
            function, args, time_limit_s = pickle.loads(body)
            prepare(function.__module__, prepared)
        except Exception as error:  # a dependency of the function cannot be imported here
            reply = build_error_reply(error)
        else:
            replies.write(number, STARTED)
            reply = await _call(function, args, time_limit_s)
        replies.write(number, reply)

    while (frame := await frames.get()) is not None:
        number, body = frame
        if body is None:
            if number in calls:
                calls[number].cancel()
            continue
        _number.set(number)
        calls[number] = task = loop.create_task(run(number, body))
        task.add_done_callback(lambda _, number=number: calls.pop(number))


def main(memory_limit_bytes: int) -> None:
    """Serve calls from stdin; see `pool_worker.main`."""
    asyncio.run(_serve(memory_limit_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
