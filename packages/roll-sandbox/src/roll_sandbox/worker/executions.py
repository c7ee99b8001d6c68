"""Runs programs, sessions and their commands in one sandbox. Each has a name, and is started once, even if its request
is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from roll_sandbox.agent_sandbox import Job, Sandbox, Session
from roll_sandbox.errors import (
    RollSandboxError,
    SandboxError,
    SandboxLostError,
    SandboxRequestError,
    SandboxSessionError,
)
from roll_sandbox.types import Chunk
from roll_sandbox.wire import Message, error_to_json, program_from_json
from roll_sandbox.worker.outputs import OutputBudget

__all__ = ["ProgramRunner"]

MAX_INSPECT_BYTES = 2**22
"""Maximum bytes of output, of all programs in total, in one answer to `look`."""
MAX_KEPT_PROGRAMS = 64
MAX_KEPT_BYTES = 2**23
"""Maximum bytes of output of ended programs that are kept per sandbox, for clients that reconnect."""
_PIECE_OVERHEAD_BYTES, _EMPTIED_OVERHEAD_BYTES = 200, 8
"""Memory of a piece of output in addition to its data, and of a terminal's piece, whose data is soon dropped."""


class _Execution:
    """A program or a session command, running or ended, with its messages and output."""

    def __init__(self, message: Message) -> None:
        self.job: Job | None = None
        self.chunks: list[Chunk] = []
        self.started_at = time.time()
        self.summary = _get_first_line(message["request"])
        self.has_terminal = bool(message["request"].get("terminal"))
        self.end_message: Message | None = None
        self.queued: list[Message] = []
        """Messages that arrived before the program had started."""
        self.queued_bytes = 0
        self.last_message = 0
        self.task: asyncio.Task[None] | None = None


