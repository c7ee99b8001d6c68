"""The process of a pool worker: a loop that reads a call, runs it and writes the result, until the parent ends.

A frame on either pipe is a 4-byte length and a pickle. For each input `(function, args)` there are two outputs: an
empty one when the function is about to run, and `(ok, value)` when it has run. Functions are pickled by name. Before
the first output, the function's module is imported, and its `prepare_worker()`, if any, is called to import or load
dependencies; the call's timeout does not include this. The called code prints to stderr, so that it cannot corrupt the
frames.
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

from roll.errors import find_raise_location

__all__ = [
    "CALL_STARTED",
    "FRAME_HEADER",
    "PR_SET_PDEATHSIG",
    "build_error_reply",
    "build_exit_error",
    "describe_exit",
    "limit_memory",
    "main",
    "prepare",
    "read_frame",
    "set_up_process",
    "write_frame",
]

PR_SET_PDEATHSIG = 1
FRAME_HEADER = struct.Struct("<I")
CALL_STARTED = b""


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame; `None` at the end of the stream."""
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    (length,) = FRAME_HEADER.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame."""
    stream.write(FRAME_HEADER.pack(len(body)) + body)
    stream.flush()


def prepare(module: str, prepared: set[str]) -> None:
    """Call the module's `prepare_worker`, if any; do nothing if `prepared` contains the module.

    `prepare_worker` imports or loads the dependencies of the module's functions, before the first of them is called.
    """
    if module not in prepared:
        getattr(sys.modules[module], "prepare_worker", lambda: None)()
        prepared.add(module)


def build_error_reply(error: Exception) -> bytes:
    """Pickle the reply for an error; an error that cannot be pickled becomes a `RuntimeError` with its message."""
    error.add_note(find_raise_location(error))
    try:
        body = pickle.dumps((False, error))
        pickle.loads(body)  # some exceptions can be pickled but not unpickled
    except Exception:
        described = RuntimeError(f"{type(error).__name__}: {error}")
        described.add_note(find_raise_location(error))
        return pickle.dumps((False, described))
    return body


def build_exit_error(error: SystemExit) -> RuntimeError:
    """Build the error for a function that called `sys.exit`."""
    return RuntimeError(f"the function called sys.exit: {error}").with_traceback(error.__traceback__)


def _serve(frame: bytes, replies: BinaryIO, prepared: set[str]) -> bytes:
    try:
        function, args = pickle.loads(frame)
        prepare(function.__module__, prepared)
        write_frame(replies, CALL_STARTED)
        return pickle.dumps((True, function(*args)))
    except SystemExit as error:  # a call must not end the worker's process
        return build_error_reply(build_exit_error(error))
    except Exception as error:  # the caller decides what a failure of its function means
        return build_error_reply(error)


def limit_memory(num_bytes: int) -> None:
    """Limit the memory of this process (data and anonymous mappings), in bytes."""
    # Not RLIMIT_AS: libraries reserve much address space that they never use.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def describe_exit(code: int) -> str:
    """Describe how a process ended: `signal SIGKILL`, or `code 1`."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def set_up_process(memory_limit_bytes: int) -> BinaryIO:
    """Make this process end with its parent and print to stderr, limit its memory, and return the reply stream."""
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
    replies = set_up_process(memory_limit_bytes)
    calls = sys.stdin.buffer
    prepared: set[str] = set()
    while (frame := read_frame(calls)) is not None:
        write_frame(replies, _serve(frame, replies, prepared))


if __name__ == "__main__":
    main(int(sys.argv[1]))
