"""What the settings of all rewards have in common."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from roll.config.base import Section, option

__all__ = ["AUTO", "KEEP", "RewardSection", "check_pattern", "reasoning_left_out"]

AUTO, KEEP = "auto", "keep"


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
    reasoning: str = option(
        KEEP,
        "Which part of an answer is scored. `auto`: what follows the model's reasoning, in the format of its chat "
        "template; an answer that never ends its reasoning scores 0. `keep`: all of it. Anything else is a closing "
        "tag: what follows the last one is scored.",
        examples=["auto", "keep", "</reasoning>"],
    )

    @field_validator("gate", mode="before", json_schema_input_type=float | bool | None)
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: 1.0, False: None}[value] if isinstance(value, bool) else value

    @field_validator("reasoning")
    @classmethod
    def _is_a_tag(cls, value: str) -> str:
        if value not in (AUTO, KEEP) and (not value.strip() or value.strip().isalnum()):
            raise ValueError(f"'{value}' is not a closing tag: write auto, keep, or a tag such as </reasoning>")
        return value

    @property
    def scores_reasoning(self) -> bool:
        """Whether the verifier receives the whole answer, and drops the reasoning itself if it must."""
        return self.reasoning == KEEP

    @property
    def needs_answer(self) -> bool:
        """Whether the reward compares with the prompt's reference answer, which must then not be empty."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """Whether the reward runs programs; its verifier is then built with `CodeSandboxes`, not with a worker pool."""
        return False

    @property
    def asks_own_judge(self) -> bool:
        """Whether the reward uses the run's own judge; its verifier is then built with the judge, not with a worker
        pool.
        """
        return False


def reasoning_left_out() -> Any:
    """Return the option `reasoning` of rewards that by default score the text after the reasoning."""
    inherited = RewardSection.model_fields["reasoning"]
    return option(AUTO, inherited.description or "", examples=inherited.examples)


def check_pattern(pattern: str) -> str:
    """Return `pattern` if it is valid.

    Raises:
        ValueError: the pattern is not a regular expression.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern
