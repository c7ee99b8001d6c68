"""Run cases whose inputs are known in advance, one after the other in one sandbox; results are compared afterwards.

candidate's sandbox ──► per case a short message, and its output or return value, unparsed
                          ├─ short: compared in this process, a case at a time
                          └─ long:  compared in a checker's sandbox (`sandbox_programs.comparator`)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from roll.errors import RewardInfraError
from roll.rewards.code.program import CandidateRun
from roll.rewards.code.sandbox_programs import exceptions
from roll.rewards.code.sandbox_programs.compare import is_same_output, is_same_value
from roll.rewards.code.sandbox_programs.frames import add_length, pack
from roll.rewards.code.sandbox_programs.messages import Answer, Comparison, ProcessEnd, SetupResult, parse_record
from roll.rewards.code.sandbox_programs.messages import Case as CaseMessage
from roll.rewards.code.serving import CaseResults, serve_cases
from roll.rewards.code.tasks import CallCase, StdinCase
from roll.rewards.code.verdicts import (
    MESSAGE_BYTES,
    OUTCOMES,
    SKIPPED,
    TIMED_OUT,
    CaseVerdict,
    apply_time_limit,
    make_build_verdict,
    make_outcome_verdict,
    parse_message,
    raise_for_crash,
)
from roll_sandbox import ExecutionResult, Limit, Outcome, PythonCode

__all__ = ["BatchRun"]

_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")
_COMPARATOR_PROGRAM = "from sandbox_programs import comparator\ncomparator.main()"
_COMPARATOR_CPU_S = 30.0
_COMPARATOR_WALL_S = 300.0
_EXTRA_OUTPUT_BYTES = 2**16
_ENCODING_FACTOR = 16
"""Maximum ratio of the encoded lengths of a value and of an expected value that equals it: `1` as `["c", 1.0, 0.0]`."""

_NO_MESSAGE_VERDICT = CaseVerdict(verdict="exited", passed=0.0)


class BatchRun(CandidateRun):
    """Runs one answer on the stdin and call cases of a task, whose inputs and expected results are known in advance."""

    async def run(self, cases: Sequence[tuple[StdinCase | CallCase, float]]) -> list[CaseVerdict]:
        """Run all cases in one sandbox, and return a verdict for each.

        If a case exceeds its time limit and is killed from outside, the cases after it run in a new sandbox.
        """
        case, limit_s = cases[0]
        if len(cases) == 1 and isinstance(case, StdinCase) and self.task.language == "python":
            return [await self._run_directly(case, limit_s)]
        verdicts: list[CaseVerdict] = []
        while len(verdicts) < len(cases):
            if self.remaining_s == 0.0:
                return verdicts + [TIMED_OUT] * (len(cases) - len(verdicts))
            left = cases[len(verdicts) :]
            served = await self._serve(left)
            built = parse_message(served.setup_reply)
            if not built:
                # Without any message, either the candidate hit a limit, which is a verdict, or ROLL's own runner
                # crashed.
                raise_for_crash(served.result, "a candidate's")
            if (failed := parse_record(SetupResult, built).failed) is not None:
                return [make_build_verdict(failed)] * len(cases)
            verdicts += await self._judge_cases(left, served)
            timeouts = sum(verdict.verdict == "timeout" for verdict in verdicts)
            # After a timeout, the remaining cases run in a new sandbox. Any other end, such as running out of memory,
            # is the verdict on all of them.
            if timeouts >= self.max_timeouts or not (built and _has_exceeded_time(served)):
                missing = SKIPPED if timeouts >= self.max_timeouts else make_outcome_verdict(served.result)
                verdicts += [missing] * (len(cases) - len(verdicts))
        return verdicts

    async def _serve(self, cases: Sequence[tuple[StdinCase | CallCase, float]]) -> CaseResults:
        """Run the cases in one sandbox, and return the result messages and CPU time of each case."""
        limits_s = [cpu_s for _, cpu_s in cases]
        max_bytes = [self._compute_max_bytes(case) for case, _ in cases]
        messages = [self._make_message(*case, most) for case, most in zip(cases, max_bytes, strict=True)]
        async with self.sandboxes.start_candidate(self.make_program(limits_s, sum(max_bytes))) as job:
            return await serve_cases(
                job,
                pack(self.make_setup()._asdict()),
                [pack(message._asdict()) for message in messages],
                self.compute_case_limits(limits_s),
                setup_s=self.compute_setup_limits(),
                total_s=self.remaining_s,
                frames_per_case=2,  # the end of the case, and its output or value
            )

    async def _judge_cases(
        self, cases: Sequence[tuple[StdinCase | CallCase, float]], results: CaseResults
    ) -> list[CaseVerdict]:
        """Return the verdicts of the cases that produced a result.

        If a case was killed from outside because it exceeded its time limit, its verdict `timeout` comes last.
        """
        verdicts: list[CaseVerdict] = []
        for (case, limit_s), (head, body), cpu_s in zip(cases, results.frames, results.cpu_s, strict=False):
            end = parse_message(head)
            verdict = (
                await self._judge_case(case, parse_record(ProcessEnd, end), body, results.result)
                if end
                else _NO_MESSAGE_VERDICT
            )
            verdicts.append(apply_time_limit(verdict, cpu_s, limit_s))
            await asyncio.sleep(0)  # let other tasks run on the event loop
        if _has_exceeded_time(results) and len(verdicts) < len(results.cpu_s):
            verdicts.append(CaseVerdict(verdict="timeout", passed=0.0, cpu_s=results.cpu_s[len(verdicts)]))
        return verdicts

    def _compute_max_bytes(self, case: StdinCase | CallCase) -> int:
        """Return the number of bytes of the case's output to keep; longer output cannot equal the expected result."""
        if isinstance(case, CallCase):
            return _ENCODING_FACTOR * len(case.expected) + MESSAGE_BYTES
        return min(self.config.max_output_bytes, 2 * len(case.stdout.encode("utf-8", "replace")) + _EXTRA_OUTPUT_BYTES)

    def _make_message(self, case: StdinCase | CallCase, cpu_s: float, max_bytes: int) -> CaseMessage:
        message = CaseMessage(kind="stdin", cpu_s=cpu_s, wall_s=self.compute_wall_limit_s(cpu_s), max_bytes=max_bytes)
        if isinstance(case, StdinCase):
            return message._replace(stdin=case.stdin, args=list(case.args))
        how = {"entry": case.entry, "as_online_judge": case.as_online_judge}
        return message._replace(kind="call", args=case.args, kwargs=case.kwargs, **how)

    async def _run_directly(self, case: StdinCase, cpu_s: float) -> CaseVerdict:
        """Run the single case of a Python program without the candidate runner, which saves a third of the time."""
        max_bytes = self._compute_max_bytes(case)
        program = PythonCode(
            source=self.code,
            argv=case.args,
            stdin=case.stdin.encode("utf-8", "surrogateescape"),
            cpu_s=cpu_s,
            wall_s=min(self.compute_wall_limit_s(cpu_s), self.remaining_s),
            output_bytes=max_bytes + self.config.max_output_bytes,
        )
        result = await self.sandboxes.run(program)
        detail = result.stderr[-500:].decode(errors="replace")
        if result.outcome in OUTCOMES or len(result.stdout) > max_bytes:
            verdict = OUTCOMES.get(result.outcome, "output")
        elif result.exit_code != 0:
            last = detail.strip().splitlines()[-1:]
            verdict = "no_build" if last and last[0].startswith(_SYNTAX_ERRORS) else "error"
        else:
            verdict = "passed" if await self._matches_output(case, result.stdout) else "wrong"
        return CaseVerdict(verdict=verdict, passed=float(verdict == "passed"), cpu_s=result.cpu_s, detail=detail)

    async def _judge_case(
        self, case: StdinCase | CallCase, end: ProcessEnd, body: bytes, result: ExecutionResult
    ) -> CaseVerdict:
        status, detail = end.status, end.stderr[-500:]
        if end.limit:
            verdict = "timeout" if end.is_over_time else "output"
        # 137 is 128 + SIGKILL: the kernel ends a process that exceeds the sandbox's memory.
        elif status == 137 and Limit.MEMORY in result.limits_hit:
            verdict = "memory"
        elif isinstance(case, StdinCase):
            verdict = "error" if status != 0 else "passed" if await self._matches_output(case, body) else "wrong"
        else:
            verdict, detail = await self._judge_result(case, body, detail)
        return CaseVerdict(verdict=verdict, passed=float(verdict == "passed"), detail=detail)

    async def _matches_output(self, case: StdinCase, output: bytes) -> bool:
        """Return whether the printed text is the expected output."""
        compare, tolerance = self.config.compare, self.config.tolerance
        if len(output) + len(case.stdout) <= MESSAGE_BYTES:
            return is_same_output(output.decode("utf-8", "surrogateescape"), case.stdout, compare, tolerance)
        how = Comparison("text", compare, tolerance)
        return await self._compare_in_sandbox(how, case.stdout.encode("utf-8", "surrogateescape"), output)

    async def _judge_result(self, case: CallCase, body: bytes, detail: str) -> tuple[str, str]:
        """Return the verdict on the value or exception of a call, and a detail for messages.

        Args:
            case: The case, with the expected value or exception.
            body: The candidate's result, not parsed yet.
            detail: The detail to return if the result has none.
        """
        if len(body) + len(case.expected) > MESSAGE_BYTES:
            how = Comparison("value", case.match, self.config.tolerance)
            same = case.raises is None and await self._compare_in_sandbox(how, case.expected, body)
            return ("passed" if same else "wrong"), detail
        message = parse_message(body)
        if not message:
            return "exited", detail
        answer = parse_record(Answer, message)
        if answer.raised is not None:
            expected = case.raises is not None and exceptions.derives_from(answer.raised, case.raises)
            return ("passed" if expected else "error"), answer.text[:500]
        if case.raises is not None:
            return "wrong", detail
        if answer.not_plain:
            return "not_plain", answer.not_plain[:500]
        tolerance = self.config.tolerance
        # `None` is a valid value, so a missing value must be detected by its key.
        right = "value" in message and is_same_value(answer.value, case.returns, tolerance=tolerance, match=case.match)
        return ("passed" if right else "wrong"), detail

    async def _compare_in_sandbox(self, comparison: Comparison, expected: bytes, actual: bytes) -> bool:
        """Return whether two long texts or values are equal, comparing them in a sandbox instead of this process.

        Raises:
            RewardInfraError: The comparison crashed.
        """
        program = PythonCode(
            source=_COMPARATOR_PROGRAM,
            stdin=b"".join(map(add_length, (json.dumps(comparison._asdict()).encode(), expected, actual))),
            result=True,
            cpu_s=_COMPARATOR_CPU_S,
            wall_s=_COMPARATOR_WALL_S,
        )
        result = await self.sandboxes.compare(program)
        # The first 4 bytes are the length of the frame.
        (same,) = parse_message(result.result[4:]).values() or (None,)
        if not isinstance(same, bool):
            raise_for_crash(result, "a comparison's")
            if result.outcome not in OUTCOMES:
                raise RewardInfraError(f"the comparison of two results failed in its sandbox ({result.outcome.value}).")
        return same is True


def _has_exceeded_time(results: CaseResults) -> bool:
    return results.result.outcome in (Outcome.CPU_TIME, Outcome.WALL_TIME)
