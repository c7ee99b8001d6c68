"""The synchronous interface, for scripts and notebooks.

with connect_sync(url, token) as sandboxes:
    print(sandboxes.execute(PythonCode(source="print(1)")).stdout)

The work runs in a separate thread with its own event loop, so the caller's thread may run an event loop, too. Ctrl-C
cancels a waiting call: its program is ended, and then `KeyboardInterrupt` is raised.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from roll_sandbox.agent_sandbox import Job, Sandbox, Session
from roll_sandbox.errors import SandboxError
from roll_sandbox.manager import SandboxManager
from roll_sandbox.remote import connect
from roll_sandbox.runtime import Runtime
from roll_sandbox.types import Chunk, ExecutionResult, Program, SandboxSpec, Snapshot

__all__ = ["SyncJob", "SyncSandbox", "SyncSandboxes", "SyncSession", "connect_sync"]

_T = TypeVar("_T")
_SIGNAL_POLL_S = 0.2
"""Maximum seconds of a single wait in the caller's thread. Python handles some signals only after the wait: those that
arrive in another thread, or just before the main thread waits for a lock.
"""


class _LoopThread:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="roll-sandboxes", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop and return its result.

        An exception in the caller's thread (Ctrl-C) cancels the coroutine, and is raised once the coroutine has ended.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise SandboxError("the sandbox manager was not started, or is closed")
        future = asyncio.run_coroutine_threadsafe(_set_when_done(coroutine, ended := threading.Event()), self._loop)
        try:
            return _wait_interruptibly(future)
        except BaseException:
            # The caller may use the manager again, so wait until the canceled call has ended its program.
            if future.cancel():
                while not ended.wait(_SIGNAL_POLL_S):
                    pass
            raise

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function in the loop's thread and return its result."""

        async def call_in_loop() -> _T:
            return function(*arguments)

        return self.run(call_in_loop())

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _wait_interruptibly(future: Future[_T]) -> _T:
    """Wait for a future of another thread, and return its result. Signals are handled within `_SIGNAL_POLL_S`."""
    while not future.done():
        wait([future], _SIGNAL_POLL_S)
    return future.result()


async def _set_when_done(coroutine: Coroutine[Any, Any, _T], ended: threading.Event) -> _T:
    try:
        return await coroutine
    finally:
        ended.set()


class SyncJob:
    """A synchronous `Job`."""

    def __init__(self, loop: _LoopThread, job: Job) -> None:
        self._loop, self._job = loop, job

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self._job.done()

    def kill(self) -> None:
        """End the job."""
        self._loop.call(self._job.kill)

    def set_limits(self, *, wall_s: float, cpu_s: float | None) -> float:
        """Set new limits; see `Job.set_limits`."""
        return self._loop.run(self._job.set_limits(wall_s=wall_s, cpu_s=cpu_s))

    def write(self, data: bytes) -> None:
        """Write data to the standard input of an `interactive` program."""
        self._loop.call(self._job.write, data)

    def end_input(self) -> None:
        """Close the program's standard input."""
        self._loop.call(self._job.end_input)

    def stream(self) -> Iterator[Chunk]:
        """Yield all output from the beginning, until the job ends."""
        chunks = self._job.stream()
        while (chunk := self._loop.run(_next_chunk(chunks))) is not None:
            yield chunk

    def wait(self) -> ExecutionResult:
        """Wait for the end of the job and return its result; see `Job.wait`."""
        return self._loop.run(self._job.wait())


async def _next_chunk(chunks: Any) -> Chunk | None:
    return await anext(chunks, None)


class SyncSession:
    """A synchronous `Session`."""

    def __init__(self, loop: _LoopThread, session: Session) -> None:
        self._loop, self._session = loop, session

    @property
    def closed(self) -> bool:
        """True if the shell has ended."""
        return self._session.closed

    def run(self, command: str, *, wall_s: float | None = None) -> ExecutionResult:
        """Run a command; see `Session.run`."""
        return self._loop.run(self._session.run(command, wall_s=wall_s))

    def start(self, command: str, *, wall_s: float | None = None) -> SyncJob:
        """Start a command; see `Session.start`."""
        return SyncJob(self._loop, self._loop.run(self._session.start(command, wall_s=wall_s)))

    def background(self, command: str, *, wall_s: float | None = None) -> SyncJob:
        """Start a background job; see `Session.background`."""
        return SyncJob(self._loop, self._loop.run(self._session.background(command, wall_s=wall_s)))

    def close(self) -> None:
        """End the shell and everything that it started."""
        self._loop.run(self._session.close())


