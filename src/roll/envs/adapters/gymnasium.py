"""Environments of the package `gymnasium`: `gym:FrozenLake-v1`. Observations are text; actions are parsed from text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from roll.envs.adapters.packages import import_package
from roll.envs.tools.json_text import MalformedJsonError, read_json
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, extract_answer
from roll.errors import ConfigError

__all__ = ["GymnasiumEnv", "make"]

_COLORS_PATTERN = re.compile(r"\x1b\[([0-9;]{0,16})m")
_MAX_ACTION_LENGTH = 1_000
_ACTIONS: dict[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("left", "none", "right"),
}
"""Names of the actions of the environments in Gymnasium, in the order of their numbers."""


class GymnasiumEnv:
    r"""Wraps a `gymnasium.Env` as an `Env`. The action is in `\boxed{…}` or `<answer>…</answer>`, or is the whole text.

    An action that cannot be parsed gets the reward `format_reward` and has no effect.

    Args:
        env: The result of `gymnasium.make`.
        observation: `render`: the environment's text rendering (render_mode `ansi`); `value`: the observation itself;
            `auto`: the text rendering if the environment has one.
        actions: Names of the actions of a discrete space, in the order of their numbers.
        format_reward: Reward of an action that cannot be parsed.
    """

    def __init__(
        self,
        env: Any,
        observation: Literal["auto", "render", "value"] = "auto",
        actions: Sequence[str] | None = None,
        format_reward: float = FORMAT_ERROR_REWARD,
    ) -> None:
        self.env = env
        self._spaces = import_package("gymnasium.spaces", "gymnasium", "this environment")
        drawn = getattr(env, "render_mode", None) == "ansi"
        if observation == "render" and not drawn:
            raise ConfigError(
                "`observation: render` requires an environment that renders text: set `render_mode: ansi`."
            )
        self._drawn = drawn and observation != "value"
        self._names = tuple(name.casefold() for name in actions or ())
        space = env.action_space
        if self._names and (not isinstance(space, self._spaces.Discrete) or len(self._names) != space.n):
            raise ConfigError(
                f"the names {list(self._names)} do not match the action space {space}: provide one name per action."
            )
        self._format_reward = format_reward
        self._state = ""

    @property
    def unwrapped(self) -> Any:
        """Gymnasium's environment inside its wrappers."""
        return self.env.unwrapped

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """See `Env`."""
        observation, info = self.env.reset(seed=seed)
        if seed is not None:
            self.env.action_space.seed(seed)
        self._state = _format_value(observation)
        return f"{self._render_observation(observation)}\n{self._describe_action_format()}", {
            **info,
            "state": self._state,
        }

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Env`."""
        answer = extract_answer(action)
        value = self._parse_action((action.strip() if answer is None else answer)[:_MAX_ACTION_LENGTH])
        if value is None:
            return (
                f"That is not a valid action.\n{self._describe_action_format()}",
                self._format_reward,
                False,
                False,
                {"state": self._state},
            )
        observation, reward, ended, cut_off, info = self.env.step(value)
        self._state = _format_value(observation)
        return (
            self._render_observation(observation),
            float(reward),
            bool(ended),
            bool(cut_off),
            {**info, "state": self._state},
        )

    def _describe_action_format(self) -> str:
        space = self.env.action_space
        if self._names:
            return f"Answer with one of {', '.join(self._names)}, in \\boxed{{}}."
        if isinstance(space, self._spaces.Discrete):
            return f"Answer with a number from {space.start} to {space.start + space.n - 1}, in \\boxed{{}}."
        return "Answer with an action." if isinstance(space, self._spaces.Text) else f"Answer with JSON for {space}."

    def _parse_action(self, text: str) -> Any:
        """Parse an action of the action space; return `None` if the text is not an action."""
        space = self.env.action_space
        if isinstance(space, self._spaces.Text):
            return text if space.contains(text) else None
        if text.casefold() in self._names:
            return self._names.index(text.casefold()) + int(space.start)
        try:
            value, end = read_json(text)
        except MalformedJsonError:
            return None
        if text[end:].strip() or isinstance(value, bool):
            return None
        try:
            action = value if isinstance(value, int) else np.asarray(value, space.dtype).reshape(space.shape)
            return action if space.contains(action) else None
        except (ValueError, TypeError, OverflowError, AttributeError):
            return None

    def _render_observation(self, observation: Any) -> str:
        if self._drawn:
            return _replace_colors(str(self.env.render())).strip()
        return _format_value(observation)

    def sample_random_action(self) -> str:
        """Return a random action of the action space."""
        value = self.env.action_space.sample()
        if self._names:
            return f"\\boxed{{{self._names[int(value - self.env.action_space.start)]}}}"
        plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        return f"\\boxed{{{plain}}}"

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _format_value(observation: Any) -> str:
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, precision=4, separator=", ", threshold=1_000)
    return str(observation)


def _replace_colors(text: str) -> str:
    """Replace terminal color codes with brackets around the colored text, since plain text has no colors."""
    return _COLORS_PATTERN.sub(lambda match: "]" if match[1] in ("", "0") else "[", text)


def make(
    name: str,
    *,
    observation: Literal["auto", "render", "value"] = "auto",
    actions: Sequence[str] | None = None,
    format_reward: float = FORMAT_ERROR_REWARD,
    **options: Any,
) -> GymnasiumEnv:
    """Build `gymnasium.make(name, **options)`, rendered as text if possible.

    Raises:
        ConfigError: The package is missing, has no environment of this name, or the environment rejects its options.
    """
    gymnasium = import_package("gymnasium", "gymnasium", f"environment 'gym:{name}'")
    try:
        modes = gymnasium.spec(name).entry_point
        if observation != "value" and "render_mode" not in options and "ansi" in _get_render_modes(gymnasium, modes):
            options["render_mode"] = "ansi"
        env = gymnasium.make(name, **options)
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise ConfigError(f"environment 'gym:{name}' cannot be created: {error}") from error
    known = _ACTIONS.get(name.rpartition("/")[2].rpartition("-v")[0])
    return GymnasiumEnv(env, observation, actions if actions is not None else known, format_reward)


def _get_render_modes(gymnasium: Any, entry_point: Any) -> Sequence[str]:
    """Return the render modes of an environment's class."""
    kind = gymnasium.envs.registration.load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return getattr(kind, "metadata", {}).get("render_modes", ())
