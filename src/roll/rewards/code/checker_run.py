"""Run cases that are test programs: one sandbox for the candidate, another for the checker that runs the tests.

candidate ──► frames, unparsed ──► checker ──► s + frame: to the candidate, unparsed; its next case starts
                                           ├─► c + frame: to the candidate, unparsed
                                           └─► h + frame: a verdict, for this process
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from roll.rewards.code.program import MAX_OUTPUT_BYTES, MIN_WALL_S, CandidateRun
from roll.rewards.code.sandbox_programs.frames import pack
from roll.rewards.code.sandbox_programs.messages import (
    CheckerCase,
    CheckerSetup,
    ProcessEnd,
    Report,
    SetupResult,
    parse_record,
)
from roll.rewards.code.serving import CaseLimiter, forward_output, relay_messages
from roll.rewards.code.tasks import TestCase
from roll.rewards.code.verdicts import (
    OUTCOMES,
    SKIPPED,
    TIMED_OUT,
    BrokenTestsError,
    CaseVerdict,
    apply_time_limit,
    make_build_verdict,
    make_outcome_verdict,
    raise_for_crash,
)
from roll_sandbox import ExecutionResult, PythonCode

__all__ = ["CheckerRun"]

_CHECKER_PROGRAM = "from sandbox_programs import checker\nchecker.main()"
_CHECKER_CPU_S = 30.0
_OUTPUT_BYTES = 2**23
"""Maximum number of bytes of one case: all answers of a candidate's objects."""


class CheckerRun(CandidateRun):
    """Runs one answer against the cases of a task that are test programs."""

    async def run(self, cases: Sequence[tuple[TestCase, float]]) -> list[CaseVerdict]:
        """Run all cases with one sandbox for the candidate and one for the checker; return a verdict per case."""
        if self.remaining_s == 0.0:
            return [TIMED_OUT] * len(cases)
        limits_s = [cpu_s for _, cpu_s in cases]
        checks = [
            CheckerCase(case.kind, case.source, list(case.modules), cpu_s, self.compute_wall_limit_s(cpu_s))._asdict()
            for case, cpu_s in cases
        ]
        setup = CheckerSetup(checks, self.task.entry, self.task.setup, self.max_timeouts)
        candidate_program = self.make_program(limits_s, len(cases) * _OUTPUT_BYTES)
        assert candidate_program.cpu_s is not None and candidate_program.wall_s is not None
        checker_program = PythonCode(
            source=_CHECKER_PROGRAM,
            stdin=pack(setup._asdict()),
            interactive=True,
            result=True,
            cpu_s=candidate_program.cpu_s + _CHECKER_CPU_S,
            wall_s=candidate_program.wall_s + MIN_WALL_S,
            output_bytes=MAX_OUTPUT_BYTES,
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        pytest = any(case.kind == "pytest" for case, _ in cases)
        async with (
            self.sandboxes.start_checker(checker_program, pytest=pytest) as checker,
            self.sandboxes.start_candidate(candidate_program) as candidate,
        ):
            limiter = CaseLimiter(candidate, self.compute_case_limits(limits_s), self.remaining_s)
            await limiter.set_limits(*self.compute_setup_limits())
            candidate.write(pack(self.make_setup()._asdict()))
            passing_on = asyncio.create_task(forward_output(candidate, checker))
            try:
                messages = await relay_messages(checker, candidate, limiter)
                result = await checker.wait()
                # All verdicts are known once the checker has ended, so they must not wait for a candidate that hangs.
                candidate.kill()
                end = await candidate.wait()
            finally:
                passing_on.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await passing_on
        verdicts = self._make_verdicts(messages, result, end, len(cases))
        used_s = limiter.compute_used_s(end) + [0.0] * len(cases)
        return [apply_time_limit(verdict, *each) for verdict, *each in zip(verdicts, used_s, limits_s, strict=False)]

    def _make_verdicts(
        self, messages: list[dict[str, object]], result: ExecutionResult, end: ExecutionResult, num_cases: int
    ) -> list[CaseVerdict]:
        if not messages:
            raise_for_crash(result, "a checker's")
        if messages and (failed := parse_record(SetupResult, messages[0]).failed) is not None:
            return [make_build_verdict(failed)] * num_cases
        verdicts = [_make_verdict(index, parse_record(Report, message), end) for index, message in enumerate(messages)]
        timeouts = sum(verdict.verdict == "timeout" for verdict in verdicts)
        missing = SKIPPED if timeouts >= self.max_timeouts else make_outcome_verdict(result)
        return verdicts + [missing] * (num_cases - len(verdicts))


def _make_verdict(index: int, report: Report, end: ExecutionResult) -> CaseVerdict:
    """Convert a checker's report of one case to a verdict.

    The sandbox's result `end` determines how the candidate ended, since the report only repeats what the candidate
    claims. However, if the candidate claims to have exceeded its time, the verdict is `timeout`.
    """
    verdict = report.verdict
    if verdict == "broken":
        raise BrokenTestsError(f"case {index}: {report.text}")
    if verdict == "gone":
        verdict = (
            "timeout" if parse_record(ProcessEnd, report.end).is_over_time else OUTCOMES.get(end.outcome, "exited")
        )
    share = float(report.passed)
    if not share and report.num_tests:
        # A share of 1 would be treated as passed, although pytest reported a failure.
        share = min(report.num_passed / report.num_tests, 0.999)
    return CaseVerdict(verdict="error" if verdict == "raised" else verdict, passed=share, detail=report.text)
