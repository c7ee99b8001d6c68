"""A pool worker's process for coroutine functions: runs as many calls at once as come in, until its parent is gone.

Frames are those of `pool_worker`, and say which call they are of. In comes `(number, call)`, the call being a pickled
`(function, args, time limit)`, or `(number, None)` to cancel it. Out go `(number, STARTED)` when it is about to run,
and then `(number, LATE)` if it was cancelled for its time, else `(number, reply)`, pickled as `pool_worker` does.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

from roll.cluster.pool_worker import STARTED, begin, failure, prepare, read_frame, write_frame

__all__ = ["LATE", "main"]

LATE = b"late"


async def _call(function: Callable[..., Any], args: tuple[Any, ...], time_limit_s: float) -> bytes:
    """Its reply; its own time-outs are errors like any other."""
    scope = asyncio.timeout(time_limit_s)
    try:
        async with scope:
            return pickle.dumps((True, await function(*args)))
    except Exception as error:  # the caller decides what a failure of its function means
        return LATE if scope.expired() else failure(error)


async def _serve(memory_limit_bytes: int) -> None:
    replies = begin(memory_limit_bytes)
    loop = asyncio.get_running_loop()
    frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            loop.call_soon_threadsafe(frames.put_nowait, frame)
        loop.call_soon_threadsafe(frames.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    calls: dict[int, asyncio.Task[None]] = {}
    prepared: set[str] = set()

    async def run(number: int, frame: bytes) -> None:
        try:
            function, args, time_limit_s = pickle.loads(frame)
            prepare(function.__module__, prepared)
        except Exception as error:  # what it needs cannot be imported here
            reply = failure(error)
        else:
            write_frame(replies, pickle.dumps((number, STARTED)))
            reply = await _call(function, args, time_limit_s)
        write_frame(replies, pickle.dumps((number, reply)))

    while (frame := await frames.get()) is not None:
        number, body = pickle.loads(frame)
        if body is None:
            if number in calls:
                calls[number].cancel()
            continue
        calls[number] = task = loop.create_task(run(number, body))
        task.add_done_callback(lambda _, number=number: calls.pop(number))


def main(memory_limit_bytes: int) -> None:
    """Serve calls from stdin; see `pool_worker.main`."""
    asyncio.run(_serve(memory_limit_bytes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
