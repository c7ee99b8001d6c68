"""Exchange messages with candidates and checkers; limit and measure the time of each case, from outside of the sandbox.

A candidate shares its sandbox with ROLL's program that runs the cases, and may stop that, or change its reports. So the
sandbox's agent enforces the limits of each case, by its own clock and by the kernel's CPU count of the sandbox.

    setup ──► first frame ──► [ new limits ──► a case's message ──► its frames ] … ──► end of input
                                └─► CPU time of the case before
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.rewards.code.inside.frames import Router, frame
from roll.rewards.code.verdicts import GRACE_CPU_S, claim
from roll_sandbox import ExecutionResult, Job

__all__ = ["Meter", "Router", "Served", "listen", "pass_on", "serve"]

_GRACE_WALL_S = 1.0
"""Extra wall time, in which the program inside can end a case by itself, and continue with the next one."""


class Meter:
    """Sets a running candidate's limits case by case.

    Args:
        job: The candidate.
        limits_s: CPU and wall time of each case, in order.
        total_s: Wall time of all cases together.
    """

    def __init__(self, job: Job, limits_s: Sequence[tuple[float, float]], total_s: float) -> None:
        self._job, self._limits_s = job, limits_s
        self._ends = asyncio.get_running_loop().time() + total_s
        self._counts: list[float] = []

    async def next_case(self) -> None:
        """Count CPU time for the next case from now on; after the last case, for no case."""
        case = min(len(self._counts), len(self._limits_s) - 1)
        self._counts.append(await self.bound(*self._limits_s[case]))

    async def bound(self, cpu_s: float, wall_s: float) -> float:
        """Set the limits from now on, at first those of the setup; return the CPU time used until now."""
        left_s = self._ends - asyncio.get_running_loop().time()
        wall_s = max(0.0, min(wall_s + _GRACE_WALL_S, left_s))
        return await self._job.set_limits(cpu_s=cpu_s + GRACE_CPU_S, wall_s=wall_s)

    def used_s(self, result: ExecutionResult) -> list[float]:
        """Return the CPU seconds of each case that was started; `result` is the candidate's final result."""
        counts = [*self._counts, result.cpu_s]
        return [max(0.0, after - before) for before, after in itertools.pairwise(counts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The results of a candidate's cases."""

    result: ExecutionResult
    first: bytes
    """The body of the frame that answers the setup; empty if the candidate ended before."""
    frames: list[list[bytes]]
    """The bodies of the frames of each answered case."""
    cpu_s: list[float]
    """CPU time of each case that was started."""


async def serve(
    job: Job,
    setup: bytes,
    messages: Sequence[bytes],
    limits_s: Sequence[tuple[float, float]],
    *,
    setup_s: tuple[float, float],
    total_s: float,
    frames_per_case: int,
) -> Served:
    """Send a candidate its cases one by one, each with its own limits; wait for its end.

    Args:
        job: The candidate: interactive, with a result.
        setup: The first message, as a frame.
        messages: The messages of the cases, as frames.
        limits_s: CPU and wall time of each case.
        setup_s: CPU and wall time of the setup.
        total_s: Wall time of all cases together.
        frames_per_case: Number of frames that answer a case.

    Raises:
        SandboxError: The sandbox broke.
    """
    meter = Meter(job, limits_s, total_s)
    await meter.bound(*setup_s)
    job.write(setup)
    bodies = _bodies(job)
    first = await anext(bodies, b"")
    found: list[list[bytes]] = []
    for message in messages if first else ():
        await meter.next_case()
        job.write(message)
        answer = [body for _ in range(frames_per_case) if (body := await anext(bodies, None)) is not None]
        if len(answer) < frames_per_case:
            break
        found.append(answer)
    if len(found) == len(messages):
        await meter.next_case()
    job.end_input()
    result = await job.wait()
    used_s = meter.used_s(result)
    return Served(result=result, first=first, frames=found, cpu_s=used_s[: len(messages)])


async def _bodies(job: Job) -> AsyncIterator[bytes]:
    """Yield the bodies of all frames, unparsed; the sandbox's limit on output bounds them."""
    router = Router()
    async for chunk in job.stream():
        if chunk.stream != "result":
            continue
        for body in router.feed(chunk.data):
            yield body
        if router.broken:
            job.kill()


async def pass_on(candidate: Job, checker: Job) -> None:
    """Forward the output of the candidate's process to the checker, byte for byte."""
    async for chunk in candidate.stream():
        if chunk.stream == "result":
            checker.write(chunk.data)
    checker.end_input()


async def listen(checker: Job, candidate: Job, meter: Meter) -> list[dict[str, Any]]:
    """Send the checker's questions to the candidate, one case after the other; return the messages to this process.

    The first byte of a frame is its destination: `s` the candidate, at the start of a case; `c` the candidate; `h` this
    process.
    """
    router = Router()
    found: list[dict[str, Any]] = []
    async for chunk in checker.stream():
        if chunk.stream != "result":
            continue
        for body in router.feed(chunk.data):
            if body[:1] == b"s":
                await meter.next_case()
            if body[:1] in (b"s", b"c"):
                candidate.write(frame(body[1:]))
            elif message := claim(body[1:]):
                found.append(message)
        if router.broken:
            checker.kill()
    return found
