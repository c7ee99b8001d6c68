"""Cases that are programs themselves: one sandbox for the candidate, another for the checker that runs the tests.

candidate ──► frames, unparsed ──► checker ──► s + frame: to the candidate, unparsed; its next case starts
                                           ├─► c + frame: to the candidate, unparsed
                                           └─► h + frame: a verdict, for this process
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from roll.rewards.code.inside.frames import pack
from roll.rewards.code.inside.messages import Built, Check, CheckerSetup, End, Report, read
from roll.rewards.code.program import MOST_OUTPUT_BYTES, SHORTEST_WALL_S, CandidateRun
from roll.rewards.code.serving import Meter, listen, pass_on
from roll.rewards.code.tasks import TestCase
from roll.rewards.code.verdicts import (
    OUTCOMES,
    OVER_TIME,
    SKIPPED,
    BrokenTestsError,
    CaseVerdict,
    blame,
    ended,
    not_built,
    within,
)
from roll_sandbox import ExecutionResult, PythonCode

__all__ = ["Dialogue"]

_CHECKER = "from inside import checker\nchecker.main()"
_CHECKER_CPU_S = 30.0
_OUTPUT_BYTES = 2**23
"""Most bytes of one case: all answers of a candidate's objects."""


class Dialogue(CandidateRun):
    """Runs all cases of one answer."""

    async def run(self, cases: Sequence[tuple[TestCase, float]]) -> list[CaseVerdict]:
        """Run all cases with one sandbox for the candidate and one for the checker."""
        if self.left_s == 0.0:
            return [OVER_TIME] * len(cases)
        limits_s = [cpu_s for _, cpu_s in cases]
        checks = [
            Check(case.kind, case.source, list(case.modules), cpu_s, self.wall_s(cpu_s))._asdict()
            for case, cpu_s in cases
        ]
        setup = CheckerSetup(checks, self.task.entry, self.task.setup, self.max_timeouts)
        candidate_program = self.candidate(limits_s, len(cases) * _OUTPUT_BYTES)
        assert candidate_program.cpu_s is not None and candidate_program.wall_s is not None
        checker_program = PythonCode(
            source=_CHECKER,
            stdin=pack(setup._asdict()),
            interactive=True,
            result=True,
            cpu_s=candidate_program.cpu_s + _CHECKER_CPU_S,
            wall_s=candidate_program.wall_s + SHORTEST_WALL_S,
            output_bytes=MOST_OUTPUT_BYTES,
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        pytest = any(case.kind == "pytest" for case, _ in cases)
        async with (
            self.sandboxes.checker(checker_program, pytest=pytest) as checker,
            self.sandboxes.candidate(candidate_program) as candidate,
        ):
            meter = Meter(candidate, self.bounds(limits_s), self.left_s)
            await meter.bound(*self.setup_bounds())
            candidate.write(pack(self.setup()._asdict()))
            passing_on = asyncio.create_task(pass_on(candidate, checker))
            try:
                messages = await listen(checker, candidate, meter)
                result = await checker.wait()
                candidate.kill()
                end = await candidate.wait()
            finally:
                passing_on.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await passing_on
        found = self._verdicts(messages, result, end, len(cases))
        used_s = meter.used_s(end) + [0.0] * len(cases)
        return [within(verdict, *each) for verdict, *each in zip(found, used_s, limits_s, strict=False)]

    def _verdicts(
        self, messages: list[dict[str, object]], result: ExecutionResult, end: ExecutionResult, num_cases: int
    ) -> list[CaseVerdict]:
        if not messages:
            blame(result, "a checker's")
        if messages and (failed := read(Built, messages[0]).failed) is not None:
            return [not_built(failed)] * num_cases
        found = [_verdict(index, read(Report, message), end) for index, message in enumerate(messages)]
        timeouts = sum(verdict.verdict == "timeout" for verdict in found)
        missing = SKIPPED if timeouts >= self.max_timeouts else ended(result)
        return found + [missing] * (num_cases - len(found))


def _verdict(index: int, report: Report, end: ExecutionResult) -> CaseVerdict:
    """Convert a checker's report of one case to a verdict.

    The candidate's end in the report is the candidate's own claim; `end` is the trusted one, from the sandbox.
    """
    verdict = report.verdict
    if verdict == "broken":
        raise BrokenTestsError(f"case {index}: {report.text}")
    if verdict == "gone":
        verdict = "timeout" if read(End, report.over).is_over_time else OUTCOMES.get(end.outcome, "exited")
    share = float(report.passed)
    if not share and report.num_tests:
        share = min(report.num_passed / report.num_tests, 0.999)
    return CaseVerdict(verdict="error" if verdict == "raised" else verdict, passed=share, detail=report.text)
