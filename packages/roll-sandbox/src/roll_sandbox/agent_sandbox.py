"""`Sandbox`: a sandbox of any runtime, which an agent inside it controls.

The agent enforces limits on time and output. If it does not answer long after a program's time limit, the sandbox is
ended, and the program's outcome is `wall_time`; only malicious code can cause this.
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
from roll_sandbox.requests import check_strings, make_run_request
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

AGENT_GRACE_PERIOD_S = 10.0
"""Seconds that an agent has to report the end of a program after the program's time limit."""
FILE_TIMEOUT_S = 60.0
MAX_TERMINAL_BACKLOG_BYTES = 2**22
"""Maximum bytes of a terminal's output that are kept, so that a client that reconnects can restore the screen. It is
more than the output that a program may write before it is shown (1 MiB).
"""
_SESSION_ENDED = "the shell session has ended: open another session"


class Sandbox:
    """An isolated file system and the processes in it. Paths are inside the sandbox; relative paths start at `home`.

    `async with` closes it at the end. Some methods are only for the manager, which reuses sandboxes.
    """

    agent_grace_s: float | None = AGENT_GRACE_PERIOD_S
    """Seconds after a program's time limit at which this host ends the sandbox if the agent has not reported the
    program's end; `None` if this host never ends it.
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
        """The directory in which programs start, and to which relative paths refer."""
        self.properties = {name: settings[name] for name in ("home", "isolated", "mount_space")} | {"image": spec.image}
        """Properties that depend on the runtime. The image is given by its digest: its name may later refer to another
        image.
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
    def has_ended(self) -> bool:
        """True if the sandbox has ended, by itself or by `close`, so that it cannot run programs any more."""
        return self._connection.is_lost

    @property
    def broken(self) -> bool:
        """Deprecated alias of `has_ended`."""
        return self.has_ended

    async def wait_until_ready(self) -> None:
        """Wait until the agent has started and has imported the modules of the spec."""
        await asyncio.shield(self._ready.end)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Register a function to be called once, after the sandbox was closed or has ended by itself."""
        self._ended.add_done_callback(lambda _: callback())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def poll_kernel_limits(self) -> set[Limit]:
        """Return the limits (memory, processes) that the kernel has enforced in this sandbox since the last call."""
        return self._counters.poll()

    async def poll_limits_after_crash(self) -> set[Limit]:
        """Return the limits that the kernel has enforced in this sandbox, after its agent has ended unexpectedly."""
        return self.poll_kernel_limits() if self._on_agent_lost is None else await self._on_agent_lost()

    async def execute(self, program: Program) -> ExecutionResult:
        """Run a program with this sandbox's files and network, wait for it, and return its result.

        When the program ends, all processes that it has started are killed. To run processes that outlive a command,
        open a `session`.

        Raises:
            SandboxError: the sandbox failed, and the program is not the cause.
        """
        return await self._wait_or_kill(self.begin(program))

    async def start_fresh(self, program: Program) -> Job:
        """Start a program with its own namespaces and files, which are discarded afterwards. If the runtime has no
        namespaces for programs, the program must be the only one in this sandbox.
        """
        return self.begin(program, alone=True)

    async def start(self, program: Program) -> Job:
        """Start a program in this sandbox, next to other programs.

        When the program ends, all processes that it has started are killed. To run processes that outlive a command,
        open a `session`.
        """
        return self.begin(program)

    async def _wait_or_kill(self, job: Job) -> ExecutionResult:
        try:
            return await job.wait()
        except asyncio.CancelledError:
            job.kill()
            raise

    def begin(self, program: Program, *, alone: bool = False) -> Job:
        """Start a program without `await`, like `start_fresh` if `alone` is true, otherwise like `start`."""
        request = make_run_request(program, self.spec.limits, alone=alone, fresh=alone and self._has_namespaces)
        stdin = b"" if program.interactive else program.stdin
        agent_job = self._connection.submit("run", request, stdin, request["output_bytes"])
        agent_job.max_kept_bytes = None if program.terminal is None else MAX_TERMINAL_BACKLOG_BYTES
        job = Job(self, agent_job, request["wall_s"])
        if program.interactive:
            job.write(program.stdin)
        return job

    async def session(self, *, env: dict[str, str] | None = None, cwd: str | None = None) -> Session:
        """Open a shell; several can be open at the same time.

        Background jobs of the shell keep running between commands, and end with the session.
        """
        request = {"env": dict(env or {}), "cwd": cwd}
        check_strings(request)
        job = Job(self, self._connection.submit("shell", request, b"", 0), AGENT_GRACE_PERIOD_S)
        try:
            result = await job.wait()
        except asyncio.CancelledError:
            # The agent opens the session anyway, and the caller has no handle to close it.
            self._connection.send("close", job._job.channel)
            raise
        if job.has_closed_session:
            if Limit.PROCESSES in result.limits_hit:
                raise SandboxSessionError(
                    "the sandbox has reached its process limit: close a session or stop a program first"
                )
            location = f" in {cwd!r}" if cwd else ""
            raise SandboxSessionError(
                f"bash did not start{location} (exit code {result.exit_code}): check that bash and the directory exist"
            )
        return Session(self, self._connection, job._job.channel)

    async def usage(self) -> Usage:
        """Return the CPU time and memory of everything in the sandbox.

        Raises:
            SandboxError: the sandbox failed.
        """
        result = await Job(self, self._connection.submit("measure", {}, b"", 0), AGENT_GRACE_PERIOD_S).wait()
        return Usage(cpu_s=result.cpu_s, memory_bytes=result.peak_memory_bytes)

    async def read_file(self, path: str, *, max_bytes: int = 2**26) -> bytes:
        """Return the content of a regular file.

        Raises:
            SandboxPathError: the file does not exist, cannot be read, or is larger than `max_bytes`.
        """
        return await self._run_file_program(file_programs.READ, (path, str(max_bytes)), output_bytes=max_bytes + 1)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file, and create its parent directories.

        Raises:
            SandboxPathError: the file cannot be written, for example because the disk is full.
        """
        await self._run_file_program(file_programs.WRITE, (path, str(mode)), stdin=data)

    async def snapshot(self) -> Snapshot:
        """Return the current files of home and /tmp; without isolation, only the files of home."""
        # A tar archive has a header for each file, and pads files to whole blocks.
        most = 2 * self.spec.limits.disk_bytes + 4096 * self.spec.limits.max_files
        archive = await self._run_file_program(file_programs.SAVE, self._snapshot_roots, output_bytes=most)
        return Snapshot(archive=archive)

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace the files of home and /tmp with the files of the snapshot. Running processes are not affected."""
        await self._run_file_program(file_programs.LOAD, self._snapshot_roots, stdin=snapshot.archive)

    async def _run_file_program(
        self, source: str, argv: tuple[str, ...], *, stdin: bytes = b"", output_bytes: int = 4096
    ) -> bytes:
        """Run `source`, a program of `file_programs`, and return its standard output.

        The program runs in the sandbox, without privileges, so hostile links cannot lead out of the sandbox.

        Raises:
            SandboxPathError: the program failed.
        """
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
        """End everything in the sandbox, and wait until it has ended."""
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
        """True if the session has ended: by `close`, by `exit`, with its sandbox, or because a command could not be
        interrupted.
        """
        return self._closed or self._connection.is_lost

    async def run(self, command: str, *, wall_s: float | None = None) -> ExecutionResult:
        """Run a command (any bash text), wait for it, and return its result.

        A command that takes longer than `wall_s` (by default, the spec's limit) is interrupted, with the outcome
        `wall_time`; the session stays open.

        Raises:
            SandboxError: the sandbox failed, or the session has already ended.
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
        """Mark the session as closed and kill its background jobs, if the shell has ended with the command `job`."""
        if job.has_closed_session:
            self._closed = True
            self._kill_background_jobs()

    def _kill_background_jobs(self) -> None:
        for job in self._background:
            if not job.done():
                job.kill()
        self._background.clear()

    async def start(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command as soon as the previous command has ended; return the job of the new command.

        A command that takes longer than `wall_s` (by default, the spec's limit) is interrupted.

        Raises:
            SandboxError: the sandbox failed, or the session has already ended.
        """
        if "\0" in command:
            raise ValueError("a command must not contain a null byte")
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
        """Start a command as a separate program with the session's directory and exported variables; return its job.

        The job keeps running while the session runs other commands, and ends with the session.

        Raises:
            SandboxError: the sandbox failed, or the session has ended before or during this call.
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
        """End the shell and everything that it started, including its background jobs."""
        self.end()

    def end(self) -> None:
        """End the session without waiting. Programs started later begin after the session's processes have ended."""
        self._kill_background_jobs()
        if not self.closed:
            self._closed = True
            self._connection.send("close", self._channel)
