"""A penalty for actions without the required format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.envs.base import EnvWrapper, StepResult
from roll.errors import ConfigError

__all__ = ["FormatPenalty"]


class FormatPenalty(EnvWrapper):
    r"""Subtracts `penalty` from an action's reward unless the action has each `required` string exactly once, in order.

    The environment still receives the action; `info["well_formed"]` has the result of the check.

    Args:
        env: The environment.
        penalty: The penalty, at least 0.
        required: Strings such as `("<think>", "</think>", "<answer>", "</answer>")`; by default one `\boxed{`.

    Raises:
        ConfigError: The penalty is negative, or `required` is empty.
    """

    def __init__(self, env: Any, penalty: float = 0.1, required: Sequence[str] = ("\\boxed{",)) -> None:
        super().__init__(env)
        if penalty < 0:
            raise ConfigError(f"penalty must be >= 0, because it is subtracted from the reward, got {penalty}.")
        if isinstance(required, str) or not required or not all(required):
            raise ConfigError(f"required must be a list of strings that an action must contain, got {required!r}.")
        self._penalty, self._required = penalty, tuple(required)

    def on_step(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        places = [action.find(text) for text in self._required]
        once = all(action.find(text, place + 1) < 0 for text, place in zip(self._required, places, strict=True))
        well_formed = once and min(places) >= 0 and places == sorted(places)
        reward = float(reward) - (0.0 if well_formed else self._penalty)
        return observation, reward, terminated, truncated, {**info, "well_formed": well_formed}
