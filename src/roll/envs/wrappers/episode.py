"""Count turns and rewards of episodes, and truncate long ones."""

from __future__ import annotations

from typing import Any

from roll.envs.base import EnvWrapper, ResetResult, StepResult
from roll.errors import ConfigError
from roll.types import Content

__all__ = ["EpisodeTracking", "TimeLimit"]


class EpisodeTracking(EnvWrapper):
    """Adds the episode's number of steps and sum of rewards to `info`, with GEM's names.

    `step_counter` and `cumulative_rewards` describe this episode; after a reset, `prev_ep_step_counter` and
    `prev_ep_cumulative_rewards` describe the previous episode. This wrapper must be the outermost one.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._steps, self._rewards = 0, 0.0

    def on_reset(self, observation: Content, info: dict[str, Any]) -> ResetResult:
        before = {"prev_ep_step_counter": self._steps, "prev_ep_cumulative_rewards": self._rewards}
        self._steps, self._rewards = 0, 0.0
        return observation, {**info, "step_counter": 0, "cumulative_rewards": 0.0, **before}

    def on_step(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        self._steps += 1
        self._rewards += float(reward)
        counted = {"step_counter": self._steps, "cumulative_rewards": self._rewards}
        return observation, reward, terminated, truncated, {**info, **counted}


class TimeLimit(EnvWrapper):
    """Truncates episodes after `max_turns` steps.

    Raises:
        ConfigError: `max_turns` is below 1.
    """

    def __init__(self, env: Any, max_turns: int = 20) -> None:
        super().__init__(env)
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}.")
        self._max_turns, self._turns = max_turns, 0

    def on_reset(self, observation: Content, info: dict[str, Any]) -> ResetResult:
        self._turns = 0
        return observation, info

    def on_step(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        self._turns += 1
        return observation, reward, terminated, truncated or self._turns >= self._max_turns, info
