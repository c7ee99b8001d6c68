"""Cases that are programs themselves: one sandbox for the candidate, another for the checker that runs the tests.

candidate ──► frames, unread ──► checker ──► c + frame: back to the candidate, unread
                                         └─► h + frame: a verdict, for us
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from roll.rewards.code.inside.frames import MAX_FRAME_BYTES, frame, pack
from roll.rewards.code.program import MOST_OUTPUT_BYTES, SHORTEST_WALL_S, CandidateRun
from roll.rewards.code.tasks import TestCase
from roll.rewards.code.verdicts import SKIPPED, BrokenTestsError, CaseVerdict, blame, claim, ended, not_built, number
from roll.sandbox import ExecutionResult, Job, PythonCode

__all__ = ["Dialogue", "Router"]

_CHECKER = "from inside import checker\nchecker.main()"
_CHECKER_CPU_S = 30.0
_OUTPUT_BYTES = 2**23
"""Of one case: all that a candidate's objects answer."""


class Dialogue(CandidateRun):
    """All cases of one answer."""

    async def run(self, cases: Sequence[tuple[TestCase, float]]) -> list[CaseVerdict]:
        """All of them with one candidate's and one checker's sandbox."""
        limits_s = [cpu_s for _, cpu_s in cases]
        checks = [
            {"kind": case.kind, "source": case.source, "modules": list(case.modules), **self.limits(cpu_s)}
            for case, cpu_s in cases
        ]
        setup = {
            "cases": checks,
            "entry": self.task.entry,
            "source": self.task.setup,
            "max_timeouts": self.max_timeouts,
        }
        candidate_program = self.candidate(pack(self.setup()), limits_s, len(cases) * _OUTPUT_BYTES, interactive=True)
        assert candidate_program.cpu_s is not None and candidate_program.wall_s is not None
        checker_program = PythonCode(
            source=_CHECKER,
            stdin=pack(setup),
            interactive=True,
            result=True,
            cpu_s=candidate_program.cpu_s + _CHECKER_CPU_S,
            wall_s=candidate_program.wall_s + SHORTEST_WALL_S,
            output_bytes=MOST_OUTPUT_BYTES,
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        pytest = any(case.kind == "pytest" for case, _ in cases)
        async with (
            self.boxes.checker(checker_program, pytest=pytest) as checker,
            self.boxes.candidate(candidate_program) as candidate,
        ):
            passing_on = asyncio.create_task(_pass_on(candidate, checker))
            try:
                messages = await _listen(checker, candidate)
                result = await checker.wait()
            finally:
                passing_on.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await passing_on
        return self._verdicts(messages, result, len(cases))

    def _verdicts(self, messages: list[dict[str, Any]], result: ExecutionResult, num_cases: int) -> list[CaseVerdict]:
        if not messages:
            blame(result, "a checker's")
        if messages and "failed" in messages[0]:
            return [not_built(messages[0]["failed"])] * num_cases
        found = [_verdict(index, message["verdict"]) for index, message in enumerate(messages)]
        timeouts = sum(verdict.verdict == "timeout" for verdict in found)
        missing = SKIPPED if timeouts >= self.max_timeouts else ended(result)
        return found + [missing] * (num_cases - len(found))


class Router:
    """Takes frames out of a stream of bytes, without reading them."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.broken = False
        """Whether a frame is longer than any of ours: nothing more can be made of what comes."""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The mark and the body of each frame that is complete now."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= 4 and not self.broken:
            end = start + 4 + int.from_bytes(self._buffer[start : start + 4], "little")
            self.broken = end - start > MAX_FRAME_BYTES + 5
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + 4 : start + 5]), bytes(self._buffer[start + 5 : end])
            start = end
        del self._buffer[:start]


async def _pass_on(candidate: Job, checker: Job) -> None:
    """What the candidate's process says, byte for byte."""
    async for chunk in candidate.stream():
        if chunk.stream == "result":
            checker.write(chunk.data)
    checker.end_input()


async def _listen(checker: Job, candidate: Job) -> list[dict[str, Any]]:
    """Hand the checker's questions to the candidate; what is for us."""
    router = Router()
    found: list[dict[str, Any]] = []
    async for chunk in checker.stream():
        if chunk.stream != "result":
            continue
        for mark, body in router.feed(chunk.data):
            if mark == b"c":
                candidate.write(frame(body))
            elif message := claim(body):
                found.append(message)
        if router.broken:
            checker.kill()
    return found


def _verdict(index: int, report: dict[str, Any]) -> CaseVerdict:
    """A checker's report of one case. What it says of the candidate's end is the candidate's claim."""
    end = report.get("over")
    end = end if isinstance(end, dict) else {}
    verdict, text = str(report["verdict"]), str(report.get("text", ""))
    if verdict == "broken":
        raise BrokenTestsError(f"case {index}: {text}")
    if verdict == "gone":
        over_time = end.get("limit") in ("cpu_time", "wall_time")
        verdict = "timeout" if over_time else "exited"
    share = float(bool(report["passed"]))
    if not share and report.get("num_tests"):
        share = min(report["num_passed"] / report["num_tests"], 0.999)
    verdict = "error" if verdict == "raised" else verdict
    return CaseVerdict(verdict=verdict, passed=share, cpu_s=number(end.get("cpu_s")), detail=text)
