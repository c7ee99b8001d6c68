"""What every reward's settings share."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from roll.config.base import Section, option

__all__ = ["RewardSection", "check_pattern"]


class RewardSection(Section):
    """Settings that every component of a reward has."""

    name: str = option("", "Name of this component in metrics; its type if empty.")
    weight: float = option(
        1.0,
        "Factor of this component in the sum. With 0 it is only watched: its metrics are kept, and whether it calls an "
        "answer right or wrong does not count for accuracy.",
    )
    gate: float | None = option(
        None,
        "The whole reward is 0 unless this component's value reaches this; `true` is short for 1. Gates are asked "
        "first, and the others only where all gates pass.",
        examples=[1.0],
    )
    time_limit_s: float = option(
        5.0, "Longest time for one answer; beyond it the answer counts as wrong.", unit="s", gt=0
    )
    require_finished: bool = option(True, "Score 0 where the answer was cut off before the model ended it.")

    @field_validator("gate", mode="before", json_schema_input_type=float | bool | None)
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: 1.0, False: None}[value] if isinstance(value, bool) else value

    @property
    def needs_answer(self) -> bool:
        """Whether it compares with the prompt's reference answer, which must then not be empty."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """Whether it runs programs; its verifier is then made with `CodeSandboxes` instead of a worker pool."""
        return False

    @property
    def asks_own_judge(self) -> bool:
        """Whether it asks the run's own judge; its verifier is then made with that instead of a worker pool."""
        return False


def check_pattern(pattern: str) -> str:
    """Return `pattern`.

    Raises:
        ValueError: it is not a regular expression.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern
