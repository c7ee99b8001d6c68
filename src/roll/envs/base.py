"""The environment protocol, the same as GEM's (arXiv 2510.01051), and the base class of wrappers.

    reset(seed) -> observation, info                        begin an episode
    step(action) -> observation, reward, terminated, truncated, info

An action is a string; an observation is a string, or a tuple of parts (`roll.types.Content`) with media. Both methods
may be `async def`. An environment does not handle lengths or tokens: the caller manages the context.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from roll.types import Content, Part, join_content

__all__ = [
    "Env",
    "EnvWrapper",
    "ResetResult",
    "StepResult",
    "await_if_needed",
    "encode_json",
    "format_observation",
    "map_result",
]

ResetResult: TypeAlias = tuple[Content, dict[str, Any]]
"""The result of `reset`: the first observation, and `info`."""

StepResult: TypeAlias = tuple[Content, float, bool, bool, dict[str, Any]]
"""The result of `step`: observation, reward, terminated, truncated, `info`."""

T = TypeVar("T")
U = TypeVar("U")


class Env(Protocol):
    """An environment that plays one episode after another; the same seed gives the same episode.

    An environment may also have these methods; a caller reports an error if a required method is missing:

    - `sample_random_action() -> str`: a random well-formed action, for testing the environment.
    - `spawn(same_state=False, **overrides) -> Env`: another environment with the same settings, changed by `overrides`;
      with `same_state`, at the same point of the same episode.
    - `close()`: release resources.
    - `unwrapped`: the environment inside all wrappers.

    Keys of `info` with a fixed meaning:

    - `info["state"]`: a string that identifies the state, for methods that compare actions in the same state (GiGPO).
    - `info["prefix"]`, `info["suffix"]`: GEM's text before and after the newest observation: see `format_observation`.
    """

    def reset(self, seed: int | None = None) -> ResetResult | Awaitable[ResetResult]:
        """Begin an episode; without a seed, derive one from the previous episodes."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Take an action. After an episode's end, `reset` must be called first."""
        ...


def format_observation(observation: Content, info: dict[str, Any]) -> Content:
    """Return the observation as the player sees it, with the prefix and suffix from `info`.

    ROLL's environments include everything in the observation. Many of GEM's environments return the board as a suffix,
    which belongs to the newest observation only.
    """
    before, after = (str(info.get(name, "")) for name in ("prefix", "suffix"))
    if isinstance(observation, str):
        return f"{before}{observation}{after}"
    return join_content([part for part in (before, observation, after) if part], separator="")


def encode_json(value: Any) -> str:
    """Encode an environment's output as JSON for another process.

    Content parts are encoded with `to_dict`, NumPy values as Python values, and unsupported values as strings.

    Raises:
        TypeError: A key of a mapping is neither a string nor a number.
        ValueError: A value contains itself.
    """
    return json.dumps(value, default=_encode_object)


def _encode_object(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_dict()
    return value.tolist() if hasattr(value, "tolist") else str(value)


class EnvWrapper:
    """Base class of wrappers around an environment, `env`. All other attributes are looked up in `env`.

    A wrapper overrides `on_reset`, `on_action` or `on_step`, which also work if the inner environment is asynchronous;
    or it overrides `reset` and `step`, as GEM's wrappers do.
    """

    shared_attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes that copies share, such as a tokenizer."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def on_reset(self, observation: Content, info: dict[str, Any]) -> ResetResult:
        """Return the first observation and `info` of an episode, changed by this wrapper."""
        return observation, info

    def on_action(self, action: str) -> str:
        """Convert the player's action to the action of the inner environment."""
        return action

    def on_step(self, action: str, result: StepResult) -> StepResult:
        """Return the inner environment's step result, changed by this wrapper.

        `action` is the player's action, before `on_action` changed it.
        """
        return result

    def reset(self, seed: int | None = None) -> Any:
        return map_result(self.env.reset(seed=seed), lambda started: self.on_reset(*started))

    def step(self, action: str) -> Any:
        return map_result(self.env.step(self.on_action(action)), lambda stepped: self.on_step(action, stepped))

    @property
    def unwrapped(self) -> Any:
        """The environment inside all wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def spawn(self, same_state: bool = False, **overrides: Any) -> Any:
        """Return a copy of this wrapper around the result of the inner environment's `spawn`; see `Env`."""
        shared: dict[int, Any] = {id(self.env): self.env.spawn(same_state=same_state, **overrides)}
        for name in self.shared_attributes:
            shared[id(getattr(self, name))] = getattr(self, name)
        # With these entries as its memo, `deepcopy` inserts the spawned environment and the shared objects instead
        # of copies.
        return copy.deepcopy(self, shared)

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # before `__init__`, for example during a copy
            raise AttributeError(name)
        return getattr(self.env, name)


def map_result(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function(value)`; if `value` is awaitable, return a coroutine that awaits `value` first."""
    if not inspect.isawaitable(value):
        return function(value)

    async def change_later() -> Any:
        changed = function(await value)
        return await changed if inspect.isawaitable(changed) else changed

    return change_later()


async def await_if_needed(value: Any) -> Any:
    """Await the value if it is awaitable, and return the result; return any other value unchanged."""
    return await value if inspect.isawaitable(value) else value
