"""A function of the user's: `def reward(text, answer, metadata) -> float`, given by import path or by file.

A coroutine function is asked for many answers at once, `max_concurrent` at most. Annotated `-> bool`, a function says
whether the task was solved; a `Judgement` (annotated so) also gives a verdict; a plain number does neither.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll.config.data import DataConfig
from roll.config.rewards import PythonReward
from roll.errors import ConfigError, RewardInfraError, short
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.rewards.given_function import GivenFunction, function_of
from roll.types import Rollout
from roll.user_code import load_function

__all__ = ["await_reward", "call_reward", "check_reward_functions", "load_reward", "python_verifier"]


def load_reward(path: str | GivenFunction) -> Callable[..., Any]:
    """Import the function, see `roll.user_code.load_function`; one that was given as an object is unpacked."""
    return path.load() if isinstance(path, GivenFunction) else load_function(path, "reward function")


def check_reward_functions(data: Iterable[DataConfig]) -> None:
    """Import the functions that a configuration's rewards name, before anything is started.

    Raises:
        ConfigError: one cannot be imported.
    """
    for reward in (reward for entry in data for reward in entry.reward):
        if isinstance(reward, PythonReward) and reward.given is None:
            load_reward(function_of(reward))


def call_reward(
    path: str | GivenFunction, text: str, answer: str, metadata: Mapping[str, Any], options: dict[str, Any]
) -> Judgement:
    """Call it, also where it is a coroutine function, and check what it returns.

    Raises:
        RewardInfraError: it did not return a finite number, a truth value, or a `Judgement`.
    """
    result = load_reward(path)(text, answer, dict(metadata), **options)
    if inspect.isawaitable(result):  # of a function that does not look like a coroutine function
        result = asyncio.run(_wait(result))
    return _judgement(path, result)


async def await_reward(
    path: str | GivenFunction, text: str, answer: str, metadata: Mapping[str, Any], options: dict[str, Any]
) -> Judgement:
    """See `call_reward`; waits on the running loop."""
    return _judgement(path, await load_reward(path)(text, answer, dict(metadata), **options))


def _judgement(path: str | GivenFunction, result: object) -> Judgement:
    if isinstance(result, Judgement):
        _finite(path, result.value)
        return result
    value = _finite(path, result)
    if _decides(load_reward(path)):
        return Judgement(value=value, verdict="correct" if value else "wrong", correct=bool(value))
    return Judgement(value=value, verdict=f"{value:g}")


async def _wait(result: Any) -> Any:
    return await result


def _finite(path: object, value: object) -> float:
    # NumPy's truth values and torch's scalars are numbers to everyone but `numbers`
    is_number = isinstance(value, numbers.Real) or (hasattr(value, "item") and hasattr(value, "__float__"))
    if not is_number:
        raise RewardInfraError(
            f"reward function '{path}' returned {short(value)}: return a number, a truth value, or a Judgement."
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RewardInfraError(f"reward function '{path}' returned {short(value)}: return one number.") from None
    if not math.isfinite(number):
        raise RewardInfraError(f"reward function '{path}' returned {number}: return a finite number.")
    return number


def _decides(function: Callable[..., Any]) -> bool:
    """Whether its annotation promises a truth value or a `Judgement`."""
    try:
        promised = inspect.signature(function).return_annotation
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return promised in (bool, Judgement, "bool", "Judgement")


def python_verifier(config: PythonReward, pool: WorkerPool) -> Verifier:
    """Imports the function at once, so that a mistake shows before training; calls it in the pool.

    Raises:
        ConfigError: it cannot be imported, or does not take the arguments it will get.
    """
    source = function_of(config)
    function = load_reward(source)
    try:
        inspect.signature(function).bind("text", "answer", {}, **config.options)
    except TypeError as error:
        options = "".join(f", {name}=…" for name in config.options)
        hint = " It is a class: name a function, or an instance of it." if inspect.isclass(function) else ""
        raise ConfigError(
            f"reward function '{source}' cannot be called as (text, answer, metadata{options}): {error}.{hint}"
        ) from None
    except ValueError:
        pass  # a built-in without a signature: its first call will tell

    places = asyncio.Semaphore(config.max_concurrent)
    runs_in = source.runs_in(pool) if isinstance(source, GivenFunction) else pool

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text, rollout.prompt.answer, dict(rollout.prompt.metadata), config.options)
        if not inspect.iscoroutinefunction(function):
            return await in_pool(runs_in, call_reward, source, *arguments, time_limit_s=config.time_limit_s)
        async with places:
            return await in_pool(runs_in, await_reward, source, *arguments, time_limit_s=config.time_limit_s)

    return Verifier(judge=judge, decides=_decides(function))
