"""GEM's protocol of an environment (arXiv 2510.01051), and the registry of those shipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from roll.errors import ConfigError, DataError
from roll.registry import Registry, load_function

__all__ = ["ENVS", "Env", "make"]


class Env(Protocol):
    """One episode after another. Text in, text out; the same seed gives the same episode."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode.

        Returns:
            The first observation, and information. `info["state"]`, where it is given, names the state for methods that
            compare actions taken in the same one (GiGPO).
        """
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act.

        Returns:
            Observation, reward, whether the task ended, whether it was cut off, information.
        """
        ...


ENVS: Registry[type[Env]] = Registry("environment", {"guess_number": "roll.envs.guess_number:GuessNumber"})


def make(name: str, options: Mapping[str, Any]) -> Env:
    """Build an environment: one that is shipped, or the user's own, named `package.module:Class` or `file.py:Class`.

    Raises:
        ConfigError: there is none of this name, or it is no environment.
        DataError: it refuses the options.
    """
    kind: Callable[..., Env] = load_function(name, "environment") if ":" in name else ENVS.get(name)
    missing = [method for method in ("reset", "step") if not callable(getattr(kind, method, None))]
    if isinstance(kind, type) and missing:
        raise ConfigError(f"environment '{name}' has no method {' and no '.join(map(repr, missing))}: see GEM's `Env`.")
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise DataError(f"environment '{name}' refuses its options {dict(options)}: {error}") from error
