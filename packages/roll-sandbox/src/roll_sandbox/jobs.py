"""Jobs: programs and commands that were started in a sandbox, and their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from roll_sandbox.connection import AgentJob
from roll_sandbox.errors import SandboxError
from roll_sandbox.results import parse_result
from roll_sandbox.types import Chunk, ExecutionResult, Limit

__all__ = ["Job"]


class JobHost(Protocol):
    """The part of a sandbox's interface that a job uses."""

    agent_grace_s: float | None

    def poll_kernel_limits(self) -> set[Limit]:
        """Return the limits (memory, processes) that the kernel has enforced in the sandbox since the last call."""
        ...

    async def poll_limits_after_crash(self) -> set[Limit]:
        """Return the limits that the kernel has enforced in the sandbox, after its agent has ended unexpectedly."""
        ...

    def destroy(self) -> None:
        """End everything in the sandbox, without waiting."""
        ...


class Job:
    """A program or a session command, which is running or has ended."""

    def __init__(self, sandbox: JobHost, job: AgentJob, wall_s: float) -> None:
        self._sandbox = sandbox
        self._job = job
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._is_unresponsive = False
        self._result: ExecutionResult | None = None
        self._set_deadline(wall_s)
        job.end.add_done_callback(lambda _: self._set_deadline(None))

    def _set_deadline(self, wall_s: float | None) -> None:
        """Set the time at which the sandbox is ended: `wall_s` plus the grace period from now; `None` for never."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if wall_s is not None and self._sandbox.agent_grace_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_later(wall_s + self._sandbox.agent_grace_s, self._end_unresponsive_sandbox)

    def _end_unresponsive_sandbox(self) -> None:
        self._is_unresponsive = True
        self._sandbox.destroy()

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self._job.end.done()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a function to be called once after the job has ended."""
        self._job.end.add_done_callback(lambda _: callback())

    def kill(self) -> None:
        """End the program, or interrupt the session's command, now; `wait` then returns its result."""
        self._job.kill()

    def drop(self) -> None:
        """End the job, and discard its output."""
        self._job.discard_output()
        self.kill()

    async def set_limits(self, *, wall_s: float, cpu_s: float | None) -> float:
        """Set new limits for the program, counted from now on.

        Returns:
            the CPU seconds that the program and everything that it started have used so far.

        Raises:
            SandboxError: the sandbox failed.
        """
        counted = self._job.set_limits(wall_s, cpu_s)
        self._set_deadline(None if self.done() else wall_s)
        used_s = await counted
        return (await self.wait()).cpu_s if used_s is None else used_s

    def write(self, data: bytes) -> None:
        """Write data to the standard input of an `interactive` program; drop the data if the program has ended."""
        if data:
            self._job.write(data)

    def end_input(self) -> None:
        """Close the program's standard input."""
        self._job.write(b"")

    def update_terminal(self, rows: int, columns: int, num_shown_bytes: int = 0) -> None:
        """Report the size of the program's terminal, and the number of further bytes of its output that were shown.

        The program waits while more than 1 MiB of its output has not been shown.
        """
        most = 2**16 - 1
        self._job.update_terminal(min(max(rows, 1), most), min(max(columns, 1), most), num_shown_bytes)

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of output that have been received so far."""
        return self._job.chunks

    def stream(self) -> AsyncIterator[Chunk]:
        """Return an iterator over all output from the beginning, until the job ends."""
        return self._job.stream()

    async def wait(self) -> ExecutionResult:
        """Wait for the end of the job, and return its result.

        Raises:
            SandboxError: the sandbox failed.
        """
        if self._result is None:
            limits: set[Limit] = set()
            try:
                # Others may wait for the same future, so canceling one caller must not cancel the future.
                end = await asyncio.shield(self._job.end)
            except SandboxError:
                if self._is_unresponsive:
                    limits.add(Limit.WALL_TIME)
                elif Limit.MEMORY in await self._sandbox.poll_limits_after_crash():
                    limits.add(Limit.MEMORY)
                else:
                    raise
                end = {}
            else:
                limits |= self._sandbox.poll_kernel_limits() | {Limit(name) for name in end.get("counted", ())}
            self._result = parse_result(end, limits, self._job.get_output)
        return self._result

    async def make_report(self) -> dict[str, Any]:
        """Wait for the end of the job, and report it in the agent's format.

        A `Job` on another host builds the same result from this report.

        Raises:
            SandboxError: the sandbox failed.
        """
        result = await self.wait()
        reported = self._job.end.result() if self._job.end.exception() is None else {}
        limits = reported.get("limits", ()) if reported else [limit.value for limit in result.limits_hit]
        return {
            "code": int(reported.get("code", 255)),
            "signal": int(reported.get("signal", 0)),
            "limits": [Limit(name).value for name in limits],
            "counted": sorted(limit.value for limit in result.limits_hit),
            "wall_s": result.wall_s,
            "cpu_s": result.cpu_s,
            "peak": result.peak_memory_bytes,
            "closed": self.has_closed_session,
        }

    @property
    def has_closed_session(self) -> bool:
        """True if the session's shell ended with this command. Also true before the command has ended, and if the
        sandbox failed.
        """
        job = self._job.end
        return not job.done() or job.exception() is not None or bool(job.result().get("closed"))
