"""Exchange messages with candidates and checkers; limit and measure the time of each case from outside the sandbox.

A candidate shares its sandbox with the ROLL program that runs the cases, so it may stop that program, or change its
reports. Therefore the sandbox's agent enforces the limits of each case, using its own clock and the CPU time of the
sandbox that the kernel measures.

    setup ──► first frame ──► [ new limits ──► a case's message ──► its frames ] … ──► end of input
                                └─► CPU time of the previous case
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.rewards.code.sandbox_programs.frames import FrameSplitter, add_length
from roll.rewards.code.verdicts import GRACE_CPU_S, parse_message
from roll_sandbox import ExecutionResult, Job

__all__ = ["CaseLimiter", "CaseResults", "FrameSplitter", "forward_output", "relay_messages", "serve_cases"]

_GRACE_WALL_S = 1.0
"""Extra wall time, so that the program inside the sandbox can end a case itself and continue with the next one."""


class CaseLimiter:
    """Sets the CPU and wall time limits of a running candidate, case by case.

    Args:
        job: The candidate.
        limits_s: Limits on CPU and wall time of each case, in order.
        total_s: Limit on the total wall time of all cases.
    """

    def __init__(self, job: Job, limits_s: Sequence[tuple[float, float]], total_s: float) -> None:
        self._job, self._limits_s = job, limits_s
        self._ends = asyncio.get_running_loop().time() + total_s
        self._counts: list[float] = []

    async def start_next_case(self) -> None:
        """Set the limits of the next case, and start counting its CPU time; after the last case, stop counting."""
        case = min(len(self._counts), len(self._limits_s) - 1)
        self._counts.append(await self.set_limits(*self._limits_s[case]))

    async def set_limits(self, cpu_s: float, wall_s: float) -> float:
        """Set the CPU and wall time that the candidate may use from now on; return its CPU time so far."""
        left_s = self._ends - asyncio.get_running_loop().time()
        wall_s = max(0.0, min(wall_s + _GRACE_WALL_S, left_s))
        return await self._job.set_limits(cpu_s=cpu_s + GRACE_CPU_S, wall_s=wall_s)

    def compute_used_s(self, result: ExecutionResult) -> list[float]:
        """Return the CPU time of each case that was started, in seconds.

        The CPU time of the last case is computed from the total CPU time in `result`, the candidate's final result.
        """
        counts = [*self._counts, result.cpu_s]
        return [max(0.0, after - before) for before, after in itertools.pairwise(counts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResults:
    """The results of a candidate's cases."""

    result: ExecutionResult
    setup_reply: bytes
    """The body of the frame that answers the setup; empty if the candidate ended before it answered."""
    frames: list[list[bytes]]
    """The bodies of the frames of each answered case."""
    cpu_s: list[float]
    """CPU time of each case that was started."""


async def serve_cases(
    job: Job,
    setup: bytes,
    messages: Sequence[bytes],
    limits_s: Sequence[tuple[float, float]],
    *,
    setup_s: tuple[float, float],
    total_s: float,
    frames_per_case: int,
) -> CaseResults:
    """Send a candidate its cases one by one, each with its own limits; wait until the candidate ends.

    Args:
        job: The running candidate.
        setup: The first message, as a frame.
        messages: The messages of the cases, as frames.
        limits_s: Limits on CPU and wall time of each case.
        setup_s: Limits on CPU and wall time of the setup.
        total_s: Limit on the total wall time of all cases.
        frames_per_case: Number of frames that answer a case.

    Raises:
        SandboxError: The sandbox failed.
    """
    limiter = CaseLimiter(job, limits_s, total_s)
    await limiter.set_limits(*setup_s)
    job.write(setup)
    bodies = _read_bodies(job)
    first = await anext(bodies, b"")
    frames: list[list[bytes]] = []
    for message in messages if first else ():
        await limiter.start_next_case()
        job.write(message)
        answer = [body for _ in range(frames_per_case) if (body := await anext(bodies, None)) is not None]
        if len(answer) < frames_per_case:
            break
        frames.append(answer)
    # CPU time after the last case, such as for the runner's exit, does not count for the last case.
    if len(frames) == len(messages):
        await limiter.start_next_case()
    job.end_input()
    result = await job.wait()
    used_s = limiter.compute_used_s(result)
    return CaseResults(result=result, setup_reply=first, frames=frames, cpu_s=used_s[: len(messages)])


async def _read_bodies(job: Job) -> AsyncIterator[bytes]:
    """Yield the bodies of all frames, unparsed; the sandbox's limit on output bounds their size."""
    router = FrameSplitter()
    async for chunk in job.stream():
        if chunk.stream != "result":
            continue
        for body in router.feed(chunk.data):
            yield body
        if router.broken:
            job.kill()


async def forward_output(candidate: Job, checker: Job) -> None:
    """Forward the output of the candidate's process to the checker, byte for byte."""
    async for chunk in candidate.stream():
        if chunk.stream == "result":
            checker.write(chunk.data)
    checker.end_input()


async def relay_messages(checker: Job, candidate: Job, limiter: CaseLimiter) -> list[dict[str, Any]]:
    """Forward the checker's messages to the candidate, case by case; return the messages that are addressed to this
    process.

    The first byte of a frame is its destination: `s` the candidate, at the start of a case; `c` the candidate; `h` this
    process.
    """
    router = FrameSplitter()
    messages: list[dict[str, Any]] = []
    async for chunk in checker.stream():
        if chunk.stream != "result":
            continue
        for body in router.feed(chunk.data):
            if body[:1] == b"s":
                await limiter.start_next_case()
            if body[:1] in (b"s", b"c"):
                candidate.write(add_length(body[1:]))
            elif message := parse_message(body[1:]):
                messages.append(message)
        if router.broken:
            checker.kill()
    return messages
