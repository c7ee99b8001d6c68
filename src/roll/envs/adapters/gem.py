"""Environments of the package `gem-llm` (arXiv 2510.01051): `gem:game:Sudoku-v0-easy`.

They already follow the protocol; the adapter only provides a separate random state for each environment.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from roll.envs.adapters.packages import RandomState, import_package
from roll.errors import ConfigError
from roll.registry import did_you_mean

__all__ = ["GemEnv", "make"]


class GemEnv:
    """Wraps a `gem.Env` as an `Env`; all other attributes are looked up in the inner environment."""

    def __init__(self, env: Any, randomness: RandomState) -> None:
        self.env = env
        self._randomness = randomness

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # before `__init__`, for example during a copy
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        """GEM's environment inside its wrappers."""
        return self.env.unwrapped

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """See `Env`."""
        self._randomness.seed(seed)
        with self._randomness.activate():
            return self.env.reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Env`."""
        with self._randomness.activate():
            observation, reward, ended, cut_off, info = self.env.step(action)
        return observation, float(reward), bool(ended), bool(cut_off), info

    def sample_random_action(self) -> str:
        """Return a random action from GEM."""
        with self._randomness.activate():
            return self.env.sample_random_action()

    def spawn(self, same_state: bool = False, **options: Any) -> GemEnv:
        """Return another environment with the same settings, in the same state if `same_state` is true."""
        randomness = copy.copy(self._randomness) if same_state else RandomState()
        with randomness.activate():
            return GemEnv(self.env.spawn(same_state=same_state, **options), randomness)


def make(name: str, **options: Any) -> GemEnv:
    """Build `gem.make(name, **options)`.

    Raises:
        ConfigError: The package is missing, or it has no environment of this name.
    """
    gem = import_package("gem", "gem-llm", f"environment 'gem:{name}'")
    randomness = RandomState()
    try:
        with randomness.activate():  # environments already draw random numbers in their constructor
            return GemEnv(gem.make(name, **options), randomness)
    except (ValueError, ImportError) as error:
        known = list(import_module("gem.envs.registration").ENV_REGISTRY)
        hint = "" if name in known else did_you_mean(name, known)
        raise ConfigError(f"environment 'gem:{name}' cannot be created: {error}{hint}") from error
