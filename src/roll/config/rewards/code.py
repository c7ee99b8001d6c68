"""Rewards for programs."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import option
from roll.config.rewards.base import RewardSection, build_auto_reasoning_option

__all__ = ["LANGUAGES", "CodeReward"]

LANGUAGES = ("python", "bash", "javascript", "cpp")


class CodeReward(RewardSection):
    """Runs the answer's program in a sandbox on the prompt's test cases (see docs/code-rewards.md)."""

    type: Literal["code"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    language: Literal["python", "bash", "javascript", "cpp"] = option(
        "python", "Language of the answers, if the prompt's tests do not name one."
    )
    tests_key: str = option("tests", "Column with the tests.", min_length=1)
    entry_point_key: str = option("entry_point", "Column with the name of the function under test; rows may omit it.")
    setup_key: str = option("setup", "Column with Python source that runs before the tests; rows may omit it.")
    language_key: str = option("language", "Column with the answer's language; rows may omit it.")
    modules: list[str] = option(["solution"], "Names under which pytest files import the answer.", min_length=1)
    credit: Literal["all", "share"] = option(
        "all", "`all`: 1 if every case passes, otherwise 0. `share`: the fraction of cases that pass."
    )
    compare: Literal["lines", "tokens", "exact"] = option(
        "lines",
        "How printed output is compared. `lines`: line by line, ignoring whitespace at the end of lines and of the "
        "output. `tokens`: word by word. `exact`: byte by byte.",
    )
    tolerance: float = option(
        0.0, "Relative or absolute difference up to which floating-point results are treated as equal.", ge=0, lt=1
    )
    min_cpu_s: float = option(2.0, "Minimum CPU-time limit of a case.", unit="s", gt=0)
    max_cpu_s: float = option(
        30.0,
        "Maximum CPU-time limit of a case. It applies until a correct answer to the case is known.",
        unit="s",
        gt=0,
    )
    cpu_factor: float = option(
        1.5,
        "A case's CPU-time limit is this factor times the time of the slowest correct answer, clamped to "
        "[`min_cpu_s`, `max_cpu_s`].",
        ge=1,
    )
    wall_factor: float = option(
        20.0,
        "A case's wall-time limit is this factor times its CPU-time limit, but at least 10 s. The wall-time limit "
        "stops programs that sleep.",
        ge=1,
    )
    max_wall_s: float = option(
        60.0,
        "Maximum wall-time limit of a case, or twice the CPU-time limit if that is longer.",
        unit="s",
        gt=0,
    )
    time_limit_s: float = option(
        180.0,
        "Total wall-time limit of an answer's test cases; an answer that exceeds it is treated as incorrect.",
        unit="s",
        gt=0,
    )
    max_code_bytes: int = option(
        2**16, "Maximum size of a program; a larger program is treated as incorrect.", unit="bytes", ge=1
    )
    max_output_bytes: int = option(
        2**20,
        "Maximum size of a program's output in one case; a case with a larger output fails.",
        unit="bytes",
        ge=1,
    )
    case_metrics: int = option(8, "Number of cases, from the first, that have a separate metric.", ge=0)

    @model_validator(mode="after")
    def _check_cpu_limits(self) -> CodeReward:
        if self.max_cpu_s < self.min_cpu_s:
            raise ValueError(f"max_cpu_s must be >= min_cpu_s, got {self.max_cpu_s} and {self.min_cpu_s}")
        return self

    @property
    def needs_sandbox(self) -> bool:
        """Always true: the answer's program runs in a sandbox."""
        return True
