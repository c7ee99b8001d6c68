"""The host's end of the connection to one agent.

    execute ──► frames ──► agent ──► frames ──► data_received ──► the Job of the channel

Invariants:
    - everything runs in one event loop;
    - every job ends exactly once, with the agent's answer or with the loss of the connection;
    - the agent runs next to malicious code, so only the framing and one JSON object with known keys per job are parsed;
    - output beyond a job's limit is dropped.
"""

from __future__ import annotations

import asyncio
import json
import marshal
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from roll_sandbox.errors import SandboxError
from roll_sandbox.results import is_valid_end_report
from roll_sandbox.types import Chunk

__all__ = ["AgentConnection", "AgentJob", "Connection"]

_STREAMS = {ord("o"): "stdout", ord("e"): "stderr", ord("r"): "result"}
_EMPTY_CHUNKS = {stream: Chunk(stream=stream, data=b"") for stream in ("stdout", "stderr", "result")}
_END, _USED = ord("x"), ord("u")
_MAX_FRAME_BYTES = 2**20
_DATA_BYTES = 2**20


class Connection(Protocol):
    """A connection to one agent, directly or through a service (`remote`).

    Each implementation defines its own identifiers of channels.
    """

    is_lost: bool

    def configure(self, settings: dict[str, Any]) -> AgentJob:
        """Send the settings; see `AgentConnection.configure`."""
        ...

    def submit(self, name: str, request: dict[str, Any], stdin: bytes, output_bytes: int) -> AgentJob:
        """Start a program or a session; see `AgentConnection.submit`."""
        ...

    def submit_on_channel(self, channel: Any, name: str, request: dict[str, Any], output_bytes: int) -> AgentJob:
        """Start a command on a session's channel; see `AgentConnection.submit_on_channel`."""
        ...

    def send(self, *message: Any) -> None:
        """Send a message; see `AgentConnection.send`."""
        ...

    def close(self) -> None:
        """Close the connection; see `AgentConnection.close`."""
        ...


class AgentJob:
    """A request to the agent, such as to run a program, with its output and a future `end` for the final message."""

    def __init__(self, connection: Connection, channel: Any, output_bytes: int) -> None:
        self.channel = channel
        self.chunks: list[Chunk] = []
        self.end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._output_bytes_left = output_bytes
        self.max_kept_bytes: int | None = None
        """Maximum bytes of output to keep; older chunks are replaced by empty chunks. `None` for no limit."""
        self._kept_bytes = self._num_emptied = 0
        self._output_event = asyncio.Event()
        self._limit_requests: deque[asyncio.Future[float | None]] = deque()

    def add(self, kind: int, data: bytes) -> None:
        """Add a chunk of output from the agent; output beyond the job's limit is dropped."""
        if self._output_bytes_left > 0:
            self.chunks.append(Chunk(stream=_STREAMS[kind], data=data[: self._output_bytes_left]))  # type: ignore[arg-type]
            self._output_bytes_left -= len(data)
            self._kept_bytes += len(data)
            while self.max_kept_bytes is not None and self._kept_bytes > self.max_kept_bytes:
                oldest = self.chunks[self._num_emptied]
                self._kept_bytes -= len(oldest.data)
                # Not removed: chunks are numbered by their position.
                self.chunks[self._num_emptied] = _EMPTY_CHUNKS[oldest.stream]
                self._num_emptied += 1
            self._output_event.set()

    def discard_output(self) -> None:
        """Discard the output so far and all later output."""
        self.chunks.clear()
        self._output_bytes_left = self._kept_bytes = self._num_emptied = 0

    def finish(self, end: dict[str, Any] | None, reason: str | Exception = "") -> None:
        """Resolve the future `self.end` with the agent's final message `end`; called once per job, after all output.

        If the agent reports an error, the future raises this error. If there is no final message, it raises `reason`.
        """
        if not self.end.done():
            if end is not None and "error" not in end:
                self.end.set_result(end)
            else:
                error = str(end["error"]) if end else reason
                self.end.set_exception(SandboxError(error) if isinstance(error, str) else error)
                self.end.exception()  # marks it as retrieved, since no caller may be waiting
        self.resolve_limit_requests(None, len(self._limit_requests))
        self._output_event.set()

    def get_output(self, stream: str) -> bytes:
        """Return the output of `stream` (`stdout`, `stderr` or `result`) so far, up to the job's limit."""
        return b"".join(chunk.data for chunk in self.chunks if chunk.stream == stream)

    async def stream(self) -> AsyncIterator[Chunk]:
        """Yield all output from the beginning, until the job ends."""
        position = 0
        while True:
            while position < len(self.chunks):
                yield self.chunks[position]
                position += 1
            if self.end.done():
                return
            self._output_event.clear()
            await self._output_event.wait()

    def set_limits(self, wall_s: float, cpu_s: float | None) -> asyncio.Future[float | None]:
        """Send new limits. The returned future gets the CPU seconds used so far, or None if the job has ended."""
        cpu_used: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._limit_requests.append(cpu_used)
        if self.end.done():
            self.resolve_limit_requests(None, len(self._limit_requests))
        self._connection.send("bound", self.channel, wall_s, cpu_s)
        return cpu_used

    def resolve_limit_requests(self, used_s: float | None, num_requests: int = 1) -> None:
        """Resolve the oldest `num_requests` pending futures of `set_limits` with `used_s`."""
        for _ in range(min(num_requests, len(self._limit_requests))):
            future = self._limit_requests.popleft()
            if not future.done():
                future.set_result(used_s)

    def write(self, data: bytes) -> None:
        """Send data to the program's standard input; empty data closes the input."""
        if not self.end.done():
            for start in range(0, len(data) or 1, _DATA_BYTES):
                self._connection.send("input", self.channel, data[start : start + _DATA_BYTES])

    def update_terminal(self, rows: int, columns: int, num_shown_bytes: int) -> None:
        """Send the terminal's size, and the number of further bytes of its output that have been shown."""
        if not self.end.done():
            self._connection.send("tty", self.channel, rows, columns, num_shown_bytes)

    def kill(self) -> None:
        """Send the agent a request to end the job."""
        if not self.end.done():
            self._connection.send("kill", self.channel)


