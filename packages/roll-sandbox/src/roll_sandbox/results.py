"""Conversion of an agent's report of a program's end to a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll_sandbox.types import ExecutionResult, Limit, Outcome

__all__ = ["is_end", "result_of"]

_SEVERITY = (Limit.MEMORY, Limit.CPU_TIME, Limit.WALL_TIME, Limit.OUTPUT, Limit.FILE_SIZE, Limit.DISK, Limit.PROCESSES)
_NAMES = [limit.value for limit in Limit]


_MOST = 2**62


def is_end(end: object) -> bool:
    """Return whether `end` is a well-formed end for `result_of`; it comes from an agent amid hostile code."""
    if not isinstance(end, dict):
        return False
    limits = [end.get(name, ()) for name in ("limits", "counted")]
    numbers = [end.get(name, 0) for name in ("wall_s", "cpu_s")]
    wholes = [end.get(name, 0) for name in ("code", "signal", "peak")]
    return (
        all(isinstance(each, list | tuple) and all(name in _NAMES for name in each) for each in limits)
        and all(type(each) in (int, float) and 0 <= each <= _MOST for each in numbers)
        and all(type(each) is int and -_MOST <= each <= _MOST for each in wholes)
    )


def result_of(
    end: Mapping[str, Any], counted: Iterable[Limit] = (), output: Callable[[str], bytes] = lambda _: b""
) -> ExecutionResult:
    """Convert an agent's report of a program's end to a result.

    Args:
        end: the agent's report.
        counted: limits that the kernel has enforced.
        output: returns all output of a stream.
    """
    limits = {*counted, *(Limit(name) for name in end.get("limits", ()))}
    code = int(end.get("code", 255))
    ended_by_limit = bool(end.get("limits")) or not end or (code != 0 and bool(limits))
    outcome = Outcome.SIGNALLED if end.get("signal") else Outcome.EXITED
    if ended_by_limit:
        outcome = next((Outcome(limit.value) for limit in _SEVERITY if limit in limits), outcome)
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
