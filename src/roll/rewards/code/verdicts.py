"""Verdicts of cases, and parsing of the candidate side's claims.

All data from the candidate is bounded before it is parsed: see `frames.unpack`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from roll.errors import RewardInfraError
from roll.rewards.code.inside import wire
from roll.rewards.code.inside.frames import unpack
from roll.rewards.code.inside.messages import End, read
from roll_sandbox import ExecutionResult, Outcome

__all__ = [
    "GRACE_CPU_S",
    "MESSAGE_BYTES",
    "OUTCOMES",
    "OVER_TIME",
    "SKIPPED",
    "BrokenTestsError",
    "CaseVerdict",
    "blame",
    "claim",
    "ended",
    "not_built",
    "within",
]

MESSAGE_BYTES = 2**15
"""Longest message of a candidate's or a checker's side that is parsed in this process: at most a few milliseconds and
some hundred kilobytes of memory, whatever its content."""
GRACE_CPU_S = 0.25
"""Extra CPU time, as the kernel's count includes ROLL's own program."""
OUTCOMES = {
    Outcome.MEMORY: "memory",
    Outcome.CPU_TIME: "timeout",
    Outcome.WALL_TIME: "timeout",
    Outcome.OUTPUT: "output",
}


class BrokenTestsError(Exception):
    """The tests cannot be run, whatever the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict:
    """The verdict on one case."""

    verdict: str
    """`passed`, `wrong`, `error`, `timeout`, `memory`, `output`, `not_plain`, `exited`, `no_build`, or `skipped`."""
    passed: float
    """0 or 1; for a file of tests, the share of passed tests."""
    cpu_s: float = 0.0
    """The kernel's count of CPU time, for all processes in the candidate's sandbox."""
    detail: str = ""


SKIPPED = CaseVerdict(verdict="skipped", passed=0.0)
OVER_TIME = CaseVerdict(verdict="timeout", passed=0.0)
"""Verdict on a case that was not started, as the time for all cases was over."""


def claim(body: bytes, most_bytes: int = MESSAGE_BYTES) -> dict[str, Any]:
    """Parse a short message from a sandbox; return an empty dict if it is not a message."""
    try:
        message = unpack(body, most_bytes)
    except wire.WireError:
        return {}
    return message if isinstance(message, dict) else {}


def not_built(failure: Any) -> CaseVerdict:
    end = read(End, failure)
    return CaseVerdict(verdict="timeout" if end.is_over_time else "no_build", passed=0.0, detail=end.stderr[-500:])


def within(verdict: CaseVerdict, cpu_s: float, limit_s: float) -> CaseVerdict:
    """Return the verdict with the CPU time that was counted from outside; a case over its limit becomes a timeout."""
    if verdict.passed and cpu_s > limit_s + GRACE_CPU_S:
        return CaseVerdict(verdict="timeout", passed=0.0, cpu_s=cpu_s, detail=verdict.detail)
    return replace(verdict, cpu_s=cpu_s)


def ended(result: ExecutionResult) -> CaseVerdict:
    """Return the verdict of a case without a report, from the outcome of its sandbox."""
    return CaseVerdict(verdict=OUTCOMES.get(result.outcome, "exited"), passed=0.0)


def blame(result: ExecutionResult, whose: str) -> None:
    """Raise an error if a sandbox that ended without a single message failed through ROLL's own fault.

    A limit or a crash of the compiler is the answer's fault.

    Raises:
        RewardInfraError: ROLL's own program failed.
    """
    if result.outcome is Outcome.EXITED and result.exit_code:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RewardInfraError(f"the program that runs {whose} code failed (exit {result.exit_code}): {last}")
