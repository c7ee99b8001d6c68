"""A sandbox with an agent inside, of any runtime.

The agent enforces limits on time and output. If an agent is silent long after a program's time is over, the sandbox is
ended and the program's outcome is `wall_time`; only hostile code can cause this.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from typing import Any, Self

from roll_sandbox import file_programs
from roll_sandbox.connection import Connection
from roll_sandbox.counters import Counters
from roll_sandbox.errors import SandboxPathError, SandboxSessionError
from roll_sandbox.jobs import Job
from roll_sandbox.requests import check_texts, make_run_request
from roll_sandbox.types import (
    Command,
    ExecutionResult,
    Limit,
    Limits,
    Program,
    PythonCode,
    SandboxSpec,
    Snapshot,
    Usage,
)

__all__ = ["Job", "Sandbox", "Session"]

AGENT_GRACE_S = 10.0
"""How long an agent may be silent after a program's time is over."""
FILE_TIMEOUT_S = 60.0
TERMINAL_KEPT_BYTES = 2**22
"""Most bytes kept of a terminal's output: more than may wait to be shown, so that a client that rejoins sees the
screen.
"""
_SESSION_ENDED = "the shell session has ended: open another session"


class Sandbox:
    """An isolated file system and the processes in it. Paths are inside the sandbox; relative ones are below `home`.

    `async with` closes it at the end. Some methods are only for the manager, which reuses sandboxes.
    """

    agent_grace_s: float | None = AGENT_GRACE_S
    """How long an agent may be silent after a program's time before the sandbox is ended; `None`: another host decides.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        settings: dict[str, Any],
        connection: Connection,
        *,
        destroy: Callable[[], None],
        ended: asyncio.Future[None],
        counters: Counters,
        on_agent_lost: Callable[[], Awaitable[set[Limit]]] | None = None,
    ) -> None:
        self.spec = spec
        self.home: str = settings["home"]
        """Base of relative paths, and the directory in which programs start."""
        self.properties = {name: settings[name] for name in ("home", "isolated", "mount_space")} | {"image": spec.image}
        """Properties that depend on the runtime. The image is a digest, since names may refer to another image later.
        """
        self._has_namespaces: bool = settings["mount_space"]
        # Without isolation /tmp is the host's.
        self._snapshot_roots = (f"home={self.home}", "tmp=/tmp") if settings["isolated"] else (f"home={self.home}",)
        self._connection = connection
        self._destroy = destroy
        self._ended = ended
        self._counters = counters
        self._on_agent_lost = on_agent_lost
        self._ready = connection.configure(settings)

    @property
    def broken(self) -> bool:
        """Whether the sandbox has ended."""
        return self._connection.is_lost

    async def ready(self) -> None:
        """Wait until the agent has started and imported the modules of the spec."""
        await asyncio.shield(self._ready.end)

    def on_close(self, call: Callable[[], None]) -> None:
        """Register `call` to be called once, after the sandbox was closed or has ended by itself."""
        self._ended.add_done_callback(lambda _: call())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def poll_kernel_limits(self) -> set[Limit]:
        """Return the limits that the kernel has enforced since the last call."""
        return self._counters.poll()

    async def poll_limits_after_crash(self) -> set[Limit]:
        """Return the limits that the kernel has enforced, after the agent has ended unexpectedly."""
        return self.poll_kernel_limits() if self._on_agent_lost is None else await self._on_agent_lost()

    async def execute(self, program: Program) -> ExecutionResult:
        """Run a program in this sandbox, with its files and its network, and wait for it.

        All processes that it starts end with it; for processes that outlive a command, open a `session`.

        Raises:
            SandboxError: the sandbox broke, through no fault of the program.
        """
        return await self._finish(self.begin(program))

    async def start_fresh(self, program: Program) -> Job:
        """Start a program in fresh namespaces and files that are discarded after it, or as the only program of this
        sandbox.
        """
        return self.begin(program, alone=True)

    async def start(self, program: Program) -> Job:
        """Start a program in this sandbox, in which others may run. All processes that it starts end with it.

        For processes that outlive a command, open a `session`.
        """
        return self.begin(program)

    async def _finish(self, job: Job) -> ExecutionResult:
        try:
            return await job.wait()
        except asyncio.CancelledError:
            job.kill()
            raise

    def begin(self, program: Program, *, alone: bool = False) -> Job:
        """Start a program without waiting, as `start` does, or as `start_fresh` with `alone`."""
        request = make_run_request(program, self.spec.limits, alone=alone, fresh=alone and self._has_namespaces)
        stdin = b"" if program.interactive else program.stdin
        begun = self._connection.submit("run", request, stdin, request["output_bytes"])
        begun.max_kept_bytes = None if program.terminal is None else TERMINAL_KEPT_BYTES
        job = Job(self, begun, request["wall_s"])
        if program.interactive:
            job.write(program.stdin)
        return job

    async def session(self, *, env: dict[str, str] | None = None, cwd: str | None = None) -> Session:
        """Open a shell; a sandbox can have several.

        Background jobs of its commands keep running between commands, and end with the session.
        """
        request = {"env": dict(env or {}), "cwd": cwd}
        check_texts(request)
        job = Job(self, self._connection.submit("shell", request, b"", 0), AGENT_GRACE_S)
        try:
            result = await job.wait()
        except asyncio.CancelledError:
            self._connection.send("close", job._job.channel)
            raise
        if job.has_closed_session:
            if Limit.PROCESSES in result.limits_hit:
                raise SandboxSessionError(
                    "the sandbox has reached its limit of processes: end a session or a program first"
                )
            where = f" in {cwd!r}" if cwd else ""
            raise SandboxSessionError(
                f"bash did not start{where} (exit code {result.exit_code}): check that bash and the directory exist"
            )
        return Session(self, self._connection, job._job.channel)

    async def usage(self) -> Usage:
        """Return the CPU time and memory that everything in the sandbox uses.

        Raises:
            SandboxError: the sandbox broke.
        """
        found = await Job(self, self._connection.submit("measure", {}, b"", 0), AGENT_GRACE_S).wait()
        return Usage(cpu_s=found.cpu_s, memory_bytes=found.peak_memory_bytes)

    async def read_file(self, path: str, *, max_bytes: int = 2**26) -> bytes:
        """Return the content of a regular file.

        Raises:
            SandboxPathError: the file does not exist, cannot be read, or is larger than `max_bytes`.
        """
        return await self._file_program(file_programs.READ, (path, str(max_bytes)), output_bytes=max_bytes + 1)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file, and create its parent directories.

        Raises:
            SandboxPathError: the file cannot be written, for example because the disk is full.
        """
        await self._file_program(file_programs.WRITE, (path, str(mode)), stdin=data)

    async def snapshot(self) -> Snapshot:
        """Return the present files of home and /tmp."""
        most = 2 * self.spec.limits.disk_bytes + 4096 * self.spec.limits.max_files
        archive = await self._file_program(file_programs.SAVE, self._snapshot_roots, output_bytes=most)
        return Snapshot(archive=archive)

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace the files of home and /tmp. Running processes are not touched."""
        await self._file_program(file_programs.LOAD, self._snapshot_roots, stdin=snapshot.archive)

    async def _file_program(
        self, source: str, argv: tuple[str, ...], *, stdin: bytes = b"", output_bytes: int = 4096
    ) -> bytes:
        """Run a file program with the rights of any program, so that links left by hostile code lead nowhere else."""
        result = await self.execute(
            PythonCode(
                source=source,
                argv=argv,
                stdin=stdin,
                result=True,
                wall_s=FILE_TIMEOUT_S,
                cpu_s=FILE_TIMEOUT_S,
                output_bytes=output_bytes,
            )
        )
        if result.ok:
            return result.stdout
        number = int(result.result) if result.result.isdigit() else 0
        reason = os.strerror(number) if number else f"{result.outcome} ({result.stderr[-200:]!r})"
        raise SandboxPathError(number, f"in the sandbox: {reason}", argv[0])

    def destroy(self) -> None:
        """End everything in the sandbox, without waiting."""
        self._connection.close()
        self._destroy()

    async def close(self) -> None:
        """End everything in the sandbox, and wait for that."""
        self.destroy()
        await asyncio.shield(self._ended)


class Session:
    """A shell that keeps its directory, variables, functions and jobs between commands."""

    def __init__(self, sandbox: Sandbox, connection: Connection, channel: Any) -> None:
        self._sandbox = sandbox
        self._connection = connection
        self._channel = channel
        self._lock = asyncio.Lock()
        self._last: Job | None = None
        self._background: list[Job] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the shell has ended: `exit`, or a command that could not be interrupted."""
        return self._closed or self._connection.is_lost

    async def run(self, command: str, *, wall_s: float | None = None) -> ExecutionResult:
        """Run a command (any bash text) and wait for it.

        A command that takes longer than `wall_s` is interrupted: outcome `wall_time`; the session goes on.

        Raises:
            SandboxError: the sandbox broke, or the session has already ended.
        """
        job = await self.start(command, wall_s=wall_s)
        try:
            result = await job.wait()
        except asyncio.CancelledError:
            job.kill()
            raise
        self._record_end(job)
        return result

    def _record_end(self, job: Job) -> None:
        """Close the session and its background jobs if the shell ended with this command."""
        if job.has_closed_session:
            self._closed = True
            self._end_background()

    def _end_background(self) -> None:
        for job in self._background:
            if not job.done():
                job.kill()
        self._background.clear()

    async def start(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command and stream its output; the next command waits for its end."""
        if "\0" in command:
            raise ValueError("a command must not contain a zero byte, which bash cannot read.")
        async with self._lock:
            if self._last is not None:
                await self._last.wait()
                self._record_end(self._last)
            if self.closed:
                raise SandboxSessionError(_SESSION_ENDED)
            limits: Limits = self._sandbox.spec.limits
            wall_s = limits.wall_s if wall_s is None else wall_s
            request = {"command": command, "wall_s": wall_s, "output_bytes": limits.output_bytes}
            job = self._connection.submit_on_channel(self._channel, "line", request, limits.output_bytes)
            self._last = last = Job(self._sandbox, job, wall_s)
            last.on_end(lambda: self._record_end(last))
            return last

    async def background(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command as a program of its own, with the session's directory and exported variables.

        The job goes on while the session runs other commands, and ends with the session.

        Raises:
            SandboxError: the sandbox broke, or the session has ended, perhaps during this call.
        """
        state = await self.run('builtin export -p; builtin printf "cd %q\\n" "$PWD"')
        text = state.stdout.decode("utf-8", "surrogateescape")
        script = f"{text}\neval {shlex.quote(command)}"
        if self.closed:
            raise SandboxSessionError(_SESSION_ENDED)
        job = self._sandbox.begin(Command(argv=("bash", "-c", script), wall_s=wall_s))
        self._background = [*(each for each in self._background if not each.done()), job]
        return job

    async def close(self) -> None:
        """End the shell and all that it started, its background jobs included."""
        self.end()

    def end(self) -> None:
        """End the session without waiting; later requests to the sandbox start after its processes have ended."""
        self._end_background()
        if not self.closed:
            self._closed = True
            self._connection.send("close", self._channel)
