"""Rewards with an external scorer: a user-defined function, the scorer of a task, or an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import PrivateAttr

from roll.config.base import FUNCTION_PATTERN, option, path_option
from roll.config.rewards.adaptive import PooledReward
from roll.config.rewards.base import RewardSection, build_auto_reasoning_option

__all__ = ["EnvironmentReward", "PythonReward", "ReasoningGymReward"]


class PythonReward(PooledReward):
    """Your own function: `def reward(text, answer, metadata) -> float`, or a reward function of verl: `def
    compute_score(data_source, solution_str, ground_truth, extra_info)`, whose arguments are passed by name.

    An `async def` function can score many answers concurrently. A function with the annotation `-> bool` also decides
    whether the task was solved, for the accuracy.
    """

    type: Literal["python"] = option(..., "Reward type.")
    function: str | None = path_option(
        None,
        "Import path of the function: `package.module:function` or `path/to/file.py:function`. `null` if the "
        "function is passed as an object: `roll.train(config, reward=function)`.",
        examples=["my_package.rewards:score", "examples/rewards/short_answer.py:score"],
        pattern=FUNCTION_PATTERN,
    )
    options: dict[str, Any] = option({}, "Additional keyword arguments of the function.")
    max_concurrent: int = option(64, "Maximum number of concurrent calls to an `async def` function.", ge=1)
    _object: Any = PrivateAttr(None)

    @property
    def passed_function(self) -> Callable[..., Any] | None:
        """The function that was passed as a Python object; otherwise `None`."""
        return self._object

    def with_object(self, function: Callable[..., Any]) -> Self:
        """Return a copy with a function as a Python object, which the resolved configuration does not include."""
        copy = self.model_copy()
        copy._object = function
        return copy


class ReasoningGymReward(PooledReward):
    """The scorer of a reasoning-gym task."""

    type: Literal["reasoning_gym"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()


class EnvironmentReward(RewardSection):
    """The sum of the environment's rewards over all turns; for sources with an environment."""

    type: Literal["environment"] = option(..., "Reward type.")
    solved_at: float = option(1.0, "The task is solved if the sum is at least this value.")
    require_finished: bool = option(False, "Whether an episode whose last turn was truncated gets a reward of 0.")
