"""Verdicts of cases, and parsing of the candidate side's claims.

All data from the candidate is bounded before it is parsed: see `frames.unpack`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from roll.errors import RewardInfraError
from roll.rewards.code.sandbox_programs import wire
from roll.rewards.code.sandbox_programs.frames import unpack
from roll.rewards.code.sandbox_programs.messages import ProcessEnd, parse_record
from roll_sandbox import ExecutionResult, Outcome

__all__ = [
    "GRACE_CPU_S",
    "MESSAGE_BYTES",
    "OUTCOMES",
    "SKIPPED",
    "TIMED_OUT",
    "BrokenTestsError",
    "CaseVerdict",
    "apply_time_limit",
    "make_build_verdict",
    "make_outcome_verdict",
    "parse_message",
    "raise_for_crash",
]

MESSAGE_BYTES = 2**15
"""Maximum size of a message from a sandbox that is parsed in this process; parsing it takes at most a few milliseconds
and some hundred kilobytes of memory."""
GRACE_CPU_S = 0.25
"""Extra CPU time, because the kernel's measurement includes ROLL's program."""
OUTCOMES = {
    Outcome.MEMORY: "memory",
    Outcome.CPU_TIME: "timeout",
    Outcome.WALL_TIME: "timeout",
    Outcome.OUTPUT: "output",
}


class BrokenTestsError(Exception):
    """The tests cannot be run, whatever the answer is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict:
    """The verdict on one case."""

    verdict: str
    """`passed`, `wrong`, `error`, `timeout`, `memory`, `output`, `not_plain`, `exited`, `no_build`, or `skipped`."""
    passed: float
    """0 or 1; for a file of tests, the fraction of passed tests."""
    cpu_s: float = 0.0
    """CPU time of all processes in the candidate's sandbox, as measured by the kernel."""
    detail: str = ""


SKIPPED = CaseVerdict(verdict="skipped", passed=0.0)
TIMED_OUT = CaseVerdict(verdict="timeout", passed=0.0)
"""Verdict on a case that was not started because the time for all cases was over."""


def parse_message(body: bytes, max_bytes: int = MESSAGE_BYTES) -> dict[str, Any]:
    """Parse a short message from a sandbox; return an empty dict if it is not a message."""
    try:
        message = unpack(body, max_bytes)
    except wire.WireError:
        return {}
    return message if isinstance(message, dict) else {}


def make_build_verdict(failure: Any) -> CaseVerdict:
    end = parse_record(ProcessEnd, failure)
    return CaseVerdict(verdict="timeout" if end.is_over_time else "no_build", passed=0.0, detail=end.stderr[-500:])


def apply_time_limit(verdict: CaseVerdict, cpu_s: float, limit_s: float) -> CaseVerdict:
    """Return the verdict with the CPU time that was measured from outside; a case over its limit becomes a timeout."""
    if verdict.passed and cpu_s > limit_s + GRACE_CPU_S:
        return CaseVerdict(verdict="timeout", passed=0.0, cpu_s=cpu_s, detail=verdict.detail)
    return replace(verdict, cpu_s=cpu_s)


def make_outcome_verdict(result: ExecutionResult) -> CaseVerdict:
    """Return the verdict of a case that reported nothing: the limit that its sandbox exceeded, else `exited`."""
    return CaseVerdict(verdict=OUTCOMES.get(result.outcome, "exited"), passed=0.0)


def raise_for_crash(result: ExecutionResult, owner: str) -> None:
    """Raise an error if a sandbox ended without any message because ROLL's program failed.

    No error is raised if the program exceeded a limit or the compiler crashed, since that is the answer's fault.

    Raises:
        RewardInfraError: ROLL's program failed.
    """
    if result.outcome is Outcome.EXITED and result.exit_code:
        last = "".join(f": {line}" for line in result.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise RewardInfraError(f"the program that runs {owner} code failed with exit code {result.exit_code}{last}")
