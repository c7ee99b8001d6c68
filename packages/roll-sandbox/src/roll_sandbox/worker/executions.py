"""Programs, sessions and their commands in one sandbox, by name: each is started once, also if requested again."""

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
from roll_sandbox.wire import Message, failure_said, program_of
from roll_sandbox.worker.outputs import Outputs

__all__ = ["Executions"]

SHOWN_BYTES = 2**22
"""Most bytes of output of all programs in one answer to `look`."""
KEPT = 64
KEPT_BYTES = 2**23
"""Most bytes of output of ended programs to keep per sandbox, for clients that reconnect."""
_PIECE_BYTES, _EMPTIED_BYTES = 200, 8
"""Memory of each piece of output, in addition to its data, and of an emptied piece of a terminal."""


class _Execution:
    def __init__(self, message: Message) -> None:
        self.job: Job | None = None
        self.chunks: list[Chunk] = []
        self.began = time.time()
        self.words = _words(message["request"])
        self.terminal = bool(message["request"].get("terminal"))
        self.ended: Message | None = None
        self.waiting: list[Message] = []
        """Messages that arrived before it had started."""
        self.waiting_bytes = 0
        self.seen = 0
        self.task: asyncio.Task[None] | None = None


class Executions:
    """The programs and sessions of one sandbox; see the module.

    Args:
        place: the sandbox's name in messages.
        sandbox: the sandbox.
        tell: sends a message to the server.
        outputs: output of all sandboxes of the worker.
    """

    def __init__(self, place: str, sandbox: Sandbox, tell: Callable[[Message], None], outputs: Outputs) -> None:
        self._place = place
        self._sandbox = sandbox
        self.tell = tell
        self._outputs = outputs
        self._over = False
        self.why: Exception | None = None
        """Why the sandbox was ended, if it did not end by itself."""
        self._known: dict[str, _Execution] = {}
        self._sessions: dict[str, Session] = {}
        self._kept: deque[str] = deque()
        self._kept_bytes = 0
        self._ended_bytes: dict[str, int] = {}

    def receive(self, message: Message) -> None:
        """Handle a message about a program or a session."""
        op, name = message["op"], message["id"]
        found = self._known.get(name)
        if op in ("run", "shell", "line"):
            if name in self._sessions:
                self.tell(self._opened(name))
            elif found is None:
                self._start(name, message)
            else:
                self._repeat(name, found, message.get("have", 0))
        elif op == "look":
            self._spawn(self._looked(message))
        elif op == "close" and found is None and name in self._sessions:
            self._sessions.pop(name).end()
        elif found is not None:
            self._apply(name, found, message)

    def _start(self, name: str, message: Message) -> None:
        execution = self._known[name] = _Execution(message)
        op = message["op"]
        if message.get("again"):
            self._end(name, execution, failure_said(SandboxLostError("nobody knows how the program ended")))
        elif op == "run":
            try:
                program, alone = program_of(message["request"], message["stdin"])
                execution.job = self._sandbox.begin(program, alone=alone)
            except (RollSandboxError, ValueError) as error:
                self._end(name, execution, failure_said(error))
            else:
                execution.chunks = execution.job.chunks
                execution.task = self._spawn(self._follow(name, execution, execution.job))
        else:
            execution.task = self._spawn(self._converse(name, execution, message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        return task

    async def _follow(self, name: str, execution: _Execution, job: Job) -> None:
        """Send a program's output, and its end, to the server."""
        try:
            number = 0
            async for chunk in job.stream():
                self._say(name, number, chunk)
                number += 1
                self._count(name, execution, job, chunk)
            said: Message = {"op": "end", "end": await job.report(), "pieces": len(execution.chunks)}
        except Exception as error:  # also a malformed report of an agent: waiters must get an error
            said = failure_said(self.why or error)
        if execution.ended is None:
            self._end(name, execution, said)

    def _count(self, name: str, execution: _Execution, job: Job, chunk: Chunk) -> None:
        if not self._over:
            size = _EMPTIED_BYTES if execution.terminal else _PIECE_BYTES + len(chunk.data)
            self._outputs.add((self._place, name), size, partial(self._drop, name, execution, job))

    def _drop(self, name: str, execution: _Execution, job: Job) -> None:
        """Drop all output of a program, and end it if it runs."""
        job.drop()
        if execution.ended is None:
            if execution.task is not None:
                execution.task.cancel()
            error = SandboxError("the worker cannot keep all that programs print: print less, or ask for less at once")
            self._end(name, execution, failure_said(error))
        else:
            self._known.pop(name, None)

    async def _converse(self, name: str, execution: _Execution, message: Message) -> None:
        """Open a session, or run a command in one."""
        request = message["request"]
        try:
            if message["op"] == "shell":
                env, cwd = request.get("env") or {}, request.get("cwd")
                _check_texts(env, cwd)
                session = self._sessions[name] = await self._sandbox.session(env=env, cwd=cwd)
                del self._known[name]
                self.tell(self._opened(name))
                if any(each["op"] == "close" for each in execution.waiting):
                    self._sessions.pop(name, session).end()
                return
            session = self._sessions.get(message["shell"])
            if session is None:
                raise SandboxSessionError("the shell session has ended: open another one")
            command, wall_s = request.get("command"), request.get("wall_s")
            if not isinstance(command, str) or not (type(wall_s) in (int, float) and 0 < wall_s < float("inf")):
                raise SandboxRequestError("a session's command needs a text 'command' and a positive 'wall_s'.")
            execution.job = await session.start(command, wall_s=wall_s)
        except (RollSandboxError, ValueError) as error:
            self._end(name, execution, failure_said(error))
            return
        execution.chunks = execution.job.chunks
        waiting, execution.waiting = execution.waiting, []
        for each in waiting:
            self._act(name, execution.job, each)
        await self._follow(name, execution, execution.job)

    def _apply(self, name: str, execution: _Execution, message: Message) -> None:
        """Apply input, new limits or a kill to a running program; messages that are sent again are applied once."""
        if message["n"] <= execution.seen and message["op"] != "bound":
            return
        execution.seen = max(execution.seen, message["n"])
        if execution.job is not None:
            self._act(name, execution.job, message)
        elif execution.ended is None:
            self._wait(name, execution, message)

    def _wait(self, name: str, execution: _Execution, message: Message) -> None:
        execution.waiting.append(message)
        execution.waiting_bytes += len(message.get("data", b""))
        if execution.waiting_bytes > KEPT_BYTES and execution.task is not None:
            execution.task.cancel()
            execution.waiting.clear()
            error = SandboxRequestError("a command that waits for another one was sent too much: send it later.")
            self._end(name, execution, failure_said(error))

    def _act(self, name: str, job: Job, message: Message) -> None:
        op = message["op"]
        if op == "input":
            if message["data"]:
                job.write(message["data"])
            else:
                job.end_input()
        elif op == "kill":
            job.kill()
        elif op == "tty":
            job.shown(message["rows"], message["columns"], message["shown"])
        elif op == "bound":
            self._spawn(self._bound(name, job, message))

    async def _looked(self, message: Message) -> None:
        """Report the sandbox's usage, and the latest output of its programs."""
        said: Message = {"op": "looked", "sandbox": self._place, "id": message["id"], "cpu_s": 0.0, "memory_bytes": 0}
        with contextlib.suppress(RollSandboxError):  # the sandbox has just ended
            usage = await self._sandbox.usage()
            said |= {"cpu_s": usage.cpu_s, "memory_bytes": usage.memory_bytes}
        left, programs = SHOWN_BYTES, []
        for name, each in reversed(self._known.items()):
            output = _tail(each.chunks, min(message["output"], left))
            left -= len(output)
            end = each.ended and (each.ended.get("end") or {"error": each.ended.get("message", "")})
            values = {"words": each.words, "terminal": each.terminal, "began": each.began, "seen": each.seen}
            programs.append({"id": name, **values, "end": end, "output": output})
        self.tell({**said, "programs": programs[::-1]})

    def _opened(self, name: str) -> Message:
        return {"op": "end", "sandbox": self._place, "id": name, "end": {"code": 0}, "pieces": 0}

    async def _bound(self, name: str, job: Job, message: Message) -> None:
        try:
            used_s = await job.bound(wall_s=message["wall_s"], cpu_s=message.get("cpu_s"))
        except RollSandboxError:
            return  # the end of the program reports it
        self.tell({"op": "used", "sandbox": self._place, "id": name, "n": message["n"], "used_s": used_s})

    def _say(self, name: str, number: int, chunk: Chunk) -> None:
        self.tell(
            {
                "op": "out",
                "sandbox": self._place,
                "id": name,
                "n": number,
                "stream": chunk.stream,
                "data": chunk.data,
            }
        )

    def _repeat(self, name: str, execution: _Execution, have: int) -> None:
        """Send again what a new connection has not received."""
        for number in range(have, len(execution.chunks)):
            self._say(name, number, execution.chunks[number])
        if execution.ended is not None:
            self.tell(execution.ended)

    def _end(self, name: str, execution: _Execution, said: Message) -> None:
        execution.ended = {"op": "end", **said, "sandbox": self._place, "id": name}
        if "error" in said:
            execution.ended["op"] = "error"
        self.tell(execution.ended)
        self._kept.append(name)
        self._ended_bytes[name] = sum(len(chunk.data) for chunk in execution.chunks)
        self._kept_bytes += self._ended_bytes[name]
        while self._kept and (len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES):
            oldest = self._kept.popleft()
            self._outputs.forget((self._place, oldest))
            self._kept_bytes -= self._ended_bytes.pop(oldest)
            self._known.pop(oldest, None)

    def forget(self) -> None:
        """Release the output of an ended sandbox."""
        self._over = True
        for name in self._known:
            self._outputs.forget((self._place, name))

    def names(self) -> list[str]:
        """Return the names of running programs, and of ended ones that are kept."""
        return list(self._known)

    def unheard(self) -> list[Message]:
        """Return the ends that are kept, for a server that may not have received them."""
        return [each.ended for each in self._known.values() if each.ended is not None]


_tasks: set[asyncio.Task[None]] = set()


def _words(request: dict[str, Any]) -> str:
    """Return the first words of a program; the request is not trusted."""
    argv = request.get("argv")
    said = " ".join(map(str, argv)) if isinstance(argv, list) else ""
    text = request.get("command") or request.get("source") or said
    return str(text).strip().partition("\n")[0][:200]


def _tail(chunks: list[Chunk], most: int) -> bytes:
    """Return the end of the printed output."""
    found: list[bytes] = []
    for chunk in reversed(chunks):
        if most <= 0:
            break
        if chunk.stream != "result":
            found.append(chunk.data[-most:])
            most -= len(found[-1])
    return b"".join(reversed(found))


def _check_texts(env: object, cwd: object) -> None:
    if not isinstance(env, dict) or not all(isinstance(each, str) for pair in env.items() for each in pair):
        raise SandboxRequestError("'env' of a session: an object of texts is needed.")
    if cwd is not None and not isinstance(cwd, str):
        raise SandboxRequestError("'cwd' of a session: a text is needed.")
