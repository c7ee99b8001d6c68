"""What was started in a sandbox, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from roll_sandbox.connection import AgentJob
from roll_sandbox.errors import SandboxError
from roll_sandbox.results import result_of
from roll_sandbox.types import Chunk, ExecutionResult, Limit

__all__ = ["Job"]


class RunsJob(Protocol):
    """The sandbox of a job, as the job sees it."""

    silence_s: float | None

    def counted(self) -> set[Limit]:
        """Return the limits that the kernel has counted since the last call."""
        ...

    async def counted_at_loss(self) -> set[Limit]:
        """Return the same where the agent is gone."""
        ...

    def destroy(self) -> None:
        """End everything in the sandbox, without waiting."""
        ...


class Job:
    """A program or a session's command that was started."""

    def __init__(self, sandbox: RunsJob, job: AgentJob, wall_s: float) -> None:
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

    def drop(self) -> None:
        """End it, and keep nothing of its output."""
        self._job.drop()
        self.kill()

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

    def shown(self, rows: int, columns: int, more: int = 0) -> None:
        """Of a program with a terminal: the size that it has now, and how many more bytes of output were shown.

        It waits where more than 1 MiB of its output has not been.
        """
        most = 2**16 - 1
        self._job.shown(min(max(rows, 1), most), min(max(columns, 1), most), more)

    @property
    def chunks(self) -> list[Chunk]:
        """Its output so far."""
        return self._job.chunks

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
