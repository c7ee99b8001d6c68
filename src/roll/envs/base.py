"""The environment protocol, which is GEM's (arXiv 2510.01051), and wrappers.

    reset(seed) -> observation, info                        begin an episode
    step(action) -> observation, reward, terminated, truncated, info

An action is a text; an observation is a text, or a tuple of parts (`roll.types.Content`) with media. Both methods may
be `async def`. An environment knows nothing about lengths or tokens: the caller manages the context.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from roll.types import Content, Part, joined_content

__all__ = ["Env", "EnvWrapper", "Started", "Stepped", "as_json", "awaited", "shown", "then"]

Started: TypeAlias = tuple[Content, dict[str, Any]]
"""The result of `reset`: the first observation, and information."""

Stepped: TypeAlias = tuple[Content, float, bool, bool, dict[str, Any]]
"""The result of `step`: observation, reward, terminated, truncated, information."""

T = TypeVar("T")
U = TypeVar("U")


class Env(Protocol):
    """One episode after another; equal seeds give equal episodes.

    An environment may also have these methods; a caller reports clearly if a required one is missing:

    - `sample_random_action() -> str`: a random well-formed action, for trying out the environment.
    - `spawn(same_state=False, **overrides) -> Env`: another environment with the same settings, changed by `overrides`;
      with `same_state`, in the middle of the same episode.
    - `close()`: release resources.
    - `unwrapped`: the environment inside all wrappers.

    Keys of the information with a fixed meaning:

    - `info["state"]`: names the state, for methods that compare actions taken in the same state (GiGPO).
    - `info["prefix"]`, `info["suffix"]`: GEM's texts around the newest observation only: see `shown`.
    """

    def reset(self, seed: int | None = None) -> Started | Awaitable[Started]:
        """Begin an episode; without a seed, derive one from the episodes before."""
        ...

    def step(self, action: str) -> Stepped | Awaitable[Stepped]:
        """Take an action. After an episode's end, `reset` must be called first."""
        ...


def shown(observation: Content, info: dict[str, Any]) -> Content:
    """Return the observation as the player sees it, with the prefix and suffix of `info`.

    ROLL's own environments put everything into the observation. Many of GEM's environments return the board as a
    suffix, which belongs to the newest observation only.
    """
    before, behind = (str(info.get(name, "")) for name in ("prefix", "suffix"))
    if isinstance(observation, str):
        return f"{before}{observation}{behind}"
    return joined_content([part for part in (before, observation, behind) if part], between="")


def as_json(value: Any) -> str:
    """Encode an environment's output for another process: content parts as `to_dict` writes them, NumPy values as
    Python values, and values that JSON lacks as text.

    Raises:
        TypeError: The key of a mapping is neither text nor a number.
        ValueError: A value contains itself.
    """
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_dict()
    return value.tolist() if hasattr(value, "tolist") else str(value)


class EnvWrapper:
    """An environment that changes another one, stored as `env`; all other attributes are the inner environment's.

    A wrapper overrides `on_reset`, `on_action` or `on_step`, whether the inner environment is asynchronous or not; or
    it overrides `reset` and `step`, as GEM's wrappers do.
    """

    not_copied: ClassVar[tuple[str, ...]] = ()
    """Attributes that copies share, such as a tokenizer."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def on_reset(self, observation: Content, info: dict[str, Any]) -> Started:
        """Change the first observation and information of an episode."""
        return observation, info

    def on_action(self, action: str) -> str:
        """Change the action for the inner environment."""
        return action

    def on_step(self, action: str, stepped: Stepped) -> Stepped:
        """Change the inner environment's result for `action`, which is as the player wrote it."""
        return stepped

    def reset(self, seed: int | None = None) -> Any:
        return then(self.env.reset(seed=seed), lambda started: self.on_reset(*started))

    def step(self, action: str) -> Any:
        return then(self.env.step(self.on_action(action)), lambda stepped: self.on_step(action, stepped))

    @property
    def unwrapped(self) -> Any:
        """The environment inside all wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def spawn(self, same_state: bool = False, **overrides: Any) -> Any:
        """Spawn another inner environment (see `Env`), in a copy of this wrapper."""
        shared: dict[int, Any] = {id(self.env): self.env.spawn(same_state=same_state, **overrides)}
        for name in self.not_copied:
            shared[id(getattr(self, name))] = getattr(self, name)
        return copy.deepcopy(self, shared)

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # before `__init__`, for example during a copy
            raise AttributeError(name)
        return getattr(self.env, name)


def then(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `change(value)`, or a coroutine of it if `value` is awaitable."""
    if not inspect.isawaitable(value):
        return change(value)

    async def later() -> Any:
        changed = change(await value)
        return await changed if inspect.isawaitable(changed) else changed

    return later()


async def awaited(value: Any) -> Any:
    """Return the value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value
