"""A pool worker's process: it reads a call, runs it and writes the result, until its parent is gone.

Frames on both pipes are a 4-byte length and a pickle. For each input `(function, args)` there are two outputs: an empty
one when the function is about to run, and `(ok, value)` when it has run. Functions are pickled by name. Their module is
imported before the first output, and its `prepare_worker()`, if any, is called to import or load dependencies; a call's
timeout does not include this. Output of the called code goes to stderr, so that it cannot disturb the frames.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import struct
import sys
from typing import BinaryIO

from roll.errors import raised_at

__all__ = [
    "HEADER",
    "PR_SET_PDEATHSIG",
    "STARTED",
    "begin",
    "build_error_reply",
    "build_exit_error",
    "describe_exit",
    "limit_memory",
    "main",
    "prepare",
    "read_frame",
    "write_frame",
]

PR_SET_PDEATHSIG = 1
HEADER = struct.Struct("<I")
STARTED = b""


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame, or `None` at the end."""
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


def prepare(module: str, prepared: set[str]) -> None:
    """Call a module's `prepare_worker` before its first call, to import or load its dependencies."""
    if module not in prepared:
        getattr(sys.modules[module], "prepare_worker", lambda: None)()
        prepared.add(module)


def build_error_reply(error: Exception) -> bytes:
    """Return an error as a reply; one that cannot be pickled is replaced by its description."""
    error.add_note(raised_at(error))
    try:
        body = pickle.dumps((False, error))
        pickle.loads(body)  # some exceptions can be pickled but not unpickled
    except Exception:
        described = RuntimeError(f"{type(error).__name__}: {error}")
        described.add_note(raised_at(error))
        return pickle.dumps((False, described))
    return body


def build_exit_error(error: SystemExit) -> RuntimeError:
    """Return the error for a function that calls `sys.exit`."""
    return RuntimeError(f"it asked its process to end: {error}").with_traceback(error.__traceback__)


def _serve(frame: bytes, replies: BinaryIO, prepared: set[str]) -> bytes:
    try:
        function, args = pickle.loads(frame)
        prepare(function.__module__, prepared)
        write_frame(replies, STARTED)
        return pickle.dumps((True, function(*args)))
    except SystemExit as error:  # a call must not end the worker's process
        return build_error_reply(build_exit_error(error))
    except Exception as error:  # the caller decides what a failure of its function means
        return build_error_reply(error)


def limit_memory(num_bytes: int) -> None:
    """Limit data and anonymous mappings, but not address space, much of which libraries reserve without using it."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def describe_exit(code: int) -> str:
    """Describe how a process ended: `signal SIGKILL`, or `code 1`."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def begin(memory_limit_bytes: int) -> BinaryIO:
    """Make this process a worker, which ends with its parent and prints to stderr; return the stream for replies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory_limit_bytes:
        limit_memory(memory_limit_bytes)
    faulthandler.enable()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def main(memory_limit_bytes: int) -> None:
    """Serve calls from stdin.

    Args:
        memory_limit_bytes: The memory limit; beyond it the called function gets a `MemoryError`. 0 means no limit.
    """
    replies = begin(memory_limit_bytes)
    calls = sys.stdin.buffer
    prepared: set[str] = set()
    while (frame := read_frame(calls)) is not None:
        write_frame(replies, _serve(frame, replies, prepared))


if __name__ == "__main__":
    main(int(sys.argv[1]))
