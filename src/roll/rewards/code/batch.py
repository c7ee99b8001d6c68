"""Cases with inputs that are known beforehand: they run one after the other in one sandbox, and are compared
afterwards.

candidate's sandbox ──► per case a short message, and its output or return value, unparsed
                          ├─ short: compared in this process, a case at a time
                          └─ long:  compared in a checker's sandbox (`inside.referee`)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from roll.errors import RewardInfraError
from roll.rewards.code.inside import exceptions
from roll.rewards.code.inside.compare import same_output, same_value
from roll.rewards.code.inside.frames import frame, pack
from roll.rewards.code.inside.messages import Answer, Built, Comparison, End, read
from roll.rewards.code.inside.messages import Case as CaseMessage
from roll.rewards.code.program import CandidateRun
from roll.rewards.code.serving import Served, serve
from roll.rewards.code.tasks import CallCase, StdinCase
from roll.rewards.code.verdicts import (
    MESSAGE_BYTES,
    OUTCOMES,
    OVER_TIME,
    SKIPPED,
    CaseVerdict,
    blame,
    claim,
    ended,
    not_built,
    within,
)
from roll_sandbox import ExecutionResult, Limit, Outcome, PythonCode

__all__ = ["Batch"]

_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")
_REFEREE = "from inside import referee\nreferee.main()"
_REFEREE_CPU_S = 30.0
_REFEREE_WALL_S = 300.0
_SPARE_BYTES = 2**16
_BYTES_PER_BYTE = 16
"""A value may be encoded longer than expected: `1` as `["c", 1.0, 0.0]`."""

_NO_MESSAGE = CaseVerdict(verdict="exited", passed=0.0)


class Batch(CandidateRun):
    """Runs all cases of one answer."""

    async def run(self, cases: Sequence[tuple[StdinCase | CallCase, float]]) -> list[CaseVerdict]:
        """Run all cases in one sandbox.

        Where a case had to be ended from outside, the cases after it run in another sandbox.
        """
        case, limit_s = cases[0]
        if len(cases) == 1 and isinstance(case, StdinCase) and self.task.language == "python":
            return [await self._alone(case, limit_s)]
        verdicts: list[CaseVerdict] = []
        while len(verdicts) < len(cases):
            if self.left_s == 0.0:
                return verdicts + [OVER_TIME] * (len(cases) - len(verdicts))
            left = cases[len(verdicts) :]
            served = await self._served(left)
            built = claim(served.first)
            if not built:
                blame(served.result, "a candidate's")
            if (failed := read(Built, built).failed) is not None:
                return [not_built(failed)] * len(cases)
            verdicts += await self._judged(left, served)
            timeouts = sum(verdict.verdict == "timeout" for verdict in verdicts)
            if timeouts >= self.max_timeouts or not (built and _ended_over_time(served)):
                missing = SKIPPED if timeouts >= self.max_timeouts else ended(served.result)
                verdicts += [missing] * (len(cases) - len(verdicts))
        return verdicts

    async def _served(self, cases: Sequence[tuple[StdinCase | CallCase, float]]) -> Served:
        """Run the cases in one sandbox and return the frames and CPU times of the cases."""
        limits_s = [cpu_s for _, cpu_s in cases]
        most_bytes = [self._most_bytes(case) for case, _ in cases]
        messages = [self._message(*case, most) for case, most in zip(cases, most_bytes, strict=True)]
        async with self.sandboxes.candidate(self.candidate(limits_s, sum(most_bytes))) as job:
            return await serve(
                job,
                pack(self.setup()._asdict()),
                [pack(message._asdict()) for message in messages],
                self.bounds(limits_s),
                setup_s=self.setup_bounds(),
                total_s=self.left_s,
                frames_per_case=2,
            )

    async def _judged(self, cases: Sequence[tuple[StdinCase | CallCase, float]], served: Served) -> list[CaseVerdict]:
        """Return the verdicts of the answered cases, and of the case that was ended from outside, if any."""
        found: list[CaseVerdict] = []
        for (case, limit_s), (head, body), cpu_s in zip(cases, served.frames, served.cpu_s, strict=False):
            end = claim(head)
            verdict = await self._judge(case, read(End, end), body, served.result) if end else _NO_MESSAGE
            found.append(within(verdict, cpu_s, limit_s))
            await asyncio.sleep(0)  # let other tasks run on the event loop
        if _ended_over_time(served) and len(found) < len(served.cpu_s):
            found.append(CaseVerdict(verdict="timeout", passed=0.0, cpu_s=served.cpu_s[len(found)]))
        return found

    def _most_bytes(self, case: StdinCase | CallCase) -> int:
        """Return the most bytes of output to keep: anything longer is not the expected output or value."""
        if isinstance(case, CallCase):
            return _BYTES_PER_BYTE * len(case.expected) + MESSAGE_BYTES
        return min(self.config.max_output_bytes, 2 * len(case.stdout.encode("utf-8", "replace")) + _SPARE_BYTES)

    def _message(self, case: StdinCase | CallCase, cpu_s: float, most_bytes: int) -> CaseMessage:
        message = CaseMessage(kind="stdin", cpu_s=cpu_s, wall_s=self.wall_s(cpu_s), most_bytes=most_bytes)
        if isinstance(case, StdinCase):
            return message._replace(stdin=case.stdin, args=list(case.args))
        how = {"entry": case.entry, "as_online_judge": case.as_online_judge}
        return message._replace(kind="call", args=case.args, kwargs=case.kwargs, **how)

    async def _alone(self, case: StdinCase, cpu_s: float) -> CaseVerdict:
        """Run a single program directly, without the candidate runner, which saves a third of the work."""
        most_bytes = self._most_bytes(case)
        program = PythonCode(
            source=self.code,
            argv=case.args,
            stdin=case.stdin.encode("utf-8", "surrogateescape"),
            cpu_s=cpu_s,
            wall_s=min(self.wall_s(cpu_s), self.left_s),
            output_bytes=most_bytes + self.config.max_output_bytes,
        )
        result = await self.sandboxes.run(program)
        detail = result.stderr[-500:].decode(errors="replace")
        if result.outcome in OUTCOMES or len(result.stdout) > most_bytes:
            verdict = OUTCOMES.get(result.outcome, "output")
        elif result.exit_code != 0:
            last = detail.strip().splitlines()[-1:]
            verdict = "no_build" if last and last[0].startswith(_SYNTAX_ERRORS) else "error"
        else:
            verdict = "passed" if await self._printed(case, result.stdout) else "wrong"
        return CaseVerdict(verdict=verdict, passed=float(verdict == "passed"), cpu_s=result.cpu_s, detail=detail)

    async def _judge(self, case: StdinCase | CallCase, end: End, body: bytes, result: ExecutionResult) -> CaseVerdict:
        status, detail = end.status, end.stderr[-500:]
        if end.limit:
            verdict = "timeout" if end.is_over_time else "output"
        elif status == 137 and Limit.MEMORY in result.limits_hit:
            verdict = "memory"
        elif isinstance(case, StdinCase):
            verdict = "error" if status != 0 else "passed" if await self._printed(case, body) else "wrong"
        else:
            verdict, detail = await self._returned(case, body, detail)
        return CaseVerdict(verdict=verdict, passed=float(verdict == "passed"), detail=detail)

    async def _printed(self, case: StdinCase, printed: bytes) -> bool:
        """Return whether the printed text is the expected output."""
        compare, tolerance = self.config.compare, self.config.tolerance
        if len(printed) + len(case.stdout) <= MESSAGE_BYTES:
            return same_output(printed.decode("utf-8", "surrogateescape"), case.stdout, compare, tolerance)
        how = Comparison("text", compare, tolerance)
        return await self._referee(how, case.stdout.encode("utf-8", "surrogateescape"), printed)

    async def _returned(self, case: CallCase, body: bytes, detail: str) -> tuple[str, str]:
        """Return the verdict on a call's result, and its detail."""
        if len(body) + len(case.expected) > MESSAGE_BYTES:
            how = Comparison("value", case.match, self.config.tolerance)
            same = case.raises is None and await self._referee(how, case.expected, body)
            return ("passed" if same else "wrong"), detail
        message = claim(body)
        if not message:
            return "exited", detail
        answer = read(Answer, message)
        if answer.raised is not None:
            expected = case.raises is not None and exceptions.is_a(answer.raised, case.raises)
            return ("passed" if expected else "error"), answer.text[:500]
        if case.raises is not None:
            return "wrong", detail
        if answer.not_plain:
            return "not_plain", answer.not_plain[:500]
        tolerance = self.config.tolerance
        right = "value" in message and same_value(answer.value, case.returns, tolerance=tolerance, match=case.match)
        return ("passed" if right else "wrong"), detail

    async def _referee(self, how: Comparison, expected: bytes, found: bytes) -> bool:
        """Compare in a sandbox, which costs this process neither time nor memory.

        Raises:
            RewardInfraError: The comparison crashed.
        """
        program = PythonCode(
            source=_REFEREE,
            stdin=b"".join(map(frame, (json.dumps(how._asdict()).encode(), expected, found))),
            result=True,
            cpu_s=_REFEREE_CPU_S,
            wall_s=_REFEREE_WALL_S,
        )
        result = await self.sandboxes.compare(program)
        (same,) = claim(result.result[4:]).values() or (None,)
        if not isinstance(same, bool):
            blame(result, "a comparison's")
            if result.outcome not in OUTCOMES:
                raise RewardInfraError(f"a comparison ended without a result ({result.outcome.value}).")
        return same is True


def _ended_over_time(served: Served) -> bool:
    return served.result.outcome in (Outcome.CPU_TIME, Outcome.WALL_TIME)
