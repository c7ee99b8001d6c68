"""The program that runs a candidate, and the limits on its cases, shared by `batch` and `dialogue`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll.config.rewards.code import CodeReward
from roll.rewards.code.inside.messages import Setup
from roll.rewards.code.languages import TOOL_CHAINS
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import Task
from roll.rewards.code.verdicts import MESSAGE_BYTES
from roll_sandbox import PythonCode

__all__ = ["MOST_OUTPUT_BYTES", "CandidateRun"]

_CANDIDATE = "from inside import candidate\ncandidate.main()"
_STARTING_CPU_S = 5.0
_COMPILE_CPU_S = 60.0
SHORTEST_WALL_S = 10.0
MOST_OUTPUT_BYTES = 2**26


class CandidateRun:
    """A run of one answer to one task."""

    def __init__(self, sandboxes: CodeSandboxes, task: Task, code: str, config: CodeReward, ends: float) -> None:
        """Prepare the run.

        Args:
            sandboxes: The sandboxes to run in.
            task: The task with its cases.
            code: The answer's code.
            config: The reward's settings.
            ends: The time, on the event loop's clock, at which the time for all cases of the answer is over.
        """
        self.sandboxes, self.task, self.code, self.config = sandboxes, task, code, config
        self._ends = ends
        self.max_timeouts = 1 if config.credit == "all" else 2

    def wall_s(self, cpu_s: float) -> float:
        """Return the wall time of a case with this CPU time."""
        longest = max(self.config.max_wall_s, 2.0 * cpu_s)
        return max(SHORTEST_WALL_S, min(self.config.wall_factor * cpu_s, longest))

    @property
    def left_s(self) -> float:
        """Wall time that is left for all cases of the answer."""
        return max(0.0, self._ends - asyncio.get_running_loop().time())

    def bounds(self, limits_s: Sequence[float]) -> list[tuple[float, float]]:
        """Return the CPU and wall time of each case, as the sandbox enforces them."""
        return [(cpu_s, self.wall_s(cpu_s)) for cpu_s in limits_s]

    def setup_bounds(self) -> tuple[float, float]:
        """Return the CPU and wall time of compiling and loading."""
        cpu_s = _STARTING_CPU_S + (_COMPILE_CPU_S if TOOL_CHAINS[self.task.language].compile else 0.0)
        return cpu_s, self.wall_s(cpu_s)

    def setup(self) -> Setup:
        """Return the first message to the candidate's side."""
        tools = TOOL_CHAINS[self.task.language]
        return Setup(
            source=self.code,
            file=tools.file,
            argv=list(tools.argv),
            compile=list(tools.compile),
            compile_limits={"cpu_s": _COMPILE_CPU_S, "wall_s": self.wall_s(_COMPILE_CPU_S)},
            output_bytes=self.config.max_output_bytes,
            max_timeouts=self.max_timeouts,
        )

    def candidate(self, limits_s: Sequence[float], output_bytes: int) -> PythonCode:
        """Return the program that runs the candidate; `setup` must be its first message.

        Args:
            limits_s: CPU time of each case.
            output_bytes: Most bytes of output of all cases; the bytes of messages are added.
        """
        compiling = _COMPILE_CPU_S if TOOL_CHAINS[self.task.language].compile else 0.0
        all_s = [*limits_s, compiling, _STARTING_CPU_S]
        messages = (len(limits_s) + 2) * MESSAGE_BYTES
        return PythonCode(
            source=_CANDIDATE,
            interactive=True,
            result=True,
            cpu_s=sum(all_s),
            wall_s=min(sum(map(self.wall_s, all_s)), self.left_s),
            output_bytes=min(output_bytes, MOST_OUTPUT_BYTES) + messages,
        )
