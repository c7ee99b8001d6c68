"""Rewards that someone else scores: a function of the user's, a task's own scorer, an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import PrivateAttr

from roll.config.base import FUNCTION, option, path_option
from roll.config.rewards.base import RewardSection, reasoning_left_out

__all__ = ["EnvironmentReward", "PythonReward", "ReasoningGymReward"]


class PythonReward(RewardSection):
    """A function of yours: `def reward(text, answer, metadata) -> float`, or one written for verl:
    `def compute_score(data_source, solution_str, ground_truth, extra_info)`, bound by name.

    An `async def` waits for many answers at once. Annotated `-> bool`, it also decides whether the task was solved,
    which accuracy counts.
    """

    type: Literal["python"] = option(..., "Kind of reward.")
    function: str | None = path_option(
        None,
        "Where it is: `package.module:function`, or a file: `path/to/file.py:function`. `null` where it is given as an "
        "object: `roll.train(config, reward=function)`.",
        examples=["my_package.rewards:score", "examples/rewards/short_answer.py:score"],
        pattern=FUNCTION,
    )
    options: dict[str, Any] = option({}, "Further keyword arguments for the function.")
    max_concurrent: int = option(64, "Answers that an `async def` waits for at once, at most.", ge=1)
    _object: Any = PrivateAttr(None)

    @property
    def given(self) -> Callable[..., Any] | None:
        """The function, as it was given as an object; `None` where it was not."""
        return self._object

    def with_object(self, function: Callable[..., Any]) -> Self:
        """Return a copy that carries this function; the resolved configuration does not include it."""
        copy = self.model_copy()
        copy._object = function
        return copy


class ReasoningGymReward(RewardSection):
    """The scorer that a reasoning-gym task brings along."""

    type: Literal["reasoning_gym"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()


class EnvironmentReward(RewardSection):
    """What the environment gave over all turns; for sources that have one."""

    type: Literal["environment"] = option(..., "Kind of reward.")
    solved_at: float = option(1.0, "The task counts as solved from this sum on.")
    require_finished: bool = option(False, "Score 0 where the last turn was cut off before the model ended it.")
