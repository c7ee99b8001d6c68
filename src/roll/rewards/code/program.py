"""Base class of runs of a candidate: the program that runs it, and the limits on its cases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll.config.rewards.code import CodeReward
from roll.rewards.code.languages import TOOL_CHAINS
from roll.rewards.code.sandbox_programs.messages import Setup
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import Task
from roll.rewards.code.verdicts import MESSAGE_BYTES
from roll_sandbox import PythonCode

__all__ = ["MAX_OUTPUT_BYTES", "CandidateRun"]

_CANDIDATE_PROGRAM = "from sandbox_programs import candidate\ncandidate.main()"
_STARTUP_CPU_S = 5.0
_COMPILE_CPU_S = 60.0
MIN_WALL_S = 10.0
MAX_OUTPUT_BYTES = 2**26


class CandidateRun:
    """A run of one answer to one task."""

    def __init__(self, sandboxes: CodeSandboxes, task: Task, code: str, config: CodeReward, deadline_s: float) -> None:
        """Prepare the run.

        Args:
            sandboxes: The sandboxes to run in.
            task: The task with its cases.
            code: The answer's code.
            config: The reward's settings.
            deadline_s: Deadline for all cases of the answer, on the event loop's clock.
        """
        self.sandboxes, self.task, self.code, self.config = sandboxes, task, code, config
        self._deadline_s = deadline_s
        self.max_timeouts = 1 if config.credit == "all" else 2

    def compute_wall_limit_s(self, cpu_s: float) -> float:
        """Return the wall time limit of a case whose CPU time limit is `cpu_s`."""
        longest = max(self.config.max_wall_s, 2.0 * cpu_s)
        return max(MIN_WALL_S, min(self.config.wall_factor * cpu_s, longest))

    @property
    def remaining_s(self) -> float:
        """Seconds that are left until the deadline for all cases of the answer."""
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def compute_case_limits(self, limits_s: Sequence[float]) -> list[tuple[float, float]]:
        """Return the CPU and wall time limit of each case, given the CPU time limits."""
        return [(cpu_s, self.compute_wall_limit_s(cpu_s)) for cpu_s in limits_s]

    def compute_setup_limits(self) -> tuple[float, float]:
        """Return the CPU and wall time limit for compiling and loading the code."""
        cpu_s = _STARTUP_CPU_S + (_COMPILE_CPU_S if TOOL_CHAINS[self.task.language].compile else 0.0)
        return cpu_s, self.compute_wall_limit_s(cpu_s)

    def make_setup(self) -> Setup:
        """Return the first message to the candidate's side."""
        tools = TOOL_CHAINS[self.task.language]
        return Setup(
            source=self.code,
            file=tools.file,
            argv=list(tools.argv),
            compile=list(tools.compile),
            compile_limits={"cpu_s": _COMPILE_CPU_S, "wall_s": self.compute_wall_limit_s(_COMPILE_CPU_S)},
            output_bytes=self.config.max_output_bytes,
            max_timeouts=self.max_timeouts,
        )

    def make_program(self, limits_s: Sequence[float], output_bytes: int) -> PythonCode:
        """Return the program that runs the candidate; the message of `make_setup` must be sent to it first.

        Args:
            limits_s: Limit on the CPU time of each case.
            output_bytes: Maximum bytes of output of all cases; the bytes of messages are added.
        """
        compiling = _COMPILE_CPU_S if TOOL_CHAINS[self.task.language].compile else 0.0
        all_s = [*limits_s, compiling, _STARTUP_CPU_S]
        messages = (len(limits_s) + 2) * MESSAGE_BYTES
        return PythonCode(
            source=_CANDIDATE_PROGRAM,
            interactive=True,
            result=True,
            cpu_s=sum(all_s),
            wall_s=min(sum(map(self.compute_wall_limit_s, all_s)), self.remaining_s),
            output_bytes=min(output_bytes, MAX_OUTPUT_BYTES) + messages,
        )
