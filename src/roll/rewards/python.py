"""A function of the user's: `def reward(text, answer, metadata) -> float`, given by import path."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from roll.config.rewards import PythonReward
from roll.errors import ConfigError
from roll.protocols import WorkerPool
from roll.registry import import_object
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = ["call_reward", "load_reward", "python_verifier"]


@functools.cache
def load_reward(path: str) -> Callable[..., Any]:
    """Import the function; modules in the current directory are found.

    Raises:
        ConfigError: it cannot be imported or cannot be called with `(text, answer, metadata)`.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    function = import_object(path)
    if not callable(function):
        raise ConfigError(f"reward function '{path}' is a {type(function).__name__}, not a function.")
    return function


def call_reward(
    path: str, text: str, answer: str, metadata: Mapping[str, Any], options: dict[str, Any]
) -> float:
    """Call it, also where it is a coroutine function, and check what it returns.

    Raises:
        ConfigError: it did not return a finite number.
    """
    result = load_reward(path)(text, answer, dict(metadata), **options)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    try:
        value = float(result)
    except (TypeError, ValueError):
        raise ConfigError(f"reward function '{path}' returned {result!r}, expected a number.") from None
    if not math.isfinite(value):
        raise ConfigError(f"reward function '{path}' returned {value}, expected a finite number.")
    return value


async def _wait(result: Any) -> Any:
    return await result


def python_verifier(config: PythonReward, pool: WorkerPool) -> Verifier:
    """Imports the function at once, so that a mistake shows before training; calls it in the pool.

    Raises:
        ConfigError: it cannot be imported, or does not take the arguments it will get.
    """
    try:
        inspect.signature(load_reward(config.function)).bind("text", "answer", {}, **config.options)
    except TypeError as error:
        raise ConfigError(
            f"reward function '{config.function}' cannot be called as (text, answer, metadata"
            f"{''.join(f', {name}=…' for name in config.options)}): {error}."
        ) from None
    except ValueError:
        pass  # a built-in without a signature: its first call will tell

    async def verify(rollout: Rollout) -> Judgement:
        value = await in_pool(
            pool,
            call_reward,
            config.function,
            rollout.text,
            rollout.prompt.answer,
            dict(rollout.prompt.metadata),
            config.options,
            time_limit_s=config.time_limit_s,
        )
        return Judgement(value=value, verdict=f"{value:g}")

    return verify
