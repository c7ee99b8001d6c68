"""Running an answer's program on its cases.

    stdin and call cases ──► one sandbox, a process per case ──► outputs ──► compared here, as text and plain data
    assert, check, pytest ──► candidate's sandbox ◄── plain data, passed on here ──► checker's sandbox ──► verdicts

What comes from a candidate's sandbox is the candidate's claim of what it computed. The expected results are never
there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.config.rewards.code import CodeReward
from roll.errors import RewardInfraError
from roll.rewards.code.boxes import CodeBoxes
from roll.rewards.code.compare import same_output, same_value
from roll.rewards.code.inside import wire
from roll.rewards.code.languages import TOOL_CHAINS
from roll.rewards.code.serving import GRACE_CPU_S, Meter, Served, frame_of, listen, pass_on, serve
from roll.rewards.code.tasks import CallCase, Case, StdinCase, Task, TestCase
from roll.sandbox import ExecutionResult, Limit, Outcome, PythonCode

__all__ = ["BrokenTestsError", "CaseVerdict", "run_cases"]

_CANDIDATE = "from inside import candidate\ncandidate.main()"
_CHECKER = "from inside import checker\nchecker.main()"
_STARTING_CPU_S = 5.0
_COMPILE_CPU_S = 60.0
_SHORTEST_WALL_S = 10.0
_CHECKER_CPU_S = 30.0
_MOST_OUTPUT_BYTES = 2**28
_OUTCOMES = {
    Outcome.MEMORY: "memory",
    Outcome.CPU_TIME: "timeout",
    Outcome.WALL_TIME: "timeout",
    Outcome.OUTPUT: "output",
}
_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")


class BrokenTestsError(Exception):
    """The tests cannot be run, whatever the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict:
    """What became of one case."""

    verdict: str
    """`passed`, `wrong`, `error`, `timeout`, `memory`, `output`, `not_plain`, `exited`, `no_build`, or `skipped`."""
    passed: float
    """Share: 0 or 1; of a file of tests, the share of its tests."""
    cpu_s: float = 0.0
    """As the kernel counted it, of everything in the candidate's sandbox."""
    detail: str = ""


_SKIPPED = CaseVerdict(verdict="skipped", passed=0.0)


async def run_cases(
    boxes: CodeBoxes, task: Task, code: str, limits_s: Sequence[float], config: CodeReward
) -> list[CaseVerdict]:
    """A verdict per case, in order.

    Args:
        limits_s: CPU time of each case.

    Raises:
        SandboxError: a sandbox broke.
        RewardInfraError: one of our own programs crashed.
        BrokenTestsError: see there.
    """
    verdicts = [_SKIPPED] * len(task.cases)
    numbered = list(enumerate(task.cases))
    plain = [(i, case) for i, case in numbered if not isinstance(case, TestCase)]
    tests = [(i, case) for i, case in numbered if isinstance(case, TestCase)]
    if plain:
        found = await _Batch(boxes, task, code, config).run([(case, limits_s[i]) for i, case in plain])
        for (i, _), verdict in zip(plain, found, strict=True):
            verdicts[i] = verdict
    if tests and not (config.credit == "all" and any(verdicts[i].passed < 1 for i, _ in plain)):
        found = await _Dialogue(boxes, task, code, config).run([(case, limits_s[i]) for i, case in tests])
        for (i, _), verdict in zip(tests, found, strict=True):
            verdicts[i] = verdict
    return verdicts