class AgentConnection(asyncio.Protocol):
    """The framed connection to an agent.

    Args:
        on_lost: function that returns the error message for the jobs that are running when the connection is lost.
    """

    def __init__(self, on_lost: Callable[[], str]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._jobs: dict[int, AgentJob] = {}
        self._next = 1
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; called by the event loop."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Dispatch all complete frames, and close the connection at a malformed frame; called by the event loop."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "little")
            if not 5 <= size <= _MAX_FRAME_BYTES:
                self.close()
                return
            end = start + 4 + size
            if len(buffer) < end:
                break
            kind, channel = buffer[start + 4], int.from_bytes(buffer[start + 5 : start + 9], "little")
            self._dispatch(kind, channel, bytes(buffer[start + 9 : end]))
            start = end
        del buffer[:start]

    def _dispatch(self, kind: int, channel: int, payload: bytes) -> None:
        job = self._jobs.get(channel)
        if job is None:
            return
        if kind in _STREAMS:
            job.add(kind, payload)
        elif kind == _USED:
            job.resolve_limit_requests(int.from_bytes(payload[:8], "little") / 1e6)
        elif kind == _END:
            del self._jobs[channel]
            try:
                end = json.loads(payload)
            except (ValueError, RecursionError):
                end = None
            job.finish(end if is_valid_end_report(end) else {"error": "the agent sent a malformed response"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish all jobs with an error; called by the event loop."""
        self.is_lost = True
        reason = self._on_lost()
        for job in self._jobs.values():
            job.finish(None, reason)
        self._jobs.clear()

    def configure(self, settings: dict[str, Any]) -> AgentJob:
        """Send the settings as the first message; the returned job ends when the agent is ready."""
        self._jobs[0] = job = AgentJob(self, 0, 0)
        self._write(settings)
        return job

    def submit(self, name: str, request: dict[str, Any], stdin: bytes, output_bytes: int) -> AgentJob:
        """Send a request on a new channel, and return its job.

        Args:
            name: `run` (start a program), `shell` (open a session) or `measure` (report the resource usage).
            request: the fields of the request.
            stdin: standard input of the program.
            output_bytes: maximum bytes of output to keep.
        """
        job = self._open(self._next, output_bytes)
        self._next += 1
        for start in range(0, len(stdin), _DATA_BYTES):
            self.send("data", job.channel, stdin[start : start + _DATA_BYTES])
        self.send(name, job.channel, request)
        return job

    def submit_on_channel(self, channel: int, name: str, request: dict[str, Any], output_bytes: int) -> AgentJob:
        """Send the request for a command (`line`) on the channel of a session, and return its job."""
        job = self._open(channel, output_bytes)
        self.send(name, channel, request)
        return job

    def _open(self, channel: int, output_bytes: int) -> AgentJob:
        job = AgentJob(self, channel, output_bytes)
        if self.is_lost:
            job.finish(None, "the sandbox has ended")
        else:
            self._jobs[channel] = job
        return job

    def send(self, *message: Any) -> None:
        """Send a message to the agent; do nothing if the connection is lost."""
        self._write(message)

    def _write(self, message: Any) -> None:
        if self._transport is not None and not self.is_lost:
            # Every Python from 3.4 on reads version 4 of the format; the sandbox may have an older Python than this.
            body = marshal.dumps(message, 4)
            self._transport.write(len(body).to_bytes(4, "little") + body)

    def close(self) -> None:
        """Close the connection; the agent then ends itself and everything that it started."""
        if self._transport is not None:
            # Unlike `close`, this does not wait for the agent to read the queued data: it may be stopped.
            self._transport.abort()
