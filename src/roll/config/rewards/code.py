"""Rewards for programs."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import option
from roll.config.rewards.base import RewardSection, reasoning_left_out

__all__ = ["LANGUAGES", "CodeReward"]

LANGUAGES = ("python", "bash", "javascript", "cpp")


class CodeReward(RewardSection):
    """Runs the answer's program in a sandbox on the test cases of its prompt: see docs/code-rewards.md."""

    type: Literal["code"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()
    language: Literal["python", "bash", "javascript", "cpp"] = option(
        "python", "Language of the answers, where the prompt's tests do not name one."
    )
    tests_key: str = option("tests", "Column with the tests.", min_length=1)
    entry_point_key: str = option("entry_point", "Column with the name of the function under test, where there is one.")
    setup_key: str = option("setup", "Column with Python source that runs before the tests, where there is one.")
    language_key: str = option("language", "Column with the answer's language, where there is one.")
    modules: list[str] = option(["solution"], "Names under which pytest files import the answer.", min_length=1)
    credit: Literal["all", "share"] = option("all", "1 where every case passes and else 0, or the share that passes.")
    compare: Literal["lines", "tokens", "exact"] = option(
        "lines",
        "How printed output is compared: line by line without white space at ends of lines and text, word by word, or "
        "byte by byte.",
    )
    tolerance: float = option(
        0.0, "Difference, relative or absolute, up to which floating-point results are equal.", ge=0, lt=1
    )
    min_cpu_s: float = option(2.0, "Shortest limit on the CPU time of a case.", unit="s", gt=0)
    max_cpu_s: float = option(
        30.0, "Longest limit on the CPU time of a case; in force until a right answer shows its time.", unit="s", gt=0
    )
    cpu_factor: float = option(
        1.5, "The limit in between, as a multiple of the CPU time of the slowest right answer to the case.", ge=1
    )
    wall_factor: float = option(
        20.0,
        "Limit on a case's wall time, as a multiple of its limit on CPU time, and at least 10 s; stops programs that "
        "sleep.",
        ge=1,
    )
    max_wall_s: float = option(
        60.0,
        "Longest limit on the wall time of a case, or twice its limit on CPU time where that is longer.",
        unit="s",
        gt=0,
    )
    time_limit_s: float = option(
        180.0, "Longest wall time of all cases of an answer; beyond it the answer counts as wrong.", unit="s", gt=0
    )
    max_code_bytes: int = option(2**16, "Longest program; a longer one counts as wrong.", unit="bytes", ge=1)
    max_output_bytes: int = option(
        2**20, "Most that a program may print in one case; beyond it the case fails.", unit="bytes", ge=1
    )
    case_metrics: int = option(8, "Keep a metric for each of the first N cases.", ge=0)

    @model_validator(mode="after")
    def _range(self) -> CodeReward:
        if self.max_cpu_s < self.min_cpu_s:
            raise ValueError(f"max_cpu_s {self.max_cpu_s} is below min_cpu_s {self.min_cpu_s}")
        return self

    @property
    def needs_sandbox(self) -> bool:
        """See the base class."""
        return True