class SyncSandbox:
    """A synchronous `Sandbox`. `with` closes it at the end."""

    def __init__(self, loop: _LoopThread, sandbox: Sandbox) -> None:
        self._loop, self._sandbox = loop, sandbox
        self.spec, self.home = sandbox.spec, sandbox.home
        self.name: str = getattr(sandbox, "name", "")
        """Name of the sandbox in a service; empty for a sandbox of this machine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """True if the sandbox has ended, by itself or by `close`."""
        return self._sandbox.has_ended

    @property
    def broken(self) -> bool:
        """The former name of `has_ended`, with the same value."""
        return self.has_ended

    def execute(self, program: Program) -> ExecutionResult:
        """Run a program; see `Sandbox.execute`."""
        return self._loop.run(self._sandbox.execute(program))

    def start(self, program: Program) -> SyncJob:
        """Start a program; see `Sandbox.start`."""
        return SyncJob(self._loop, self._loop.run(self._sandbox.start(program)))

    def session(self, *, env: dict[str, str] | None = None, cwd: str | None = None) -> SyncSession:
        """Open a shell; see `Sandbox.session`."""
        return SyncSession(self._loop, self._loop.run(self._sandbox.session(env=env, cwd=cwd)))

    def read_file(self, path: str, *, max_bytes: int = 2**26) -> bytes:
        """Return a file's content; see `Sandbox.read_file`."""
        return self._loop.run(self._sandbox.read_file(path, max_bytes=max_bytes))

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file; see `Sandbox.write_file`."""
        self._loop.run(self._sandbox.write_file(path, data, mode=mode))

    def snapshot(self) -> Snapshot:
        """Return the current files; see `Sandbox.snapshot`."""
        return self._loop.run(self._sandbox.snapshot())

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the files; see `Sandbox.restore`."""
        self._loop.run(self._sandbox.restore(snapshot))

    def close(self) -> None:
        """End everything in the sandbox."""
        self._loop.run(self._sandbox.close())


class SyncSandboxes:
    """A synchronous `SandboxManager`.

    Args:
        make: function that creates the manager; called in the loop's thread.
    """

    def __init__(self, make: Callable[[], SandboxManager]) -> None:
        self._make = make
        self._loop: _LoopThread
        self._manager: SandboxManager

    def __enter__(self) -> Self:
        self._loop = _LoopThread()
        try:
            self._manager = self._loop.call(self._make)
            self._loop.run(self._manager.start())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run(self._manager.close())
        finally:
            self._loop.close()

    @property
    def runtime(self) -> Runtime:
        """The isolation runtime."""
        return self._manager.runtime

    def execute(self, program: Program, *, spec: SandboxSpec | None = None) -> ExecutionResult:
        """Run one program; see `SandboxManager.execute`."""
        return self._loop.run(self._manager.execute(program, spec=spec))

    @contextmanager
    def run_interactive(self, program: Program, *, spec: SandboxSpec | None = None) -> Iterator[SyncJob]:
        """Start an interactive program, and yield its job; see `SandboxManager.run_interactive`."""
        job = self._manager.run_interactive(program, spec=spec)
        sync_job = SyncJob(self._loop, self._loop.run(job.__aenter__()))
        try:
            yield sync_job
        finally:
            self._loop.run(job.__aexit__(None, None, None))

    def create(self, spec: SandboxSpec | None = None, *, snapshot: Snapshot | None = None) -> SyncSandbox:
        """Create a sandbox; see `SandboxManager.create`."""
        return SyncSandbox(self._loop, self._loop.run(self._manager.create(spec, snapshot=snapshot)))

    def health(self) -> dict[str, int]:
        """Return the manager's counts; see `SandboxManager.health`."""
        return self._manager.health()


def connect_sync(url: str, token: str, **settings: Any) -> SyncSandboxes:
    """Return a synchronous manager of a service's sandboxes: `with connect_sync(url, token) as sandboxes: ...`

    Args:
        url: address of the service, as for `connect`.
        token: token of the service, as for `connect`.
        settings: further arguments of `connect`.

    Raises:
        The errors of `connect`, when the `with` block is entered.
    """
    return SyncSandboxes(lambda: connect(url, token, **settings))
