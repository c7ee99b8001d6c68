"""A user's function as a reward: `def reward(text, answer, metadata) -> float`, given by import path or by file.

Functions written for verl (`data_source, solution_str, ground_truth, extra_info`) are called by name: see `signatures`.

A coroutine function is called for many answers at once, at most `max_concurrent`. A function annotated `-> bool`
decides whether the task was solved; a `Judgement` (annotated so) also has a verdict; a plain number does neither.
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
from roll.errors import RewardInfraError, short
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.rewards.pickled_function import PickledFunction, function_of
from roll.rewards.signatures import bound, check_signature, given_values
from roll.types import Rollout
from roll.user_code import load_function

__all__ = ["await_reward", "call_reward", "check_reward_functions", "load_reward", "python_verifier"]


def load_reward(path: str | PickledFunction) -> Callable[..., Any]:
    """Import the function, see `roll.user_code.load_function`; a function that was passed as an object is unpickled."""
    return path.load() if isinstance(path, PickledFunction) else load_function(path, "reward function")


def check_reward_functions(data: Iterable[DataConfig]) -> None:
    """Import the functions that a configuration's rewards name, before anything is started.

    Raises:
        ConfigError: A function cannot be imported.
    """
    for reward in (reward for entry in data for reward in entry.reward):
        if isinstance(reward, PythonReward) and reward.given is None:
            load_reward(function_of(reward))


def call_reward(path: str | PickledFunction, values: Mapping[str, Any], options: dict[str, Any]) -> Judgement:
    """Call the function, which may be a coroutine function, and check its result.

    Args:
        path: The function's path.
        values: The values that the function may receive, by name.
        options: Further keyword arguments.

    Raises:
        RewardInfraError: The function did not return a finite number, a bool, or a `Judgement`.
    """
    function = load_reward(path)
    arguments, named = bound(function, values, options)
    result = function(*arguments, **named)
    if inspect.isawaitable(result):  # returned by a function that is not declared as a coroutine function
        result = asyncio.run(_wait(result))
    return _judgement(path, result)


async def await_reward(path: str | PickledFunction, values: Mapping[str, Any], options: dict[str, Any]) -> Judgement:
    """Call a coroutine function: see `call_reward`. Waits on the running loop."""
    function = load_reward(path)
    arguments, named = bound(function, values, options)
    return _judgement(path, await function(*arguments, **named))


def _judgement(path: str | PickledFunction, result: object) -> Judgement:
    if isinstance(result, Judgement):
        _finite(path, result.value)
        return result
    if isinstance(result, Mapping) and "score" in result:  # a dict, as verl's functions may return
        numbers_of = {str(key): value for key, value in result.items() if isinstance(value, numbers.Real)}
        parts = {key: float(value) for key, value in numbers_of.items() if key != "score" and math.isfinite(value)}
        value = _finite(path, result["score"])
        return Judgement(value=value, verdict=f"{value:g}", parts=parts)
    value = _finite(path, result)
    if _decides(load_reward(path)):
        return Judgement(value=value, verdict="correct" if value else "wrong", correct=bool(value))
    return Judgement(value=value, verdict=f"{value:g}")


async def _wait(result: Any) -> Any:
    return await result


def _finite(path: object, value: object) -> float:
    # `numbers` does not know NumPy's bools and torch's scalars as numbers
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
    """Return whether the function's annotation promises a bool or a `Judgement`."""
    try:
        promised = inspect.signature(function).return_annotation
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return promised in (bool, Judgement, "bool", "Judgement")


def python_verifier(config: PythonReward, pool: WorkerPool) -> Verifier:
    """Build the verifier, which calls the function in the pool.

    The function is imported at once, so that a mistake is reported before training.

    Raises:
        ConfigError: The function cannot be imported, or does not accept the arguments that it will receive.
    """
    source = function_of(config)
    function = load_reward(source)
    check_signature(function, source, config.options)
    places = asyncio.Semaphore(config.max_concurrent)
    runs_in = source.runs_in(pool) if isinstance(source, PickledFunction) else pool

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (given_values(rollout.text, rollout.prompt), config.options)
        if not inspect.iscoroutinefunction(function):
            return await in_pool(runs_in, call_reward, source, *arguments, time_limit_s=config.time_limit_s)
        async with places:
            return await in_pool(runs_in, await_reward, source, *arguments, time_limit_s=config.time_limit_s)

    return Verifier(judge=judge, decides=_decides(function))
