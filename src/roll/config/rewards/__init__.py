"""Rewards: how answers are scored."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from roll.config.rewards.base import RewardSection, check_pattern
from roll.config.rewards.code import CodeReward
from roll.config.rewards.form import FormatReward, InstructionsReward
from roll.config.rewards.models import JudgeReward, RewardModelReward
from roll.config.rewards.own import EnvironmentReward, PythonReward, ReasoningGymReward
from roll.config.rewards.text import (
    ChoiceReward,
    ExactReward,
    LengthPenalty,
    MathReward,
    RegexReward,
    RepetitionPenalty,
    ShortAnswerReward,
)

__all__ = [
    "ChoiceReward",
    "CodeReward",
    "EnvironmentReward",
    "ExactReward",
    "FormatReward",
    "InstructionsReward",
    "JudgeReward",
    "LengthPenalty",
    "MathReward",
    "PythonReward",
    "ReasoningGymReward",
    "RegexReward",
    "RepetitionPenalty",
    "RewardConfig",
    "RewardList",
    "RewardModelReward",
    "RewardSection",
    "ShortAnswerReward",
    "as_reward_list",
    "check_pattern",
]


RewardConfig = Annotated[
    CodeReward
    | MathReward
    | ExactReward
    | RegexReward
    | PythonReward
    | ReasoningGymReward
    | EnvironmentReward
    | ChoiceReward
    | ShortAnswerReward
    | RepetitionPenalty
    | LengthPenalty
    | InstructionsReward
    | FormatReward
    | JudgeReward
    | RewardModelReward,
    Field(discriminator="type"),
]
RewardList: TypeAlias = list[RewardConfig]


def as_reward_list(value: Any) -> Any:
    """Expand `math` and `{type: math}`, which are short for `[{type: math}]`."""
    if value == []:
        raise ValueError("the list is empty: name at least one reward, such as `math`")
    entries = value if isinstance(value, list) else [value]
    return [{"type": entry} if isinstance(entry, str) else entry for entry in entries]