class ProgramRunner:
    """Runs the programs and sessions of one sandbox.

    Args:
        qualified_name: the name of the sandbox in messages.
        sandbox: the sandbox.
        send: function that sends a message to the server.
        outputs: counts the kept output of all sandboxes of the worker.
    """

    def __init__(
        self, qualified_name: str, sandbox: Sandbox, send: Callable[[Message], None], outputs: OutputBudget
    ) -> None:
        self._qualified_name = qualified_name
        self._sandbox = sandbox
        self.send = send
        self._outputs = outputs
        self._has_ended = False
        self.end_reason: Exception | None = None
        """The reason why the sandbox was ended, if it did not end by itself."""
        self._known: dict[str, _Execution] = {}
        self._sessions: dict[str, Session] = {}
        self._kept: deque[str] = deque()
        self._kept_bytes = 0
        self._ended_bytes: dict[str, int] = {}

    def receive(self, message: Message) -> None:
        """Handle a message about a program or a session."""
        op, name = message["op"], message["id"]
        execution = self._known.get(name)
        if op in ("run", "shell", "line"):
            if name in self._sessions:
                self.send(self._make_session_opened(name))
            elif execution is None:
                self._start_program(name, message)
            else:
                self._resend(name, execution, message.get("have", 0))
        elif op == "look":
            self._spawn(self._send_usage(message))
        elif op == "close" and execution is None and name in self._sessions:
            self._sessions.pop(name).end()
        elif execution is not None:
            self._apply_message(name, execution, message)

    def _start_program(self, name: str, message: Message) -> None:
        execution = self._known[name] = _Execution(message)
        op = message["op"]
        if message.get("again"):
            # The server sent this program before, but it is unknown here. It may have run, so it is not run again.
            error = SandboxLostError("the worker has no record of the program's outcome")
            self._record_end(name, execution, error_to_json(error))
        elif op == "run":
            try:
                program, alone = program_from_json(message["request"], message["stdin"])
                execution.job = self._sandbox.begin(program, alone=alone)
            except (RollSandboxError, ValueError) as error:
                self._record_end(name, execution, error_to_json(error))
            else:
                execution.chunks = execution.job.chunks
                execution.task = self._spawn(self._stream_output(name, execution, execution.job))
        else:
            execution.task = self._spawn(self._serve_session(name, execution, message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        return task

    async def _stream_output(self, name: str, execution: _Execution, job: Job) -> None:
        """Send a program's output, and then its end, to the server."""
        try:
            number = 0
            async for chunk in job.stream():
                self._send_output(name, number, chunk)
                number += 1
                self._record_output(name, execution, job, chunk)
            end_message: Message = {"op": "end", "end": await job.make_report(), "pieces": len(execution.chunks)}
        except Exception as error:  # also for a malformed report of an agent: the client must get an error
            end_message = error_to_json(self.end_reason or error)
        if execution.end_message is None:
            self._record_end(name, execution, end_message)

    def _record_output(self, name: str, execution: _Execution, job: Job, chunk: Chunk) -> None:
        if not self._has_ended:
            size = _EMPTIED_OVERHEAD_BYTES if execution.has_terminal else _PIECE_OVERHEAD_BYTES + len(chunk.data)
            self._outputs.add((self._qualified_name, name), size, partial(self._drop_output, name, execution, job))

    def _drop_output(self, name: str, execution: _Execution, job: Job) -> None:
        """Drop all output of a program, and end the program if it is running."""
        job.drop()
        if execution.end_message is None:
            if execution.task is not None:
                execution.task.cancel()
            error = SandboxError(
                "the programs produced more output than the worker can buffer: print less, or run fewer programs "
                "concurrently"
            )
            self._record_end(name, execution, error_to_json(error))
        else:
            self._known.pop(name, None)

    async def _serve_session(self, name: str, execution: _Execution, message: Message) -> None:
        """Open a session, or run a command in a session that is open."""
        request = message["request"]
        try:
            if message["op"] == "shell":
                env, cwd = request.get("env") or {}, request.get("cwd")
                _check_strings(env, cwd)
                session = self._sessions[name] = await self._sandbox.session(env=env, cwd=cwd)
                del self._known[name]
                self.send(self._make_session_opened(name))
                if any(each["op"] == "close" for each in execution.queued):
                    self._sessions.pop(name, session).end()
                return
            session = self._sessions.get(message["shell"])
            if session is None:
                raise SandboxSessionError("the shell session has ended: open another session")
            command, wall_s = request.get("command"), request.get("wall_s")
            if not isinstance(command, str) or not (type(wall_s) in (int, float) and 0 < wall_s < float("inf")):
                raise SandboxRequestError("a session's command must have a string 'command' and a positive 'wall_s'.")
            execution.job = await session.start(command, wall_s=wall_s)
        except (RollSandboxError, ValueError) as error:
            self._record_end(name, execution, error_to_json(error))
            return
        execution.chunks = execution.job.chunks
        waiting, execution.queued = execution.queued, []
        for each in waiting:
            self._apply_to_job(name, execution.job, each)
        await self._stream_output(name, execution, execution.job)

    def _apply_message(self, name: str, execution: _Execution, message: Message) -> None:
        """Pass input, new limits or a kill request to a program; queue the message if the program has not started.

        Resent messages are ignored, except new limits, which are applied again.
        """
        # New limits are applied again, since the answer may have been lost with the connection.
        if message["n"] <= execution.last_message and message["op"] != "bound":
            return
        execution.last_message = max(execution.last_message, message["n"])
        if execution.job is not None:
            self._apply_to_job(name, execution.job, message)
        elif execution.end_message is None:
            self._queue_message(name, execution, message)

    def _queue_message(self, name: str, execution: _Execution, message: Message) -> None:
        execution.queued.append(message)
        execution.queued_bytes += len(message.get("data", b""))
        if execution.queued_bytes > MAX_KEPT_BYTES and execution.task is not None:
            execution.task.cancel()
            execution.queued.clear()
            error = SandboxRequestError(
                "too much input was sent to a command that has not started yet: send the input later."
            )
            self._record_end(name, execution, error_to_json(error))

    def _apply_to_job(self, name: str, job: Job, message: Message) -> None:
        op = message["op"]
        if op == "input":
            if message["data"]:
                job.write(message["data"])
            else:
                job.end_input()
        elif op == "kill":
            job.kill()
        elif op == "tty":
            job.update_terminal(message["rows"], message["columns"], message["shown"])
        elif op == "bound":
            self._spawn(self._set_limits(name, job, message))

    async def _send_usage(self, message: Message) -> None:
        """Reply to `look` with the sandbox's usage, its programs, and the end of each program's output."""
        answer: Message = {
            "op": "looked",
            "sandbox": self._qualified_name,
            "id": message["id"],
            "cpu_s": 0.0,
            "memory_bytes": 0,
        }
        with contextlib.suppress(RollSandboxError):  # the sandbox has just ended
            usage = await self._sandbox.usage()
            answer |= {"cpu_s": usage.cpu_s, "memory_bytes": usage.memory_bytes}
        left, programs = MAX_INSPECT_BYTES, []
        for name, each in reversed(self._known.items()):
            output = _get_last_output(each.chunks, min(message["output"], left))
            left -= len(output)
            end = each.end_message and (each.end_message.get("end") or {"error": each.end_message.get("message", "")})
            values = {
                "words": each.summary,
                "terminal": each.has_terminal,
                "began": each.started_at,
                "seen": each.last_message,
            }
            programs.append({"id": name, **values, "end": end, "output": output})
        self.send({**answer, "programs": programs[::-1]})

    def _make_session_opened(self, name: str) -> Message:
        return {"op": "end", "sandbox": self._qualified_name, "id": name, "end": {"code": 0}, "pieces": 0}

    async def _set_limits(self, name: str, job: Job, message: Message) -> None:
        try:
            used_s = await job.set_limits(wall_s=message["wall_s"], cpu_s=message.get("cpu_s"))
        except RollSandboxError:
            return  # the message about the end of the program reports the error
        self.send({"op": "used", "sandbox": self._qualified_name, "id": name, "n": message["n"], "used_s": used_s})

    def _send_output(self, name: str, number: int, chunk: Chunk) -> None:
        self.send(
            {
                "op": "out",
                "sandbox": self._qualified_name,
                "id": name,
                "n": number,
                "stream": chunk.stream,
                "data": chunk.data,
            }
        )

    def _resend(self, name: str, execution: _Execution, num_received: int) -> None:
        """Resend the output after the first `num_received` pieces, and the end report if the program has ended."""
        for number in range(num_received, len(execution.chunks)):
            self._send_output(name, number, execution.chunks[number])
        if execution.end_message is not None:
            self.send(execution.end_message)

    def _record_end(self, name: str, execution: _Execution, values: Message) -> None:
        execution.end_message = {"op": "end", **values, "sandbox": self._qualified_name, "id": name}
        if "error" in values:
            execution.end_message["op"] = "error"
        self.send(execution.end_message)
        self._kept.append(name)
        self._ended_bytes[name] = sum(len(chunk.data) for chunk in execution.chunks)
        self._kept_bytes += self._ended_bytes[name]
        while self._kept and (len(self._kept) > MAX_KEPT_PROGRAMS or self._kept_bytes > MAX_KEPT_BYTES):
            oldest = self._kept.popleft()
            self._outputs.release((self._qualified_name, oldest))
            self._kept_bytes -= self._ended_bytes.pop(oldest)
            self._known.pop(oldest, None)

    def release_outputs(self) -> None:
        """Stop counting the kept output of the sandbox, after the sandbox has ended."""
        self._has_ended = True
        for name in self._known:
            self._outputs.release((self._qualified_name, name))

    def list_names(self) -> list[str]:
        """Return the names of the running programs, and of the ended programs whose output is kept."""
        return list(self._known)

    def list_unacked_ends(self) -> list[Message]:
        """Return the end messages that are kept because a server may not have received them."""
        return [each.end_message for each in self._known.values() if each.end_message is not None]


_tasks: set[asyncio.Task[None]] = set()


def _get_first_line(request: dict[str, Any]) -> str:
    """Return the first line of a program or command, shortened for display; the request is not trusted."""
    argv = request.get("argv")
    arguments = " ".join(map(str, argv)) if isinstance(argv, list) else ""
    text = request.get("command") or request.get("source") or arguments
    return str(text).strip().partition("\n")[0][:200]


def _get_last_output(chunks: list[Chunk], max_bytes: int) -> bytes:
    """Return the last bytes that a program printed, at most `max_bytes`."""
    pieces: list[bytes] = []
    for chunk in reversed(chunks):
        if max_bytes <= 0:
            break
        if chunk.stream != "result":
            pieces.append(chunk.data[-max_bytes:])
            max_bytes -= len(pieces[-1])
    return b"".join(reversed(pieces))


def _check_strings(env: object, cwd: object) -> None:
    if not isinstance(env, dict) or not all(isinstance(each, str) for pair in env.items() for each in pair):
        raise SandboxRequestError("'env' of a session must be an object of strings.")
    if cwd is not None and not isinstance(cwd, str):
        raise SandboxRequestError("'cwd' of a session must be a string.")
