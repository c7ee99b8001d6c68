"""A pool worker's process: reads a call, runs it, writes its result, until its parent is gone.

Frames on both pipes are a 4-byte length and a pickle. For each `(function, args)` that comes in, two go out: an empty one
when the function is about to run, and `(ok, value)` when it has run. Functions travel by name: their module is imported
before the first of the two, and so is what its `prepare_worker()`, if it has one, imports or loads; a call's time limit
does not count that. What the called code prints goes to stderr, so that it cannot disturb the frames.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
from typing import BinaryIO

__all__ = ["HEADER", "STARTED", "main", "read_frame", "write_frame"]

_PR_SET_PDEATHSIG = 1
HEADER = struct.Struct("<I")
STARTED = b""


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or `None` at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame."""
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def _prepare(module: str, prepared: set[str]) -> None:
    if module not in prepared:
        prepared.add(module)
        getattr(sys.modules[module], "prepare_worker", lambda: None)()


def main() -> None:
    """Serve calls from stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = sys.stdin.buffer
    prepared: set[str] = set()
    while (frame := read_frame(calls)) is not None:
        try:
            function, args = pickle.loads(frame)
            _prepare(function.__module__, prepared)
            write_frame(replies, STARTED)
            reply = (True, function(*args))
        except Exception as error:  # the caller decides what a failure of its function means
            reply = (False, error)
        try:
            body = pickle.dumps(reply)
        except Exception as error:  # a result or an error that cannot travel
            body = pickle.dumps((False, TypeError(f"{type(reply[1]).__name__} cannot be sent back: {error}")))
        write_frame(replies, body)


if __name__ == "__main__":
    main()