class _Run:
    """What both ways share."""

    def __init__(self, boxes: CodeBoxes, task: Task, code: str, config: CodeReward) -> None:
        self.boxes, self.task, self.code, self.config = boxes, task, code, config
        self.max_timeouts = 1 if config.credit == "all" else 2

    def limits(self, cpu_s: float) -> dict[str, float]:
        """Of one case."""
        return {"cpu_s": cpu_s, "wall_s": max(_SHORTEST_WALL_S, self.config.wall_factor * cpu_s)}

    def bounds(self, limits_s: Sequence[float]) -> list[tuple[float, float]]:
        """CPU and wall time of each case, as the sandbox keeps them."""
        return [(cpu_s, self.limits(cpu_s)["wall_s"]) for cpu_s in limits_s]

    def setup_bounds(self) -> tuple[float, float]:
        """The same of compiling and loading."""
        cpu_s = _STARTING_CPU_S + (_COMPILE_CPU_S if TOOL_CHAINS[self.task.language].compile else 0.0)
        return cpu_s, self.limits(cpu_s)["wall_s"]

    def setup(self) -> dict[str, Any]:
        """The first message to the candidate's side."""
        tools = TOOL_CHAINS[self.task.language]
        return {
            "source": self.code,
            "file": tools.file,
            "argv": list(tools.argv),
            "compile": list(tools.compile),
            "compile_limits": self.limits(_COMPILE_CPU_S),
            "output_bytes": self.config.max_output_bytes,
            "max_timeouts": self.max_timeouts,
        }

    def candidate(self, stdin: bytes, limits_s: Sequence[float], *, interactive: bool = False) -> PythonCode:
        """The program that runs the candidate."""
        compiling = _COMPILE_CPU_S if TOOL_CHAINS[self.task.language].compile else 0.0
        all_s = [*limits_s, compiling, _STARTING_CPU_S]
        output = len(limits_s) * (6 * self.config.max_output_bytes + 2**14) + 2**16
        return PythonCode(
            source=_CANDIDATE,
            stdin=stdin,
            interactive=interactive,
            result=True,
            cpu_s=sum(all_s),
            wall_s=min(sum(self.limits(each)["wall_s"] for each in all_s), self.config.time_limit_s),
            output_bytes=min(output, _MOST_OUTPUT_BYTES),
        )


