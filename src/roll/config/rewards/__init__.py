"""The settings of rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import Field

from roll.config.rewards.adaptive import AdaptiveLimit, PooledReward
from roll.config.rewards.base import RewardSection, check_pattern
from roll.config.rewards.code import CodeReward
from roll.config.rewards.external import EnvironmentReward, PythonReward, ReasoningGymReward
from roll.config.rewards.instructions import FormatReward, InstructionsReward
from roll.config.rewards.models import JudgeReward, RewardModelReward
from roll.config.rewards.remote import RemoteReward
from roll.config.rewards.text import (
    ChoiceReward,
    ExactReward,
    LengthPenalty,
    MathReward,
    RegexReward,
    RepetitionPenalty,
    ShortAnswerReward,
)
from roll.config.rewards.visual import BoxReward, EditDistanceReward, PointReward
from roll.extensions import ExtensibleRegistry

__all__ = [
    "INSTALLED_REWARDS",
    "AdaptiveLimit",
    "BoxReward",
    "ChoiceReward",
    "CodeReward",
    "EditDistanceReward",
    "EnvironmentReward",
    "ExactReward",
    "FormatReward",
    "InstructionsReward",
    "JudgeReward",
    "LengthPenalty",
    "MathReward",
    "PointReward",
    "PooledReward",
    "PythonReward",
    "ReasoningGymReward",
    "RegexReward",
    "RemoteReward",
    "RepetitionPenalty",
    "RewardConfig",
    "RewardList",
    "RewardModelReward",
    "RewardSection",
    "ShortAnswerReward",
    "check_pattern",
    "expand_rewards",
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
    | BoxReward
    | PointReward
    | EditDistanceReward
    | RepetitionPenalty
    | LengthPenalty
    | InstructionsReward
    | FormatReward
    | JudgeReward
    | RewardModelReward
    | RemoteReward,
    Field(discriminator="type"),
]
RewardList: TypeAlias = list[RewardConfig]
_BUILT_IN_TYPES = {get_args(each.model_fields["type"].annotation)[0] for each in get_args(get_args(RewardConfig)[0])}
INSTALLED_REWARDS: ExtensibleRegistry[Callable[..., Any]] = ExtensibleRegistry("reward", {}, group="roll.rewards")
"""Reward functions that installed packages register; `type: NAME` is short for `type: python` with their function."""


def expand_rewards(value: Any) -> Any:
    """Expand the short forms of a reward to a list of sections: `math` and `{type: math}` become `[{type: math}]`.

    Types of installed rewards (`INSTALLED_REWARDS`) become rewards of type `python`.
    """
    if value == []:
        raise ValueError("the list is empty: add at least one reward, such as `math`")
    entries = value if isinstance(value, list) else [value]
    return [_with_function({"type": entry} if isinstance(entry, str) else entry) for entry in entries]


def _with_function(entry: Any) -> Any:
    name = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(name, str) or ":" in name or name in _BUILT_IN_TYPES or name not in INSTALLED_REWARDS:
        return entry
    return {**entry, "type": "python", "function": INSTALLED_REWARDS.path(name)}
