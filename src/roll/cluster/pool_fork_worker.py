"""Fork server of the worker pool, which imports the dependencies of actors once and forks a process for each actor.

    (actor_id, call) ──► this process: forks, forwards, runs no call ──► the actor's process ──► (actor_id, reply)

It uses the frames of `pool_worker`. The first call for an actor ID is `(None, (factory, args))` and creates the actor;
later ones are `(method, args)`, where the method may be a coroutine function. `(actor_id, None)` ends the actor's
process and its descendants. A reply is a pickled `(ok, value)`, or a string that describes how the process ended. All
processes end at the end of the input.

Invariants: this process has one thread and runs no calls, so calls cannot block it; an actor's process has at most one
call at a time, and is idle when the call arrives; processes end with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import os
import pickle
import selectors
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn, cast

from roll.cluster.pool_worker import (
    CALL_STARTED,
    FRAME_HEADER,
    PR_SET_PDEATHSIG,
    build_error_reply,
    build_exit_error,
    describe_exit,
    limit_memory,
    read_frame,
    set_up_process,
    write_frame,
)

__all__ = ["main"]

READ_BYTES = 2**18
OUT_OF_MEMORY = pickle.dumps((False, MemoryError("the process exceeded its memory limit")))
"""The reply after a `MemoryError`, pickled in advance because pickling may fail when memory has run out."""


@dataclass(eq=False)
class _FrameReader:
    """Reads frames from a file descriptor."""

    descriptor: int
    _buffer: bytearray = field(default_factory=bytearray)

    def read(self) -> list[bytes] | None:
        """Return the frames that have arrived completely; `None` at the end of the input."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        frames, start = [], 0
        while len(self._buffer) - start >= FRAME_HEADER.size:
            (length,) = FRAME_HEADER.unpack_from(self._buffer, start)
            end = start + FRAME_HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(memoryview(self._buffer)[start + FRAME_HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return frames


@dataclass(eq=False)
class _Child:
    """The fork server's handle to a forked process with one actor."""

    actor_id: int
    process_id: int
    connection: socket.socket
    frames: _FrameReader
    is_busy: bool = False
    """True if a call is running."""

    def end(self) -> int:
        """Kill the process and its descendants. Return its exit code, negative for a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may not have its own process group yet
            os.kill(self.process_id, signal.SIGKILL)
        return self.reap()

    def reap(self) -> int:
        """Wait until the process ends, then kill its descendants. Return its exit code, negative for a signal."""
        self.connection.close()
        _, status = os.waitpid(self.process_id, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)
        return os.waitstatus_to_exitcode(status)


class _ForkServer:
    def __init__(self, replies: BinaryIO, memory_limit_bytes: int) -> None:
        self._replies = replies
        self._memory_limit_bytes = memory_limit_bytes
        self._children: dict[int, _Child] = {}
        self._ends: dict[int, bytes] = {}
        """How the processes of actors ended unexpectedly, by actor ID; stored until the actor is released."""
        self._selector = selectors.DefaultSelector()

    def serve(self, calls: _FrameReader) -> None:
        """Serve calls until the input ends."""
        self._selector.register(calls.descriptor, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._read_child(key.data)
                        continue
                    frames = calls.read()
                    if frames is None:
                        return
                    for frame in frames:
                        self._handle(*pickle.loads(frame))
        finally:
            for child in self._children.values():
                child.end()

    def _handle(self, actor_id: int, body: bytes | None) -> None:
        child = self._children.get(actor_id)
        if body is None:
            self._ends.pop(actor_id, None)
            if child is not None:
                self._remove(child)
                child.end()
        elif actor_id in self._ends:
            self._reply(actor_id, self._ends[actor_id])
        else:
            child = child or self._fork(actor_id)
            child.is_busy = True
            with contextlib.suppress(OSError):  # it has died, which `_read_child` reports
                child.connection.sendall(FRAME_HEADER.pack(len(body)) + body)

    def _fork(self, actor_id: int) -> _Child:
        ours, theirs = socket.socketpair()
        process_id = os.fork()
        if process_id == 0:
            ours.close()
            # Otherwise the child would keep the connections of its siblings open after this process closed them.
            for other in self._children.values():
                other.connection.close()
            self._selector.close()
            _run_child(theirs, self._memory_limit_bytes)
        theirs.close()
        child = _Child(actor_id, process_id, ours, _FrameReader(ours.fileno()))
        self._children[actor_id] = child
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _read_child(self, child: _Child) -> None:
        if self._children.get(child.actor_id) is not child:
            return  # it was ended in the meantime
        frames = child.frames.read()
        if frames is None:
            self._remove(child)
            code = describe_exit(child.end())
            self._ends[child.actor_id] = end = pickle.dumps(f"the process ({child.process_id}) ended with {code}")
            frames = [end] if child.is_busy else []
        for frame in frames:
            child.is_busy = False
            self._reply(child.actor_id, frame)

    def _reply(self, actor_id: int, reply: bytes) -> None:
        write_frame(self._replies, pickle.dumps((actor_id, reply)))

    def _remove(self, child: _Child) -> None:
        self._selector.unregister(child.connection)
        del self._children[child.actor_id]


def _run_child(connection: socket.socket, memory_limit_bytes: int) -> NoReturn:
    """Run in a forked process: create the actor, answer its calls, exit."""
    parent = os.getppid()
    os.setsid()  # its own process group, so that its descendants can be killed with it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before `prctl` was called
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if memory_limit_bytes:
        limit_memory(memory_limit_bytes)
    stream = cast(BinaryIO, connection.makefile("rwb"))
    actor: list[Any] = []
    loop = asyncio.new_event_loop()
    code = 1
    with contextlib.suppress(BaseException):
        while (frame := read_frame(stream)) is not None:
            write_frame(stream, _build_reply(frame, actor, loop))
        code = 0
    # `sys.exit` would run the exit handlers that the fork server's imports have registered.
    os._exit(code)


def _build_reply(frame: bytes, actor: list[Any], loop: asyncio.AbstractEventLoop) -> bytes:
    try:
        method, args = pickle.loads(frame)
        if method is None:
            factory, given = args
            actor.append(factory(*given))
            return pickle.dumps((True, None))
        value = getattr(actor[0], method)(*args)
        return pickle.dumps((True, loop.run_until_complete(value) if inspect.isawaitable(value) else value))
    except MemoryError:
        actor.clear()
        return OUT_OF_MEMORY
    except SystemExit as error:
        return build_error_reply(build_exit_error(error))
    except Exception as error:  # the caller decides what a failure of its object means
        return build_error_reply(error)


def main(memory_limit_bytes: int) -> None:
    """Serve calls from stdin; the first call is `(function, args)`, which imports or loads shared dependencies.

    Args:
        memory_limit_bytes: The memory limit of each actor's process; beyond it a call gets a `MemoryError`. 0 means no
            limit.
    """
    replies = set_up_process(0)
    calls = _FrameReader(sys.stdin.fileno())
    while not (frames := calls.read()):  # the controller sends nothing else before the first answer
        if frames is None:
            return
    try:
        function, args = pickle.loads(frames[0])
        function(*args)
    except Exception as error:
        write_frame(replies, build_error_reply(error))
        return
    except SystemExit as error:
        write_frame(replies, build_error_reply(build_exit_error(error)))
        return
    if sys.platform == "linux":  # from now on this process exits at the end of its input, after its children
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    gc.collect()
    gc.freeze()  # keeps memory shared with forked processes
    write_frame(replies, CALL_STARTED)
    _ForkServer(replies, memory_limit_bytes).serve(calls)


if __name__ == "__main__":
    main(int(sys.argv[1]))