class _Batch(_Run):
    """Cases whose inputs are known beforehand."""

    async def run(self, cases: Sequence[tuple[StdinCase | CallCase, float]]) -> list[CaseVerdict]:
        """All of them in one sandbox; what is left in another, where a case had to be ended from outside."""
        case, limit_s = cases[0]
        if len(cases) == 1 and isinstance(case, StdinCase) and self.task.language == "python":
            return [await self._alone(case, limit_s)]
        verdicts: list[CaseVerdict] = []
        while len(verdicts) < len(cases):
            left = cases[len(verdicts) :]
            served = await self._served(left)
            first = frame_of(served.first)
            if first is None:
                _blame(served.result, "a candidate's")
            elif "failed" in first:
                return [_not_built(first["failed"])] * len(cases)
            verdicts += self._judged(left, served)
            timeouts = sum(verdict.verdict == "timeout" for verdict in verdicts)
            over = served.result.outcome in (Outcome.CPU_TIME, Outcome.WALL_TIME)
            if timeouts >= self.max_timeouts or not (first and over):
                missing = _SKIPPED if timeouts >= self.max_timeouts else _ended(served.result)
                verdicts += [missing] * (len(cases) - len(verdicts))
        return verdicts

    async def _served(self, cases: Sequence[tuple[StdinCase | CallCase, float]]) -> Served:
        program = self.candidate(b"", [cpu_s for _, cpu_s in cases], interactive=True)
        async with self.boxes.candidate(program) as job:
            return await serve(
                job,
                wire.pack(self.setup()),
                [wire.pack(self._message(case, cpu_s)) for case, cpu_s in cases],
                self.bounds([cpu_s for _, cpu_s in cases]),
                setup_s=self.setup_bounds(),
                total_s=self.config.time_limit_s,
            )

    def _judged(self, cases: Sequence[tuple[StdinCase | CallCase, float]], served: Served) -> list[CaseVerdict]:
        """Of the cases that were answered, and of the one that was ended from outside."""
        found = []
        for (case, limit_s), (body,), cpu_s in zip(cases, served.frames, served.cpu_s, strict=False):
            end = (frame_of(body) or {}).get("case")
            if not isinstance(end, dict):
                break
            found.append(_within(self._judge(case, end, served.result), cpu_s, limit_s))
        else:
            if served.result.outcome in (Outcome.CPU_TIME, Outcome.WALL_TIME) and len(found) < len(served.cpu_s):
                found.append(CaseVerdict(verdict="timeout", passed=0.0, cpu_s=served.cpu_s[len(found)]))
        return found

    async def _alone(self, case: StdinCase, cpu_s: float) -> CaseVerdict:
        """A single program needs nobody beside it in its sandbox: a third less work."""
        program = PythonCode(
            source=self.code,
            argv=case.args,
            stdin=case.stdin.encode("utf-8", "surrogateescape"),
            cpu_s=cpu_s,
            wall_s=min(self.limits(cpu_s)["wall_s"], self.config.time_limit_s),
            output_bytes=self.config.max_output_bytes + 2**16,
        )
        result = await self.boxes.run(program)
        detail = result.stderr[-500:].decode(errors="replace")
        if result.outcome in _OUTCOMES or len(result.stdout) > self.config.max_output_bytes:
            verdict = _OUTCOMES.get(result.outcome, "output")
        elif result.exit_code != 0:
            last = detail.strip().splitlines()[-1:]
            verdict = "no_build" if last and last[0].startswith(_SYNTAX_ERRORS) else "error"
        else:
            printed = result.stdout.decode("utf-8", "surrogateescape")
            right = same_output(printed, case.stdout, self.config.compare, self.config.tolerance)
            verdict = "passed" if right else "wrong"
        return CaseVerdict(verdict=verdict, passed=float(verdict == "passed"), cpu_s=result.cpu_s, detail=detail)

    def _message(self, case: StdinCase | CallCase, cpu_s: float) -> dict[str, Any]:
        if isinstance(case, StdinCase):
            return {"kind": "stdin", "stdin": case.stdin, "args": list(case.args), **self.limits(cpu_s)}
        return {"kind": "call", "entry": case.entry, "args": case.args, "kwargs": case.kwargs, **self.limits(cpu_s)}

    def _judge(self, case: Case, end: dict[str, Any], result: ExecutionResult) -> CaseVerdict:
        limit, status = end.get("limit"), end.get("status")
        detail = str(end.get("stderr", ""))[-500:]
        if limit is not None:
            verdict = "timeout" if limit in ("cpu_time", "wall_time") else "output"
        elif status == 137 and Limit.MEMORY in result.limits_hit:
            verdict = "memory"
        elif isinstance(case, StdinCase):
            right = same_output(str(end.get("stdout")), case.stdout, self.config.compare, self.config.tolerance)
            verdict = "error" if status != 0 else "passed" if right else "wrong"
        else:
            assert isinstance(case, CallCase)
            verdict, detail = self._judge_call(case, end, detail)
        return CaseVerdict(verdict=verdict, passed=float(verdict == "passed"), detail=detail)

    def _judge_call(self, case: CallCase, end: dict[str, Any], detail: str) -> tuple[str, str]:
        try:
            answer = wire.unpack(end["value"]) if isinstance(end.get("value"), str) else None
        except wire.WireError:
            answer = None
        if not isinstance(answer, dict):
            return "exited", detail
        if "raised" in answer:
            kinds = answer["raised"] if isinstance(answer["raised"], list) else []
            expected = case.raises is not None and case.raises in kinds
            return ("passed" if expected else "error"), str(answer.get("text"))[:500]
        if "not_plain" in answer or case.raises is not None:
            return ("wrong" if case.raises is not None else "not_plain"), str(answer.get("not_plain"))[:500]
        tolerance = self.config.tolerance
        right = "value" in answer and same_value(answer["value"], case.returns, tolerance=tolerance, loose=case.loose)
        return ("passed" if right else "wrong"), detail


