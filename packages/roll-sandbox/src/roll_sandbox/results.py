"""Converts an agent's report of a program's end to an `ExecutionResult`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll_sandbox.types import ExecutionResult, Limit, Outcome

__all__ = ["is_valid_end_report", "parse_result"]

_LIMITS_BY_SEVERITY = (
    Limit.MEMORY,
    Limit.CPU_TIME,
    Limit.WALL_TIME,
    Limit.OUTPUT,
    Limit.FILE_SIZE,
    Limit.DISK,
    Limit.PROCESSES,
)
_LIMIT_NAMES = [limit.value for limit in Limit]


_MAX_NUMBER = 2**62


def is_valid_end_report(end: object) -> bool:
    """Return whether `end` is a well-formed report for `parse_result`. Reports are not trusted, since malicious code
    may run next to the agent.
    """
    if not isinstance(end, dict):
        return False
    limits = [end.get(name, ()) for name in ("limits", "counted")]
    numbers = [end.get(name, 0) for name in ("wall_s", "cpu_s")]
    wholes = [end.get(name, 0) for name in ("code", "signal", "peak")]
    # `type` instead of `isinstance`, since True and False are integers. Comparisons exclude NaN.
    return (
        all(isinstance(each, list | tuple) and all(name in _LIMIT_NAMES for name in each) for each in limits)
        and all(type(each) in (int, float) and 0 <= each <= _MAX_NUMBER for each in numbers)
        and all(type(each) is int and -_MAX_NUMBER <= each <= _MAX_NUMBER for each in wholes)
    )


def parse_result(
    end: Mapping[str, Any], kernel_limits: Iterable[Limit] = (), output: Callable[[str], bytes] = lambda _: b""
) -> ExecutionResult:
    """Build the result of a program from the agent's report of its end.

    Args:
        end: the agent's report.
        kernel_limits: limits that the kernel has enforced.
        output: function that takes the name of a stream and returns all output of the stream.
    """
    limits = {*kernel_limits, *(Limit(name) for name in end.get("limits", ()))}
    code = int(end.get("code", 255))
    # A limit of the kernel ended the program only if it failed: programs survive a refused fork, or a killed child.
    ended_by_limit = bool(end.get("limits")) or not end or (code != 0 and bool(limits))
    outcome = Outcome.SIGNALLED if end.get("signal") else Outcome.EXITED
    if ended_by_limit:
        outcome = next((Outcome(limit.value) for limit in _LIMITS_BY_SEVERITY if limit in limits), outcome)
    # The agent reports a full disk and refused processes also for programs that went on.
    if outcome in (Outcome.DISK, Outcome.PROCESSES) and code == 0:
        outcome = Outcome.EXITED
    return ExecutionResult(
        outcome=outcome,
        exit_code=code if outcome in (Outcome.EXITED, Outcome.SIGNALLED) else None,
        stdout=output("stdout"),
        stderr=output("stderr"),
        result=output("result"),
        limits_hit=frozenset(limits),
        wall_s=float(end.get("wall_s", 0.0)),
        cpu_s=float(end.get("cpu_s", 0.0)),
        peak_memory_bytes=int(end.get("peak", 0)),
    )
