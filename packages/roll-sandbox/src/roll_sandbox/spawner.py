"""The manager's end of the connection to its spawner (`host/spawner.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_sandbox.agent_code import get_spawner_source
from roll_sandbox.errors import SandboxError, SandboxUnavailableError
from roll_sandbox.system_plan import Plan

__all__ = ["SandboxProcess", "SpawnerClient"]

START_TIMEOUT_S = 60.0
"""Timeout for the start of a spawner, which takes 0.1 s on an idle machine."""
END_TIMEOUT_S = 10.0
_MESSAGE_BYTES = 1 << 17
_NOT_RUNNING_MESSAGE = "the spawner is not running"
_START_FAILED_MESSAGE = "the spawner failed to start"


@dataclass(kw_only=True)
class SandboxProcess:
    """A sandbox's outermost process."""

    identity: int
    socket: socket.socket
    spawner: SpawnerClient
    ended: asyncio.Future[None]
    started: asyncio.Future[Sequence[tuple[str, str]]]
    counters: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def kill(self) -> None:
        """End the sandbox and everything in it."""
        if not self.ended.done():
            self.spawner.send(("kill", self.identity))


class SpawnerClient:
    """Starts sandboxes through the spawner. All calls must come from one event loop."""

    def __init__(self, process: subprocess.Popen[Any], control: socket.socket) -> None:
        self.facts: dict[str, Any] = {}
        self.is_lost = False
        self._process = process
        self._control = control
        self._processes: dict[int, SandboxProcess] = {}
        self._images: dict[str, asyncio.Future[str]] = {}
        self._zygote: asyncio.Future[None] | None = None
        self._next = 0
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        loop.add_reader(control.fileno(), self._read)

    @classmethod
    async def start(cls) -> SpawnerClient:
        """Start the spawner's process, and return a client once the spawner is ready.

        Raises:
            SandboxUnavailableError: the spawner failed to start.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A message must fit into the send buffer (EMSGSIZE), and the plan of a file system may be long.
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MESSAGE_BYTES)
        starting = asyncio.ensure_future(asyncio.to_thread(_start_process, theirs))
        try:
            with theirs:
                # Wait even if the caller was canceled: the thread cannot be stopped, and its process must be ended.
                await asyncio.wait([asyncio.shield(starting)])
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                await cls(starting.result(), ours).close()
            ours.close()
            raise
        try:
            client = cls(starting.result(), ours)
        except OSError as error:
            ours.close()
            raise SandboxUnavailableError(f"{_START_FAILED_MESSAGE}: {error}") from error
        try:
            await asyncio.wait_for(client._ready, START_TIMEOUT_S)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                reason = f"it did not respond within {START_TIMEOUT_S:g} s; the machine may be overloaded"
            elif isinstance(error, SandboxError):
                reason = f"it exited {_describe_exit(client._process.returncode)}; see its messages on standard error"
            else:
                raise
            raise SandboxUnavailableError(f"{_START_FAILED_MESSAGE}: {reason}") from error
        return client

    def send(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        """Send one message, with file descriptors; do nothing if the spawner has ended."""
        with contextlib.suppress(OSError):  # `_read` notices that the spawner has ended
            socket.send_fds(self._control, [marshal.dumps(message)], list(descriptors))

    def _read(self) -> None:
        while True:
            try:
                data = self._control.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_lost()
                return
            name, *arguments = marshal.loads(data)
            getattr(self, f"_on_{name}")(*arguments)

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self._ready.set_result(None)

    def _on_zygote(self, error: str) -> None:
        assert self._zygote is not None
        _resolve(self._zygote, None, error)

    def _on_image(self, name: str, directory: str | None, error: str) -> None:
        error = "" if directory is not None else f"cannot build the file system of a sandbox: {error}"
        _resolve(self._images.pop(name), directory, error)

    def _on_started(self, identity: int, counters: Sequence[tuple[str, str]] | None) -> None:
        child = self._processes[identity]
        if not child.started.done():
            child.started.set_result(counters or ())

    def _on_ended(self, identity: int, status: int, error: str) -> None:
        child = self._processes.pop(identity)
        if not child.started.done():
            child.started.set_exception(SandboxError(f"cannot start a sandbox: {error or f'status {status}'}"))
        if not child.ended.done():
            child.ended.set_result(None)

    def _on_lost(self) -> None:
        """Mark the spawner and every sandbox as ended."""
        self.is_lost = True
        self._loop.remove_reader(self._control.fileno())
        self._fail_all()

    def _fail_all(self) -> None:
        """Fail all pending requests, and mark every sandbox as ended."""
        for future in (self._ready, self._zygote, *self._images.values()):
            if future is not None and not future.done():
                future.set_exception(SandboxError(_NOT_RUNNING_MESSAGE))
                future.exception()  # marks it as retrieved, since no caller may be waiting
        self._images.clear()
        for identity in list(self._processes):
            self._on_ended(identity, -1, _NOT_RUNNING_MESSAGE)

    def check_running(self) -> None:
        """Check that the spawner runs.

        Raises:
            SandboxError: the spawner has ended or was closed.
        """
        if self.is_lost:
            raise SandboxError(_NOT_RUNNING_MESSAGE)

    async def start_zygote(self, arguments: list[str], stderr_fd: int, code_fd: int) -> None:
        """Start the zygote, from which sandboxes are forked.

        Raises:
            SandboxError: the zygote does not start.
        """
        self.check_running()
        self._zygote = self._loop.create_future()
        self.send(("zygote", arguments), [stderr_fd, code_fd])
        await self._zygote

    async def build_tree(self, name: str, plan: Plan) -> str:
        """Build the file system of a plan under the given name, and return its directory.

        Raises:
            SandboxError: the file system cannot be built.
        """
        self.check_running()
        self._images[name] = future = self._loop.create_future()
        self.send(("image", name, plan))
        return await future

    async def spawn(
        self,
        tree: str | None,
        arguments: list[str],
        layers: list[tuple[str, str]],
        limits: dict[str, int],
        stderr_fd: int,
        code_fd: int,
    ) -> SandboxProcess:
        """Start a sandbox, and return its outermost process; `SandboxProcess.socket` is connected to the agent.

        Args:
            tree: directory of the sandbox's file system, if the zygote forks the sandbox; otherwise `None`.
            arguments: bwrap's command line, if `tree` is `None`.
            layers: source and target of each layer of an image; the sandbox's user owns the layers' files.
            limits: limits of the control group.
            stderr_fd: file descriptor for the standard error of bwrap and the agent.
            code_fd: file descriptor of the agent's code, if bwrap starts the sandbox.

        Raises:
            SandboxError: the sandbox cannot be started.
        """
        self.check_running()
        ours, theirs = socket.socketpair()
        self._next += 1
        child = SandboxProcess(
            identity=self._next,
            socket=ours,
            spawner=self,
            ended=self._loop.create_future(),
            started=self._loop.create_future(),
        )
        self._processes[child.identity] = child
        self.send(("start", child.identity, tree, arguments, layers, limits), [theirs.fileno(), stderr_fd, code_fd])
        theirs.close()
        try:
            child.counters = await child.started
        except BaseException:
            ours.close()
            child.kill()
            raise
        return child

    async def close(self) -> None:
        """End the spawner and every sandbox."""
        self.is_lost = True  # no further requests
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._control.fileno())
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._fail_all()


def _start_process(control: socket.socket) -> subprocess.Popen[Any]:
    """Start the process of a spawner, which gets the socket `control` to the manager."""
    # The socket must be file descriptor 3; a line of Python before the program moves it there.
    number = control.fileno()
    code = f"import os\nif {number} != 3: os.dup2({number}, 3); os.close({number})\n"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", code + get_spawner_source()],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,
        env={"LC_ALL": "C.UTF-8"},
        # A new session, since Ctrl-C sends SIGINT to the terminal's process group, and the spawner must outlive its
        # manager.
        start_new_session=True,
    )


def _describe_exit(code: int | None) -> str:
    """Return how a process exited, as the end of a sentence: `by signal 9`, or `with exit code 1`."""
    return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"


def _resolve(future: asyncio.Future[Any], value: Any, error: str) -> None:
    """Set the result of a request's future to `value`, or its exception to a `SandboxError` if `error` is not empty."""
    if future.done():  # the caller was canceled
        return
    if error:
        future.set_exception(SandboxError(error))
    else:
        future.set_result(value)