class _Dialogue(_Run):
    """Cases that are programs themselves."""

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
        candidate_program = self.candidate(wire.pack(self.setup()), limits_s, interactive=True)
        assert candidate_program.cpu_s is not None and candidate_program.wall_s is not None
        checker_program = PythonCode(
            source=_CHECKER,
            stdin=wire.pack(setup),
            interactive=True,
            result=True,
            cpu_s=candidate_program.cpu_s + _CHECKER_CPU_S,
            wall_s=candidate_program.wall_s + _SHORTEST_WALL_S,
            output_bytes=_MOST_OUTPUT_BYTES,
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        pytest = any(case.kind == "pytest" for case, _ in cases)
        async with (
            self.boxes.checker(checker_program, pytest=pytest) as checker,
            self.boxes.candidate(candidate_program) as candidate,
        ):
            meter = Meter(candidate, self.bounds(limits_s), self.config.time_limit_s)
            await meter.begin(*self.setup_bounds())
            passing_on = asyncio.create_task(pass_on(candidate, checker))
            try:
                messages = await listen(checker, candidate, meter)
                result = await checker.wait()
                candidate.kill()
                ended = await candidate.wait()
            finally:
                passing_on.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await passing_on
        found = self._verdicts(messages, result, ended, len(cases))
        used_s = meter.used_s(ended) + [0.0] * len(cases)
        return [_within(verdict, *each) for verdict, *each in zip(found, used_s, limits_s, strict=False)]

    def _verdicts(
        self, messages: list[dict[str, Any]], result: ExecutionResult, ended: ExecutionResult, num_cases: int
    ) -> list[CaseVerdict]:
        if not messages:
            _blame(result, "a checker's")
        if messages and "failed" in messages[0]:
            return [_not_built(messages[0]["failed"])] * num_cases
        found = [_verdict(index, message["verdict"], ended) for index, message in enumerate(messages)]
        timeouts = sum(verdict.verdict == "timeout" for verdict in found)
        missing = _SKIPPED if timeouts >= self.max_timeouts else _ended(result)
        return found + [missing] * (num_cases - len(found))


def _within(verdict: CaseVerdict, cpu_s: float, limit_s: float) -> CaseVerdict:
    """With the CPU time that was counted from outside; over its limit, no case has passed."""
    if verdict.passed and cpu_s > limit_s + GRACE_CPU_S:
        return CaseVerdict(verdict="timeout", passed=0.0, cpu_s=cpu_s, detail=verdict.detail)
    return replace(verdict, cpu_s=cpu_s)


def _verdict(index: int, report: dict[str, Any], ended: ExecutionResult) -> CaseVerdict:
    """A checker's report of one case. What it says of the candidate's end is the candidate's claim; `ended` is ours."""
    end = report.get("over")
    end = end if isinstance(end, dict) else {}
    verdict, text = str(report["verdict"]), str(report.get("text", ""))
    if verdict == "broken":
        raise BrokenTestsError(f"case {index}: {text}")
    if verdict == "gone":
        over_time = end.get("limit") in ("cpu_time", "wall_time")
        verdict = "timeout" if over_time else _OUTCOMES.get(ended.outcome, "exited")
    share = float(bool(report["passed"]))
    if not share and report.get("num_tests"):
        share = min(report["num_passed"] / report["num_tests"], 0.999)
    verdict = "error" if verdict == "raised" else verdict
    return CaseVerdict(verdict=verdict, passed=share, detail=text)


def _not_built(failure: Any) -> CaseVerdict:
    failure = failure if isinstance(failure, dict) else {}
    verdict = "timeout" if failure.get("limit") in ("cpu_time", "wall_time") else "no_build"
    return CaseVerdict(verdict=verdict, passed=0.0, detail=str(failure.get("stderr", ""))[-500:])


def _ended(result: ExecutionResult) -> CaseVerdict:
    """Of a case that nothing is known of."""
    return CaseVerdict(verdict=_OUTCOMES.get(result.outcome, "exited"), passed=0.0)


def _blame(result: ExecutionResult, whose: str) -> None:
    """Without a single message: a limit or a crash of the compiler is the answer's doing, anything else is ours.

    Raises:
        RewardInfraError: it is ours.
    """
    if result.outcome is Outcome.EXITED and result.exit_code:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RewardInfraError(f"the program that runs {whose} code failed (exit {result.exit_code}): {last}")
