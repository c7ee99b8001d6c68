"""A sandbox with an agent inside, whichever runtime started it.

Limits on time and output are kept by the agent. Should an agent not answer long after a program's time is over, the
sandbox is ended and the program counts as over its time: only hostile code can bring this about.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from roll.sandbox import file_programs
from roll.sandbox.connection import AgentJob, Connection
from roll.sandbox.counters import Counters
from roll.sandbox.errors import SandboxError, SandboxPathError
from roll.sandbox.requests import check_texts, run_request
from roll.sandbox.results import result_of
from roll.sandbox.types import (
    Chunk,
    Command,
    ExecutionResult,
    Limit,
    Limits,
    Program,
    PythonCode,
    SandboxSpec,
    Snapshot,
)

__all__ = ["Job", "Sandbox", "Session"]

SILENCE_S = 10.0
"""How long after a program's time an agent may be silent."""
FILE_S = 60.0


class Job:
    """A program or a session's command that was started."""

    def __init__(self, sandbox: Sandbox, job: AgentJob, wall_s: float) -> None:
        self._sandbox = sandbox
        self._job = job
        self._give_up: asyncio.TimerHandle | None = None
        self._silent = False
        self._result: ExecutionResult | None = None
        self._be_patient(wall_s)
        job.end.add_done_callback(lambda _: self._be_patient(None))

    def _be_patient(self, wall_s: float | None) -> None:
        """Give the agent this long, and the time that it may be silent, from now on; `None`: for good."""
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        if wall_s is not None and self._sandbox.silence_s is not None:
            loop = asyncio.get_running_loop()
            self._give_up = loop.call_later(wall_s + self._sandbox.silence_s, self._abandon)

    def _abandon(self) -> None:
        self._silent = True
        self._sandbox.destroy()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._job.end.done()

    def on_end(self, call: Callable[[], None]) -> None:
        """Have `call` called once it has ended."""
        self._job.end.add_done_callback(lambda _: call())

    def kill(self) -> None:
        """End it (a session's command: interrupt it) now; `wait` then tells how it ended."""
        self._job.kill()

    async def bound(self, *, wall_s: float, cpu_s: float | None) -> float:
        """New limits of a program, counted from now on.

        Returns:
            the CPU time in seconds that it, and all that it started, has used so far.

        Raises:
            SandboxError: the sandbox broke.
        """
        counted = self._job.bound(wall_s, cpu_s)
        self._be_patient(None if self.done() else wall_s)
        used_s = await counted
        return (await self.wait()).cpu_s if used_s is None else used_s

    def write(self, data: bytes) -> None:
        """More standard input for an `interactive` program; lost where the program has ended."""
        if data:
            self._job.write(data)

    def end_input(self) -> None:
        """The end of its standard input."""
        self._job.write(b"")

    def stream(self) -> AsyncIterator[Chunk]:
        """Its output as it comes, from the beginning, until it ends."""
        return self._job.stream()

    async def wait(self) -> ExecutionResult:
        """Its end.

        Raises:
            SandboxError: the sandbox broke.
        """
        if self._result is None:
            limits: set[Limit] = set()
            try:
                end = await asyncio.shield(self._job.end)
            except SandboxError:
                if self._silent:
                    limits.add(Limit.WALL_TIME)
                elif Limit.MEMORY in await self._sandbox.counted_at_loss():
                    limits.add(Limit.MEMORY)
                else:
                    raise
                end = {}
            else:
                limits |= self._sandbox.counted() | {Limit(name) for name in end.get("counted", ())}
            self._result = result_of(end, limits, self._job.output)
        return self._result

    async def report(self) -> dict[str, Any]:
        """Its end in the words of an agent: a `Job` on another host that is told this has the same result.

        Raises:
            SandboxError: the sandbox broke.
        """
        result = await self.wait()
        said = self._job.end.result() if self._job.end.exception() is None else {}
        limits = said.get("limits", ()) if said else [limit.value for limit in result.limits_hit]
        return {
            "code": int(said.get("code", 255)),
            "signal": int(said.get("signal", 0)),
            "limits": [Limit(name).value for name in limits],
            "counted": sorted(limit.value for limit in result.limits_hit),
            "wall_s": result.wall_s,
            "cpu_s": result.cpu_s,
            "peak": result.peak_memory_bytes,
            "closed": self.closed_session,
        }

    @property
    def closed_session(self) -> bool:
        """Whether the shell ended with this command."""
        job = self._job.end
        return not job.done() or job.exception() is not None or bool(job.result().get("closed"))


