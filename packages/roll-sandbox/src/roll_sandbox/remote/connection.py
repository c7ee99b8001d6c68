"""The client's end of a connection to a sandbox service: many sandboxes over one WebSocket that may break.

    Sandbox ──► RemoteSandboxConnection ──► ServiceConnection ──► service ──► worker ──► agent
                                      └ keeps the messages to a running program until it ends, to resend them over a
                                        new connection; their names ensure that nothing happens twice

Invariants:
    - everything runs in one event loop;
    - every program ends exactly once, with its worker's report or with an error;
    - a program whose end is unknown is reported as lost, never as a success.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from roll_sandbox.agent_sandbox import Job, Sandbox
from roll_sandbox.connection import AgentJob
from roll_sandbox.counters import Counters
from roll_sandbox.errors import (
    RollSandboxError,
    SandboxError,
    SandboxLostError,
    SandboxUnavailableError,
    UnknownSandboxError,
)
from roll_sandbox.remote.resend_buffer import ResendBuffer
from roll_sandbox.types import Program, SandboxSpec, Usage
from roll_sandbox.wire import Message, error_from_json, program_to_json, spec_to_json

__all__ = ["RemoteSandbox", "RemoteSandboxConnection", "ServiceConnection", "generate_name"]

_RESPONSE_TIMEOUT_S = 10.0
_MAX_CLOSES_TO_RESEND = 256
"""Maximum number of `close` messages of sessions to keep, to resend them over a new connection."""
_MESSAGE_FIELDS = {"input": ("data",), "bound": ("wall_s", "cpu_s"), "tty": ("rows", "columns", "shown")}


def generate_name() -> str:
    """Return a new name for a sandbox, program or session."""
    return uuid.uuid4().hex


class RemoteSandbox(Sandbox):
    """A sandbox in a service. Its worker enforces time limits."""

    agent_grace_s = None

    def __init__(self, name: str, *arguments: Any, service: ServiceConnection, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.name = name
        """The name of the sandbox in the service."""
        self._service = service

    def extend(self, lifetime_s: float) -> asyncio.Future[Message]:
        """Request a new lifetime, in seconds from now; the returned future completes when the service confirms it.

        Raises:
            SandboxQuotaError: the lifetime exceeds the owner's quota.
            UnknownSandboxError: the sandbox has ended, or is being ended.
            SandboxUnavailableError: no answer arrived in time.
        """
        return asyncio.ensure_future(self._service.request("extend", self.name, lifetime_s=lifetime_s))

    async def usage(self) -> Usage:
        """Return the CPU time and memory that the sandbox uses; see `Sandbox.usage`."""
        answer = await self._service.inspect(self.name)
        return Usage(cpu_s=float(answer["cpu_s"]), memory_bytes=int(answer["memory_bytes"]))

    def detach(self) -> None:
        """Detach from the sandbox, which keeps running; later messages about it are ignored."""
        self._service.remove_sandbox(self.name)

    def reattach_program(self, program: Message) -> Job:
        """Return the job of a program that another connection started.

        Args:
            program: the program's entry in the result of `ServiceConnection.inspect`.
        """
        assert isinstance(self._connection, RemoteSandboxConnection)
        return Job(self, self._connection.reattach(program["id"], program["seen"]), 0.0)

    def begin_named(self, name: str, program: Program, *, alone: bool = False) -> Job:
        """Start a program under a given name, like `begin`; if a program of this name exists, return its job."""
        connection = self._connection
        assert isinstance(connection, RemoteSandboxConnection)
        connection.next_name = name
        try:
            return self.begin(program, alone=alone)
        finally:
            connection.next_name = None


class RemoteSandboxConnection:
    """The connection to one sandbox, which sends messages through the service instead of to the agent."""

    def __init__(self, service: ServiceConnection, name: str) -> None:
        self._service = service
        self.name = name
        self.next_name: str | None = None
        """Name for the next program; if `None`, a name is generated."""
        self.is_lost = False
        self.end_error: RollSandboxError = SandboxError("the sandbox has ended")
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resend_buffers: dict[str, ResendBuffer] = {}
        self._sent_closes: deque[Message] = deque(maxlen=_MAX_CLOSES_TO_RESEND)
        self._num_sent: dict[str, int] = {}

    def configure(self, settings: dict[str, Any]) -> AgentJob:
        """Return a finished job, since the worker has already configured the agent."""
        job = AgentJob(self, "", 0)
        job.finish({})
        return job

    def submit(self, name: str, request: dict[str, Any], stdin: bytes, output_bytes: int) -> AgentJob:
        """Start a program or a session under a new name."""
        message = {"op": name, "request": program_to_json(request)}
        return self._start_job(message | ({"stdin": stdin} if name == "run" else {}), output_bytes)

    def reattach(self, name: str, num_sent: int) -> AgentJob:
        """Return a new job for a running program, to which an earlier connection has sent `num_sent` messages."""
        self._num_sent[name] = num_sent
        return self._start_job({"op": "run", "request": {}, "stdin": b""}, 2**52, name)

    def submit_on_channel(self, channel: Any, name: str, request: dict[str, Any], output_bytes: int) -> AgentJob:
        """Start a command in a session."""
        return self._start_job({"op": name, "shell": channel, "request": request}, output_bytes)

    def _start_job(self, message: Message, output_bytes: int, name: str | None = None) -> AgentJob:
        name = name or self.next_name or generate_name()
        job = AgentJob(self, name, output_bytes)
        if self.is_lost:
            job.finish(None, self.end_error)
            return job
        sent = self._resend_buffers[name] = ResendBuffer(job)
        message = {**message, "sandbox": self.name, "id": name}
        try:
            self._service.send(message)
        except RollSandboxError as error:
            self._finish_job(name, None, error)
        else:
            sent.store(message)
        return job

    def send(self, *message: Any) -> None:
        """Send a message to a running program or a session."""
        op, name, *rest = message
        if self.is_lost:
            return
        values = dict(zip(_MESSAGE_FIELDS.get(op, ()), rest, strict=True))
        number = self._num_sent[name] = self._num_sent.get(name, 0) + 1
        outgoing = {"op": op, "sandbox": self.name, "id": name, "n": number, **values}
        if name in self._resend_buffers:
            self._resend_buffers[name].store(outgoing)
        if op == "close":
            self._sent_closes.append(outgoing)
        self._service.send(outgoing)

    def receive(self, message: Message) -> None:
        """Handle a message of the service about a program."""
        name = message["id"]
        sent = self._resend_buffers.get(name)
        if sent is None:
            return
        op = message["op"]
        if op == "out":
            if message["n"] == sent.num_received:
                sent.num_received += 1
                sent.job.add({"stdout": ord("o"), "stderr": ord("e")}.get(message["stream"], ord("r")), message["data"])
            elif message["n"] > sent.num_received:
                self._request_missing_output(name, sent)
        elif op == "used":
            if message["n"] > sent.last_answered:
                sent.last_answered = message["n"]
                sent.job.resolve_limit_requests(message["used_s"])
        elif op == "end":
            if message["pieces"] > sent.num_received:
                self._request_missing_output(name, sent)
            else:
                self._finish_job(name, message["end"], "")
        else:
            self._finish_job(name, None, error_from_json(message))

    def _request_missing_output(self, name: str, sent: ResendBuffer) -> None:
        """Request a program's output that this client has missed, or end the job as lost if that is impossible."""
        if not sent.messages:
            self._finish_job(name, None, SandboxLostError("part of a program's output was lost"))
        elif sent.requested_at < sent.num_received:
            sent.requested_at = sent.num_received
            self._service.send({**sent.messages[0], "have": sent.num_received})

    def _finish_job(self, name: str, end: dict[str, Any] | None, error: str | Exception) -> None:
        self._num_sent.pop(name, None)
        self._resend_buffers.pop(name).job.finish(end, error)

    def resend(self) -> None:
        """Send the messages of running programs and sessions again, over a new connection.

        `close` messages of sessions are sent first, since these sessions may use up the limit of processes.
        """
        for message in self._sent_closes:
            self._service.send(message)
        for name, sent in list(self._resend_buffers.items()):
            if sent.kept_bytes is None:
                self._finish_job(
                    name,
                    None,
                    SandboxLostError("the connection was lost, and the program's input is too large to be sent again"),
                )
                continue
            first, *rest = sent.messages
            self._service.send({**first, "have": sent.num_received})
            for message in rest:
                self._service.send(message)

    def fail_all(self, error: RollSandboxError) -> None:
        """End the jobs of all programs with an error, after the sandbox has ended."""
        if self.is_lost:
            return
        self.is_lost, self.end_error = True, error
        for name in list(self._resend_buffers):
            self._finish_job(name, None, error)
        self._service.remove_sandbox(self.name)
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Do nothing, because the worker closes the connection to the agent when the sandbox is stopped."""


class ServiceConnection:
    """The client's end of a connection to a service: creates, finds and stops sandboxes.

    Args:
        transmit: function that sends a message to the service, without waiting.
    """

    def __init__(self, transmit: Callable[[Message], None]) -> None:
        self._transmit = transmit
        self._connections: dict[str, RemoteSandboxConnection] = {}
        self._opening: dict[str, tuple[Message, asyncio.Future[Message]]] = {}
        self._stopping: set[str] = set()
        self._pending_answers: dict[str, asyncio.Future[Message]] = {}

    def send(self, message: Message) -> None:
        """Send a message to the service.

        Raises:
            OversizedUploadError: the message is larger than the service accepts.
        """
        self._transmit(message)

    async def create(
        self, spec: SandboxSpec, *, lifetime_s: float | None = None, near: str | None = None, name: str | None = None
    ) -> RemoteSandbox:
        """Create a sandbox, or return the existing sandbox with this name.

        Args:
            spec: the sandbox's spec.
            lifetime_s: seconds after which the sandbox ends; `None` for the service's default.
            near: name of another sandbox, whose worker is preferred if it has room.
            name: name for the sandbox; by default a generated name.

        Raises:
            SandboxError: the sandbox did not start.
            SandboxQuotaError: the owner's quota is used up.
            SandboxRequestError: the service never starts such a sandbox.
        """
        message: Message = {"op": "create", "sandbox": name or generate_name(), "spec": spec_to_json(spec)}
        wishes = {"lifetime_s": lifetime_s, "near": near}
        return await self._make_sandbox(message | {key: wish for key, wish in wishes.items() if wish is not None}, spec)

    async def attach(self, name: str, spec: SandboxSpec) -> RemoteSandbox:
        """Return an existing sandbox of the owner. `spec` must be the sandbox's spec; this is not checked."""
        return await self._make_sandbox({"op": "attach", "sandbox": name}, spec)

    async def inspect(self, name: str, *, output_bytes: int = 0) -> Message:
        """Return the usage and the programs of one of the owner's sandboxes, with the latest program last.

        Args:
            name: name of the sandbox.
            output_bytes: number of bytes to include from the end of each program's output.

        Raises:
            UnknownSandboxError: the owner has no such sandbox.
            SandboxUnavailableError: the sandbox's worker is disconnected.
        """
        return await self.request("look", name, output=output_bytes)

    async def request(self, op: str, name: str, **values: Any) -> Message:
        """Send the request `op` about sandbox `name`, and return the response. Raises the same errors as `inspect`."""
        key = generate_name()
        answer = self._pending_answers[key] = asyncio.get_running_loop().create_future()
        try:
            self.send({"op": op, "sandbox": name, "id": key, **values})
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise SandboxUnavailableError(
                f"the worker of the sandbox '{name}' did not respond in time: it is disconnected or busy. Retry."
            ) from None
        finally:
            del self._pending_answers[key]

    async def _make_sandbox(self, message: Message, spec: SandboxSpec) -> RemoteSandbox:
        name = message["sandbox"]
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._opening[name] = message, answer
        connection = self._connections[name] = RemoteSandboxConnection(self, name)
        try:
            self.send(message)
            traits = await answer
        except BaseException as error:
            self.remove_sandbox(name)
            if isinstance(error, asyncio.CancelledError) and message["op"] == "create":
                self.send({"op": "stop", "sandbox": name})
            raise
        finally:
            del self._opening[name]
        return RemoteSandbox(
            name,
            dataclasses.replace(spec, image=traits.get("image")),
            traits,
            connection,
            destroy=lambda: self.stop(connection),
            ended=connection.ended,
            counters=Counters(),
            service=self,
        )

    def stop(self, connection: RemoteSandboxConnection) -> None:
        """Request the end of a sandbox, without waiting for it; the service reports when the sandbox has ended."""
        if not connection.is_lost and connection.name not in self._stopping:
            self._stopping.add(connection.name)
            self.send({"op": "stop", "sandbox": connection.name})

    def remove_sandbox(self, name: str) -> None:
        """Remove the entry of a sandbox that has ended or did not start."""
        self._connections.pop(name, None)
        self._stopping.discard(name)

    def receive(self, message: Message) -> None:
        """Handle a message of the service."""
        op, name = message["op"], message.get("sandbox", "")
        connection = self._connections.get(name)
        answer = self._pending_answers.get(message.get("id", ""))
        if answer is not None:
            if not answer.done() and op in ("looked", "extended"):
                answer.set_result(message)
            elif not answer.done():
                answer.set_exception(error_from_json(message))
        elif name in self._opening and op in ("created", "failed", "gone"):
            answer = self._opening[name][1]
            if not answer.done() and op == "created":
                answer.set_result(message["traits"])
            elif not answer.done():
                answer.set_exception(error_from_json(message))
        elif op == "created" or op == "failed":
            if op == "failed" and connection is not None:
                error = error_from_json(message)
                if isinstance(error, UnknownSandboxError):  # a program that was sent before may have run
                    error = SandboxLostError(f"the sandbox ended while the connection to the service was down: {error}")
                connection.fail_all(error)
        elif connection is not None:
            if op == "gone":
                connection.fail_all(error_from_json(message))
            elif op == "again":
                connection.resend()
            else:
                connection.receive(message)

    def resend(self) -> None:
        """Send unanswered requests and the messages of running programs again, over a new connection."""
        for message, _ in self._opening.values():
            self.send(message)
        for name, connection in list(self._connections.items()):
            if name in self._opening:
                continue
            self.send({"op": "attach", "sandbox": name})
            connection.resend()
            if name in self._stopping:
                self.send({"op": "stop", "sandbox": name})

    def fail_all(self, error: RollSandboxError) -> None:
        """End all requests and the jobs of all programs with an error, since the client will not connect again."""
        for _, answer in self._opening.values():
            if not answer.done():
                answer.set_exception(error)
        for connection in list(self._connections.values()):
            connection.fail_all(error)

    @property
    def open_connections(self) -> list[RemoteSandboxConnection]:
        """The connections of all sandboxes that have not ended."""
        return list(self._connections.values())