class Sandbox:
    """An isolated file system and the processes in it. Paths are the sandbox's; relative ones are below `home`.

    `async with` closes it at the end. The manager, which uses it again, asks for more than callers do.
    """

    silence_s: float | None = SILENCE_S
    """How long after a program's time its agent may be silent before it is ended; `None`: another host counts."""

    def __init__(
        self,
        spec: SandboxSpec,
        settings: dict[str, Any],
        connection: Connection,
        *,
        destroy: Callable[[], None],
        ended: asyncio.Future[None],
        counters: Counters,
        at_loss: Callable[[], Awaitable[set[Limit]]] | None = None,
    ) -> None:
        self.spec = spec
        self.home: str = settings["home"]
        """Where relative paths begin, and where programs start."""
        self.traits = {name: settings[name] for name in ("home", "isolated", "mount_space")}
        """What of it depends on the runtime."""
        self._namespaces: bool = settings["mount_space"]
        # Without isolation /tmp is the host's.
        self._places = (f"home={self.home}", "tmp=/tmp") if settings["isolated"] else (f"home={self.home}",)
        self._connection = connection
        self._destroy = destroy
        self._ended = ended
        self._counters = counters
        self._at_loss = at_loss
        self._ready = connection.configure(settings)

    @property
    def broken(self) -> bool:
        """Whether it has ended."""
        return self._connection.lost

    async def ready(self) -> None:
        """Wait until the agent has started and imported what the spec asks for."""
        await asyncio.shield(self._ready.end)

    def on_close(self, call: Callable[[], None]) -> None:
        """Have `call` called once, when it has been closed or has ended by itself."""
        self._ended.add_done_callback(lambda _: call())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def counted(self) -> set[Limit]:
        """Limits that the kernel has counted since the last time."""
        return self._counters.news()

    async def counted_at_loss(self) -> set[Limit]:
        """The same where the agent has gone."""
        return self.counted() if self._at_loss is None else await self._at_loss()

    async def execute(self, program: Program) -> ExecutionResult:
        """Run a program in this sandbox, among what else is in it, and wait for it.

        Raises:
            SandboxError: the sandbox broke: not the program's doing.
        """
        return await self._finish(self.begin(program))

    async def start_fresh(self, program: Program) -> Job:
        """Start it in namespaces and files of its own, of which nothing remains, or as all there is in this sandbox."""
        return self.begin(program, alone=True)

    async def start(self, program: Program) -> Job:
        """Start a program in this sandbox, beside others; what it starts may outlive it."""
        return self.begin(program)

    async def _finish(self, job: Job) -> ExecutionResult:
        try:
            return await job.wait()
        except asyncio.CancelledError:
            job.kill()
            raise

    def begin(self, program: Program, *, alone: bool = False) -> Job:
        """The same at once: `start`, and, where it is `alone`, `start_fresh`."""
        request = run_request(program, self.spec.limits, alone=alone, fresh=alone and self._namespaces)
        stdin = b"" if program.interactive else program.stdin
        job = Job(self, self._connection.submit("run", request, stdin, request["output_bytes"]), request["wall_s"])
        if program.interactive:
            job.write(program.stdin)
        return job

    async def session(self, *, env: dict[str, str] | None = None, cwd: str | None = None) -> Session:
        """Open a shell; a sandbox can have several."""
        request = {"env": dict(env or {}), "cwd": cwd}
        check_texts(request)
        job = Job(self, self._connection.submit("shell", request, b"", 0), SILENCE_S)
        result = await job.wait()
        if job.closed_session:
            raise SandboxError(f"bash did not start in the sandbox (exit code {result.exit_code}); is it there?")
        return Session(self, self._connection, job._job.channel)

    async def read_file(self, path: str, *, max_bytes: int = 2**26) -> bytes:
        """Content of a regular file.

        Raises:
            SandboxPathError: there is none, it cannot be read, or it is larger than `max_bytes`.
        """
        return await self._file_program(file_programs.READ, (path, str(max_bytes)), output_bytes=max_bytes + 1)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file, and the directories above it.

        Raises:
            SandboxPathError: it cannot be written, for example because the disk is full.
        """
        await self._file_program(file_programs.WRITE, (path, str(mode)), stdin=data)

    async def snapshot(self) -> Snapshot:
        """The files in home and /tmp as they are now."""
        most = 2 * self.spec.limits.disk_bytes + 4096 * self.spec.limits.max_files
        archive = await self._file_program(file_programs.SAVE, self._places, output_bytes=most)
        return Snapshot(archive=archive)

    async def restore(self, snapshot: Snapshot) -> None:
        """Replace home and /tmp. Running processes are not touched."""
        await self._file_program(file_programs.LOAD, self._places, stdin=snapshot.archive)

    async def _file_program(
        self, source: str, argv: tuple[str, ...], *, stdin: bytes = b"", output_bytes: int = 4096
    ) -> bytes:
        """Run one of our programs with the rights of any program: links that hostile code left lead nowhere else."""
        result = await self.execute(
            PythonCode(
                source=source,
                argv=argv,
                stdin=stdin,
                result=True,
                wall_s=FILE_S,
                cpu_s=FILE_S,
                output_bytes=output_bytes,
            )
        )
        if result.ok:
            return result.stdout
        number = int(result.result) if result.result.isdigit() else 0
        reason = os.strerror(number) if number else f"{result.outcome} ({result.stderr[-200:]!r})"
        raise SandboxPathError(number, f"in the sandbox: {reason}", argv[0])

    def destroy(self) -> None:
        """End everything in it, without waiting."""
        self._connection.close()
        self._destroy()

    async def close(self) -> None:
        """End everything in it."""
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
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the shell has ended: `exit`, or a command that could not be interrupted."""
        return self._closed or self._connection.lost

    async def run(self, command: str, *, wall_s: float | None = None) -> ExecutionResult:
        """Run a command (any bash text) and wait for it.

        A command that takes longer than `wall_s` is interrupted: outcome `wall_time`; the session goes on.

        Raises:
            SandboxError: the sandbox broke, or the session had ended before.
        """
        job = await self.start(command, wall_s=wall_s)
        try:
            result = await job.wait()
        except asyncio.CancelledError:
            job.kill()
            raise
        self._closed = self._closed or job.closed_session
        return result

    async def start(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command and stream its output; the next one waits for its end."""
        if "\0" in command:
            raise ValueError("a zero byte in a command: bash cannot read it.")
        async with self._lock:
            if self._last is not None:
                await self._last.wait()
                self._closed = self._closed or self._last.closed_session
            if self.closed:
                raise SandboxError("the shell session has ended: open another one")
            limits: Limits = self._sandbox.spec.limits
            wall_s = limits.wall_s if wall_s is None else wall_s
            request = {"command": command, "wall_s": wall_s, "output_bytes": limits.output_bytes}
            job = self._connection.again(self._channel, "line", request, limits.output_bytes)
            self._last = Job(self._sandbox, job, wall_s)
            return self._last

    async def background(self, command: str, *, wall_s: float | None = None) -> Job:
        """Start a command beside the session, in its directory and with its exported variables."""
        state = await self.run('builtin export -p; builtin printf "cd %q\\n" "$PWD"')
        text = state.stdout.decode("utf-8", "surrogateescape")
        script = f"{text}\neval {shlex.quote(command)}"
        return await self._sandbox.start(Command(argv=("bash", "-c", script), wall_s=wall_s))

    async def close(self) -> None:
        """End the shell and what it started."""
        if not self.closed:
            self._closed = True
            self._connection.send("close", self._channel)
